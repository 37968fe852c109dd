"""Pictures without labels: any folder, flat or nested, and what else `--data` takes, with its labels left out."""

import dataclasses
from pathlib import Path

from jumbo_vit.data.find import Skipped, find_images, is_hidden, picture_extensions
from jumbo_vit.data.folders import subfolders
from jumbo_vit.data.listing import HELD_OUT_NAMES
from jumbo_vit.data.records import ImageSet, Sample, Splits, listed, note_shared, relative_name
from jumbo_vit.data.sets import by_lower_name, open_data, stratified_split
from jumbo_vit.data.sources import find_listing
from jumbo_vit.errors import UserError


def open_unlabelled(data: str, seed: int, val_fraction: float) -> Splits:
    """Training and held-out pictures of `data`, without labels and so without classes.

    Of a folder all pictures below it are taken, whatever the folders in it are called. With `train/` in it, in any
    case, those in `train/` are for training, and those in one of `HELD_OUT_NAMES` are held out; without such a folder a
    share of the training pictures is held out by seed. Digits, tables and shards are read as for `train`, and their
    labels are left out.

    Args:
        data: As the user wrote it.
        seed: Fixes which pictures are held out where there is no held-out folder.
        val_fraction: Their share.

    Raises:
        UserError: There is no such folder, or fewer than two pictures in it; or labelled data that cannot be read.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"the held-out fraction must lie between 0 and 1, not {val_fraction}: change --val-fraction")
    if data == "digits" or _is_listing(data):
        splits = open_data(data, "multiclass" if data == "digits" else "multilabel", seed, val_fraction)
        train, val = _without_labels(splits.train), _without_labels(splits.val)
        train.notes.append("The labels of the data are not used.")
        return dataclasses.replace(splits, train=train, val=val)
    path = Path(data).expanduser().absolute()
    folder = _train_folder(path)
    if folder is None:
        whole = _pictures(path, path)
        others = [held_out.name for held_out in by_lower_name(path, HELD_OUT_NAMES)]
        if others:
            whole.notes.append(f"Without a folder train beside it, {listed(others)} is a folder like any other here.")
        return _split(whole, seed, val_fraction)
    train = _pictures(folder, path)
    held_out = next((f for f in by_lower_name(path, HELD_OUT_NAMES) if find_images(f)[0]), None)
    train.notes += _unused(path, {folder.name} | ({held_out.name} if held_out is not None else set()))
    if held_out is None:
        return _split(train, seed, val_fraction)
    return note_shared(Splits(train, _pictures(held_out, path), f"the folder {held_out.name}"))


def _is_listing(data: str) -> bool:
    path = Path(data).expanduser()
    if not path.exists() and not any(sign in data for sign in "*?{["):
        raise UserError(f"there is no {data}: give a folder of pictures")
    return not path.is_dir() or find_listing(data, "multilabel") is not None


def _without_labels(images: ImageSet) -> ImageSet:
    samples = [Sample(sample.path, ()) for sample in images.samples]
    return dataclasses.replace(images, classes=[], samples=samples)


def _train_folder(path: Path) -> Path | None:
    """`train/` if it is the training part: beside a held-out folder, or the only folder. Else it is one like others."""
    found = by_lower_name(path, ("train",))
    if not found:
        return None
    beside = [name for name in subfolders(path) if name != found[0].name]
    if beside and not any(name.lower() in HELD_OUT_NAMES for name in beside):
        return None
    return found[0]


def _unused(path: Path, used: set[str]) -> list[str]:
    """Notes on what lies beside the training folder."""
    notes = []
    folders = [name for name in subfolders(path) if name not in used]
    if folders:
        notes.append(f"Beside the training folder these folders are not used: {listed(folders)}.")
    known = picture_extensions()
    loose = [p.name for p in path.iterdir() if p.is_file() and p.suffix.lower() in known and not is_hidden(p.name)]
    if loose:
        notes.append(f"Beside the training folder {len(loose)} pictures are not used, such as {min(loose)}.")
    return notes


def _pictures(folder: Path, base: Path) -> ImageSet:
    """All pictures below `folder`, named as seen from `base`."""
    paths, skipped = find_images(folder)
    if not paths:
        others = f" ({len(skipped)} other files, first {skipped[0].path}: {skipped[0].reason})" if skipped else ""
        raise UserError(f"there are no pictures in {folder}{others}: give a folder of pictures")
    back = relative_name(str(folder), base)
    skipped = [Skipped(item.path if back == "." else f"{back}/{item.path}", item.reason) for item in skipped]
    result = ImageSet([], [Sample(str(path), ()) for path in paths], skipped, root=base)
    inside = sorted({path.parent.relative_to(folder).as_posix() for path in paths if path.parent != folder})
    if inside:
        result.notes.append(
            f"{folder.name}: the names of its {len(inside)} folders ({listed(inside, 3)}) mean nothing here; all "
            "pictures count alike."
        )
    return result


def _split(whole: ImageSet, seed: int, val_fraction: float) -> Splits:
    if len(whole) < 2:
        raise UserError(
            f"{whole.root} has one picture for training, so none can be held out: add pictures, or a folder val beside "
            "train"
        )
    train, val = stratified_split(whole.labels, 0, val_fraction, seed)
    words = f"{val_fraction:.0%} of the pictures, split with seed {seed}"
    parts = Splits(whole.subset(train), whole.subset(val), words, drawn=True)
    parts.val.skipped.clear()
    parts.val.notes.clear()
    return parts
