"""Which widths D and which J reach a wanted speed on this machine: a cost model, fitted to measurements made here.

What is unusual: nothing is looked up. A dozen shallow models of several D and J are timed, a sum of seven costs with
non-negative prices is fitted to the times (in relative terms), and every D and J is priced with it. What then fits is
built at full depth and measured, so that each line shows prediction and truth. The paper leaves the choice of J to
trial (section 5); this says which trials are worth making.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import timm
import torch

import jumbo_vit.registry  # noqa: F401  (registers the models)
from jumbo_vit.measure.bench import prepared
from jumbo_vit.measure.timing import alternate

WIDTHS = (64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768)
LARGEST_JUMBO = 12
BASE = "jumbo_vit_tiny_patch16_224"
DEPTH = 12
# (D, J, depth): two depths tell a layer's costs from the model's.
_SAMPLES = (
    *((64, 1, 2), (64, 10, 4), (96, 6, 2), (128, 3, 4), (192, 1, 4), (192, 6, 2), (192, 12, 2)),
    *((320, 4, 2), (384, 1, 2), (384, 6, 2), (512, 3, 2)),
)


@dataclass(frozen=True)
class Workload:
    """What has to be fast: `batch` square pictures of `pixels` in a precision of `measure.bench`, on a device."""

    pixels: int
    batch: int
    precision: str
    device: torch.device
    num_classes: int = 1000
    patch: int = 16


@dataclass(frozen=True)
class Choice:
    """A width and a J, with the seconds a batch is predicted to take, and took where it was measured."""

    dim: int
    num_jumbo: int
    predicted: float
    parameters: int | None = None
    measured: float | None = None


def heads(dim: int) -> int:
    """Heads of width 32 in narrow models and 64 in others, as the paper's sizes have."""
    return dim // 64 if dim >= 192 else max(1, dim // 32)


def costs(dim: int, num_jumbo: int, depth: int, work: Workload) -> npt.NDArray[np.float64]:
    """What a model costs, in numbers that each get a price: (7,).

    Multiply-accumulates of the patches' layers, of attention, and of the Jumbo FFN with the head; weights of the Jumbo
    FFN and the head, read once a layer; values that norms and residuals touch; layers and models to start.
    """
    patches = (work.pixels // work.patch) ** 2
    length, wide = patches + num_jumbo, num_jumbo * dim
    head = (wide + dim) * work.num_classes
    weights = depth * 8 * wide**2 + head
    return np.array(
        [
            work.batch * depth * (4 * length * dim**2 + 8 * patches * dim**2),
            work.batch * depth * 2 * length**2 * dim,
            work.batch * weights,
            weights,
            work.batch * depth * length * dim,
            depth,
            1,
        ],
        dtype=np.float64,
    )


def fit(features: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Non-negative prices (7,) of costs (models, 7) that explain the seconds (models,) best in relative terms."""
    from scipy.optimize import nnls

    size = features.max(axis=0)
    prices, _ = nnls(features / size / seconds[:, None], np.ones(len(seconds)))
    scaled: npt.NDArray[np.float64] = prices / size
    return scaled


def measure(settings: list[tuple[int, int, int]], work: Workload, repeats: int) -> tuple[list[float], list[int]]:
    """Median seconds a batch and parameters of models of (D, J, depth), timed alternating."""
    images = torch.randn(work.batch, 3, work.pixels, work.pixels, device=work.device)
    steps, parameters = {}, []
    for dim, num_jumbo, depth in settings:
        model = timm.create_model(
            BASE,
            embed_dim=dim,
            num_heads=heads(dim),
            num_jumbo=num_jumbo,
            depth=depth,
            patch_size=work.patch,
            img_size=work.pixels,
            num_classes=work.num_classes,
        )
        parameters.append(sum(parameter.numel() for parameter in model.parameters()))
        form = prepared(model.eval().to(work.device), work.precision)[1]
        steps[f"{dim} {num_jumbo} {depth}"] = lambda form=form: form(images)
    timings = alternate(steps, repeats, work.device)
    return [timing.median for timing in timings.values()], parameters


def prices_here(work: Workload, repeats: int = 7) -> tuple[npt.NDArray[np.float64], float]:
    """The prices on this machine, and the median relative error of the fit on the models that were timed."""
    seconds = np.array(measure(list(_SAMPLES), work, repeats)[0])
    features = np.stack([costs(dim, num_jumbo, depth, work) for dim, num_jumbo, depth in _SAMPLES])
    prices = fit(features, seconds)
    return prices, float(np.median(np.abs(features @ prices / seconds - 1)))


def fitting(prices: npt.NDArray[np.float64], limit: float, work: Workload) -> list[Choice]:
    """For each width the largest J whose predicted time a batch is at most `limit` seconds, narrow first."""
    found = []
    for dim in WIDTHS:
        times = [float(costs(dim, j, DEPTH, work) @ prices) for j in range(1, LARGEST_JUMBO + 1)]
        fits = [j for j, time in enumerate(times, start=1) if time <= limit]
        if fits:
            found.append(Choice(dim, fits[-1], times[fits[-1] - 1]))
    return found


def plan(limit: float, work: Workload, repeats: int = 7, at_most: int = 6) -> tuple[list[Choice], float]:
    """The choices that are predicted to take at most `limit` seconds a batch, the widest `at_most` of them measured.

    Returns:
        The choices, narrow first, and the median relative error of the cost model where it was fitted.
    """
    prices, error = prices_here(work, repeats)
    choices = fitting(prices, limit, work)
    tried = choices[-at_most:]
    if not tried:
        return [], error
    measured, parameters = measure([(choice.dim, choice.num_jumbo, DEPTH) for choice in tried], work, repeats)
    confirmed = [
        Choice(choice.dim, choice.num_jumbo, choice.predicted, count, seconds)
        for choice, seconds, count in zip(tried, measured, parameters, strict=True)
    ]
    return choices[: len(choices) - len(tried)] + confirmed, error
