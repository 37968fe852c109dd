"""Pictures that are made, not stored: noisy squares of one colour."""

from pathlib import Path

import numpy as np
from PIL import Image

TEST_MODEL = "jumbo_vit_test_patch8_32"
COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


def square(colour: str, seed: int, size: tuple[int, int] = (32, 32)) -> Image.Image:
    """One picture, (height, width) in `size`."""
    noise = np.random.default_rng(seed).integers(-25, 26, (*size, 3))
    return Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8))


def colour_tree(root: Path, count: int, size: tuple[int, int] = (32, 32), names: dict[str, str] | None = None) -> Path:
    """A folder of class folders with `count` pictures each; `names` gives the classes other names."""
    for number, colour in enumerate(COLOURS):
        folder = root / (names or {}).get(colour, colour)
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            square(colour, 1000 * number + index, size).save(folder / f"{index:02}.png")
    return root


def colour_folder(root: Path, train: int, val: int, size: tuple[int, int] = (32, 32)) -> Path:
    """`train/` and `val/` of colours."""
    colour_tree(root / "train", train, size)
    colour_tree(root / "val", val, size)
    return root
