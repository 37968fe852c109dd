"""An exported file against the model it was made from: differences, agreement, and what is still the same model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jumbo_vit.errors import UserError


@dataclass(frozen=True)
class Bound:
    """How far outputs may be from the fp32 model's.

    Args:
        tolerance: Largest value of `Comparison.distance`.
        agreement: Smallest share of equal answers. One picture may always differ, so that few pictures can decide.
    """

    tolerance: float
    agreement: float


BOUNDS = {"fp32": Bound(1e-4, 0.99), "fp16": Bound(0.02, 0.99), "bf16": Bound(0.05, 0.98), "int8": Bound(0.1, 0.98)}
"""By precision. For fp32 the distance is the largest difference over the largest output (at least 1); for the others it
is the norm of the differences over the norm of the outputs, since single values of a rounded model scatter."""


@dataclass(frozen=True)
class Comparison:
    """An exported file's outputs beside the fp32 PyTorch model's on the same pictures.

    Args:
        n: Pictures.
        difference: Largest absolute difference of an output.
        scale: Largest absolute output of the model.
        relative: Norm of the differences over the norm of the outputs.
        agreement: Share of pictures with the same likeliest class; for multilabel, of equal decisions on labels.
        finite: Whether all outputs are.
    """

    n: int
    difference: float
    scale: float
    relative: float
    agreement: float
    finite: bool

    def distance(self, precision: str) -> float:
        """The number that a tolerance is about."""
        return self.difference / max(1.0, self.scale) if precision == "fp32" else self.relative


def compare(outputs: Tensor, expected: Tensor, thresholds: Tensor | None = None) -> Comparison:
    """Compare outputs (N, ...) with those expected.

    Args:
        outputs: An exported file's.
        expected: The model's.
        thresholds: For multilabel, the probability (C,) from which each label is given.
    """
    if outputs.shape != expected.shape:
        raise UserError(
            f"the exported file gives {tuple(outputs.shape)}, where the model gives {tuple(expected.shape)}"
        )
    outputs, expected = outputs.double(), expected.double()
    finite = bool(outputs.isfinite().all())
    gap = (outputs - expected).nan_to_num(nan=torch.inf).abs()
    norm = float(expected.norm())
    return Comparison(
        n=len(expected),
        difference=float(gap.max()),
        scale=float(expected.abs().max()),
        relative=float(gap.norm()) / norm if norm else float(gap.norm()),
        agreement=float((answers(outputs, thresholds) == answers(expected, thresholds)).double().mean()),
        finite=finite,
    )


def answers(outputs: Tensor, thresholds: Tensor | None = None) -> Tensor:
    """The likeliest class (N, ...) of outputs (N, C, ...), or with thresholds the labels given (N, C)."""
    return outputs.argmax(1) if thresholds is None else outputs.sigmoid() >= thresholds


def verdict(found: Comparison, precision: str, tolerance: float | None = None) -> str:
    """Why a file is not the model any more, in words; "" where it is.

    Args:
        found: The comparison.
        precision: The file's.
        tolerance: The user's own, for the distance; agreement is then only reported.
    """
    if not found.finite:
        why = ": fp16 holds no number above 65504, so use bf16 or fp32" if precision == "fp16" else ""
        return f"its outputs are not finite{why}"
    bound = BOUNDS[precision]
    limit, distance = tolerance if tolerance is not None else bound.tolerance, found.distance(precision)
    if not distance <= limit:
        kind = "largest difference over the largest output" if precision == "fp32" else "relative difference"
        return f"the {kind} is {distance:.2g}, above {limit:g} (--tolerance)"
    allowed = max(1 / found.n, 1 - bound.agreement)
    if tolerance is None and 1 - found.agreement > allowed + 1e-9:
        return f"only {found.agreement:.1%} of {found.n} pictures get the same answer, fewer than {bound.agreement:.0%}"
    return ""
