"""A set of pictures with their labels: what folders, tables, shards and the built-in digits become."""

import dataclasses
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from PIL import Image

from jumbo_vit.data.images import Skipped, read_image
from jumbo_vit.errors import UnreadableImage, UserError


class Store(Protocol):
    """Where pictures lie that are no files of their own: a sample's path is then an address in the store."""

    def content(self, address: str) -> bytes:
        """The bytes of the picture's file. Raises `UnreadableImage`; usable from several threads and processes."""


class Sample(NamedTuple):
    """One picture: its absolute path and the indices of its classes, in rising order (one for multiclass).

    In a set with a store the path is an address: that of a file, a colon, and the place in it.
    """

    path: str
    labels: tuple[int, ...]


@dataclass
class ImageSet:
    """Pictures with labels. `labels` of a sample count in `classes`; names are relative to `root`.

    `skipped` lists the files that were left out, `notes` says in sentences what was guessed or ignored. With a `store`
    the pictures are read from it, else from files.
    """

    classes: list[str]
    samples: list[Sample]
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    root: Path | None = None
    store: Store | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int, in_chans: int = 3, enough: int | None = None) -> Image.Image:
        """The picture, as `read_image` gives it."""
        path = self.samples[index].path
        if self.store is None:
            return read_image(path, in_chans, enough=enough)
        return read_image(self.store.content(path), in_chans, path, enough)

    def content(self, index: int) -> bytes:
        """The bytes of the picture's file, as stored."""
        path = self.samples[index].path
        return Path(path).read_bytes() if self.store is None else self.store.content(path)

    def name(self, index: int) -> str:
        """The path relative to `root`, with slashes, spelled as on disk."""
        return relative_name(self.samples[index].path, self.root)

    @property
    def labels(self) -> list[tuple[int, ...]]:
        return [sample.labels for sample in self.samples]

    def class_counts(self) -> list[int]:
        """Pictures per class, in the order of `classes`."""
        counts = [0] * len(self.classes)
        for sample in self.samples:
            for label in sample.labels:
                counts[label] += 1
        return counts

    def checksum(self, start: int = 0) -> int:
        """A checksum of names and labels, in order, going on from `start`."""
        for index, sample in enumerate(self.samples):
            start = zlib.crc32(f"{self.name(index)}:{sample.labels}\n".encode(), start)
        return start

    def subset(self, indices: Iterable[int]) -> Self:
        """The pictures at `indices`, in that order, with the same classes, skipped files and notes."""
        samples = [self.samples[index] for index in indices]
        return dataclasses.replace(self, samples=samples, skipped=list(self.skipped), notes=list(self.notes))


@dataclass(frozen=True)
class Splits:
    """Training and held-out pictures with the same `classes`; `held_out` says in words which part that is.

    When one set was split in two (`drawn`), its skipped files and notes are the training part's, so that none counts
    twice.
    """

    train: ImageSet
    val: ImageSet
    held_out: str
    drawn: bool = False


def note_shared(splits: Splits) -> Splits:
    """The same splits, with a note on pictures that a list names for both parts; copies of files are not looked for."""
    train, val = splits.train, splits.val
    names = {sample.path for sample in train.samples}
    shared = [index for index, sample in enumerate(val.samples) if sample.path in names]
    # The digits have no files.
    if shared and train.root is not None:
        val.notes.append(
            f"{len(shared)} of the {len(val)} held-out pictures are listed for training too, first "
            f"{val.name(shared[0])}: the score is too good."
        )
    return splits


def relative_name(path: str, root: Path | None) -> str:
    """`path` as seen from `root`, with slashes."""
    if root is None:
        return Path(path).as_posix()
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:  # another drive
        return Path(path).as_posix()


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """A few of the names for a message: `a, b, c and 7 more`."""
    shown = ", ".join(names[:at_most])
    return f"{shown} and {len(names) - at_most} more" if len(names) > at_most else shown


def check_images(
    image_set: ImageSet,
    in_chans: int = 3,
    progress: bool = True,
    workers: int | None = None,
    require_all_classes: bool = False,
) -> ImageSet:
    """The set without the pictures that cannot be read; these join `skipped`, by name and reason.

    Every picture is decoded once. No readable picture at all is an error, and with `require_all_classes` (training)
    so is a class that had pictures and has none left.
    """
    good: list[int] = []
    bad: list[Skipped] = []
    for index, reason in enumerate(_with_progress(_reasons(image_set, in_chans, workers), len(image_set), progress)):
        if reason is None:
            good.append(index)
        else:
            bad.append(Skipped(image_set.name(index), reason))
    checked = image_set.subset(good)
    checked.skipped.extend(bad)
    if bad and not good:
        raise UserError(
            f"none of the {len(bad)} pictures in {image_set.root} can be read, first {bad[0].path}: {bad[0].reason}"
        )
    if require_all_classes:
        before, after = image_set.class_counts(), checked.class_counts()
        lost = [name for name, b, a in zip(image_set.classes, before, after, strict=True) if b and not a]
        if lost:
            raise UserError(
                f"no picture of the class {listed(lost)} can be read, first {bad[0].path}: {bad[0].reason}; "
                "replace the files or remove the class"
            )
    return checked


def _reasons(image_set: ImageSet, in_chans: int, workers: int | None) -> Iterator[str | None]:
    """Why each picture cannot be read, or None, in order."""

    def reason(index: int) -> str | None:
        try:
            image_set.read(index, in_chans)
        except UnreadableImage as error:
            return error.reason
        return None

    # In blocks, so that a million pictures are not a million waiting futures, and Ctrl-C answers soon.
    block = 512
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for start in range(0, len(image_set), block):
            yield from pool.map(reason, range(start, min(start + block, len(image_set))))


def _with_progress(reasons: Iterator[str | None], total: int, progress: bool) -> Iterator[str | None]:
    if not progress or total <= 2000 or not sys.stderr.isatty():
        return reasons
    from tqdm import tqdm

    return iter(tqdm(reasons, total=total, desc="checking pictures", unit=" pictures", leave=False))
