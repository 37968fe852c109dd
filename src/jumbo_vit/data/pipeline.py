"""From picture to tensor: one preparation for training, evaluation, prediction and export.

The model folder stores the preparation; nothing else decides how a picture is resized, cropped or normalised.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import ImageOps
from PIL.Image import Image
from timm.data import auto_augment
from timm.data.transforms_factory import create_transform
from timm.models import PretrainedCfg
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.data.sets import ImageSet
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed, seed_everything

# Evaluation always runs in batches of this size, so that every command computes the same sums in the same order.
EVAL_BATCH = 64

Sized = Mapping[Hashable, tuple[Any, int | None]]
"""For each size of a run at several: the training transform to it, and the `enough` of `read_image`."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preparation:
    """How a picture becomes the model's input; field names and meanings are timm's `pretrained_cfg`'s.

    Args:
        input_size: (channels, height, width).
        mean: Per channel, of values in 0..1.
        std: Per channel.
        crop_pct: Share of the resized picture's side that the centre crop keeps.
        crop_mode: "center", "squash" or "border".
        interpolation: "bilinear", "bicubic", ...
    """

    input_size: tuple[int, int, int]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_pct: float = 1.0
    crop_mode: str = "center"
    interpolation: str = "bilinear"

    @property
    def in_chans(self) -> int:
        """Channels of the input."""
        return self.input_size[0]

    @classmethod
    def from_cfg(cls, cfg: dict[str, Any] | PretrainedCfg) -> "Preparation":
        """The preparation that a timm `pretrained_cfg` states."""
        fields = cfg if isinstance(cfg, dict) else cfg.to_dict()
        names = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
        known: dict[str, Any] = {name: fields[name] for name in names if fields.get(name) is not None}
        args: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in known.items()
        }
        return cls(**args)

    def to_cfg(self) -> dict[str, Any]:
        """The fields of a timm `pretrained_cfg`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def evaluation(self) -> Any:
        """timm's evaluation transform: PIL picture -> (C, H, W) float tensor."""
        return create_transform(
            self.input_size,
            is_training=False,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            interpolation=self.interpolation,
        )


@dataclass(frozen=True)
class Augmentation:
    """timm's training transform, by timm's option names.

    Args:
        aa: "" for none, "3a" for 3-Augment, or a RandAugment string such as "rand-m9-mstd0.5-inc1".
        color_jitter: Strength of brightness, contrast and saturation changes; 0 for none.
        hflip: Probability of a horizontal flip.
        scale: Smallest and largest share of the picture's area that a random crop takes; (1, 1) with ratio (1, 1)
            keeps the whole picture.
        ratio: Smallest and largest aspect ratio of the crop.
        reprob: Probability of random erasing.
        train_interpolation: Interpolation of the random crop, or "random".
    """

    aa: str = ""
    color_jitter: float = 0.0
    hflip: float = 0.5
    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    reprob: float = 0.0
    train_interpolation: str = "bicubic"

    def enough(self, preparation: Preparation) -> int:
        """Pixels of a picture's shorter side from which no random crop has to be enlarged.

        The smallest crop takes `scale[0]` of the area, and is at its thinnest `ratio[1]` times as long as wide.
        """
        largest = max(preparation.input_size[1:])
        return math.ceil(largest / math.sqrt(self.scale[0] / max(self.ratio[1], 1 / self.ratio[0])))

    def sized(self, preparation: Preparation, sizes: Iterable[tuple[int, int]]) -> "Sized":
        """For each (height, width): the transform to it, and `enough`."""
        each = {size: dataclasses.replace(preparation, input_size=(preparation.in_chans, *size)) for size in sizes}
        return {size: (self.transform(one), self.enough(one)) for size, one in each.items()}

    def transform(self, preparation: Preparation, **naflex: Any) -> Any:
        """timm's training transform: PIL picture -> (C, H, W) float tensor.

        `naflex` are arguments of `create_transform` that make it another size, in which patches tile the picture.

        Raises:
            UserError: timm does not know the augmentation string.
        """
        try:
            transform = create_transform(
                preparation.input_size,
                is_training=True,
                auto_augment=self.aa or None,
                color_jitter=self.color_jitter,
                hflip=self.hflip,
                scale=self.scale,
                ratio=self.ratio,
                re_prob=self.reprob,
                interpolation=self.train_interpolation,
                mean=preparation.mean,
                std=preparation.std,
                **naflex,
            )
            _mend_posterize(transform)
            return transform
        except (AssertionError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(
                f"--aa {self.aa} is not an augmentation that timm knows ({error}); use 3a, or a string such as "
                "rand-m9-mstd0.5-inc1"
            ) from error


def _posterize(image: Image, bits_to_keep: int, **_: Any) -> Image:
    """timm's operation asks for 0 bits at its strongest, which Pillow refuses since 13; 1 bit is the least it takes."""
    return image if bits_to_keep >= 8 else ImageOps.posterize(image, max(1, bits_to_keep))


def _mend_posterize(transform: Any) -> None:
    for step in transform.transforms:
        groups = [getattr(step, "ops", None) or (), *(getattr(step, "policy", None) or ())]
        for operation in (op for group in groups for op in group):
            if getattr(operation, "aug_fn", None) is auto_augment.posterize:
                operation.aug_fn = _posterize


def target_tensor(labels: tuple[int, ...], num_classes: int, task: str) -> Tensor:
    """A class index () for multiclass, a 0/1 vector (num_classes,) for multilabel."""
    if task == "multiclass":
        return torch.tensor(labels[0])
    target = torch.zeros(num_classes)
    target[list(labels)] = 1.0
    return target


class TrainSet(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Augmented pictures; each draw seeds its own randomness, so workers and epochs never repeat each other.

    A draw with a size in `sized` is made to it, any other to the preparation's.
    """

    def __init__(
        self,
        images: ImageSet,
        task: str,
        preparation: Preparation,
        augment: Augmentation,
        seed: int,
        sized: Sized | None = None,
    ) -> None:
        self.images, self.task, self.seed = images, task, seed
        self.in_chans = preparation.in_chans
        self.transform = augment.transform(preparation)
        self.enough: int | None = augment.enough(preparation)
        self.sized: Sized = sized or {}

    def __len__(self) -> int:
        return len(self.images)

    def seen(self, draw: Draw) -> Draw:
        """The draw whose position seeds the augmentation of this one."""
        return draw

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Picture (C, H, W), target, and the weight 1 of a real sample or 0 of a filler."""
        seed_everything(mix_seed(self.seed, "augment", *self.seen(draw).position))
        transform, enough = self.sized.get(draw.size, (self.transform, self.enough))
        picture: Image = self.images.read(draw.sample, self.in_chans, enough)
        labels = self.images.samples[draw.sample].labels
        target = target_tensor(labels, len(self.images.classes), self.task)
        return transform(picture), target, torch.tensor(float(draw.real))


class EvalSet(Dataset[tuple[Tensor, Tensor, int]]):
    """Pictures as the model sees them in use, in the set's order."""

    def __init__(self, images: ImageSet, task: str, preparation: Preparation) -> None:
        self.images, self.task, self.in_chans = images, task, preparation.in_chans
        self.transform = preparation.evaluation()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        """Picture (C, H, W), target, and the picture's index in the set."""
        labels = self.images.samples[index].labels
        target = target_tensor(labels, len(self.images.classes), self.task)
        return self.transform(self.images.read(index, self.in_chans)), target, index


def single_thread(_: int) -> None:
    """Start of a worker: the main process owns the cores' threads."""
    torch.set_num_threads(1)


def train_loader(
    dataset: TrainSet,
    batches: EpochBatches,
    workers: int,
    start_method: str | None,
    pin: bool,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """A loader over `batches`; set its position before each `iter()`."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=single_thread,
        multiprocessing_context=start_method if workers else None,
        pin_memory=pin,
    )


def eval_loader(
    dataset: EvalSet, workers: int = 0, rank: int = 0, world: int = 1, start_method: str | None = None
) -> Any:
    """A loader in which each sample comes once over all processes, also when they do not divide the set."""
    mine = list(range(rank, len(dataset), world))
    batches = [mine[i : i + EVAL_BATCH] for i in range(0, len(mine), EVAL_BATCH)]
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=min(workers, len(batches)),
        worker_init_fn=single_thread,
        multiprocessing_context=start_method if workers and batches else None,
    )
