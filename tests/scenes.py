"""Pictures with masks that are made, not stored: coloured rectangles on grey, each colour a class."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

SCENE_COLOURS = np.array([(110, 110, 110), (200, 30, 30), (30, 200, 30), (30, 30, 200)])
SCENE_CLASSES = ["ground", "red", "green", "blue"]


def scene(seed: int, size: tuple[int, int] = (32, 48), ignored: int = 255) -> tuple[Image.Image, npt.NDArray[np.uint8]]:
    """One picture, (height, width) in `size`, and its mask of classes 0 to 3, with an unlabelled first row."""
    draw = np.random.default_rng(seed)
    mask = np.zeros(size, np.uint8)
    for label in (1, 2, 3):
        top, left = (int(draw.integers(0, max(1, side - side // 3))) for side in size)
        mask[top : top + max(1, size[0] // 3), left : left + max(1, size[1] // 3)] = label
    noise = draw.integers(-20, 21, (*size, 3))
    picture = Image.fromarray(np.clip(SCENE_COLOURS[mask] + noise, 0, 255).astype(np.uint8))
    mask[0] = ignored
    return picture, mask


def scene_part(folder: Path, count: int, size: tuple[int, int] = (32, 48), start: int = 0) -> Path:
    """`images/` and `masks/` with `count` pairs, 00.png and so on."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for index in range(count):
        picture, mask = scene(start + index, size)
        picture.save(folder / "images" / f"{index:02}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{index:02}.png")
    return folder


def scene_folder(root: Path, train: int, val: int, size: tuple[int, int] = (32, 48)) -> Path:
    """`train/` and `val/` of scenes."""
    scene_part(root / "train", train, size)
    scene_part(root / "val", val, size, start=9000)
    return root
