"""The networks of a masked autoencoder: an encoder that sees some of the patches, and a decoder that fills in the rest.

He et al., "Masked Autoencoders Are Scalable Vision Learners" (arXiv:2111.06377), with the authors' way for the Jumbo
token: the share of masked patches is of the patches alone, every global token (the pieces of the Jumbo token, class
token, registers) is always there, and each is a token of the decoder, without a position. Two readings differ from the
authors' code: masks are drawn for each picture, and the residual of the Jumbo path runs from the vector before its
norm.

Letters: B pictures, P global tokens, N patches on a grid, K of them kept, M = N - K masked, D and W the widths of
encoder and decoder, p the side of a patch, C channels.
"""

import math

import torch
from timm.layers import PatchEmbed, build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.learner import Learner

# 100 * (1 - 0.9) is 9.99... in floating point.
_ROUNDING = 1e-9
# Of masked autoencoders' per-patch normalisation: of patches of one colour the variance is 0.
EPSILON = 1e-6


def kept_patches(patches: int, ratio: float) -> int:
    """How many of `patches` the encoder sees: floor(N (1 - ratio)), but at least one."""
    return max(1, math.floor(patches * (1 - ratio) + _ROUNDING))


def patch_area(encoder: nn.Module) -> int:
    """Pixels of a patch; 1 for a model without patches."""
    size = getattr(getattr(encoder, "patch_embed", None), "patch_size", None) or (1, 1)
    return math.prod(size)


def take(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens (B, L, D) at `places` (B, K): (B, K, D)."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))


def patchify(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Pictures (B, C, H, W) as patches (B, gh*gw, ph*pw*C), row by row, the channels of a pixel together."""
    batch, chans, height, width = images.shape
    rows, columns = grid
    cut = images.reshape(batch, chans, rows, height // rows, columns, width // columns)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)


def unpatchify(patches: Tensor, grid: tuple[int, int], size: tuple[int, int], chans: int) -> Tensor:
    """The pictures (B, C, H, W) that these patches are of."""
    rows, columns = grid
    high, wide = size[0] // rows, size[1] // columns
    cut = patches.reshape(len(patches), rows, columns, high, wide, chans)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), chans, *size)


def statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (.., 1) of each patch (.., p*p*C), as masked autoencoders normalise by."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + EPSILON).sqrt()


class KeepPatches(nn.Module):
    """In the place where timm's ViTs drop patches: keeps the patches named beforehand, and all tokens in front.

    Args:
        prefix: P.

    Attributes:
        kept: Places (B, K) of the patches that stay; None for all.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.kept: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, P+N, D) -> (B, P+K, D)."""
        if self.kept is None:
            return tokens
        first, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        return torch.cat([first, take(patches, self.kept)], dim=1)


class Decoder(nn.Module):
    """Plain blocks over all tokens, which foretell the pixels of the masked patches.

    Args:
        dim: D.
        grid: Rows and columns of patches.
        prefix: P.
        pixels: Numbers in a patch, p*p*C.
        width: W, a multiple of 4 for fixed positions.
        depth: Blocks.
        heads: Attention heads.
        learned: Learned positions in place of fixed sines and cosines.

    Raises:
        UserError: A width that the heads do not divide, or that fixed positions cannot have.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        prefix: int,
        pixels: int,
        width: int,
        depth: int,
        heads: int,
        learned: bool,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UserError(
                f"the decoder's width {width} is not a multiple of its {heads} heads: change --decoder-width or "
                "--decoder-heads"
            )
        self.prefix = prefix
        self.embed = nn.Linear(dim, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, math.prod(grid), width))
        self.blocks = nn.Sequential(*(Block(width, heads, 4.0, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.predict = nn.Linear(width, pixels)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02)
        if learned:
            nn.init.trunc_normal_(self.positions, std=0.02)
        else:
            fix_positions(self.positions, grid, "--decoder-width")

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """The encoder's tokens (B, P+K, D), and the patches' places (B, N), kept ones first, to (B, M, p*p*C)."""
        tokens = self.embed(tokens)
        kept = tokens.shape[1] - self.prefix
        masked = order.shape[1] - kept
        # Attention does not care for the order of its tokens, so the masked ones simply stand behind those that were
        # kept: every token carries the position of its place, and none has to be moved there and back.
        patches = torch.cat([tokens[:, self.prefix :], self.mask_token.expand(len(order), masked, -1)], dim=1)
        patches = patches + take(self.positions.expand(len(order), -1, -1), order)
        tokens = self.blocks(torch.cat([tokens[:, : self.prefix], patches], dim=1))
        pixels: Tensor = self.predict(self.norm(tokens[:, self.prefix + kept :]))
        return pixels


def fix_positions(positions: nn.Parameter, grid: tuple[int, int], width_of: str) -> None:
    """Make `positions` (1, P+N, D) fixed sines and cosines of row and column, zero for what stands in front of patches.

    Raises:
        UserError: D is no multiple of 4.
    """
    width, patches = positions.shape[2], math.prod(grid)
    if width % 4:
        raise UserError(
            f"fixed sine-cosine positions need a width that is a multiple of 4, and {width_of} is {width}: take "
            "--pos-embed learned, or another width"
        )
    with torch.no_grad():
        positions.zero_()
        positions[:, positions.shape[1] - patches :] = build_sincos2d_pos_embed(list(grid), width)
    positions.requires_grad_(False)


class Masked:
    """Pictures and the order (B, N) of their patches, those that are kept first, as one input of a learner."""

    def __init__(self, images: Tensor, order: Tensor) -> None:
        self.images, self.order = images, order

    def to(self, device: torch.device) -> "Masked":
        """Both on another device."""
        return Masked(self.images.to(device), self.order.to(device))

    def __getitem__(self, part: slice) -> "Masked":
        return Masked(self.images[part], self.order[part])


class MaskedLearner(Learner):
    """An encoder with its decoder.

    Args:
        encoder: A plain ViT of timm or of this package; on the CPU.
        preparation: Of its pictures.
        ratio: Share of the patches that is masked, above 0 and below 1.
        width: Of the decoder.
        depth: Of the decoder.
        heads: Of the decoder.
        learned: Learned positions in encoder and decoder; else both are fixed sines and cosines.
        seed: Of the decoder's first weights.

    Attributes:
        grid: Rows and columns of patches.
        kept: K.
        untrained: Names of the encoder's parameters that have no part in this, such as those of its pooling.

    Raises:
        UserError: The model is no plain ViT with positions of its own, drops patches itself, or the decoder is
            impossible.
    """

    def __init__(
        self,
        encoder: nn.Module,
        preparation: Preparation,
        ratio: float,
        width: int,
        depth: int,
        heads: int,
        learned: bool,
        seed: int,
    ) -> None:
        super().__init__(encoder)
        name = type(encoder).__name__
        # A stem of several convolutions mixes neighbours, and would show masked pixels to the patches that are kept.
        if not isinstance(encoder, VisionTransformer) or not isinstance(encoder.patch_embed, PatchEmbed):
            raise UserError(
                f"--method mae takes plain ViTs, whose patches are cut by one convolution, and {name} is none: choose "
                "another --model, such as jumbo_vit_tiny_patch16_224"
            )
        if encoder.pos_embed is None:
            raise UserError(
                f"--method mae needs positions that are added to the patches, and this {name} has none: leave "
                "pos_embed=none out of --model-args"
            )
        if not isinstance(encoder.patch_drop, nn.Identity):
            raise UserError("--method mae masks patches itself: leave patch_drop_rate out of --model-args")
        chans, *size = preparation.input_size
        rows, columns = encoder.patch_embed.grid_size
        self.grid = (int(rows), int(columns))
        self.size = (size[0], size[1])
        prefix = int(encoder.num_prefix_tokens)
        if not learned:
            fix_positions(encoder.pos_embed, self.grid, "the model's")
        self.keep = KeepPatches(prefix)
        encoder.patch_drop = self.keep  # type: ignore[assignment]
        self.ratio, self.kept = ratio, kept_patches(math.prod(self.grid), ratio)
        if self.kept == math.prod(self.grid):
            raise UserError(f"--mask-ratio {ratio:g} masks none of the {self.kept} patches: raise it")
        pixels = math.prod(size) // math.prod(self.grid) * chans
        torch.manual_seed(mix_seed(seed, "decoder"))
        self.decoder = Decoder(int(encoder.embed_dim), self.grid, prefix, pixels, width, depth, heads, learned)
        self.untrained = self._leave_out(torch.zeros(2, chans, *size))

    def _leave_out(self, images: Tensor) -> list[str]:
        """Parameters that a step does not reach, such as those of a pooling, lose their gradient: DDP asks for it."""
        training = self.training
        order = torch.arange(math.prod(self.grid)).expand(2, -1)
        with torch.enable_grad():
            self.eval()(images, order).sum().backward()
        self.train(training)
        found = [name for name, p in self.encoder.named_parameters() if p.grad is None and p.requires_grad]
        for name, parameter in self.encoder.named_parameters():
            if name in found:
                parameter.requires_grad_(False)
        self.zero_grad(set_to_none=True)
        return found

    def no_weight_decay(self) -> set[str]:
        """The encoder's tensors that are exempt from weight decay, and the decoder's token and positions."""
        return super().no_weight_decay() | {"decoder.mask_token", "decoder.positions"}

    def forward(self, images: Tensor | Masked, order: Tensor | None = None) -> Tensor:
        """Pictures (B, C, H, W) to what is foretold of their masked patches, (B, M, p*p*C) in the order of `order`.

        `order` (B, N) names patches by their places, row by row; the first K are kept. Without it masks are drawn.
        """
        pictures, order = (images.images, images.order) if isinstance(images, Masked) else (images, order)
        if order is None:
            order = torch.rand(len(pictures), math.prod(self.grid), device=pictures.device).argsort(1)
        self.keep.kept = order[:, : self.kept]
        try:
            tokens = self.encoder.forward_features(pictures)
        finally:
            self.keep.kept = None
        foretold: Tensor = self.decoder(tokens, order)
        return foretold.clone()  # FSDP2 warns of views, which a linear layer gives of tokens

    def masked(self, order: Tensor) -> Tensor:
        """The places (B, M) of the masked patches."""
        return order[:, self.kept :]


def pixel_targets(images: Tensor, grid: tuple[int, int], places: Tensor, per_patch: bool) -> Tensor:
    """What is to be foretold of the patches at `places` (B, M): their pixels (B, M, p*p*C), in fp32.

    Args:
        images: Prepared pictures (B, C, H, W).
        grid: Rows and columns of patches.
        places: Which patches.
        per_patch: Scale each patch to mean 0 and variance 1.
    """
    patches = take(patchify(images.float(), grid), places)
    if not per_patch:
        return patches
    mean, deviation = statistics(patches)
    return (patches - mean) / deviation
