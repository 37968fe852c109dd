"""Scores against scikit-learn's, and their independence of how the samples come in batches."""

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor

from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.score import MulticlassScore, MultilabelScore, Score, new_score


def labels(classes: int) -> list[str]:
    return [f"class {i}" for i in range(classes)]


def scored(score: Score, logits: Tensor, targets: Tensor, sizes: list[int]) -> dict[str, Any]:
    """The numbers after updates with batches of these sizes; the last batch takes the rest."""
    bounds = [0, *np.cumsum(sizes).tolist(), len(logits)]
    for start, end in itertools.pairwise(bounds):
        if start < min(end, len(logits)):
            score.update(logits[start:end], targets[start:end])
    return score.result(lambda x: x, lambda x: x)


def nearly(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(nearly(left[key], right[key]) for key in left)
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12)
    return bool(left == right)


draws = {
    "classes": st.integers(1, 8),
    "count": st.integers(1, 60),
    "seed": st.integers(0, 2**31),
    "sizes": st.lists(st.integers(1, 20), max_size=5),
}


@given(**draws)
@settings(max_examples=60)
def test_multiclass_is_scikit_learns(classes: int, count: int, seed: int, sizes: list[int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=draw)
    targets = torch.randint(0, classes, (count,), generator=draw)
    numbers = scored(MulticlassScore(labels(classes)), logits, targets, sizes)
    predicted, truth = logits.argmax(1).numpy(), targets.numpy()
    assert numbers["n"] == count
    assert numbers["top1"] == pytest.approx(metrics.accuracy_score(truth, predicted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predicted classes that do not occur
        assert numbers["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(truth, predicted))
    recall = metrics.recall_score(truth, predicted, labels=range(classes), average=None, zero_division=math.nan)
    there = set(truth.tolist())
    for index, value in enumerate(numbers["per_class_accuracy"].values()):
        assert value == (pytest.approx(recall[index]) if index in there else None)
    chances = logits.double().softmax(1).numpy()
    every = list(range(classes))
    if classes > 1:
        assert numbers["loss"] == pytest.approx(metrics.log_loss(truth, chances, labels=every), abs=1e-9)
    if classes > 5:
        five = metrics.top_k_accuracy_score(truth, logits.numpy(), k=5, labels=every)
        assert numbers["top5"] == pytest.approx(five)
    else:
        assert "top5" not in numbers
    assert nearly(numbers, scored(MulticlassScore(labels(classes)), logits, targets, [count]))


@given(**draws, threshold=st.sampled_from([0.2, 0.5, 0.8]))
@settings(max_examples=60)
def test_multilabel_is_scikit_learns(classes: int, count: int, seed: int, sizes: list[int], threshold: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=draw)
    targets = (torch.rand(count, classes, generator=draw) < 0.3).float()
    names = labels(classes)
    numbers = scored(MultilabelScore(names, [threshold] * classes), logits, targets, sizes)
    truth, chances = targets.numpy().astype(int), logits.double().sigmoid().numpy()
    there = truth.sum(0) > 0
    assert numbers["absent"] == [name for name, present in zip(names, there, strict=True) if not present]
    assert numbers["n"] == count
    if not there.any():
        assert all(math.isnan(numbers[name]) for name in ("map", "f1_macro", "f1_micro", "loss"))
        return
    each = [metrics.average_precision_score(truth[:, i], chances[:, i]) if there[i] else None for i in range(classes)]
    for value, wanted in zip(numbers["per_class_ap"].values(), each, strict=True):
        assert value is wanted is None or value == pytest.approx(wanted, abs=1e-6)
    assert numbers["map"] == pytest.approx(np.mean([value for value in each if value is not None]), abs=1e-6)
    given_labels = (chances >= threshold).astype(int)
    f1 = metrics.f1_score(truth, given_labels, average=None, zero_division=0) if classes > 1 else None
    if f1 is not None:
        assert numbers["f1_macro"] == pytest.approx(f1[there].mean(), abs=1e-6)
        micro = metrics.f1_score(truth, given_labels, average="micro", zero_division=0)
        assert numbers["f1_micro"] == pytest.approx(micro, abs=1e-6)
    else:
        single = metrics.f1_score(truth[:, 0], given_labels[:, 0], zero_division=0)
        assert numbers["f1_macro"] == pytest.approx(single, abs=1e-6)
    chances = chances.clip(1e-15, 1 - 1e-15)
    loss = -(truth * np.log(chances) + (1 - truth) * np.log(1 - chances)).mean()
    assert numbers["loss"] == pytest.approx(loss, abs=1e-9)
    assert nearly(numbers, scored(MultilabelScore(names, [threshold] * classes), logits, targets, [count]))


def test_a_probability_at_the_threshold_gives_the_label() -> None:
    """As in prediction: a fresh model, whose logits are 0, gives every label at 0.5."""
    numbers = scored(MultilabelScore(["a", "b"]), torch.zeros(2, 2), torch.ones(2, 2), [])
    assert numbers["f1_micro"] == numbers["f1_macro"] == 1.0


@pytest.mark.filterwarnings("error")
def test_absent_classes_are_listed_without_a_warning() -> None:
    numbers = scored(
        MultilabelScore(["a", "b"]), torch.tensor([[2.0, -1], [-2, -1]]), torch.tensor([[1, 0], [0, 0]]), []
    )
    assert numbers["absent"] == ["b"] and numbers["per_class_ap"] == {"a": 1.0, "b": None}
    assert numbers["map"] == numbers["f1_macro"] == 1.0


def test_processes_add_up() -> None:
    logits, targets = torch.randn(20, 7), torch.randint(0, 7, (20,))
    shares = [MulticlassScore(labels(7)), MulticlassScore(labels(7))]
    for rank, share in enumerate(shares):
        share.update(logits[rank::2], targets[rank::2])
    other = {id(getattr(shares[0], name)): getattr(shares[1], name) for name in ("hits", "counts", "sums")}
    together = shares[0].result(lambda x: x + other[id(x)])
    assert nearly(together, scored(MulticlassScore(labels(7)), logits, targets, []))


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
@pytest.mark.parametrize("classes", [1, 2, 6])
def test_no_sample_gives_no_number(task: str, classes: int) -> None:
    score = new_score(task, labels(classes))
    numbers = score.result(lambda x: x, lambda x: x)
    assert numbers["n"] == 0 and math.isnan(numbers[score.metric]) and math.isnan(numbers["loss"])


# The objective


@given(
    count=st.integers(1, 9), classes=st.integers(1, 5), seed=st.integers(0, 1000), smoothing=st.sampled_from([0, 0.1])
)
@settings(max_examples=40)
def test_mixing_takes_any_batch_and_keeps_the_mass(count: int, classes: int, seed: int, smoothing: float) -> None:
    objective = Classification("multiclass", classes, Mixing(0.8, 1.0, smoothing=smoothing))
    images, targets = torch.rand(count, 3, 8, 8), torch.randint(0, classes, (count,))
    mixed, soft = objective.mix(images, targets, seed)
    again, _ = objective.mix(images, targets, seed)
    assert mixed.shape == images.shape and soft.shape == (count, classes)
    torch.testing.assert_close(soft.sum(1), torch.ones(count))
    assert torch.equal(mixed, again)
    assert bool(objective.losses(torch.randn(count, classes), soft).isfinite().all())
