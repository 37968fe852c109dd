"""Classification as an objective: mixing, and a loss for each sample."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from jumbo_vit.errors import UserError


@dataclass(frozen=True)
class Mixing:
    """timm's mixup and cutmix, by its option names.

    Args:
        mixup: Alpha of the beta distribution of mixup; 0 for none.
        cutmix: The same for cutmix; with both on, each batch takes one of them at random.
        mixup_prob: Probability that a batch is mixed at all.
        smoothing: Label smoothing.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    smoothing: float = 0.0


class Classification:
    """The objective of `jumbo-vit train`: cross-entropy, or binary cross-entropy for multi-label.

    Args:
        task: "multiclass" or "multilabel".
        num_classes: C.
        mixing: Mixup, cutmix and smoothing.

    Raises:
        UserError: Mixing or smoothing asked of a multi-label task.
    """

    def __init__(self, task: str, num_classes: int, mixing: Mixing) -> None:
        if task == "multilabel" and (mixing.mixup or mixing.cutmix or mixing.smoothing):
            raise UserError("mixup, cutmix and smoothing are for --task multiclass; set them to 0 for multilabel")
        self.task, self.num_classes, self.mixing = task, num_classes, mixing
        on = mixing.mixup > 0 or mixing.cutmix > 0
        self._mixup = (
            Mixup(mixing.mixup, mixing.cutmix, prob=mixing.mixup_prob, label_smoothing=0.0, num_classes=num_classes)
            if on
            else None
        )

    def mix(self, images: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Mix a batch (B, C, H, W); targets become (B, classes) where mixing is on. `seed` fixes the draw."""
        if self._mixup is None:
            return images, targets
        np.random.seed(seed)
        size = len(images)
        if size % 2:
            # timm pairs each picture with its mirror in the batch and refuses odd numbers; the doubled one is cut off.
            images, targets = torch.cat([images, images[-1:]]), torch.cat([targets, targets[-1:]])
        mixed, soft = self._mixup(images.clone(), targets)
        return mixed[:size], soft[:size]

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample (B,), in fp32 whatever the logits' type."""
        logits = logits.float()
        if self.task == "multilabel":
            return F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(-1)
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.mixing.smoothing)

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Losses (B,) of one forward pass in training; `seed` fixes mixing, dropout and drop path."""
        images, targets = self.mix(*batch, seed)
        torch.manual_seed(seed)
        try:
            logits = model(images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError(
                "this model's batch norm cannot train on a batch of one picture: change --batch-size, so that the last "
                "batch has more"
            ) from error
        return self.losses(logits, targets)
