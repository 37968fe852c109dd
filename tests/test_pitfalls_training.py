"""Faults of training loops that users of other tools reported in public, each tried here as they met it.

One group of tests a case, under its name and the threads that tell of it. Other suites pin most of this in more
detail. Each further task (reconstruction, segmentation, series, text, retrieval) adds its own.
"""

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.tasks.average import growing_decay
from jumbo_vit.tasks.classify import Classification
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.loop import Loop
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.train import train
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL, colour_folder, square
from tests.runs import differences, state_of
from tests.test_loop import poison
from tests.test_resume import FULL, run_until

# The 24 pictures of `colours` are 3 updates an epoch.
QUICK: dict[str, Any] = {"model": TEST_MODEL, "workers": 0, "logger": ["none"], "batch_size": 8, "epochs": 2}


def config(data: Path, out: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**(QUICK | {"data": str(data), "out": str(out)} | changes))


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((out / "metrics.csv").read_text())))


def resume(out: Path, **changes: Any) -> dict[str, Any]:
    return train(TrainConfig(resume=str(out), given=frozenset({"resume", *changes}), **changes))


def uneven(root: Path, counts: dict[str, int], held_out: int = 8) -> Path:
    """A folder of colours with so many training pictures each, and `held_out` of each to score."""
    for part in ("train", "val"):
        for number, colour in enumerate(counts):
            (root / part / colour).mkdir(parents=True)
            for index in range(counts[colour] if part == "train" else held_out):
                seed = 10_000 * (part == "val") + 1000 * number + index
                square(colour, seed).save(root / part / colour / f"{index:02}.png")
    return root


# Resume is not the same run.
# deit 173, lightning 5325, 1772, 850 and 1182, lightly-train 301, QANet 4, yolov5 292

# The state is written after the second update of an epoch, and at its end.
WHOLE: dict[str, Any] = FULL | {"precision": "bf16", "epochs": 4, "recovery_interval": 2}


@pytest.fixture(scope="module")
def straight(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(config(colours, out, **WHOLE))
    return out


def assert_equal_runs(one: Path, other: Path) -> None:
    assert differences(state_of(one), state_of(other)) == []
    for name in ("metrics.csv", "model/model.safetensors", "model/config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    summaries = [json.loads((out / "summary.json").read_text()) for out in (one, other)]
    for name in ("score", "best_epoch", "best_weights", "updates", "seed"):
        assert summaries[0][name] == summaries[1][name]


@pytest.mark.parametrize(("updates", "workers"), [(6, 2), (7, 0), (8, 2)])
def test_resume_is_the_same_run__killed_after_two_of_four_epochs_and_in_mid_epoch(
    straight: Path, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int, workers: int
) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, config(colours, out, **WHOLE | {"workers": workers}), updates)
    before = torch.load(out / "last.ckpt", weights_only=True)
    assert before["progress"]["updates"] == {6: 6, 7: 6, 8: 8}[updates]
    assert int(before["average"]["n_averaged"]) == before["progress"]["updates"]
    resume(out)
    assert_equal_runs(straight, out)
    rows = rows_of(out)
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"] and rows[-1]["updates"] == "12"
    assert all(math.isfinite(float(row["val_averaged_top1"])) for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        {"opt": "muon"},
        {"opt": "sgd", "grad_accum_steps": 3, "batch_size": 3},
        {"balance": "sampler", "aa": "rand-m9-mstd0.5-inc1"},
        {"balance": "weights", "reprob": 0.5, "color_jitter": 0.4},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_resume_is_the_same_run__with_other_optimizers_and_orders(
    options: dict[str, Any], colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"recovery_interval": 2, "mixup": 0.2} | options
    train(config(colours, tmp_path / "one", **both))
    run_until(monkeypatch, config(colours, tmp_path / "other", **both), 5)
    resume(tmp_path / "other")
    assert_equal_runs(tmp_path / "one", tmp_path / "other")


def test_resume_is_the_same_run__of_a_baseline_moved_to_another_place(
    colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"model": "vit_test_patch8_reg16_32", "model_ema": True}
    monkeypatch.chdir(colours.parent)
    train(config(Path(colours.name), tmp_path / "one", **options))
    run_until(monkeypatch, config(Path(colours.name), tmp_path / "there", **options), 4)
    shutil.move(tmp_path / "there", tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    resume(Path("here"))
    assert_equal_runs(tmp_path / "one", tmp_path / "here")


def test_resume_is_the_same_run__finished_says_so_and_more_epochs_go_on(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(straight, tmp_path / "run")
    before, done = state_of(out), rows_of(out)
    assert main(["train", "--resume", str(out)]) == 0
    assert "the run is finished (all 4 epochs); to go on, raise --epochs" in capsys.readouterr().out
    assert differences(before, state_of(out)) == []
    assert main(["train", "--resume", str(out), "--epochs", "6"]) == 0
    rows, after = rows_of(out), state_of(out)
    assert rows[:4] == done and [row["epoch"] for row in rows[4:]] == ["5", "6"]
    assert after["progress"]["updates"] == int(after["average"]["n_averaged"]) == 18
    assert after["progress"]["best_score"] >= before["progress"]["best_score"]
    # The rate goes on by the longer plan: down to the same end, not warmed up once more.
    rates = [float(row["lr"]) for row in rows]
    assert rates[4] > rates[5] and rates[5] < rates[2]
    last = after["optimizer"]["state"]
    assert {int(entry["step"]) for entry in last.values()} == {18}


# Averaged weights (EMA) ruin short runs.
# actionformer 103, timm 245, mmpretrain 870, RepLKNet 24


@pytest.mark.parametrize("batch_size", [8, 32])
def test_averaged_weights_in_short_runs__60_images_5_epochs_default_decay(batch_size: int, tmp_path: Path) -> None:
    data, out = colour_folder(tmp_path / "data", train=20, val=8), tmp_path / "out"
    summary = train(config(data, out, epochs=5, batch_size=batch_size, lr=3e-3, model_ema=True))
    assert summary["images"]["train"] == 60
    rows = rows_of(out)
    assert float(rows[-1]["val_averaged_top1"]) >= float(rows[-1]["val_top1"]) - 0.1
    # The likeliest class may be right on hardly moved weights; the loss says how far the average has come.
    plain, average = float(rows[-1]["val_loss"]), float(rows[-1]["val_averaged_loss"])
    assert average - plain < 0.7 * (math.log(3) - plain)
    best = rows[summary["best_epoch"] - 1]
    scores = {"plain": float(best["val_top1"]), "averaged": float(best["val_averaged_top1"])}
    assert summary["score"] == scores[summary["best_weights"]] == max(scores.values())
    assert open_folder(out)[1].lineage["weights"] == summary["best_weights"]
    assert evaluate(str(out), str(data))["top1"] == summary["score"]


def test_averaged_weights_in_short_runs__the_decay_grows_with_the_updates() -> None:
    decays = [growing_decay(0.9998, updates) for updates in (0, 10, 100, 10**6)]
    assert decays == pytest.approx([0.1, 0.55, 101 / 110, 0.9998])


# NaN with mixed precision.
# T2T-ViT 26, Vim 30, insightface 2262, imageclassification 1, deit 173


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("bad", "value"), [(0, math.inf), (2, math.nan), (4, -math.inf)])
def test_nan_with_mixed_precision__one_bad_batch_is_skipped_counted_and_not_scheduled(
    precision: str, bad: int, value: float, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {bad}, value)
    original, rates = Loop._update, list[float]()

    def noting(self: Any, group: Any) -> None:
        rates.append(self.parts.optimizer.param_groups[0]["lr"])
        original(self, group)

    monkeypatch.setattr(Loop, "_update", noting)
    out = tmp_path / "run"
    summary = train(config(colours, out, precision=precision, model_ema=True, warmup_epochs=1.0))
    assert (summary["bad_updates"], summary["updates"], summary["precision"]) == (1, 5, precision)
    assert rates[bad] == rates[bad + 1] and len(set(rates)) == 5
    state = state_of(out)
    assert int(state["average"]["n_averaged"]) == 5
    for weights in (state["model"], state["average"], open_folder(out)[0].state_dict()):
        assert all(bool(weight.isfinite().all()) for weight in weights.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nan_with_mixed_precision__steady_nan_stops_with_a_hint_and_the_best_intact(
    precision: str, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    poison(monkeypatch, set(range(4, 1000)), math.nan)
    with pytest.raises(UserError, match=r"5 updates in a row \(epoch 3.*best model \(epoch 1\) is intact; lower --lr"):
        train(config(colours, out, epochs=9, lr=1e-6, precision=precision))
    model, contract = open_folder(out)
    assert all(bool(weight.isfinite().all()) for weight in model.state_dict().values())
    assert contract.lineage["epoch"] == 1 and len(torch.load(out / "last.ckpt")["progress"]["history"]) == 2


@pytest.mark.parametrize("clip_grad", [1.0, 0.0])
def test_nan_with_mixed_precision__a_rate_100_times_too_high(clip_grad: float, colours: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"epochs": 4, "lr": 0.1, "warmup_epochs": 0.0, "precision": "bf16", "model_ema": True}
    # Whether it diverges is the arithmetic's choice: either a hint or a finite score, and no model that is not finite.
    said = ""
    try:
        score = train(config(colours, out, **options, clip_grad=clip_grad))["score"]
    except UserError as error:
        said, score = str(error), None
    assert "lower --lr" in said if score is None else math.isfinite(score)
    if (out / "model").exists():
        assert all(bool(weight.isfinite().all()) for weight in open_folder(out)[0].state_dict().values())


# Rare classes.
# pytorch 104776, TokenLabeling 11, gluon-cv 644


PAIR, THREE = {"red": 57, "green": 3}, {"blue": 60, "red": 12, "green": 3}


@pytest.mark.parametrize(
    ("counts", "balance"), [(PAIR, "none"), (PAIR, "weights"), (THREE, "weights"), (THREE, "sampler")]
)
def test_rare_classes__with_smoothing_and_mixup_none_is_lost(
    counts: dict[str, int], balance: Any, tmp_path: Path
) -> None:
    data, out = uneven(tmp_path / "data", counts), tmp_path / "out"
    options = {"epochs": 6, "lr": 3e-3, "smoothing": 0.1, "mixup": 0.2, "balance": balance}
    summary = train(config(data, out, **options))
    numbers = evaluate(str(out), str(data))
    assert numbers["per_class_accuracy"].keys() == counts.keys()
    assert min(numbers["per_class_accuracy"].values()) > 0.7
    assert numbers["balanced_accuracy"] == pytest.approx(sum(numbers["per_class_accuracy"].values()) / len(counts))
    assert float(rows_of(out)[summary["best_epoch"] - 1]["val_balanced_accuracy"]) == numbers["balanced_accuracy"]
    assert summary["metric"] == ("top1" if balance == "none" else "balanced_accuracy")
    assert any("3 training pictures" in note or "green 3" in note for note in summary["notes"])


def test_rare_classes__all_background_does_not_look_good(tmp_path: Path) -> None:
    data, out = uneven(tmp_path / "data", {"red": 19, "green": 1}), tmp_path / "out"
    shutil.copytree(data / "val" / "red", tmp_path / "rare" / "red")
    (tmp_path / "rare" / "green").mkdir()
    shutil.copy(data / "val" / "green" / "00.png", tmp_path / "rare" / "green")
    train(config(data, out, epochs=1, lr=0.0, min_lr=0.0))
    model, contract = open_folder(out)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 9.0]))  # every picture is red
    save_folder(out / "model", model, contract)
    numbers = evaluate(str(out), str(tmp_path / "rare"))
    assert numbers["top1"] == pytest.approx(8 / 9) and numbers["balanced_accuracy"] == 0.5
    assert numbers["per_class_accuracy"] == {"green": 0.0, "red": 1.0}


# Randomness: workers that copy each other, seeds that do not fix the run.
# pytorch 5059, CenterNet 233, MAE-pytorch 28, lightning 20412, mmaction2 1596


def seen(out: Path, data: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[bytes], dict[str, Any]]:
    """The pictures of a run of two epochs as the model saw them, in order, and its state."""
    pictures: list[bytes] = []
    original = Loop._update

    def noting(self: Any, group: Any) -> None:
        pictures.extend(picture.numpy().tobytes() for images, *_ in group for picture in images)
        original(self, group)

    monkeypatch.setattr(Loop, "_update", noting)
    both = {"batch_size": 4, "color_jitter": 0.4, "reprob": 0.5, "mixup": 0.2, "drop_path": 0.2}
    train(config(data, out, **both, **options))
    monkeypatch.setattr(Loop, "_update", original)
    return pictures, state_of(out)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve times the same picture in two classes: what differs in training is the augmentation alone."""
    root = tmp_path_factory.mktemp("alike")
    for part, count in (("train", 6), ("val", 1)):
        for name in ("a", "b"):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                square("red", 1).save(root / part / name / f"{index}.png")
    return root


def test_randomness__no_two_workers_and_no_two_epochs_share_a_draw(
    alike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [seen(tmp_path / f"{n}", alike, monkeypatch, workers=n) for n in (0, 1, 4)]
    first = runs[0][0]
    assert len(first) == len(set(first)) == 24
    assert all(pictures == first for pictures, _ in runs)
    assert all(differences(state, runs[0][1]) == [] for _, state in runs)


def test_randomness__the_seed_fixes_the_run_and_zero_is_a_seed(
    alike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    zero, state = seen(tmp_path / "zero", alike, monkeypatch, seed=0)
    torch.manual_seed(6)  # what was drawn before a run is nothing to it
    again, same = seen(tmp_path / "again", alike, monkeypatch, seed=0)
    one, other = seen(tmp_path / "one", alike, monkeypatch, seed=1)
    assert zero == again and differences(state, same) == []
    assert not set(zero) & set(one) and differences(state["model"], other["model"])
    for name, seed in (("zero", 0), ("one", 1)):
        out = tmp_path / name
        assert json.loads((out / "summary.json").read_text())["seed"] == seed
        assert yaml.safe_load((out / "config.yaml").read_text())["seed"] == seed
        assert json.loads((out / "model" / "config.json").read_text())["jumbo_vit"]["seed"] == seed


def test_randomness__every_forward_pass_has_a_seed_of_its_own(
    colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seeds = Classification.step, list[int]()

    def noting(self: Any, model: Any, batch: Any, seed: int) -> torch.Tensor:
        seeds.append(seed)
        return original(self, model, batch, seed)

    monkeypatch.setattr(Classification, "step", noting)
    train(config(colours, tmp_path / "out", batch_size=4, grad_accum_steps=2, mixup=0.2))
    assert len(seeds) == len(set(seeds)) == 12
