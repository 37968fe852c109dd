"""Registers every size in timm, Jumbo and baselines: `timm.create_model("jumbo_vit_tiny_patch16_224")`."""

import math
from collections.abc import Callable
from typing import Any, cast

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._input import get_pretrained_grid_size
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

from jumbo_vit import jumboized, naflex  # noqa: F401  (they register their own names)
from jumbo_vit.baselines import BaselineVisionTransformer
from jumbo_vit.checkpoints import plain_names
from jumbo_vit.errors import UserError
from jumbo_vit.pretrained import account_for, announce_grid, check_dimensions, no_grid
from jumbo_vit.sizes import BASELINE_NAMES, MODEL_NAMES, REGISTERS, SIZES, Size
from jumbo_vit.trunk import PaperVisionTransformer
from jumbo_vit.vit import JumboVisionTransformer

# The official evaluation: short side to the input size (crop 1.0), bilinear, ImageNet mean and std.
_OFFICIAL = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "fixed_input_size": True,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
}
_PROJECTION = "patch_embed.proj.weight"


def _pretrained_cfg(row: Size) -> dict[str, Any]:
    return _OFFICIAL | {"input_size": (3, row.img_size, row.img_size), "num_classes": row.num_classes}


def _official_cfg(size: str) -> dict[str, Any]:
    cfg = _pretrained_cfg(SIZES[size])
    if SIZES[size].official_top1 is None:
        return cfg
    # The authors' code is MIT; for the weights no licence is stated.
    hub = {"hf_hub_id": "antofuller/jumbo", "hf_hub_filename": f"jumbo_{size}.pth", "license": "not stated"}
    return cfg | hub | {"paper_ids": "arXiv:2502.15021", "origin_url": "https://github.com/antofuller/jumbo"}


def _tagged(name: str, size: str) -> str:
    return name if SIZES[size].official_top1 is None else f"{name}.in1k"


def adapt_checkpoint(state: dict[str, Tensor], model: PaperVisionTransformer) -> dict[str, Tensor]:
    """timm's filter for pretrained weights: plain names, patches and positions resampled, and everything accounted for.

    The channels that timm's `pretrained_cfg` declares for the file are corrected by the file.

    Raises:
        UserError: Something is missing, left over or of another shape; the names are listed.
    """
    state = plain_names(state)
    own, cfg = model.state_dict(), cast(dict[str, Any], model.pretrained_cfg)
    check_dimensions(state, {"pos_embed": (3,), _PROJECTION: (2, 4)})
    adapted: dict[str, Tensor] = {}
    failure = ""
    try:
        adapted = checkpoint_filter_fn(state, model)
    except Exception as error:  # of many kinds, by the shape that the filter did not expect
        failure = (str(error).splitlines() or [type(error).__name__])[0]
    positions, fitted, mine = (s.get("pos_embed") for s in (state, adapted, own))
    if positions is not None and mine is not None and (fitted is None or fitted.shape[1] != mine.shape[1]):
        raise no_grid(positions.shape[1], cfg)
    if failure:
        raise UserError(f"the checkpoint cannot be converted for this model: {failure}")
    if positions is not None and mine is not None and positions.shape == mine.shape:
        kernel = state.get(_PROJECTION)
        read = get_pretrained_grid_size(model, kernel, mine.shape[1]) or (math.isqrt(mine.shape[1]),) * 2
        announce_grid(read, model.patch_embed.grid_size)
    return account_for(adapted, own, cfg)


def _register(
    name: str, model_cls: type[PaperVisionTransformer], row: Size, about: str, **special: Any
) -> Callable[..., PaperVisionTransformer]:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> PaperVisionTransformer:
        own: dict[str, Any] = {
            "embed_dim": row.dim,
            "depth": row.depth,
            "num_heads": row.heads,
            "img_size": row.img_size,
            "patch_size": row.patch_size,
            "weight_init": row.weight_init,
            **special,
        }
        out_indices = kwargs.pop("out_indices", 3)
        model: PaperVisionTransformer = build_model_with_cfg(
            model_cls,
            name,
            pretrained,
            pretrained_filter_fn=adapt_checkpoint,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **(own | kwargs),
        )
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = (
        f"{about}: width {row.dim}, depth {row.depth}, {row.heads} heads, patch {row.patch_size}, {row.img_size} px."
    )
    registered: Callable[..., PaperVisionTransformer] = register_model(entrypoint)
    return registered


_cfgs: dict[str, Any] = {_tagged(name, size): _official_cfg(size) for name, size in MODEL_NAMES.items()}
_cfgs |= {name: _pretrained_cfg(SIZES[size]) for name, (size, _) in BASELINE_NAMES.items()}
default_cfgs = generate_default_cfgs(_cfgs)

for _name, _size in MODEL_NAMES.items():
    _row = SIZES[_size]
    globals()[_name] = _register(
        _name, JumboVisionTransformer, _row, f"Jumbo ViT, {_size}, J={_row.num_jumbo}", num_jumbo=_row.num_jumbo
    )
for _name, (_size, _kind) in BASELINE_NAMES.items():
    _count = REGISTERS[_kind]
    _about = f"Plain ViT, {_size}, class token" + (f" and {_count} registers" if _count else "")
    globals()[_name] = _register(_name, BaselineVisionTransformer, SIZES[_size], _about, reg_tokens=_count)
