"""Made data for a dry run: a small folder where the data are not on the machine, and sequences of patches."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor, nn

from jumbo_vit.errors import UserError


@dataclass(frozen=True)
class Known:
    """A data set whose size is known without having it.

    Args:
        classes: Its classes.
        train: Training pictures.
        held_out: Held-out pictures.
    """

    classes: int
    train: int
    held_out: int


# By the name of the folder in --data. ImageNet-21K-P is the winter-21 release as processed by Alibaba-MIIL.
KNOWN = {
    "imagenet": Known(1000, 1_281_167, 50_000),
    "imagenet-1k": Known(1000, 1_281_167, 50_000),
    "imagenet-21k-p": Known(10_450, 11_060_223, 522_500),
    "cifar10": Known(10, 50_000, 10_000),
    "tiny-imagenet-100": Known(100, 25_000, 5_000),
}


def absent(data: str) -> bool:
    """Whether `data` names nothing on this machine; a pattern or an address is looked up by what opens it."""
    if data == "digits" or any(sign in data for sign in "*{[") or "://" in data:
        return False
    return not Path(data).expanduser().exists()


def known(data: str) -> Known:
    """What is known of data that are not there.

    Raises:
        UserError: Nothing is.
    """
    name = Path(data).name.lower().replace("_", "-")
    if name not in KNOWN:
        raise UserError(
            f"--data {data} is not there, and its number of pictures and classes is not known: give data that are "
            f"there, or a folder of one of these names: {', '.join(KNOWN)}"
        )
    return KNOWN[name]


def make_folder(root: Path, classes: int, in_chans: int) -> None:
    """Write train/ and val/ with a folder for each class and one small JPEG in each; 1,000 are named as ImageNet's."""
    names = ImageNetInfo("imagenet-1k").label_names() if classes == 1000 else [f"{n:05}" for n in range(classes)]
    contents = [_picture(seed, in_chans) for seed in range(4)]
    for part in ("train", "val"):
        for number, name in enumerate(names):
            write = root / part / name / "made.jpg"
            write.parent.mkdir(parents=True)
            write.write_bytes(contents[number % len(contents)])


def _picture(seed: int, in_chans: int) -> bytes:
    """A smooth picture of 96x72 pixels, about a kilobyte."""
    rng = np.random.default_rng(seed)
    corners = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)).resize((96, 72))
    file = io.BytesIO()
    (corners.convert("L") if in_chans == 1 else corners).save(file, "JPEG")
    return file.getvalue()


class OfSequences(nn.Module):
    """A NaFlex model on full sequences (B, N, P*P*C) of patches in one row, as its loader gives them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, patches: Tensor) -> Tensor:
        """Logits (B, C)."""
        batch, length, _ = patches.shape
        columns = torch.arange(length, device=patches.device)
        places = torch.stack([torch.zeros_like(columns), columns], -1).expand(batch, -1, -1)
        valid = torch.ones(batch, length, dtype=torch.bool, device=patches.device)
        logits: Tensor = self.model({"patches": patches, "patch_coord": places, "patch_valid": valid})
        return logits
