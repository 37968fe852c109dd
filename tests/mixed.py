"""One folder with everything that goes wrong at once."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from tests.pictures import colour_folder, square

ODD = "grün $x_1$"  # a class name with an umlaut and with signs that a drawing library takes for a formula
UNREADABLE = [
    (f"train/{ODD}/text.jpg", "is not a picture"),
    ("train/red/cut.jpg", "is cut off"),
    ("train/red/empty.png", "is empty"),
    ("val/blue/broken.png", "is cut off or damaged (begins like PNG, but its header cannot be read)"),
]
SKIPPED = [(f"train/{ODD}/notes.txt", "not a picture format")]


def mixed_folder(root: Path) -> Path:
    """Good and bad pictures: 3 classes, 17 readable ones for training and 7 held out."""
    colour_folder(root, train=3, val=2)
    for number, path in enumerate(sorted((root / "val").rglob("*.png"))):
        square(path.parent.name, 9000 + number).save(path)  # else the same as in train/
    for part in ("train", "val"):
        (root / part / "green").rename(root / part / ODD)
    red, odd = root / "train" / "red", root / "train" / ODD
    square("red", 1).save(red / "cut.jpg", quality=95)
    (red / "cut.jpg").write_bytes((red / "cut.jpg").read_bytes()[:400])
    (red / "empty.png").write_bytes(b"")
    (odd / "text.jpg").write_text("no picture")
    (odd / "notes.txt").write_text("no picture either")
    (root / "val" / "blue" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    deep = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 60
    Image.fromarray(deep).save(red / "deep.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    square("red", 2, (20, 50)).save(red / "turned.jpg", exif=exif)
    square("red", 3).convert("RGBA").save(red / "alpha.png")
    square("red", 4).convert("CMYK").save(odd / "print.jpg")
    square("green", 5).save(odd / "moving.gif", save_all=True, append_images=[square("green", 6)])
    square("green", 7).save(odd / "日本.png")
    for part in ("train", "val"):
        (root / part / ".hidden").mkdir()
        square("blue", 8).save(root / part / ".hidden" / "a.png")
    (root / "train" / "nothing").mkdir()
    shutil.copy(red / "00.png", red / "again.png")  # within a split
    shutil.copy(red / "01.png", root / "val" / ODD / "other.png")  # across the splits, with another label
    shutil.copy(odd / "00.png", odd / "same.jpg")  # within a split, under another extension
    return root
