"""Function matching and the binary cross-entropy: the equations, what flows where, and runs with teachers."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.loss import BinaryCrossEntropy
from torch import nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks.build import build_model
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.distill import FunctionMatching, Lesson, matching_losses
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.train import train
from jumbo_vit.teachers import Teacher
from tests.pictures import TEST_MODEL
from tests.runs import differences, digit_pictures, small_config, state_of
from tests.teachers import teacher_folder
from tests.test_parallel import launch, seen
from tests.test_resume import run_until

STUDENT = Preparation((3, 8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
DIGITS = [str(number) for number in range(10)]


class Flat(nn.Module):
    """A model of one layer that remembers what it saw."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = images.detach().clone()
        logits: torch.Tensor = self.layer(images.flatten(1))
        return logits


def teacher(classes: int = 3) -> Teacher:
    model = Flat(classes).eval().requires_grad_(False)
    return Teacher("flat", model, STUDENT, torch.device("cpu"), torch.arange(classes))


def lesson(count: int = 1) -> Lesson:
    return Lesson(STUDENT, [teacher() for _ in range(count)])


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 8, 8), torch.arange(size) % 3


# The equations


def divergence(teacher_logits: torch.Tensor, student_logits: torch.Tensor) -> float:
    """KL(teacher || student) of one picture, as it is written in books."""
    p, q = (logits.double().softmax(0).tolist() for logits in (teacher_logits, student_logits))
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_loss_is_that_of_the_equations(weight: float) -> None:
    student, taught = Flat(), lesson(2)
    images, targets = batch()
    losses = FunctionMatching(3, Mixing(), taught, weight).step(student, (images, targets), seed=1)
    for index in range(len(images)):
        own = student(images[index : index + 1])[0]
        each = [divergence(t.logits(images[index : index + 1], STUDENT)[0], own) for t in taught.teachers]
        label = -own.log_softmax(0)[targets[index]].item()
        assert losses[index].item() == pytest.approx((1 - weight) * sum(each) + weight * label, rel=1e-4)


def test_a_student_that_answers_like_its_teacher_has_no_loss() -> None:
    taught = lesson()
    losses = FunctionMatching(3, Mixing(0.8, 1.0), taught).step(taught.teachers[0].model, batch(), seed=1)
    torch.testing.assert_close(losses, torch.zeros(6), rtol=0, atol=1e-6)


def test_a_probability_of_zero_costs_nothing() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    losses = matching_losses(logits, torch.tensor([[[1.0, 0.0, 0.0]]]))
    losses.sum().backward()
    assert losses.item() == pytest.approx(math.log(3)) and logits.grad is not None and logits.grad.isfinite().all()


def test_the_gradient_reaches_the_student_alone() -> None:
    student, taught = Flat(), lesson(2)
    FunctionMatching(3, Mixing(0.8), taught, 0.5).step(student, batch(), seed=1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in student.parameters())
    models = [one.model for one in taught.teachers]
    assert all(parameter.grad is None for model in models for parameter in model.parameters())


@pytest.mark.parametrize("size", [6, 5])
def test_student_and_teachers_see_the_same_mixed_pictures(size: int) -> None:
    student, taught = Flat(), lesson(2)
    objective, (images, targets) = FunctionMatching(3, Mixing(0.8, 1.0), taught), batch(size)
    for seed in range(4):
        objective.step(student, (images, targets), seed)
        assert not torch.equal(student.seen, images)
        assert all(torch.equal(one.model.seen, student.seen) for one in taught.teachers)


def test_the_labels_part_is_that_of_a_run_without_teachers() -> None:
    student, weights = Flat(), torch.tensor([0.5, 1.0, 1.5])
    mixing, part = Mixing(0.8, 1.0, smoothing=0.1), 0.9
    found = FunctionMatching(3, mixing, lesson(), part, weights).step(student, (given := batch()), seed=3)
    labels = Classification("multiclass", 3, mixing, weights).step(student, given, seed=3)
    assert ((found - part * labels) > 0).all()  # what is left is a divergence
    unlabelled = (found - part * labels) / (1 - part)
    again = FunctionMatching(3, mixing, lesson(), 0.5 * part, weights).step(student, given, seed=3)
    assert not torch.allclose(again, unlabelled)


# Binary cross-entropy


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(0.8, 1.0)])
def test_bce_is_timms_with_every_class_of_a_picture_on(mixing: Mixing) -> None:
    student, objective = Flat(), Classification("multiclass", 3, mixing, loss="bce")
    images, targets = batch()
    losses = objective.step(student, (images, targets), seed=2)
    mixed, soft = objective.mix(images, targets, seed=2)
    timms = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)
    assert losses.shape == (6,) and losses.mean().item() == pytest.approx(timms(student(mixed), soft).item(), rel=1e-5)
    on = (soft > 0).float() if soft.ndim == 2 else nn.functional.one_hot(soft, 3).float()
    p = student(mixed).sigmoid()
    expected = -(on * p.log() + (1 - on) * (1 - p).log()).mean(1)
    torch.testing.assert_close(losses, expected)
    assert bool((on.sum(1) == 2).any()) == (mixing.mixup > 0)


@pytest.mark.parametrize("start", [False, True])
def test_a_new_head_expects_each_class_as_often_as_it_comes(tmp_path: Path, start: bool) -> None:
    config = with_defaults(TrainConfig(data="somewhere", model=TEST_MODEL, loss="bce"))
    model, _ = build_model(config, 7)
    if start:
        folder = teacher_folder(tmp_path, labels=["a", "b"])
        assert "head.bias" in start_from(model, folder, [str(number) for number in range(7)]).new
    torch.testing.assert_close(model.head.bias, torch.full((7,), -math.log(7)))
    assert not model.head.weight.any()


def test_a_run_with_bce(tmp_path: Path) -> None:
    summary = train(small_config(tmp_path / "run", loss="bce", mixup=0.8, cutmix=1.0, epochs=1))
    assert summary["bad_updates"] == 0 and summary["updates"] == 8
    row = state_of(tmp_path / "run")["progress"]["history"][0]
    # Two of ten classes on, at the first answer of 1/10 for each: the mean of two -ln 0.1 and eight -ln 0.9.
    first = (2 * -math.log(1 / 11) + 8 * -math.log(10 / 11)) / 10
    assert 0.2 < row["train_loss"] < first + 0.05


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_weight": 0.5}, "--label-weight 0.5 is the labels' share .* there is no --teacher"),
        ({"teacher": []}, "--teacher names none"),
        ({"teacher": ["x"], "label_weight": 1.0}, "--label-weight is 1.0, but must be from 0 to below 1"),
        ({"teacher": ["x"], "smoothing": 0.1}, "--smoothing 0.1: labels count for nothing beside teachers"),
        ({"teacher": ["x"], "loss": "bce"}, "--loss bce: labels count for nothing beside teachers"),
        ({"teacher": ["x"], "balance": "weights"}, "--balance weights: labels count for nothing"),
        ({"teacher": ["x"], "task": "multilabel"}, "--task multilabel: what teachers say is a distribution"),
        (
            {"teacher": ["x"], "freeze": True, "init_from": "y"},
            "--freeze.*teach|--freeze: it trains on features that are computed once",
        ),
        ({"loss": "bce", "smoothing": 0.1}, "--loss bce with --smoothing 0.1: .* set --smoothing 0$"),
        ({"loss": "bce", "balance": "weights"}, "knows no weights of classes; use --balance sampler"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_defaults(TrainConfig(data="somewhere", **options))


def test_labels_are_smoothed_by_default_only_where_they_count() -> None:
    smoothing = [
        with_defaults(TrainConfig(data="somewhere", **options)).smoothing
        for options in ({}, {"teacher": ["x"]}, {"teacher": ["x"], "label_weight": 0.1}, {"loss": "bce"})
    ]
    assert smoothing == [0.1, 0.0, 0.1, 0.0]


def test_a_teachers_folder_is_kept_as_a_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    found = with_defaults(TrainConfig(data="somewhere", teacher=["folder", "resnet18"])).teacher
    assert found == [str(tmp_path / "folder"), "resnet18"]


# Runs


GREY = Preparation((1, 16, 16), mean=(0.2,), std=(0.4,))


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two teachers of digits, in another size than the student's, one with its classes in another order."""
    root = tmp_path_factory.mktemp("teachers")
    first = teacher_folder(root / "a", "test_efficientnet", DIGITS, GREY, seed=1)
    return [first, teacher_folder(root / "b", TEST_MODEL, DIGITS[::-1], GREY, seed=2, img_size=16, patch_size=4)]


def test_a_student_learns_what_its_teacher_knows(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "data"
    shutil.copytree(colours, shuffled)
    # The labels for training are of no use: who learned from them could not score.
    for name in ("red", "green", "blue"):
        for number, path in enumerate(sorted((shuffled / "train" / name).iterdir())):
            path.rename(shuffled / "train" / ("red", "green", "blue")[number % 3] / f"{name}{path.name}")
    options = {"epochs": 5, "batch_size": 8, "workers": 0, "logger": ["none"], "seed": 4}
    summary = train(
        TrainConfig(data=str(shuffled), model=TEST_MODEL, out=str(tmp_path / "out"), teacher=[run["out"]], **options)
    )
    assert summary["score"] == 1.0


def test_the_teachers_go_into_summary_and_model_folder(tmp_path: Path, teachers: list[str]) -> None:
    summary = train(small_config(tmp_path / "run", teacher=teachers, mixup=0.5, epochs=1))
    assert any(f"Taught by {teachers[0]}, {teachers[1]}" in note for note in summary["notes"])
    told = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["jumbo_vit"]["teacher"]
    assert [entry["name"] for entry in told] == teachers
    assert [entry["source"] for entry in told] == ["made by hand, seed 1", "made by hand, seed 2"]
    assert all(entry["license"] == "none" and isinstance(entry["checksum"], int) for entry in told)


OPTIONS: dict[str, Any] = {"label_weight": 0.25, "mixup": 0.5, "cutmix": 0.5, "drop_path": 0.1}


def test_a_killed_run_with_teachers_goes_on_to_the_same_bits(
    tmp_path: Path, teachers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(tmp_path / "straight", teacher=teachers, **OPTIONS))
    run_until(monkeypatch, small_config(tmp_path / "killed", teacher=teachers, **OPTIONS), 5)
    train(TrainConfig(resume=str(tmp_path / "killed"), given=frozenset({"resume"})))
    assert not differences(state_of(tmp_path / "straight"), state_of(tmp_path / "killed"))


def test_a_run_does_not_go_on_with_another_teacher(tmp_path: Path) -> None:
    folder = teacher_folder(tmp_path / "teacher", labels=DIGITS)
    train(small_config(tmp_path / "run", teacher=[folder], epochs=1))
    teacher_folder(tmp_path / "teacher", labels=DIGITS, seed=1)
    with pytest.raises(UserError, match="began with other weights of its teachers"):
        train(TrainConfig(resume=str(tmp_path / "run"), epochs=2, given=frozenset({"resume", "epochs"})))


def test_a_bad_batch_is_replayed_with_the_teachers(
    tmp_path: Path, teachers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = loop_module.Loop._update, 0

    def poisoned(self: Any, group: Any) -> None:
        nonlocal count
        if count == 2:
            group[0][0][3, 0, 1, 1] = math.inf
        count += 1
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", poisoned)
    summary = train(small_config(tmp_path / "run", teacher=teachers, label_weight=0.5, epochs=1))
    assert summary["bad_updates"] == 1
    found = replay(tmp_path / "run")
    assert found["same"] and found["bad_inputs"] == found["bad_samples"] == [3]


def test_teachers_go_with_dropped_patches_and_several_sizes(tmp_path: Path, teachers: list[str]) -> None:
    options: dict[str, Any] = {
        "patch_drop": (0.5, 0.1),
        "img_sizes": ["8", "16", "8x12"],
        "cutmix": 1.0,
        "aug_repeats": 2,
    }
    summary = train(small_config(tmp_path / "run", teacher=teachers, epochs=1, **options))
    assert summary["updates"] == 8 and summary["bad_updates"] == 0


def test_two_processes_with_teachers_of_their_own_equal_one(tmp_path: Path, teachers: list[str]) -> None:
    options: dict[str, Any] = {"teacher": teachers, "label_weight": 0.5, "epochs": 1}
    for name, changes in (("one", {}), ("two", {"devices": 2, "strategy": "ddp", "batch_size": 16})):
        done = launch(tmp_path / name, **options, **changes)
        assert done.returncode == 0, done.stderr
    one, first, second = seen(tmp_path / "one", 0), seen(tmp_path / "two", 0), seen(tmp_path / "two", 1)
    assert first == second and first["idle"] == []
    assert first["losses"] == pytest.approx(one["losses"], abs=1e-3)


def test_a_run_on_a_stream_has_teachers_too(
    tmp_path: Path, teachers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"teacher": teachers, "val_data": digit_pictures(), "steps_per_epoch": 4}
    config = small_config(tmp_path / "straight", **OPTIONS, **(options | {"data": "digits"}))
    summary = train(config, stream=Rows(), classes=DIGITS)
    assert summary["updates"] == 8 and any("Taught by" in note for note in summary["notes"])
    config = small_config(tmp_path / "killed", **OPTIONS, **(options | {"data": "digits"}))
    run_until(monkeypatch, config, 5, stream=Rows(), classes=DIGITS)
    train(TrainConfig(resume=str(tmp_path / "killed"), given=frozenset({"resume"})), stream=Rows(), classes=DIGITS)
    assert not differences(state_of(tmp_path / "straight"), state_of(tmp_path / "killed"))


class Rows:
    """A stream of 100 grey pictures, which knows where it stands."""

    next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        while self.next < 100:
            self.next += 1
            pixels = np.random.default_rng(self.next).integers(0, 256, (8, 8), np.uint8)
            yield {"image": Image.fromarray(pixels), "label": self.next % 10}


def test_new_models_answer_evenly() -> None:
    # Function matching starts from an even answer; BCE from one right answer in C.
    model = make_model(TEST_MODEL, num_classes=5).eval()
    torch.testing.assert_close(model(torch.randn(1, 3, 32, 32)).softmax(-1), torch.full((1, 5), 0.2))
