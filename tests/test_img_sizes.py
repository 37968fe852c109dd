"""Several sizes in one run: which update has which, what the model makes of it, and what is saved."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jumbo_vit
from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.data.sizes import SizeSchedule
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.token_options import training_sizes
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL, colour_folder
from tests.runs import differences, small_config, state_of
from tests.test_parallel import launch, seen
from tests.test_resume import run_until

SIZES = ["4x8", "8", "12"]


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 9),
    world=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    kind=st.sampled_from(["mixed", "progressive"]),
    data=st.data(),
)
@settings(max_examples=60)
def test_all_passes_and_processes_of_an_update_have_one_size(
    size: int, batch: int, world: int, accumulate: int, kind: Any, data: st.DataObject
) -> None:
    schedule = SizeSchedule((1, 2, 3), kind, seed=5, epochs=3)
    for epoch in range(3):
        start = data.draw(st.integers(0, EpochBatches(size, batch, 5, 0, world, accumulate).updates - 1))
        by_rank = []
        for rank in range(world):
            batches = EpochBatches(size, batch, 5, rank, world, accumulate, sizes=schedule)
            batches.epoch, batches.start = epoch, start
            by_rank.append([{draw.size for draw in one} for one in batches])
        wanted = [
            {schedule.at(epoch, update, batches.updates)}
            for update in range(start, batches.updates)
            for _ in range(batches.passes(update))
        ]
        assert all(rank == wanted for rank in by_rank)


def test_progressive_goes_up_in_equal_parts() -> None:
    schedule = SizeSchedule(("small", "middle", "large"), "progressive", seed=0, epochs=4)
    run = [schedule.at(epoch, update, 6) for epoch in range(4) for update in range(6)]
    assert run == ["small"] * 8 + ["middle"] * 8 + ["large"] * 8


@pytest.mark.parametrize(
    ("epochs", "updates", "wanted"),
    [(1, 1, [4]), (2, 1, [1, 4]), (1, 3, [1, 2, 4]), (2, 2, [1, 2, 3, 4]), (1, 5, [1, 1, 2, 3, 4])],
)
def test_progressive_ends_with_the_largest(epochs: int, updates: int, wanted: list[int]) -> None:
    schedule = SizeSchedule((1, 2, 3, 4), "progressive", seed=0, epochs=epochs)
    assert [schedule.at(epoch, update, updates) for epoch in range(epochs) for update in range(updates)] == wanted


def test_mixed_draws_all_alike_by_the_seed() -> None:
    runs = [
        [SizeSchedule((1, 2, 3), "mixed", seed, 5).at(e, u, 120) for e in range(5) for u in range(120)]
        for seed in (0, 1)
    ]
    assert runs[0] != runs[1]
    assert all(160 <= count <= 240 for count in Counter(runs[0]).values())


def test_sizes_come_in_the_order_of_their_pixels() -> None:
    assert training_sizes(TrainConfig(img_sizes=["64x32", "128", "32x64", "16"])) == [
        (16, 16),
        (32, 64),
        (64, 32),
        (128, 128),
    ]


def test_a_picture_is_augmented_to_the_size_of_its_draw() -> None:
    preparation, augment = Preparation((1, 8, 8), mean=(0.5,), std=(0.5,)), Augmentation(scale=(0.5, 1.0))
    sized = augment.sized(preparation, [(8, 12), (16, 4)])
    dataset = TrainSet(digits_splits().train, "multiclass", preparation, augment, 0, sized)
    assert dataset[Draw(0, 3, size=(8, 12))][0].shape == (1, 8, 12)
    assert dataset[Draw(0, 3, size=(16, 4))][0].shape == (1, 16, 4)
    assert dataset[Draw(0, 3)][0].shape == (1, 8, 8)
    # A small picture of the decoder's is enough for a small size alone.
    assert sized[8, 12][1] == augment.enough(Preparation((1, 8, 12))) < sized[16, 4][1]


def test_positions_learn_through_their_resampling() -> None:
    model: Any = timm.create_model(TEST_MODEL, dynamic_img_size=True)
    torch.nn.init.normal_(model.head.weight)
    for size in ((64, 16), (24, 24)):
        model.zero_grad()
        model(torch.randn(2, 3, *size)).square().sum().backward()
        gradient = model.pos_embed.grad
        assert (gradient.abs().amax(-1) > 0).all()  # every place of the table, at either size


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(small_config(out, img_sizes=SIZES, model_ema=True, drop_path=0.1))
    return out


def test_a_killed_run_goes_on_at_the_same_sizes(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(monkeypatch, small_config(tmp_path / "run", img_sizes=SIZES, model_ema=True, drop_path=0.1), 11)
    seen: list[tuple[int, ...]] = []
    original = loop_module.Loop._update

    def watched(self: Any, group: Any) -> None:
        seen.append(tuple(group[0][0].shape[2:]))
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", watched)
    train(TrainConfig(resume=str(tmp_path / "run"), given=frozenset({"resume"})))
    schedule = SizeSchedule(((4, 8), (8, 8), (12, 12)), "mixed", 0, 2)
    assert seen == [schedule.at(1, update, 8) for update in range(3, 8)] and len(set(seen)) > 1
    assert differences(state_of(straight), state_of(tmp_path / "run")) == []


def test_the_saved_folder_is_the_plain_model_and_scores_the_same(straight: Path) -> None:
    config = json.loads((straight / "model" / "config.json").read_text())
    assert "dynamic_img_size" not in config["model_args"] and config["model_args"]["img_size"] == [8, 8]
    assert config["pretrained_cfg"]["fixed_input_size"] and config["pretrained_cfg"]["input_size"] == [1, 8, 8]
    summary = json.loads((straight / "summary.json").read_text())
    numbers = evaluate(str(straight), str(small_config(straight).data))
    assert (numbers["top1"], numbers["loss"]) == (summary["score"], summary["best_numbers"]["loss"])
    model, _ = open_folder(straight)
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(torch.zeros(1, 1, 12, 12))
    assert len(jumbo_vit.load(straight).predict(str(small_config(straight).data))) == 290


def test_two_processes_train_at_the_sizes_of_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "img_sizes": SIZES, "size_schedule": "progressive", "aug_repeats": 2}
    many: dict[str, Any] = {"devices": 2, "strategy": "ddp", "batch_size": 8, "grad_accum_steps": 2}
    for out, more in (("one", {"batch_size": 32}), ("two", many)):
        done = launch(tmp_path / out, **options, **more)
        assert done.returncode == 0, done.stderr
    one, first, second = seen(tmp_path / "one", 0), seen(tmp_path / "two", 0), seen(tmp_path / "two", 1)
    assert first["losses"] == pytest.approx(one["losses"], abs=1e-4) and len(one["losses"]) == 8
    assert first == second and one["idle"] == []


@pytest.mark.parametrize("schedule", ["mixed", "progressive"])
def test_a_run_at_several_shapes_learns(schedule: str, tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=8, val=4)
    options = {"model": TEST_MODEL, "img_size": "32x24", "epochs": 5, "batch_size": 8, "workers": 0, "logger": ["none"]}
    sizes = ["16", "24x32", "40"]
    config = TrainConfig(data=str(data), out=str(tmp_path / "run"), img_sizes=sizes, size_schedule=schedule, **options)  # type: ignore[arg-type]
    assert train(config)["score"] == 1.0
    assert evaluate(str(tmp_path / "run"), str(data))["top1"] == 1.0


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("resnet18", {"img_size": None}),
        ("eva02_tiny_patch14_224", {"model_args": ["depth=1", "embed_dim=24", "num_heads=2"], "patch_size": 8}),
        ("naflexvit_jumbo_tiny_patch16", {"model_args": ["depth=1", "embed_dim=24"], "patch_size": 8}),
        ("vit_test_patch8_reg16_32", {"patch_size": 8}),
        ("jumboized", {"model_args": ["base=vit_test_patch8_reg16_32"], "patch_size": 8}),
    ],
)
def test_other_models_take_several_sizes_too(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    changes = {"model": model, "img_size": "32", "patch_size": None, "img_sizes": ["16x24", "40"], **options}
    summary = train(small_config(tmp_path / "run", **changes, epochs=1, size_schedule="progressive"))
    numbers = evaluate(str(tmp_path / "run"), str(small_config(tmp_path).data))
    assert numbers["loss"] == summary["best_numbers"]["loss"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"img_sizes": ["8", "9x8"]}, "image size 9x8 is not a multiple of the patch size 2x2"),
        ({"img_sizes": ["8", "08"]}, "--img-sizes names 8x8 twice"),
        ({"img_sizes": ["8", "big"]}, "--img-sizes is 'big', but must be a number of pixels"),
        ({"size_schedule": "progressive"}, "--size-schedule progressive needs the sizes: add --img-sizes"),
        (
            {"img_sizes": ["16"], "img_size": "32", "model": "mixer_s16_224", "patch_size": None},
            "mixer_s16_224 does not take pictures of 16x16 beside those of its own size",
        ),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(small_config(tmp_path / "run", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
