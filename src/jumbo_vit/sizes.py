"""The table of sizes: what a name stands for. Free of torch, so that the command line can list it at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """One row of the table.

    Args:
        dim: Width D of a patch token.
        depth: Number of blocks.
        heads: Attention heads.
        num_jumbo: J; the Jumbo token has width J*D.
        img_size: Side of the square input in pixels.
        patch_size: Side of a patch in pixels.
        num_classes: Classes of a freshly made model.
        weight_init: "" for the official 0.02, "xavier" for widths that 0.02 would starve.
        official_top1: ImageNet-1K top-1 in percent at 224 px of the authors' weights (their README), or None.
    """

    dim: int
    depth: int
    heads: int
    num_jumbo: int
    img_size: int = 224
    patch_size: int = 16
    num_classes: int = 1000
    weight_init: str = ""
    official_top1: float | None = None


SIZES = {
    "pico": Size(96, 12, 3, 6, official_top1=69.156),
    "nano": Size(128, 12, 4, 6, official_top1=74.528),
    "tiny": Size(192, 12, 3, 6, official_top1=78.366),
    "small": Size(384, 12, 6, 6, official_top1=82.558),
    "base": Size(768, 12, 12, 3, official_top1=84.954),
    "large": Size(1024, 24, 16, 3),  # the paper names it, the authors' code does not: J as for base
    "micro": Size(64, 6, 2, 6, img_size=32, patch_size=4, num_classes=10, weight_init="xavier"),
    "test": Size(32, 3, 2, 3, img_size=32, patch_size=8, num_classes=10, weight_init="xavier"),
}

REGISTERS = {"cls": 0, "reg16": 16}
"""The baselines' kinds of global tokens: a class token, and the number of registers beside it."""


def model_name(size: str) -> str:
    """The registered name of a size, such as `jumbo_vit_tiny_patch16_224`."""
    if size == "micro":
        return "jumbo_vit_micro"
    row = SIZES[size]
    return f"jumbo_vit_{size}_patch{row.patch_size}_{row.img_size}"


def baseline_name(size: str, kind: str) -> str:
    """The registered name of a baseline, such as `vit_tiny_patch16_reg16_224`."""
    if size == "micro":
        return f"vit_micro_{kind}"
    row = SIZES[size]
    return f"vit_{size}_patch{row.patch_size}_{kind}_{row.img_size}"


MODEL_NAMES = {model_name(size): size for size in SIZES}
BASELINE_NAMES = {baseline_name(size, kind): (size, kind) for size in SIZES for kind in REGISTERS}
