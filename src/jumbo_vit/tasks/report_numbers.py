"""What the report of `evaluate --report` needs beside the scores, collected in the same pass over the pictures.

Letters: N pictures, C classes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import binomtest
from sklearn.metrics import precision_recall_fscore_support
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error

BINS = 15
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassRow:
    """One class: pictures that have it, pictures that were answered with it, and fractions, None where undefined."""

    label: str
    n: int
    given: int
    precision: float | None
    recall: float | None
    f1: float | None
    average_precision: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Bin:
    """Answers with a probability in `low`..`high`: how many, their mean probability, and the share that was right."""

    low: float
    high: float
    count: int
    confidence: float
    right: float


@dataclass(frozen=True)
class Case:
    """One picture and its answer: `index` in the set, true and given classes, the probability, more in words."""

    index: int
    truth: tuple[str, ...]
    given: tuple[str, ...]
    probability: float
    words: str


@dataclass(frozen=True)
class Pair:
    """Pictures of class `truth` that were taken for class `given`, of `n` with that truth; classes by number."""

    truth: int
    given: int
    count: int
    n: int


class Columns:
    """What was seen of each picture: first its number in the set, last whether its logits are finite."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self._batches: list[tuple[Tensor, ...]] = []

    def _column(self, number: int) -> npt.NDArray[Any]:
        if len(self._batches) > 1:
            self._batches = [tuple(torch.cat(parts) for parts in zip(*self._batches, strict=True))]
        return self._batches[0][number].numpy()

    @property
    def index(self) -> Ints:
        return self._column(0)

    @property
    def not_finite(self) -> int:
        """Pictures for which the model gave NaN or infinity: they have no answer."""
        return int((~self._column(-1)).sum())


class MulticlassOutputs(Columns):
    """Of each picture the answer and two probabilities; no more, so that many classes cost no memory."""

    def update(self, logits: Tensor, targets: Tensor, index: Tensor) -> None:
        """Add a batch: logits (B, C), targets (B,), and the pictures' numbers in the set (B,)."""
        logits, targets = logits.cpu().double(), targets.cpu()
        share = logits.softmax(-1)
        given = logits.argmax(-1)
        of_given, of_truth = (share.gather(1, which[:, None])[:, 0] for which in (given, targets))
        self._batches.append((index, targets, given, of_given, of_truth, logits.isfinite().all(-1)))

    @property
    def truth(self) -> Ints:
        return self._column(1)

    @property
    def given(self) -> Ints:
        return self._column(2)

    @property
    def confidence(self) -> Floats:
        return self._column(3)

    def rows(self, numbers: dict[str, Any]) -> list[ClassRow]:
        """One row a class, in the model's order; recall is the score's per-class accuracy."""
        classes = len(self.labels)
        precision, _, f1, _ = precision_recall_fscore_support(
            self.truth, self.given, labels=list(range(classes)), average=None, zero_division=np.nan
        )
        counts, answered = (np.bincount(column, minlength=classes) for column in (self.truth, self.given))
        rows = []
        for number, label in enumerate(self.labels):
            there = bool(counts[number])
            rows.append(
                ClassRow(
                    label,
                    int(counts[number]),
                    int(answered[number]),
                    _defined(precision[number], there),
                    numbers["per_class_accuracy"][label],
                    _defined(f1[number], there),
                )
            )
        return rows

    def pairs(self) -> list[Pair]:
        """The confusions that happened, most frequent first."""
        wrong = self.truth != self.given
        counts = np.bincount(self.truth, minlength=len(self.labels))
        kinds, often = np.unique(np.stack([self.truth[wrong], self.given[wrong]], 1), axis=0, return_counts=True)
        numbered = zip(kinds.tolist(), often.tolist(), strict=True)
        found = [Pair(truth, given, count, int(counts[truth])) for (truth, given), count in numbered]
        return sorted(found, key=lambda pair: (-pair.count, pair.truth, pair.given))

    def confusion(self, chosen: list[int]) -> tuple[Ints, int]:
        """Counts (K, K), rows the truth, of the K `chosen` classes; a last row and column hold all others, if any.

        Returns:
            The counts, and how many answers in the very last cell are right.
        """
        place = np.full(len(self.labels), len(chosen))
        place[chosen] = np.arange(len(chosen))
        size = len(chosen) + (len(chosen) < len(self.labels))
        counts = np.bincount(place[self.truth] * size + place[self.given], minlength=size**2).reshape(size, size)
        right = (self.truth == self.given) & (place[self.truth] == len(chosen))
        return counts, int(right.sum())

    def hits(self) -> int:
        return int((self.truth == self.given).sum())

    def wrong(self) -> int:
        return len(self.truth) - self.hits()

    def reliability(self) -> tuple[list[Bin], float]:
        """How often the answer is right, by its probability, and the expected calibration error."""
        return reliability(self.confidence, self.truth == self.given)

    def cases(self, right: bool, at_most: int) -> list[Case]:
        """Wrong answers, the surest first; or right ones, the least sure first."""
        truth, given, confidence, of_truth = self.truth, self.given, self.confidence, self._column(4)
        which = np.flatnonzero((truth == given) == right)
        key = confidence[which] if right else -confidence[which]
        cases = []
        for i in which[np.lexsort((self.index[which], key))][:at_most]:
            words = "" if right else f"truth {probability(float(of_truth[i]))}"
            names = [(self.labels[column[i]],) for column in (truth, given)]
            cases.append(Case(int(self.index[i]), names[0], names[1], float(confidence[i]), words))
        return cases


class MultilabelOutputs(Columns):
    """All probabilities of all pictures; a label is given from its threshold on."""

    def __init__(self, labels: list[str], thresholds: list[float] | None) -> None:
        super().__init__(labels)
        self.thresholds = np.array(thresholds or [0.5] * len(labels))

    def update(self, logits: Tensor, targets: Tensor, index: Tensor) -> None:
        """Add a batch: logits and targets (B, C), and the pictures' numbers in the set (B,)."""
        logits = logits.cpu().double()
        self._batches.append((index, targets.cpu() > 0, logits.sigmoid(), logits.isfinite().all(-1)))

    @property
    def truth(self) -> npt.NDArray[np.bool_]:
        return self._column(1)

    @property
    def shares(self) -> Floats:
        return self._column(2)

    @property
    def given(self) -> npt.NDArray[np.bool_]:
        return self.shares >= self.thresholds

    def rows(self, numbers: dict[str, Any]) -> list[ClassRow]:
        """One row a label, in the model's order; average precision is the score's."""
        truth, given = self.truth, self.given
        rows = []
        for number, label in enumerate(self.labels):
            precision, recall, f1, _ = precision_recall_fscore_support(
                truth[:, number], given[:, number], labels=[True], average=None, zero_division=np.nan
            )
            there = bool(truth[:, number].any())
            rows.append(
                ClassRow(
                    label,
                    int(truth[:, number].sum()),
                    int(given[:, number].sum()),
                    _defined(precision[0], there),
                    _defined(recall[0], there),
                    _defined(f1[0], there),
                    numbers["per_class_ap"][label],
                    float(self.thresholds[number]),
                )
            )
        return rows

    def wrong(self) -> int:
        """Pictures with at least one label missed or given wrongly."""
        return int((self.truth != self.given).any(1).sum())

    def reliability(self) -> tuple[list[Bin], float]:
        """How often a label is there, by its probability, over all labels of all pictures; and the error."""
        return reliability(self.shares.ravel(), self.truth.ravel())

    def cases(self, right: bool, at_most: int) -> list[Case]:
        """Pictures with a wrong label, the surest mistake first; or right ones, the least sure first.

        The probability of a decision is the label's where it was given, and one minus it where it was not.
        """
        truth, given, index = self.truth, self.given, self.index
        sure = np.where(given, self.shares, 1 - self.shares)
        wrong = truth != given
        # Of a wrong picture only the wrong decisions count, of a right one all.
        value = sure.min(1) if right else np.where(wrong, sure, -1).max(1)
        label = sure.argmin(1) if right else np.where(wrong, sure, -1).argmax(1)
        which = np.flatnonzero(wrong.any(1) != right)
        cases = []
        for i in which[np.lexsort((index[which], value[which] if right else -value[which]))][:at_most]:
            name = self.labels[label[i]]
            said = "given" if given[i, label[i]] else "not given"
            true, answered = (
                tuple(name for name, there in zip(self.labels, table[i], strict=True) if there)
                for table in (truth, given)
            )
            cases.append(Case(int(index[i]), true, answered, float(value[i]), f"{name} {said}"))
        return cases


Outputs = MulticlassOutputs | MultilabelOutputs


def _defined(value: float, there: bool) -> float | None:
    """None for a class that no picture has, and where nothing was given that could be right."""
    return float(value) if there and not np.isnan(value) else None


def reliability(confidence: Floats, right: npt.NDArray[np.bool_]) -> tuple[list[Bin], float]:
    """Bins of equal width over the probabilities (N,), and torchmetrics' expected calibration error (norm l1)."""
    # torchmetrics counts an exact 1 in a bin of its own, beyond the last.
    values = torch.from_numpy(confidence).clamp(max=1 - 1e-12)
    hits = torch.from_numpy(right).long()
    edges = torch.linspace(0, 1, BINS + 1, dtype=values.dtype)
    place = torch.bucketize(values, edges, right=True) - 1
    count, total, good = (torch.bincount(place, w, BINS) for w in (None, values, hits.double()))
    bins = [
        Bin(low, high, int(n), s / n if n else 0.0, g / n if n else 0.0)
        for low, high, n, s, g in zip(
            edges[:-1].tolist(), edges[1:].tolist(), count.tolist(), total.tolist(), good.tolist(), strict=True
        )
    ]
    return bins, float(binary_calibration_error(values, hits, n_bins=BINS, norm="l1"))


def interval(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    found = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def probability(value: float, digits: int = 1) -> str:
    """In per cent. Only an exact 0 or 1 is called 0 or 100 %, whatever rounding says."""
    if not np.isfinite(value):
        return "undefined"
    step = 10.0**-digits
    if 0 < value * 100 < step / 2:
        return f"< {step:.{digits}f} %"
    if 100 - step / 2 <= value * 100 < 100:
        return f"> {100 - step:.{digits}f} %"
    return f"{value * 100:.{digits}f} %"
