"""What Jumbo is measured against: the same plain ViT with a class token, or with a class token and registers.

`cls` has one class token; `reg16` has a class token and 16 registers behind it (Darcet et al., "Vision Transformers
Need Registers"). Everything else is the Jumbo model's: start of the weights (tokens 0.02 or, where narrow, 0.2 with
Xavier; head 0 with bias -ln C), LayerNorm epsilon 1e-5, drop path constant over depth, positions on patches only.
timm's own registers start at 1e-6, nearly alike, which would decide a comparison.

The head reads the class token by default. That is the paper's Registers baseline: R=16 and a head of width D give its
parameter counts (pico 1.53 M, tiny 5.72 M, base 86.58 M at 1,000 classes; with 10,450 classes small 25.69 M). They
exclude a concatenating head (pico 3.07 M), but cannot tell whether the class token is there, which costs D parameters.
A comparison in which the head decides nothing sets `global_pool="prefix_avg"` here, Jumbo's `"jumbo_avg"`.
"""

from typing import Any, Literal

from timm.models.vision_transformer import Block

from jumbo_vit.errors import UserError
from jumbo_vit.trunk import PaperVisionTransformer


class BaselineVisionTransformer(PaperVisionTransformer):
    """Plain ViT with a class token and `reg_tokens` registers: pictures (B, in_chans, H, W) to logits (B, num_classes).

    The sequence holds the class token first, then the registers, then the patches.

    Args:
        class_token: Whether there is a class token.
        reg_tokens: Registers.
        global_pool: What the head reads: "token" (the class token), "prefix_avg" (all global tokens concatenated, and
            the patch mean), "prefix" (all global tokens concatenated), "avg", "max", "avgmax" (patches only), "map"
            (attention pooling), or "" for all tokens.
        drop_path_schedule: "constant" over depth as in DeiT-III, or timm's "linear".
        weight_init: "" (official, for D >= 96), "xavier" (narrow models), or one of timm's.
        **kwargs: All other arguments of timm's VisionTransformer.

    Raises:
        UserError: A size that the patches do not tile, an unknown pool or initialisation, heads that do not divide D,
            or a pool over global tokens where there are none.
    """

    pools = ("prefix_avg", "prefix", "token", "avg", "max", "avgmax", "map", "")
    global_tokens = "a global token"

    def __init__(
        self,
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: str = "token",
        drop_path_schedule: Literal["constant", "linear"] = "constant",
        weight_init: str = "",
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        embed_dim: int = 768,
        num_heads: int = 12,
        drop_path_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        num_global = int(class_token) + reg_tokens
        if not num_global and global_pool in self.pools[:2]:
            raise UserError(f"global_pool={global_pool!r} needs a global token, and this model has none")
        super().__init__(
            num_global=num_global,
            make_block=Block,
            class_token=class_token,
            reg_tokens=reg_tokens,
            global_pool=global_pool,
            drop_path_schedule=drop_path_schedule,
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            num_heads=num_heads,
            drop_path_rate=drop_path_rate,
            **kwargs,
        )
        self.finish(weight_init, kwargs.get("device"), kwargs.get("dtype"))
