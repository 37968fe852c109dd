"""Registers every size in timm: `timm.create_model("jumbo_vit_tiny_patch16_224")`."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

from jumbo_vit.checkpoints import plain_names
from jumbo_vit.sizes import MODEL_NAMES, SIZES
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


def _pretrained_cfg(size: str) -> dict[str, Any]:
    row = SIZES[size]
    cfg = _OFFICIAL | {"input_size": (3, row.img_size, row.img_size), "num_classes": row.num_classes}
    if row.official_top1 is None:
        return cfg
    # The authors' code is MIT; for the weights no licence is stated.
    hub = {"hf_hub_id": "antofuller/jumbo", "hf_hub_filename": f"jumbo_{size}.pth", "license": "not stated"}
    return cfg | hub | {"paper_ids": "arXiv:2502.15021", "origin_url": "https://github.com/antofuller/jumbo"}


def _tagged(name: str, size: str) -> str:
    return name if SIZES[size].official_top1 is None else f"{name}.in1k"


def adapt_checkpoint(state: dict[str, Tensor], model: JumboVisionTransformer) -> dict[str, Tensor]:
    """timm's filter for pretrained weights: plain key names, then patches and positions resampled to the model's."""
    adapted: dict[str, Tensor] = checkpoint_filter_fn(plain_names(state), model)
    return adapted


def _register(name: str, size: str) -> None:
    row = SIZES[size]

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> JumboVisionTransformer:
        own: dict[str, Any] = {
            "embed_dim": row.dim,
            "depth": row.depth,
            "num_heads": row.heads,
            "num_jumbo": row.num_jumbo,
            "img_size": row.img_size,
            "patch_size": row.patch_size,
            "weight_init": row.weight_init,
        }
        out_indices = kwargs.pop("out_indices", 3)
        model: JumboVisionTransformer = build_model_with_cfg(
            JumboVisionTransformer,
            name,
            pretrained,
            pretrained_filter_fn=adapt_checkpoint,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **(own | kwargs),
        )
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = (
        f"Jumbo ViT, {size}: width {row.dim}, depth {row.depth}, {row.heads} heads, J={row.num_jumbo}, "
        f"patch {row.patch_size}, {row.img_size} px."
    )
    globals()[name] = register_model(entrypoint)


default_cfgs = generate_default_cfgs({_tagged(name, size): _pretrained_cfg(size) for name, size in MODEL_NAMES.items()})

for _name, _size in MODEL_NAMES.items():
    _register(_name, _size)
