"""The options of a training run, free of torch so that `--help` answers at once."""

from dataclasses import dataclass, field
from typing import Any, Literal

from jumbo_vit.errors import UserError


@dataclass
class TrainConfig:
    """Train a model on a folder of pictures, on a table of paths and labels, or on the built-in digits.

    The folder holds train/ beside val/, valid/, validation/ or test/, or a tree of class folders alone, which is then
    split. The run is written to the folder named by --out: its best model in model/, the state to go on from in
    last.ckpt, the options in config.yaml, scores in metrics.csv, curves.png and summary.json.

    Args:
        data: "digits" (scikit-learn's handwritten digits), a folder, or a CSV of path and labels.
        task: "multilabel" takes any number of labels a picture, from a CSV with labels joined by "|".
        model: Any name that `jumbo-vit models` or timm lists; default that of the folder in --init-from, else by the
            data.
        model_args: Further arguments of the model as NAME=VALUE, such as num_jumbo=3 share_jumbo_mlp=false; default
            those of the folder in --init-from.
        img_size: Side of the input in pixels, or HEIGHTxWIDTH; default the model's own.
        patch_size: Side of a patch in pixels; default the model's own.
        in_chans: Channels of the input: 3 for colour, 1 for grey.
        preset: Defaults for rate, decay and augmentation; auto is finetune with --init-from, else scratch.
        freeze: Train the head alone, on features that are computed once and kept; no augmentation.
        lora_rank: Train only the head and a bypass of this rank around the Jumbo FFN in each block; 0 for all weights.
        init_from: Start from a model folder, an official checkpoint, a weights file, or a timm ViT by name.
        stages: Steps of one recipe: options of each, such as {img_size: 128, epochs: 400}; each starts from the model
            of the one before, and is in stage-1, stage-2, ... of --out.
        epochs: Passes over the training pictures.
        batch_size: Pictures in one forward pass of one process.
        grad_accum_steps: Forward passes per update; the last update of an epoch takes what is left, rightly scaled.
        opt: Optimizer, by timm's names.
        opt_betas: Its two decay rates of averages; default the optimizer's own.
        lr: Highest learning rate.
        min_lr: Learning rate at the end.
        warmup_epochs: Epochs of linear warm-up, fractions allowed; default a tenth of the run, 5 at the most.
        weight_decay: Weight decay; norms, biases, tokens and positions are exempt.
        layer_decay: Factor of the learning rate from one block to the one below; 1 for none.
        clip_grad: Largest norm of the gradient; 0 for no limit.
        drop_path: Rate of stochastic depth, the same at every depth.
        balance: For classes of unequal size: "weights" makes each class weigh the same in the loss, "sampler" draws
            each equally often; the best model is then the one of the best balanced accuracy.
        smoothing: Label smoothing.
        loss: "ce" is cross-entropy; "bce" is a binary cross-entropy, the mean over the classes, in which every class of
            a mixed picture is on. Several labels always have the latter.
        teacher: Train by function matching: models whose outputs on the same augmented and mixed pictures are the
            target (names of timm, model folders, or folders that `jumbo-vit teach` wrote).
        label_weight: Share of the labels' loss beside the teachers'; 0 for the teachers alone.
        mixup: Alpha of mixup; 0 for none.
        cutmix: Alpha of cutmix; 0 for none.
        aa: "3a" for 3-Augment, or RandAugment such as rand-m9-mstd0.5-inc1; empty for none.
        color_jitter: Strength of colour changes.
        hflip: Probability of a horizontal flip.
        scale: Smallest and largest share of the picture that a random crop takes.
        reprob: Probability of random erasing.
        aug_repeats: Different augmentations of a picture in one epoch, each a sample; 0 for one. An epoch keeps its
            number of updates and sees so many times fewer pictures.
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
        model_ema: Keep averaged weights too; the better of both becomes the model. Default on for the digits alone.
        model_ema_decay: Highest decay of the average; it grows with the updates, so that short runs work.
        grad_checkpointing: Compute activations again in the backward pass, for less memory.
        patience: Stop after so many epochs without a better score; 0 never stops early.
        val_fraction: Share of the pictures held out where no held-out folder is there; --folds replaces it.
        split_seed: Fixes which pictures are held out, or in which fold they are; default the seed.
        folds: Train so many times, each time holding out another part of the training pictures; 0 for no folds. The
            runs are in fold-1, fold-2, ... of --out, their mean and its interval in summary.json.
        fold: Only this one of the folds, counted from 1.
        seeds: Train with so many seeds, from --seed upwards, in seed-0, seed-1, ... of --out.
        check_images: Decode every picture before the first step, and leave out those that cannot be read.
        streaming: Read --data one example after another, without a list of all: for sets too large for one, or behind
            a URL. Needs --val-data and --steps-per-epoch (docs/data.md).
        val_data: The held-out pictures of a run on a stream: a folder, table, shards or dataset.
        steps_per_epoch: Updates in an epoch of a run on a stream.
        shuffle_window: Examples of a stream that are shuffled with each other; 1 keeps its order.
        classes: Names of the classes of a stream, in the order of its numbers; default those that it states.
        seed: Fixes order, augmentation, mixing and weights.
        out: Folder of the run; default runs/NAME, with a number if it is taken.
        dry_run: Build everything, make two small updates on made pictures, say what the whole run would take, and stop.
        resume: Go on with the run in this folder, or from one of its .ckpt files; only --epochs may be changed.
        workers: Processes that load pictures, for each training process; default by the number of cores.
        worker_start: How these processes are started; default the system's way.
        device: Where to compute.
        devices: Processes on this machine, one for each device.
        nodes: Machines.
        strategy: How several processes work together.
        precision: auto is bf16 where it pays on this device, else fp32; scores are always measured in fp32.
        logger: Loggers beside metrics.csv: tensorboard, wandb, mlflow, or none.
        recovery_interval: Updates between two writings of last.ckpt; 0 writes after each epoch and every ten minutes.
    """

    data: str = "digits"
    task: Literal["multiclass", "multilabel"] = "multiclass"
    model: str | None = None
    model_args: list[str] | None = None
    img_size: str | None = None
    patch_size: int | None = None
    in_chans: int | None = None
    preset: Literal["auto", "scratch", "finetune"] = "auto"
    freeze: bool = False
    lora_rank: int = 0
    init_from: str | None = None
    stages: list[dict[str, Any]] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    grad_accum_steps: int = 1
    opt: str = "adamw"
    opt_betas: tuple[float, float] | None = None
    lr: float | None = None
    min_lr: float | None = None
    warmup_epochs: float | None = None
    weight_decay: float | None = None
    layer_decay: float | None = None
    clip_grad: float = 1.0
    balance: Literal["none", "weights", "sampler"] = "none"
    drop_path: float | None = None
    smoothing: float | None = None
    loss: Literal["ce", "bce"] = "ce"
    teacher: list[str] | None = None
    label_weight: float = 0.0
    mixup: float | None = None
    cutmix: float | None = None
    aa: str | None = None
    color_jitter: float | None = None
    hflip: float | None = None
    scale: tuple[float, float] | None = None
    reprob: float | None = None
    aug_repeats: int = 0
    patch_drop: tuple[float, float] = (0.0, 0.0)
    img_sizes: list[str] | None = None
    size_schedule: Literal["mixed", "progressive"] = "mixed"
    naflex_loader: bool = False
    naflex_train_seq_lens: list[int] | None = None
    model_ema: bool | None = None
    model_ema_decay: float = 0.9998
    grad_checkpointing: bool = False
    patience: int = 0
    val_fraction: float = 0.1
    split_seed: int | None = None
    folds: int = 0
    fold: int | None = None
    seeds: int = 1
    check_images: bool = True
    streaming: bool = False
    val_data: str | None = None
    steps_per_epoch: int | None = None
    shuffle_window: int = 1000
    classes: list[str] | None = None
    seed: int = 0
    out: str | None = None
    dry_run: bool = False
    resume: str | None = None
    workers: int | None = None
    worker_start: Literal["fork", "spawn", "forkserver"] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: int = 1
    nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    logger: list[Literal["tensorboard", "wandb", "mlflow", "none"]] = field(default_factory=lambda: ["tensorboard"])
    recovery_interval: int = 0
    given: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def held_out_seed(self) -> int:
        """The seed of what is held out."""
        return self.seed if self.split_seed is None else self.split_seed

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
