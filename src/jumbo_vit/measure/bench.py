"""Speed of models side by side: throughput, latency, memory, training step, and their share of the machine's limit."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jumbo_vit.errors import UserError, nearest
from jumbo_vit.measure.profile import shares
from jumbo_vit.measure.roofline import Ceilings, Product, gmacs, measure_ceilings, products
from jumbo_vit.measure.timing import Step, Timing, alternate

Forward = Callable[[Tensor], object]

PRECISIONS = (
    *("fp32", "bf16", "fp16", "autocast"),
    *("optimized-fp32", "optimized-fp32-compiled", "optimized-bf16", "optimized-int8-jumbo"),
)
"""fp32, bf16, fp16: weights and activations in that type, eager. autocast: fp32 weights, products in bfloat16.
optimized-...: what `jumbo_vit.optimize` makes of the model, -compiled: with `compile=True`."""

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One model in one precision at one batch size; seconds and bytes, None where something was not measured.

    `baseline_ratio` is the first row's median time at this batch size over this one's: above 1 is faster. `shares` are
    the parts of a profiled pass by kind of work (`jumbo_vit.measure.profile`).
    """

    model: str
    precision: str
    batch: int
    size: str
    parameters: int
    gmacs: float
    latency_median: float
    latency_p95: float
    spread: float
    images_per_second: float
    baseline_ratio: float
    peak_memory: int | None
    roofline: float
    share_of_limit: float
    train_step_median: float | None = None
    train_step_ratio: float | None = None
    saved_tensors: int | None = None
    shares: dict[str, float] | None = None


def prepared(model: nn.Module, precision: str) -> tuple[nn.Module, Forward]:
    """A model in a precision, as a module and as what is to be timed: pictures in fp32 to an output, without gradient.

    Raises:
        UserError: An unknown precision, or `optimize` does not know the model.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise UserError(f"precision {precision} is unknown; use {known}{nearest(precision, PRECISIONS)}")
    if precision.startswith("optimized-"):
        from jumbo_vit.fast import optimize

        kept = precision.removeprefix("optimized-").removesuffix("-compiled")
        fast = optimize(model, kept, compile=precision.endswith("-compiled"))  # type: ignore[arg-type]
        return fast, fast
    kind = TYPES[precision]
    if precision == "autocast":
        held = model

        def forward(images: Tensor) -> object:
            with torch.inference_mode(), torch.autocast(images.device.type, kind):
                return held(images)

    else:
        held = model if kind == torch.float32 else copy.deepcopy(model).to(kind)

        def forward(images: Tensor) -> object:
            with torch.inference_mode():
                return held(images.to(kind))

    return held, forward


def training_step(model: nn.Module, images: Tensor, autocast: bool) -> Step:
    """Forward, backward and a fused AdamW update of a copy of the model."""
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)

    def step() -> object:
        optimizer.zero_grad()
        loss_of(trained, images, autocast).backward()
        optimizer.step()
        return None

    return step


def loss_of(model: nn.Module, images: Tensor, autocast: bool) -> Tensor:
    """A cross-entropy on made labels."""
    context: Any = torch.autocast(images.device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        logits: Tensor = model(images)
    return nn.functional.cross_entropy(
        logits.float(), torch.arange(len(images), device=images.device) % logits.shape[1]
    )


def saved_tensors(model: nn.Module, images: Tensor, autocast: bool = False) -> int:
    """Bytes that a forward pass in training keeps for the backward pass, parameters not counted, each storage once."""
    trained = copy.deepcopy(model).train()
    return kept_bytes(trained, lambda: loss_of(trained, images, autocast))


def kept_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that `forward` keeps for its backward pass, without the parameters of `model`, each storage once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no storage is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def peak_memory(step: Step, device: torch.device) -> int | None:
    """Bytes that a call allocates at its highest, beside what is there before; None where nothing counts them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return int(torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    now = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return highest


def compare(
    models: dict[str, nn.Module],
    precisions: list[str],
    batches: list[int],
    size: tuple[int, int, int],
    device: torch.device,
    repeats: int = 15,
    training: bool = False,
    profiled: bool = False,
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Measure every model in every precision at every batch size, alternating within a batch size.

    Returns:
        Rows, sentences on what was left out and why, and the machine's ceilings by precision.
    """
    left_out: list[str] = []
    forms: dict[tuple[str, str], Forward] = {}
    for name, model in models.items():
        for precision in precisions:
            try:
                forms[name, precision] = prepared(model.eval(), precision)[1]
            except UserError as error:
                left_out.append(f"{name} in {precision}: {error}")
    if not forms:
        return [], left_out, {}
    if profiled and device.type != "cpu":
        left_out.append(f"shares of kinds of work: they are read from a CPU's profile, not from {device.type}")
    rows: list[Row] = []
    limits: dict[str, Any] = {}
    for batch in batches:
        images = torch.randn(batch, *size, device=device)
        needs = {name: products(model, images) for name, model in models.items()}
        steps = {f"{name} {precision}": _bound(form, images) for (name, precision), form in forms.items()}
        timings = alternate(steps, repeats, device)
        trainings, bytes_kept = _training(models, images, precisions, repeats, device) if training else ({}, {})
        ceilings = _ceilings([product for need in needs.values() for product in need], precisions, device)
        limits[str(batch)] = {precision: asdict(found) for precision, found in ceilings.items()}
        first = next(iter(timings.values()))
        for (name, precision), form in forms.items():
            timing = timings[f"{name} {precision}"]
            rows.append(
                _row(
                    name,
                    precision,
                    images,
                    models[name],
                    needs[name],
                    timing,
                    first.median / timing.median,
                    peak_memory(_bound(form, images), device),
                    ceilings[precision].seconds(needs[name]),
                    trainings.get((name, precision)),
                    next(iter(trainings.values()), None),
                    bytes_kept.get((name, precision)),
                    _shares(form, images, precision) if profiled else None,
                )
            )
    return rows, left_out, limits


def _shares(form: Forward, images: Tensor, precision: str) -> dict[str, float] | None:
    """Parts of a pass by kind of work; None on a GPU and for compiled code, whose kernels the profiler does not see."""
    if images.device.type != "cpu" or precision.endswith("-compiled"):
        return None
    return shares(_bound(form, images), len(images))


def _bound(form: Forward, images: Tensor) -> Step:
    return lambda: form(images)


def _training(
    models: dict[str, nn.Module], images: Tensor, precisions: list[str], repeats: int, device: torch.device
) -> tuple[dict[tuple[str, str], Timing], dict[tuple[str, str], int]]:
    """Training steps and saved bytes in fp32 and autocast, whichever were asked for."""
    wanted = [precision for precision in precisions if precision in ("fp32", "autocast")]
    pairs = [(name, precision) for name in models for precision in wanted]
    steps = {" ".join(pair): training_step(models[pair[0]], images, pair[1] == "autocast") for pair in pairs}
    timings = alternate(steps, repeats, device) if steps else {}
    kept = {pair: saved_tensors(models[pair[0]], images, pair[1] == "autocast") for pair in pairs}
    return {pair: timings[" ".join(pair)] for pair in pairs}, kept


def _ceilings(all_products: list[Product], precisions: list[str], device: torch.device) -> dict[str, Ceilings]:
    bare = {name: name.removeprefix("optimized-").removesuffix("-compiled") for name in precisions}
    kinds = {name: TYPES.get(kept, torch.bfloat16) for name, kept in bare.items()}
    measured = {kind: measure_ceilings(all_products, kind, device) for kind in sorted(set(kinds.values()), key=str)}
    return {precision: measured[kind] for precision, kind in kinds.items()}


def _row(
    name: str,
    precision: str,
    images: Tensor,
    model: nn.Module,
    needs: list[Product],
    timing: Timing,
    ratio: float,
    memory: int | None,
    roofline: float,
    train: Timing | None,
    first_train: Timing | None,
    kept: int | None,
    parts: dict[str, float] | None,
) -> Row:
    batch = len(images)
    return Row(
        model=name,
        precision=precision,
        batch=batch,
        size="x".join(map(str, images.shape[2:])),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gmacs=gmacs(needs) / batch,
        latency_median=timing.median,
        latency_p95=timing.p95,
        spread=timing.spread,
        images_per_second=batch / timing.median,
        baseline_ratio=ratio,
        peak_memory=memory,
        roofline=roofline,
        share_of_limit=roofline / timing.median,
        train_step_median=train.median if train else None,
        train_step_ratio=first_train.median / train.median if train and first_train else None,
        saved_tensors=kept,
        shares=parts,
    )
