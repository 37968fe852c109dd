"""Mask files: the one way from what a file stores to class indices, and from class indices back to a file's numbers.

A file stores numbers (grey, palette, 16 bits), truth values (1 bit) or colours. `Labels` says what they mean and is
kept with a model, so that training, evaluation and prediction cannot differ. Everything behind `read_mask` sees class
indices 0 to K - 1 and one value for "not labelled", `Labels.ignore_index`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from jumbo_vit.data.images import read_stored
from jumbo_vit.errors import UserError

Colour = tuple[int, int, int]
Indices = npt.NDArray[np.integer[Any]]

_LOSSY = ("JPEG", "MPO", "JPEG2000")
_SHOWN = 5  # values or colours that a message names


class UnusableMask(UserError):
    """A mask that can be read but does not fit: `path` names the file and `reason` says why, without the path.

    Unlike a damaged file it is never skipped: one wrong value usually means that all masks are read wrongly.
    """

    def __init__(self, path: object, reason: str | None = None) -> None:
        # Without a reason, `path` is the whole message, as torch hands on what a loader's process raised.
        super().__init__(str(path) if reason is None else f"cannot use the mask {path}: it {reason}")
        self.path = str(path)
        self.reason = str(self) if reason is None else reason

    def __reduce__(self) -> tuple[type["UnusableMask"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


@dataclass(frozen=True)
class ColourMap:
    """Names and colours (0..255) of the classes in their order, and colours that mean "not labelled"."""

    names: tuple[str, ...]
    colours: tuple[Colour, ...]
    ignored: tuple[Colour, ...] = ()


class Stored(NamedTuple):
    """What a mask file holds, (H, W) as int32.

    `kind` "number": the values as stored; "bit": 0 or 1 of a 1-bit picture; "colour": the class by the colour map, -1
    for an ignored colour.
    """

    values: npt.NDArray[np.int32]
    kind: Literal["number", "bit", "colour"]

    def counts(self) -> dict[int, int]:
        """Pixels of each value, in rising order."""
        flat = self.values.ravel()
        low, high = int(flat.min()), int(flat.max())
        if low >= 0 and high < 65536:
            found = np.bincount(flat)
            return {int(value): int(found[value]) for value in np.flatnonzero(found)}
        values, numbers = np.unique(flat, return_counts=True)
        return {int(value): int(number) for value, number in zip(values, numbers, strict=True)}


@dataclass(frozen=True)
class Labels:
    """What the values in mask files mean.

    Args:
        classes: Names of the K classes.
        values: The number that stands for each class in files: 0 to K - 1, 1 to K, or 0 and 255.
        ignored: Numbers that mean "not labelled".
        colours: A colour for each class, to draw it.
        colour_map: Set if files that hold colours are read by it.
    """

    classes: tuple[str, ...]
    values: tuple[int, ...]
    ignored: tuple[int, ...]
    colours: tuple[Colour, ...]
    colour_map: ColourMap | None = None

    @property
    def ignore_index(self) -> int:
        """The value of unlabelled pixels in what `read_mask` gives: 255, or 65535 with more than 255 classes."""
        return 255 if len(self.classes) <= 255 else 65535

    @property
    def dtype(self) -> type[np.integer[Any]]:
        return np.uint8 if self.ignore_index == 255 else np.int32

    def meaning(self, kind: str) -> dict[int, int]:
        """From a stored value to a class index or `ignore_index`, for files of this kind; other values have none."""
        if kind == "colour":
            return {-1: self.ignore_index, **{k: k for k in range(len(self.classes))}}
        # A 1-bit file says that a pixel is set, and so means 255 where the others write 255.
        names = {0: 0, 1: 1} if kind == "bit" and self.values == (0, 255) else {v: k for k, v in enumerate(self.values)}
        return {**dict.fromkeys(self.ignored, self.ignore_index), **names}

    def fault(self, counts: dict[int, int], kind: str) -> str | None:
        """Why a file of these values (`Stored.counts`) cannot be used, or None."""
        meaning = self.meaning(kind)
        unknown = {value: number for value, number in counts.items() if value not in meaning}
        if not unknown:
            return None
        return f"holds {_values(unknown)} in {sum(unknown.values())} pixels, which is no class"

    def rule(self) -> str:
        """The meaning of the numbers in words."""
        few = len(self.values) <= 2
        values = " and ".join(map(str, self.values)) if few else f"{self.values[0]} to {self.values[-1]}"
        ignored = f", {' and '.join(map(str, self.ignored))} ignored" if self.ignored else ""
        return f"classes are {values}{ignored}"

    def advice(self) -> str:
        """What to change where a file does not fit, with the rule."""
        shift = "if they count from 1, --reduce-zero-label; " if self.values[0] == 0 else ""
        return f"{self.rule()}: correct the masks, or give --num-classes or --ignore-index; {shift}see --help"

    def indices(self, stored: Stored, name: str) -> Indices:
        """Class indices (H, W) with `ignore_index`, of type `dtype`. Raises `UnusableMask` for a meaningless value."""
        fault = self.fault(stored.counts(), stored.kind)
        if fault is not None:
            raise UnusableMask(name, f"{fault}; {self.advice()}")
        meaning = self.meaning(stored.kind)
        table = np.zeros(max(meaning) + 2, self.dtype)  # the last place is that of -1
        for value, index in meaning.items():
            table[value] = index
        result: Indices = table[stored.values]
        return result

    def stored(self, indices: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
        """The user's own numbers for class indices (any shape), uint8 where they fit, else uint16.

        The shift by one is undone, a binary mask has 0 and 255 again. Unlabelled pixels get the first ignored number.

        Raises:
            ValueError: An index is no class, or is unlabelled though no number stands for that.
        """
        found = np.asarray(indices)
        known = np.array(self.values)
        unlabelled = found == self.ignore_index
        if not self.ignored and unlabelled.any():
            raise ValueError("unlabelled pixels, but no number means that")
        if not unlabelled.all() and not 0 <= found[~unlabelled].min() <= found[~unlabelled].max() < len(known):
            raise ValueError(f"class indices must lie in 0..{len(known) - 1}")
        result = np.where(unlabelled, self.ignored[0] if self.ignored else 0, known[np.where(unlabelled, 0, found)])
        return result.astype(np.uint8 if max(*self.values, *self.ignored) < 256 else np.uint16)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, such as a model folder's `config.json`."""
        content: dict[str, Any] = {"classes": list(self.classes), "values": list(self.values)}
        content |= {"ignored": list(self.ignored), "colours": [list(colour) for colour in self.colours]}
        if self.colour_map is not None:
            content["ignored_colours"] = [list(colour) for colour in self.colour_map.ignored]
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        classes, colours = tuple(content["classes"]), _colours(content["colours"])
        by = content.get("ignored_colours")
        colour_map = None if by is None else ColourMap(classes, colours, _colours(by))
        return cls(classes, tuple(content["values"]), tuple(content["ignored"]), colours, colour_map)


def _colours(found: Iterable[Sequence[int]]) -> tuple[Colour, ...]:
    return tuple((int(r), int(g), int(b)) for r, g, b in found)


def _values(found: Iterable[int]) -> str:
    values = sorted(found)
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return f"the value{'s' if len(values) > 1 else ''} {', '.join(map(str, values[:_SHOWN]))}{more}"


def read_mask(path: str | Path, labels: Labels, name: str = "") -> Indices:
    """Class indices (H, W) of a mask file, upright, unlabelled pixels as `labels.ignore_index`.

    Args:
        path: The file.
        labels: The meaning of what it stores.
        name: What errors call it; by default the path.

    Raises:
        UnreadableImage: The file is damaged or no picture.
        UnusableMask: Its form or its values fit no class; see `read_stored_values`.
    """
    name = name or str(path)
    return labels.indices(read_stored_values(path, labels.colour_map, name), name)


def read_stored_values(path: str | Path, colour_map: ColourMap | None = None, name: str = "") -> Stored:
    """What a mask file stores. The rules:

    - Grey of 1, 8, 16 and 32 bits: the number as it stands, never scaled. Float must be whole numbers.
    - A palette picture: the index, never the colour, and never its transparency. Where a colour map is given and the
      palette has its colours in another order, the two contradict each other, and the file is refused.
    - Grey with alpha, palette with alpha: the grey or the index, if every pixel is opaque; else refused, for it is a
      guess whether a transparent pixel is background or unlabelled.
    - Colour: the class whose colour in the colour map is exactly this one; others are refused with their number.
      Without a colour map a picture whose three channels are equal everywhere is grey; any other is refused.
    - Lossy files (JPEG, JPEG 2000, lossy WebP, TIFF with JPEG inside) are refused, for their values are not those
      that were drawn. So are GIF, whose writers number the palette anew as they like, CMYK and the like.
    - An EXIF orientation of the mask itself is applied.

    Raises:
        UnreadableImage: The file is damaged or no picture.
        UnusableMask: One of the refusals above.
    """
    name = name or str(path)
    image = read_stored(path)
    _refuse_lossy(image, Path(path), name)
    values = np.asarray(image)
    if image.mode == "1":
        return Stored(values.astype(np.int32), "bit")
    if image.mode in ("LA", "PA", "RGBA"):
        hidden = int((values[..., -1] != 255).sum())
        if hidden:
            raise UnusableMask(
                name, f"has {hidden} transparent pixels of {values[..., -1].size}: save it without transparency"
            )
        values = values[..., 0] if image.mode != "RGBA" else values[..., :3]
    if image.mode in ("P", "PA"):
        if colour_map is not None:
            _refuse_reordered_palette(image, values, colour_map, name)
        return Stored(values.astype(np.int32), "number")
    if image.mode == "F":
        if not (np.isfinite(values).all() and (values == np.rint(values)).all() and abs(values).max() < 2**31):
            raise UnusableMask(name, "holds floats that are no whole numbers: save it with 8 or 16 bits")
        return Stored(values.astype(np.int32), "number")
    if image.mode in ("L", "LA", "I") or image.mode.startswith("I;16"):
        return Stored(values.astype(np.int32), "number")
    if image.mode not in ("RGB", "RGBA"):
        raise UnusableMask(name, f"is a {image.mode} picture: save it as grey, palette or RGB")
    return _by_colour(values, colour_map, name)


def _refuse_lossy(image: Image.Image, path: Path, name: str) -> None:
    inner = str(image.info.get("compression", "")) if image.format == "TIFF" else ""
    lossy_webp = image.format == "WEBP" and b"VP8L" not in path.read_bytes()
    if image.format == "GIF":
        raise UnusableMask(name, "is a GIF, whose writers number the colours anew: make it PNG again")
    if image.format in _LOSSY or "jpeg" in inner or inner == "webp" or lossy_webp:
        raise UnusableMask(
            name, f"is a {image.format} file, which is lossy and changes the values at borders: make it PNG again"
        )


def _refuse_reordered_palette(image: Image.Image, values: Any, colour_map: ColourMap, name: str) -> None:
    # Programs that shrink files turn colour masks into palettes in an order of their own; as indices they are noise.
    flat = image.getpalette("RGB") or []
    used = [index for index in np.unique(values).tolist() if 3 * index + 3 <= len(flat)]
    colours = {index: (flat[3 * index], flat[3 * index + 1], flat[3 * index + 2]) for index in used}
    known = {*colour_map.colours, *colour_map.ignored}
    own = dict(enumerate(colour_map.colours))
    moved = [index for index in used if colours[index] in colour_map.colours and colours[index] != own.get(index)]
    if moved and all(colour in known for colour in colours.values()):
        right = colour_map.colours.index(colours[moved[0]])
        raise UnusableMask(
            name,
            f"is a palette picture whose index {moved[0]} has the colour of class {right}, {colour_map.names[right]}: "
            "save it as RGB to have it read by colour, or put the colour map into the palette's order",
        )


def _by_colour(values: npt.NDArray[np.uint8], colour_map: ColourMap | None, name: str) -> Stored:
    """Classes of colours (H, W, 3)."""
    if colour_map is None:
        if (values == values[..., :1]).all():
            return Stored(values[..., 0].astype(np.int32), "number")
        raise UnusableMask(name, "is a colour picture: give --colour-map FILE with a line name,r,g,b for each class")
    packed = _pack(values)
    known = {int(_pack(np.array(colour))): k for k, colour in enumerate(colour_map.colours)}
    known |= {int(_pack(np.array(colour))): -1 for colour in colour_map.ignored}
    present, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
    unknown = [(int(n), int(c)) for c, n in zip(present, counts, strict=True) if int(c) not in known]
    if unknown:
        unknown.sort(reverse=True)
        shown = [f"{c >> 16},{c >> 8 & 255},{c & 255} ({n} pixels)" for n, c in unknown[:_SHOWN]]
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UnusableMask(
            name, f"holds colours that are not in the colour map: {', '.join(shown)}{more}; add them to it, as ignore?"
        )
    classes = np.array([known[int(colour)] for colour in present], np.int32)
    return Stored(classes[inverse].reshape(packed.shape), "colour")


def _pack(colours: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    channels = colours.astype(np.int32)
    packed: npt.NDArray[np.int32] = (channels[..., 0] << 16) | (channels[..., 1] << 8) | channels[..., 2]
    return packed


def mask_picture(stored: npt.NDArray[np.integer[Any]]) -> Image.Image:
    """The user's numbers (H, W), as `Labels.stored` gives them, as a grey picture of 8 or 16 bits."""
    return Image.fromarray(np.ascontiguousarray(stored))
