"""A CSV of paths and labels as sets of pictures."""

import csv
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jumbo_vit.data.find import Skipped
from jumbo_vit.data.folders import class_index, composed
from jumbo_vit.data.records import ImageSet, Sample, listed, relative_name
from jumbo_vit.errors import UserError, nearest

Task = Literal["multiclass", "multilabel"]
TASKS = ("multiclass", "multilabel")

_DELIMITERS = (",", "\t", ";")


@dataclass(frozen=True)
class Row:
    """A line of the table: where it begins, the absolute path, the names of the classes, the split ("" if none)."""

    line: int
    path: str
    labels: tuple[str, ...]
    split: str


def read_table(path: str | Path, task: Task, classes: Sequence[str] | None = None) -> dict[str, ImageSet]:
    """The pictures of a CSV by the value of its column `split`, in lower case; "" holds those without.

    The header is `path,labels` or `path,labels,split` (`label` will do; other columns are ignored), separated by
    commas, tabs or semicolons, in UTF-8. Paths are relative to the table's folder, labels are joined by `|`. All sets
    have the same classes: those given, else all names in the table, sorted. Files that do not exist are skipped.
    """
    rows = parse_table(path, task)
    names = table_classes(path, rows, task) if classes is None else list(classes)
    return {split: build_set(path, [row for row in rows if row.split == split], names) for split in _splits(rows)}


def _splits(rows: Sequence[Row]) -> list[str]:
    return sorted({row.split for row in rows})


def table_classes(path: str | Path, rows: Sequence[Row], task: Task) -> list[str]:
    """All names of classes, sorted as plain strings."""
    names = sorted({label for row in rows for label in row.labels})
    if not names or (task == "multiclass" and len(names) == 1):
        found = f"one class only, {names[0]}" if names else "no labels"
        raise UserError(f"{path} holds {found}: training needs {'at least two' if names else 'some'}")
    return names


def build_set(path: str | Path, rows: Sequence[Row], classes: Sequence[str]) -> ImageSet:
    """The rows as a set of pictures with these classes."""
    root = Path(path).expanduser().absolute().parent
    number = class_index(classes)
    result = ImageSet(list(classes), [], root=root)
    for row in rows:
        for label in row.labels:
            if label not in number:
                raise UserError(
                    f"{path}, line {row.line}: the label {label} is none of the classes{nearest(label, classes)}; "
                    f"they are {listed(classes)}: correct or remove the line"
                )
        file = _existing(row.path)
        if file is None:
            result.skipped.append(Skipped(relative_name(row.path, root), "missing"))
        else:
            result.samples.append(Sample(file, tuple(sorted({number[label] for label in row.labels}))))
    twice = [name for name, count in Counter(sample.path for sample in result.samples).items() if count > 1]
    if twice:
        shown = relative_name(twice[0], root)
        result.notes.append(f"{Path(path).name}: {len(twice)} pictures are listed more than once, first {shown}.")
    return result


def _existing(path: str) -> str | None:
    """The file in the spelling that exists: tables written on another system may compose accents differently."""
    for candidate in (path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)):
        if Path(candidate).is_file():
            return candidate
    return None


def parse_table(path: str | Path, task: Task) -> list[Row]:
    """The lines of the table, checked one by one."""
    if task not in TASKS:
        raise UserError(f"the task {task} is not known{nearest(task, TASKS)}: use {' or '.join(TASKS)}")
    file = Path(path).expanduser().absolute()
    text = _text(file, path)
    header = text.split("\n", 1)[0]
    delimiter = max(_DELIMITERS, key=lambda sign: (_known_columns(_cells(header, sign)), header.count(sign)))
    columns = _cells(header, delimiter)
    where = {name: columns.index(name) for name in ("path", "labels", "label", "split") if name in columns}
    label_column = where.get("labels", where.get("label"))
    if "path" not in where or label_column is None:
        raise UserError(
            f"{path} needs the columns path and labels, and has {listed(columns) or 'none'}: add a header line"
        )
    rows = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            here, line = line, reader.line_num + 1
            if here == 1 or not any(cell.strip() for cell in cells):
                continue
            if len(cells) < len(columns) or any(cell.strip() for cell in cells[len(columns) :]):
                raise UserError(
                    f"{path}, line {here}: {len(cells)} cells where the header has {len(columns)}: "
                    "put a cell that contains the separator in double quotes"
                )
            name = cells[where["path"]].strip()
            if not name:
                raise UserError(f"{path}, line {here}: the path is empty: fill it in or remove the line")
            labels = _labels(cells[label_column], task, f"{path}, line {here}")
            split = cells[where["split"]].strip().lower() if "split" in where else ""
            rows.append(Row(here, os.path.normpath(file.parent / name), labels, split))
    except csv.Error as error:
        raise UserError(f"{path}, line {line} is not valid CSV ({error}): correct the line") from error
    if not rows:
        raise UserError(f"{path} lists no pictures: add one line a picture below the header")
    return rows


def _text(file: Path, path: str | Path) -> str:
    if not file.is_file():
        raise UserError(f"there is no file {path}: check the path")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8: save it as CSV in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _cells(header: str, delimiter: str) -> list[str]:
    return [cell.strip().strip('"').strip().lower() for cell in header.strip("\r\n").split(delimiter)]


def _known_columns(columns: Sequence[str]) -> int:
    return len({"path", "labels", "label", "split"}.intersection(columns))


def _labels(cell: str, task: Task, where: str) -> tuple[str, ...]:
    labels = tuple(composed(part.strip()) for part in cell.split("|") if part.strip())
    if task == "multiclass" and len(set(labels)) != 1:
        found = f"{len(labels)} labels, {listed(labels)}" if labels else "no label"
        raise UserError(f"{where}: {found}, where multiclass needs one: correct the line, or use --task multilabel")
    return labels
