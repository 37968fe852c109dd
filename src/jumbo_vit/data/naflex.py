"""Training pictures of any size and shape as sequences of patches, by timm's NaFlex transforms and collation.

What is unusual: the order of the samples, the length of each update and every random choice stay functions of the seed
and the position, as for pictures of one size; of timm's pipeline the pieces are used, not its schedule.
"""

import math
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from PIL.Image import Image
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from torch import Tensor

from jumbo_vit.data.pipeline import Augmentation, Preparation, Sized
from jumbo_vit.errors import UserError


class ToSequence:
    """A picture as a sequence of at most `length` patches, cropped and augmented, its crop's shape kept.

    Args:
        transform: timm's training transform for NaFlex, which gives a picture (C, H, W) that the patches tile.
        patchify: Cuts it.
        length: The most patches; the batch is filled up to it.
    """

    def __init__(self, transform: Any, patchify: Patchify, length: int) -> None:
        self.transform, self.patchify, self.length = transform, patchify, length

    def __call__(self, picture: Image) -> dict[str, Any]:
        """`patches` (N, P*P*C), `patch_coord` (N, 2) as (row, column), `patch_valid` (N,), and `length`."""
        try:
            tensor = self.transform(picture)
        except ValueError as error:  # timm's answer to a shape that it would have to make 100,000 times smaller
            raise UserError(
                f"a picture of {picture.height}x{picture.width} pixels cannot be cut into {self.length} patches, as "
                "--naflex-train-seq-lens asks for: remove it"
            ) from error
        return {**self.patchify(tensor), "length": self.length}


def sequences(
    augment: Augmentation,
    preparation: Preparation,
    patch: tuple[int, int],
    lengths: Iterable[int],
    channels_last: bool = True,
) -> Sized:
    """For each length the transform of a picture to a sequence, and what is `enough` of a JPEG for it.

    Args:
        augment: Crop, flip and colours; erasing works on the picture before it is cut.
        preparation: Mean, standard deviation and channels.
        patch: (height, width) of a patch.
        lengths: The most patches of a picture.
        channels_last: The order within a patch, as the model has it.
    """
    found: dict[Hashable, tuple[Any, int | None]] = {}
    for length in lengths:
        transform = augment.transform(preparation, naflex=True, patch_size=patch, max_seq_len=length)
        # A crop is scaled to about `length` patches, rounded up to whole ones, whatever its shape.
        side = (math.sqrt(length) + 1) * max(patch)
        enough = math.ceil(side / math.sqrt(augment.scale[0] / max(augment.ratio[1], 1 / augment.ratio[0])))
        found[length] = ToSequence(transform, Patchify(patch, channels_last=channels_last), length), enough
    return found


def collate(samples: list[tuple[dict[str, Any], Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Samples of one length as a batch: `patches` (B, N, P*P*C), `patch_coord` (B, N, 2) and `patch_valid` (B, N),
    which is False where a sequence was filled up; targets and weights as ever."""
    patches, targets, weights = zip(*samples, strict=True)
    (length,) = {one["length"] for one in patches}
    batch, stacked = NaFlexCollator(length)(list(zip(patches, targets, strict=True)))
    batch.pop("seq_len")
    return batch, stacked, torch.stack(weights)
