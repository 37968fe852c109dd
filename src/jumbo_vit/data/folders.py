"""A tree of class folders as a set of pictures."""

import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from jumbo_vit.data.find import Skipped, find_images, is_hidden, order_key
from jumbo_vit.data.records import ImageSet, Sample, listed, relative_name
from jumbo_vit.errors import UserError, nearest


def composed(name: str) -> str:
    """The one spelling of a class name: accents composed (NFC), as macOS and Linux write them differently."""
    return unicodedata.normalize("NFC", name)


def class_index(classes: Iterable[str]) -> dict[str, int]:
    """Class name, in its one spelling, to its number."""
    return {composed(name): number for number, name in enumerate(classes)}


def scan_tree(root: str | Path, classes: Sequence[str] | None = None, base: Path | None = None) -> ImageSet:
    """The pictures below `root`, labelled by the top-level folder they are in; deeper folders belong to it.

    Without `classes` they are the folders that hold pictures, sorted as plain strings. With `classes`, those of a
    trained model, a picture gets its label by the folder's name: an unknown name is an error, a missing one is not.
    Pictures beside the class folders are skipped. Names are relative to `base`, by default `root`.
    """
    top = Path(root).expanduser().absolute()
    base = top if base is None else base
    paths, skipped = find_images(top)
    if not paths:
        raise UserError(f"there are no pictures in {root}{_first_reason(skipped)}")
    folders: dict[str, list[str]] = {}
    loose: list[str] = []
    deeper = ""
    for path in paths:
        parts = path.parts[len(top.parts) :]
        if len(parts) == 1:
            loose.append(str(path))
        else:
            folders.setdefault(parts[0], []).append(str(path))
            deeper = deeper or ("/".join(parts[:-1]) if len(parts) > 2 else "")
    _refuse_equal_names(root, folders)
    names = sorted(composed(folder) for folder in folders) if classes is None else list(classes)
    notes = _notes(top, folders, loose, deeper, names if classes is not None else None)
    if not folders:
        raise UserError(
            f"{root} holds pictures but no class folders: put each class into a folder of its own, named after it"
        )
    if classes is None and len(names) == 1:
        raise UserError(f"{root} holds one class only, {names[0]}: training needs at least two class folders")
    number = class_index(names)
    unknown = sorted(folder for folder in folders if composed(folder) not in number)
    if unknown:
        raise UserError(
            f"the folder {unknown[0]} in {root} is none of the model's classes{nearest(unknown[0], names)}; they are "
            f"{listed(names)}: rename or remove {'it' if len(unknown) == 1 else listed(unknown)}"
        )
    samples = [
        Sample(path, (number[composed(folder)],))
        for folder in sorted(folders, key=order_key)
        for path in folders[folder]
    ]
    back = relative_name(str(top), base)
    skipped = [Skipped(item.path if back == "." else f"{back}/{item.path}", item.reason) for item in skipped]
    skipped += [Skipped(relative_name(path, base), "lies beside the class folders, in none of them") for path in loose]
    return ImageSet(names, samples, skipped, notes, base)


def _first_reason(skipped: list[Skipped]) -> str:
    if not skipped:
        return ": give a folder with one folder of pictures a class"
    return f" ({len(skipped)} other files, first {skipped[0].path}: {skipped[0].reason})"


def _refuse_equal_names(root: str | Path, folders: Iterable[str]) -> None:
    spelled: dict[str, str] = {}
    for folder in folders:
        if spelled.setdefault(composed(folder), folder) != folder:
            raise UserError(
                f"two class folders in {root} have the same name, {composed(folder)}, spelled in different Unicode "
                "forms: merge or rename one"
            )


def _notes(
    top: Path, folders: Iterable[str], loose: Sequence[str], deeper: str, expected: Sequence[str] | None
) -> list[str]:
    present = {composed(folder) for folder in folders}
    notes = []
    empty = sorted({composed(name) for name in subfolders(top)} - present)
    if empty:
        notes.append(f"{top.name}: folders without pictures are no classes: {listed(empty)}.")
    if deeper:
        notes.append(
            f"{top.name}: folders inside a class folder belong to it: {deeper} is class {deeper.partition('/')[0]}."
        )
    if loose:
        notes.append(f"{top.name}: {len(loose)} pictures lie beside the class folders and are skipped.")
    missing = [name for name in expected or () if composed(name) not in present]
    if missing:
        notes.append(f"{top.name}: no pictures of {listed(missing)}.")
    return notes


def subfolders(folder: Path) -> list[str]:
    """Names of the visible folders in `folder`, in order; none if it cannot be read."""
    try:
        return sorted(
            (entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name)), key=order_key
        )
    except OSError:
        return []
