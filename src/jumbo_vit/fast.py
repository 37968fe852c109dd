"""`optimize`: a plain ViT, with or without a Jumbo token, as a module that only infers, and does it faster.

What is unusual: the blocks are taken apart. Each becomes a few calls of fused kernels on weights that were laid out for
them beforehand (oneDNN through PyTorch), with residuals added in place, so that no tensor is written twice. In half
precision the sequence is padded to a multiple of 16 tokens, which its attention kernel wants; a mask hides the padding.
Patch embedding, positions, final norm, pool and head stay the model's own modules in fp32.

Where the time goes decides what pays: at batch 1 a Jumbo model reads the wide FFN's weights again in every layer and
waits for memory, so fewer bytes a weight help (bf16, int8); at larger batches it computes, so matrix units help (bf16).
"""

import copy
from collections.abc import Callable
from typing import Any, Literal, NoReturn, cast

import torch
import torch.nn.functional as F
from timm.layers import Attention, LayerScale, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from jumbo_vit.block import JumboBlock, LowRankBypass
from jumbo_vit.errors import UserError, nearest

Precision = Literal["fp32", "bf16", "int8-jumbo"]
PRECISIONS = ("fp32", "bf16", "int8-jumbo")

TOKENS_MULTIPLE = 16
"""What the sequence is padded to in bf16: the attention kernel's tiles."""

INT8_UP_TO = 4
"""Rows up to which int8 weights are read as they are: above, the product in bf16 is faster than unpacking them."""

_pointwise = torch.ops.mkldnn._linear_pointwise


def optimize(model: nn.Module, precision: Precision = "fp32", compile: bool = False) -> "FastVit":
    """A copy of a model for inference on this CPU: the same call, (B, C, H, W) to logits (B, num_classes).

    The model itself stays as it is, and later changes to it do not reach the copy. What is done by batch size, without
    being asked: fp32 reads the Jumbo FFN's plain weights at batch 1 and packed ones above; int8 weights are used as
    such up to `INT8_UP_TO` pictures and rounded back to bf16, the same numbers, above.

    Args:
        model: A Jumbo model, one of our baselines, or any plain ViT of timm's made of its standard blocks.
        precision: "fp32" gives the model's outputs within 1e-5; "bf16" holds the blocks' weights and activations in
            bfloat16 (norms, softmax and sums are computed in fp32 inside their kernels), for CPUs with fast bf16;
            "int8-jumbo" is bf16 with the Jumbo FFN's weights in 8 bits, one scale a row.
        compile: Run single pictures through torch.compile, which pays there and in fp32 only. The first of each size
            then takes about half a minute, and a C++ compiler must be there.

    Raises:
        UserError: An unknown precision, a model on another device, a part that is not known here, which is named, or
            `compile` in another precision or without a compiler.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise UserError(f"precision={precision!r} is unknown; use one of {known}{nearest(precision, PRECISIONS)}")
    if compile and precision != "fp32":
        raise UserError(f"compile=True pays in fp32 only, not in {precision}: leave compile out, or use fp32")
    return FastVit(model, precision, compile)


class FastVit(nn.Module):
    """What `optimize` gives. Called with pictures (B, C, H, W) it gives the model's logits in fp32, never a gradient.

    `num_classes`, `num_features` and `pretrained_cfg` are the model's.
    """

    def __init__(self, model: nn.Module, precision: Precision, compile: bool = False) -> None:
        super().__init__()
        _check_model(model, precision)
        self.precision = precision
        self.dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        whole = cast(VisionTransformer, model)
        shared = whole._modules.get("jumbo_mlp")
        # The blocks' weights are packed, not copied: a twin without them is what gets copied.
        ends = copy.copy(whole)
        ends._modules = {**whole._modules, "blocks": nn.Sequential(), "jumbo_mlp": None}
        self.ends = copy.deepcopy(ends).float().eval().requires_grad_(False)
        int8 = precision == "int8-jumbo"
        packed = {id(shared): WideFfn(cast(Mlp, shared), self.dtype, int8)} if shared is not None else {}
        self.steps = [FastBlock(cast(Block, block), self.dtype, int8, packed) for block in whole.blocks]
        self.num_classes, self.num_features = whole.num_classes, whole.num_features
        self.pretrained_cfg = getattr(whole, "pretrained_cfg", None)
        self.single = (_compiled(whole),) if compile else ()  # in a tuple, so that it is no submodule
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, num_classes), or what the model's pool gives where it has no head."""
        fitting = images.shape[1:-2] == self.ends.patch_embed.proj.weight.shape[1:2]  # else below, for its own error
        if self.single and len(images) == 1 and fitting:
            with torch.no_grad():
                return self.single[0](images.float())
        with torch.inference_mode():
            return self.compute(images) if len(images) else self.compute(images.new_zeros(1, *images.shape[1:]))[:0]

    def compute(self, images: Tensor) -> Tensor:
        """`forward` inside inference mode."""
        ends = self.ends
        x = ends.norm_pre(ends._pos_embed(ends.patch_embed(images.float()))).to(self.dtype)
        tokens, mask = x.shape[1], None
        if self.dtype == torch.bfloat16 and tokens % TOKENS_MULTIPLE:
            x = F.pad(x, (0, 0, 0, -tokens % TOKENS_MULTIPLE))
            mask = torch.zeros(x.shape[1], dtype=self.dtype)
            mask[tokens:] = -torch.inf
            mask = mask.expand(1, 1, x.shape[1], x.shape[1])
        for step in self.steps:
            x = step(x, mask)
        out: Tensor = ends.forward_head(ends.norm(x[:, :tokens].float()))
        return out

    def train(self, mode: bool = True) -> "FastVit":
        """Only evaluation mode exists.

        Raises:
            UserError: Training was asked for.
        """
        if mode:
            raise UserError("an optimized model only infers: train the model it was made from, and optimize it again")
        super().train(False)
        return self

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "an optimized model is laid out for this machine: save the model, and optimize it where it runs"
        )

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("an optimized model stays where it is and as it is: change the model, and optimize it again")


class Packed:
    """A Linear's weights, laid out for oneDNN: (rows, in) -> (rows, out).

    Args:
        linear: Where weights and bias come from.
        dtype: What they are held in, and what inputs have.
        scale: A factor for each output (out,), as of a LayerScale behind it.
        plain_at_one: Keep the plain weights too and use them for a single row, where packed fp32 is slower.
    """

    def __init__(
        self, linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None, plain_at_one: bool = False
    ) -> None:
        weight, bias = _scaled(linear, scale)
        weight = weight.to(dtype).contiguous()
        self.bias = None if bias is None else bias.to(dtype)
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.plain = weight if plain_at_one and dtype == torch.float32 else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.plain is not None and len(x) == 1:
            return F.linear(x, self.plain, self.bias)
        out: Tensor = _pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """The product with GELU over it, in one kernel."""
        if self.plain is not None and len(x) == 1:
            hidden: Tensor = torch.ops.aten.gelu_(F.linear(x, self.plain, self.bias), approximate=approximate)
            return hidden
        out: Tensor = _pointwise(x, self.weight, self.bias, "gelu", [], approximate)
        return out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product and `other` (rows, out), in one kernel."""
        out: Tensor = _pointwise.binary(x, other, self.weight, self.bias, "add")
        return out


class Int8:
    """A Linear with weights in 8 bits and a scale a row: (rows, in) in bf16 -> (rows, out).

    The scale is itself a bfloat16 number, chosen before rounding, so that it adds no error of its own.
    """

    def __init__(self, linear: nn.Linear) -> None:
        weight, bias = _scaled(linear, None)
        step = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        self.step = (step * (1 + 2**-8)).to(torch.bfloat16)  # rounded up, so that nothing is clipped
        self.weight = (weight / self.step.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.bias = None if bias is None else bias.to(torch.bfloat16)
        rounded = nn.Linear(linear.in_features, linear.out_features, bias=False)
        rounded.weight = nn.Parameter(self.weight.float() * self.step.float()[:, None])
        self.many = Packed(rounded, torch.bfloat16)
        self.many.bias = self.bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > INT8_UP_TO:
            return self.many(x)
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.step)
        return out if self.bias is None else out.add_(self.bias)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """The product with GELU over it."""
        if len(x) > INT8_UP_TO:
            return self.many.gelu(x, approximate)
        out: Tensor = torch.ops.aten.gelu_(self(x), approximate=approximate)
        return out


class WideFfn:
    """The Jumbo FFN: (B, J*D) -> (B, J*D)."""

    def __init__(self, mlp: Mlp, dtype: torch.dtype, int8: bool) -> None:
        make: Callable[[nn.Linear], Any] = Int8 if int8 else lambda linear: Packed(linear, dtype, plain_at_one=True)
        self.first, self.second = make(cast(nn.Linear, mlp.fc1)), make(cast(nn.Linear, mlp.fc2))
        self.approximate = cast(nn.GELU, mlp.act).approximate

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(self.first.gelu(x, self.approximate)))


class FastBlock:
    """One block: (B, L, D) -> (B, L, D) in a type; the input may be overwritten.

    Args:
        block: A JumboBlock or timm's Block.
        dtype: The type of weights and tokens.
        int8: Whether an own Jumbo FFN gets int8 weights.
        packed: Jumbo FFNs that are packed already, by the id of the module.
    """

    def __init__(self, block: Block, dtype: torch.dtype, int8: bool, packed: dict[int, WideFfn]) -> None:
        attention = cast(Attention, block.attn)
        self.heads, self.num_jumbo = attention.num_heads, getattr(block, "num_jumbo", 0)
        self.norm1, self.norm2 = _norm(block.norm1), _norm(block.norm2)
        self.qkv = Packed(attention.qkv, dtype)
        self.proj = Packed(attention.proj, dtype, _gamma(block.ls1))
        self.fc1 = Packed(cast(nn.Linear, cast(Mlp, block.mlp).fc1), dtype)
        self.fc2 = Packed(cast(nn.Linear, cast(Mlp, block.mlp).fc2), dtype, _gamma(block.ls2))
        self.approximate = cast(nn.GELU, cast(Mlp, block.mlp).act).approximate
        self.wide: WideFfn | None = None
        self.bypass: tuple[Tensor, Tensor] | None = None
        if isinstance(block, JumboBlock) and block.norm3 is not None:
            mlp = block.jumbo_mlp if block.jumbo_mlp is not None else block._shared_mlp[0]
            self.wide = packed.get(id(mlp)) or WideFfn(cast(Mlp, mlp), dtype, int8)
            self.norm3, self.gamma3 = _norm(block.norm3), _gamma(block.ls3)
            if self.gamma3 is not None:
                self.gamma3 = self.gamma3.to(dtype)
            if isinstance(block.lora, LowRankBypass):
                self.bypass = (_own(block.lora.down.weight).to(dtype), _own(block.lora.up.weight).to(dtype))

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, dim = x.shape
        rows = self.qkv(self.norm1(x).view(-1, dim))
        q, k, v = rows.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(batch * length, -1)
        x = self.proj.plus(mixed, x.reshape(-1, dim)).view(batch, length, dim)
        patches = x[:, self.num_jumbo :]
        normed = self.norm2(patches).reshape(-1, dim)
        if self.wide is not None:
            jumbo = x[:, : self.num_jumbo].flatten(1)
            jumbo.add_(self._wide_path(jumbo))
        patches.add_(self.fc2(self.fc1.gelu(normed, self.approximate)).view(patches.shape))
        return x

    def _wide_path(self, jumbo: Tensor) -> Tensor:
        assert self.wide is not None
        normed = self.norm3(jumbo)
        out = self.wide(normed)
        if self.bypass is not None:
            down, up = self.bypass
            out = out + F.linear(F.linear(normed, down), up)
        return out if self.gamma3 is None else out * self.gamma3


def _own(parameter: Tensor) -> Tensor:
    """A copy in fp32, which later changes to the model do not reach."""
    return parameter.detach().to(torch.float32, copy=True)


def _scaled(linear: nn.Linear, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in fp32, each output times its `scale`."""
    weight = _own(linear.weight)
    bias = None if linear.bias is None else _own(linear.bias)
    if scale is not None:
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    return weight, bias


def _norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    layer = cast(nn.LayerNorm, norm)
    shape, eps = layer.normalized_shape, layer.eps
    # fp32 beside bf16 tokens: the kernel takes both, and computes in fp32.
    weight, bias = (None if part is None else _own(part) for part in (layer.weight, layer.bias))

    def apply(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    return apply


def _gamma(scale: nn.Module) -> Tensor | None:
    return _own(scale.gamma) if isinstance(scale, LayerScale) else None


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A copy of a model, compiled with its weights as constants and without Python between the kernels."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError("compile=True needs a C++ compiler, and none was found: install g++, or leave it out") from None
    frozen = copy.deepcopy(model).float().eval().requires_grad_(False)
    compiled = torch.compile(frozen, dynamic=False, options={"freezing": True, "cpp_wrapper": True})
    return cast(Callable[[Tensor], Tensor], compiled)


def _check_model(model: nn.Module, precision: str) -> None:
    """Refuse what would be computed otherwise than the model does."""
    what = type(model).__name__
    if not isinstance(model, VisionTransformer):
        raise UserError(f"optimize takes Jumbo models and timm's VisionTransformer, not {what}")
    device = next(model.parameters()).device
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        raise UserError(
            f"optimize lays weights out for a CPU with oneDNN, and the model is on {device}: move it by .to('cpu'), or "
            "on a GPU use model.bfloat16() and torch.compile"
        )
    if precision == "int8-jumbo" and not any(getattr(block, "norm3", None) is not None for block in model.blocks):
        raise UserError(f"int8-jumbo is about the Jumbo FFN, and this {what} has none: use bf16")
    for number, block in enumerate(model.blocks):
        fault = _foreign(block)
        if fault:
            raise UserError(f"optimize does not know {fault} in block {number} of this {what}")


def _foreign(block: nn.Module) -> str:
    """What in a block is another computation than `FastBlock`'s, in words; "" for nothing."""
    if type(block) not in (Block, JumboBlock):
        return f"the block {type(block).__name__}"
    attention = block.attn
    if type(attention) is not Attention or attention.gate is not None:
        return f"the attention {type(attention).__name__}"
    if not all(isinstance(part, nn.Identity) for part in (attention.q_norm, attention.k_norm, attention.norm)):
        return "norms inside attention"
    if getattr(block, "lora_matrices", None) is not None:
        return "bypasses around the matrices of the Jumbo FFN (jumbo_vit.merge_lora merges them)"
    for mlp in (block.mlp, *(getattr(block, "_shared_mlp", ()) or ()), getattr(block, "jumbo_mlp", None)):
        if mlp is not None and (
            not isinstance(mlp, Mlp) or type(mlp.act) is not nn.GELU or not isinstance(mlp.norm, nn.Identity)
        ):
            return f"the FFN {type(mlp).__name__} with {type(getattr(mlp, 'act', None)).__name__}"
    norms = [block.norm1, block.norm2, getattr(block, "norm3", None)]
    odd = [type(norm).__name__ for norm in norms if norm is not None and not isinstance(norm, nn.LayerNorm)]
    return f"the norm {odd[0]}" if odd else ""
