"""What a run's open options become: presets, the defaults of the data, and the ranges that every number must keep."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.loss_options import check_loss_options, full_paths, loss_defaults
from jumbo_vit.tasks.partial import check_partial, partial_defaults
from jumbo_vit.tasks.token_options import check_token_options

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


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Fill what the user left open: from the data's defaults, then the preset's, then the common ones.

    Raises:
        UserError: A number is outside its range.
    """
    check_partial(config)
    preset = config.preset
    if preset == "auto":
        preset = "finetune" if config.init_from else "scratch"
    table: dict[str, Any] = COMMON | PRESETS[preset] | (DIGITS if config.data == "digits" else PICTURES)
    table |= loss_defaults(config)
    like: dict[str, Any] = {}
    if config.model in (None, "jumboized") and config.init_from is not None:
        like = _like_the_folder(config.init_from)
    if config.data == "digits" and (like or config.model not in (None, DIGITS["model"])):
        # Another model has its own size and patch.
        table = {key: value for key, value in table.items() if key not in ("img_size", "patch_size")}
    table |= like | partial_defaults(config)
    open_fields = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    found: dict[str, Any] = {key: value for key, value in table.items() if key in open_fields}
    filled = dataclasses.replace(config, preset=preset, **found)
    if filled.freeze and filled.precision == "auto":
        filled.precision = "fp32"  # a head costs next to nothing, and its features are in fp32
    assert filled.epochs is not None
    if filled.warmup_epochs is None:
        filled.warmup_epochs = min(5.0, filled.epochs / 10)
    filled.teacher = full_paths(filled.teacher)
    _check_ranges(filled)
    check_loss_options(filled)
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
    "label_weight": (0, 0.999, "from 0 to below 1"),
    "aug_repeats": (0, _HUGE, "0 or more"),
    "lora_rank": (0, _HUGE, "0 or more"),
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
    if config.opt_betas is not None and not all(0 <= beta < 1 for beta in config.opt_betas):
        raise UserError(
            f"--opt-betas is {config.opt_betas[0]} {config.opt_betas[1]}, but both must be from 0 to below 1"
        )
    check_token_options(config)
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
