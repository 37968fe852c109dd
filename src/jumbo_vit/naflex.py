"""The Jumbo vision transformer for pictures of any size and shape in one batch: timm's NaFlexVit with our block.

What is unusual: pictures come cut into patches and padded to a common number, with the coordinates of each patch and
a mask of those that are real. Attention and pooling leave padding out; the Jumbo token needs nothing more, since its
path never looks at patches. For a whole picture the model is `JumboVisionTransformer`, with the same weights.
"""

import dataclasses
from typing import Any, Literal

import torch
from timm.layers import get_act_layer, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._manipulate import named_apply
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg, global_pool_naflex
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from jumbo_vit.block import OFFICIAL_NORM, JumboBlock, LowRankBypass, OwnsJumboMlp, jumbo_mlp, split_tokens
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.feedforward import FeedForward
from jumbo_vit.naflex_weights import adapt_checkpoint
from jumbo_vit.sizes import SIZES
from jumbo_vit.trunk import INITS, SCHEDULES, check_size, init_head

POOLS = ("jumbo_avg", "jumbo", "avg", "max", "avgmax", "map", "")


class JumboNaFlexVit(OwnsJumboMlp, NaFlexVit):
    """NaFlexVit with one Jumbo token of width J*D.

    Takes pictures (B, in_chans, H, W), or timm's NaFlex batches: a dict of `patches` (B, N, P*P*C), `patch_coord`
    (B, N, 2) and `patch_valid` (B, N). Gives logits (B, num_classes). What padding holds never changes them.

    Args:
        cfg: timm's configuration; `**kwargs` are laid over it.
        in_chans: Channels of the input.
        num_classes: Classes; 0 for none.
        img_size: With the patch size it gives the grid of the table of positions, which is resampled for others.
        num_jumbo: J, at least 1.
        share_jumbo_mlp: One Jumbo FFN for all blocks (the paper), or one a block (the paper's ablation).
        jumbo_mlp_ratio: Hidden width of the Jumbo FFN over J*D; 0 leaves the FFN out (ablation).
        lora_rank: Rank of a bypass in each block around the shared FFN (ablation); 0 for none.
        lora_form: "whole" or "matrices", as in `JumboVisionTransformer`.
        drop_path_schedule: "constant" over depth, or timm's "linear".
        global_pool: "jumbo_avg" (Jumbo and mean of the real patches, the paper), "jumbo", "avg", "max", "avgmax"
            (real patches only), "map" (attention pooling), or "" for all tokens.
        reg_tokens: Extra register tokens behind the Jumbo tokens.
        weight_init: "" (official, for D >= 96), "xavier" (narrow models), or one of timm's.
        **kwargs: Fields of timm's NaFlexVitCfg.

    Raises:
        UserError: A size that the patches do not tile, an unknown pool, schedule or initialisation, J below 1, a class
            token, or an option of timm's that needs its own blocks (rotary positions, gated attention and the like).
    """

    def __init__(
        self,
        cfg: NaFlexVitCfg | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | tuple[int, int] | None = None,
        num_jumbo: int = 6,
        share_jumbo_mlp: bool = True,
        jumbo_mlp_ratio: float = 4.0,
        lora_rank: int = 0,
        lora_form: Literal["whole", "matrices"] = "whole",
        drop_path_schedule: Literal["constant", "linear"] = "constant",
        global_pool: str = "jumbo_avg",
        reg_tokens: int = 0,
        weight_init: str = "",
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("class_token", False):
            raise UserError(
                "class_token=True does not fit: the Jumbo token takes its place (reg_tokens adds registers)"
            )
        cfg = dataclasses.replace(cfg or NaFlexVitCfg(), **kwargs)
        _check_options(global_pool, drop_path_schedule, bool(cfg.fc_norm))
        if img_size is not None:
            check_size(img_size, cfg.patch_size)

        if reg_tokens < 0:
            raise UserError(f"reg_tokens is {reg_tokens}, but must be 0 or more")
        if cfg.embed_dim % cfg.num_heads:
            raise UserError(f"embed_dim={cfg.embed_dim} is not a multiple of num_heads={cfg.num_heads}")

        def make_block(drop_path: float, **block: Any) -> JumboBlock:
            return JumboBlock(
                num_jumbo=num_jumbo,
                share_jumbo_mlp=share_jumbo_mlp,
                jumbo_mlp_ratio=jumbo_mlp_ratio,
                lora_rank=lora_rank,
                lora_form=lora_form,
                drop_path=cfg.drop_path_rate if drop_path_schedule == "constant" else drop_path,
                **block,
            )

        given: dict[str, Any] = {
            "class_token": False,
            "reg_tokens": num_jumbo + reg_tokens,
            "global_pool": "map" if global_pool == "map" else "",
            "block_fn": make_block,
            "norm_layer": cfg.norm_layer or OFFICIAL_NORM,
            "mlp_layer": cfg.mlp_layer or FeedForward,
            "weight_init": "",
        }
        super().__init__(dataclasses.replace(cfg, **given), in_chans, num_classes, img_size, device=device, dtype=dtype)
        if not all(isinstance(block, JumboBlock) for block in self.blocks):
            raise UserError(
                "this option of NaFlexVit (rotary positions, SwiGLU, gated attention, ...) needs timm's own blocks; "
                "give a NaFlexVit with registers a Jumbo token by jumbo_vit.jumboize instead"
            )
        self._traits["first_conv"] = None  # `adapt_checkpoint` converts channels; timm cannot for a Linear
        self.num_jumbo = num_jumbo
        self.global_pool = global_pool
        act = get_act_layer(cfg.act_layer) or nn.GELU
        shared = share_jumbo_mlp and jumbo_mlp_ratio > 0
        self.jumbo_mlp = jumbo_mlp(cfg.embed_dim, num_jumbo, jumbo_mlp_ratio, act, device, dtype) if shared else None
        self._make_head(device, dtype)
        self.weight_init_mode = weight_init
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights as `JumboVisionTransformer` does; `mode` as the argument `weight_init`."""
        if not hasattr(self, "jumbo_mlp"):
            return  # timm's constructor calls this before all parts are there
        mode = mode or self.weight_init_mode
        if mode not in INITS:
            known = ", ".join(map(repr, INITS))
            raise UserError(f"weight_init={mode!r} is unknown; use one of {known}{nearest(mode, INITS)}")
        named_apply(
            get_init_weights_vit("" if mode == "xavier" else mode, head_bias=0.0, needs_reset=needs_reset), self
        )
        embeds = self.embeds
        if mode == "":
            embeds.proj.reset_parameters()  # the official projection is a convolution, which keeps PyTorch's start
        for token in (embeds.pos_embed, embeds.pos_embed_y, embeds.pos_embed_x, embeds.reg_token):
            if token is not None:
                trunc_normal_(token, std=0.2 if mode == "xavier" else 0.02)
        for module in self.modules():
            if mode == "xavier" and isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, LowRankBypass):
                module.zero_output()
        init_head(self.head, self.num_classes)
        if self.fix_init:
            self.fix_init_weight()

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a sequence (B, L, D) into Jumbo (B, J, D), extra registers (B, R, D) and patches (B, N, D)."""
        jumbo, rest = split_tokens(tokens, self.num_jumbo)
        registers, patches = split_tokens(rest, self.num_prefix_tokens - self.num_jumbo)
        return jumbo, registers, patches

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        tiles = None if self.embeds.dynamic_img_pad else self.embeds.patch_size
        x, patch_coord, patch_valid = _checked(x, patch_coord, patch_valid, tiles)
        embedded: dict[str, Any] = super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)
        return embedded

    def _pool(self, x: Tensor, pool_type: str | None = None, patch_valid: Tensor | None = None) -> Tensor:
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type not in POOLS[:2]:
            pooled: Tensor = super()._pool(x, pool_type, patch_valid)
            return pooled
        jumbo, _, patches = self.split(x)
        wide = jumbo.flatten(1)
        if pool_type == "jumbo":
            return wide
        return torch.cat([wide, _mean_of_real(patches, patch_valid)], dim=-1)

    def _make_head(self, device: Any, dtype: Any) -> None:
        tokens = {"jumbo_avg": self.num_jumbo + 1, "jumbo": self.num_jumbo}.get(self.global_pool, 1)
        self.head_hidden_size = self.embed_dim * tokens
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
            self.global_pool = global_pool
        self.num_classes = num_classes
        self._make_head(self.embeds.proj.weight.device, self.embeds.proj.weight.dtype)
        init_head(self.head, num_classes)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's parameter groups by depth; the shared FFN, which serves all depths, goes with the final norm."""
        return {
            "stem": r"^embeds|^norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^jumbo_mlp|^attn_pool", (99999,))],
        }


# Symbolic tracing (fx) sees neither what is None nor shapes, so it takes these two as one step each.


@torch.fx.wrap
def _checked(
    x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, tiles: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The input with padding blanked: timm reads the grid off all coordinates, and 0 times a padding of NaN is NaN.

    Raises:
        UserError: Whole pictures that `tiles` do not tile.
    """
    if patch_coord is None:
        if tiles is not None:
            check_size(tuple(x.shape[-2:]), tiles)
    elif patch_valid is not None:
        patch_valid = patch_valid.bool()
        patch_coord = patch_coord.masked_fill(~patch_valid[..., None], 0)
        x = x.masked_fill(~patch_valid.reshape(*patch_valid.shape, *(1,) * (x.ndim - 2)), 0)
    return x, patch_coord, patch_valid


@torch.fx.wrap
def _mean_of_real(patches: Tensor, patch_valid: Tensor | None) -> Tensor:
    """(B, N, D) -> (B, D) without padding."""
    mean: Tensor = global_pool_naflex(patches, patch_valid, "avg", num_prefix_tokens=0)
    return mean


def _check_options(global_pool: str, drop_path_schedule: str, fc_norm: bool) -> None:
    _check_pool(global_pool)
    if drop_path_schedule not in SCHEDULES:
        raise UserError(f"drop_path_schedule={drop_path_schedule!r} is unknown; use 'constant' or 'linear'")
    if fc_norm and global_pool in POOLS[:2]:
        raise UserError(f"fc_norm=True norms one token after pooling; global_pool={global_pool!r} concatenates several")


def _check_pool(name: str) -> None:
    if name == "token":
        raise UserError("global_pool='token' needs a class token; a Jumbo model has global_pool='jumbo' instead")
    if name not in POOLS:
        raise UserError(
            f"global_pool={name!r} is unknown; use one of {', '.join(map(repr, POOLS))}{nearest(name, POOLS)}"
        )


NAMES = {
    f"naflexvit_jumbo_{size}_patch{row.patch_size}": size
    for size, row in SIZES.items()
    if size not in ("micro", "test")
}


def _pretrained_cfg(size: str) -> dict[str, Any]:
    row = SIZES[size]
    cfg: dict[str, Any] = {
        "input_size": (3, row.img_size, row.img_size),
        "num_classes": row.num_classes,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "first_conv": "embeds.proj",
        "classifier": "head",
    }
    if row.official_top1 is None:
        return cfg
    # The authors' weights serve this form too. Their code is MIT; for the weights no licence is stated.
    hub = {"hf_hub_id": "antofuller/jumbo", "hf_hub_filename": f"jumbo_{size}.pth", "license": "not stated"}
    return cfg | hub | {"paper_ids": "arXiv:2502.15021", "origin_url": "https://github.com/antofuller/jumbo"}


def _register(name: str, size: str) -> None:
    row = SIZES[size]

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> JumboNaFlexVit:
        own: dict[str, Any] = {
            "embed_dim": row.dim,
            "depth": row.depth,
            "num_heads": row.heads,
            "num_jumbo": row.num_jumbo,
            "img_size": row.img_size,
            "patch_size": row.patch_size,
            "pos_embed_grid_size": None,
            "weight_init": row.weight_init,
        }
        out_indices = kwargs.pop("out_indices", 3)
        model: JumboNaFlexVit = build_model_with_cfg(
            JumboNaFlexVit,
            name,
            pretrained,
            pretrained_filter_fn=adapt_checkpoint,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **(own | kwargs),
        )
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"Jumbo NaFlexVit, {size}: the weights of `{size}`, pictures of any size and shape in a batch."
    globals()[name] = register_model(entrypoint)


default_cfgs = generate_default_cfgs(
    {f"{name}.in1k" if SIZES[size].official_top1 else name: _pretrained_cfg(size) for name, size in NAMES.items()}
)

for _name, _size in NAMES.items():
    _register(_name, _size)
