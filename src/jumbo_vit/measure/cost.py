"""Parameters and multiply-accumulates in closed form, so that the table of models needs no torch.

Conventions: a MAC is one multiplication with its addition. Counted are the layers with weights (Linear and
convolution), as the usual counters do, which do not see fused attention; the products of queries with keys and of
weights with values are counted apart, by `attention_macs`. Biases, norms, softmax and activations are not counted.
"""

from dataclasses import dataclass

from jumbo_vit.sizes import REGISTERS, Size

JUMBO = "jumbo"


@dataclass(frozen=True)
class Cost:
    """What one size costs.

    Args:
        parameters: All of them, head included.
        shared_ffn: Those of the Jumbo FFN that all blocks share; 0 for a baseline.
    """

    parameters: int
    shared_ffn: int


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _tokens(size: Size, kind: str) -> int:
    """Number of global tokens of a Jumbo model or a baseline of kind "cls" or "reg16"."""
    return size.num_jumbo if kind == JUMBO else 1 + REGISTERS[kind]


def cost(size: Size, num_classes: int | None = None, in_chans: int = 3, kind: str = JUMBO) -> Cost:
    """Parameters with the registered head: Jumbo and patch mean, or a class token for kind "cls" and "reg16"."""
    dim, wide = size.dim, _tokens(size, kind) * size.dim
    jumbo = kind == JUMBO
    classes = size.num_classes if num_classes is None else num_classes
    shared = (_linear(wide, 4 * wide) + _linear(4 * wide, wide)) * jumbo
    block = _linear(dim, 3 * dim) + _linear(dim, dim) + _linear(dim, 4 * dim) + _linear(4 * dim, dim)
    norms = 2 * (dim + dim + wide * jumbo)
    patches = (size.img_size // size.patch_size) ** 2
    embed = _linear(in_chans * size.patch_size**2, dim) + patches * dim + wide
    head = _linear(wide * jumbo + dim, classes) if classes else 0
    return Cost(size.depth * (block + norms) + shared + embed + 2 * dim + head, shared)


def macs(size: Size, pixels: int, num_classes: int | None = None, in_chans: int = 3, kind: str = JUMBO) -> int:
    """Multiply-accumulates of one picture of `pixels` x `pixels` through the layers with weights, head included."""
    dim, first = size.dim, _tokens(size, kind)
    wide = first * dim if kind == JUMBO else 0
    classes = size.num_classes if num_classes is None else num_classes
    patches = (pixels // size.patch_size) ** 2
    through_ffn = patches if kind == JUMBO else patches + first
    block = (patches + first) * 4 * dim * dim + through_ffn * 8 * dim * dim + 8 * wide * wide
    embed = patches * in_chans * size.patch_size**2 * dim
    return size.depth * block + embed + (wide + dim) * classes


def attention_macs(size: Size, pixels: int, kind: str = JUMBO) -> int:
    """Multiply-accumulates of the attention products themselves, which grow with the square of the tokens."""
    tokens = (pixels // size.patch_size) ** 2 + _tokens(size, kind)
    return size.depth * 2 * tokens * tokens * size.dim
