"""The pictures of `fuzz.py`, and the damage that is done to files of any kind.

A file depends on the seed, its kind and its number alone, so that one of a thousand can be made again by itself. (Those
in torch's old format do not quite: torch writes addresses of memory into them.)
"""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

EXTREMES = (0, 1, 2, 255, 10**4, 65535, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**63 - 1, 2**64 - 1)


@dataclass(frozen=True)
class Case:
    """One file: `kind` says what it began as, `damage` what was done to it ("none" for a sound one)."""

    number: int
    kind: str
    damage: str
    data: bytes
    suffix: str


Damage = Callable[[random.Random, bytes, bytes], bytes]


def _flip(draw: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    # Half of the time near the front, where headers are.
    end = len(data) if draw.random() < 0.5 else min(len(data), 200)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        changed[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: draw.choice((0, 1, 8, len(data) - 1, draw.randrange(len(data)), draw.randrange(len(data))))]


def _insert(draw: random.Random, data: bytes, _: bytes) -> bytes:
    place = draw.randrange(len(data) + 1)
    extra = draw.choice((bytes(draw.randrange(1, 64)), draw.randbytes(draw.randrange(1, 64)), b"\xff" * 16))
    return data[:place] + extra + data[place:]


def _swap(draw: random.Random, data: bytes, _: bytes) -> bytes:
    a, b, c, d = sorted(draw.randrange(len(data) + 1) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _remove(draw: random.Random, data: bytes, _: bytes) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + data[place + draw.randrange(1, 200) :]


def _splice(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: draw.randrange(len(data))] + other[draw.randrange(len(other)) :]


def _number(draw: random.Random, data: bytes, _: bytes) -> bytes:
    """A number of the header, wherever it is, gets an extreme value."""
    size = draw.choice((1, 2, 4, 8))
    place = draw.randrange(max(1, min(len(data), draw.choice((32, 64, 512, len(data)))) - size))
    value: bytes = (draw.choice(EXTREMES) % 256**size).to_bytes(size, draw.choice(("little", "big")))
    return data[:place] + value + data[place + size :]


DAMAGES: dict[str, Damage] = {
    "bits flipped": _flip,
    "cut": _cut,
    "bytes inserted": _insert,
    "parts swapped": _swap,
    "bytes removed": _remove,
    "spliced": _splice,
    "number changed": _number,
}


def sound_pictures() -> dict[str, bytes]:
    """A small picture in every format that Pillow writes and many people have, by a name that ends in its suffix."""
    rows, columns = np.mgrid[0:20, 0:26]
    noise = np.random.default_rng(0).integers(0, 60, (20, 26, 3))
    colour = Image.fromarray((np.stack([rows * 9, columns * 7, rows + columns], -1) + noise).clip(0, 255).astype("u1"))
    grey, alpha = colour.convert("L"), colour.convert("RGBA")
    alpha.putalpha(grey)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    real = Image.fromarray(np.asarray(grey).astype(np.float32) / 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    frames: dict[str, Any] = {"save_all": True, "append_images": [grey.convert("RGB"), colour.rotate(90)]}
    wanted: list[tuple[str, Image.Image, dict[str, Any]]] = [
        ("rgb.jpg", colour, {"quality": 90, "exif": exif}),
        ("progressive.jpg", colour, {"progressive": True}),
        ("grey.jpg", grey, {}),
        ("cmyk.jpg", colour.convert("CMYK"), {}),
        ("rgb.png", colour, {"exif": exif}),
        ("1bit.png", grey.convert("1"), {}),
        ("grey.png", grey, {}),
        ("16bit.png", deep, {}),
        ("palette.png", colour.convert("P"), {"transparency": 3}),
        ("alpha.png", alpha, {}),
        ("animated.png", colour, frames),
        ("animated.gif", colour, frames),
        ("still.gif", grey, {"transparency": 0}),
        ("raw.tif", colour, {}),
        ("deflate.tif", alpha, {"compression": "tiff_adobe_deflate"}),
        ("lzw16.tif", deep, {"compression": "tiff_lzw"}),
        ("float.tif", real, {}),
        ("jpeg.tif", colour, {"compression": "jpeg"}),
        ("fax.tif", grey.convert("1"), {"compression": "group4"}),
        ("pages.tif", colour, frames),
        ("rgb.bmp", colour, {}),
        ("palette.bmp", colour.convert("P"), {}),
        ("lossy.webp", colour, {}),
        ("lossless.webp", alpha, {"lossless": True}),
        ("animated.webp", colour, frames),
        ("rgb.ppm", colour, {}),
        ("grey.pgm", grey, {}),
        ("16bit.pgm", deep, {}),
        ("png.ico", alpha, {"sizes": [(16, 16), (20, 20)]}),
        ("bmp.ico", alpha, {"sizes": [(16, 16)], "bitmap_format": "bmp"}),
        ("rgb.avif", colour, {}),
        ("rgb.jp2", colour, {}),
        ("rgb.tga", alpha, {"compression": "tga_rle"}),
    ]
    Image.init()
    made = {}
    for name, image, options in wanted:
        kind = Image.registered_extensions().get(f".{name.partition('.')[2]}")
        if kind not in Image.SAVE:  # this Pillow was built without the library
            continue
        buffer = io.BytesIO()
        image.save(buffer, format=kind, **options)
        made[name] = buffer.getvalue()
    return made


def _declare(draw: random.Random, data: bytes, _: bytes) -> bytes:
    """Another width or height than the picture's, up to absurd ones, where its format keeps them."""
    size = draw.choice((0, 1, 25, 300, 9000, 16383, 30000, 65535, 10**6, 2**31 - 1, 2**32 - 1))
    changed = bytearray(data)

    def put(place: int, count: int, order: Any) -> bytes:
        changed[place : place + count] = min(size, 256**count - 1).to_bytes(count, order)
        return bytes(changed)

    if data[:4] == b"\x89PNG":
        put(draw.choice((16, 20)), 4, "big")
        changed[29:33] = struct.pack(">I", zlib.crc32(changed[12:29]))
        return bytes(changed)
    if data[:3] == b"GIF":
        return put(draw.choice((6, 8)), 2, "little")
    if data[:2] == b"BM":
        return put(draw.choice((18, 22)), 4, "little")
    if data[:2] == b"\xff\xd8":
        frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        return put(frame + draw.choice((5, 7)), 2, "big")
    if data[:4] == b"RIFF":
        return put(24 if data[12:16] == b"VP8X" else 26, 3 if data[12:16] == b"VP8X" else 2, "little")
    if data[:2] == b"II":
        first = struct.unpack_from("<I", data, 4)[0]
        return put(first + 2 + 12 * draw.randrange(12) + draw.choice((4, 8)), 4, "little")
    if data[:1] == b"P":
        return data.replace(b"26 20", f"{size} {draw.choice((20, size))}".encode(), 1)
    for box, offset in ((b"ispe", 8), (b"ihdr", 4)):  # AVIF and JPEG 2000
        if box in data:
            return put(data.find(box) + offset + draw.choice((0, 4)), 4, "big")
    return _number(draw, data, b"")


def pictures(seed: int, count: int) -> Iterator[Case]:
    """Every format once as it is, then damaged ones in turn."""
    sound = sound_pictures()
    names = list(sound)
    ways = {**DAMAGES, "size declared": _declare}
    for number in range(count):
        draw = random.Random(f"{seed} picture {number}")
        name = names[number % len(names)]
        damage, data = "none", sound[name]
        if number >= len(names):
            damage = draw.choice([*ways, "size declared"])
            data = ways[damage](draw, data, sound[draw.choice(names)])
        yield Case(number, name, damage, data, f".{name.partition('.')[2]}")
