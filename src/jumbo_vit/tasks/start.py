"""Where a run's first weights come from: fresh, or taken from something trained, with every tensor accounted for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv, is_model
from torch import Tensor, nn

from jumbo_vit.checkpoints import LoadReport, read_weights
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.folder import open_folder, resolve_folder


@dataclass(frozen=True)
class Source:
    """Weights to start from.

    Args:
        state: Tensors by plain names.
        labels: Class names of its head, or None where they are not known.
        grid: (rows, columns) of its positions, or None where only their number is known.
    """

    state: dict[str, Tensor]
    labels: list[str] | None = None
    grid: tuple[int, int] | None = None


def read_source(source: str) -> Source:
    """The weights that `--init-from` names: a model folder or run, a weights file, or a timm model's pretrained ones.

    Raises:
        UserError: There is no such thing, it cannot be read, or it cannot be downloaded.
    """
    path = Path(source)
    if path.is_dir():
        model, contract = open_folder(resolve_folder(path))
        return Source(model.state_dict(), contract.labels, _grid_of(model))
    if path.is_file():
        return Source(read_weights(path))
    if not is_model(source):
        hint = nearest(source, timm.list_models(pretrained=True))
        raise UserError(f"--init-from {source}: no such folder or file, and no model of timm{hint}")
    try:
        model = timm.create_model(source, pretrained=True)
    except (RuntimeError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--init-from {source}: its pretrained weights cannot be had ({first})") from error
    return Source(model.state_dict(), None, _grid_of(model))


def _grid_of(model: Any) -> tuple[int, int] | None:
    return getattr(getattr(model, "patch_embed", None), "grid_size", None)


def start_from(model: nn.Module, source: str, labels: list[str]) -> LoadReport:
    """Take from `source` every tensor that fits `model`: the trunk, resampled where grid or patch differ.

    Positions of class tokens are dropped (Jumbo has none), LayerScale is folded into the projections that it follows,
    and the head is taken only if it has the same class names.

    Raises:
        UserError: Another width, another J, or no block could be taken.
    """
    found = read_source(source)
    state, names = found.state, found.labels
    own = model.state_dict()
    report = LoadReport()
    _check_width(state, own, source)
    state, folded = _fold_layer_scale(state, own)
    same_head = names == labels and _shape(state, "head.weight") == _shape(own, "head.weight")
    taken: dict[str, Tensor] = {}
    for name, value in state.items():
        head = name.startswith("head.") or name.startswith("fc_norm.")
        if name not in own or (head and not same_head):
            report.unused.append(name)
            continue
        fitted = _fit(name, value, own[name])
        if name == "pos_embed":
            fitted = _fit_positions(value, own[name], found.grid, _grid_of(model))
        if fitted is None:
            report.unused.append(f"{name} {tuple(value.shape)}")
            continue
        taken[name] = fitted
        changed = fitted is not value or name in folded
        (report.resized if changed else report.loaded).append(name)
    report.new = [name for name in own if name not in taken]
    _check_enough(taken, own, state, source)
    model.load_state_dict(own | taken)
    return report


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _check_width(state: dict[str, Tensor], own: dict[str, Tensor], source: str) -> None:
    for name in ("patch_embed.proj.weight", "blocks.0.norm1.weight"):
        if name in state and name in own and state[name].shape[0] != own[name].shape[0]:
            raise UserError(
                f"--init-from {source} has width {state[name].shape[0]}, the model {own[name].shape[0]}: "
                "choose a --model of the same width"
            )
    theirs, mine = state.get("reg_token"), own.get("reg_token")
    both_jumbo = any(".norm3." in name for name in state) and any(".norm3." in name for name in own)
    if both_jumbo and theirs is not None and mine is not None and theirs.shape != mine.shape:
        raise UserError(
            f"--init-from {source} has J={theirs.shape[1]}, the model J={mine.shape[1]}: they must be equal"
        )


def _check_enough(taken: dict[str, Tensor], own: dict[str, Tensor], state: dict[str, Tensor], source: str) -> None:
    trunk = [name for name in own if name.startswith("blocks.")]
    if trunk and not any(name in taken for name in trunk):
        seen = ", ".join(list(state)[:3])
        raise UserError(f"--init-from {source} holds nothing of this model's blocks (its entries: {seen}, ...)")
    if not taken:
        raise UserError(f"--init-from {source} holds nothing that fits this model")


def _fit(name: str, value: Tensor, mine: Tensor) -> Tensor | None:
    """`value` in the shape of `mine`; the patch projection is resampled and its channels converted. Else None."""
    if value.shape == mine.shape:
        return value
    if name != "patch_embed.proj.weight" or value.ndim != mine.ndim:
        return None
    if value.shape[1] != mine.shape[1]:
        value = adapt_input_conv(mine.shape[1], value)
    return resample_patch_embed(value, list(mine.shape[-2:])) if value.shape != mine.shape else value


def _fit_positions(
    value: Tensor, mine: Tensor, grid: tuple[int, int] | None, wanted: tuple[int, int] | None
) -> Tensor | None:
    """A position table (1, prefix + patches, D) for another grid; prefix positions are kept only where both have them.

    Without a known grid it must be square, with at most the prefix tokens of a class token and four registers.
    """
    if wanted is None:
        return value if value.shape == mine.shape else None
    if grid is None:
        sides = {extra: round((value.shape[1] - extra) ** 0.5) for extra in (0, 1, 2, 5) if value.shape[1] > extra}
        grid = next(((side, side) for extra, side in sides.items() if side * side + extra == value.shape[1]), None)
    if grid is None:
        return None
    prefix = value.shape[1] - grid[0] * grid[1]
    own_prefix = mine.shape[1] - wanted[0] * wanted[1]
    if own_prefix not in (0, prefix):
        return None
    if own_prefix == prefix and grid == wanted:
        return value
    table: Tensor = resample_abs_pos_embed(
        value, new_size=list(wanted), old_size=list(grid), num_prefix_tokens=prefix, antialias=True
    )
    return table if own_prefix else table[:, prefix:]


def _fold_layer_scale(state: dict[str, Tensor], own: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """Multiply LayerScale into the projection before it where the model has none: the function stays the same."""
    result, folded = dict(state), set()
    for scale, target in (("ls1.gamma", "attn.proj"), ("ls2.gamma", "mlp.fc2")):
        for name in [n for n in state if n.endswith(scale) and n not in own]:
            stem = name.removesuffix(scale)
            gamma = result.pop(name)
            for part in (f"{stem}{target}.weight", f"{stem}{target}.bias"):
                if part in result:
                    result[part] = result[part] * (gamma[:, None] if result[part].ndim == 2 else gamma)
                    folded.add(part)
    return result, folded
