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
    """The objective of `jumbo-vit train`: cross-entropy, or binary cross-entropy, which multi-label always has.

    Args:
        task: "multiclass" or "multilabel".
        num_classes: C.
        mixing: Mixup, cutmix and smoothing.
        class_weights: How much a class weighs, (C,); for "multilabel" (2, C), where a label is absent and where it is
            present. None weighs all alike.
        loss: "ce", or "bce" for a yes or no to each class.

    Raises:
        UserError: Mixing or smoothing asked of a multi-label task.
    """

    def __init__(
        self, task: str, num_classes: int, mixing: Mixing, class_weights: Tensor | None = None, loss: str = "ce"
    ) -> None:
        if task == "multilabel" and (mixing.mixup or mixing.cutmix or mixing.smoothing):
            raise UserError("mixup, cutmix and smoothing are for --task multiclass; set them to 0 for multilabel")
        self.task, self.num_classes, self.mixing, self.class_weights = task, num_classes, mixing, class_weights
        self.loss = loss
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
        """The loss of each sample (B,), in fp32 whatever the logits' type.

        With class weights w, a sample of class c has w_c times its smoothed cross-entropy l(c), and a mixture with
        shares t has the sum over c of t_c w_c l(c): smoothing spreads a target and never changes what it weighs. As l
        is linear in the target, that is `total` times l of the shares t_c w_c / `total`.

        "bce" is the mean over the classes of binary cross-entropies, as timm's BinaryCrossEntropy has it; every class
        that a picture has a share of is fully on, as in DeiT III (Touvron et al., arXiv:2204.07118).
        """
        logits = logits.float()
        weights = None if self.class_weights is None else self.class_weights.to(logits.device)
        if self.task == "multilabel":
            targets = targets.float()
            each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            return (each if weights is None else each * torch.where(targets > 0, weights[1], weights[0])).mean(-1)
        if self.loss == "bce":
            present = F.one_hot(targets, self.num_classes) if targets.ndim == 1 else targets > 0
            return F.binary_cross_entropy_with_logits(logits, present.float(), reduction="none").mean(-1)
        smoothing = self.mixing.smoothing
        if weights is None:
            return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        if targets.ndim == 1:
            return weights[targets] * F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        shares = targets.float() * weights
        total = shares.sum(-1)
        return total * F.cross_entropy(logits, shares / total[:, None], reduction="none", label_smoothing=smoothing)

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Losses (B,) of one forward pass in training; `seed` fixes mixing, dropout and drop path."""
        images, targets = self.mix(*batch, seed)
        return self.losses(self.logits(model, images, seed), targets)

    def logits(self, model: nn.Module, images: Tensor, seed: int) -> Tensor:
        """The model's outputs in training; `seed` fixes dropout and drop path.

        Raises:
            UserError: Batch norm met a batch of one picture.
        """
        torch.manual_seed(seed)
        try:
            logits: Tensor = model(images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError(
                "this model's batch norm cannot train on a batch of one picture: change --batch-size, so that the last "
                "batch has more"
            ) from error
        return logits
