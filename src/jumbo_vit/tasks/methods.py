"""The methods of `jumbo-vit pretrain`: what a run without labels asks of each, and the answers of both."""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from jumbo_vit.data.pipeline import Preparation, TrainSet
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.classify import Mixing
from jumbo_vit.tasks.distill import LOW, told_of
from jumbo_vit.tasks.feature_matching import FeatureMatching, collapse
from jumbo_vit.tasks.learner import Learner
from jumbo_vit.tasks.mae import MaskedPixels, nothing_learned
from jumbo_vit.tasks.masked import MaskedLearner, patch_area
from jumbo_vit.tasks.pretrain_config import OWN, PretrainConfig
from jumbo_vit.teachers import Teacher, open_teacher


class Method(ABC):
    """A method, opened before any picture is read; `ready` makes what is trained once the encoder is there.

    Args:
        options: Complete options.

    Attributes:
        notes: Sentences for the start of the run and its summary.
        identity: What must be the same when the run is gone on with.
        lineage: What a model folder says of how its weights came about.
        objective: For the loop; from `ready` on.
    """

    metric: str
    objective: Any

    def __init__(self, options: PretrainConfig) -> None:
        self.options = options
        self.notes: list[str] = []
        self.identity: dict[str, Any] = {}
        self.lineage: dict[str, Any] = {}

    @abstractmethod
    def ready(self, encoder: nn.Module, preparation: Preparation, device: torch.device, precision: str) -> Learner:
        """The encoder, on the CPU, with what the method trains beside it.

        Raises:
            UserError: Encoder and method do not go together.
        """

    def training_set(self, pictures: TrainSet) -> Any:
        """Training pictures with what the objective needs beside them."""
        return pictures

    @abstractmethod
    def held_out(self, loader: Any, device: torch.device) -> Any:
        """A loader of held-out inputs, targets and indices, from one of pictures."""

    @abstractmethod
    def score(self, learner: Any) -> Any:
        """An empty score."""

    @abstractmethod
    def remark(self, numbers: dict[str, Any]) -> str:
        """A sentence on a result that is worth nothing; else ""."""

    @abstractmethod
    def lines(self, numbers: dict[str, Any]) -> list[str]:
        """The result in words."""

    def facts(self) -> dict[str, Any]:
        """Entries of `summary.json`."""
        return {}


class _Taught:
    """A loader of pictures whose targets are what the teacher says of them."""

    def __init__(self, loader: Any, objective: FeatureMatching, device: torch.device) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self._objective, self._device = objective, device

    def __iter__(self) -> Any:
        teacher = self._objective.teacher
        low, teacher.low = teacher.low, None  # scores are measured in fp32, the targets too
        try:
            for images, _, index in self.loader:
                there = images.to(self._device)
                yield there, self._objective.targets(there), index
        finally:
            teacher.low = low


class Distillation(Method):
    """Method "distill": the features of a teacher."""

    metric = FeatureMatching.metric

    def __init__(self, options: PretrainConfig) -> None:
        super().__init__(options)
        self.teacher = self._open_teacher(options.teacher or "")
        self.told = told_of(self.teacher)
        self.notes = [self._introduction(), *self.teacher.notes]
        # A teacher may lie elsewhere on another machine, but must be the same.
        self.identity = {"patch_weight": options.patch_weight, "teacher": self.told["checksum"]}
        self.lineage = {"teacher": self.told}

    def _open_teacher(self, name: str) -> Teacher:
        return open_teacher(name, "cpu")

    def _introduction(self) -> str:
        teacher = self.teacher
        vector, patches, grid = teacher.shapes()
        known = [f"{key} {teacher.lineage[key]}" for key in ("source", "license") if teacher.lineage.get(key)]
        about = f" ({', '.join(known)})" if known else ""
        chans, height, width = teacher.preparation.input_size
        return (
            f"The teacher is {teacher.name}{about}: it sees the same augmented picture "
            f"at {chans}x{height}x{width}, and gives a vector of {vector} and {grid[0]}x{grid[1]} patches of {patches}."
        )

    def ready(self, encoder: nn.Module, preparation: Preparation, device: torch.device, precision: str) -> Learner:
        """The encoder with its projections."""
        self.teacher.model.to(device)
        self.teacher.device = device
        self.teacher.low = LOW.get(precision)
        mixing = Mixing(self.options.mixup or 0.0, self.options.cutmix or 0.0)
        self.objective = FeatureMatching(self.teacher, preparation, self.options.patch_weight, mixing)
        learner: Learner = self.objective.learner(encoder, self.options.seed)
        return learner

    def held_out(self, loader: Any, device: torch.device) -> Any:
        """Held-out pictures with what the teacher says of them."""
        return _Taught(loader, self.objective, device)

    def score(self, learner: Any) -> Any:
        """An empty score."""
        return self.objective.score(learner)

    def remark(self, numbers: dict[str, Any]) -> str:
        """A sentence on a collapse; else ""."""
        return collapse(numbers)

    def lines(self, numbers: dict[str, Any]) -> list[str]:
        """What is foretold of the teacher."""
        return [
            "foretold of what differs between pictures: "
            f"{numbers['global_explained']:.1%} in the teacher's global vector, "
            f"{numbers['patch_explained']:.1%} in its patches",
            f"standard deviation of the global vectors over the pictures: {numbers['global_std']:.4f} (teacher "
            f"{numbers['teacher_std']:.4f})",
        ]

    def facts(self) -> dict[str, Any]:
        """The teacher."""
        return {"teacher": self.told}


class MaskedAutoencoding(Method):
    """Method "mae": the pixels of masked patches."""

    metric = MaskedPixels.metric

    def __init__(self, options: PretrainConfig) -> None:
        super().__init__(options)
        self.identity = {name: getattr(options, name) for name in OWN["mae"]}
        self.lineage = {"mask_ratio": options.mask_ratio}

    def ready(self, encoder: nn.Module, preparation: Preparation, device: torch.device, precision: str) -> Learner:
        """The encoder with its decoder."""
        options = self.options = _with_decoder(self.options, encoder)
        self.identity = {name: getattr(options, name) for name in OWN["mae"]}
        assert options.decoder_width and options.decoder_depth and options.decoder_heads
        pixels = preparation.in_chans * patch_area(encoder)
        if options.norm_pix_loss and pixels < 2:
            raise UserError("--norm-pix-loss scales the numbers of a patch to variance 1, and a patch has but one here")
        learner = MaskedLearner(
            encoder,
            preparation,
            options.mask_ratio,
            options.decoder_width,
            options.decoder_depth,
            options.decoder_heads,
            options.pos_embed == "learned",
            options.seed,
        )
        self.objective = MaskedPixels(learner, options.norm_pix_loss, options.mask == "batch")
        rows, columns = learner.grid
        whole = rows * columns
        self.notes.append(
            f"Of {rows}x{columns} patches {whole - learner.kept} are masked, an own choice for each "
            f"{'picture' if options.mask == 'sample' else 'forward pass'}; the encoder sees the other {learner.kept} "
            f"and {learner.keep.prefix} global tokens."
        )
        if options.init_from and options.pos_embed == "sincos":
            self.notes.append(
                "The positions of --init-from are replaced by fixed ones; --pos-embed learned keeps them."
            )
        if learner.untrained:
            first = learner.untrained[0]
            self.notes.append(
                f"{len(learner.untrained)} tensors have no part in this, such as {first}: they keep their first "
                "values, and a training that starts from the model makes them anew."
            )
            self.lineage["untrained"] = learner.untrained
        self._masks = {"grid": [rows, columns], "patches": whole, "kept_patches": learner.kept}
        return learner

    def training_set(self, pictures: TrainSet) -> Any:
        """Training pictures with masks."""
        return self.objective.training_set(pictures)

    def held_out(self, loader: Any, device: torch.device) -> Any:
        """Held-out pictures with masks that stay the same."""
        return self.objective.held_out(loader, self.options.seed)

    def score(self, learner: Any) -> Any:
        """An empty score."""
        return self.objective.score(learner)

    def remark(self, numbers: dict[str, Any]) -> str:
        """A sentence on a decoder that knows nothing; else ""."""
        return nothing_learned(numbers)

    def lines(self, numbers: dict[str, Any]) -> list[str]:
        """How well masked patches are foretold."""
        if math.isnan(numbers["masked_error"]):
            return []  # the remark says why
        of = "what is left of their variance after normalising each patch" if self.options.norm_pix_loss else ""
        return [f"masked pixels of held-out pictures: {numbers['masked_error']:.4f} of {of or 'their variance'} missed"]

    def facts(self) -> dict[str, Any]:
        """The masks."""
        return {"masks": self._masks}


# What the paper of masked autoencoders gives its decoder, and from which encoder's width on.
FULL_WIDTH, FULL_DECODER = 384, (512, 8, 16)


def _with_decoder(options: PretrainConfig, encoder: Any) -> PretrainConfig:
    """Options in which the decoder's size is no longer open; a small encoder gets a small decoder."""
    width = int(getattr(encoder, "embed_dim", FULL_WIDTH))
    heads = getattr(getattr(next(iter(getattr(encoder, "blocks", [])), None), "attn", None), "num_heads", 1)
    default = FULL_DECODER if width >= FULL_WIDTH else (width, 2, int(heads))
    names = ("decoder_width", "decoder_depth", "decoder_heads")
    found: dict[str, Any] = {n: value for n, value in zip(names, default, strict=True) if not getattr(options, n)}
    return dataclasses.replace(options, **found)


METHODS: dict[str, type[Method]] = {"distill": Distillation, "mae": MaskedAutoencoding}


def open_method(options: PretrainConfig) -> Method:
    """The method that complete options name.

    Raises:
        UserError: Its teacher cannot be had.
    """
    assert options.method is not None
    return METHODS[options.method](options)
