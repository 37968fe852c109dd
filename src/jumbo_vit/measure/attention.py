"""Where the global tokens look: attention from the Jumbo token, a class token or registers to the patches.

Fused attention returns no weights, and to rebuild queries and keys here would mean one rebuild for every attention
class (norms of queries, rotary positions, grouped keys, biases). Instead the model runs as it is, and the queries and
keys are taken where they enter `scaled_dot_product_attention`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from jumbo_vit.errors import UserError
from jumbo_vit.measure.mode import as_input, looked_at


def attention_maps(model: nn.Module, images: Tensor, layer: int = -1, reduce: bool = True) -> Tensor:
    """Attention of the global tokens to the patches, not renormalised: what goes to other global tokens is missing.

    Logits, mode and fused attention of the model are as before. Works for any timm ViT whose blocks call
    `scaled_dot_product_attention` on the whole sequence, rotary positions included.

    Args:
        model: A Jumbo model, whose J tokens ask, or another ViT, whose class token and registers ask together.
        images: Prepared pictures (B, C, H, W).
        layer: Index of the block; negative ones count from the last.
        reduce: True: mean over heads and asking tokens. False: each of them.

    Returns:
        (B, gh, gw), or (B, heads, J, gh, gw) without `reduce`; gh x gw is the grid of patches.

    Raises:
        UserError: There is no such layer, no global token, no attention over the sequence, or images of another shape.
    """
    with looked_at(model) as plain:
        blocks, asking, prefix = _anatomy(plain, layer)
        images = as_input(plain, images)
        with _fused(blocks[layer]), _watching(blocks[layer]) as seen:
            # The head plays no part, and a wrapper need not have one.
            getattr(plain, "forward_features", plain)(images)
        weights = _weights(seen, type(plain).__name__)
        maps = weights[:, :, :asking, prefix:]
        grid = _grid(plain, images)
        if grid[0] * grid[1] != maps.shape[-1]:
            raise UserError(
                f"{type(plain).__name__} has {maps.shape[-1]} patch tokens in this block, not the {grid[0]}x{grid[1]} "
                "of its grid, so there is no map"
            )
        maps = maps.reshape(*maps.shape[:-1], *grid)
        return maps.mean(dim=(1, 2)) if reduce else maps


def _anatomy(model: nn.Module, layer: int) -> tuple[Any, int, int]:
    """The blocks, how many tokens in front ask, and how many stand before the patches."""
    blocks = getattr(model, "blocks", None)
    prefix = getattr(model, "num_prefix_tokens", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not isinstance(prefix, int):
        raise UserError(f"{type(model).__name__} is no ViT of timm's kind: it has no blocks or no num_prefix_tokens")
    if not -len(blocks) <= layer < len(blocks):
        raise UserError(f"layer is {layer}, but the model has layers 0 to {len(blocks) - 1} (or -1 for the last)")
    asking = getattr(model, "num_jumbo", prefix)
    if not asking:
        raise UserError(
            f"{type(model).__name__} has no global token (Jumbo, class token or register) that looks at patches"
        )
    return blocks, asking, prefix


def _grid(model: Any, images: Tensor) -> tuple[int, int]:
    embed = getattr(model, "patch_embed", None) or model.embeds
    if hasattr(embed, "dynamic_feat_size"):
        height, width = embed.dynamic_feat_size(tuple(images.shape[-2:]))
        return int(height), int(width)
    high, wide = embed.patch_size
    return images.shape[-2] // high, images.shape[-1] // wide


@contextmanager
def _fused(block: nn.Module) -> Iterator[None]:
    """Make timm's attention call the fused function for a while; where it does not exist, this changes nothing."""
    switched = [m for m in block.modules() if getattr(m, "fused_attn", True) is False]
    for module in switched:
        module.fused_attn = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in switched:
            module.fused_attn = False  # type: ignore[assignment]


class _Calls(TorchFunctionMode):
    """Keeps the arguments of each attention call while `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.on and func is scaled_dot_product_attention:
            self.calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _watching(block: nn.Module) -> Iterator[_Calls]:
    """The attention calls that are made inside `block`."""
    seen = _Calls()

    def start(*_: Any) -> None:
        seen.on = True

    def stop(*_: Any) -> None:
        seen.on = False

    hooks = (block.register_forward_pre_hook(start), block.register_forward_hook(stop))
    try:
        with seen:
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _weights(seen: _Calls, name: str) -> Tensor:
    """Softmax weights (B, heads, L, L) of the one call, over all tokens; each row sums to 1."""
    if len(seen.calls) != 1:
        raise UserError(f"{name} makes {len(seen.calls)} attention calls in a block, where maps need exactly one")
    args, kwargs = seen.calls[0]
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call = dict(zip(names, args, strict=False)) | kwargs
    query, key = call["query"], call["key"]
    if key.shape[1] != query.shape[1]:  # grouped keys: each serves several heads
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = call.get("scale") or query.shape[-1] ** -0.5
    with torch.autocast(query.device.type, enabled=False):  # under autocast a product is rounded whatever it is given
        logits: Tensor = query.to(wide) * scale @ key.to(wide).mT
    mask = call.get("attn_mask")
    if call.get("is_causal"):
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(wide)
    return logits.softmax(dim=-1)
