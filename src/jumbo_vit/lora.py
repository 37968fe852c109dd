"""Low-rank bypasses around the Jumbo FFN: which can be merged into it, and how.

What is unusual: the FFN is one for all blocks, the bypasses are each block's own. Merging therefore unshares it: each
block gets an FFN of its own, with its bypasses added to the two matrices.
"""

import copy
from typing import Any, cast

import torch
from timm.models._input import update_model_args
from torch import nn

from jumbo_vit.block import JumboBlock, LowRankBypass
from jumbo_vit.errors import UserError
from jumbo_vit.feedforward import FeedForward


def merge_lora(model: nn.Module) -> nn.Module:
    """A copy of a model with the same outputs and without bypasses; each of its blocks has an FFN of its own.

    Args:
        model: A Jumbo model with `lora_form="matrices"`; it stays as it is.

    Returns:
        A model as `share_jumbo_mlp=False, lora_rank=0` makes it, which is saved and loaded like any other. It computes
        less and holds as many times more FFN weights as it has blocks.

    Raises:
        UserError: It has no bypasses, or `lora_form="whole"`: such a bypass runs beside the activation between the two
            matrices, so no change of these replaces it.
    """
    blocks = [block for block in getattr(model, "blocks", ()) if isinstance(block, JumboBlock)]
    if any(getattr(block, "lora", None) is not None for block in blocks):
        raise UserError(
            "lora_form='whole' cannot be merged: its bypass goes around the whole FFN with the activation in it, which "
            "no change of the two matrices replaces; train with lora_form='matrices' to merge afterwards"
        )
    if not any(getattr(block, "lora_matrices", None) is not None for block in blocks):
        raise UserError(f"this {type(model).__name__} has no bypasses to merge: it was made without lora_rank")
    merged: Any = copy.deepcopy(model)
    for block in merged.blocks:
        block.jumbo_mlp = _with_bypasses(block)
        block.lora_matrices = None
    merged.jumbo_mlp = None  # which takes the blocks' references back
    update_model_args(merged, share_jumbo_mlp=False, lora_rank=0, lora_form="whole")
    return cast(nn.Module, merged)


def _with_bypasses(block: JumboBlock) -> nn.Module:
    """A copy of the block's FFN with its bypasses in the matrices."""
    assert block.lora_matrices is not None
    mlp = copy.deepcopy(block.jumbo_mlp if block.jumbo_mlp is not None else block._shared_mlp[0])
    assert isinstance(mlp, FeedForward)
    pairs = ((mlp.fc1, block.lora_matrices.fc1), (mlp.fc2, block.lora_matrices.fc2))
    for matrix, bypass in pairs:
        _add(cast(nn.Linear, matrix), bypass)
    return mlp


@torch.no_grad()
def _add(matrix: nn.Linear, bypass: LowRankBypass) -> None:
    # In fp64, so that a weight in low precision is rounded once.
    product = bypass.up.weight.double() @ bypass.down.weight.double()
    matrix.weight.copy_(matrix.weight.double() + product)


def bypass_names(model: nn.Module) -> list[str]:
    """The names of a model's parameters that belong to low-rank bypasses."""
    found = [name for name, module in model.named_modules() if isinstance(module, LowRankBypass)]
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0].rpartition(".")[0] in found]
