"""Averaged weights whose decay grows with the updates, so that a run of any length has a useful average."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from jumbo_vit.tasks.sharding import whole


def growing_decay(highest: float, updates: float) -> float:
    """The decay after `updates` updates: min(highest, (1 + n) / (10 + n)), as TensorFlow's moving average has it."""
    return min(highest, (1 + updates) / (10 + updates))


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model` that follows it by `update_parameters`, starting equal to it."""

    def follow(average: Sequence[Any], current: Sequence[Any], count: Any) -> None:
        weight = 1 - growing_decay(decay, float(count))
        with torch.no_grad():
            for mine, new in zip(average, current, strict=True):
                mine.lerp_(new.to(mine.dtype), weight)

    average = AveragedModel(model, multi_avg_fn=follow)
    average.requires_grad_(False)
    return average


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The whole state dict of the model inside wrappers, with plain names, on the CPU; all processes must call it."""
    inner = module.module if isinstance(module, AveragedModel) else module
    return {name: whole(value.detach()).cpu() for name, value in inner.state_dict().items()}
