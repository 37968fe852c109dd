"""The feed-forward network of all our blocks: timm's Mlp, with a cheaper activation where no gradient is wanted.

The hidden layer is the largest tensor of a plain ViT. Writing the activation into a new tensor costs a second one, and
on a CPU most of that cost is the system handing out fresh pages: the activation written over its own input, which
nothing else reads, saves a tenth to a quarter of the whole forward pass and gives the same bits.
"""

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class FeedForward(Mlp):
    """timm's `Mlp`, (..., D) -> (..., D), same parameters, same names, same values to the bit.

    Where gradients are off, an exact or tanh GELU overwrites the hidden layer. It does not where anything could see the
    difference: under hooks, in a trace, an export, a compilation or a script, or around layers that were exchanged.
    """

    @torch.jit.unused
    def _may_overwrite(self, x: Tensor) -> bool:
        """Whether the hidden layer is a fresh tensor that nobody but the activation will read."""
        if torch.is_grad_enabled() or not isinstance(x, Tensor):  # an fx trace passes proxies
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or _has_any_global_hook():
            return False
        if any(layer._forward_hooks or layer._forward_pre_hooks for layer in (self.fc1, self.act)):
            return False
        # A subclass may do anything; an exchanged fc1 may hand back its own input.
        return type(self.fc1) is nn.Linear and type(self.act) is nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if not torch.jit.is_scripting() and self._may_overwrite(x):
            hidden = torch.ops.aten.gelu_(self.fc1(x), approximate=self.act.approximate)
        else:
            hidden = self.act(self.fc1(x))
        out: Tensor = self.drop2(self.fc2(self.norm(self.drop1(hidden))))
        return out
