"""Pictures with masks as sets, the counterpart of `records` for segmentation."""

import dataclasses
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from PIL import Image

from jumbo_vit.data.find import Skipped
from jumbo_vit.data.images import read_image
from jumbo_vit.data.masks import Colour, Indices, Labels, UnusableMask, read_mask
from jumbo_vit.data.pairs import Pair
from jumbo_vit.data.records import relative_name

_ORIENTATION_TAG = 0x0112


@dataclass
class SegmentSet:
    """Pictures with masks; names are relative to `root`. `skipped` and `notes` are those of `ImageSet`."""

    labels: Labels
    samples: list[Pair]
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    root: Path | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return list(self.labels.classes)

    @property
    def colours(self) -> list[Colour]:
        """A colour for each class."""
        return list(self.labels.colours)

    @property
    def ignore_index(self) -> int:
        """The value of unlabelled pixels in what `read` gives."""
        return self.labels.ignore_index

    def read(self, index: int, in_chans: int = 3) -> tuple[Image.Image, Indices]:
        """The upright picture as `read_image` gives it, and its mask (H, W) of class indices and `ignore_index`.

        Both have the same size. A mask may be unlabelled everywhere.

        Raises:
            UnreadableImage: One of the two files is damaged.
            UnusableMask: The mask has another size, or a value of no meaning.
        """
        picture = read_image(self.samples[index].picture, in_chans)
        name = self.mask_name(index)
        mask = read_mask(self.samples[index].mask, self.labels, name)
        fault = size_fault(picture.size, (mask.shape[1], mask.shape[0]), is_turned(self.samples[index].picture))
        if fault is not None:
            raise UnusableMask(name, fault)
        return picture, mask

    def name(self, index: int) -> str:
        """The picture's path relative to `root`, with slashes."""
        return relative_name(self.samples[index].picture, self.root)

    def mask_name(self, index: int) -> str:
        """The mask's path relative to `root`, with slashes."""
        return relative_name(self.samples[index].mask, self.root)

    def checksum(self, start: int = 0) -> int:
        """A checksum of the names, in order, and of what the numbers mean, going on from `start`."""
        start = zlib.crc32(repr((self.labels.classes, self.labels.values, self.labels.ignored)).encode(), start)
        for index in range(len(self)):
            start = zlib.crc32(f"{self.name(index)}:{self.mask_name(index)}\n".encode(), start)
        return start

    def subset(self, indices: Iterable[int]) -> Self:
        """The pictures at `indices`, in that order, with the same labels, skipped files and notes."""
        samples = [self.samples[index] for index in indices]
        return dataclasses.replace(self, samples=samples, skipped=list(self.skipped), notes=list(self.notes))


@dataclass(frozen=True)
class SegmentSplits:
    """Training and held-out pictures with the same labels; `held_out` and `drawn` are those of `Splits`."""

    train: SegmentSet
    val: SegmentSet
    held_out: str
    drawn: bool = False


def is_turned(picture: str) -> bool:
    """Whether the picture is stored otherwise than upright."""
    try:
        with Image.open(picture) as opened:
            return opened.getexif().get(_ORIENTATION_TAG, 1) in range(2, 9)
    except Exception:  # as `read_image`: EXIF data that cannot be read count as none
        return False


def size_fault(picture: tuple[int, int], mask: tuple[int, int], turned: bool) -> str | None:
    """Why a mask of this (width, height) does not fit the upright picture, or None."""
    if picture == mask:
        return None
    words = f"is {mask[0]}x{mask[1]}, its picture {picture[0]}x{picture[1]}"
    if turned and mask == picture[::-1]:
        return f"{words} upright: it was drawn on the picture before its EXIF orientation; turn it likewise"
    return f"{words} (width x height): make them equal"
