"""What changes from update to update: the share of patches that is dropped, and the size of the pictures.

Each is a function of the update's number in the whole run, so a run that is stopped and goes on has the same values.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from jumbo_vit.data.naflex import collate, sequences
from jumbo_vit.data.pipeline import Augmentation, Preparation, Sized
from jumbo_vit.data.sizes import SizeSchedule
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.token_options import training_sizes
from jumbo_vit.vit import check_size

BeforeUpdate = Callable[[int, int], None]

# timm keeps int(N * (1 - rate)) of N patches, and 100 * (1 - 0.9) is 9.99... in floating point.
_ROUNDING = 1e-9


def rate_at(start: float, end: float, number: int, total: int) -> float:
    """A rate that goes linearly from `start` in update 0 to `end` in the last of `total` updates."""
    return start + (end - start) * number / (total - 1) if total > 1 else start


class PatchDrop:
    """Called before each update, sets the share of patches that the model drops in training.

    All pictures of a batch keep the same number, max(1, floor(N (1 - rate))) of N patches, each picture its own random
    ones; prefix tokens (Jumbo, class, registers) all stay. timm's module does it, which draws from torch's generator,
    has no weights and does nothing in evaluation.

    Args:
        model: A ViT of timm, not wrapped.
        start: Rate in the first update.
        end: Rate in the last update.
        name: What messages call the model.

    Raises:
        UserError: The model has no place for it, or drops patches at a rate of its own.
    """

    def __init__(self, model: nn.Module, start: float, end: float, name: str) -> None:
        self.model: Any = model
        if not isinstance(model, VisionTransformer | Eva | NaFlexVit):
            raise UserError(f"{name} has no place where patches can be dropped: leave --patch-drop out, or use a ViT")
        self.start, self.end = start, end
        self.nothing = self.model.patch_drop
        if isinstance(self.nothing, PatchDropout | PatchDropoutWithIndices):
            raise UserError("--patch-drop and patch_drop_rate in --model-args set the same rate: leave one of them out")
        kind = PatchDropoutWithIndices if self.nothing is None else PatchDropout
        self.layer = kind(0.0, num_prefix_tokens=int(cast(Any, model).num_prefix_tokens))

    def __call__(self, number: int, total: int) -> None:
        """Set the rate of update `number` of `total`."""
        rate = rate_at(self.start, self.end, number, total)
        self.layer.prob = max(0.0, rate - _ROUNDING)
        # At rate 0 some models ask the module for the patches that it kept, and it names none.
        self.model.patch_drop = self.layer if rate > 0 else self.nothing


def before_update(config: TrainConfig, model: nn.Module) -> BeforeUpdate:
    """What has to be set before each update, given its number and the run's number of updates.

    Raises:
        UserError: The model cannot do what the options ask for.
    """
    if not any(config.patch_drop):
        return lambda number, total: None
    return PatchDrop(model, *config.patch_drop, name=config.model or "the model")


def check_shapes(model: nn.Module, config: TrainConfig) -> None:
    """Refuse a model that does not take what the options make of pictures: it is tried on one of each size.

    Raises:
        UserError: A size that the patches do not tile, a model of one size, one that takes no sequences of patches, or
            one that cannot drop patches.
    """
    before_update(config, model)
    if config.naflex_loader:
        naflex_embeds(model, config)
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    training = model.training
    model.eval()
    for size in training_sizes(config):
        if patch is not None:
            check_size(size, patch)
        try:
            with torch.no_grad():
                model(torch.zeros(1, config.in_chans or 3, *size))
        except Exception as error:  # by the model, as it first uses what it cannot take
            raise UserError(
                f"{config.model} does not take pictures of {size[0]}x{size[1]} beside those of its own size ({error}): "
                "leave this size out of --img-sizes, or choose another --model"
            ) from error
    model.train(training)


class Shapes(NamedTuple):
    """What pictures are made to.

    Args:
        sizes: The size of each update, None where all have the model's.
        sized: The transform to each size.
        collate: What joins samples to a batch, None for torch's own way.
    """

    sizes: SizeSchedule | None
    sized: Sized
    collate: Callable[[list[Any]], Any] | None


def shapes(config: TrainConfig, model: nn.Module, preparation: Preparation, augment: Augmentation) -> Shapes:
    """What the options say that training pictures are made to.

    Raises:
        UserError: `--naflex-loader` with a model that takes no sequences of patches.
    """
    if not config.naflex_loader:
        sizes = training_sizes(config)
        return Shapes(_schedule(config, sizes), augment.sized(preparation, sizes), None)
    embeds = naflex_embeds(model, config)
    (height, width), patch = preparation.input_size[1:], embeds.patch_size
    lengths = sorted(config.naflex_train_seq_lens or [height // patch[0] * (width // patch[1])])
    sized = sequences(augment, preparation, patch, lengths, embeds.channels_last)
    return Shapes(_schedule(config, lengths), sized, collate)


def _schedule(config: TrainConfig, sizes: Sequence[Hashable]) -> SizeSchedule | None:
    return SizeSchedule(tuple(sizes), config.size_schedule, config.seed, config.epochs or 1) if sizes else None


def naflex_embeds(model: nn.Module, config: TrainConfig) -> Any:
    """The part of a NaFlex model that takes patches.

    Raises:
        UserError: The model has none.
    """
    embeds: Any = getattr(model, "embeds", None)
    if not isinstance(model, NaFlexVit) or not embeds.is_linear:
        raise UserError(
            f"{config.model} takes no pictures cut into patches: choose a NaFlex model such as "
            "naflexvit_jumbo_tiny_patch16, or leave --naflex-loader out"
        )
    return embeds
