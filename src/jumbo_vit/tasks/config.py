"""The options of a training run, free of torch so that `--help` answers at once; and how presets fill them."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jumbo_vit.errors import UserError

# What a preset fills where the user gave nothing. "scratch" is mild: heavy mixing needs hundreds of epochs to pay, and
# the recipes that train so long ask for it by name.
PRESETS: dict[str, dict[str, Any]] = {
    "scratch": {
        "lr": 1e-3,
        "weight_decay": 0.05,
        "smoothing": 0.1,
        "scale": (0.35, 1.0),
        "drop_path": 0.0,
        "layer_decay": 1.0,
    },
    "finetune": {
        "lr": 2e-4,
        "weight_decay": 0.05,
        "smoothing": 0.1,
        "scale": (0.35, 1.0),
        "drop_path": 0.0,
        "layer_decay": 0.75,
    },
}
COMMON = {
    "mixup": 0.0,
    "cutmix": 0.0,
    "aa": "",
    "color_jitter": 0.0,
    "hflip": 0.5,
    "reprob": 0.0,
    "min_lr": 1e-6,
    "model_ema": False,
}

# The embedded default: digits of 8x8 pixels, which must be neither mirrored nor cut.
DIGITS: dict[str, Any] = {
    "model": "jumbo_vit_micro",
    "img_size": "8",
    "patch_size": 2,
    "in_chans": 1,
    "epochs": 25,
    "model_ema": True,
    "batch_size": 64,
    "hflip": 0.0,
    "scale": (0.8, 1.0),
    "smoothing": 0.0,
}
PICTURES: dict[str, Any] = {
    "model": "jumbo_vit_tiny_patch16_224",
    "in_chans": 3,
    "epochs": 100,
    "batch_size": 128,
}


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
        init_from: Start from a model folder, an official checkpoint, a weights file, or a timm ViT by name.
        epochs: Passes over the training pictures.
        batch_size: Pictures in one forward pass of one process.
        grad_accum_steps: Forward passes per update; the last update of an epoch takes what is left, rightly scaled.
        opt: Optimizer, by timm's names.
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
        mixup: Alpha of mixup; 0 for none.
        cutmix: Alpha of cutmix; 0 for none.
        aa: "3a" for 3-Augment, or RandAugment such as rand-m9-mstd0.5-inc1; empty for none.
        color_jitter: Strength of colour changes.
        hflip: Probability of a horizontal flip.
        scale: Smallest and largest share of the picture that a random crop takes.
        reprob: Probability of random erasing.
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
    init_from: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    grad_accum_steps: int = 1
    opt: str = "adamw"
    lr: float | None = None
    min_lr: float | None = None
    warmup_epochs: float | None = None
    weight_decay: float | None = None
    layer_decay: float | None = None
    clip_grad: float = 1.0
    balance: Literal["none", "weights", "sampler"] = "none"
    drop_path: float | None = None
    smoothing: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    aa: str | None = None
    color_jitter: float | None = None
    hflip: float | None = None
    scale: tuple[float, float] | None = None
    reprob: float | None = None
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


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Fill what the user left open: from the data's defaults, then the preset's, then the common ones.

    Raises:
        UserError: A number is outside its range.
    """
    preset = config.preset
    if preset == "auto":
        preset = "finetune" if config.init_from else "scratch"
    table: dict[str, Any] = COMMON | PRESETS[preset] | (DIGITS if config.data == "digits" else PICTURES)
    if config.task == "multilabel":
        table |= {"smoothing": 0.0}
    like: dict[str, Any] = {}
    if config.model in (None, "jumboized") and config.init_from is not None:
        like = _like_the_folder(config.init_from)
    if config.data == "digits" and (like or config.model not in (None, DIGITS["model"])):
        # Another model has its own size and patch.
        table = {key: value for key, value in table.items() if key not in ("img_size", "patch_size")}
    table |= like
    open_fields = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    found: dict[str, Any] = {key: value for key, value in table.items() if key in open_fields}
    filled = dataclasses.replace(config, preset=preset, **found)
    assert filled.epochs is not None
    if filled.warmup_epochs is None:
        filled.warmup_epochs = min(5.0, filled.epochs / 10)
    _check_ranges(filled)
    return filled


# Arguments of a saved model that the run has options for, or that say where old weights are.
_OF_THE_RUN = ("num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def _like_the_folder(source: str) -> dict[str, Any]:
    """Model and arguments, size, patch and channels of a model folder or run: going on from one needs no --model.

    Whatever is wrong with the folder is said when its weights are read.
    """
    for folder in (Path(source), Path(source) / "model"):
        try:
            content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            args, size = content.get("model_args", {}), content["pretrained_cfg"]["input_size"]
            found = {"model": content["architecture"], "img_size": f"{size[1]}x{size[2]}", "in_chans": size[0]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            continue
        if isinstance(args.get("patch_size"), int):
            found["patch_size"] = args["patch_size"]
        further = {name: value for name, value in args.items() if name not in {*found, *_OF_THE_RUN}}
        return found | {"model_args": [f"{name}={json.dumps(value)}" for name, value in further.items()]}
    return {}


# Infinity is no number to train with, so every range ends below it.
_HUGE = 1e300

_RANGES: dict[str, tuple[float, float, str]] = {
    "epochs": (1, _HUGE, "at least 1"),
    "batch_size": (1, _HUGE, "at least 1"),
    "steps_per_epoch": (1, _HUGE, "at least 1"),
    "shuffle_window": (1, _HUGE, "at least 1"),
    "grad_accum_steps": (1, _HUGE, "at least 1"),
    "patch_size": (1, _HUGE, "at least 1"),
    "in_chans": (1, _HUGE, "at least 1"),
    "devices": (1, _HUGE, "at least 1"),
    "nodes": (1, _HUGE, "at least 1"),
    "lr": (0, _HUGE, "0 or more"),
    "min_lr": (0, _HUGE, "0 or more"),
    "warmup_epochs": (0, _HUGE, "0 or more"),
    "weight_decay": (0, _HUGE, "0 or more"),
    "layer_decay": (1e-9, 1, "above 0, up to 1"),
    "clip_grad": (0, _HUGE, "0 or more"),
    "drop_path": (0, 0.999, "from 0 to below 1"),
    "smoothing": (0, 0.999, "from 0 to below 1"),
    "mixup": (0, _HUGE, "0 or more"),
    "cutmix": (0, _HUGE, "0 or more"),
    "color_jitter": (0, 1, "from 0 to 1"),
    "hflip": (0, 1, "from 0 to 1"),
    "reprob": (0, 1, "from 0 to 1"),
    "model_ema_decay": (0, 1, "from 0 to 1"),
    "patience": (0, _HUGE, "0 or more"),
    "val_fraction": (1e-9, 0.999, "above 0, below 1"),
    "workers": (0, _HUGE, "0 or more"),
    "recovery_interval": (0, _HUGE, "0 or more"),
    "seed": (0, 2**63 - 1, "0 or more"),
    "split_seed": (0, 2**63 - 1, "0 or more"),
    "folds": (0, _HUGE, "0 for none, or 2 and more"),
    "fold": (1, _HUGE, "at least 1"),
    "seeds": (1, _HUGE, "at least 1"),
}


def _check_ranges(config: TrainConfig) -> None:
    for name, (low, high, words) in _RANGES.items():
        value = getattr(config, name)
        # NaN is in no range, so the comparison is written to fail for it.
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but must be {words}")
    if config.scale is not None and not 0 < config.scale[0] <= config.scale[1] <= 1:
        raise UserError(
            f"--scale is {config.scale[0]} {config.scale[1]}, but must be two shares, 0 < small <= large <= 1"
        )
    if config.balance == "sampler" and config.task == "multilabel":
        raise UserError(
            "--balance sampler draws by the one class of a picture, which --task multilabel has not; use --balance "
            "weights"
        )
    if config.folds == 1:
        raise UserError("--folds is 1, but must be 0 for none, or 2 and more")
    if config.fold is not None and config.fold > config.folds:
        raise UserError(f"--fold {config.fold} needs --folds of at least as many, not {config.folds}")
    assert config.warmup_epochs is not None and config.epochs is not None
    if config.warmup_epochs >= config.epochs:
        raise UserError(
            f"--warmup-epochs {config.warmup_epochs:g} leaves nothing of {config.epochs} epochs; "
            "make it smaller or raise --epochs"
        )


def parse_size(text: str | int) -> tuple[int, int]:
    """ "224" or "192x256" as (height, width).

    Raises:
        UserError: Anything else.
    """
    parts = str(text).lower().split("x")
    if len(parts) not in (1, 2) or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--img-size is {text!r}, but must be a number of pixels such as 224, or HEIGHTxWIDTH")
    sizes = [int(part) for part in parts]
    return sizes[0], sizes[-1]
