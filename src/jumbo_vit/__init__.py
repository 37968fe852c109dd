"""jumbo-vit: the Jumbo token for plain transformers.

Importing this package registers the models in timm, so that `timm.create_model("jumbo_vit_tiny_patch16_224")` works.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jumbo_vit.version import __version__

if TYPE_CHECKING:
    from jumbo_vit.block import JumboBlock
    from jumbo_vit.errors import UserError
    from jumbo_vit.fast import optimize
    from jumbo_vit.folder import load
    from jumbo_vit.jumboized import jumboize
    from jumbo_vit.lora import merge_lora
    from jumbo_vit.measure.attention import attention_maps
    from jumbo_vit.measure.norms import token_norms
    from jumbo_vit.predictor import Predictor
    from jumbo_vit.vit import JumboVisionTransformer

__all__ = [
    "JumboBlock",
    "JumboVisionTransformer",
    "Predictor",
    "UserError",
    "__version__",
    "attention_maps",
    "jumboize",
    "load",
    "merge_lora",
    "optimize",
    "token_norms",
]

_HOMES = {
    "JumboBlock": "jumbo_vit.block",
    "JumboVisionTransformer": "jumbo_vit.vit",
    "Predictor": "jumbo_vit.predictor",
    "UserError": "jumbo_vit.errors",
    "attention_maps": "jumbo_vit.measure.attention",
    "jumboize": "jumbo_vit.jumboized",
    "load": "jumbo_vit.folder",
    "merge_lora": "jumbo_vit.lora",
    "optimize": "jumbo_vit.fast",
    "token_norms": "jumbo_vit.measure.norms",
}


def __getattr__(name: str) -> Any:
    # Public names are found on first use, so that the command line's --help needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'jumbo_vit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


# The console script comes in through `jumbo_vit_command`, answers --help without torch, and registers when work starts.
if "jumbo_vit_command" not in sys.modules:
    importlib.import_module("jumbo_vit.registry")
