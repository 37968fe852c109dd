"""Picture and mask through one transform: in training with chance, in evaluation without.

What leaves here: a picture (C, H, W) of floats, normalised, and a target (H, W) of int64 of the same H and W, which
holds class indices and the set's `ignore_index` and no other value. No step averages mask values. Every pixel of a
target may be unlabelled: a loss must then be 0, not 0 / 0, so divide by the number of labelled pixels or 1, which
`torch.nn.functional.cross_entropy` with `reduction="mean"` does not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from jumbo_vit.data.masks import Indices
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.sampler import Draw
from jumbo_vit.data.segments import SegmentSet
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed, seed_everything


@dataclass(frozen=True)
class JointAugmentation:
    """Chance in training, after MMSegmentation's pipeline for ADE20K, which Segmenter and most others use.

    Args:
        scale: Smallest and largest factor by which a picture's sides are resized.
        short_side: Length in pixels of the shorter side that the factor applies to; None takes the picture's own.
        category_cap: A crop is drawn again while one class has more than this share of its labelled pixels; 1 means
            never.
        tries: Crops that are drawn at the most; the last is taken as it is.
        hflip: Probability of a horizontal flip.
        rotate: Largest angle in degrees of a random rotation, whose corners become unlabelled; 0 for none.
        photometric: Changes of brightness, contrast, saturation and hue, each with probability 1/2.
    """

    scale: tuple[float, float] = (0.5, 2.0)
    short_side: int | None = None
    category_cap: float = 0.75
    tries: int = 10
    hflip: float = 0.5
    rotate: float = 0.0
    photometric: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UserError(f"the scale {self.scale[0]} to {self.scale[1]} must rise and be above 0")
        if not 0 < self.category_cap <= 1:
            raise UserError(f"the category cap {self.category_cap} must lie above 0 and not above 1")
        if self.tries < 1 or (self.short_side is not None and self.short_side < 1):
            raise UserError("tries and the shorter side must be 1 or more")
        if not 0 <= self.hflip <= 1 or not 0 <= self.rotate <= 180:
            raise UserError(f"hflip {self.hflip} must lie in 0..1 and rotate {self.rotate} in 0..180")


class JointTrain:
    """Picture and mask to a training crop of the preparation's size. Draws from the global generators.

    Order: scale, rotate, crop, flip, colours, normalise, pad. A picture smaller than the crop is padded to the right
    and below, with the mean colour and `ignore_index`.
    """

    def __init__(self, preparation: Preparation, augment: JointAugmentation, ignore_index: int) -> None:
        self.preparation, self.augment, self.ignore = preparation, augment, ignore_index
        self.size = (preparation.input_size[1], preparation.input_size[2])
        self.colours = _photometric() if augment.photometric else None

    def __call__(self, picture: Image.Image, mask: Indices) -> tuple[Tensor, Tensor]:
        """Picture (C, H, W) and target (H, W) of the crop's size."""
        image, target = _tensors(picture, mask)
        image, target = self._scaled(image, target)
        if self.augment.rotate:
            image, target = self._rotated(image, target)
        top, left = self._crop(target)
        image, target = (F.crop(each, top, left, *self._inside(target)) for each in (image, target))
        if torch.rand(()) < self.augment.hflip:
            image, target = F.horizontal_flip(image), F.horizontal_flip(target)
        if self.colours is not None:
            image = self.colours(image)
        image = _normalised(image, self.preparation)
        # [left, top, right, bottom]; a normalised 0 is the mean colour.
        missing = [0, 0, self.size[1] - target.shape[-1], self.size[0] - target.shape[-2]]
        image, target = F.pad(image, missing, fill=0.0), F.pad(target, missing, fill=self.ignore)
        return image.as_subclass(Tensor), target.as_subclass(Tensor).long()

    def _scaled(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.augment.scale
        factor = low + (high - low) * float(torch.rand(()))
        height, width = mask.shape
        if self.augment.short_side is not None:
            factor *= self.augment.short_side / min(height, width)
        size = [max(1, round(height * factor)), max(1, round(width * factor))]
        return F.resize(image, size, v2.InterpolationMode.BILINEAR, antialias=True), _nearest(mask, size)

    def _rotated(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.augment.rotate * (2 * float(torch.rand(())) - 1)
        fill = [255 * mean for mean in self.preparation.mean]
        rotated = F.rotate(image, angle, v2.InterpolationMode.BILINEAR, fill=fill)
        return rotated, F.rotate(mask, angle, v2.InterpolationMode.NEAREST, fill=self.ignore)

    def _inside(self, mask: Tensor) -> tuple[int, int]:
        """Height and width of the crop, of a smaller picture all."""
        return min(self.size[0], mask.shape[-2]), min(self.size[1], mask.shape[-1])

    def _crop(self, mask: Tensor) -> tuple[int, int]:
        """Top and left of the crop: the first of `tries` in which no class has too large a share."""
        height, width = self._inside(mask)
        values = mask.numpy()
        top = left = 0
        for _ in range(self.augment.tries):
            top = int(torch.randint(mask.shape[-2] - height + 1, ()))
            left = int(torch.randint(mask.shape[-1] - width + 1, ()))
            if largest_share(values[top : top + height, left : left + width], self.ignore) <= self.augment.category_cap:
                break
        return top, left


def largest_share(mask: Indices, ignore_index: int) -> float:
    """Share of the most frequent class among the labelled pixels of a mask (H, W); 1 if none is labelled."""
    labelled = mask[mask != ignore_index]
    return float(np.bincount(labelled.ravel()).max() / labelled.size) if labelled.size else 1.0


def _tensors(picture: Image.Image, mask: Indices) -> tuple[Tensor, Tensor]:
    """The two as what torchvision tells apart; they must have one size."""
    if picture.size != (mask.shape[1], mask.shape[0]):
        raise ValueError(f"a picture of {picture.size} and a mask of {mask.shape[1], mask.shape[0]}")
    return tv_tensors.Image(F.pil_to_tensor(picture)), tv_tensors.Mask(torch.from_numpy(np.ascontiguousarray(mask)))


def _nearest(mask: Tensor, size: list[int]) -> Tensor:
    # Of torchvision's own the mask would use the corner of each pixel, and lie half a pixel beside the picture, whose
    # interpolation uses the middle.
    resized: Tensor = F.resize_image(mask.as_subclass(Tensor)[None], size, v2.InterpolationMode.NEAREST_EXACT)
    masked: Tensor = tv_tensors.Mask(resized[0])
    return masked


def _photometric() -> Any:
    jitter = ({"brightness": 0.125}, {"contrast": 0.5}, {"saturation": 0.5}, {"hue": 0.1})
    return v2.Compose([v2.RandomApply([v2.ColorJitter(**one)], p=0.5) for one in jitter])


def _normalised(image: Tensor, preparation: Preparation) -> Tensor:
    floats = F.to_dtype(image, torch.float32, scale=True)
    normalised: Tensor = F.normalize(floats, list(preparation.mean), list(preparation.std))
    return normalised


def joint_evaluation(picture: Image.Image, mask: Indices, preparation: Preparation) -> tuple[Tensor, Tensor]:
    """Picture (C, H, W) and target (H, W), both at the picture's own size: nothing is resized, cropped or padded."""
    image, target = _tensors(picture, mask)
    return _normalised(image, preparation).as_subclass(Tensor), target.as_subclass(Tensor).long()


def prepare_picture(picture: Image.Image, preparation: Preparation) -> Tensor:
    """The picture (C, H, W) of `joint_evaluation`, without a mask."""
    return _normalised(tv_tensors.Image(F.pil_to_tensor(picture)), preparation).as_subclass(Tensor)


class SegmentTrainSet(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Training crops; each draw seeds its own randomness, as in `TrainSet`, whatever the workers and the start."""

    def __init__(self, pairs: SegmentSet, preparation: Preparation, augment: JointAugmentation, seed: int) -> None:
        self.pairs, self.seed, self.in_chans = pairs, seed, preparation.in_chans
        self.transform = JointTrain(preparation, augment, pairs.ignore_index)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Picture (C, H, W), target (H, W), and the weight 1 of a real sample or 0 of a filler."""
        seed_everything(mix_seed(self.seed, "augment", *draw.position))
        image, target = self.transform(*self.pairs.read(draw.sample, self.in_chans))
        return image, target, torch.tensor(float(draw.real))


class SegmentEvalSet(Dataset[tuple[Tensor, Tensor, int]]):
    """Pictures and targets at their own size, in the set's order; of several sizes, so load them one at a time."""

    def __init__(self, pairs: SegmentSet, preparation: Preparation) -> None:
        self.pairs, self.preparation = pairs, preparation

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        """Picture (C, H, W), target (H, W), and the picture's index in the set."""
        return *joint_evaluation(*self.pairs.read(index, self.preparation.in_chans), self.preparation), index
