"""Randomness as a pure function of where a run is.

Every random choice of a run is drawn from a seed made of the user's seed and a position (epoch and picture, or update
and process). No generator state has to be saved: a run that is killed and goes on draws what it would have drawn, with
any number of workers.
"""

import random
import zlib

import numpy as np
import torch


def mix_seed(seed: int, purpose: str, *position: int) -> int:
    """A 32-bit seed from the run's seed, a purpose such as "augment", and a position; equal on every machine."""
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, zlib.crc32(purpose.encode()), *position]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seed the three global generators on the CPU that augmentation draws from."""
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed would seed every device too, which costs a millisecond a picture.
    torch.default_generator.manual_seed(seed)
