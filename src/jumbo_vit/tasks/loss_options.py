"""The options on what a run learns from, labels or teachers: their defaults, and what does not go together.

Free of torch.
"""

from pathlib import Path
from typing import Any

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig

# What `jumbo_vit.data.views` writes; that module needs torch.
_TAUGHT = "taught.json"


def loss_defaults(config: TrainConfig) -> dict[str, Any]:
    """Defaults that go before those of data and preset: labels are smoothed only where there is a use for it."""
    no_labels = bool(config.teacher) and not config.label_weight
    return {"smoothing": 0.0} if no_labels or config.loss == "bce" or config.task == "multilabel" else {}


def full_paths(teachers: list[str] | None) -> list[str] | None:
    """Teachers that are folders as absolute paths, so that config.yaml means the same from anywhere."""
    if teachers is None:
        return None
    paths = [Path(name).expanduser() for name in teachers]
    return [str(path.absolute()) if path.is_dir() else name for path, name in zip(paths, teachers, strict=True)]


def check_loss_options(config: TrainConfig) -> None:
    """Refuse what has no effect or no meaning.

    Raises:
        UserError: It is so.
    """
    if config.loss == "bce" and config.smoothing:
        raise UserError(
            f"--loss bce with --smoothing {config.smoothing:g}: each class that is in a picture counts as fully on; "
            "set --smoothing 0"
        )
    if config.loss == "bce" and config.balance == "weights" and config.task == "multiclass":
        raise UserError(
            "--loss bce asks each class for yes or no and knows no weights of classes; use --balance sampler, or "
            "--loss ce"
        )
    if config.teacher:
        _check_teachers(config, config.teacher)
    elif config.label_weight or config.teacher is not None:
        raise UserError(
            f"--label-weight {config.label_weight:g} is the labels' share beside teachers, and there is no --teacher: "
            "add one, or leave it out"
            if config.label_weight
            else "--teacher names none: give a name of timm or a folder, or leave it out"
        )


def _check_teachers(config: TrainConfig, teachers: list[str]) -> None:
    reasons = {
        "task": (config.task != "multiclass", "what teachers say is a distribution over classes"),
        "freeze": (config.freeze, "it trains on features that are computed once, which no teacher sees"),
    }
    if not config.label_weight:
        labels = "labels count for nothing beside teachers; add --label-weight, or leave it out"
        reasons["smoothing"] = (bool(config.smoothing), labels)
        reasons["loss"] = (config.loss != "ce", labels)
        reasons["balance"] = (config.balance == "weights", labels)
    taught = [name for name in teachers if (Path(name).expanduser() / _TAUGHT).is_file()]
    if taught:
        fixed = f"{taught[0]} knows fixed views of listed pictures alone"
        reasons["teacher"] = (len(teachers) > 1, f"{taught[0]} has its teachers in it already; give it alone")
        reasons["streaming"] = (config.streaming, fixed)
        reasons["img_sizes"] = (bool(config.img_sizes), fixed)
    odd = next((name for name, (given, _) in reasons.items() if given), None)
    if odd is not None:
        value = getattr(config, odd)
        words = "" if value is True else f" {' '.join(map(str, value)) if isinstance(value, list) else value}"
        with_teacher = "" if odd == "teacher" else "--teacher does not go with "
        raise UserError(f"{with_teacher}--{odd.replace('_', '-')}{words}: {reasons[odd][1]}")
