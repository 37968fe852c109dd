"""Where a run's first weights come from: fresh, or taken from something trained, with every tensor accounted for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv, is_model
from torch import Tensor, nn

from jumbo_vit.checkpoints import LoadReport, read_weights, same_kind
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.folder import open_folder, resolve_folder

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Source:
    """Weights to start from.

    Args:
        state: Tensors by plain names.
        labels: Class names of its head, or None where they are not known.
        grid: (rows, columns) of its positions, or None where only their number is known.
        statistics: Mean and standard deviation that its pictures were normalised with, or None where not known.
    """

    state: dict[str, Tensor]
    labels: list[str] | None = None
    grid: tuple[int, int] | None = None
    statistics: Statistics | None = None


def read_source(source: str) -> Source:
    """The weights that `--init-from` names: a model folder or run, a weights file, or a timm model's pretrained ones.

    Raises:
        UserError: There is no such thing, it cannot be read, or it cannot be downloaded.
    """
    path = Path(source)
    if path.is_dir():
        model, contract = open_folder(resolve_folder(path))
        prepared = contract.preparation
        # What a pre-training had no use for still has its first, random values there.
        untrained = contract.lineage.get("untrained") or ()
        state = {name: value for name, value in model.state_dict().items() if name not in untrained}
        return Source(state, contract.labels, _grid_of(model), (prepared.mean, prepared.std))
    if path.is_file():
        return Source(read_weights(path))
    if not is_model(source):
        hint = nearest(source, timm.list_models(pretrained=True))
        raise UserError(f"--init-from {source}: no such folder or file, and no model of timm{hint}")
    try:
        model = timm.create_model(source, pretrained=True)
    except Exception as error:  # the hub's client raises its own and its libraries' errors, by version
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--init-from {source}: its pretrained weights cannot be had ({first})") from error
    return Source(model.state_dict(), None, _grid_of(model), _statistics_of(model))


def _grid_of(model: Any) -> tuple[int, int] | None:
    return getattr(getattr(model, "patch_embed", None), "grid_size", None)


def _statistics_of(model: Any) -> Statistics:
    return tuple(model.pretrained_cfg["mean"]), tuple(model.pretrained_cfg["std"])


def start_from(model: nn.Module, source: str, labels: list[str]) -> LoadReport:
    """Take from `source` every tensor that fits `model`: the trunk, resampled where grid or patch differ.

    Positions of class tokens are dropped (Jumbo has none), LayerScale is folded into the projections that it follows,
    and the head is taken only if it has the same class names.

    Raises:
        UserError: Another width, another J, or no block could be taken.
    """
    found = read_source(source)
    own = model.state_dict()
    report = LoadReport()
    _check_width(found.state, own, source)
    state, folded = _fold_layer_scale(found.state, own)
    heads = _layer_names(model, "classifier") or ("head",)
    same_head = found.labels == labels and all(
        _shape(state, f"{head}.weight") == _shape(own, f"{head}.weight") for head in heads
    )
    taken: dict[str, Tensor] = {}
    for name, value in state.items():
        of_head = name.startswith((*(f"{head}." for head in heads), "fc_norm."))
        if name not in own or (of_head and not same_head):
            report.unused.append(name)
            continue
        if name == "pos_embed":
            fitted = _fit_positions(value, own[name], found.grid, _grid_of(model))
        elif name == "embeds.pos_embed":
            fitted = _fit_table(value, own[name])
        else:
            fitted = _fit(name, value, own[name], _layer_names(model, "first_conv"))
        if fitted is None:
            report.unused.append(f"{name} {tuple(value.shape)}")
            continue
        taken[name] = fitted
        kind = report.resized if fitted is not value else report.folded if name in folded else report.loaded
        kind.append(name)
    report.new = [name for name in own if name not in taken]
    _check_enough(taken, own, heads, state, source)
    theirs, mine = found.statistics, _statistics_of(model)
    if theirs is not None and len(theirs[0]) == len(mine[0]) and theirs != mine:
        report.notes.append(
            f"its pictures were normalised with mean {theirs[0]} and std {theirs[1]}, those of this run are with "
            f"{mine[0]} and {mine[1]}"
        )
    model.load_state_dict(own | taken)
    return report


def _layer_names(model: Any, key: str) -> tuple[str, ...]:
    """The layers that timm's configuration calls "classifier" or "first_conv"."""
    names = model.pretrained_cfg.get(key)
    return (names,) if isinstance(names, str) else tuple(names or ())


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _check_width(state: dict[str, Tensor], own: dict[str, Tensor], source: str) -> None:
    for name in ("patch_embed.proj.weight", "blocks.0.norm1.weight"):
        if name in state and name in own and state[name].shape[:1] != own[name].shape[:1]:
            width = state[name].shape[0] if state[name].ndim else 0
            raise UserError(
                f"--init-from {source} has width {width}, the model {own[name].shape[0]}: "
                "choose a --model of the same width"
            )
    theirs, mine = state.get("reg_token"), own.get("reg_token")
    both_jumbo = any(".norm3." in name for name in state) and any(".norm3." in name for name in own)
    if both_jumbo and theirs is not None and mine is not None and theirs.shape[:2] != mine.shape[:2]:
        if theirs.ndim != mine.ndim:
            raise UserError(f"--init-from {source} has a Jumbo token of shape {tuple(theirs.shape)}: it is damaged")
        raise UserError(
            f"--init-from {source} has J={theirs.shape[1]}, the model J={mine.shape[1]}: they must be equal"
        )


def _check_enough(
    taken: dict[str, Tensor], own: dict[str, Tensor], heads: tuple[str, ...], state: dict[str, Tensor], source: str
) -> None:
    """A trunk that would mostly stay random is a wrong file, not a start."""
    trunk = [name for name in own if not name.startswith(tuple(f"{head}." for head in heads))]
    blocks = [name for name in trunk if name.startswith("blocks.")] or trunk
    fitting = sum(name in taken for name in trunk)
    if not any(name in taken for name in blocks):
        seen = ", ".join(list(state)[:3])
        what = "of this model's blocks" if blocks is not trunk else "that fits this model"
        hint = ": give the run's model/ folder" if any(name.startswith("encoder.") for name in state) else ""
        raise UserError(f"--init-from {source} holds nothing {what} (its entries: {seen}, ...){hint}")
    if 2 * fitting < len(trunk):
        raise UserError(
            f"--init-from {source} fits only {fitting} of the {len(trunk)} tensors below this model's head, so most of "
            "it would be random: choose a --model of the same kind and depth"
        )


def _fit(name: str, value: Tensor, mine: Tensor, first: tuple[str, ...]) -> Tensor | None:
    """`value` in the shape of `mine`: the first layer's channels are converted, its patch resampled. Else None."""
    if not same_kind(value, mine):
        return None
    if value.shape == mine.shape:
        return value
    patches = name == "patch_embed.proj.weight"
    if not (patches or name in {f"{layer}.weight" for layer in first}) or value.ndim != 4 or mine.ndim != 4:
        return None
    if value.numel() == 0:
        return None
    if value.shape[1] != mine.shape[1]:
        value = adapt_input_conv(mine.shape[1], value, base_chans=value.shape[1])
    if patches and value.shape[2:] != mine.shape[2:]:
        value = resample_patch_embed(value, list(mine.shape[2:]))
    return value if value.shape == mine.shape else None


def _fit_positions(
    value: Tensor, mine: Tensor, grid: tuple[int, int] | None, wanted: tuple[int, int] | None
) -> Tensor | None:
    """A position table (1, prefix + patches, D) for another grid; prefix positions are kept only where both have them.

    Without a known grid it must be square, with at most the prefix tokens of a class token and four registers.
    """
    table = value.ndim == mine.ndim == 3 and value.shape[::2] == mine.shape[::2] and same_kind(value, mine)
    if wanted is None or not table:
        return value if value.shape == mine.shape and same_kind(value, mine) else None
    if grid is None:
        sides = {extra: round((value.shape[1] - extra) ** 0.5) for extra in (0, 1, 2, 5) if value.shape[1] > extra}
        grid = next(((side, side) for extra, side in sides.items() if side * side + extra == value.shape[1]), None)
    if grid is None:
        return value if value.shape == mine.shape else None
    prefix = value.shape[1] - grid[0] * grid[1]
    own_prefix = mine.shape[1] - wanted[0] * wanted[1]
    if own_prefix not in (0, prefix):
        return None
    if own_prefix == prefix and grid == wanted:
        return value
    resampled: Tensor = resample_abs_pos_embed(
        value, new_size=list(wanted), old_size=list(grid), num_prefix_tokens=prefix, antialias=True
    )
    return resampled if own_prefix else resampled[:, prefix:]


def _fit_table(value: Tensor, mine: Tensor) -> Tensor | None:
    """NaFlex positions (1, H, W, D) for another grid, which they name themselves; bicubic, as its forward pass does."""
    if value.shape == mine.shape:
        return value if same_kind(value, mine) else None
    tables = value.ndim == mine.ndim == 4 and value.shape[::3] == mine.shape[::3] and value.numel() > 0
    if not tables or not same_kind(value, mine):
        return None
    old, new = list(value.shape[1:3]), list(mine.shape[1:3])
    resampled: Tensor = resample_abs_pos_embed(value.flatten(1, 2), new, old, num_prefix_tokens=0, antialias=True)
    return resampled.reshape(mine.shape)


def _fold_layer_scale(state: dict[str, Tensor], own: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """Multiply LayerScale into the projection before it where the model has none: the function stays the same."""
    result, folded = dict(state), set()
    for scale, target in (("ls1.gamma", "attn.proj"), ("ls2.gamma", "mlp.fc2")):
        for name in [n for n in state if n.endswith(scale) and n not in own]:
            stem = name.removesuffix(scale)
            gamma = result.pop(name)
            for part in (f"{stem}{target}.weight", f"{stem}{target}.bias"):
                if part in result and gamma.ndim == 1 and result[part].shape[:1] == gamma.shape:
                    scaled = result[part].float() * (gamma[:, None] if result[part].ndim == 2 else gamma).float()
                    result[part] = scaled.to(result[part].dtype)
                    folded.add(part)
    return result, folded
