"""Unequal classes: weights for the loss, and an order in which every class comes equally often."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jumbo_vit.errors import UserError


def class_weights(counts: Sequence[int], names: Sequence[str]) -> list[float]:
    """N / (C n_c) for each of C classes with n_c of N pictures: every class weighs N / C, and the mean picture 1.

    Raises:
        UserError: A class has no picture, and so no frequency.
    """
    _all_present(counts, names)
    total = sum(counts)
    return [total / (len(counts) * count) for count in counts]


def label_weights(counts: Sequence[int], names: Sequence[str], pictures: int) -> list[tuple[float, float]]:
    """For several labels a picture: each label is a question of two classes, and these are their `class_weights`.

    Of a label that every picture has there is nothing to weigh against; it weighs 1.

    Returns:
        For each label the weight where it is absent, and where it is present.

    Raises:
        UserError: No picture has a label.
    """
    _all_present(counts, names)
    return [
        (pictures / (2 * (pictures - count)), pictures / (2 * count)) if count < pictures else (1.0, 1.0)
        for count in counts
    ]


def _all_present(counts: Sequence[int], names: Sequence[str]) -> None:
    empty = [name for name, count in zip(names, counts, strict=True) if count == 0]
    if empty:
        raise UserError(
            f"no training picture of the class {empty[0]}, so it cannot be balanced: add some, remove the class, or "
            "leave --balance out"
        )


def balanced_order(classes: npt.ArrayLike, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """As many draws as there are pictures, shuffled, in which the classes' numbers of draws differ by one at most.

    Pictures of one class come equally often too, to within one: no picture comes a second time before all of its class
    came once. Where the classes do not divide the draws, chance says which of them get one more.

    Args:
        classes: The class of each picture (N,), without gaps: 0 to C - 1, each at least once.
        rng: Decides everything.

    Returns:
        Indices of pictures (N,).
    """
    classes = np.asarray(classes)
    number = int(classes.max()) + 1
    shares = np.full(number, len(classes) // number)
    shares[rng.permutation(number)[: len(classes) % number]] += 1
    drawn = []
    for class_, share in enumerate(shares):
        members = np.flatnonzero(classes == class_)
        rounds = -(-int(share) // len(members))
        drawn.append(np.concatenate([rng.permutation(members) for _ in range(rounds)])[:share])
    return rng.permutation(np.concatenate(drawn))


def occurrences(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each place of an order, how often the same picture came before."""
    place = np.argsort(order, kind="stable")
    grouped = order[place]
    first = np.searchsorted(grouped, grouped, side="left")
    found = np.empty_like(order)
    found[place] = np.arange(len(order)) - first
    return found
