"""The order in which a run sees its samples: a function of seed and epoch, cut for processes and accumulation.

One update takes `batch_size * world * accumulate` samples of a shuffled epoch. The last update of an epoch takes what
is left, and each of its samples still counts once: the loop scales by the true size.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jumbo_vit.data.balance import balanced_order, occurrences
from jumbo_vit.data.sizes import SizeSchedule
from jumbo_vit.seeds import mix_seed


class Draw(NamedTuple):
    """One sample to load: `real` is False for a filler, which keeps a process without a share in step.

    `again` counts the draws of the same sample before this one in the epoch, in all processes. `size` is what the
    picture is made to, None for the one size of the run.
    """

    epoch: int
    sample: int
    real: bool = True
    again: int = 0
    size: Hashable = None

    @property
    def position(self) -> tuple[int, ...]:
        """What makes the draw's randomness its own: a sample that comes again is augmented in another way."""
        return (self.epoch, self.sample, self.again) if self.again else (self.epoch, self.sample)


class EpochBatches:
    """A batch sampler for `torch.utils.data.DataLoader` with a position: `epoch`, and `start` in updates.

    Args:
        size: Samples in the training set.
        batch_size: Samples in one forward pass of one process.
        seed: The run's seed.
        rank: This process.
        world: Number of processes.
        accumulate: Forward passes per update.
        shuffle: False keeps the set's own order (tests).
        classes: The class of each sample, to draw every class equally often (`balanced_order`); None takes every sample
            once.
        repeats: Draws of each picture in an epoch, which then sees so many times fewer pictures (of the last, what is
            left); they come one after the other, as in timm's RepeatAugSampler.
        sizes: The size of each update, or None.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        shuffle: bool = True,
        classes: Sequence[int] | None = None,
        repeats: int = 1,
        sizes: SizeSchedule | None = None,
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world, self.accumulate, self.shuffle = rank, world, accumulate, shuffle
        self.classes, self.repeats, self.sizes = classes, repeats, sizes
        self.epoch = 0
        self.start = 0

    @property
    def samples_per_update(self) -> int:
        """Samples over all processes and forward passes of a full update."""
        return self.batch_size * self.world * self.accumulate

    @property
    def updates(self) -> int:
        """Updates in one epoch, the last of which may be smaller."""
        return -(-self.size // self.samples_per_update)

    def update_size(self, update: int) -> int:
        """Samples over all processes in update `update` of the epoch."""
        return min(self.samples_per_update, self.size - update * self.samples_per_update)

    def passes(self, update: int) -> int:
        """Forward passes of each process in update `update` of the epoch."""
        return -(-self.update_size(update) // (self.batch_size * self.world))

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's samples (size,), equal in every process: a permutation, the beginning of one with each sample
        repeated, or draws balanced over the classes."""
        rng = np.random.default_rng(mix_seed(self.seed, "order", epoch))
        if self.shuffle and self.classes is not None:
            return balanced_order(self.classes, rng)
        order = rng.permutation(self.size) if self.shuffle else np.arange(self.size)
        return np.repeat(order[: -(-self.size // self.repeats)], self.repeats)[: self.size]

    def size_of(self, update: int) -> Hashable:
        """What the pictures of update `update` of the epoch are made to; None for the one size of the run."""
        return None if self.sizes is None else self.sizes.at(self.epoch, update, self.updates)

    def __iter__(self) -> Iterator[list[Draw]]:
        order = self.order(self.epoch)
        again = occurrences(order)
        for update in range(self.start, self.updates):
            first = update * self.samples_per_update
            members = np.arange(first, first + self.update_size(update))
            size = self.size_of(update)
            for pass_ in range(self.passes(update)):
                chunk = members[pass_ * self.batch_size * self.world :][: self.batch_size * self.world]
                share = np.array_split(chunk, self.world)[self.rank]
                draws = [Draw(self.epoch, int(order[place]), again=int(again[place]), size=size) for place in share]
                yield draws or [Draw(self.epoch, int(order[0]), real=False, size=size)]

    def __len__(self) -> int:
        return sum(self.passes(update) for update in range(self.start, self.updates))
