"""Tar shards in webdataset's layout as a list of pictures, indexed once and read at random.

The members of a sample share a key, the name up to the first dot after the last slash; what follows is the field:
`0001.jpg` and `0001.cls` are the fields jpg and cls of the sample 0001. Only headers and labels are read for the
index; a picture is then a range of bytes in its shard.
"""

import json
import os
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from jumbo_vit.data.find import is_hidden, picture_extensions
from jumbo_vit.data.listing import Listing, Row, Task, row_of
from jumbo_vit.errors import UnreadableImage, UserError

NAMES = ("classes.txt", "labels.txt")
"""Files beside the shards that name the classes by number, one a line; the first that exists counts."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 512  # of a tar, in bytes
_MAX_LABEL = 1 << 20  # bytes of a label's field


class Place(NamedTuple):
    """A range of bytes in a shard."""

    shard: str
    offset: int
    size: int


class _Member(NamedTuple):
    """A field of a sample: the member's name, and its bytes in the shard."""

    name: str
    offset: int
    size: int


class State(NamedTuple):
    """By which a shard is known to be the one that was indexed."""

    size: int
    mtime_ns: int


@dataclass
class ShardStore:
    """Pictures in shards, by address; a shard that changes after it was indexed is refused."""

    shards: dict[str, State] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def content(self, address: str) -> bytes:
        """The bytes of the picture's file.

        Raises:
            UnreadableImage: The shard cannot be opened.
            UserError: The shard is not the one that was indexed.
        """
        shard, offset, size = self.places[address]
        try:
            # Opened anew each time: an open file shared by threads or forked processes shares its position.
            with Path(shard).open("rb") as stream:
                if _state(stream) != self.shards[shard]:
                    raise UserError(f"{shard} has changed since it was indexed: start the command again")
                stream.seek(offset)
                return stream.read(size)
        except OSError as error:
            raise UnreadableImage(address, f"its shard cannot be read ({error.strerror})") from error


def list_shards(data: str, root: Path, shards: Sequence[tuple[Path, str]], task: Task) -> Listing:
    """The samples of the shards, given as (path, split), in the order of the shards and of the members in them.

    A sample needs one picture and a label: the field `cls` (a number or a name), else `json` with `label` or `labels`,
    else `txt` (a name; several are joined by `|`). What is no sample becomes a row with its fault.

    Raises:
        UserError: A shard is compressed, or cannot be read.
    """
    named, notes = names_near([path for path, _ in shards], root)
    store = ShardStore()
    rows: list[Row] = []
    hidden: list[str] = []
    for path, split in shards:
        rows += _Index(path, split, task, named, store, hidden).rows()
    if hidden:
        notes.append(f"{len(hidden)} hidden entries of the shards are left out, first {hidden[0]}.")
    return Listing(data, root, rows, store, notes, named)


def names_near(shards: Iterable[Path], root: Path) -> tuple[list[str], list[str]]:
    """The names of the classes by number, none without a file of names, and a note on it.

    The file lies beside a shard, or in a folder above it up to `root`; the nearest counts.

    Raises:
        UserError: Shards have files of names that differ, or one holds an empty name or one twice.
    """
    files: dict[Path, list[str]] = {}
    for folder in {shard.parent for shard in shards}:
        inside = [folder, *folder.parents]
        upwards = inside[: inside.index(root) + 1] if root in inside else [folder, root]
        near = (parent / name for parent in upwards for name in NAMES)
        file = next((file for file in near if file.is_file()), None)
        if file is not None:
            files[file] = _read_names(file)
    if not files:
        return [], []
    first, named = min(files.items())
    for file, others in files.items():
        if others != named:
            raise UserError(f"{first} and {file} name the classes differently: make them equal, or keep one above both")
    return named, [f"Labels that are numbers are named by {first.name}: 0 is {named[0]}."]


def _read_names(file: Path) -> list[str]:
    try:
        named = file.read_bytes().decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{file} is not in UTF-8: save it as text in UTF-8") from None
    named = [name.strip() for name in named]
    if not named or "" in named or len(set(named)) < len(named):
        raise UserError(f"{file} must hold the name of a class in each line, each name once")
    return named


def _state(stream: IO[bytes]) -> State:
    info = os.fstat(stream.fileno())
    return State(info.st_size, info.st_mtime_ns)


class _Index:
    """The reading of one shard; `store` and `hidden` are added to."""

    def __init__(
        self, path: Path, split: str, task: Task, named: Sequence[str], store: ShardStore, hidden: list[str]
    ) -> None:
        self.path, self.split, self.task, self.named, self.store, self.hidden = path, split, task, named, store, hidden
        self.extensions = picture_extensions()
        self.samples: dict[str, dict[str, _Member]] = {}
        self.faults: dict[str, str] = {}  # of samples, by key
        self.others: list[Row] = []

    def rows(self) -> list[Row]:
        """The samples of the shard, and at the end what is none."""
        try:
            with self.path.open("rb") as stream:
                self.store.shards[str(self.path)] = _state(stream)
                _refuse_compressed(self.path, stream)
                end = self._read_headers(stream)
                rows = [self._row(key, fields, stream) for key, fields in self.samples.items()]
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        if end:
            self._leave_out(f"{end} after {len(rows)} samples")
        elif not rows and not self.others:
            self._leave_out("holds no samples")
        return rows + self.others

    def _leave_out(self, fault: str) -> None:
        self.others.append(Row(str(self.path), str(self.path), (), self.split, fault))

    def _read_headers(self, stream: IO[bytes]) -> str:
        """Fill `samples`; returns what is wrong with the shard's end."""
        size = self.store.shards[str(self.path)].size
        if size == 0:
            return "is empty"
        try:
            with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8") as tar:
                try:
                    for member in tar:
                        if member.size < 0:
                            return "is damaged"  # the next header would be sought before this one
                        if member.offset_data + member.size > size:
                            return "is cut off"
                        self._take(member)
                except tarfile.ReadError:
                    return "is cut off or damaged"
                return _end(stream, tar.offset)
        except tarfile.ReadError:
            return "is not a tar file"

    def _take(self, member: tarfile.TarInfo) -> None:
        if member.isdir():
            return
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        # As everywhere, a name that is not UTF-8 is shown escaped.
        name = "/".join(parts).encode("utf-8", "backslashreplace").decode()
        fault = ""
        if not parts or ".." in parts or member.name.startswith("/"):
            fault = "has a path that leads out of the shard"
        elif name != "/".join(parts):
            fault = "has a name that is not valid UTF-8: rename it"
        elif any(is_hidden(part) for part in parts):
            self.hidden.append(f"{self.path.name}:{name}")
            return
        elif not member.isreg() or member.issparse():
            fault = "is no ordinary file (a link, or sparse)"
        if fault:
            self._leave_out(f"its member {name} {fault}")
            return
        stem, _, extension = parts[-1].partition(".")
        key, extension = "/".join([*parts[:-1], stem]), extension.lower()
        fields = self.samples.setdefault(key, {})
        if extension in fields:
            self.faults.setdefault(key, f"holds the field {extension or 'without a name'} twice")
        fields[extension] = _Member(name, member.offset_data, member.size)

    def _row(self, key: str, fields: dict[str, _Member], stream: IO[bytes]) -> Row:
        pictures = [name for name in fields if f".{name}" in self.extensions]
        address = f"{self.path}:{fields[pictures[0]].name if pictures else key}"
        fault = self.faults.get(key, "")
        if not pictures:
            fault = fault or f"has no picture, only {', '.join(sorted(fields))}"
        elif len(pictures) > 1:
            fault = fault or f"has {len(pictures)} pictures, {', '.join(pictures)}"
        if fault:
            return Row(address, address, (), self.split, fault)
        try:
            value, joined = _label(fields, stream)
        except ValueError as error:
            return Row(address, address, (), self.split, str(error))
        row = row_of(address, self.split, value, joined, self.task, self.named)
        if not row.fault:
            _, offset, size = fields[pictures[0]]
            self.store.places[address] = Place(str(self.path), offset, size)
        return row


def _refuse_compressed(path: Path, stream: IO[bytes]) -> None:
    start = stream.read(6)
    stream.seek(0)
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise UserError(
                f"{path} is compressed by {name}, so its pictures cannot be read at random: decompress it to a plain "
                ".tar (pictures hardly shrink)"
            )


def _end(stream: IO[bytes], offset: int) -> str:
    """What is wrong where the headers end: a whole tar ends in zeros."""
    stream.seek(offset)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        return "is cut off or damaged"
    while rest := stream.read(1 << 20):
        if rest.strip(b"\0"):
            return "holds more behind its end (archives joined into one), which is not read,"
    return ""


def _label(fields: dict[str, _Member], stream: IO[bytes]) -> tuple[Any, bool]:
    """The label as stored, None without one, and whether `|` joins several. Raises `ValueError` if unreadable."""
    name = next((name for name in ("cls", "json", "txt") if name in fields), None)
    if name is None:
        return None, False
    _, offset, size = fields[name]
    if size > _MAX_LABEL:
        raise ValueError(f"its {name} is too large for a label ({size} bytes)")
    stream.seek(offset)
    try:
        text = stream.read(size).decode("utf-8-sig").strip()
        if name != "json":
            number = name == "cls" and text.isascii() and text.removeprefix("-").isdigit()
            return (int(text), False) if number else (text, True)
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"its {name} cannot be read as {'JSON' if name == 'json' else 'UTF-8'}") from None
    if not isinstance(found, dict) or ("label" in found) == ("labels" in found):
        raise ValueError("its json needs either label or labels")
    return (found["labels"], True) if "labels" in found else (found["label"], False)
