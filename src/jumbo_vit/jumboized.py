"""Give a vision transformer that somebody else trained a Jumbo token, without changing its outputs.

What is unusual: nothing is wrapped and nothing renamed. The model's class, and that of each of its blocks, gets a
mixin in front; a block then runs whole, as it always did (so that rotary positions, masks and any other argument pass
through), and afterwards its class and register tokens are read as one vector of width J*D, which passes a wide
feed-forward network. That network is one module for all blocks. Its last layer starts at zero, so that the first
difference of outputs is exactly 0, and training starts from the model as it was.

The names of the old weights stay, so that weights of the one load into the other. On disk such a model is timm's name
`jumboized`, whose arguments are the old model's name (`base`), its arguments, and the options of `jumboize`.
"""

import sys
from functools import partial
from typing import Any, cast

import timm
import torch
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, get_pretrained_cfg, is_model, register_model
from timm.models._input import update_model_args
from timm.models._pretrained import PretrainedCfg, filter_pretrained_cfg
from timm.models.beit import Block as BeitBlock
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import (
    Block,
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock
from torch import Tensor, nn

from jumbo_vit.block import OFFICIAL_NORM, OwnsJumboMlp, jumbo_mlp, split_tokens
from jumbo_vit.checkpoints import plain_names
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.pretrained import account_for

NAME = "jumboized"
# Where a `pretrained_cfg` says that weights are.
SOURCES = ("url", "file", "hf_hub_id", "state_dict")
# A block with one FFN, reached as `mlp`; only there can the Jumbo tokens skip it.
PLAIN_BLOCKS: tuple[type[nn.Module], ...] = (Block, EvaBlock, BeitBlock, RelPosBlock)
PRE_NORM_BLOCKS = (*PLAIN_BLOCKS, ParallelScalingBlock, DiffParallelScalingBlock, ParallelThingsBlock)
POST_NORM_BLOCKS: tuple[type[nn.Module], ...] = (ResPostBlock, EvaBlockPostNorm, ResPostRelPosBlock)

_classes: dict[tuple[type, type], type] = {}


def _mixed(mixin: type, base: type) -> type:
    """The class that has `mixin` in front of `base`; always the same one for the same two."""
    if (mixin, base) not in _classes:
        members = {"mixed_from": (mixin, base), "__module__": __name__, "__doc__": mixin.__doc__}
        _classes[mixin, base] = type(f"{mixin.__name__}{base.__name__}", (mixin, base), members)
    return _classes[mixin, base]


def _empty(mixin: type, base: type) -> Any:
    cls: Any = _mixed(mixin, base)
    return cls.__new__(cls)


class _Mixin(nn.Module):
    """What lets an object of a class made by `_mixed` be copied and pickled: it is found again by its two parts."""

    mixed_from: tuple[type, type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, self.mixed_from, super().__getstate__()  # type: ignore[no-untyped-call]


class JumboizedBlock(_Mixin):
    """In front of a block's class: the block as it is, then the Jumbo path.

    With j the concatenation of the first J tokens that the block gives: j <- j + JumboFFN(LN3(j)).
    """

    num_jumbo: int
    norm3: nn.Module
    _shared_mlp: tuple[nn.Module, ...]

    def use_jumbo_mlp(self, mlp: nn.Module | None) -> None:
        """Take `mlp` (J*D -> J*D) as the shared FFN, without registering it here: the model registers it once."""
        self._shared_mlp = () if mlp is None else (mlp,)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(B, L, D) -> (B, L, D), the Jumbo tokens first; further arguments are the block's own."""
        x = super().forward(x, *args, **kwargs)
        jumbo, rest = split_tokens(x, self.num_jumbo)
        wide = jumbo.flatten(1)
        if not self._shared_mlp:
            raise UserError("this block shares its Jumbo FFN, and was given none: set the model's jumbo_mlp")
        wide = wide + self._shared_mlp[0](self.norm3(wide))
        return torch.cat([wide.unflatten(1, (self.num_jumbo, -1)), rest], dim=1)


class JumboizedSkip(_Mixin):
    """In front of the class of a block's FFN: the Jumbo tokens skip it, and get 0 from it."""

    num_jumbo: int

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        _, rest = split_tokens(x, self.num_jumbo)
        return nn.functional.pad(super().forward(rest), (0, 0, self.num_jumbo, 0))


class Jumboized(_Mixin, OwnsJumboMlp):
    """In front of the model's class: owns the shared FFN, and keeps its start at zero."""

    num_jumbo: int
    jumbo_mlp: nn.Module

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Initialise all weights as the base model does, the shared FFN as `jumboize` does."""
        super().init_weights(*args, **kwargs)  # type: ignore[misc]
        _start_at_zero(self.jumbo_mlp)


def _start_at_zero(mlp: nn.Module) -> None:
    """The paper's start, trunc-normal 0.02 and zero biases, but for a last layer that gives 0."""
    first, last = cast(nn.Linear, mlp.fc1), cast(nn.Linear, mlp.fc2)
    trunc_normal_(first.weight, std=0.02)
    for parameter in (first.bias, last.weight, last.bias):
        nn.init.zeros_(parameter)


def jumboize(
    model: nn.Module, num_jumbo: int | None = None, keep_mlp: bool = True, jumbo_mlp_ratio: float = 4.0
) -> nn.Module:
    """Make the first J prefix tokens (class, then registers) of a pre-norm ViT of timm its Jumbo token, in place.

    Head, pooling, features, sizes and every method stay the model's own. The shared FFN is `model.jumbo_mlp`, each
    block's norm is `norm3`.

    Args:
        model: Any ViT of timm with prefix tokens and pre-norm blocks: plain, DeiT, CLIP, DINOv2, EVA and DINOv3 with
            rotary positions, BEiT, NaFlexVit.
        num_jumbo: J, at most the prefix tokens that the model has (new tokens would change its outputs); None for all
            of them.
        keep_mlp: True: the Jumbo tokens also keep the FFN that each block has, and the model's outputs are exactly
            those of before, until it is trained. This is not quite the paper's block. False: they skip it, which is
            the paper's block, and the outputs change.
        jumbo_mlp_ratio: Hidden width of the shared FFN over J*D.

    Returns:
        The same object.

    Raises:
        UserError: Not a plain ViT, no or too few prefix tokens, post-norm blocks, or a Jumbo token is there already.
    """
    have = _check(model, keep_mlp)
    num_jumbo = have if num_jumbo is None else num_jumbo
    if not 1 <= num_jumbo <= have:
        raise UserError(
            f"num_jumbo is {num_jumbo}, but {_title(model)} has {have} prefix tokens (class and registers): take 1 to "
            f"{have}; more would be new tokens, which change its outputs"
        )
    blocks = cast(Any, model.blocks)
    for block in blocks:
        weight = next(block.parameters())
        width = num_jumbo * cast(int, model.embed_dim)
        block.num_jumbo = num_jumbo
        block.norm3 = OFFICIAL_NORM(width, device=weight.device, dtype=weight.dtype)
        block.__class__ = _mixed(JumboizedBlock, type(block))
        if not keep_mlp:
            block.mlp.num_jumbo = num_jumbo
            block.mlp.__class__ = _mixed(JumboizedSkip, type(block.mlp))
    mlp = jumbo_mlp(cast(int, model.embed_dim), num_jumbo, jumbo_mlp_ratio, device=weight.device, dtype=weight.dtype)
    _start_at_zero(mlp)
    model.__class__ = _mixed(Jumboized, type(model))
    model.num_jumbo = num_jumbo  # type: ignore[assignment]
    model.jumbo_mlp = mlp.train(model.training)
    _record(model, {"num_jumbo": num_jumbo, "keep_mlp": keep_mlp, "jumbo_mlp_ratio": jumbo_mlp_ratio})
    return model


def _title(model: nn.Module) -> str:
    return str(getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__)


def _check(model: nn.Module, keep_mlp: bool) -> int:
    """The number of prefix tokens of a model that can be given a Jumbo token.

    Raises:
        UserError: It cannot.
    """
    title = _title(model)
    if hasattr(model, "_orig_mod"):
        raise UserError(f"{title} is compiled: jumboize first, then compile")
    if hasattr(model, "num_jumbo"):
        raise UserError(f"{title} has a Jumbo token already")
    blocks = list(cast(Any, getattr(model, "blocks", ())))
    if any(isinstance(block, POST_NORM_BLOCKS) for block in blocks):
        raise UserError(f"{title} has post-norm blocks; a Jumbo token is added to pre-norm blocks only")
    plain = bool(blocks) and all(isinstance(block, PRE_NORM_BLOCKS) for block in blocks)
    if not plain or not hasattr(model, "num_prefix_tokens"):
        seen = type(blocks[0]).__name__ if blocks else "no list of blocks"
        raise UserError(
            f"{title} is no plain pre-norm ViT of timm ({seen}): a Jumbo token needs all tokens, class and registers "
            "first, in every block"
        )
    if not model.num_prefix_tokens:
        raise UserError(
            f"{title} has no class or register token that could become the Jumbo token; "
            "choose a model that has one, such as those with reg4 in their name"
        )
    if not keep_mlp and not all(isinstance(block, PLAIN_BLOCKS) for block in blocks):
        raise UserError(f"keep_mlp=False: the FFN of a {type(blocks[0]).__name__} cannot be skipped; keep it")
    return int(cast(int, model.num_prefix_tokens))


def _record(model: nn.Module, options: dict[str, Any]) -> None:
    """Note what rebuilds the model; one that `timm.create_model` did not make has no name and cannot be written."""
    cfg: dict[str, Any] | None = getattr(model, "pretrained_cfg", None)
    if not cfg or not is_model(cfg.get("architecture") or ""):
        return
    base = cfg["architecture"]
    tagged = f"{base}.{cfg.get('tag')}"
    base = tagged if _is_tagged(tagged) else base
    update_model_args(model, base=base, **options)
    # Its weights are no longer those that the base model's name stands for.
    own = {**filter_pretrained_cfg(cfg, remove_source=True), "architecture": NAME}
    model.pretrained_cfg = model.default_cfg = own  # type: ignore[assignment]


def _is_tagged(name: str) -> bool:
    try:
        return get_pretrained_cfg(name) is not None
    except RuntimeError:  # timm's answer to a tag that it does not know
        return False


def _base_cfg(base: Any) -> dict[str, Any]:
    """The base model's `pretrained_cfg`, without where its weights are.

    Raises:
        UserError: No such model.
    """
    if not base:
        raise UserError(f'{NAME} needs the name of the model that gets the Jumbo token, such as base="deit3_small_..."')
    if not is_model(base) or base.split(".")[0] == NAME:
        raise UserError(f"{NAME}: base={base!r} is no model of timm{nearest(base, timm.list_models())}")
    found = get_pretrained_cfg(base) or PretrainedCfg()
    cfg: dict[str, Any] = found.to_dict(remove_source=True)
    return cfg | {"architecture": NAME, "custom_load": False}


def _make(options: dict[str, Any], base: str, base_args: dict[str, Any], **kwargs: Any) -> nn.Module:
    return jumboize(timm.create_model(base, **base_args, **kwargs), **options)


def _adapt_checkpoint(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The base model's own filter, which fits positions and patches of another size; then all is accounted for."""
    state = plain_names(state)
    home = sys.modules[cast(Any, model).mixed_from[1].__module__]
    adapt = getattr(home, "checkpoint_filter_fn", None)
    adapted = state if adapt is None else adapt(state, model)
    return account_for(adapted, model.state_dict(), cast(Any, model.pretrained_cfg))


@register_model
def jumboized(
    pretrained: bool = False,
    base: str = "",
    num_jumbo: int | None = None,
    keep_mlp: bool = True,
    jumbo_mlp_ratio: float = 4.0,
    **kwargs: Any,
) -> nn.Module:
    """A model of timm with a Jumbo token: `base` names it, and takes all further arguments.

    `pretrained=True` takes the base model's weights, or those of the folder where the name was `local-dir:FOLDER`.
    """
    cfg = kwargs.pop("pretrained_cfg", None)
    overlay = kwargs.pop("pretrained_cfg_overlay", None)
    cache_dir = kwargs.pop("cache_dir", None)
    base_cfg = _base_cfg(base)
    own_weights = isinstance(cfg, dict | PretrainedCfg) or any((overlay or {}).get(key) for key in SOURCES)
    base_args: dict[str, Any] = {}
    if pretrained and not own_weights:
        base_args = {"pretrained": True, "pretrained_cfg_overlay": overlay, "cache_dir": cache_dir}
    options = {"num_jumbo": num_jumbo, "keep_mlp": keep_mlp, "jumbo_mlp_ratio": jumbo_mlp_ratio}
    out_indices = kwargs.pop("out_indices", 3)
    model: nn.Module = build_model_with_cfg(
        partial(_make, options, base, base_args),
        NAME,
        pretrained and own_weights,
        pretrained_cfg=cfg if isinstance(cfg, dict) else cfg.to_dict() if isinstance(cfg, PretrainedCfg) else base_cfg,
        pretrained_cfg_overlay=overlay,
        pretrained_filter_fn=_adapt_checkpoint,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        cache_dir=cache_dir,
        **kwargs,
    )
    return model
