"""`--precision auto`: which of the forms that were written and measured is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

QUANTISED = frozenset({"int8"})

WORTH = 0.05
"""A less exact form must be faster by this share: less is within what a machine's load changes."""


@dataclass(frozen=True)
class Measured:
    """One form.

    Args:
        precision: Its precision.
        seconds: Median time of a batch.
        drop: What it loses: accuracy in fractions, or without labels the share of other answers.
        fault: Why it cannot be taken, or "".
    """

    precision: str
    seconds: float
    drop: float
    fault: str = ""


def choose(forms: Sequence[Measured], max_drop: float) -> tuple[Measured | None, dict[str, str]]:
    """The fastest form that loses at most `max_drop`; forms are given from the most exact to the least.

    A less exact form is taken over the choice so far only if it is faster by `WORTH`. A quantised one must moreover be
    faster than every form that is not, also those that were left out for another reason.

    Returns:
        The form, or None if each has a fault, and for each other form why it was not taken.
    """
    best: Measured | None = None
    reasons: dict[str, str] = {}
    plain = [form.seconds for form in forms if form.precision not in QUANTISED and not form.fault]
    for form in forms:
        if form.fault:
            reasons[form.precision] = form.fault
        elif form.drop > max_drop + 1e-9:
            reasons[form.precision] = f"loses {form.drop:.4f}, more than {max_drop:g} (--max-drop)"
        elif form.precision in QUANTISED and plain and form.seconds >= min(plain):
            reasons[form.precision] = "is not faster than without quantisation"
        elif best is not None and form.seconds > best.seconds * (1 - WORTH):
            reasons[form.precision] = f"is not {WORTH:.0%} faster than {best.precision}"
        else:
            if best is not None:
                reasons[best.precision] = f"is slower than {form.precision}"
            best = form
    return best, reasons


def measure(calls: Sequence[Callable[[], object]], rounds: int = 15, seconds: float = 20.0) -> list[float]:
    """Median seconds of each call. They take turns, so that a machine's other load meets all of them alike.

    Two rounds go first and are not counted. At most about `seconds` in all, but at least three rounds.
    """
    times: list[list[float]] = [[] for _ in calls]
    start = perf_counter()
    for number in range(rounds + 2):
        for call, own in zip(calls, times, strict=True):
            began = perf_counter()
            call()
            if number >= 2:
                own.append(perf_counter() - began)
        if number >= 4 and perf_counter() - start > seconds:
            break
    return [median(own) for own in times]
