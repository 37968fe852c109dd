"""Stored outputs of the authors' code (antofuller/jumbo, commit 4c73fc2), and the rule that made its weights.

The arrays were computed in float64 and stored as float32. Only names and shapes of the published checkpoints are kept:
the values follow from the rule.
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FOLDER = Path(__file__).parent / "data" / "golden"
OFFICIAL_SIZES = ("pico", "nano", "tiny", "small", "base")


def official_shapes(size: str) -> dict[str, list[int]]:
    """Names and shapes in the published file of a size."""
    shapes: dict[str, list[int]] = json.loads((FOLDER / "official_checkpoint_keys.json").read_text())[size]
    return shapes


def golden_weights(size: str) -> dict[str, Tensor]:
    """The state dict, under the authors' names, with which the stored outputs were made."""
    return {name: torch.from_numpy(_golden_value(name, shape)) for name, shape in official_shapes(size).items()}


def random_weights(size: str) -> dict[str, Tensor]:
    """Cheap tame values under the authors' names, for sizes without stored outputs."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.empty(shape).uniform_(-0.05, 0.05, generator=draw) + (1.0 if _is_norm_weight(name, shape) else 0.0)
        for name, shape in official_shapes(size).items()
    }


def golden_input(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


def golden_outputs(size: str) -> dict[str, NDArray[np.float32]]:
    with np.load(FOLDER / f"jumbo_{size}.npz") as file:
        return dict(file)


def _is_norm_weight(name: str, shape: list[int]) -> bool:
    return len(shape) == 1 and name.endswith("weight")


def _golden_value(name: str, shape: list[int]) -> NDArray[np.float32]:
    z = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF).standard_normal(shape)
    if name in ("pos_embed", "cls_token", "jumbo_token"):
        z = 0.5 * z
    elif len(shape) >= 2:
        z = z / math.sqrt(math.prod(shape[1:]))
    elif _is_norm_weight(name, shape):
        z = 1 + 0.1 * z
    else:
        z = 0.1 * z
    return z.astype(np.float32)
