"""What a pre-training run trains: an encoder with the further modules of its method around it, as one module."""

from collections.abc import Callable
from typing import Any

from timm.models import group_parameters
from timm.optim import auto_group_layers
from torch import Tensor, nn

ENCODER = "encoder."
"""How the names of the encoder's tensors begin in a learner's state."""


class Learner(nn.Module):
    """An encoder and what a method adds, trained, averaged, sharded and kept together.

    A subclass adds its modules and a `forward` that gives whatever its objective reads.

    Args:
        encoder: A timm model; what it says of weight decay and layers holds here too.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder: Any = encoder

    @property
    def blocks(self) -> Any:
        """The encoder's blocks, which FSDP2 shards one by one; none in models of another kind."""
        return getattr(self.encoder, "blocks", [])

    def no_weight_decay(self) -> set[str]:
        """The encoder's tensors that are exempt from weight decay."""
        own = self.encoder.no_weight_decay() if hasattr(self.encoder, "no_weight_decay") else set()
        return {f"{ENCODER}{name}" for name in own}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of a parameter by its name, for layer decay: the encoder's own, the further modules on top."""
        if hasattr(self.encoder, "group_matcher"):
            layers = group_parameters(self.encoder, self.encoder.group_matcher(coarse=coarse), reverse=True)
        else:
            layers = auto_group_layers(self.encoder)
        top = max(layers.values()) + 1
        return lambda name: layers.get(name.removeprefix(ENCODER), top) if name.startswith(ENCODER) else top


def encoder_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a learner's weights the encoder's, under its own names."""
    return {name.removeprefix(ENCODER): value for name, value in weights.items() if name.startswith(ENCODER)}
