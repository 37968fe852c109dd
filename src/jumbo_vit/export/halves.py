"""A module in 16 bits, for formats that have no converter of their own."""

import copy

import torch
from torch import Tensor, nn

MOST_FP16 = 65504.0
"""The largest number that fp16 holds."""

# Their statistics are sums over many values, which 16 bits cannot hold.
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


class Half(nn.Module):
    """A copy of a module with weights in 16 bits; takes and gives fp32.

    Norms are computed in fp32, with fp32 weights. The softmax of attention is, inside PyTorch's own kernels.

    Args:
        module: Takes one tensor, and gives one.
        dtype: torch.bfloat16 or torch.float16.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.module = copy.deepcopy(module).to(dtype)
        originals = dict(module.named_modules())
        for name, parent in list(self.module.named_modules()):
            for key, child in list(parent.named_children()):
                if isinstance(child, _NORMS):
                    # Taken from the original: through 16 bits its weights would have been rounded already.
                    setattr(parent, key, _InFp32(originals[f"{name}.{key}" if name else key]))

    def forward(self, x: Tensor) -> Tensor:
        """As the module's own."""
        out: Tensor = self.module(x.to(self.dtype))
        return out.float()


class _InFp32(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = copy.deepcopy(norm).float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.float())
        return out.to(x.dtype)


def largest_value(module: nn.Module, batches: list[Tensor]) -> tuple[float, str]:
    """The largest absolute weight or activation of a module over some inputs, and where it is.

    Activations are those that any part hands on. NaN counts as infinite.
    """
    best = (0.0, "")

    def see(where: str, value: object) -> None:
        nonlocal best
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            top = float(value.detach().abs().max().nan_to_num(nan=torch.inf, posinf=torch.inf))
            if top > best[0]:
                best = (top, where)

    for name, parameter in module.named_parameters():
        see(f"the weight {name}", parameter)
    hooks = [
        part.register_forward_hook(lambda _m, _i, out, name=name: see(f"the output of {name or 'the model'}", out))
        for name, part in module.named_modules()
    ]
    try:
        with torch.inference_mode():
            for batch in batches:
                module(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return best
