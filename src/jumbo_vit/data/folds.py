"""Folds of the training pictures: disjoint parts, each of which is held out once."""

import dataclasses
import hashlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from jumbo_vit.data.records import ImageSet, Splits, note_shared
from jumbo_vit.data.sets import stratified_split
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.seeds import mix_seed


def fold_set(splits: Splits) -> ImageSet:
    """What is cut into folds: the training part, or all of a set from which the held-out part was only drawn."""
    if not splits.drawn:
        return splits.train
    samples = sorted([*splits.train.samples, *splits.val.samples])
    return dataclasses.replace(splits.train, samples=samples)


def fold_numbers(images: ImageSet, folds: int, seed: int) -> list[int]:
    """The fold, 0 to folds - 1, of each picture: a function of names, labels and seed, with equal shares of each class.

    Pictures of one label are cut by scikit-learn. Where any has several or none, one fold after the other is held out
    of what is left, the rarest label first (`stratified_split`), which comes as near to equal shares as the labels let.

    Raises:
        UserError: A class has fewer pictures than there are folds.
    """
    counts = images.class_counts()
    smallest = min(range(len(counts)), key=counts.__getitem__)
    if counts[smallest] < folds:
        most = f"give --folds {counts[smallest]} at the most, add pictures" if counts[smallest] > 1 else "add pictures"
        raise UserError(
            f"--folds {folds}, but the class {images.classes[smallest]} has {counts[smallest]} training pictures, and "
            f"each fold needs one: {most}, or remove the class"
        )
    if all(len(labels) == 1 for labels in images.labels):
        from sklearn.model_selection import StratifiedKFold

        first = [labels[0] for labels in images.labels]
        parts = StratifiedKFold(folds, shuffle=True, random_state=mix_seed(seed, "folds"))
        numbers = np.empty(len(images), dtype=int)
        for number, (_, held_out) in enumerate(parts.split(np.zeros(len(images)), first)):
            numbers[held_out] = number
        return [int(number) for number in numbers]
    found = [folds - 1] * len(images)
    left = list(range(len(images)))
    for number in range(folds - 1):
        labels = [images.samples[index].labels for index in left]
        fraction = 1 / (folds - number)
        kept, held = stratified_split(labels, len(images.classes), fraction, mix_seed(seed, "folds", number))
        for place in held:
            found[left[place]] = number
        left = [left[place] for place in kept]
    return found


def take_fold(splits: Splits, folds: int, fold: int, seed: int) -> Splits:
    """Training and held-out pictures of one fold, counted from 1; a held-out part of the data's own is left aside.

    Raises:
        UserError: A class has fewer pictures than there are folds.
    """
    images = fold_set(splits)
    numbers = fold_numbers(images, folds, seed)
    train = images.subset([index for index, number in enumerate(numbers) if number != fold - 1])
    val = images.subset([index for index, number in enumerate(numbers) if number == fold - 1])
    val.skipped.clear()
    val.notes.clear()
    if not splits.drawn:
        train.notes.append(
            f"{splits.held_out}, {len(splits.val)} pictures, has no part in training or in choosing the best epoch."
        )
    return note_shared(Splits(train, val, f"fold {fold} of {folds}, seed {seed}", drawn=True))


def shared_by_folds(images: ImageSet, numbers: list[int]) -> list[list[str]]:
    """Groups of pictures, by name, whose files hold the same bytes and which lie in more than one fold.

    Of plain files only those of equal size are read. What cannot be read is left to the check of the run that uses it,
    which names it.
    """
    groups: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    plain = images.root is not None and images.store is None
    sizes = [_size(sample.path) if plain else 0 for sample in images.samples]
    often = {size for size, count in Counter(sizes).items() if count > 1}
    for index, size in enumerate(sizes):
        digest = _digest(images, index) if size in often else None
        if digest is not None:
            groups[size, digest].append(index)
    across = [group for group in groups.values() if len({numbers[index] for index in group}) > 1]
    return [sorted(images.name(index) for index in group) for group in across]


def _size(path: str) -> int:
    return Path(path).stat().st_size if Path(path).is_file() else -1


def _digest(images: ImageSet, index: int) -> bytes | None:
    try:
        # A set without a root is the built-in digits, which have no files.
        content = images.read(index, 1).tobytes() if images.root is None else images.content(index)
    except (OSError, UnreadableImage):
        return None
    return hashlib.sha256(content).digest()
