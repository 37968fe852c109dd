"""The order of an epoch: every sample once over all processes and passes, and going on from anywhere."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.sampler import Draw, EpochBatches

shapes = {
    "size": st.integers(1, 90),
    "batch": st.integers(1, 17),
    "world": st.integers(1, 5),
    "accumulate": st.integers(1, 4),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 5),
}


def ranks(
    size: int, batch: int, world: int, accumulate: int, seed: int, epoch: int, start: int = 0
) -> list[list[list[Draw]]]:
    """By process, its forward passes."""
    result = []
    for rank in range(world):
        batches = EpochBatches(size, batch, seed, rank, world, accumulate)
        batches.epoch, batches.start = epoch, start
        passes = list(batches)
        assert len(passes) == len(batches)
        result.append(passes)
    return result


@given(**shapes)
@settings(max_examples=80)
def test_every_sample_comes_once(size: int, batch: int, world: int, accumulate: int, seed: int, epoch: int) -> None:
    passes = ranks(size, batch, world, accumulate, seed, epoch)
    real = Counter(draw.sample for rank in passes for one in rank for draw in one if draw.real)
    assert real == Counter(range(size))
    assert all(draw.epoch == epoch for rank in passes for one in rank for draw in one)
    # All processes make equally many passes, none of them empty or too large.
    assert len({len(rank) for rank in passes}) == 1
    assert all(1 <= len(one) <= batch for rank in passes for one in rank)


@given(**shapes)
@settings(max_examples=80)
def test_fillers_stand_only_where_a_process_has_no_share(
    size: int, batch: int, world: int, accumulate: int, seed: int, epoch: int
) -> None:
    for together in zip(*ranks(size, batch, world, accumulate, seed, epoch), strict=True):
        samples = sum(draw.real for one in together for draw in one)
        for one in together:
            assert len(one) == 1 or all(draw.real for draw in one)
        idle = sum(not one[0].real for one in together)
        assert idle == max(0, world - samples)
        shares = [sum(draw.real for draw in one) for one in together]
        assert max(shares) - min(shares) <= 1


@given(**shapes)
@settings(max_examples=80)
def test_sizes_of_updates_are_the_true_ones(
    size: int, batch: int, world: int, accumulate: int, seed: int, epoch: int
) -> None:
    batches = EpochBatches(size, batch, seed, 0, world, accumulate)
    sizes = [batches.update_size(update) for update in range(batches.updates)]
    assert sum(sizes) == size and min(sizes) >= 1
    assert all(one == batches.samples_per_update for one in sizes[:-1])
    passes = ranks(size, batch, world, accumulate, seed, epoch)
    at = 0
    for update, wanted in enumerate(sizes):
        count = batches.passes(update)
        drawn = sum(draw.real for rank in passes for one in rank[at : at + count] for draw in one)
        assert drawn == wanted and 1 <= count <= accumulate
        at += count
    assert at == len(passes[0])


@given(**shapes, data=st.data())
@settings(max_examples=80)
def test_going_on_from_an_update_gives_what_would_have_come(
    size: int, batch: int, world: int, accumulate: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    batches = EpochBatches(size, batch, seed, 0, world, accumulate)
    start = data.draw(st.integers(0, batches.updates))
    whole = ranks(size, batch, world, accumulate, seed, epoch)
    rest = ranks(size, batch, world, accumulate, seed, epoch, start)
    done = sum(batches.passes(update) for update in range(start))
    assert rest == [rank[done:] for rank in whole]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    batches = EpochBatches(50, 5, seed=0)
    orders = [batches.order(epoch) for epoch in range(3)] + [EpochBatches(50, 5, seed=1).order(0)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(orders) for b in orders[:i])
    assert np.array_equal(EpochBatches(50, 5, seed=0).order(2), orders[2])
    assert EpochBatches(4, 2, 0, shuffle=False).order(7).tolist() == [0, 1, 2, 3]


def test_the_order_does_not_depend_on_how_it_is_cut() -> None:
    assert np.array_equal(EpochBatches(31, 4, 9, 1, 3, 2).order(1), EpochBatches(31, 8, 9).order(1))


@pytest.mark.parametrize("aa", ["rand-m10-inc1", "rand-m9-mstd0.5-inc1", "3a", "original"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_augmentation_runs_at_full_strength(aa: str, channels: int) -> None:
    # Pillow 13 refuses the 0 bits that timm's posterize asks for at level 10; a killed draw would die again on resume.
    images = digits_splits().train.subset(range(4))
    preparation = Preparation((channels, 8, 8), mean=(0.5,) * channels, std=(0.5,) * channels)
    dataset = pickle.loads(pickle.dumps(TrainSet(images, "multiclass", preparation, Augmentation(aa=aa), seed=0)))
    for epoch in range(60):
        for index in range(len(images)):
            assert dataset[Draw(epoch, index)][0].isfinite().all()
