"""Hugging Face datasets on disk, saved by `save_to_disk` or as parquet files, as a list of pictures.

Opened with the `datasets` library, from local files alone: nothing is fetched and no code of a data set is run. The
library is never asked to decode a picture; its bytes go to the one picture reader.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from jumbo_vit.data.listing import Listing, Row, Task, row_of
from jumbo_vit.data.records import listed
from jumbo_vit.errors import UnreadableImage, UserError

SAVED = ("dataset_dict.json", "state.json", "dataset_info.json")
"""Files that mark a folder of `save_to_disk`: the first that of a `DatasetDict`, the others that of a `Dataset`."""


class Rows(NamedTuple):
    """Rows of a `datasets.Dataset` from `first` on, with the names of the columns of pictures and labels."""

    dataset: Any
    first: int
    length: int
    picture: str
    label: str


@dataclass
class ArrowStore:
    """Pictures in rows, by address: a name of `parts`, a colon, and the row in that part.

    The dataset is memory-mapped, and opened anew by each process that is not a fork.
    """

    root: Path
    parts: dict[str, Rows] = field(default_factory=dict)

    def content(self, address: str) -> bytes:
        """The bytes of the picture's file, none where the row has no picture.

        Raises:
            UnreadableImage: The row names a file that cannot be read.
        """
        name, _, row = address.rpartition(":")
        part = self.parts[name]
        value: Any = part.dataset[part.first + int(row)].column(part.picture)[0].as_py()
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, value)
        if isinstance(content, bytes):
            return content
        try:
            return (self.root / path).read_bytes() if path else b""
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UnreadableImage(address, f"its file {path} cannot be read ({reason})") from error


def list_saved(data: str, folder: Path, task: Task) -> Listing:
    """The rows of a folder that `save_to_disk` wrote, of a `Dataset` or a `DatasetDict`.

    Raises:
        UserError: It cannot be opened, or has no column of pictures or labels.
    """
    datasets = _library(data)
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # of many kinds, by what is missing or damaged
        raise UserError(f"{data} cannot be opened by the datasets library: {_line(error)}") from error
    single = isinstance(found, datasets.Dataset)
    listing = Listing(data, folder, [], store := ArrowStore(folder))
    for name, dataset in [("", found)] if single else found.items():
        picture, label = _columns(datasets, dataset.features, f"{data}, split {name}" if name else data, listing.notes)
        try:
            # A file is mapped as it is: unchecked, an offset beyond its end would end the process.
            dataset.select_columns([picture, label]).data.validate(full=True)
        except Exception as error:
            raise UserError(f"{data} is damaged: {_line(error)}") from error
        part = Rows(_raw(dataset, picture), 0, len(dataset), picture, label)
        # Of a single dataset the folder is the root, so that its rows need a name in it.
        store.parts[str(folder / (name or "row"))] = part
        listing.named = _named(dataset, label)
        listing.rows += _rows(str(folder / (name or "row")), part, dataset, name.lower(), task)
    return listing


def list_parquet(data: str, root: Path, files: Sequence[tuple[Path, str]], task: Task) -> Listing:
    """The rows of parquet files, given as (path, split); the library keeps a copy in its cache for random reading.

    Raises:
        UserError: A file cannot be opened, or has no column of pictures or labels.
    """
    datasets = _library(data)
    import pyarrow.parquet

    listing = Listing(data, root, [], store := ArrowStore(root))
    for split in dict.fromkeys(split for _, split in files):
        own = [path for path, name in files if name == split]
        counts, columns, named = [], ("", ""), dict[Path, list[str]]()
        for path in own:
            try:
                counts.append(pyarrow.parquet.read_metadata(path).num_rows)
                features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path))
            except Exception as error:
                raise UserError(f"{path} is no parquet file, or is cut off: {_line(error)}") from error
            columns = _columns(datasets, features, str(path), listing.notes)
            named[path] = _names_of(features[columns[1]])
        _refuse_other_names(named)
        if not sum(counts):
            continue  # the library opens no empty split
        dataset = _open_parquet(datasets, data, own, list(columns))
        if len(dataset) != sum(counts):
            raise UserError(
                f"{data}: the datasets library found {len(dataset)} rows where the files have {sum(counts)}"
            )
        raw, listing.named = _raw(dataset, columns[0]), _named(dataset, columns[1])
        for place, (path, count) in enumerate(zip(own, counts, strict=True)):
            part = Rows(raw, sum(counts[:place]), count, *columns)
            store.parts[str(path)] = part
            listing.rows += _rows(str(path), part, dataset, split, task)
    return listing


def _open_parquet(datasets: Any, data: str, files: Sequence[Path], columns: list[str]) -> Any:
    from datasets.data_files import DataFilesDict, DataFilesList

    # Given so, the paths are taken as they are (a bracket is no pattern), and a changed file is never taken from the
    # cache, which is keyed by these facts.
    facts = [(str(path.stat().st_mtime_ns), str(path.stat().st_size)) for path in files]
    chosen = DataFilesDict({"train": DataFilesList([str(path) for path in files], facts)})
    try:
        return datasets.Dataset.from_parquet(chosen, split="train", columns=columns)
    except Exception as error:  # of many kinds, by what is damaged or does not fit together
        cause = error.__cause__ if error.__cause__ is not None else error
        raise UserError(f"{data} cannot be opened by the datasets library: {_line(cause)}") from error


def _library(data: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"{data} needs the datasets library: pip install 'jumbo-vit[data]'") from error
    return datasets


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _raw(dataset: Any, column: str) -> Any:
    """The one column, as stored: Arrow does not decode."""
    return dataset.with_format("arrow").select_columns([column])


def _columns(datasets: Any, features: Any, where: str, notes: list[str]) -> tuple[str, str]:
    """The names of the columns of pictures and labels."""
    names = list(features)
    pictures = [name for name in names if isinstance(features[name], datasets.Image)]
    picture = "image" if "image" in names else pictures[0] if len(pictures) == 1 else None
    if picture is None:
        raise UserError(f"{where} needs a column image, and has {listed(names, 12)}: rename one of them")
    kind = features[picture]
    stored = isinstance(kind, dict) and {"bytes", "path"}.intersection(kind)
    plain = getattr(kind, "dtype", None) in ("binary", "large_binary", "string", "large_string")
    if not (isinstance(kind, datasets.Image) or stored or plain):
        raise UserError(f"{where}: the column {picture} holds {str(kind)[:60]}, where encoded pictures are expected")
    labels = [name for name in ("label", "labels") if name in names]
    if len(labels) > 1:
        raise UserError(f"{where} has both a column label and a column labels: remove one of them")
    labels = labels or [name for name in names if isinstance(features[name], datasets.ClassLabel)]
    if len(labels) != 1:
        raise UserError(f"{where} needs a column label or labels, and has {listed(names, 12)}: rename one of them")
    if (picture, labels[0]) not in (("image", "label"), ("image", "labels")):
        note = f"The pictures are those of the column {picture}, the labels those of {labels[0]}."
        notes += [note] if note not in notes else []
    return picture, labels[0]


def _refuse_other_names(named: dict[Path, list[str]]) -> None:
    """The library gives the names of the first file to the numbers of all."""
    first = next(iter(named))
    for path, names in named.items():
        pairs = enumerate(zip_longest(named[first], names))
        number, here, there = next(((n, two, one) for n, (one, two) in pairs if one != two), (0, None, None))
        if here != there:
            raise UserError(
                f"{path} and {first} number their classes differently, {number} is {here or 'without a name'} in the "
                f"one and {there or 'without a name'} in the other: write all files of a split with the same ClassLabel"
            )


def _named(dataset: Any, column: str) -> list[str]:
    return _names_of(dataset.features[column])


def _names_of(feature: Any) -> list[str]:
    """The names of a `ClassLabel`, alone or in a list; none of any other column."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    return list(getattr(inner, "names", None) or [])


def _rows(name: str, part: Rows, dataset: Any, split: str, task: Task) -> Iterable[Row]:
    named = _named(dataset, part.label)
    labels = dataset.with_format("arrow").select_columns([part.label])
    values = labels[part.first : part.first + part.length].column(part.label).to_pylist() if part.length else []
    for row, value in enumerate(values):
        yield row_of(f"{name}:{row}", split, value, part.label == "labels", task, named)
