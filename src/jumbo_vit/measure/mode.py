"""Looking into a model without leaving a trace: evaluation mode for a while, every module's own mode afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from jumbo_vit.errors import UserError


@contextmanager
def looked_at(model: nn.Module) -> Iterator[nn.Module]:
    """The plain module behind a compiled one, in evaluation mode and without gradients; all is put back at the end."""
    plain: nn.Module = getattr(model, "_orig_mod", model)
    modes = [(module, module.training) for module in plain.modules()]
    plain.eval()
    try:
        with torch.no_grad():
            yield plain
    finally:
        for module, mode in modes:
            module.training = mode


def as_input(model: nn.Module, images: Tensor) -> Tensor:
    """Prepared pictures (B, C, H, W) on the model's device, in its type.

    Raises:
        UserError: They are of another shape.
    """
    if images.ndim != 4:
        raise UserError(f"images must be a batch (B, C, H, W), not of shape {tuple(images.shape)}")
    return images.to(next(model.parameters()))
