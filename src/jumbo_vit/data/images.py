"""The one picture reader.

Everything that looks at pictures (training, evaluation, prediction, attention, export checks) reads them with
`read_image`, so that all of them see the same pixels and agree on which files count.
"""

import io
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from jumbo_vit.data.find import NOT_DECODED, Skipped, find_images, is_hidden
from jumbo_vit.errors import UnreadableImage, UserError

__all__ = ["BACKGROUND", "Skipped", "find_images", "is_hidden", "read_image", "read_stored"]

BACKGROUND = (255, 255, 255)
"""The colour that shows through transparent pixels."""

_MODES = {1: "L", 3: "RGB"}
_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _Refused(Exception):
    """Why a picture is not taken; the caller adds which one it is."""


def read_image(
    source: str | Path | bytes | Image.Image | npt.NDArray[Any],
    in_chans: int = 3,
    name: str = "given as bytes",
    enough: int | None = None,
) -> Image.Image:
    """The picture as mode "L" (`in_chans=1`) or "RGB" (`in_chans=3`), upright, 8 bits a channel.

    `source` is a path, the bytes of a file (`name` stands for them in errors), a PIL image, or an array (H, W) or
    (H, W, 1|3|4) of bool, uint8, uint16 or float. The rules:

    - The EXIF orientation is applied; EXIF data that cannot be read count as none.
    - Transparency of any kind is laid on `BACKGROUND`, white.
    - Of an animation or a file of several pictures: the first. (Of a PIL image: the frame it stands at.)
    - 16-bit grey is scaled over the full 16-bit range, value / 257, whatever values the picture uses. 32-bit integers
      are taken as 16-bit values and refused outside 0..65535.
    - Float must lie in 0..1 and is scaled by 255; anything else, NaN included, is refused, for its range is a guess.
    - Palettes, 1-bit, CMYK, YCbCr, LAB and HSV become RGB; colour profiles inside the file are not applied.
    - Colour becomes grey by Pillow's luma, 0.299 R + 0.587 G + 0.114 B.
    - A file is what its content says, whatever its extension. PostScript and WMF, which other programs would draw,
      are refused. So are pictures above Pillow's own limit, `PIL.Image.MAX_IMAGE_PIXELS`, and files that are cut off.
    - With `enough`, a JPEG may come at a half, a quarter or an eighth of its size, as long as both sides keep that many
      pixels: its decoder then leaves out the work for the rest. Training alone asks for this (`docs/data.md`).

    A PIL image that needs no change is returned itself. Raises `UnreadableImage`, with the path and the reason.
    """
    mode = _MODES.get(in_chans)
    if mode is None:
        raise UserError(f"pictures have 1 channel (grey) or 3 (colour), not {in_chans}: set in_chans to 1 or 3")
    if isinstance(source, str | Path):
        return _guarded(lambda: _read_file(Path(source), mode, enough), str(source))
    if isinstance(source, bytes):
        return _guarded(lambda: _read_bytes(source, name, mode, enough), name)
    if isinstance(source, np.ndarray):
        shape = f"array of shape {source.shape}, {source.dtype}"
        return _guarded(lambda: _as_mode(_from_array(source), mode), shape)
    if isinstance(source, Image.Image):
        file = str(getattr(source, "filename", "")) or "given as a PIL image"
        return _guarded(lambda: _as_mode(source, mode), file)
    raise UserError(f"a picture is a path, a PIL image or a NumPy array, not {type(source).__name__}")


def read_stored(path: str | Path) -> Image.Image:
    """The first picture of a file in its own mode, values untouched, upright, with its `format`: for masks, not to see.

    Raises `UnreadableImage`, for what `read_image` raises it too but no mode or value.
    """

    def read() -> Image.Image:
        _check_file(Path(path))
        with Path(path).open("rb") as stream:
            opened = _open(stream, str(path))
            _check_pixels(opened)
            _check_loaded(opened)
            image = _upright(opened).copy()
        image.info, image.format = dict(opened.info), opened.format
        return image

    return _guarded(read, str(path))


def _guarded(make: Callable[[], Image.Image], name: str) -> Image.Image:
    try:
        return make()
    except _Refused as refusal:
        raise UnreadableImage(name, str(refusal)) from None
    except Exception as error:
        # Decoders raise whatever the damage leads to (ValueError, KeyError, MemoryError, zlib.error...): all of it
        # means that this picture cannot be used.
        raise UnreadableImage(name, _plain_reason(error)) from error


def _plain_reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:120] or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"has too many pixels ({text})"
    if isinstance(error, EOFError) or "truncated" in text.lower() or "unexpected end" in text.lower():
        return "is cut off"
    return f"is damaged ({text})"


def _check_file(path: Path) -> None:
    info = path.stat()
    # A pipe or a device would be waited on for ever.
    if not stat.S_ISREG(info.st_mode):
        raise _Refused("is a folder" if stat.S_ISDIR(info.st_mode) else "is not a regular file")
    if info.st_size == 0:
        raise _Refused("is empty")


def _read_file(path: Path, mode: str, enough: int | None) -> Image.Image:
    _check_file(path)
    with path.open("rb") as stream:
        return _read_stream(stream, str(path), mode, enough)


def _read_bytes(content: bytes, name: str, mode: str, enough: int | None) -> Image.Image:
    if not content:
        raise _Refused("is empty")
    return _read_stream(io.BytesIO(content), name, mode, enough)


def _read_stream(stream: IO[bytes], path: str, mode: str, enough: int | None) -> Image.Image:
    opened = _open(stream, path)
    _check_pixels(opened)
    if enough is not None and opened.format in ("JPEG", "MPO"):
        opened.draft(None, (enough, enough))
    image = _as_mode(opened, mode)
    if image is opened and opened.format not in ("JPEG", "PNG"):
        # Readers of several frames keep the closed file; a copy is a plain picture.
        image = image.copy()
    # What was applied (orientation, transparency) must not be applied again by the next reader.
    image.info = {}
    return image


def _open(stream: IO[bytes], path: str) -> ImageFile.ImageFile:
    """`PIL.Image.open` without its warning about large pictures, which names no file.

    Silencing the warning instead would change the interpreter's filters, which all threads share.
    """
    Image.init()
    prefix = stream.read(16)
    looks_like = ""
    for name in Image.ID:
        factory, accepts = Image.OPEN[name]
        # An accepting function answers with a text when it knows the format but cannot read it.
        if accepts is not None and accepts(prefix) is not True:
            continue
        if name in NOT_DECODED:
            raise _Refused(f"has the format {name}, which is not decoded here: convert it to PNG")
        stream.seek(0)
        try:
            return factory(stream, path)
        except (SyntaxError, IndexError, TypeError, struct.error):
            looks_like = looks_like or (name if accepts is not None else "")
    if looks_like:
        raise _Refused(f"is cut off or damaged (begins like {looks_like}, but its header cannot be read)")
    raise _Refused("is not a picture")


def _check_pixels(image: Image.Image) -> None:
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        hint = "make it smaller or raise PIL.Image.MAX_IMAGE_PIXELS"
        raise _Refused(f"has {pixels} pixels, above the limit of {limit} ({hint})")


def _check_loaded(image: Image.Image) -> None:
    image.load()  # PNG and TIFF know their orientation only when read to the end
    if image.width == 0 or image.height == 0:
        raise _Refused("has no pixels")


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    _check_loaded(image)
    image = _upright(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bits(image)
    elif image.mode == "LAB":
        image = _lab_to_rgb(image)
    if image.has_transparency_data:
        image = _on_background(image)
    if image.mode == mode:
        return image
    if mode == "L" and image.mode not in ("1", "RGB"):
        image = image.convert("RGB")  # so that grey is always the luma of the colours that RGB would show
    return image.convert(mode)


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # broken EXIF data raise anything; the pixels are good all the same
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    if turn is None:
        return image
    turned = image.transpose(turn)
    # The copy inherits the tag; a reader of the copy would turn it again.
    turned.info = {key: value for key, value in image.info.items() if key == "transparency"}
    return turned


def _eight_bits(image: Image.Image) -> Image.Image:
    """Mode L of a deeper grey picture, LA if one of its values is declared transparent."""
    values = np.asarray(image)
    if image.mode == "F":
        grey = _scale_float(values)
    else:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535:
            raise _Refused(f"has values {low}..{high}, outside the 16-bit range 0..65535")
        grey = _scale_16_bit(values)
    result = Image.fromarray(grey)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        result.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return result


def _scale_16_bit(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    scaled: npt.NDArray[np.uint8] = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return scaled


def _scale_float(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if not np.isfinite(values).all():
        raise _Refused("float values must lie in 0..1, and some are NaN or infinite")
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        raise _Refused(f"float values must lie in 0..1, and these are {low:g}..{high:g}: rescale them")
    scaled: npt.NDArray[np.uint8] = np.rint(values * 255).astype(np.uint8)
    return scaled


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert converted is not None  # only an in-place conversion returns nothing
    return converted


def _on_background(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    ground = Image.new("RGBA", image.size, (*BACKGROUND, 255))
    ground.alpha_composite(image.convert("RGBA"))
    return ground.convert("RGB")


def _from_array(array: npt.NDArray[Any]) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in array.shape:
        raise _Refused("the shape must be (H, W) or (H, W, 1|3|4), channels last")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype == np.uint16:
        array = _scale_16_bit(array)
    elif np.issubdtype(array.dtype, np.floating):
        array = _scale_float(array)
    elif array.dtype != np.uint8:
        raise _Refused("the type must be bool, uint8, uint16 or float (0..1)")
    return Image.fromarray(np.ascontiguousarray(array))
