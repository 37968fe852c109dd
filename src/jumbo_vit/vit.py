"""The Jumbo vision transformer as a timm model.

What is unusual: the Jumbo tokens are timm's register tokens. All that timm does with prefix tokens (positions on
patches only, resampling, patch dropout, feature maps, pruning) then holds without a line of ours; only initialisation,
pooling, the head and the shared FFN are overridden.
"""

import copy
from typing import Any, Literal, cast

from timm.layers import get_act_layer
from torch import Tensor, nn

from jumbo_vit.block import JumboBlock, OwnsJumboMlp, jumbo_mlp
from jumbo_vit.errors import UserError
from jumbo_vit.trunk import PaperVisionTransformer, check_size

__all__ = ["JumboVisionTransformer", "check_size"]


class JumboVisionTransformer(OwnsJumboMlp, PaperVisionTransformer):
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
        lora_form: "whole": around the whole FFN. "matrices": around each of its two matrices, so that
            `jumbo_vit.merge_lora` can merge them.
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

    pools = ("jumbo_avg", "jumbo", "avg", "max", "avgmax", "map", "")
    global_tokens = "the Jumbo token"

    def __init__(
        self,
        num_jumbo: int = 6,
        share_jumbo_mlp: bool = True,
        jumbo_mlp_ratio: float = 4.0,
        lora_rank: int = 0,
        lora_form: Literal["whole", "matrices"] = "whole",
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
        if kwargs.pop("class_token", False):
            raise UserError(
                "class_token=True does not fit: the Jumbo token takes its place (reg_tokens adds registers)"
            )

        if reg_tokens < 0:
            raise UserError(f"reg_tokens is {reg_tokens}, but must be 0 or more")

        def make_block(**block: Any) -> JumboBlock:
            return JumboBlock(
                num_jumbo=num_jumbo,
                share_jumbo_mlp=share_jumbo_mlp,
                jumbo_mlp_ratio=jumbo_mlp_ratio,
                lora_rank=lora_rank,
                lora_form=lora_form,
                **block,
            )

        super().__init__(
            num_global=num_jumbo,
            make_block=make_block,
            class_token=False,
            reg_tokens=num_jumbo + reg_tokens,
            global_pool=global_pool,
            drop_path_schedule=drop_path_schedule,
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            num_heads=num_heads,
            drop_path_rate=drop_path_rate,
            **kwargs,
        )
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.num_jumbo = num_jumbo
        act = get_act_layer(kwargs.get("act_layer")) or nn.GELU
        shared = share_jumbo_mlp and jumbo_mlp_ratio > 0
        self.jumbo_mlp = jumbo_mlp(embed_dim, num_jumbo, jumbo_mlp_ratio, act, **factory) if shared else None
        self.finish(weight_init, **factory)
        self.register_load_state_dict_pre_hook(_take_official_names)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> "JumboVisionTransformer":
        """What torch.jit.script compiles, since it sees only what is registered: a twin whose blocks own the FFN.

        The twin shares all parameters with this model, which stays as it is.
        """
        if self.jumbo_mlp is None:
            return self
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        twin._modules["blocks"] = nn.Sequential(*(cast(JumboBlock, block).owning_ffn() for block in self.blocks))
        return twin

    @classmethod
    def _check_pool(cls, name: str, class_token: bool, fc_norm: bool) -> None:
        if name == "token":
            raise UserError("global_pool='token' needs a class token; a Jumbo model has global_pool='jumbo' instead")
        super()._check_pool(name, class_token, fc_norm)


def _take_official_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Load hook: accept the authors' parameter names, and drop their class token, which nothing reads."""
    if f"{prefix}jumbo_token" in state:
        state[f"{prefix}reg_token"] = state.pop(f"{prefix}jumbo_token")
        state.pop(f"{prefix}cls_token", None)
