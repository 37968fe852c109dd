"""The parts of a run, made from complete options."""

import dataclasses
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
import yaml
from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import nn

from jumbo_vit.data.pipeline import Augmentation, Preparation
from jumbo_vit.data.sets import Splits
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_text
from jumbo_vit.folder import make_model
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.config import TrainConfig, parse_size
from jumbo_vit.tasks.distill import FunctionMatching, Lesson
from jumbo_vit.tasks.loop import Plan
from jumbo_vit.tasks.partial import lora_rank
from jumbo_vit.tasks.schedules import check_shapes
from jumbo_vit.version import __version__
from jumbo_vit.vit import check_size

Options = TypeVar("Options")


def load_config(out: Path) -> TrainConfig:
    """The options of a run of `train`, from its `config.yaml`.

    Raises:
        UserError: The file is damaged or of another version, or the run one of another command.
    """
    return load_options(out, TrainConfig)


def command_of(out: Path) -> str:
    """The command that made a run, by its `config.yaml`; "train" also where that cannot be read."""
    try:
        fields = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError):
        return "train"
    return "pretrain" if isinstance(fields, dict) and "method" in fields else "train"


def load_options(out: Path, kind: type[Options]) -> Options:
    """The options of a run, as its command's dataclass `kind`; raises as `load_config`."""
    try:
        fields = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
        own = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if isinstance(fields, dict) and ("method" in fields) != ("method" in own):
            command = command_of(out)
            raise UserError(f"{out} is a run of {command}: go on with jumbo-vit {command} --resume {out}")
        names = own - {"given", "resume"}
        missing = sorted(names - fields.keys())
        if missing:
            raise UserError(
                f"{out / 'config.yaml'} is cut off or of another version: it lacks {', '.join(missing[:5])}"
            )
        pairs = {name: _pair(fields[name]) for name in ("scale", "patch_drop", "opt_betas") if fields.get(name)}
        return kind(**fields | pairs | {"logger": list(fields["logger"])})
    except UserError:
        raise
    except (OSError, yaml.YAMLError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{out / 'config.yaml'} cannot be read as a run's options: {error}") from error


def _pair(values: Any) -> tuple[float, float]:
    first, second = values
    return float(first), float(second)


def save_config(out: Path, config: Any) -> None:
    """Write `config.yaml` of complete options, which `--config` and `--resume` take."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in ("given", "resume")}
    fields["scale"] = config.scale or (1.0, 1.0)
    fields |= {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    write_text(out / "config.yaml", yaml.safe_dump(fields, sort_keys=False, allow_unicode=True))


def build_model(config: TrainConfig, num_classes: int) -> tuple[nn.Module, Preparation]:
    """The model with the run's fixed first weights, and the preparation of its input.

    Raises:
        UserError: An unknown name, an option it does not take, or a size that its patches do not tile.
    """
    assert config.model is not None and config.in_chans is not None
    kwargs = _parse_args(config.model_args or []) | {"num_classes": num_classes, "in_chans": config.in_chans}
    if config.drop_path:
        kwargs["drop_path_rate"] = config.drop_path
    if config.img_size:
        kwargs["img_size"] = parse_size(config.img_size)
    if config.patch_size:
        kwargs["patch_size"] = config.patch_size
    if config.img_sizes:
        kwargs["dynamic_img_size"] = True
    if config.lora_rank:
        kwargs["lora_rank"] = lora_rank(config, kwargs.get("lora_rank"))
    torch.manual_seed(mix_seed(config.seed, "weights"))
    model: Any = _make_as_asked(config.model, kwargs)
    cfg = model.pretrained_cfg
    size = parse_size(config.img_size) if config.img_size else tuple(cfg["input_size"][-2:])
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is not None:
        check_size(size, patch)
    check_shapes(model, config)
    preparation = dataclasses.replace(Preparation.from_cfg(cfg), input_size=(config.in_chans, *size))
    if config.in_chans != len(cfg["mean"]):
        mean, std = ((sum(cfg[key]) / len(cfg[key]),) * config.in_chans for key in ("mean", "std"))
        preparation = dataclasses.replace(preparation, mean=mean, std=std)
    return model, preparation


def saved_form(model: nn.Module, config: TrainConfig, num_classes: int) -> nn.Module:
    """The model that a folder of the run describes: of --img-size alone, though the run's may take other sizes too."""
    if not config.img_sizes:
        return model
    with torch.device("meta"):
        return build_model(dataclasses.replace(config, img_sizes=None), num_classes)[0]


def _parse_args(words: list[str]) -> dict[str, Any]:
    """NAME=VALUE words with YAML values, as keyword arguments.

    Raises:
        UserError: A word is not of that form.
    """
    args: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--model-args takes NAME=VALUE, such as num_jumbo=3, not {word!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--model-args {word!r}: the value cannot be read") from error
        args[name] = tuple(value) if isinstance(value, list) else value
    return args


def _make_as_asked(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """The model; one without positions, such as a ResNet, takes pictures of any size and no word about it."""
    try:
        return make_model(name, **kwargs)
    except UserError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        refused = next((key for key in kwargs if f"unexpected keyword argument '{key}'" in str(error)), None)
        if refused in ("img_size", "dynamic_img_size"):
            return _make_as_asked(name, {key: value for key, value in kwargs.items() if key != refused})
        flag = {"patch_size": "--patch-size", "drop_path_rate": "--drop-path", "in_chans": "--in-chans"}.get(
            refused or ""
        )
        if refused == "lora_rank":
            raise UserError(
                f"--lora-rank puts bypasses around the Jumbo FFN, and {name} has none that takes them"
            ) from error
        if flag is None:
            raise
        raise UserError(f"{name} takes no {flag}: leave it out, or choose another --model") from error


def augmentation(config: TrainConfig) -> Augmentation:
    """The training transform that complete options ask for."""
    return Augmentation(
        aa=config.aa or "",
        color_jitter=config.color_jitter or 0.0,
        hflip=config.hflip or 0.0,
        scale=config.scale or (1.0, 1.0),
        reprob=config.reprob or 0.0,
    )


def make_optimizer(model: nn.Module, config: TrainConfig) -> Any:
    """timm's optimizer, with layer decay and without weight decay on norms, biases, tokens and positions.

    Raises:
        UserError: timm does not know the optimizer, or it needs what is not there.
    """
    decay = config.layer_decay if config.layer_decay and config.layer_decay < 1 else None
    try:
        _check_optimizer(config)
        further: dict[str, Any] = {} if config.opt_betas is None else {"betas": config.opt_betas}
        return create_optimizer_v2(
            model, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay or 0.0, layer_decay=decay, **further
        )
    except UserError:
        raise
    except (ValueError, AssertionError) as error:
        if "optimizer" not in str(error).lower():
            raise
        raise UserError(f"--opt {config.opt} is no optimizer of timm; try adamw, lamb, sgd or lion") from error


# Optimizers of other packages, which run on CUDA alone, and how one gets these.
_PACKAGES = {
    "apex": "build it from github.com/NVIDIA/apex (the apex on PyPI is something else)",
    "bitsandbytes": "pip install bitsandbytes",
}


def _check_optimizer(config: TrainConfig) -> None:
    name = config.opt.lower()
    # timm takes the prefix off itself, but does not list such names.
    info = get_optimizer_info(name.removeprefix("lookahead_"))
    if info.second_order:
        raise UserError(f"--opt {config.opt} needs second derivatives, which training here does not take; try adamw")
    if name.startswith("lookahead_") and config.strategy == "fsdp2":
        raise UserError(
            f"--opt {config.opt} does not go with --strategy fsdp2: a resumed run could not shard its slow weights; "
            f"try {name.removeprefix('lookahead_')}, or --strategy ddp"
        )
    if config.opt_betas is not None and not info.has_betas:
        raise UserError(f"--opt {config.opt} has no --opt-betas: leave them out, or try adamw")
    package = info.opt_class.partition(".")[0] if isinstance(info.opt_class, str) else ""
    if package not in _PACKAGES:
        return
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"--opt {config.opt} needs the package {package}, which is not here: {_PACKAGES[package]}, or try adamw"
        )
    if not torch.cuda.is_available():
        raise UserError(f"--opt {config.opt} needs a CUDA device; try adamw")


def make_objective(
    config: TrainConfig, num_classes: int, class_weights: torch.Tensor | None = None, lesson: Lesson | None = None
) -> Classification:
    """Loss and mixing from complete options, the weights of the classes where the loss has any, and the teachers."""
    mixing = Mixing(config.mixup or 0.0, config.cutmix or 0.0, smoothing=config.smoothing or 0.0)
    if lesson is not None:
        return FunctionMatching(num_classes, mixing, lesson, config.label_weight, class_weights, config.loss)
    return Classification(config.task, num_classes, mixing, class_weights, config.loss)


def make_plan(config: TrainConfig, metric: str) -> Plan:
    """The loop's numbers from complete options, and the score that decides which model is kept."""
    return Plan(
        epochs=config.epochs or 1,
        lr=config.lr or 0.0,
        min_lr=config.min_lr or 0.0,
        warmup_epochs=config.warmup_epochs or 0.0,
        clip_grad=config.clip_grad,
        seed=config.seed,
        metric=metric,
        patience=config.patience,
        recovery_interval=config.recovery_interval,
    )


def make_logger(kind: str, out: Path) -> Any:
    """A logger of Lightning's, writing into the run's folder.

    Raises:
        UserError: Its package is not installed.
    """
    try:
        if kind == "tensorboard":
            from lightning.fabric.loggers import TensorBoardLogger

            return TensorBoardLogger(out, name="tensorboard", version="")
        if kind == "wandb":
            from lightning.pytorch.loggers import WandbLogger

            return WandbLogger(project="jumbo-vit", name=out.name, save_dir=out)
        from lightning.pytorch.loggers import MLFlowLogger

        # Without a server of the user's own, a database file in the run: MLflow gave up its folder of files.
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(out / 'mlflow.db').absolute()}"
        return MLFlowLogger(experiment_name="jumbo-vit", run_name=out.name, tracking_uri=address)
    except ModuleNotFoundError as error:
        raise UserError(
            f"--logger {kind} needs the package {error.name or kind}: pip install {error.name or kind}"
        ) from error


# The options that decide what a checkpoint holds, or what the rest of a run computes; those that choose its pictures
# show in the fingerprint.
_IDENTITY = (
    "task", "model", "model_args", "img_size", "patch_size", "in_chans", "opt", "opt_betas", "lr", "min_lr",
    "warmup_epochs", "weight_decay", "layer_decay", "clip_grad", "drop_path", "balance", "smoothing", "mixup", "cutmix",
    "aa", "color_jitter", "hflip", "scale", "reprob", "model_ema", "model_ema_decay", "seed",
    "streaming", "steps_per_epoch", "shuffle_window", "classes", "loss", "teacher", "label_weight", "aug_repeats",
    "patch_drop", "img_sizes", "size_schedule", "naflex_loader", "naflex_train_seq_lens", "freeze", "lora_rank",
)  # fmt: skip


def identity(config: TrainConfig) -> dict[str, Any]:
    """The options that must not differ between a checkpoint and the `config.yaml` beside it."""
    found = {name: getattr(config, name) for name in _IDENTITY}
    # config.yaml has lists alone, so a pair and a list must be the same here.
    pairs = {"scale": list(config.scale or (1.0, 1.0)), "patch_drop": list(config.patch_drop)}
    return found | pairs | {"opt_betas": list(config.opt_betas) if config.opt_betas else None}


def fingerprint(splits: Splits) -> str:
    """A checksum of names and labels, in order: a resumed run must see the same pictures."""
    checksum = splits.val.checksum(splits.train.checksum())
    return f"{len(splits.train)}+{len(splits.val)}:{checksum:08x}"


def versions() -> dict[str, str]:
    """Versions that decide results."""
    found = {"jumbo_vit": __version__, "torch": torch.__version__, "timm": timm.__version__}
    return {name: str(version) for name, version in found.items()} | {"python": platform.python_version()}
