"""A list of pictures with labels and splits, which tables, shards and datasets all become, as sets of pictures."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jumbo_vit.data.find import Skipped
from jumbo_vit.data.folders import class_index, composed
from jumbo_vit.data.records import ImageSet, Sample, Store, listed, relative_name
from jumbo_vit.errors import UserError, nearest

Task = Literal["multiclass", "multilabel"]
TASKS = ("multiclass", "multilabel")

HELD_OUT_NAMES = ("val", "valid", "validation", "test")
"""Names of a held-out folder or split, in order of preference."""

TRAIN_NAMES = ("train", "training", "")
"""Names of a training split; without a name it is one too."""


class Row(NamedTuple):
    """One picture of a list.

    `where` names its place in messages, `path` is its absolute path or its address in the store, `labels` are names of
    classes, `split` is in lower case ("" for none), and `fault` says why it cannot be a sample ("" if it can).
    """

    where: str
    path: str
    labels: tuple[str, ...]
    split: str
    fault: str = ""


@dataclass
class Listing:
    """What `data`, as the user wrote it, lists; names are relative to `root`, and no store means files.

    `named` are the names of classes that stand in the data themselves, whether or not there are pictures of them.
    """

    data: str
    root: Path
    rows: list[Row]
    store: Store | None = None
    notes: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)

    def splits(self) -> list[str]:
        """The names of the splits, sorted."""
        return sorted({row.split for row in self.rows})

    def of_split(self, *names: str) -> list[Row]:
        """The rows of these splits."""
        return [row for row in self.rows if row.split in names]


def check_task(task: str) -> None:
    """Raises `UserError` unless the task is one of `TASKS`."""
    if task not in TASKS:
        raise UserError(f"the task {task} is not known{nearest(task, TASKS)}: use {' or '.join(TASKS)}")


def listing_classes(data: str | Path, rows: Sequence[Row], task: Task) -> list[str]:
    """All names of classes, sorted as plain strings."""
    names = sorted({label for row in rows for label in row.labels})
    if not names or (task == "multiclass" and len(names) == 1):
        found = f"one class only, {names[0]}" if names else "no labels"
        raise UserError(f"{data} holds {found}: training needs {'at least two' if names else 'some'}")
    return names


def build_set(listing: Listing, rows: Sequence[Row], classes: Sequence[str]) -> ImageSet:
    """The rows as a set of pictures with these classes."""
    root, number = listing.root, class_index(classes)
    result = ImageSet(list(classes), [], root=root, store=listing.store)
    for row in rows:
        for label in row.labels:
            if label not in number:
                raise UserError(
                    f"{row.where}: the label {label} is none of the classes{nearest(label, classes)}; "
                    f"they are {listed(classes)}: correct or remove it"
                )
        file = row.path if listing.store is not None else existing(row.path)
        if row.fault or file is None:
            result.skipped.append(Skipped(relative_name(row.path, root), row.fault or "missing"))
        else:
            result.samples.append(Sample(file, tuple(sorted({number[label] for label in row.labels}))))
    twice = [name for name, count in Counter(sample.path for sample in result.samples).items() if count > 1]
    if twice:
        shown = relative_name(twice[0], root)
        result.notes.append(
            f"{Path(listing.data).name}: {len(twice)} pictures are listed more than once, first {shown}."
        )
    return result


def existing(path: str) -> str | None:
    """The file in the spelling that exists: tables written on another system may compose accents differently."""
    for candidate in (path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)):
        if Path(candidate).is_file():
            return candidate
    return None


def names_of(value: Any, joined: bool, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of classes in a value of a typed format: text, a whole number, or a list of these.

    Args:
        value: A whole number 3 is the class "3", or `named[3]` where names are given; text is a name.
        joined: Text holds several names with `|` between them.
        named: The names of the classes by number.

    Raises:
        ValueError: Anything else is no label; the message says so.
    """
    parts = value if isinstance(value, list) else [value]
    if joined and isinstance(value, str):
        parts = value.split("|")
    return tuple(name for part in parts if (name := _name(part, named)))


def not_text(value: str) -> bool:
    """Whether the string, from a JSON escape such as `\\ud800`, cannot be written as UTF-8."""
    return any("\ud800" <= sign <= "\udfff" for sign in value)


def _name(value: Any, named: Sequence[str]) -> str:
    if isinstance(value, str):
        if not_text(value):
            raise ValueError("a label holds half of a surrogate pair, which is no character")
        return composed(value.strip())
    if isinstance(value, bool) or not isinstance(value, int):
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:40]
        raise ValueError(f"a label is text or a whole number, not {shown}")
    if value < 0:
        raise ValueError(f"the label {value} is below 0, which usually means that there is none")
    if named and value >= len(named):
        raise ValueError(f"the label {value} has no name: the names are those of 0 to {len(named) - 1}")
    return composed(named[value]) if named else str(value)


def as_labels(parts: Sequence[str], task: Task, where: str) -> tuple[str, ...]:
    """The labels of one picture. Raises `UserError` where the task is multiclass and they are not one."""
    labels = tuple(parts)
    if task == "multiclass" and len(set(labels)) != 1:
        found = f"{len(labels)} labels, {listed(labels)}" if labels else "no label"
        raise UserError(f"{where}: {found}, where multiclass needs one: correct it, or use --task multilabel")
    return labels


def row_of(address: str, split: str, value: Any, joined: bool, task: Task, named: Sequence[str] = ()) -> Row:
    """The row of a picture in a store, whose label is `value`; without a usable label it has a fault.

    Raises:
        UserError: Several labels where the task is multiclass.
    """
    if value is None:
        return Row(address, address, (), split, "has no label")
    try:
        labels = names_of(value, joined, named)
    except ValueError as error:
        return Row(address, address, (), split, str(error))
    if not labels and task == "multiclass":
        return Row(address, address, (), split, "has no label")
    return Row(address, address, as_labels(labels, task, address), split)
