"""Every tensor of a pretrained file is accounted for: taken, announced as new, or named in an error.

timm gives up its strict check as soon as the class count differs, so the check is here, for all our models.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jumbo_vit.checkpoints import same_kind
from jumbo_vit.errors import UserError

_logger = logging.getLogger("jumbo_vit")
_MOST_NAMED = 12


def account_for(adapted: Mapping[str, Tensor], own: Mapping[str, Tensor], cfg: dict[str, Any]) -> dict[str, Tensor]:
    """What to load into a model whose state dict is `own`, of a file whose tensors were fitted to it.

    The head alone may be new: where the file has none, or one of another class count or width, which is announced. The
    numbers of classes and channels that `cfg`, timm's `pretrained_cfg`, declares for the file are corrected by it.

    Raises:
        UserError: Something else is missing, left over or of another shape; the names are listed.
    """
    heads = cfg.get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    convs = cfg.get("first_conv") or ()
    convs = (convs,) if isinstance(convs, str) else tuple(convs)
    for conv in convs:
        kernel = adapted.get(f"{conv}.weight")
        if kernel is not None and kernel.ndim == 4:  # timm converts channels by what is declared: let it be true
            cfg["input_size"] = (kernel.shape[1], *cfg["input_size"][1:])
    free = {f"{head}.{part}": None for head in heads for part in ("weight", "bias")}
    taken = _take_head(adapted, own, cfg, list(free), heads)
    _check_all_there(taken, own, set(free), {f"{conv}.weight" for conv in convs})
    return taken


def check_dimensions(state: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that have another number of dimensions than `wanted` says by name, before they are resampled.

    Raises:
        UserError: One does; its shape is named.
    """
    for name, dimensions in wanted.items():
        value = state.get(name)
        if value is not None and value.ndim not in dimensions:
            expected = " or ".join(map(str, dimensions))
            raise UserError(
                f"the checkpoint's {name} has the shape {tuple(value.shape)}, where {expected} dimensions are expected"
            )


def announce_grid(read: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Say that positions were read as one grid where the model's own has as many, so that the reading may be wrong."""
    if read != own and read[0] * read[1] == own[0] * own[1]:
        _logger.warning(
            "the file's %d positions are read as %dx%d, though the model's own grid %dx%d has as many: if the "
            "file's is that too, declare it by pretrained_cfg_overlay=dict(file=..., input_size=(3, H, W))",
            read[0] * read[1],
            *read,
            *own,
        )


def no_grid(positions: int, cfg: Mapping[str, Any]) -> UserError:
    """The error of a table of positions whose height and width nobody said."""
    return UserError(
        f"the checkpoint's {positions} positions do not make a square, nor the grid of the declared size "
        f"{tuple(cfg['input_size'][1:])}: give the size it was made for by pretrained_cfg_overlay="
        "dict(file=..., input_size=(3, H, W))"
    )


def _take_head(
    adapted: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    cfg: dict[str, Any],
    names: list[str],
    heads: tuple[str, ...],
) -> dict[str, Tensor]:
    """Keep the file's head where it fits; `cfg["num_classes"]`, by which timm decides, is made to say so."""
    first = f"{heads[0]}.weight" if heads else ""
    theirs, mine = (tuple(s[first].shape) if first in s else None for s in (adapted, own))
    cfg["num_classes"] = theirs[0] if theirs is not None else 0
    if mine is None or mine == theirs:
        return dict(adapted)
    if theirs is None:
        reason = "the file has none"
    elif theirs[0] != mine[0]:
        reason = f"{theirs[0]} classes in the file, {mine[0]} in the model"
    else:
        reason, cfg["num_classes"] = f"it reads {theirs[1]} features in the file, {mine[1]} in the model", 0
    _logger.warning("%s start anew: %s", " and ".join(names), reason)
    return {name: value for name, value in adapted.items() if name not in names}


def _check_all_there(
    adapted: Mapping[str, Tensor], own: Mapping[str, Tensor], free: set[str], first_convs: set[str]
) -> None:
    def fits(name: str, value: Tensor, mine: Tensor) -> bool:
        if name in first_convs and value.ndim == mine.ndim == 4:  # timm converts its channels after this
            return value.shape[:1] == mine.shape[:1] and value.shape[2:] == mine.shape[2:]
        return value.shape == mine.shape

    new = set() if any(name in adapted for name in free) else free  # half a head is no head
    missing = [name for name in own if name not in adapted and name not in new]
    unknown = [name for name in adapted if name not in own and name not in free]
    shapes = [
        f"{name} {tuple(adapted[name].shape)} instead of {tuple(mine.shape)}"
        for name, mine in own.items()
        if name in adapted and not fits(name, adapted[name], mine)
    ]
    kinds = [
        f"{name} {adapted[name].dtype} instead of {mine.dtype}"
        for name, mine in own.items()
        if name in adapted and not same_kind(adapted[name], mine)
    ]
    rows = (("missing:", missing), ("unknown:", unknown), ("other shape:", shapes), ("other type:", kinds))
    faults = [f"{word} {_listed(names)}" for word, names in rows if names]
    if faults:
        raise UserError(f"the checkpoint does not fit the model ({'; '.join(faults)})")


def _listed(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
