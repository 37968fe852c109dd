"""Small runs for the tests of the training loop."""

import atexit
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from jumbo_vit.data.digits import digits_splits
from jumbo_vit.tasks.config import TrainConfig

# 240 pictures for training in batches of 32: 8 updates an epoch, the last with 16.
TRAIN, VAL = 240, 50


@cache
def digit_pictures() -> str:
    """A folder of 290 digits as PNG files of 8x8 pixels, made once for a session."""
    root = Path(tempfile.mkdtemp(prefix="jumbo-vit-digits-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    splits = digits_splits()
    for part, images, count in (("train", splits.train, TRAIN), ("val", splits.val, VAL)):
        for index in range(count):
            label = images.classes[images.samples[index].labels[0]]
            folder = root / part / label
            folder.mkdir(parents=True, exist_ok=True)
            picture: Image.Image = images.read(index, 1)
            picture.save(folder / f"{index:04d}.png")
    return str(root)


def small_options(**changes: Any) -> dict[str, Any]:
    """Options of a run of a second or two."""
    options: dict[str, Any] = {
        "data": digit_pictures(),
        "model": "jumbo_vit_test_patch8_32",
        "img_size": "8",
        "patch_size": 2,
        "in_chans": 1,
        "epochs": 2,
        "batch_size": 32,
        "workers": 0,
        "logger": ["none"],
        "recovery_interval": 3,
    }
    return options | changes


def small_config(out: Path, **changes: Any) -> TrainConfig:
    """A run of a second or two."""
    return TrainConfig(**small_options(out=str(out), **changes))


def small_command(out: Path, **changes: Any) -> list[str]:
    """The same as words of the command line."""
    options = small_options(out=str(out), **changes)
    words: list[str] = []
    for key, value in options.items():
        texts = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)]
        words += [f"--{key.replace('_', '-')}", *texts]
    return words


def state_of(out: Path) -> dict[str, Any]:
    """A run's state, without what may differ between equal runs."""
    content: dict[str, Any] = torch.load(out / "last.ckpt", weights_only=True)
    content["progress"].pop("seconds")
    content.pop("versions")
    return content


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Paths at which two nested states differ in a bit."""
    if isinstance(left, torch.Tensor):
        return [] if isinstance(right, torch.Tensor) and torch.equal(left, right) else [path]
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{path}: keys"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: length"]
        return [d for i, pair in enumerate(zip(left, right, strict=True)) for d in differences(*pair, f"{path}/{i}")]
    nan = isinstance(left, float) and math.isnan(left) and math.isnan(right)
    return [] if left == right or nan else [path]
