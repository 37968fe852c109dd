"""FSDP2: sharded weights in memory, whole ones on disk.

A run's checkpoint holds whole tensors whatever the strategy, so it can go on with another number of processes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each block, then the rest with the shared FFN as one group that stays whole during a pass."""
    data = mesh["data_parallel"]
    for block in getattr(module, "blocks", []):
        fully_shard(block, mesh=data)
    fully_shard(module, mesh=data)
    return module


def whole(content: Any) -> Any:
    """`content` with every sharded tensor gathered; all processes must call it, on the same content."""
    if isinstance(content, DTensor):
        return content.full_tensor()
    if isinstance(content, dict):
        return {key: whole(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(whole(value) for value in content)
    return content


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a whole optimizer state, and shard it as the parameters are."""
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and not isinstance(value, DTensor):
                values[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
