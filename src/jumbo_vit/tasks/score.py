"""Scores as totals over a whole set: independent of batches, and of processes once reduced."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score

Reduce = Callable[[Tensor], Tensor]
Gather = Callable[[Tensor], Tensor]


class Score(Protocol):
    """Collects logits and targets, then gives named numbers."""

    metric: str

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, C), targets (B,) class indices or (B, C) of 0 and 1."""
        ...

    def result(self, total: Reduce, gather: Gather) -> dict[str, Any]:
        """The numbers; `total` sums a tensor over the processes, `gather` concatenates one along its first axis."""
        ...


def as_is(x: Tensor) -> Tensor:
    """Reduction and gathering for a single process."""
    return x


class MulticlassScore:
    """top-1, top-5, balanced and per-class accuracy as fractions, and the mean cross-entropy.

    top-5 is left out for five classes or fewer, where it says nothing. Balanced accuracy is the mean over the classes
    that occur; classes that do not occur have per-class accuracy None.
    """

    metric = "top1"

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        classes = len(labels)
        self.hits = torch.zeros(classes, dtype=torch.float64)
        self.counts = torch.zeros(classes, dtype=torch.float64)
        # Loss, hits among the first five, samples whose logits are not finite.
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, C) in any float type, targets (B,) of class indices."""
        logits, targets = logits.cpu().double(), targets.cpu()
        hit = (logits.argmax(-1) == targets).double()
        self.hits.index_add_(0, targets, hit)
        self.counts.index_add_(0, targets, torch.ones_like(hit))
        self.sums[0] += F.cross_entropy(logits, targets, reduction="sum")
        self.sums[2] += (~logits.isfinite().all(-1)).sum()
        if len(self.labels) > 5:
            self.sums[1] += (logits.topk(5).indices == targets[:, None]).any(-1).sum()

    def result(self, total: Reduce = as_is, gather: Gather = as_is) -> dict[str, Any]:
        """The numbers of the whole set; NaN for a set without samples, or where any logit is not finite."""
        hits, counts, sums = total(self.hits), total(self.counts), total(self.sums)
        if sums[2]:  # argmax of NaN is the first class: such a model must not look like a good one
            hits, sums = hits * math.nan, sums * math.nan
        n = float(counts.sum())
        there = counts > 0
        recall = hits[there] / counts[there]
        numbers: dict[str, Any] = {"top1": float(hits.sum()) / n if n else float("nan")}
        if len(self.labels) > 5:
            numbers["top5"] = float(sums[1]) / n if n else float("nan")
        numbers["balanced_accuracy"] = float(recall.mean()) if n else float("nan")
        numbers["loss"] = float(sums[0]) / n if n else float("nan")
        numbers["n"] = int(n)
        each = zip(self.labels, hits.tolist(), counts.tolist(), strict=True)
        numbers["per_class_accuracy"] = {label: hit / count if count else None for label, hit, count in each}
        return numbers


class MultilabelScore:
    """Mean average precision, macro and micro F1 at the labels' thresholds, and the mean binary cross-entropy.

    Classes without a positive sample have no average precision: they are left out of the mean and listed as absent.
    """

    metric = "map"

    def __init__(self, labels: list[str], thresholds: list[float] | None = None) -> None:
        self.labels = labels
        self.thresholds = torch.tensor(thresholds or [0.5] * len(labels), dtype=torch.float64)
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, C), targets (B, C) of 0 and 1."""
        self.logits.append(logits.cpu().double())
        self.targets.append(targets.long().cpu())

    def result(self, total: Reduce = as_is, gather: Gather = as_is) -> dict[str, Any]:
        """The numbers of the whole set; NaN for a set without samples, or where any logit is not finite."""
        classes = len(self.labels)
        empty = torch.zeros(0, classes)
        logits = gather(torch.cat([*self.logits, empty.double()]))
        targets = gather(torch.cat([*self.targets, empty.long()]))
        there = targets.sum(0) > 0
        numbers: dict[str, Any] = {"map": float("nan"), "f1_macro": float("nan"), "f1_micro": float("nan")}
        loss, precision = float("nan"), torch.full((classes,), float("nan"))
        if bool(there.any()) and bool(logits.isfinite().all()):
            probabilities = logits.sigmoid()
            given = (probabilities >= self.thresholds).long()
            if classes == 1:
                # torchmetrics' multi-label form wants two columns or more; a second, empty class changes no other.
                probabilities, given, targets = (F.pad(x, (0, 1)) for x in (probabilities, given, targets))
            width = probabilities.shape[1]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "No positive samples")  # of absent classes, which are listed
                precision = multilabel_average_precision(probabilities, targets, width, average="none")[:classes]
            f1 = multilabel_f1_score(given, targets, width, average="none")[:classes]
            micro = multilabel_f1_score(given, targets, width, average="micro")
            numbers = {
                "map": float(precision[there].mean()),
                "f1_macro": float(f1[there].mean()),
                "f1_micro": float(micro),
            }
            loss = float(F.binary_cross_entropy_with_logits(logits, targets[:, :classes].double()))
        numbers["loss"] = loss
        numbers["n"] = len(logits)
        each = zip(self.labels, precision.tolist(), there.tolist(), strict=True)
        numbers["per_class_ap"] = {label: value if present else None for label, value, present in each}
        numbers["absent"] = [label for label, present in zip(self.labels, there.tolist(), strict=True) if not present]
        return numbers


def new_score(task: str, labels: list[str], thresholds: list[float] | None = None) -> Score:
    """The score of a task; `thresholds` are the probabilities from which labels are given, 0.5 where not set."""
    return MulticlassScore(labels) if task == "multiclass" else MultilabelScore(labels, thresholds)
