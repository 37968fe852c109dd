"""The size of each update in a run at several sizes: a function of the seed and the update's number.

A size is whatever the run's pictures are made to: (height, width), or a length of sequence.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from jumbo_vit.seeds import mix_seed


@dataclass(frozen=True)
class SizeSchedule:
    """Which of several sizes an update has, the same for all its forward passes and processes.

    Args:
        sizes: In rising order, each once.
        kind: "mixed" draws each update's size, all alike; "progressive" goes through them in equal parts of the run; of
            more sizes than updates it takes as many as there are updates, the largest last.
        seed: The run's seed.
        epochs: Passes of the whole run.
    """

    sizes: tuple[Hashable, ...]
    kind: Literal["mixed", "progressive"]
    seed: int
    epochs: int

    def at(self, epoch: int, update: int, updates: int) -> Hashable:
        """The size of update `update` of an epoch of `updates`."""
        if self.kind == "mixed":
            return self.sizes[mix_seed(self.seed, "size", epoch, update) % len(self.sizes)]
        number, total, sizes = epoch * updates + update, self.epochs * updates, len(self.sizes)
        if total < sizes:
            return self.sizes[number * (sizes - 1) // (total - 1) if total > 1 else -1]
        return self.sizes[number * sizes // total]
