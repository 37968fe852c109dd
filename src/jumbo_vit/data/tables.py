"""Tables of paths and labels as sets of pictures: CSV, and JSONL with one object a line."""

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jumbo_vit.data.folders import composed
from jumbo_vit.data.listing import (
    Listing,
    Row,
    Task,
    as_labels,
    build_set,
    check_task,
    listing_classes,
    names_of,
    not_text,
)
from jumbo_vit.data.records import ImageSet, listed
from jumbo_vit.errors import UserError

CSV_SUFFIXES = (".csv", ".tsv")
JSON_SUFFIXES = (".jsonl", ".ndjson")

_DELIMITERS = (",", "\t", ";")


def read_table(path: str | Path, task: Task, classes: Sequence[str] | None = None) -> dict[str, ImageSet]:
    """The pictures of a CSV or JSONL by the value of its column `split`, in lower case; "" holds those without.

    The header of a CSV is `path,labels` or `path,labels,split` (`label` will do; other columns are ignored), separated
    by commas, tabs or semicolons, in UTF-8; labels are joined by `|`. For JSONL see `parse_lines`. Paths are relative
    to the table's folder. All sets have the same classes: those given, else all names in the table, sorted. Files that
    do not exist are skipped.
    """
    listing = parse_table(path, task)
    names = listing_classes(path, listing.rows, task) if classes is None else list(classes)
    return {split: build_set(listing, listing.of_split(split), names) for split in listing.splits()}


def parse_table(path: str | Path, task: Task) -> Listing:
    """The lines of the table, checked one by one."""
    check_task(task)
    file = Path(path).expanduser().absolute()
    text = _text(file, path)
    rows = (parse_lines if file.suffix.lower() in JSON_SUFFIXES else _parse_csv)(text, file, path, task)
    return Listing(str(path), file.parent, rows)


def _parse_csv(text: str, file: Path, path: str | Path, task: Task) -> list[Row]:
    header = text.split("\n", 1)[0]
    delimiter = max(_DELIMITERS, key=lambda sign: (_known_columns(_cells(header, sign)), header.count(sign)))
    columns = _cells(header, delimiter)
    where = {name: columns.index(name) for name in ("path", "labels", "label", "split") if name in columns}
    label_column = where.get("labels", where.get("label"))
    if "path" not in where or label_column is None:
        raise UserError(
            f"{path} needs the columns path and labels, and has {listed(columns) or 'none'}: add a header line"
        )
    needed = [name for name in columns if name in ("path", "labels", "label", "split")]
    if len(set(needed)) < len(needed) or {"label", "labels"} <= set(needed):
        raise UserError(f"{path} has the columns {listed(needed)}: keep one path, one label or labels, and one split")
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
            parts = [composed(part.strip()) for part in cells[label_column].split("|") if part.strip()]
            labels = as_labels(parts, task, f"{path}, line {here}")
            split = cells[where["split"]].strip().lower() if "split" in where else ""
            rows.append(Row(f"{path}, line {here}", os.path.normpath(file.parent / name), labels, split))
    except csv.Error as error:
        raise UserError(f"{path}, line {line} is not valid CSV ({error}): correct the line") from error
    if not rows:
        raise UserError(f"{path} lists no pictures: add one line a picture below the header")
    return rows


def parse_lines(text: str, file: Path, path: str | Path, task: Task) -> list[Row]:
    """The rows of a JSONL: an object a line with `path`, `label` or `labels`, and if you like `split`.

    `label` is one name, `labels` a list of names or one text with `|` between them; a whole number is its digits.
    Other keys are ignored, as are empty lines.

    Raises:
        UserError: A line that is none of this, by its number.
    """
    rows = []
    # A text in JSON may hold the other line ends of Unicode, so that only this one parts the lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_json_row(line, file, f"{path}, line {number}", task))
    if not rows:
        raise UserError(f"{path} lists no pictures: add one JSON object a line, with path and label")
    return rows


def _json_row(line: str, file: Path, where: str, task: Task) -> Row:
    try:
        # An object comes as a tuple of its pairs, so that a key that is there twice can be seen.
        pairs = json.loads(line, object_pairs_hook=tuple)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON ({error.msg}, column {error.colno}): correct the line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise UserError(f"{where} is not valid JSON ({str(error)[:80]}): correct the line") from error
    if not isinstance(pairs, tuple):
        raise UserError(f"{where} is no JSON object: write one a line, with path and label, and no list around them")
    found = _by_key(pairs, where)
    name, split = found["path"], found.get("split")
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{where}: the path must be a text that is not empty: correct or remove the line")
    if not isinstance(split, str | None):
        raise UserError(f"{where}: the split must be a text, such as train or val: correct the line")
    if not_text(name) or not_text(split or ""):
        raise UserError(f"{where} holds half of a surrogate pair, which is no character: correct the line")
    key = "labels" if "labels" in found else "label"
    try:
        names = names_of(found[key], joined=key == "labels")
    except ValueError as error:
        raise UserError(f"{where}: {error}: correct the line") from error
    labels = as_labels(names, task, where)
    return Row(where, os.path.normpath(file.parent / name.strip()), labels, (split or "").strip().lower())


def _by_key(pairs: tuple[tuple[str, Any], ...], where: str) -> dict[str, Any]:
    """An object's values by its keys in lower case, like a CSV's columns."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        name = key.strip().lower()
        if name in found:
            raise UserError(f"{where} has the key {name} twice: keep one of them")
        found[name] = value
    keys = {"label", "labels"}.intersection(found)
    if "path" not in found or not keys:
        raise UserError(f"{where} needs path and label, and has {listed(list(found)) or 'nothing'}: correct the line")
    if len(keys) > 1:
        raise UserError(f"{where} has both label and labels: keep one of them")
    return found


def _text(file: Path, path: str | Path) -> str:
    if not file.is_file():
        raise UserError(f"there is no file {path}: check the path")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        kind = "JSONL" if file.suffix.lower() in JSON_SUFFIXES else "CSV"
        raise UserError(f"{path} is not in UTF-8: save it as {kind} in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _cells(header: str, delimiter: str) -> list[str]:
    return [cell.strip().strip('"').strip().lower() for cell in header.strip("\r\n").split(delimiter)]


def _known_columns(columns: Sequence[str]) -> int:
    return len({"path", "labels", "label", "split"}.intersection(columns))
