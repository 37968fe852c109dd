"""Masked autoencoding as an objective of the loop: its masks, its loss, and what is measured on held-out pictures."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from jumbo_vit.data.pipeline import EvalSet, TrainSet
from jumbo_vit.data.sampler import Draw
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.feature_matching import Explained
from jumbo_vit.tasks.masked import Masked, MaskedLearner, pixel_targets
from jumbo_vit.tasks.score import Gather, Reduce

# Of a decoder that tells less than this share more than the mean of the pixels, something is wrong.
NOTHING = 0.01


def random_order(patches: int, seed: int) -> Tensor:
    """The places of `patches` in a random order (N,), a function of the seed alone."""
    return torch.randperm(patches, generator=torch.Generator().manual_seed(seed))


class MaskedTrainSet(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Augmented pictures, each with an order of its patches in the place of a target.

    A mask belongs to a picture and an epoch, so it is the same however many processes share the work.

    Args:
        pictures: The training set.
        patches: N.
    """

    def __init__(self, pictures: TrainSet, patches: int) -> None:
        self.pictures, self.patches = pictures, patches

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Picture (C, H, W), order (N,), and the weight 1 of a real sample or 0 of a filler."""
        image, _, real = self.pictures[draw]
        return image, random_order(self.patches, mix_seed(self.pictures.seed, "mask", *draw.position)), real


class MaskedEvalLoader:
    """A loader of held-out pictures, whose masks are the same at every scoring, and whose targets are the pictures.

    Args:
        loader: Of the pictures.
        patches: N.
        seed: Of the run.
    """

    def __init__(self, loader: Any, patches: int, seed: int) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self._patches, self._seed = patches, seed

    def __iter__(self) -> Iterator[tuple[Masked, Masked, Tensor]]:
        for images, _, index in self.loader:
            seeds = [mix_seed(self._seed, "mask of a held-out picture", int(place)) for place in index]
            order = torch.stack([random_order(self._patches, seed) for seed in seeds])
            yield (both := Masked(images, order)), both, index


class MaskedPixels:
    """The method "mae" as an objective of the loop.

    Args:
        learner: What is trained; its grid and its number of kept patches are read.
        per_patch: Targets of mean 0 and variance 1 in each patch.
        one_mask: All pictures of a forward pass get the mask of the first, as in the authors' code.
    """

    metric = "negative_loss"

    def __init__(self, learner: MaskedLearner, per_patch: bool, one_mask: bool) -> None:
        self.grid, self.kept = learner.grid, learner.kept
        self.per_patch, self.one_mask = per_patch, one_mask

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Losses (B,) of one forward pass in training; `seed` fixes drop path."""
        images, order = batch
        if self.one_mask:
            order = order[:1].expand_as(order)
        torch.manual_seed(seed)
        foretold = model(images, order)
        goal = pixel_targets(images, self.grid, order[:, self.kept :], self.per_patch)
        losses: Tensor = (foretold.float() - goal).square().mean((1, 2))
        return losses

    def training_set(self, pictures: TrainSet) -> Any:
        """The training set with masks."""
        return MaskedTrainSet(pictures, math.prod(self.grid))

    def held_out(self, loader: Any, seed: int) -> MaskedEvalLoader:
        """Held-out pictures with masks that stay."""
        assert isinstance(loader.dataset, EvalSet)
        return MaskedEvalLoader(loader, math.prod(self.grid), seed)

    def score(self, learner: MaskedLearner) -> "PixelScore":
        """An empty score of such a learner."""
        return PixelScore(self, learner.decoder.predict.out_features)


class PixelScore:
    """Loss on masked patches, and the share of the masked pixels' variance that is not foretold.

    `masked_error` is the squared error over the variance of the targets about their mean, taken for each pixel of a
    patch and each channel over all held-out masked patches: 0 for a decoder that knows all, 1 for one that knows only
    the mean. With targets normalised in each patch it is a share of what is left after that.

    Args:
        method: What the targets are.
        pixels: Numbers in a patch.
    """

    metric = MaskedPixels.metric

    def __init__(self, method: MaskedPixels, pixels: int) -> None:
        self.method = method
        self.sums = torch.zeros(2, dtype=torch.float64)  # pictures, losses
        self.pixels = Explained(pixels)

    def update(self, foretold: Tensor, target: Masked) -> None:
        """Add a batch: what the decoder gave, (B, M, p*p*C), and what it was made from."""
        method, target = self.method, target.to(foretold.device)
        goal = pixel_targets(target.images, method.grid, target.order[:, method.kept :], method.per_patch)
        losses = (foretold.float() - goal).square().mean((1, 2)).cpu().double()
        self.sums += torch.stack([torch.tensor(len(losses)).double(), losses.sum()])
        self.pixels.update(foretold.flatten(0, 1), goal.flatten(0, 1))

    def result(self, total: Reduce, gather: Gather) -> dict[str, Any]:
        """The numbers."""
        count, losses = total(self.sums).tolist()
        explained, _ = self.pixels.result(total)
        loss = losses / count
        return {"n": int(count), "loss": loss, self.metric: -loss, "masked_error": 1 - explained}


def nothing_learned(numbers: dict[str, Any]) -> str:
    """A sentence on a decoder that knows no more than the mean of the pixels; else ""."""
    error = numbers["masked_error"]
    if not math.isfinite(numbers["loss"]):
        return "The loss on the held-out pictures is not a finite number: lower --lr, or set --clip-grad."
    if math.isnan(error):
        return (
            "The masked pixels of the held-out pictures have no variance (all are the same, or of one patch alone), so "
            "no share of it can be told."
        )
    if error > 1 - NOTHING:
        return (
            f"The masked patches are foretold no better than by their mean (error {error:.3f} of their variance): "
            "train longer, or change --lr."
        )
    return ""
