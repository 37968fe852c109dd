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
    difference: under hooks and modes, in a trace, an export, a compilation or a script, around layers or `forward`s
    that were exchanged, and on tensors of another class (nested, fake, distributed).
    """

    @torch.jit.unused
    def _may_overwrite(self, hidden: Tensor) -> bool:
        """Whether `hidden`, just made by fc1, is a fresh tensor that nobody but the activation will read."""
        # An fx trace passes proxies; a nested tensor has no GELU in place.
        if torch.is_grad_enabled() or type(hidden) is not Tensor:
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or _has_any_global_hook():
            return False
        # A mode sees every operation, and may keep what it gave; vmap has no rule for GELU in place, and would loop.
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(hidden):
            return False
        # A subclass or a forward of its own may do anything; an exchanged fc1 may hand back its own input.
        if type(self.fc1) is not nn.Linear or type(self.act) is not nn.GELU:
            return False
        return not any(
            layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
            for layer in (self.fc1, self.act)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        hidden = self.fc1(x)
        if not torch.jit.is_scripting() and self._may_overwrite(hidden):
            hidden = torch.ops.aten.gelu_(hidden, approximate=self.act.approximate)
        else:
            hidden = self.act(hidden)
        out: Tensor = self.drop2(self.fc2(self.norm(self.drop1(hidden))))
        return out

    def hidden(self, x: Tensor, extra: Tensor) -> Tensor:
        """The hidden layer (..., H) that fc2 reads, with `extra` (..., H) added before the activation."""
        out: Tensor = self.norm(self.drop1(self.act(self.fc1(x) + extra)))
        return out

    def last(self, hidden: Tensor) -> Tensor:
        """What is made of the hidden layer: (..., H) -> (..., D)."""
        out: Tensor = self.drop2(self.fc2(hidden))
        return out
