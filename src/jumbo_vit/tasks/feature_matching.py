"""Feature distillation: a student foretells, through two projections, what a teacher sees in the same picture.

The student's global vector goes through one linear projection to the teacher's global vector, its patch tokens through
another to the teacher's patch tokens. Projections of the student and targets that are whitened by a LayerNorm without
affine part, compared by a smooth L1 loss, are those of Wei et al., "Contrastive Learning Rivals Masked Image Modeling
in Fine-tuning via Feature Distillation" (arXiv:2205.14141), who match patches; that the global vector has a projection
and a loss of its own is as in Ranzinger et al., "AM-RADIO" (arXiv:2312.06709).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.learner import Learner
from jumbo_vit.tasks.score import Gather, Reduce
from jumbo_vit.teachers import Features, Teacher

# Where the smooth L1 loss turns from a square to a line, in standard deviations of the whitened target.
BETA = 2.0
# Below this share of the teacher's own spread the student's vectors are called alike.
COLLAPSED = 0.1
# A teacher whose vectors spread less than this has nothing to teach about these pictures.
ALIKE = 0.01

Outputs = tuple[Tensor, Tensor, Tensor]
"""What a `FeatureLearner` gives: foretold vector (B, Dg), foretold patches (B, Dp, gh, gw), own vector (B, G)."""


class FeatureLearner(Learner):
    """A student with its two projections.

    Args:
        encoder: A timm model that gives patch tokens or a map; on the CPU.
        preparation: Of its pictures.
        vector_width: Of the teacher's global vector.
        patch_width: Of the teacher's patches.
        seed: Of the projections' first weights.

    Raises:
        UserError: The model gives neither patch tokens on a grid nor a map.
    """

    def __init__(
        self, encoder: nn.Module, preparation: Preparation, vector_width: int, patch_width: int, seed: int
    ) -> None:
        super().__init__(encoder)
        training = encoder.training
        with torch.no_grad():
            vector, patches = encode(encoder.eval(), torch.zeros(1, *preparation.input_size))
        encoder.train(training)
        self.width = vector.shape[1]
        torch.manual_seed(mix_seed(seed, "projections"))
        self.to_vector = _projection(self.width, vector_width)
        self.to_patches = _projection(patches.shape[1], patch_width)

    def forward(self, images: Tensor) -> Outputs:
        """Pictures (B, C, H, W) to what the teacher is expected to say of them, and the student's own vector."""
        vector, patches = encode(self.encoder, images)
        foretold: Tensor = self.to_patches(patches.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # FSDP2 warns of views, which these are of the encoder's tokens and of a linear layer's.
        return self.to_vector(vector), foretold.clone(), vector.clone()


def _projection(width: int, wanted: int) -> nn.Linear:
    layer = nn.Linear(width, wanted)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def encode(encoder: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """A student's global vector (B, G) and its patches on their grid (B, D, gh, gw), both after the final norm.

    The vector is the concatenation of the global tokens: the pieces of the Jumbo token, or class token and registers.
    Models without any, and those that norm or attend only as they pool, give what their head reads.

    Raises:
        UserError: The model gives neither patch tokens on a grid nor a map.
    """
    tokens = encoder.forward_features(images)
    name = type(encoder).__name__
    if isinstance(tokens, Tensor) and tokens.ndim == 4:
        channels_last = str(getattr(encoder, "output_fmt", "NCHW")).upper().endswith("NHWC")
        vector = encoder.forward_head(tokens, pre_logits=True)
        return vector.flatten(1), tokens.permute(0, 3, 1, 2) if channels_last else tokens
    if not isinstance(tokens, Tensor) or tokens.ndim != 3:
        raise UserError(f"{name} gives neither patch tokens nor a map, so there is nothing to distill: choose a ViT")
    prefix = int(getattr(encoder, "num_prefix_tokens", 0))
    count = min(prefix, int(getattr(encoder, "num_global", getattr(encoder, "num_jumbo", prefix))))
    pools = [getattr(encoder, part, None) for part in ("fc_norm", "attn_pool")]
    if count and all(part is None or isinstance(part, nn.Identity) for part in pools):
        vector = tokens[:, :count].flatten(1)
    else:
        vector = encoder.forward_head(tokens, pre_logits=True)
    embed = getattr(encoder, "patch_embed", None) or getattr(encoder, "embeds", None)
    size = getattr(embed, "patch_size", None) or (1, 1)
    grid = tuple(side // part for side, part in zip(images.shape[-2:], size, strict=True))
    patches = tokens[:, prefix:].transpose(1, 2)
    if grid[0] * grid[1] != patches.shape[2]:
        raise UserError(f"the {patches.shape[2]} patch tokens of {name} make no grid: choose another --model")
    return vector, patches.unflatten(2, grid)


def whitened(features: Tensor) -> Tensor:
    """Features (..., D) with mean 0 and variance 1 over D: LayerNorm without an affine part, in fp32."""
    return F.layer_norm(features.float(), features.shape[-1:])


def aligned(patches: Tensor, grid: tuple[int, ...]) -> Tensor:
    """A teacher's patches (B, D, gh, gw) whitened on the student's grid: (B, rows * columns, D)."""
    patches = patches.float()
    if patches.shape[-2:] != grid:
        patches = F.interpolate(patches, grid, mode="bilinear", antialias=True, align_corners=False)
    return whitened(patches.flatten(2).transpose(1, 2))


def matching(outputs: Outputs, target: Features) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How well a batch was foretold: losses of vector and patches, cosines of vector and patches, each (B,), in fp32.

    The cosines are between what was foretold and the whitened target; that of the patches is their mean.
    """
    vector, patches = outputs[0].float(), outputs[1].float().flatten(2).transpose(1, 2)
    goal, goals = whitened(target.vector), aligned(target.patches, outputs[1].shape[-2:])
    return (
        F.smooth_l1_loss(vector, goal, beta=BETA, reduction="none").mean(-1),
        F.smooth_l1_loss(patches, goals, beta=BETA, reduction="none").mean((1, 2)),
        F.cosine_similarity(vector, goal, dim=-1),
        F.cosine_similarity(patches, goals, dim=-1).mean(-1),
    )


class FeatureMatching:
    """The method "distill" as an objective of the loop.

    Args:
        teacher: On the device of the run.
        preparation: The student's.
        patch_weight: Weight of the patches' loss beside the vector's.
        mixing: Mixup and cutmix of the pictures that both see.
    """

    metric = "negative_loss"

    def __init__(self, teacher: Teacher, preparation: Preparation, patch_weight: float, mixing: Mixing) -> None:
        self.teacher, self.preparation, self.patch_weight = teacher, preparation, patch_weight
        self._mixing = Classification("multiclass", 1, mixing)

    def learner(self, encoder: nn.Module, seed: int) -> FeatureLearner:
        """The encoder, on the CPU, with projections of the widths that the teacher asks for.

        Raises:
            UserError: Student and teacher do not go together.
        """
        empty = torch.zeros(1, *self.preparation.input_size, device=self.teacher.device)
        vector, patches = self.targets(empty)
        return FeatureLearner(encoder, self.preparation, vector.shape[1], patches.shape[1], seed)

    def targets(self, images: Tensor) -> Features:
        """What the teacher says of the student's pictures (B, C, H, W)."""
        return self.teacher.features(images, self.preparation)

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Losses (B,) of one forward pass in training; `seed` fixes mixing, dropout and drop path."""
        images = batch[0]
        images, _ = self._mixing.mix(images, torch.zeros(len(images), dtype=torch.long, device=images.device), seed)
        target = self.targets(images)
        torch.manual_seed(seed)
        vector, patches, *_ = matching(model(images), target)
        return vector + self.patch_weight * patches

    def score(self, learner: FeatureLearner) -> "FeatureScore":
        """An empty score of such a learner."""
        widths = learner.width, learner.to_vector.out_features, learner.to_patches.out_features
        return FeatureScore(*widths, self.patch_weight)


class FeatureScore:
    """Loss, its parts, cosines, what is explained, and how much the global vectors differ from picture to picture.

    `global_explained` and `patch_explained` are the shares of the targets' variance over the held-out pictures that the
    student foretells: 1 for all of it, 0 or less for a student that says the same of every picture. Cosines cannot tell
    the two apart where the teacher's features have much in common.

    `global_std` is the standard deviation over the pictures of the student's global vectors, each scaled to a mean
    square of 1, as root mean square over their entries: 0 where all are alike, about 1 where they have nothing in
    common. `teacher_std` is that of the teacher's whitened vectors. The measure is that of Chen and He, "Exploring
    Simple Siamese Representation Learning" (arXiv:2011.10566), who watch for collapse by it.

    Args:
        width: Of the student's global vector.
        vector_width: Of the teacher's.
        patch_width: Of the teacher's patches.
        patch_weight: Weight of the patches' loss.
    """

    metric = FeatureMatching.metric

    def __init__(self, width: int, vector_width: int, patch_width: int, patch_weight: float) -> None:
        self.patch_weight = patch_weight
        # Pictures, losses of vector and patches, cosines of vector and patches.
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.own = torch.zeros(width, dtype=torch.float64)
        self.vectors, self.patches = Explained(vector_width), Explained(patch_width)

    def update(self, outputs: Outputs, target: Features) -> None:
        """Add a batch: what the learner gave, and what the teacher says."""
        each = matching(outputs, target)
        self.sums += torch.stack([torch.ones_like(each[0]), *each]).cpu().double().sum(1)
        self.own += F.normalize(outputs[2].cpu().double(), dim=-1).sum(0)
        self.vectors.update(outputs[0], whitened(target.vector))
        goals = aligned(target.patches, outputs[1].shape[-2:])
        self.patches.update(outputs[1].flatten(2).transpose(1, 2).flatten(0, 1), goals.flatten(0, 1))

    def result(self, total: Reduce, gather: Gather) -> dict[str, Any]:
        """The numbers; of a single picture there is no standard deviation, it is NaN."""
        count, *sums = total(self.sums).tolist()
        vector, patches, vector_cosine, patch_cosine = (value / count for value in sums)
        loss = vector + self.patch_weight * patches
        vector_explained, teacher_std = self.vectors.result(total)
        patch_explained, _ = self.patches.result(total)
        return {
            "n": int(count),
            "loss": loss,
            self.metric: -loss,
            "global_loss": vector,
            "patch_loss": patches,
            "global_cosine": vector_cosine,
            "patch_cosine": patch_cosine,
            "global_explained": vector_explained,
            "patch_explained": patch_explained,
            "global_std": _spread(total(self.own), count),
            "teacher_std": teacher_std,
        }


class Explained:
    """The share of the targets' variance that is foretold, from sums over all processes.

    Args:
        width: Of a target.
    """

    def __init__(self, width: int) -> None:
        # Targets, squared errors, squares of the targets.
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.goals = torch.zeros(width, dtype=torch.float64)

    def update(self, foretold: Tensor, goals: Tensor) -> None:
        """Add what was foretold and the targets, both (n, width)."""
        foretold, goals = foretold.cpu().double(), goals.cpu().double()  # not every device has doubles
        errors = (foretold - goals).square().sum()
        self.sums += torch.stack([torch.tensor(len(goals)).double(), errors, goals.square().sum()])
        self.goals += goals.sum(0)

    def result(self, total: Reduce) -> tuple[float, float]:
        """The share, and the targets' standard deviation in units of their root mean square; NaN for one target."""
        count, errors, squares = total(self.sums).tolist()
        mean = total(self.goals) / count
        variance = max(0.0, squares - count * float(mean.square().sum()))
        if count < 2:
            return math.nan, math.nan
        return (1 - errors / variance if variance > 0 else math.nan), math.sqrt(variance / squares)


def _spread(total: Tensor, count: float) -> float:
    """The standard deviation of unit vectors with this sum, times the root of their width."""
    # The mean square distance from the mean of unit vectors is 1 - |mean|^2.
    return math.sqrt(max(0.0, 1 - float((total / count).square().sum()))) if count > 1 else math.nan


def collapse(numbers: dict[str, Any]) -> str:
    """A sentence on a student, or a teacher, that says the same of every picture; else ""."""
    own, theirs = numbers["global_std"], numbers["teacher_std"]
    if theirs < ALIKE:
        return (
            f"The teacher's global vectors hardly differ over the held-out pictures (standard deviation {theirs:.4f}): "
            "it has nothing to teach about them, or they are all the same."
        )
    if own < COLLAPSED * theirs:
        return (
            f"The student's global vectors hardly differ over the held-out pictures (standard deviation {own:.4f}, the "
            f"teacher's {theirs:.4f}): it has collapsed, or has learned nothing yet. Lower --lr or train longer."
        )
    return ""
