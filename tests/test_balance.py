"""Unequal classes: what a class weighs in the loss, how often it is drawn, and that both find rare classes."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jumbo_vit.data.balance import balanced_order, class_weights, label_weights, occurrences
from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.train import train
from tests.runs import differences, small_config, state_of
from tests.test_loop import poison, record_losses
from tests.test_parallel import OPTIONS, launch, seen
from tests.test_resume import run_until

BALANCES = ("weights", "sampler")


def grey(folder: Path, mean: float, count: int, rng: np.random.Generator) -> None:
    """Pictures of 8x8 pixels whose brightness scatters by 20 around `mean`."""
    folder.mkdir(parents=True)
    for index in range(count):
        pixels = rng.normal(rng.normal(mean, 20), 20, (8, 8))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{index:03}.png")


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """95 % dark and 5 % bright pictures, which overlap; held out are as many of both."""
    root, rng = tmp_path_factory.mktemp("unequal"), np.random.default_rng(0)
    for part, counts in (("train", (190, 10)), ("val", (40, 40))):
        for name, mean, count in zip(("common", "rare"), (112, 148), counts, strict=True):
            grey(root / part / name, mean, count, rng)
    return root


# Weights


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_classes_weigh_alike_and_the_mean_picture_weighs_one(counts: list[int]) -> None:
    weights = class_weights(counts, [str(number) for number in range(len(counts))])
    masses = [count * weight for count, weight in zip(counts, weights, strict=True)]
    assert masses == pytest.approx([sum(counts) / len(counts)] * len(counts))
    assert sum(masses) / sum(counts) == pytest.approx(1)


def test_a_label_is_a_question_of_two_classes() -> None:
    (absent, present), everywhere = label_weights([10, 100], ["rare", "all"], 100)
    assert [absent, present] == pytest.approx(class_weights([90, 10], ["absent", "present"]))
    assert everywhere == (1.0, 1.0)


def test_a_class_without_pictures_has_no_weight() -> None:
    with pytest.raises(UserError, match="no training picture of the class b"):
        class_weights([3, 0], ["a", "b"])


def plain_loss(logits: list[float], target: list[float], weights: list[float], smoothing: float) -> float:
    """The sum over the classes of share, weight, and the cross-entropy of that class's smoothed target."""
    total = math.log(sum(math.exp(x) for x in logits))
    log_p = [x - total for x in logits]
    classes = len(logits)
    loss = 0.0
    for true, (share, weight) in enumerate(zip(target, weights, strict=True)):
        smooth = [smoothing / classes + (1 - smoothing) * (c == true) for c in range(classes)]
        loss += share * weight * -sum(s * lp for s, lp in zip(smooth, log_p, strict=True))
    return loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses_follow_their_definition(smoothing: float) -> None:
    weights = torch.tensor([0.4, 3.0, 1.3])
    objective = Classification("multiclass", 3, Mixing(smoothing=smoothing), weights)
    logits = torch.randn(6, 3) * 2
    hard = torch.tensor([0, 1, 2, 1, 0, 2])
    share = torch.linspace(0, 1, 6)[:, None]
    mixed = share * torch.eye(3)[hard] + (1 - share) * torch.eye(3)[hard.flip(0)]
    for given_, soft in ((hard, torch.eye(3)[hard]), (mixed, mixed)):
        rows = zip(logits.tolist(), soft.tolist(), strict=True)
        expected = [plain_loss(row, target, weights.tolist(), smoothing) for row, target in rows]
        assert objective.losses(logits, given_).tolist() == pytest.approx(expected, rel=1e-5)
    # A mixture that is all of one class is that class.
    torch.testing.assert_close(objective.losses(logits, torch.eye(3)[hard]), objective.losses(logits, hard))


@pytest.mark.parametrize("soft", [False, True])
def test_smoothing_does_not_pull_to_the_rare_class(soft: bool) -> None:
    # The best answer to a picture of the common class is its smoothed target, whatever the classes weigh.
    weights, smoothing = torch.tensor([0.5, 10.0]), 0.2
    logits = torch.tensor([[0.9, 0.1]]).log().requires_grad_()
    target = torch.tensor([[1.0, 0.0]]) if soft else torch.tensor([0])
    Classification("multiclass", 2, Mixing(smoothing=smoothing), weights).losses(logits, target).sum().backward()
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


def test_equal_weights_change_nothing() -> None:
    logits, hard = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 1])
    soft = torch.softmax(torch.randn(5, 4), -1)
    plain, ones = (Classification("multiclass", 4, Mixing(smoothing=0.1), w) for w in (None, torch.ones(4)))
    for target in (hard, soft):
        torch.testing.assert_close(plain.losses(logits, target), ones.losses(logits, target))


def test_weighted_multilabel_losses() -> None:
    weights = torch.tensor([[0.6, 1.0], [4.0, 1.0]])  # absent, present
    logits, targets = torch.randn(3, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    p = logits.sigmoid()
    plain = -(targets * weights[1] * p.log() + (1 - targets) * weights[0] * (1 - p).log()).mean(-1)
    torch.testing.assert_close(Classification("multilabel", 2, Mixing(), weights).losses(logits, targets), plain)


def test_accumulation_equals_a_larger_batch_with_weights(unequal: Path, tmp_path: Path) -> None:
    # 200 pictures: 3 updates of 64 and one of 8. A pass of 16 often holds no rare picture: each divides by its size.
    plain = {"data": str(unequal), "balance": "weights", "smoothing": 0.1, "opt": "sgd", "lr": 0.05, "epochs": 1}
    train(small_config(tmp_path / "large", **plain, batch_size=64))
    train(small_config(tmp_path / "small", **plain, batch_size=16, grad_accum_steps=4))
    large, small = state_of(tmp_path / "large"), state_of(tmp_path / "small")
    for name, value in large["model"].items():
        torch.testing.assert_close(small["model"][name], value, rtol=0, atol=1e-5)


# Draws

counts_of_classes = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(counts=counts_of_classes, seed=st.integers(0, 2**31))
def test_classes_and_pictures_are_drawn_equally_often(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    order = balanced_order(classes, rng)
    assert len(order) == len(classes)
    drawn = np.bincount(classes[order], minlength=len(counts))
    assert drawn.max() - drawn.min() <= 1
    times = np.bincount(order, minlength=len(classes))
    for number in range(len(counts)):
        own = times[classes == number]
        assert own.max() - own.min() <= 1


@given(st.lists(st.integers(0, 5), max_size=30))
def test_occurrences_are_counted(order: list[int]) -> None:
    expected = [order[:place].count(value) for place, value in enumerate(order)]
    assert occurrences(np.array(order, dtype=np.int64)).tolist() == expected


@given(
    counts=counts_of_classes,
    batch=st.integers(1, 9),
    world=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
@settings(max_examples=60)
def test_processes_share_one_draw_and_go_on_from_anywhere(
    counts: list[int], batch: int, world: int, accumulate: int, seed: int, data: st.DataObject
) -> None:
    classes = [number for number, count in enumerate(counts) for _ in range(count)]

    def ranks(start: int, epoch: int = 1) -> list[list[list[Draw]]]:
        found = []
        for rank in range(world):
            batches = EpochBatches(len(classes), batch, seed, rank, world, accumulate, classes=classes)
            batches.epoch, batches.start = epoch, start
            found.append(list(batches))
        return found

    whole = ranks(0)
    real = [draw for rank in whole for one in rank for draw in one if draw.real]
    order = EpochBatches(len(classes), batch, seed, classes=classes).order(1)
    assert Counter(draw.sample for draw in real) == Counter(order.tolist())
    # No two draws of an epoch share their randomness.
    assert len({draw.position for draw in real}) == len(real)
    batches = EpochBatches(len(classes), batch, seed, 0, world, accumulate, classes=classes)
    assert batches.updates == EpochBatches(len(classes), batch, seed, 0, world, accumulate).updates
    start = data.draw(st.integers(0, batches.updates))
    done = sum(batches.passes(update) for update in range(start))
    assert ranks(start) == [rank[done:] for rank in whole]


def test_a_picture_that_comes_again_is_augmented_in_another_way() -> None:
    preparation = Preparation((1, 8, 8), mean=(0.5,), std=(0.5,))
    dataset = TrainSet(digits_splits().train, "multiclass", preparation, Augmentation(), seed=0)
    first, again = dataset[Draw(0, 3)][0], dataset[Draw(0, 3, again=1)][0]
    assert not torch.equal(first, again)
    assert torch.equal(again, dataset[Draw(0, 3, again=1)][0])


# Runs


def test_balanced_training_finds_the_rare_class(
    unequal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"data": str(unequal), "epochs": 6, "lr": 1e-3, "smoothing": 0.1, "mixup": 0.2, "scale": (0.9, 1.0)}
    found = {by: train(small_config(tmp_path / by, **options, balance=by)) for by in ("none", *BALANCES)}
    recall = {by: summary["best_numbers"]["per_class_accuracy"] for by, summary in found.items()}
    balanced = {by: summary["best_numbers"]["balanced_accuracy"] for by, summary in found.items()}
    assert recall["none"]["rare"] < 0.4 and balanced["none"] < 0.68
    for by in BALANCES:
        assert recall[by]["rare"] > 0.6 and recall[by]["common"] > 0.6 and balanced[by] > 0.74
        assert found[by]["metric"] == "balanced_accuracy" and found[by]["score"] == balanced[by]
        assert found[by]["updates"] == found["none"]["updates"]
    assert found["none"]["metric"] == "top1" and found["none"]["balance"] == {"by": "none"}
    numbers = {"common": pytest.approx(200 / 380), "rare": 10.0}
    assert found["weights"]["balance"] == {"by": "weights", "class_weights": numbers}
    assert found["sampler"]["balance"] == {"by": "sampler", "draws_per_picture": numbers}
    assert json.loads((tmp_path / "weights" / "summary.json").read_text())["balance"]["by"] == "weights"
    assert "balance: sampler" in (tmp_path / "sampler" / "config.yaml").read_text()
    printed = capsys.readouterr().out
    for words in (
        "common has 190 training pictures, rare 10: look at balanced_accuracy beside top1",
        "rare 10; in the loss they weigh 0.526 and 10",
        "a picture of rare comes 10 times, one of common 0.526 times",
        "the class found least often is rare, accuracy",
    ):
        assert words in printed


@pytest.mark.parametrize("balance", BALANCES)
def test_a_killed_balanced_run_ends_with_the_same_bits(
    unequal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, balance: str
) -> None:
    options = {"data": str(unequal), "balance": balance, "mixup": 0.2, "smoothing": 0.1}
    train(small_config(tmp_path / "straight", **options, workers=1))
    run_until(monkeypatch, small_config(tmp_path / "broken", **options), 11)
    train(TrainConfig(resume=str(tmp_path / "broken"), given=frozenset({"resume"})))
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "broken")) == []


@pytest.mark.parametrize("balance", BALANCES)
def test_two_processes_equal_one_when_balanced(
    unequal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, balance: str
) -> None:
    options = {"data": str(unequal), "balance": balance, "epochs": 1}
    losses = record_losses(monkeypatch)
    train(small_config(tmp_path / "one", **OPTIONS | options))
    done = launch(tmp_path / "two", **options, devices=2, strategy="ddp", batch_size=16)
    assert done.returncode == 0, done.stderr
    first, second = seen(tmp_path / "two", 0), seen(tmp_path / "two", 1)
    assert first["losses"] == pytest.approx(losses, abs=1e-4) and len(losses) == 7
    assert first == second


def test_a_bad_batch_is_replayed_with_its_weights(
    unequal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2}, math.nan)
    train(small_config(tmp_path / "run", data=str(unequal), balance="weights", epochs=1))
    content = torch.load(tmp_path / "run" / "bad-batch.pt", weights_only=True)
    assert content["class_weights"].tolist() == pytest.approx([200 / 380, 10.0])
    assert replay(tmp_path / "run")["same"]


def test_weights_are_taken_after_unreadable_pictures_are_left_out(unequal: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(unequal, data)
    for index in range(5):
        (data / "train" / "rare" / f"00{index}.png").write_text("no picture")
    summary = train(small_config(tmp_path / "run", data=str(data), balance="weights", epochs=1))
    assert summary["class_counts"] == {"common": 190, "rare": 5} and len(summary["skipped"]) == 5
    assert summary["balance"]["class_weights"] == pytest.approx({"common": 195 / 380, "rare": 19.5})


def test_several_labels_a_picture(unequal: Path, tmp_path: Path) -> None:
    pictures = sorted((unequal / "train").rglob("*.png"))[:60:2]
    labels = ["dark|odd" if index % 5 == 0 else "dark" if index % 2 else "" for index in range(len(pictures))]
    parts = ["train"] * 20 + ["val"] * 10
    rows = [f"{path},{own},{part}" for path, own, part in zip(pictures, labels, parts, strict=True)]
    (tmp_path / "data.csv").write_text("path,labels,split\n" + "\n".join(rows) + "\n")
    options: dict[str, Any] = {"data": str(tmp_path / "data.csv"), "task": "multilabel", "epochs": 1}
    summary = train(small_config(tmp_path / "run", **options, balance="weights"))
    assert summary["metric"] == "map" and summary["class_counts"] == {"dark": 12, "odd": 4}
    weights = summary["balance"]["class_weights"]
    assert weights["odd"] == pytest.approx({"absent": 20 / 32, "present": 20 / 8})
    with pytest.raises(UserError, match=r"--balance sampler draws by the one class .*--balance weights"):
        train(small_config(tmp_path / "other", **options, balance="sampler"))
    assert not (tmp_path / "other").exists()
