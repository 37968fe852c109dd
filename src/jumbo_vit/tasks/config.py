"""The options of a training run, free of torch so that `--help` answers at once."""

from dataclasses import dataclass
from typing import Any, Literal

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.run_options import RunOptions


@dataclass
class TrainConfig(RunOptions):
    """Train a model on a folder of pictures, on a table of paths and labels, or on the built-in digits.

    The folder holds train/ beside val/, valid/, validation/ or test/, or a tree of class folders alone, which is then
    split. The run is written to the folder named by --out: its best model in model/, the state to go on from in
    last.ckpt, the options in config.yaml, scores in metrics.csv, curves.png and summary.json.

    Args:
        data: "digits" (scikit-learn's handwritten digits), a folder, or a CSV of path and labels.
        task: "multilabel" takes any number of labels a picture, from a CSV with labels joined by "|".
        preset: Defaults for rate, decay and augmentation; auto is finetune with --init-from, else scratch.
        freeze: Train the head alone, on features that are computed once and kept; no augmentation.
        lora_rank: Train only the head and a bypass of this rank around the Jumbo FFN in each block; 0 for all weights.
        stages: Steps of one recipe: options of each, such as {img_size: 128, epochs: 400}; each starts from the model
            of the one before, and is in stage-1, stage-2, ... of --out.
        balance: For classes of unequal size: "weights" makes each class weigh the same in the loss, "sampler" draws
            each equally often; the best model is then the one of the best balanced accuracy.
        smoothing: Label smoothing.
        loss: "ce" is cross-entropy; "bce" is a binary cross-entropy, the mean over the classes, in which every class of
            a mixed picture is on. Several labels always have the latter.
        teacher: Train by function matching: models whose outputs on the same augmented and mixed pictures are the
            target (names of timm, model folders, or folders that `jumbo-vit teach` wrote).
        label_weight: Share of the labels' loss beside the teachers'; 0 for the teachers alone.
        patch_drop: Share of the patches that are dropped in training, at its beginning and its end, linear between
            them; each sample drops its own, and global tokens stay.
        img_sizes: Sizes to train at, pixels or HEIGHTxWIDTH, one for each update; --img-size is then the size of scores
            and use.
        size_schedule: "mixed" draws one of the sizes for each update, "progressive" goes from the smallest to the
            largest in equal parts of the run.
        naflex_loader: Train on pictures of any size and shape, cut into as many patches as a sequence may have; for
            NaFlex models.
        naflex_train_seq_lens: Largest numbers of patches, one for each update, as --size-schedule says; default the
            patches of --img-size.
        val_fraction: Share of the pictures held out where no held-out folder is there; --folds replaces it.
        split_seed: Fixes which pictures are held out, or in which fold they are; default the seed.
        folds: Train so many times, each time holding out another part of the training pictures; 0 for no folds. The
            runs are in fold-1, fold-2, ... of --out, their mean and its interval in summary.json.
        fold: Only this one of the folds, counted from 1.
        seeds: Train with so many seeds, from --seed upwards, in seed-0, seed-1, ... of --out.
        streaming: Read --data one example after another, without a list of all: for sets too large for one, or behind
            a URL. Needs --val-data and --steps-per-epoch (docs/data.md).
        val_data: The held-out pictures of a run on a stream: a folder, table, shards or dataset.
        steps_per_epoch: Updates in an epoch of a run on a stream.
        shuffle_window: Examples of a stream that are shuffled with each other; 1 keeps its order.
        classes: Names of the classes of a stream, in the order of its numbers; default those that it states.
    """

    data: str = "digits"
    task: Literal["multiclass", "multilabel"] = "multiclass"
    preset: Literal["auto", "scratch", "finetune"] = "auto"
    freeze: bool = False
    lora_rank: int = 0
    stages: list[dict[str, Any]] | None = None
    balance: Literal["none", "weights", "sampler"] = "none"
    smoothing: float | None = None
    loss: Literal["ce", "bce"] = "ce"
    teacher: list[str] | None = None
    label_weight: float = 0.0
    patch_drop: tuple[float, float] = (0.0, 0.0)
    img_sizes: list[str] | None = None
    size_schedule: Literal["mixed", "progressive"] = "mixed"
    naflex_loader: bool = False
    naflex_train_seq_lens: list[int] | None = None
    folds: int = 0
    fold: int | None = None
    seeds: int = 1
    streaming: bool = False
    val_data: str | None = None
    steps_per_epoch: int | None = None
    shuffle_window: int = 1000
    classes: list[str] | None = None

    @property
    def repeated(self) -> bool:
        """Whether this is a plan of several runs."""
        return self.seeds > 1 or (self.folds > 0 and self.fold is None)


LARGEST_SIDE = 16_384
"""Pixels that a side of the input may have; far more than a model takes, and fewer than a slip of the hand."""


def parse_size(text: str | int, flag: str = "--img-size") -> tuple[int, int]:
    """ "224" or "192x256" as (height, width); `flag` is what gave it.

    Raises:
        UserError: Anything else.
    """
    parts = str(text).lower().split("x")
    if len(parts) not in (1, 2) or not all(map(_is_side, parts)):
        raise UserError(f"{flag} is {text!r}, but must be a number of pixels such as 224, or HEIGHTxWIDTH")
    if any(len(part) > 20 or int(part) > LARGEST_SIDE for part in parts):
        raise UserError(f"{flag} is {str(text)[:40]}, but a side has at most {LARGEST_SIDE:,} pixels")
    sizes = [int(part) for part in parts]
    return sizes[0], sizes[-1]


def _is_side(part: str) -> bool:
    return part.strip().isdecimal() and (len(part) > 20 or int(part) > 0)  # Python refuses to read very long numbers
