"""Files of examples as a stream (`--streaming`): tar shards, parquet, and saved datasets, here or behind URLs.

Nothing is indexed: a pass reads each file from its beginning to its end, the files in an order of the pass's own.
"""

import glob
import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np

from jumbo_vit.data.find import is_hidden
from jumbo_vit.data.records import listed
from jumbo_vit.data.shards import names_near
from jumbo_vit.data.sources import training_files
from jumbo_vit.data.streams import named_classes, undecoded
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed

KINDS = (".tar", ".parquet", ".arrow")
_BLOCK = 512  # of a tar, in bytes


def open_files(data: str, seed: int) -> "FileStream":
    """The stream of the files that `data` means: a path or a pattern as for `find_listing`, or a URL.

    Raises:
        UserError: They are not there, of several kinds, or of a kind that is not read so.
    """
    files = _remote(data) if "://" in data else [str(path) for path in training_files(data)]
    kinds = {_kind(file) for file in files}
    if len(kinds) != 1 or not kinds <= {*KINDS}:
        found = " and ".join(sorted(kinds)) or "none"
        raise UserError(
            f"--streaming reads tar shards, parquet files or a dataset saved by save_to_disk, of one kind, and {data} "
            f"means files of the kind {found}"
        )
    root = Path(data) if "://" not in data and Path(data).is_dir() else Path(files[0]).parent
    return FileStream(files, seed, None if "://" in data else root)


def _kind(file: str) -> str:
    return PurePosixPath(urlsplit(file).path if "://" in file else Path(file).name).suffix.lower()


def _remote(data: str) -> list[str]:
    """The URLs that a URL with braces, or with `*` where its server can list files, means."""
    try:
        from braceexpand import braceexpand
        from datasets.data_files import resolve_pattern
    except ModuleNotFoundError as error:
        raise UserError(f"{data} needs the datasets library: pip install 'jumbo-vit[data]'") from error
    try:
        urls = list(braceexpand(data)) if "{" in data else [data]
        return [found for url in urls for found in (resolve_pattern(url, "") if "*" in url else [url])]
    except Exception as error:  # of many kinds, by the server
        raise UserError(f"{data} cannot be resolved: {_line(error)}") from error


class FileStream:
    """Examples of files, one file after another, as `Stream` takes them.

    Args:
        files: Paths or URLs.
        seed: Of the order of the files.
        root: The folder up to which a file may lie that names the classes of tar shards; None for files elsewhere.
    """

    def __init__(self, files: Sequence[str], seed: int, root: Path | None = None) -> None:
        self.files, self.seed, self.root = list(files), seed, root
        self._names = zlib.crc32("\n".join(PurePosixPath(file).name for file in self.files).encode("utf-8", "replace"))
        self._epoch = self._file = 0
        self._inner: Any = None  # where to begin in the file
        self._part: _Part | None = None

    @cached_property
    def classes(self) -> list[str]:
        """The names of classes that the first file states, or for tar shards a file of names beside them."""
        with _told(self.files[0]):
            part = _part(self.files[0], None)
        if isinstance(part, _Table):
            return named_classes(part.dataset)
        return [] if self.root is None else names_near([Path(file) for file in self.files], self.root)[0]

    def set_epoch(self, epoch: int) -> None:
        """Take the files in the order of this pass, from the next `__iter__` on."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        inner = self._inner if self._part is None else self._part.state()
        return {"names": self._names, "file": self._file, "inner": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["names"] != self._names:
            raise UserError(
                f"the {len(self.files)} files of the stream, first {self.files[0]}, are not those that the run began "
                "with: put them back, or start a new run with --init-from"
            )
        self._file, self._inner, self._part = state["file"], state["inner"], None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = np.random.default_rng(mix_seed(self.seed, "files", self._epoch)).permutation(len(self.files))
        while self._file < len(order):
            file = self.files[order[self._file]]
            with _told(file):
                self._part = _part(file, self._inner)
                self._check_names(file, self._part)
                yield from self._part
            self._file, self._inner, self._part = self._file + 1, None, None

    def _check_names(self, file: str, part: "_Part") -> None:
        """Each table counts its labels in its own names: others than the first file's would give wrong classes."""
        if isinstance(part, _Table) and (names := named_classes(part.dataset)) != self.classes:
            mine, others = listed(names) or "not at all", listed(self.classes) or "not at all"
            raise UserError(
                f"{file} names its classes {mine}, and {self.files[0]} {others}, so equal numbers mean different "
                "classes: write them alike"
            )


@contextmanager
def _told(file: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many kinds, by what is missing, damaged or out of reach
        raise UserError(f"{file} cannot be read: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _Tar:
    """The samples of a tar shard, in webdataset's layout, with a state: how many have been given."""

    def __init__(self, file: str, skip: int | None) -> None:
        self.file, self.given = file, skip or 0

    def state(self) -> int:
        return self.given

    def __iter__(self) -> Iterator[dict[str, Any]]:
        skip = self.given
        with _opened(self.file) as raw:
            watched: Any = _Watched(raw, self.file)
            with tarfile.open(fileobj=watched, mode="r|", encoding="utf-8") as tar:
                for number, sample in enumerate(self._samples(tar)):
                    if number >= skip:
                        self.given = number + 1
                        yield sample
            watched.check_end()

    def _samples(self, tar: tarfile.TarFile) -> Iterator[dict[str, Any]]:
        sample: dict[str, Any] = {}
        for member in tar:
            name = PurePosixPath(member.name)
            if member.isdir() or any(is_hidden(part) for part in name.parts):
                continue
            stem, _, field = name.name.partition(".")
            key, field = str(name.parent / stem), field.lower()
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            sample |= {"__key__": key, "__url__": self.file}
            content = tar.extractfile(member) if member.isreg() else None
            # Of a field that comes twice, or is a link, nothing is guessed: the sample then has no picture or no label.
            sample[field] = _field(field, content.read()) if content is not None and field not in sample else None
        if sample:
            yield sample


class _Watched:
    """A file that is read to its end, and knows whether it ended as a whole tar does: in zeros."""

    def __init__(self, raw: IO[bytes], name: str) -> None:
        self.raw, self.name, self.last = raw, name, b""

    def read(self, size: int) -> bytes:
        content = self.raw.read(size)
        self.last = (self.last + content)[-_BLOCK:]
        return content

    def check_end(self) -> None:
        while rest := self.read(1 << 20):
            if rest.strip(b"\0"):
                raise UserError(f"{self.name} holds more behind its end (archives joined into one): take them apart")
        if self.last != bytes(_BLOCK):
            raise UserError(f"{self.name} is cut off: fetch it again")


class _Table:
    """The rows of a parquet file, or of one of a saved dataset, with the library's own state."""

    def __init__(self, file: str, state: dict[str, Any] | None) -> None:
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise UserError(f"{file} needs the datasets library: pip install 'jumbo-vit[data]'") from error
        # Here a bracket in the name would be a pattern.
        name = file if "://" in file else glob.escape(file)
        kind = _kind(file).removeprefix(".")
        found = datasets.load_dataset(kind, data_files=[name], split="train", streaming=True)
        self.dataset, _ = undecoded(found)
        if state is not None:
            self.dataset.load_state_dict(state)

    def state(self) -> Any:
        return self.dataset.state_dict()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.dataset


_Part = _Tar | _Table


def _part(file: str, state: Any) -> _Part:
    return _Tar(file, state) if _kind(file) == ".tar" else _Table(file, state)


def _opened(file: str) -> IO[bytes]:
    if "://" not in file:
        return Path(file).open("rb")
    import fsspec  # type: ignore[import-untyped]

    opened: IO[bytes] = fsspec.open(file, "rb").open()
    return opened


def _field(field: str, content: bytes) -> Any:
    """A label's field decoded; what cannot be decoded, and any other field, as it is."""
    if field not in ("cls", "txt", "json"):
        return content
    try:
        text = content.decode("utf-8-sig").strip()
        if field == "cls":
            return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text
        return json.loads(text) if field == "json" else text
    except (ValueError, RecursionError):
        return content
