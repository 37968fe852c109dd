"""From what a user names after `--data` to sets of pictures: the built-in digits, a folder, or a list of pictures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jumbo_vit.data.find import find_images
from jumbo_vit.data.folders import class_index, composed, scan_tree, subfolders
from jumbo_vit.data.listing import HELD_OUT_NAMES, TRAIN_NAMES, Listing, Task, build_set, check_task, listing_classes
from jumbo_vit.data.records import ImageSet, Sample, Splits, check_images, listed, note_shared
from jumbo_vit.data.sources import find_listing
from jumbo_vit.data.tables import read_table
from jumbo_vit.errors import UserError

__all__ = [
    "HELD_OUT_NAMES",
    "ImageSet",
    "Sample",
    "Splits",
    "Task",
    "check_images",
    "open_data",
    "open_held_out",
    "read_table",
    "scan_tree",
    "stratified_split",
]


def open_data(data: str, task: Task, seed: int, val_fraction: float) -> Splits:
    """Training and held-out pictures of `data`: `digits`, a folder, or what `find_listing` finds (tables, shards).

    A folder is `train/` beside one of `HELD_OUT_NAMES`, in any case, or a tree of class folders; a tree, a `train/`
    alone and a list without a held-out split are split here, by seed and class. A class is known by its name; one that
    only the held-out part has is an error.
    """
    check_task(task)
    if not 0 < val_fraction < 1:
        raise UserError(f"the held-out fraction must lie between 0 and 1, not {val_fraction}: change --val-fraction")
    if data == "digits":
        return _digits(task)
    listing = find_listing(data, task)
    if listing is not None:
        return _open_listing(listing, task, seed, val_fraction)
    path = Path(data).expanduser().absolute()
    _refuse_multilabel_folder(data, task)
    train_folder = _train_folder(path)
    if train_folder is None:
        return _split(scan_tree(path), seed, val_fraction)
    train = scan_tree(train_folder, base=path)
    train.notes += _ignored_folders(path, train_folder)
    held_out, empty = _held_out_folder(path)
    if empty:
        train.notes.append(f"{listed(empty)}: no pictures, so not used as the held-out part.")
    if held_out is None:
        return _split(train, seed, val_fraction)
    return Splits(train, scan_tree(held_out, train.classes, base=path), f"the folder {held_out.name}")


def open_held_out(data: str, task: Task, classes: Sequence[str]) -> ImageSet:
    """The pictures to evaluate a model with these `classes` on: the held-out part if `data` has one, else all of it.

    Of the digits, their held-out fifth; of a list, the rows of a held-out split, if any, else all rows.
    """
    check_task(task)
    if data == "digits":
        return _digits_for(_digits(task).val, classes)
    listing = find_listing(data, task)
    path = Path(data).expanduser().absolute()
    if listing is not None:
        name = _held_out_split(listing)
        found = build_set(listing, listing.rows if name is None else listing.of_split(name), classes)
        found.notes += listing.notes
        if name is None:
            return _whole(found, path.name)
        found.notes.append(f"The held-out part is the split {name}.")
        return found
    _refuse_multilabel_folder(data, task)
    known = class_index(classes)
    train_folder = _train_folder(path)
    held_out, _ = _held_out_folder(path)
    # A class may itself be called "test"; the model knows.
    if held_out is not None and (train_folder is not None or composed(held_out.name) not in known):
        found = scan_tree(held_out, classes, base=path)
        found.notes.append(f"The held-out part is the folder {held_out.name}.")
        return found
    if train_folder is not None and composed(train_folder.name) not in known:
        raise UserError(
            f"{data} has {train_folder.name}/ but no held-out folder ({', '.join(HELD_OUT_NAMES)}): "
            f"add one, or give {train_folder} to score the training pictures"
        )
    return _whole(scan_tree(path, classes), path.name)


def _whole(found: ImageSet, name: str) -> ImageSet:
    found.notes.append(
        f"{name} has no held-out part, so all its {len(found)} pictures are scored; a model that was trained on them "
        "scores too well."
    )
    return found


def _refuse_multilabel_folder(data: str, task: Task) -> None:
    if task == "multilabel":
        raise UserError(
            f"{data} is a folder, which gives each picture one label: for multilabel give a CSV of path and labels "
            "joined by |, or use --task multiclass"
        )


def _digits(task: Task) -> Splits:
    from jumbo_vit.data.digits import digits_splits

    if task == "multilabel":
        raise UserError(
            "digits have one label a picture: use --task multiclass, or a CSV with several labels a picture"
        )
    splits = digits_splits()
    if Path("digits").exists():
        splits.train.notes.append("The built-in digits are used; for the folder of that name here, write ./digits.")
    return splits


def _digits_for(image_set: ImageSet, classes: Sequence[str]) -> ImageSet:
    number = class_index(classes)
    unknown = [name for name in image_set.classes if name not in number]
    if unknown:
        raise UserError(
            f"the digits' class {unknown[0]} is none of the model's classes, {listed(classes)}: give the pictures "
            "that the model was made for by --data FOLDER"
        )
    relabelled = [
        Sample(path, tuple(sorted(number[image_set.classes[label]] for label in labels)))
        for path, labels in image_set.samples
    ]
    image_set.classes, image_set.samples = list(classes), relabelled
    return image_set


def by_lower_name(path: Path, names: Sequence[str]) -> list[Path]:
    """Subfolders of these names in any case, in the order of `names`; an exact name goes first."""
    present = subfolders(path)
    return [
        path / folder
        for name in names
        for folder in sorted((f for f in present if f.lower() == name), key=lambda f: (f != name, f))
    ]


def _train_folder(path: Path) -> Path | None:
    """`train/` if it holds the training part. In a tree of classes (train, car, bus) it may be a class."""
    found = by_lower_name(path, ("train",))
    if not found:
        return None
    others = [name for name in subfolders(path) if name.lower() not in ("train", *HELD_OUT_NAMES)]
    return found[0] if subfolders(found[0]) or not others else None


def _held_out_folder(path: Path) -> tuple[Path | None, list[str]]:
    """The first held-out folder with class folders and pictures, and the names of those before it without."""
    empty: list[str] = []
    for folder in by_lower_name(path, HELD_OUT_NAMES):
        if find_images(folder)[0]:
            # Pictures without class folders: a class of that name, unless a training part stands beside it.
            return (folder if subfolders(folder) or _train_folder(path) else None), empty
        empty.append(folder.name)
    return None, empty


def _ignored_folders(path: Path, train_folder: Path) -> list[str]:
    others = [name for name in subfolders(path) if name.lower() not in (train_folder.name.lower(), *HELD_OUT_NAMES)]
    return [f"Beside {train_folder.name}/ these folders are not used: {listed(others)}."] if others else []


def _held_out_split(listing: Listing) -> str | None:
    present = listing.splits()
    return next((name for name in HELD_OUT_NAMES if name in present), None)


def _open_listing(listing: Listing, task: Task, seed: int, val_fraction: float) -> Splits:
    data, rows = listing.data, listing.of_split(*TRAIN_NAMES)
    if not rows:
        raise UserError(
            f"{data} has no rows to train on: its splits are {listed(listing.splits())}, and train is needed"
        )
    good = [row for row in rows if not row.fault]
    if not good:
        raise UserError(f"none of the {len(rows)} samples in {data} can be used, first {rows[0].path}: {rows[0].fault}")
    train = build_set(listing, rows, listing_classes(data, good, task))
    if not train.samples:
        raise UserError(
            f"none of the {len(rows)} pictures in {data} exist, first {train.skipped[0].path}: "
            "paths count from the table's folder"
        )
    counts = train.class_counts()
    lost = [name for name, count in zip(train.classes, counts, strict=True) if count == 0]
    if lost:
        raise UserError(
            f"no picture of the class {listed(lost)} in {data} exists: correct the paths or remove the lines"
        )
    name = _held_out_split(listing)
    short = Path(data).name
    unused = sorted({*listing.splits()} - {*TRAIN_NAMES, name})
    train.notes += listing.notes
    if unused:
        train.notes.append(f"{short}: rows of these splits are not used: {listed(unused)}.")
    absent = [label for label in listing.named if composed(label) not in train.classes]
    if absent:
        train.notes.append(f"{short}: without a training picture and so no classes: {listed(absent)}.")
    if name is None:
        return _split(train, seed, val_fraction)
    val = build_set(listing, listing.of_split(name), train.classes)
    if not val.samples:
        first = val.skipped[0]
        raise UserError(
            f"none of the pictures of the split {name} in {data} exist, first {first.path}"
            if listing.store is None
            else f"none of the samples of the split {name} in {data} can be used, first {first.path}: {first.reason}"
        )
    return note_shared(Splits(train, val, f"the split {name}"))


def _split(whole: ImageSet, seed: int, val_fraction: float) -> Splits:
    train, val = stratified_split(whole.labels, len(whole.classes), val_fraction, seed)
    single = [name for name, count in zip(whole.classes, whole.class_counts(), strict=True) if count == 1]
    if not val or not train:
        raise UserError(
            f"{whole.root} has one picture a class, so none can be held out: add pictures, or a held-out folder val"
        )
    words = f"{val_fraction:.0%} of the pictures, split with seed {seed}"
    parts = Splits(whole.subset(train), whole.subset(val), words, drawn=True)
    parts.val.skipped.clear()
    parts.val.notes.clear()
    if single:
        parts.train.notes.append(f"With a single picture, which stays in training: {listed(single)}.")
    return note_shared(parts)


def stratified_split(
    labels: Sequence[tuple[int, ...]], num_classes: int, fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices for training and held out, each in rising order, with `fraction` of each class held out.

    Of a class with at least two pictures at least one goes to either side. With several labels a picture, the rarest
    class is served first, which keeps to this as far as the labels let it. Pictures without labels form one class.
    """
    groups: list[list[int]] = [[] for _ in range(num_classes + 1)]
    for index, own in enumerate(labels):
        for label in own or (num_classes,):
            groups[label].append(index)
    rng = np.random.default_rng(seed)
    held_out: dict[int, bool] = {}
    for group in sorted(groups, key=len):  # a stable sort: equal sizes stay in the order of the classes
        wanted = min(max(int(len(group) * fraction + 0.5), 1), len(group) - 1)
        already = sum(held_out.get(index, False) for index in group)
        free = [index for index in group if index not in held_out]
        for place, chosen in enumerate(rng.permutation(len(free)).tolist()):
            held_out[free[chosen]] = place < wanted - already
    return [i for i in range(len(labels)) if not held_out[i]], [i for i in range(len(labels)) if held_out[i]]
