"""Weight files for the NaFlex form: of itself, of the plain Jumbo model, or of the authors."""

import math
from typing import Any, cast

from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from timm.models.naflexvit import NaFlexVit
from torch import Tensor

from jumbo_vit.checkpoints import plain_names
from jumbo_vit.errors import UserError
from jumbo_vit.pretrained import account_for, announce_grid, check_dimensions, no_grid


def adapt_checkpoint(state: dict[str, Tensor], model: NaFlexVit) -> dict[str, Tensor]:
    """Weights of this class, of `JumboVisionTransformer` or of the authors, fitted to the model's grid and patch.

    A plain table of positions is that of the size that `pretrained_cfg` declares, else of a square grid, else of the
    model's own.

    Raises:
        UserError: A tensor is missing, left over or of another shape; the names are listed.
    """
    state = plain_names(state)
    own = model.state_dict()
    cfg = cast(dict[str, Any], model.pretrained_cfg)
    check_dimensions(state, {"patch_embed.proj.weight": (4,), "pos_embed": (3,)})
    check_dimensions(state, {"embeds.proj.weight": (2,), "embeds.pos_embed": (3, 4)})
    plain = state.pop("patch_embed.proj.weight", None)
    if plain is not None:
        names = {"pos_embed": "embeds.pos_embed", "reg_token": "embeds.reg_token"}
        moved = {names.get(name, name.replace("patch_embed.", "embeds.")): value for name, value in state.items()}
        state = {name: value for name, value in moved.items() if name != "cls_token"}
    flat = state.get("embeds.proj.weight")
    kernel = plain if plain is not None else _kernel_of(flat, model) if flat is not None else None
    patch = tuple(kernel.shape[2:]) if kernel is not None else (1, 1)
    if kernel is not None:
        if kernel.shape[1] != model.in_chans:
            kernel = adapt_input_conv(model.in_chans, kernel, base_chans=kernel.shape[1])
        kernel = resample_patch_embed(kernel, list(model.embeds.patch_size))
        state["embeds.proj.weight"] = kernel.permute(0, 2, 3, 1).flatten(1)
    table = state.get("embeds.pos_embed")
    if table is not None and "embeds.pos_embed" in own:
        wanted = tuple(own["embeds.pos_embed"].shape[1:3])
        flat_table, grid = table.flatten(1, -2), _grid_of(table, wanted, patch, cfg)
        announce_grid(grid, wanted)
        if grid != wanted:
            flat_table = resample_abs_pos_embed(
                flat_table, list(wanted), list(grid), num_prefix_tokens=0, antialias=True
            )
        state["embeds.pos_embed"] = flat_table.unflatten(1, wanted)
    return account_for(state, own, cfg)


def _grid_of(table: Tensor, wanted: tuple[int, ...], patch: tuple[int, ...], cfg: dict[str, Any]) -> tuple[int, ...]:
    """Height and width of the file's table of positions, whose patches are of size `patch`."""
    if table.ndim == 4:
        return tuple(table.shape[1:3])
    count = table.shape[1]
    declared = tuple(size // step for size, step in zip(cfg["input_size"][1:], patch, strict=True))
    for grid in (declared, (round(count**0.5),) * 2, wanted):
        if grid[0] * grid[1] == count:
            return grid
    raise no_grid(count, cfg)


def _kernel_of(flat: Tensor, model: NaFlexVit) -> Tensor:
    """A flat projection (D, h*w*C) as a convolution's (D, C, h, w).

    Read as the model's own patch and channels if they make as many inputs, else with the channels that
    `pretrained_cfg` declares: as the model's patch, or as a square one.

    Raises:
        UserError: None of the three fits.
    """
    own = tuple(model.embeds.patch_size)
    declared = int(getattr(model, "pretrained_cfg", {}).get("input_size", (model.in_chans,))[0])
    side = math.isqrt(flat.shape[1] // declared)
    forms = [(own, model.in_chans), (own, declared), ((side, side), declared)]
    fitting = [(patch, channels) for patch, channels in forms if patch[0] * patch[1] * channels == flat.shape[1]]
    if not fitting:
        raise UserError(
            f"the checkpoint's projection of {flat.shape[1]} inputs is no square patch of {declared} channels; "
            "declare its size by pretrained_cfg_overlay=dict(file=..., input_size=(C, H, W))"
        )
    patch, channels = fitting[0]
    kernel: Tensor = flat.unflatten(1, (*patch, channels)).permute(0, 3, 1, 2)
    return kernel
