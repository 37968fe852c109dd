"""What a masked autoencoder makes of pictures: original, masked and reconstructed, side by side.

Encoder and decoder are those of a run's checkpoint, so a model folder, which is the encoder alone, is refused. A run
with `norm_pix_loss` foretells each patch scaled to mean 0 and variance 1; to be shown, it is scaled back by the mean
and the standard deviation of the true patch, which the decoder does not know. Its picture therefore has the right
brightness in every patch, however little was learned: only what is inside the patches is the decoder's.

Letters: B pictures, N patches on a grid, K of them kept, M = N - K masked, p the side of a patch, C channels.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from jumbo_vit.data.images import Skipped, read_image
from jumbo_vit.data.inputs import Entry, expand_inputs
from jumbo_vit.data.pipeline import EVAL_BATCH, Preparation
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.mae import random_order
from jumbo_vit.tasks.masked import kept_patches, patchify, statistics, take, unpatchify
from jumbo_vit.tasks.masked_run import Trained, open_trained

TITLES = ("original", "masked", "reconstructed")
GREY = 0.5
"""Of masked patches in the middle, of values in 0..1."""
_LEAST = 160  # pixels of a panel's longer side; smaller pictures are enlarged by a whole factor
_GAP, _STRIP, _TEXT = 8, 22, 13


@dataclass(frozen=True)
class Reconstruction:
    """One picture as the model sees it, resized and cropped.

    Args:
        path: Its name, as `predict` gives it.
        original: (C, H, W), values in 0..1.
        masked: The same, masked patches grey.
        reconstructed: The same, masked patches as foretold, cut to 0..1.
        masked_error: Squared error on the masked pixels over their squared distance from their mean, which is taken for
            each channel of this picture: 0 for all right, 1 for the mean. NaN where all masked pixels are the same.
        mse: Mean squared error on the masked pixels, in units of the prepared (normalised) ones.
    """

    path: str
    original: Tensor
    masked: Tensor
    reconstructed: Tensor
    masked_error: float
    mse: float


@dataclass(frozen=True)
class Reconstructions:
    """What `reconstruct` gives.

    Args:
        pictures: In the order of the input.
        unreadable: Pictures that could not be shown, and why.
        skipped: Files in folders that are no pictures.
        left_out: Pictures beyond the limit, which were not looked at.
        ratio: Share of the patches that is masked.
        patches: N.
        kept: K.
        origin: Which weights were used, as in `Trained`.
        notes: What else is to be said.
    """

    pictures: list[Reconstruction]
    unreadable: list[Skipped]
    skipped: list[Skipped]
    left_out: int
    ratio: float
    patches: int
    kept: int
    origin: dict[str, Any]
    notes: list[str]


def reconstruct(
    run: str | Path,
    images: Any,
    mask_ratio: float | None = None,
    seed: int = 0,
    averaged: bool = False,
    most: int = 16,
    device: str = "auto",
) -> Reconstructions:
    """Mask pictures and fill them in by the encoder and the decoder of a run of `pretrain --method mae`.

    Pictures are prepared as in evaluation. A mask depends on `seed` and the picture's position in the input alone.
    Where the run's targets were normalised in each patch, patches are scaled back by the true patch's own mean and
    standard deviation.

    Args:
        run: The run's folder, or one of its .ckpt files.
        images: Files, folders, PIL images or arrays, or a list of them, as for `predict`.
        mask_ratio: Share of the patches to mask, above 0 and below 1; None for the run's own.
        seed: Of the masks.
        averaged: Take the averaged weights in place of the plain ones; both are the last, not the best.
        most: Take so many pictures and leave the others out; at least 1.
        device: "auto", "cpu", "cuda" or "mps".

    Raises:
        UserError: No such run, one of another kind, an encoder alone, a damaged checkpoint, a number outside its range,
            or no picture that can be read.
    """
    if mask_ratio is not None and not 0 < mask_ratio < 1:  # NaN is in no range
        raise UserError(f"--mask-ratio is {mask_ratio}, but must be above 0 and below 1")
    if most < 1:
        raise UserError(f"--max-images is {most}, but must be at least 1")
    entries, skipped = expand_inputs(images)
    trained = open_trained(run, averaged, device)
    learner = trained.learner
    ratio, patches = learner.ratio if mask_ratio is None else mask_ratio, math.prod(learner.grid)
    learner.kept = kept_patches(patches, ratio)
    if learner.kept == patches:
        raise UserError(f"--mask-ratio {ratio:g} masks none of the {patches} patches: raise it")
    chosen, unreadable, left_out = _prepared(entries, trained.preparation, most)
    rows: list[Reconstruction] = []
    for start in range(0, len(chosen), EVAL_BATCH):
        part = chosen[start : start + EVAL_BATCH]
        order = torch.stack([random_order(patches, mix_seed(seed, "shown mask", place)) for place, _, _ in part])
        batch = torch.stack([image for _, _, image in part])
        for (_, name, image), filled, own in zip(part, _fill(trained, batch, order), order, strict=True):
            if filled.isfinite().all():
                rows.append(_compare(name, image, filled, own[learner.kept :], trained))
            else:
                unreadable.append(Skipped(name, "the decoder's output is not finite"))
    if not rows:
        first = unreadable[0]
        count = len(unreadable)
        raise UserError(f"none of the {count} pictures could be reconstructed, such as {first.path}: {first.reason}")
    return Reconstructions(
        rows, unreadable, skipped, left_out, ratio, patches, learner.kept, trained.origin, trained.notes
    )


def _prepared(
    entries: list[Entry], preparation: Preparation, most: int
) -> tuple[list[tuple[int, str, Tensor]], list[Skipped], int]:
    """Position, name and input of the first `most` pictures that can be read; those that cannot; how many are left."""
    transform = preparation.evaluation()
    chosen: list[tuple[int, str, Tensor]] = []
    unreadable: list[Skipped] = []
    for place, entry in enumerate(entries):
        if len(chosen) == most:
            return chosen, unreadable, len(entries) - place
        try:
            chosen.append((place, entry.name, transform(read_image(entry.source, preparation.in_chans))))
        except UnreadableImage as error:
            unreadable.append(Skipped(entry.name, error.reason))
    return chosen, unreadable, 0


def _fill(trained: Trained, images: Tensor, order: Tensor) -> Tensor:
    """Prepared pictures (B, C, H, W) on the CPU, in which masked patches are as the decoder foretells them."""
    learner = trained.learner
    device = learner.decoder.mask_token.device
    with torch.inference_mode():
        foretold = learner(images.to(device), order.to(device)).float().cpu()
    return fill_in(images, foretold, learner.masked(order), learner.grid, trained.per_patch)


def fill_in(images: Tensor, foretold: Tensor, places: Tensor, grid: tuple[int, int], per_patch: bool) -> Tensor:
    """Prepared pictures (B, C, H, W) with the patches at `places` (B, M) replaced by those foretold, (B, M, p*p*C).

    With `per_patch` what was foretold is scaled to mean 0 and variance 1 in each patch, and is given the mean and
    standard deviation of the true patch.
    """
    patches = patchify(images.float(), grid)
    if per_patch:
        mean, deviation = statistics(take(patches, places))
        foretold = foretold * deviation + mean
    filled = patches.scatter(1, places[:, :, None].expand_as(foretold), foretold)
    return unpatchify(filled, grid, (images.shape[2], images.shape[3]), images.shape[1])


def _compare(name: str, image: Tensor, filled: Tensor, places: Tensor, trained: Trained) -> Reconstruction:
    grid, chans = trained.learner.grid, len(image)
    # The channels of a pixel stand together in a patch.
    true, foretold = (
        take(patchify(one[None], grid), places[None]).reshape(-1, chans).double() for one in (image, filled)
    )
    squares, spread = (foretold - true).square(), (true - true.mean(0)).square().sum()
    # A mean is rounded, so the spread of one and the same value need not be 0.
    alike = bool((true == true[0]).all())
    shown = _to_values(image, trained.preparation)
    hidden = torch.full((1, len(places), image.numel() // math.prod(grid)), GREY)
    return Reconstruction(
        name,
        shown,
        fill_in(shown[None], hidden, places[None], grid, per_patch=False)[0],
        _to_values(filled, trained.preparation),
        math.nan if alike else float(squares.sum() / spread),
        float(squares.mean()),
    )


def _to_values(image: Tensor, preparation: Preparation) -> Tensor:
    """A prepared picture (C, H, W) in 0..1."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preparation.mean, preparation.std))
    return (image * std + mean).clamp(0, 1)


def sheet(pictures: list[Reconstruction]) -> Image.Image:
    """One row a picture: original, masked, reconstructed; small ones enlarged by a whole factor, without smoothing.

    Raises:
        UserError: It would have more pixels than Pillow opens.
    """
    high, wide = pictures[0].original.shape[1:]
    zoom = max(1, math.ceil(_LEAST / max(high, wide)))
    high, wide = high * zoom, wide * zoom
    font = ImageFont.load_default(_TEXT)
    cell = max(wide, *(math.ceil(font.getlength(title)) for title in TITLES)) + _GAP
    size = (_GAP + cell * len(TITLES), _STRIP + (high + _GAP) * len(pictures))
    if Image.MAX_IMAGE_PIXELS is not None and math.prod(size) > Image.MAX_IMAGE_PIXELS:
        raise UserError(f"a sheet of {len(pictures)} pictures would be {size[0]}x{size[1]} pixels: lower --max-images")
    page = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(page)
    for column, title in enumerate(TITLES):
        middle = _GAP + column * cell + (cell - _GAP) / 2
        pen.text((middle, _STRIP / 2), title, fill="black", font=font, anchor="mm")
        for row, picture in enumerate(pictures):
            panel = _panel((picture.original, picture.masked, picture.reconstructed)[column]).resize(
                (wide, high), Image.Resampling.NEAREST
            )
            page.paste(panel, (round(middle - wide / 2), _STRIP + row * (high + _GAP)))
    return page


def sheet_bytes(pictures: list[Reconstruction]) -> bytes:
    """`sheet` as a PNG file; raises as that does."""
    buffer = io.BytesIO()
    sheet(pictures).save(buffer, format="PNG")
    return buffer.getvalue()


def _panel(image: Tensor) -> Image.Image:
    colours = image.expand(3, -1, -1).permute(1, 2, 0)
    return Image.fromarray((colours * 255).round().byte().numpy())
