"""What shows of stages before the first begins: options and their types, models that go on from each other, places."""

import types
import typing
from argparse import ArgumentError
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model
from torch import nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.lora import bypass_names
from jumbo_vit.tasks.build import augmentation, build_model, make_optimizer
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.dry_data import absent
from jumbo_vit.tasks.loss_options import full_paths
from jumbo_vit.tasks.schedules import shapes

_CLASSES = 2
"""Of the models that are tried: how many the data have is not known before they are opened."""


def typed_options(options: dict[Any, Any], names: Collection[str], where: str) -> dict[str, Any]:
    """Options by their names and in their types.

    Args:
        options: As YAML has them.
        names: Those that are allowed.
        where: What messages begin with.

    Raises:
        UserError: What is wrong with the first that is wrong.
    """
    import jsonargparse

    hints = typing.get_type_hints(TrainConfig)
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise UserError(f"{where}: unknown option {key}{nearest(name, names)}")
        parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False)
        parser.add_argument(f"--{name}", type=hints[name])
        try:
            found[name] = parser.parse_object({name: _in_shape(value, hints[name])})[name]
        except ArgumentError as error:
            raise UserError(f"{where}: {name} is {value!r}, which is no value of this option") from error
    return found


def _in_shape(value: Any, hint: Any) -> Any:
    """A number for a text, or one item for a list, as YAML has them: 224, or `logger: none`."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    arms = typing.get_args(hint) if union else (hint,)
    if any(typing.get_origin(arm) is list for arm in arms) and value is not None and not isinstance(value, list):
        value = [value]
    items = {item for arm in arms for item in (typing.get_args(arm) if typing.get_origin(arm) is list else (arm,))}
    if str not in items:
        return value
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return _as_text(value)


def _as_text(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


def with_full_paths(options: dict[str, Any]) -> dict[str, Any]:
    """Options whose paths are absolute, so that they mean the same from anywhere; names and addresses stay."""
    found = dict(options)
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name == "teacher" and value:
            found[key] = full_paths([value] if isinstance(value, str) else value)
        if name not in ("data", "val_data", "init_from") or not value:
            continue
        path = Path(value).expanduser().absolute()
        named = not path.exists() if name == "init_from" else value == "digits" or "://" in value
        found[key] = value if named else str(path)
    return found


def check_models(plan: Sequence[TrainConfig]) -> None:
    """Refuse stages whose model, sizes, augmentation or optimizer cannot be made, or lose what the one before learned.

    Models are made without memory for their weights.

    Args:
        plan: Complete options of each stage.

    Raises:
        UserError: The first that is wrong.
    """
    before: nn.Module | None = None
    for number, stage in enumerate(plan, start=1):
        try:
            model, preparation = _tried(stage)
            augment = augmentation(stage)
            augment.transform(preparation)
            shapes(stage, model, preparation, augment)
            make_optimizer(model, stage)
        except UserError as error:
            raise UserError(f"stage {number}: {error}") from error
        if before is not None:
            _check_goes_on(before, model, number)
        before = model


def _tried(stage: TrainConfig) -> tuple[nn.Module, Preparation]:
    try:
        with torch.device("meta"):
            return build_model(stage, _CLASSES)
    except Exception:  # what is wrong is told by the same with memory, if it was not the lack of it
        return build_model(stage, _CLASSES)


def _check_goes_on(before: nn.Module, model: nn.Module, number: int) -> None:
    """A stage takes all tensors of the one before but the head; the positions and the first layer may be resampled."""
    theirs, mine = before.state_dict(), model.state_dict()
    own: Any = model
    heads, first = (_names(own.pretrained_cfg.get(key)) for key in ("classifier", "first_conv"))
    # The norm behind the pool is kept or made anew with the head; fresh bypasses do nothing at first.
    free = {name for name in (*theirs, *mine) if name.startswith((*(f"{head}." for head in heads), "fc_norm."))}
    if not bypass_names(before):
        free.update(bypass_names(model))
    # LayerScale is multiplied into the layer before it.
    free.update(name for name in theirs if name.endswith(("ls1.gamma", "ls2.gamma")) and name not in mine)
    resampled = {"patch_embed.proj.weight", *(f"{name}.weight" for name in first)}
    for name in (*mine, *theirs):
        if name in free:
            continue
        has, wants = (tuple(state[name].shape) if name in state else None for state in (theirs, mine))
        fits = has == wants
        if has is not None and wants is not None and len(has) == len(wants):
            fits |= name == "pos_embed" and has[-1] == wants[-1]
            fits |= name in resampled and len(has) == 4 and has[0] == wants[0]
        if not fits:
            raise UserError(
                f"stage {number} has another model than stage {number - 1} ({name} is {wants or 'not there'}, before "
                f"it is {has or 'not there'}), so trained weights would be lost: give both the same model and "
                "model_args"
            )


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_places(plan: Sequence[TrainConfig]) -> None:
    """Refuse stages whose data, teachers or first weights are not there; lists, patterns and addresses are not opened.

    Args:
        plan: Complete options of each stage.

    Raises:
        UserError: The first that is not there.
    """
    for number, stage in enumerate(plan, start=1):
        for flag, place in (("--data", stage.data), ("--val-data", stage.val_data)):
            if place is not None and absent(place):
                raise UserError(f"stage {number}: {flag} {place} is not there")
        sources = [("--teacher", name) for name in stage.teacher or []]
        if number == 1 and stage.init_from:
            sources.append(("--init-from", stage.init_from))
        for flag, name in sources:
            path = Path(name).expanduser()
            if not (path.is_dir() or (flag == "--init-from" and path.is_file()) or is_model(name)):
                hint = nearest(name, timm.list_models(pretrained=True))
                raise UserError(f"stage {number}: {flag} {name}: no such folder, and no model of timm{hint}")
