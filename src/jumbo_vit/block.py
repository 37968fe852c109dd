"""The Jumbo block: the paper's figure in one file.

What is unusual: J global tokens take part in attention like all others, but afterwards they are read as one vector of
width J*D, which passes a wide feed-forward network of its own. That network is one module for all blocks; each block
holds a reference to it that PyTorch does not register, so that state dicts, optimisers and sharding see it once.

Letters: B batch, J Jumbo tokens, N other tokens (patches, time steps, words), D width of a token, L = J + N.

Source: "Thicker and Quicker: A Jumbo Token for Fast Plain Vision Transformers" (ICLR 2026), section 3, and the
authors' code antofuller/jumbo at commit 4c73fc2.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm, LayerScale
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.feedforward import FeedForward

# The official code keeps torch's default epsilon, where timm's ViTs use 1e-6.
OFFICIAL_NORM: Callable[..., nn.Module] = partial(LayerNorm, eps=1e-5)

LORA_FORMS = ("whole", "matrices")
NO_FFN = "this block shares its Jumbo FFN: hand it over by use_jumbo_mlp, or set share_jumbo_mlp=False"


def split_tokens(x: Tensor, num_jumbo: int) -> tuple[Tensor, Tensor]:
    """Split a sequence into its Jumbo part and the rest: (B, L, D) -> (B, J, D), (B, N, D).

    The one place that knows where the Jumbo tokens are: at the front.
    """
    if torch.is_grad_enabled() and not torch.jit.is_tracing():
        # The gradients of two slices would each be laid into zeros of the whole size, and added.
        first, rest = x.split([num_jumbo, x.shape[1] - num_jumbo], dim=1)
        return first, rest
    return x[:, :num_jumbo], x[:, num_jumbo:]  # what every runtime that we export to takes


class LowRankBypass(nn.Module):
    """A per-layer bypass dim -> rank -> out_dim; J*D to J*D around the shared FFN (the paper's LoRA ablation).

    The second factor starts at zero, so a new bypass changes nothing.
    """

    def __init__(self, dim: int, rank: int, out_dim: int | None = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, out_dim or dim, bias=False, device=device, dtype=dtype)
        self.zero_output()

    def zero_output(self) -> None:
        """Make the bypass do nothing; called again after a model's weights are initialised."""
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out


class MatrixBypasses(nn.Module):
    """A per-layer bypass around each of the two matrices of the shared FFN, which can be merged into them.

    In equations, with h the hidden layer: h = act(fc1(x) + U1 V1 x), out = fc2(h) + U2 V2 h.
    """

    def __init__(self, dim: int, hidden_dim: int, rank: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.fc1 = LowRankBypass(dim, rank, hidden_dim, device=device, dtype=dtype)
        self.fc2 = LowRankBypass(hidden_dim, rank, dim, device=device, dtype=dtype)


def jumbo_mlp(
    dim: int,
    num_jumbo: int,
    mlp_ratio: float = 4.0,
    act_layer: type[nn.Module] = nn.GELU,
    device: Any = None,
    dtype: Any = None,
) -> nn.Module:
    """The wide FFN of the Jumbo token: J*D -> mlp_ratio*J*D -> J*D with biases and without dropout."""
    width = num_jumbo * dim
    return FeedForward(width, hidden_features=int(width * mlp_ratio), act_layer=act_layer, device=device, dtype=dtype)


class OwnsJumboMlp(nn.Module):
    """In front of a model's class: whatever becomes its `jumbo_mlp` is handed to the blocks, whose references are not
    registered."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "jumbo_mlp":
            for block in getattr(self, "blocks", ()):
                block.use_jumbo_mlp(value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As torch's, and the blocks learn of it."""
        if name == "jumbo_mlp":
            setattr(self, name, module)
        else:
            super().add_module(name, module)


class JumboBlock(Block):
    """One pre-norm transformer block with a Jumbo path.

    Takes and gives (B, J+N, D). In equations, with j the concatenation of the first J tokens:

        x <- x + Attention(LN1(x))          over all J+N tokens
        j <- j + JumboFFN(LN3(j))           the residual runs from the un-normalised vector
        p <- p + FFN(LN2(p))                each of the N other tokens

    Args:
        dim: Width D of a token.
        num_heads: Attention heads; must divide `dim`.
        num_jumbo: J, at least 1.
        jumbo_mlp_ratio: Hidden width of the Jumbo FFN over J*D. 0: the Jumbo tokens pass no FFN and no LN3.
        share_jumbo_mlp: True: the FFN is given from outside by `use_jumbo_mlp` (the model does this once for all
            blocks). False: the block owns its FFN.
        lora_rank: Rank of the block's own bypass around the FFN; 0 for none.
        lora_form: "whole": one bypass around the whole FFN. "matrices": one around each of its two matrices, which
            `jumbo_vit.merge_lora` can merge.
        **kwargs: Everything that `timm.models.vision_transformer.Block` takes.

    Raises:
        UserError: J below 1, an unknown form of bypass, or one asked for where there is no FFN to go around.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_jumbo: int = 6,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_mlp: bool = True,
        lora_rank: int = 0,
        lora_form: str = "whole",
        **kwargs: Any,
    ) -> None:
        if num_jumbo < 1:
            raise UserError(f"num_jumbo is {num_jumbo}, but a Jumbo block needs at least 1")
        if jumbo_mlp_ratio < 0 or 0 < jumbo_mlp_ratio * num_jumbo * dim < 1:
            raise UserError(
                f"jumbo_mlp_ratio is {jumbo_mlp_ratio}: give 0 for no FFN, or at least {1 / (num_jumbo * dim):.2g}"
            )
        if lora_rank < 0:
            raise UserError(f"lora_rank is {lora_rank}, but must be 0 (none) or more")
        if lora_rank and not jumbo_mlp_ratio:
            raise UserError(f"lora_rank={lora_rank} goes around the Jumbo FFN, but jumbo_mlp_ratio=0 leaves it out")
        if lora_form not in LORA_FORMS:
            raise UserError(f"lora_form={lora_form!r} is unknown; use {' or '.join(map(repr, LORA_FORMS))}")
        kwargs.setdefault("norm_layer", OFFICIAL_NORM)
        kwargs.setdefault("qkv_bias", True)
        kwargs.setdefault("mlp_layer", FeedForward)
        super().__init__(dim, num_heads, **kwargs)
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        rate, scale, width = kwargs.get("drop_path", 0.0), kwargs.get("init_values"), num_jumbo * dim
        self.num_jumbo = num_jumbo
        self.jumbo_mlp: nn.Module | None = None
        self._shared_mlp: tuple[nn.Module, ...] = ()
        if not jumbo_mlp_ratio:
            self.norm3: nn.Module | None = None
            return
        self.norm3 = kwargs["norm_layer"](width, **factory)
        self.ls3 = LayerScale(width, init_values=scale, **factory) if scale else nn.Identity()
        self.drop_path3 = DropPath(rate) if rate > 0.0 else nn.Identity()
        # Two attributes, of which one at the most is a module: torch.jit.script tells None from a module, no more.
        self.lora: LowRankBypass | None = None
        self.lora_matrices: MatrixBypasses | None = None
        if lora_rank and lora_form == "whole":
            self.lora = LowRankBypass(width, lora_rank, **factory)
        elif lora_rank:
            self.lora_matrices = MatrixBypasses(width, int(width * jumbo_mlp_ratio), lora_rank, **factory)
        if not share_jumbo_mlp:
            self.jumbo_mlp = jumbo_mlp(dim, num_jumbo, jumbo_mlp_ratio, kwargs.get("act_layer", nn.GELU), **factory)

    def use_jumbo_mlp(self, mlp: nn.Module | None) -> None:
        """Take `mlp` (J*D -> J*D) as the shared FFN, without registering it here: its owner registers it once.

        None gives the reference back, and a block without an FFN of its own then refuses to run.

        Raises:
            UserError: The block has bypasses around two matrices, and `mlp` is no `FeedForward`, which has these.
        """
        if mlp is not None and getattr(self, "lora_matrices", None) is not None and not isinstance(mlp, FeedForward):
            raise UserError(
                f"lora_form='matrices' goes around fc1 and fc2 of a FeedForward, not of {type(mlp).__name__}"
            )
        self._shared_mlp = () if mlp is None else (mlp,)

    def owning_ffn(self) -> "JumboBlock":
        """A twin with the same parameters that registers the shared FFN as its own, for tools that need it so."""
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        if self._shared_mlp:
            twin.jumbo_mlp, twin._shared_mlp = self._shared_mlp[0], ()
        return twin

    def jumbo_ffn(self, x: Tensor) -> Tensor:
        """The wide FFN, this block's own or the shared one: (B, J*D) -> (B, J*D)."""
        if self.jumbo_mlp is not None:
            out: Tensor = self.jumbo_mlp(x)
        else:
            if not self._shared_mlp:
                raise UserError(NO_FFN)
            out = self._shared_mlp[0](x)
        return out

    def bypassed_ffn(self, x: Tensor) -> Tensor:
        """`jumbo_ffn` with the block's bypasses around its two matrices: (B, J*D) -> (B, J*D)."""
        assert self.lora_matrices is not None
        extra: Tensor = self.lora_matrices.fc1(x)
        if self.jumbo_mlp is not None:
            hidden: Tensor = self.jumbo_mlp.hidden(x, extra)  # type: ignore[operator]
            out: Tensor = self.jumbo_mlp.last(hidden)  # type: ignore[operator]
        else:
            if not self._shared_mlp:
                raise UserError(NO_FFN)
            hidden = self._shared_mlp[0].hidden(x, extra)  # type: ignore[operator]
            out = self._shared_mlp[0].last(hidden)  # type: ignore[operator]
        around: Tensor = self.lora_matrices.fc2(hidden)
        return out + around

    def jumbo_path(self, jumbo: Tensor) -> Tensor:
        """The Jumbo vector's own branch: (B, J*D) -> (B, J*D), residual included."""
        if self.norm3 is not None:
            normed = self.norm3(jumbo)
            out = self.jumbo_ffn(normed) if self.lora_matrices is None else self.bypassed_ffn(normed)
            if self.lora is not None:
                out = out + self.lora(normed)
            jumbo = jumbo + self.drop_path3(self.ls3(out))
        return jumbo

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, J+N, D) -> (B, J+N, D); `attn_mask` as in timm's block, broadcast to (B, heads, L, L)."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        jumbo, patches = split_tokens(x, self.num_jumbo)
        wide = self.jumbo_path(jumbo.flatten(1))
        patches = patches + self.drop_path2(self.ls2(self.mlp(self.norm2(patches))))
        return torch.cat([wide.unflatten(1, (self.num_jumbo, -1)), patches], dim=1)
