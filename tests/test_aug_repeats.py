"""Repeated augmentation: timm's order, as many samples an epoch, other copies of a picture, runs that resume."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.train import train
from tests.runs import differences, small_config, state_of
from tests.test_resume import run_until

shapes = {
    "size": st.integers(1, 90),
    "batch": st.integers(1, 17),
    "world": st.integers(1, 4),
    "accumulate": st.integers(1, 3),
    "repeats": st.integers(1, 7),
    "epoch": st.integers(0, 5),
}


@given(**shapes)
@settings(max_examples=60)
def test_an_epoch_has_as_many_samples_of_fewer_pictures(
    size: int, batch: int, world: int, accumulate: int, repeats: int, epoch: int
) -> None:
    drawn: list[Draw] = []
    for rank in range(world):
        batches = EpochBatches(size, batch, 3, rank, world, accumulate, repeats=repeats)
        batches.epoch = epoch
        assert batches.updates == EpochBatches(size, batch, 3, rank, world, accumulate).updates
        drawn += [draw for one in batches for draw in one if draw.real]
    counts = sorted(Counter(draw.sample for draw in drawn).values())
    assert sum(counts) == size and len(counts) == -(-size // repeats)
    assert counts[1:] == [repeats] * (len(counts) - 1) and counts[0] == size - repeats * (len(counts) - 1)
    assert len({draw.position for draw in drawn}) == size  # no two copies have the same augmentation
    order = EpochBatches(size, batch, 3, repeats=repeats).order(epoch)
    assert np.array_equal(order[::repeats], EpochBatches(size, batch, 3).order(epoch)[: len(counts)])
    assert sorted(order.tolist()) == sorted(draw.sample for draw in drawn)


@given(size=st.integers(1, 60), repeats=st.integers(1, 7))
@settings(max_examples=40)
def test_the_order_is_that_of_timm(size: int, repeats: int) -> None:
    sampler = RepeatAugSampler(range(size), 1, 0, shuffle=False, num_repeats=repeats, selected_round=0)
    assert EpochBatches(size, 4, 0, shuffle=False, repeats=repeats).order(0).tolist() == list(sampler)


def test_epochs_choose_other_pictures() -> None:
    batches = EpochBatches(60, 6, seed=0, repeats=3)
    chosen = [set(batches.order(epoch).tolist()) for epoch in range(40)]
    assert len({frozenset(one) for one in chosen}) == 40 and set().union(*chosen) == set(range(60))


def test_copies_of_a_picture_come_together_and_are_augmented_in_other_ways() -> None:
    preparation = Preparation((1, 8, 8), mean=(0.5,), std=(0.5,))
    dataset = TrainSet(digits_splits().train, "multiclass", preparation, Augmentation(), seed=0)
    first = next(iter(EpochBatches(len(dataset), 6, seed=0, repeats=3)))
    assert [draw.again for draw in first] == [0, 1, 2, 0, 1, 2]
    assert [draw.sample for draw in first] == [first[0].sample] * 3 + [first[3].sample] * 3
    pictures = [dataset[draw][0] for draw in first]
    assert not any(torch.equal(pictures[i], pictures[j]) for i in range(3) for j in range(i))
    assert torch.equal(pictures[1], dataset[first[1]][0])


OPTIONS: dict[str, Any] = {"aug_repeats": 3, "batch_size": 16, "grad_accum_steps": 2, "mixup": 0.2}


def test_a_killed_run_goes_on_with_the_same_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = train(small_config(tmp_path / "straight", **OPTIONS))
    assert summary["updates"] == 16  # as without repeats
    run_until(monkeypatch, small_config(tmp_path / "run", **OPTIONS), 11)
    train(TrainConfig(resume=str(tmp_path / "run"), given=frozenset({"resume"})))
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "run")) == []


def test_one_copy_is_no_repeat(tmp_path: Path) -> None:
    for repeats in (0, 1):
        train(small_config(tmp_path / str(repeats), epochs=1, aug_repeats=repeats))
    left, right = (state_of(tmp_path / name)["model"] for name in "01")
    assert differences(left, right) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balance": "sampler"}, "--aug-repeats does not go with --balance sampler"),
        ({"aug_repeats": -1}, "--aug-repeats is -1, but must be 0 or more"),
        (
            {"streaming": True, "val_data": "digits", "steps_per_epoch": 2},
            "a stream allows no --aug-repeats: repeats need a list",
        ),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(small_config(tmp_path / "run", **{"aug_repeats": 3, **changes}))
    assert not (tmp_path / "run").exists()
