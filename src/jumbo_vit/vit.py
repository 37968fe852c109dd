"""The Jumbo vision transformer as a timm model.

What is unusual: the Jumbo tokens are timm's register tokens. All that timm does with prefix tokens (positions on
patches only, resampling, patch dropout, feature maps, pruning) then holds without a line of ours; only initialisation,
pooling, the head and the shared FFN are overridden.
"""

import math
from typing import Any, Literal, cast

import torch
from timm.layers import get_act_layer, trunc_normal_
from timm.models._manipulate import named_apply
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import Tensor, nn

from jumbo_vit.block import OFFICIAL_NORM, JumboBlock, LowRankBypass, jumbo_mlp, split_tokens
from jumbo_vit.errors import UserError, nearest

POOLS = ("jumbo_avg", "jumbo", "avg", "max", "avgmax", "map", "")
INITS = ("", "xavier", "jax", "jax_nlhb", "moco", "reset", "skip")


def check_size(img_size: Any, patch_size: Any) -> None:
    """Refuse a picture size that the patches do not tile.

    Raises:
        UserError: Height or width is no positive multiple of the patch; the nearest fitting sizes are named.
    """
    sizes = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    patches = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
    for size, patch in zip(sizes, patches, strict=True):
        if patch < 1 or size < patch or size % patch:
            fits = sorted({max(patch, size // patch * patch), (size // patch + 1) * patch}) if patch > 0 else []
            raise UserError(
                f"image size {sizes[0]}x{sizes[1]} is not a multiple of the patch size {patches[0]}x{patches[1]}: "
                f"{size} must be a multiple of {patch}, such as {' or '.join(map(str, fits))}"
            )


def init_as_paper(model: VisionTransformer, mode: str, needs_reset: bool = True) -> None:
    """Initialise a ViT the way the official code does, or for narrow models with Xavier.

    `""`: Linear trunc-normal 0.02 with zero bias, tokens and positions 0.02. `"xavier"`: Xavier-uniform for Linears and
    for the patch projection, 0.2 for tokens and positions, since 0.02 starves a network of width 64. timm's other modes
    are timm's. In every mode the head's weight is 0 and its bias -ln(classes), and low-rank bypasses do nothing.
    """
    if mode not in INITS:
        raise UserError(
            f"weight_init={mode!r} is unknown; use one of {', '.join(map(repr, INITS))}{nearest(mode, INITS)}"
        )
    timm_mode = "" if mode == "xavier" else mode
    named_apply(get_init_weights_vit(timm_mode, head_bias=0.0, needs_reset=needs_reset), model)
    std = 0.2 if mode == "xavier" else 0.02
    for token in (model.pos_embed, model.cls_token, model.reg_token):
        if token is not None:
            trunc_normal_(token, std=std)
    if mode == "xavier":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        projection = model.patch_embed.proj.weight
        nn.init.xavier_uniform_(projection.data.view(projection.shape[0], -1))
    for module in model.modules():
        if isinstance(module, LowRankBypass):
            module.zero_output()
    init_head(model.head, model.num_classes)


def init_head(head: nn.Module, num_classes: int) -> None:
    """Weight 0, bias -ln(classes): the official start, under which every class has the same small prior."""
    if isinstance(head, nn.Linear):
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, -math.log(num_classes))


class JumboVisionTransformer(VisionTransformer):
    """Plain ViT with one Jumbo token of width J*D.

    Takes pictures (B, in_chans, H, W) and gives logits (B, num_classes). The sequence holds the J Jumbo tokens first,
    then `reg_tokens` extra registers, then the patches. After the last block one LayerNorm of width D is applied to
    every token; the default head reads the concatenation of the Jumbo vector and the patch mean, width (J+1)*D.
    `num_features` is D, `head_hidden_size` the width that the head reads.

    Args:
        num_jumbo: J, at least 1.
        share_jumbo_mlp: One Jumbo FFN for all blocks (the paper), or one a block (the paper's ablation).
        jumbo_mlp_ratio: Hidden width of the Jumbo FFN over J*D; 0 leaves the FFN out (ablation).
        lora_rank: Rank of a bypass in each block around the shared FFN (ablation); 0 for none.
        drop_path_schedule: "constant" over depth as in DeiT-III and the official code, or timm's "linear".
        global_pool: What the head reads: "jumbo_avg" (Jumbo and patch mean, the paper), "jumbo", "avg", "max",
            "avgmax" (patches only), "map" (attention pooling), or "" for all tokens.
        reg_tokens: Extra register tokens behind the Jumbo tokens.
        weight_init: "" (official, for D >= 96), "xavier" (narrow models), or one of timm's.
        **kwargs: All other arguments of timm's VisionTransformer.

    Raises:
        UserError: A size that the patches do not tile, an unknown pool or initialisation, J below 1, heads that do not
            divide D, or a class token (the Jumbo token takes its place).
    """

    def __init__(
        self,
        num_jumbo: int = 6,
        share_jumbo_mlp: bool = True,
        jumbo_mlp_ratio: float = 4.0,
        lora_rank: int = 0,
        drop_path_schedule: Literal["constant", "linear"] = "constant",
        global_pool: str = "jumbo_avg",
        reg_tokens: int = 0,
        weight_init: str = "",
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        embed_dim: int = 768,
        num_heads: int = 12,
        drop_path_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        _check_pool(global_pool)
        check_size(img_size, patch_size)
        if embed_dim % num_heads:
            raise UserError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
        if kwargs.pop("class_token", False):
            raise UserError(
                "class_token=True does not fit: the Jumbo token takes its place (reg_tokens adds registers)"
            )
        if not kwargs.pop("no_embed_class", True):
            raise UserError("no_embed_class=False does not fit: the Jumbo token has no position")
        if drop_path_schedule not in ("constant", "linear"):
            raise UserError(f"drop_path_schedule={drop_path_schedule!r} is unknown; use 'constant' or 'linear'")
        kwargs["norm_layer"] = kwargs.get("norm_layer") or OFFICIAL_NORM
        kwargs.setdefault("fc_norm", False)

        def make_block(drop_path: float, **block: Any) -> JumboBlock:
            return JumboBlock(
                num_jumbo=num_jumbo,
                share_jumbo_mlp=share_jumbo_mlp,
                jumbo_mlp_ratio=jumbo_mlp_ratio,
                lora_rank=lora_rank,
                drop_path=drop_path_rate if drop_path_schedule == "constant" else drop_path,
                **block,
            )

        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            num_heads=num_heads,
            drop_path_rate=drop_path_rate,
            global_pool="map" if global_pool == "map" else "",
            class_token=False,
            reg_tokens=num_jumbo + reg_tokens,
            no_embed_class=True,
            block_fn=make_block,  # type: ignore[arg-type]
            weight_init="skip",
            **kwargs,
        )
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.num_jumbo = num_jumbo
        self.global_pool = global_pool  # type: ignore[assignment]
        act = get_act_layer(kwargs.get("act_layer")) or nn.GELU
        shared = share_jumbo_mlp and jumbo_mlp_ratio > 0
        self.jumbo_mlp = jumbo_mlp(embed_dim, num_jumbo, jumbo_mlp_ratio, act, **factory) if shared else None
        self._make_head(**factory)
        self.weight_init_mode = weight_init  # type: ignore[assignment]
        if weight_init != "skip":
            self.init_weights(needs_reset=False)
        self.register_load_state_dict_pre_hook(_take_official_names)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # The blocks' references are not registered, so a replaced FFN has to be handed on.
        if name == "jumbo_mlp" and isinstance(value, nn.Module):
            for block in self.blocks:
                cast(JumboBlock, block).use_jumbo_mlp(value)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights; `mode` as the argument `weight_init`, default the one given at construction."""
        init_as_paper(self, mode or self.weight_init_mode, needs_reset)
        if self.fix_init:
            self.fix_init_weight()

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take pictures of another size (H, W) or patches of another size; positions and projection are resampled.

        Raises:
            UserError: A size that the patches do not tile; timm would silently leave out the rest of the picture.
        """
        check_size(img_size or self.patch_embed.img_size, patch_size or self.patch_embed.patch_size)
        super().set_input_size(img_size=img_size, patch_size=patch_size)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a sequence (B, L, D) into Jumbo (B, J, D), extra registers (B, R, D) and patches (B, N, D)."""
        jumbo, rest = split_tokens(tokens, self.num_jumbo)
        registers, patches = split_tokens(rest, self.num_prefix_tokens - self.num_jumbo)
        return jumbo, registers, patches

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Pool normed tokens (B, L, D) to what the head reads, (B, head_hidden_size), or (B, L, D) for pool ''."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type in ("jumbo", "jumbo_avg"):
            jumbo, _, patches = self.split(x)
            wide = jumbo.flatten(1)
            return wide if pool_type == "jumbo" else torch.cat([wide, patches.mean(dim=1)], dim=-1)
        pooled: Tensor = super().pool(x, pool_type)
        return pooled

    def _make_head(self, device: Any = None, dtype: Any = None) -> None:
        extra = {"jumbo_avg": self.num_jumbo + 1, "jumbo": self.num_jumbo}
        self.head_hidden_size = self.embed_dim * extra.get(self.global_pool, 1)
        self.head = (
            nn.Linear(self.head_hidden_size, self.num_classes, device=device, dtype=dtype)
            if self.num_classes > 0
            else nn.Identity()
        )
        self.head.train(self.training)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Give the model a new head (weight 0, bias -ln C) of the old one's device and type, and another pool if named.

        Raises:
            UserError: An unknown pool, or "map" asked of a model that was built without attention pooling.
        """
        if global_pool is not None:
            _check_pool(global_pool)
            if global_pool == "map" and self.attn_pool is None:
                raise UserError("global_pool='map' needs attention pooling, which is only made at construction")
            if global_pool != "map":
                self.attn_pool = None  # type: ignore[assignment]
            self.global_pool = global_pool  # type: ignore[assignment]
        weight = self.patch_embed.proj.weight
        self.num_classes = num_classes
        self._make_head(weight.device, weight.dtype)
        init_head(self.head, num_classes)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's parameter groups by depth; the shared FFN, which serves all depths, goes with the final norm."""
        return {
            "stem": r"^reg_token|pos_embed|patch_embed|norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^jumbo_mlp|^attn_pool", (99999,))],
        }


def _check_pool(name: str) -> None:
    if name == "token":
        raise UserError("global_pool='token' needs a class token; a Jumbo model has global_pool='jumbo' instead")
    if name not in POOLS:
        raise UserError(
            f"global_pool={name!r} is unknown; use one of {', '.join(map(repr, POOLS))}{nearest(name, POOLS)}"
        )


def _take_official_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Load hook: accept the authors' parameter names, and drop their class token, which nothing reads."""
    if f"{prefix}jumbo_token" in state:
        state[f"{prefix}reg_token"] = state.pop(f"{prefix}jumbo_token")
        state.pop(f"{prefix}cls_token", None)
