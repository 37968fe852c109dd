"""Heads on stored features, many at once, and k-NN.

What is unusual: all heads are one tensor program. Those that read the same features share the batch norm (which has no
weights, so it is the same for all of them) and are one matrix product; those of other features read the same batches.
Each head's gradient is its own, so the result is that of training it alone.

Source of the head: "Masked Autoencoders Are Scalable Vision Learners" (2022), appendix A.1: batch norm without affine
weights, eps 1e-6, a linear layer that starts at 0.01. Source of k-NN: "Unsupervised Feature Learning via
Non-Parametric Instance Discrimination" (2018), k nearest by cosine, each voting with exp(cosine / 0.07).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.optim.lars import Lars
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.features import CLASS, HEAD, PATCHES, PIECES, Features

MEAN = "mean"
TEMPERATURE = 0.07
BASE_BATCH = 256
"""What rates are stated for."""
_ROWS = 1024  # at a time, where nothing is learned
_WARMUP = 0.1  # of the updates


@dataclass(frozen=True)
class Plan:
    """How heads are trained and chosen.

    Args:
        rates: Learning rates for a batch of 256; what is used grows with the batch.
        opts: "sgd", "lars", or both.
        epochs: Passes over the features.
        batch_size: Rows in an update.
        weight_decay: Of the heads' matrices.
        neighbours: k; 0 for no k-NN.
        tune_fraction: Share of the training pictures that chooses.
        seed: Of first weights, order and choice.

    Raises:
        UserError: A number outside its range.
    """

    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    opts: tuple[str, ...] = ("sgd",)
    epochs: int = 50
    batch_size: int = 1024
    weight_decay: float = 0.0
    neighbours: int = 20
    tune_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (
                "rates",
                self.rates,
                bool(self.rates) and all(0 < rate < 1e6 for rate in self.rates),
                "above 0, below 1e6",
            ),
            ("opt", self.opts, bool(self.opts) and set(self.opts) <= {"sgd", "lars"}, "sgd, lars or both"),
            ("epochs", self.epochs, self.epochs >= 1, "at least 1"),
            ("batch-size", self.batch_size, self.batch_size >= 2, "at least 2, for the batch norm"),
            ("weight-decay", self.weight_decay, 0 <= self.weight_decay < 1e300, "0 or more"),
            ("knn", self.neighbours, self.neighbours >= 0, "0 or more"),
            ("tune-fraction", self.tune_fraction, 0 < self.tune_fraction < 1, "between 0 and 1"),
            ("seed", self.seed, self.seed >= 0, "0 or more"),
        )
        for name, value, good, words in checks:
            if not good:
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise UserError(f"--{name} is {shown}, but must be {words}")

    def specs(self) -> list["Spec"]:
        """The heads on each kind of features."""
        return [Spec(opt, rate) for opt in self.opts for rate in dict.fromkeys(self.rates)]


class Spec(NamedTuple):
    """One head: how it is trained."""

    opt: str
    rate: float


class Source:
    """Stored features by kind.

    Args:
        features: Of a set of pictures.
        labels: The class of each, (n,).
        wide: The name of global tokens and patch mean together.
        has_class_token: Whether the first of the global tokens is a class token.
        device: Where batches are given.
    """

    def __init__(
        self, features: Features, labels: Tensor, wide: str, has_class_token: bool, device: torch.device
    ) -> None:
        self.features, self.labels, self.wide, self.device = features, labels.to(device), wide, device
        columns, several = features.trunk.columns, features.trunk.num_global > 1
        self.parts = tuple(name for name in (PIECES, PATCHES, HEAD) if name in columns)
        found = {name: columns[name][1] - columns[name][0] for name in self.parts}
        widths = {PIECES: found.get(PIECES), MEAN: None, CLASS: None}
        if PIECES in found:
            dim = features.trunk.dim
            widths[wide] = found[PIECES] + dim
            widths[MEAN] = dim if several else None
            if has_class_token:
                widths[CLASS] = dim
                widths[PIECES] = found[PIECES] if several else None  # a lone class token is no list of pieces
        widths |= {name: found[name] for name in (PATCHES, HEAD) if name in found}
        self.widths: dict[str, int] = {name: width for name, width in widths.items() if width is not None}

    def batch(self, places: npt.NDArray[Any]) -> dict[str, Tensor]:
        """Every kind of features (B, width) of some pictures."""
        trunk = self.features.trunk
        rows = self.features.rows(places, *self.parts).to(self.device)
        views: dict[str, Tensor] = {}
        at = 0
        for name in self.parts:
            width = trunk.columns[name][1] - trunk.columns[name][0]
            views[name] = rows[:, at : at + width]
            at += width
        if PIECES in views:
            pieces = views[PIECES]
            views[self.wide] = rows[:, : pieces.shape[1] + trunk.dim]  # the patch mean lies behind the pieces
            views[MEAN] = pieces.unflatten(1, (trunk.num_global, trunk.dim)).mean(1)
            views[CLASS] = pieces[:, : trunk.dim]
        return {kind: views[kind] for kind in self.widths}


class Bank(nn.Module):
    """All heads on one kind of features: (B, width) -> (heads, B, num_classes)."""

    def __init__(self, width: int, num_classes: int, specs: Sequence[Spec], seed: int) -> None:
        super().__init__()
        self.specs = list(specs)
        self.norm = nn.BatchNorm1d(width, affine=False, eps=1e-6)
        # All heads start alike, so that rates alone tell them apart.
        torch.manual_seed(seed)
        first = trunc_normal_(torch.empty(num_classes, width), std=0.01)
        self.weights = nn.ParameterList(nn.Parameter(first.clone()) for _ in specs)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(num_classes)) for _ in specs)

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), torch.cat(list(self.weights)), torch.cat(list(self.biases)))
        by_head: Tensor = logits.unflatten(1, (len(self.specs), -1)).transpose(0, 1)
        return by_head

    def folded(self, number: int) -> tuple[Tensor, Tensor]:
        """A head with the batch norm in it: weight (num_classes, width) and bias (num_classes,) on plain features."""
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None and var is not None
        weight = self.weights[number].detach().double() / (var.double() + self.norm.eps).sqrt()
        return weight.float(), (self.biases[number].detach().double() - weight @ mean.double()).float()


def fit(
    source: Source, places: npt.NDArray[Any], specs: dict[str, list[Spec]], num_classes: int, plan: Plan
) -> dict[str, Bank]:
    """Train heads side by side.

    Args:
        source: The features.
        places: The pictures to train on, two at least.
        specs: The heads on each kind of features.
        num_classes: Classes.
        plan: Epochs, batch, weight decay, seed.

    Returns:
        The heads on each kind, in evaluation mode.
    """
    seeds = {kind: mix_seed(plan.seed, "probe", source.widths[kind]) for kind in specs}
    banks = {
        kind: Bank(source.widths[kind], num_classes, own, seeds[kind]).to(source.device) for kind, own in specs.items()
    }
    updates = max(1, math.ceil(len(places) / plan.batch_size))
    optimizers = _optimizers(banks, min(plan.batch_size, len(places)) / BASE_BATCH, plan.weight_decay)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(plan.epochs * updates)) for optimizer in optimizers
    ]
    for epoch in range(plan.epochs):
        order = np.random.default_rng(mix_seed(plan.seed, "probe order", epoch)).permutation(places)
        for part in np.array_split(order, updates):  # all of about the same size: batch norm wants no small rest
            targets = source.labels[torch.from_numpy(part).to(source.device)]
            views = source.batch(part)
            loss = torch.stack([_loss(bank(views[kind]), targets).sum() for kind, bank in banks.items()]).sum()
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
    return {kind: bank.eval() for kind, bank in banks.items()}


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """(heads, B, C), (B,) -> the mean cross-entropy of each head (heads,)."""
    heads, rows, _ = logits.shape
    each = F.cross_entropy(logits.flatten(0, 1), targets.repeat(heads), reduction="none")
    means: Tensor = each.unflatten(0, (heads, rows)).mean(1)
    return means


def _optimizers(banks: dict[str, Bank], scale: float, decay: float) -> list[torch.optim.Optimizer]:
    groups: dict[str, list[dict[str, Any]]] = {"sgd": [], "lars": []}
    for bank in banks.values():
        for spec, weight, bias in zip(bank.specs, bank.weights, bank.biases, strict=True):
            rate = spec.rate * scale
            groups[spec.opt].append({"params": [weight], "lr": rate, "weight_decay": decay})
            groups[spec.opt].append({"params": [bias], "lr": rate, "weight_decay": 0.0})
    for group in groups["lars"][::2]:
        group["always_adapt"] = True  # timm adapts to the norm only with weight decay unless told so; biases never
    made: list[torch.optim.Optimizer] = []
    if groups["sgd"]:
        made.append(torch.optim.SGD(groups["sgd"], momentum=0.9))
    if groups["lars"]:
        made.append(Lars(groups["lars"], momentum=0.9))
    return made


def _schedule(total: int) -> Any:
    warmup = max(1, round(_WARMUP * total))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return factor


@torch.no_grad()
def outputs(source: Source, places: npt.NDArray[Any], banks: dict[str, Bank]) -> dict[str, Tensor]:
    """The logits of every head, (heads, n, num_classes) by kind of features, on the CPU."""
    found: dict[str, list[Tensor]] = {kind: [] for kind in banks}
    for start in range(0, len(places), _ROWS):
        views = source.batch(places[start : start + _ROWS])
        for kind, bank in banks.items():
            found[kind].append(bank(views[kind]).cpu())
    return {kind: torch.cat(parts, 1) for kind, parts in found.items()}


@torch.no_grad()
def nearest_vote(train: Source, val: Source, kind: str, num_classes: int, neighbours: int) -> Tensor:
    """The class (n,) that the nearest training pictures vote for, for each held-out picture."""
    k = min(neighbours, len(train.features))
    answers = []
    for start in range(0, len(val.features), _ROWS):
        end = min(start + _ROWS, len(val.features))
        queries = F.normalize(val.batch(np.arange(start, end))[kind])
        best, labels = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long)
        best, labels = best.to(train.device), labels.to(train.device)
        for low in range(0, len(train.features), 8 * _ROWS):
            high = min(low + 8 * _ROWS, len(train.features))
            near = queries @ F.normalize(train.batch(np.arange(low, high))[kind]).T
            best = torch.cat([best, near], 1)
            labels = torch.cat([labels, train.labels[low:high].expand(len(queries), -1)], 1)
            best, chosen = best.topk(min(k, best.shape[1]), dim=1)
            labels = labels.gather(1, chosen)
        votes = torch.zeros(len(queries), num_classes, device=train.device)
        votes.scatter_add_(1, labels, ((best - 1) / TEMPERATURE).exp())
        answers.append(votes.argmax(1))
    return torch.cat(answers).cpu()
