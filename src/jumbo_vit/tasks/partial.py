"""Training a part of a model, as options: the head alone (`--freeze`), or head and bypasses (`--lora-rank`)."""

from typing import Any

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig

# A head on features that do not change is a convex problem: no augmentation, no layer decay, a high rate.
_FREEZE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "smoothing": 0.0,
    "hflip": 0.0,
    "scale": (1.0, 1.0),
    "layer_decay": 1.0,
}
_LORA: dict[str, Any] = {"lr": 1e-3, "layer_decay": 1.0}

# What `--freeze` takes of the options that need a picture anew in each epoch, or the trunk in the backward pass.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mixup": (None, 0),
    "cutmix": (None, 0),
    "aa": (None, ""),
    "color_jitter": (None, 0),
    "hflip": (None, 0),
    "scale": (None, (1.0, 1.0)),
    "reprob": (None, 0),
    "aug_repeats": (0, 1),
    "drop_path": (None, 0),
    "patch_drop": ((0.0, 0.0),),
    "img_sizes": (None, []),
    "naflex_loader": (False,),
    "teacher": (None, []),
    "grad_checkpointing": (False,),
    "streaming": (False,),
}


def partial_defaults(config: TrainConfig) -> dict[str, Any]:
    """What options that the user left open become in a run that trains a part of the model; {} for any other run."""
    return _FREEZE if config.freeze else _LORA if config.lora_rank else {}


def check_partial(config: TrainConfig) -> None:
    """Refuse what does not go with `--freeze` or `--lora-rank`; options are as the user gave them.

    Raises:
        UserError: It is so.
    """
    if config.freeze and config.lora_rank:
        raise UserError("--freeze trains the head alone, --lora-rank bypasses too: give one of the two")
    if config.init_from is None and (flag := partial_flag(config)):
        raise UserError(
            f"{flag} keeps a trunk as it was trained: say which by --init-from (a model folder, a weights file, or a "
            "timm model by name)"
        )
    if not config.freeze:
        return
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name)
        if (tuple(value) if name in ("scale", "patch_drop") and value else value) not in neutral:
            raise UserError(
                f"--freeze computes the features of each picture once, unchanged: it takes no "
                f"--{name.replace('_', '-')}, leave it out"
            )
    if config.strategy == "fsdp2":
        raise UserError("--freeze trains a head, which needs no sharding: leave out --strategy fsdp2")


def lora_rank(config: TrainConfig, given: Any) -> int:
    """The rank of a run's bypasses, beside the one that its model's arguments name, if any.

    Raises:
        UserError: The two differ.
    """
    if given not in (None, 0, config.lora_rank):
        raise UserError(
            f"--lora-rank is {config.lora_rank}, but the model's arguments (of --model-args, or of the folder in "
            f"--init-from) have lora_rank={given}: give --lora-rank {given}"
        )
    return config.lora_rank


def partial_flag(config: TrainConfig) -> str:
    """The option that makes a run train a part of its model, or ""."""
    return "--freeze" if config.freeze else "--lora-rank" if config.lora_rank else ""
