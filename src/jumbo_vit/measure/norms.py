"""How long patch tokens become: high norms mark patches that a ViT uses as scratch space.

The paper compares the range of token norms of registers and Jumbo (Fig. 5) without giving the definition; taken here is
the L2 norm of patch tokens after each block and before the final norm, so the last row is what a figure would show.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.measure.mode import as_input, looked_at

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenNorms:
    """L2 norms of patch tokens, a row for each block.

    Args:
        tokens: Number of patch tokens behind each row.
        edges: (bins + 1) edges of the histogram, the same for all layers, from 0 to the largest norm.
        counts: (layers, bins) tokens in each bin.
        maximum: (layers) the largest norm.
        median: (layers) the median.
        p999: (layers) the 99.9th percentile.
    """

    tokens: int
    edges: Floats
    counts: npt.NDArray[np.int64]
    maximum: Floats
    median: Floats
    p999: Floats

    @property
    def max_over_median(self) -> Floats:
        """(layers) how far the largest stands out."""
        return self.maximum / self.median


def token_norms(model: nn.Module, loader_or_batch: Tensor | Iterable[Any], bins: int = 100) -> TokenNorms:
    """Measure the norms of patch tokens after every block; the model's mode and logits are as before.

    All norms are held until the end (4 bytes for each patch and layer), for exact percentiles.

    Args:
        model: Any timm ViT, Jumbo or not.
        loader_or_batch: Prepared pictures (B, C, H, W), or an iterable of such batches, or of tuples that begin so.
        bins: Bins of the histogram.

    Raises:
        UserError: No picture came, norms are not finite, or the model does not hand out its blocks' outputs.
    """
    batches = [loader_or_batch] if isinstance(loader_or_batch, Tensor) else loader_or_batch
    rows: list[list[npt.NDArray[np.float32]]] = []
    with looked_at(model) as plain:
        if not hasattr(plain, "forward_intermediates"):
            raise UserError(f"{type(plain).__name__} does not hand out what its blocks give (forward_intermediates)")
        for batch in batches:
            images = as_input(plain, batch if isinstance(batch, Tensor) else batch[0])
            rows.append([layer.flatten().cpu().numpy() for layer in _batch_norms(plain, images)])
    if bins < 1:
        raise UserError(f"bins is {bins}, but must be at least 1")
    if not sum(row[0].size for row in rows):
        raise UserError("no pictures came, so there are no norms")
    table = np.stack([np.concatenate(layer) for layer in zip(*rows, strict=True)])
    if not np.isfinite(table).all():
        layer = int(np.flatnonzero(~np.isfinite(table).all(axis=1))[0])
        raise UserError(f"token norms after block {layer} are not finite: the weights or pictures hold NaN or infinity")
    edges = np.linspace(0.0, float(table.max()), bins + 1)
    counts = np.stack([np.histogram(layer, edges)[0] for layer in table])
    median, p999 = np.percentile(table.astype(np.float64), (50, 99.9), axis=1)
    return TokenNorms(table.shape[1], edges, counts, table.max(axis=1).astype(np.float64), median, p999)


def _batch_norms(model: Any, images: Tensor) -> list[Tensor]:
    """For each block the norms (B, N) of its patch tokens in float32."""
    layers = model.forward_intermediates(images, norm=False, output_fmt="NLC", intermediates_only=True)
    return [torch.linalg.vector_norm(patches.float(), dim=-1) for patches in layers]
