"""Devices, precision and processes: the user's words for what Lightning's Fabric is given."""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from jumbo_vit.errors import UserError
from jumbo_vit.folder import pick_device
from jumbo_vit.tasks.sharding import shard

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# Below this width bf16 autocast was measured slower than fp32 on a CPU: its casts cost more than the products save.
CPU_BF16_WIDTH = 192


def pick_precision(wanted: str, device: torch.device, width: int) -> str:
    """The precision that "auto" means on a device for a model of some width, or the one that is wanted.

    Raises:
        UserError: fp16 on a CPU.
    """
    if wanted == "fp16" and device.type == "cpu":
        raise UserError("--precision fp16 does not train on a CPU; use bf16, fp32 or auto")
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    if device.type == "cpu" and width >= CPU_BF16_WIDTH and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bf16"
    return "fp32"


def make_fabric(device: str, devices: int, nodes: int, strategy: str, precision: str, width: int) -> tuple[Any, str]:
    """A launched Fabric, and the precision that was picked.

    Under torchrun or Slurm the processes are there already and Fabric finds them; else it starts them itself.

    Raises:
        UserError: The device, or so many of them, are not there; or processes and strategy do not go together.
    """
    kind = pick_device(device)
    picked = pick_precision(precision, kind, width)
    if kind.type == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices {devices}, but this machine has {torch.cuda.device_count()} CUDA devices")
    if kind.type == "mps" and devices > 1:
        raise UserError(f"--devices {devices}, but MPS is one device; use 1")
    world = int(os.environ.get("WORLD_SIZE", devices * nodes))
    if strategy == "fsdp2" and world == 1:
        raise UserError("--strategy fsdp2 needs several processes: set --devices or --nodes")
    with warnings.catch_warnings():
        # Lightning offers tuning advice as warnings, which would read as faults of the user's.
        warnings.filterwarnings("ignore", module=r"lightning\.fabric")
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        fabric = Fabric(
            accelerator=kind.type,
            devices=devices,
            num_nodes=nodes,
            strategy=_strategy(strategy, world),
            precision=PRECISIONS[picked],  # type: ignore[arg-type]
        )
        fabric.launch()
    return fabric, picked


def on_main(fabric: Any, work: Callable[[], Any]) -> Any:
    """The result of `work` on the main process, for all; its UserError too, so that none is left waiting."""
    answer: tuple[str, Any] = ("", None)
    if fabric.is_global_zero:
        try:
            answer = ("done", work())
        except UserError as error:
            answer = ("refused", str(error))
    word, value = fabric.broadcast(answer)
    if word == "refused":
        raise UserError(value)
    return value


def _strategy(name: str, world: int) -> Any:
    if name == "fsdp2":
        return ModelParallelStrategy(
            parallelize_fn=shard,
            data_parallel_size=world,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )
    return "auto" if world == 1 else "ddp"
