"""What Jumbo and its baselines have in common, so that a comparison measures the global token and nothing else.

Start of weights, sizes, drop path, pooling over global tokens, head, parameter groups: all arms take them from here.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers import trunc_normal_
from timm.models._input import update_model_args
from timm.models._manipulate import named_apply
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit, global_pool_nlc
from torch import Tensor, nn
from torch.optim import Optimizer

from jumbo_vit.block import OFFICIAL_NORM, LowRankBypass, split_tokens
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.feedforward import FeedForward

INITS = ("", "xavier", "jax", "jax_nlhb", "moco", "reset", "skip")
SCHEDULES = ("constant", "linear")


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


class PaperVisionTransformer(VisionTransformer):
    """timm's plain ViT as the paper uses it; the Jumbo model and the baselines say only which global tokens there are.

    The first `num_global` tokens of the sequence are the global tokens that a wide pool concatenates; none has a
    position. A subclass names its pools, makes its block, and calls `finish` when all its parts are there.

    Args:
        num_global: Number of tokens in front that `pools[:2]` concatenate.
        make_block: Makes one block from timm's block arguments.
        drop_path_schedule: "constant" over depth as in DeiT-III and the official code, or timm's "linear".
        global_pool: One of `pools`.
        **kwargs: All other arguments of timm's VisionTransformer.

    Raises:
        UserError: A size that the patches do not tile, an unknown pool or schedule, or heads that do not divide D.
    """

    pools: ClassVar[tuple[str, ...]]
    """What the head can read. The first two are the wide ones: global tokens and patch mean, global tokens alone."""
    global_tokens: ClassVar[str]
    """What messages call the global tokens."""

    def __init__(
        self,
        *,
        num_global: int,
        make_block: Callable[..., nn.Module],
        class_token: bool,
        reg_tokens: int,
        global_pool: str,
        drop_path_schedule: str,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        embed_dim: int,
        num_heads: int,
        drop_path_rate: float,
        **kwargs: Any,
    ) -> None:
        self._check_pool(global_pool, class_token, bool(kwargs.get("fc_norm")))
        check_size(img_size, patch_size)
        if embed_dim % num_heads:
            raise UserError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
        if not kwargs.pop("no_embed_class", True):
            raise UserError(f"no_embed_class=False does not fit: {self.global_tokens} has no position")
        if drop_path_schedule not in SCHEDULES:
            raise UserError(f"drop_path_schedule={drop_path_schedule!r} is unknown; use 'constant' or 'linear'")
        kwargs["norm_layer"] = kwargs.get("norm_layer") or OFFICIAL_NORM
        kwargs.setdefault("fc_norm", False)
        kwargs["mlp_layer"] = kwargs.get("mlp_layer") or FeedForward

        def scheduled_block(drop_path: float, **block: Any) -> nn.Module:
            return make_block(drop_path=drop_path_rate if drop_path_schedule == "constant" else drop_path, **block)

        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            num_heads=num_heads,
            drop_path_rate=drop_path_rate,
            global_pool="map" if global_pool == "map" else "",
            class_token=class_token,
            reg_tokens=reg_tokens,
            no_embed_class=True,
            block_fn=scheduled_block,  # type: ignore[arg-type]
            weight_init="skip",
            **kwargs,
        )
        self.num_global = num_global
        self.global_pool = global_pool  # type: ignore[assignment]
        self.wide_pool, self.wide_pool_alone = self.pools[:2]

    def finish(self, weight_init: str, device: Any = None, dtype: Any = None) -> None:
        """The last step of a subclass' construction: head and first weights."""
        self._make_head(device, dtype)
        self.weight_init_mode = weight_init  # type: ignore[assignment]
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights; `mode` as the argument `weight_init`, default the one given at construction."""
        init_as_paper(self, mode or self.weight_init_mode, needs_reset)
        if self.fix_init:
            self.fix_init_weight()

    def set_input_size(self, img_size: Any = None, patch_size: Any = None, optimizer: Optimizer | None = None) -> None:
        """Take pictures of another size (H, W) or patches of another size; positions and projection are resampled.

        The Parameter objects stay the same, so an optimiser that holds them goes on training them. Those that change
        lose their gradient; what the optimiser has gathered on them (momentum and the like) no longer fits either, so
        hand it over if it has taken a step, and it starts afresh on these.

        Raises:
            UserError: A size that the patches do not tile; timm would silently leave out the rest of the picture.
        """
        embed, positions, projection = self.patch_embed, self.pos_embed, self.patch_embed.proj
        check_size(
            embed.img_size if img_size is None else img_size, embed.patch_size if patch_size is None else patch_size
        )
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        if positions is not None and self.pos_embed is not None and self.pos_embed is not positions:
            self.pos_embed = _refill(positions, self.pos_embed, optimizer)
        if embed.proj is not projection:
            new, embed.proj = embed.proj, projection
            projection.kernel_size, projection.stride = new.kernel_size, new.stride
            _refill(projection.weight, new.weight, optimizer)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a sequence (B, L, D) into global tokens (B, J, D), extra registers (B, R, D) and patches (B, N, D)."""
        first, rest = split_tokens(tokens, self.num_global)
        registers, patches = split_tokens(rest, self.num_prefix_tokens - self.num_global)
        return first, registers, patches

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Pool normed tokens (B, L, D) to what the head reads, (B, head_hidden_size), or (B, L, D) for pool ''."""
        if self.attn_pool is not None:
            attended: Tensor = self.attn_pool(x if self.pool_include_prefix else x[:, self.num_prefix_tokens :])
            return attended
        kind = self.global_pool if pool_type is None else pool_type
        if kind == self.wide_pool or kind == self.wide_pool_alone:  # noqa: PLR1714  (`in` is beyond torch.jit.script)
            first, _, patches = self.split(x)
            wide = first.flatten(1)
            return torch.cat([wide, patches.mean(dim=1)], dim=-1) if kind == self.wide_pool else wide
        pooled: Tensor = global_pool_nlc(x, kind, self.num_prefix_tokens, self.pool_include_prefix)
        return pooled

    def _make_head(self, device: Any, dtype: Any) -> None:
        tokens = {self.pools[0]: self.num_global + 1, self.pools[1]: self.num_global}.get(self.global_pool, 1)
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
            fc_norm = not isinstance(self.fc_norm, nn.Identity)
            self._check_pool(global_pool, self.has_class_token, fc_norm)
            if global_pool in self.pools[:2] and not self.num_global:
                raise UserError(f"global_pool={global_pool!r} needs a global token, and this model has none")
            if global_pool == "map" and self.attn_pool is None:
                raise UserError("global_pool='map' needs attention pooling, which is only made at construction")
            if global_pool != "map":
                self.attn_pool = None  # type: ignore[assignment]
            self.global_pool = global_pool  # type: ignore[assignment]
            update_model_args(self, global_pool=global_pool, fc_norm=fc_norm)
        weight = self.patch_embed.proj.weight
        self.num_classes = num_classes
        self._make_head(weight.device, weight.dtype)
        init_head(self.head, num_classes)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's parameter groups by depth; the shared FFN, which serves all depths, goes with the final norm."""
        return {
            "stem": r"^cls_token|^reg_token|^pos_embed|^patch_embed|^norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^jumbo_mlp|^attn_pool", (99999,))],
        }

    @classmethod
    def _check_pool(cls, name: str, class_token: bool, fc_norm: bool) -> None:
        wide = cls.pools[:2]
        if name == "token" and not class_token:
            raise UserError(
                f"global_pool='token' needs a class token; {cls.__name__} without one has {wide[1]!r} or 'avg'"
            )
        if name not in cls.pools:
            known = ", ".join(map(repr, cls.pools))
            raise UserError(f"global_pool={name!r} is unknown; use one of {known}{nearest(name, cls.pools)}")
        if fc_norm and name in wide:
            raise UserError(f"fc_norm=True norms one token after pooling; global_pool={name!r} concatenates several")


def _refill(old: nn.Parameter, new: nn.Parameter, optimizer: Optimizer | None) -> nn.Parameter:
    """Put the values of `new` into the object `old`, whatever their shape."""
    old.data, old.grad = new.data, None
    if optimizer is not None:
        optimizer.state.pop(old, None)
    return old
