"""What one update is: accumulation, bad batches, the choice of the best model, the golden curves."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from jumbo_vit.cli.replay import Config as ReplayConfig
from jumbo_vit.cli.replay import run as run_replay
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import fabric as fabric_module
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks import run as run_module
from jumbo_vit.tasks.average import averaged, growing_decay
from jumbo_vit.tasks.classify import Classification
from jumbo_vit.tasks.loop import STEADY_NAN
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.train import train
from tests.runs import small_config, state_of

GOLDEN = Path(__file__).parent / "data" / "golden_curves.json"


def record_losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    losses: list[float] = []
    original = loop_module.Loop._count

    def recording(self: Any, loss: float, size: int) -> None:
        losses.append(loss)
        original(self, loss, size)

    monkeypatch.setattr(loop_module.Loop, "_count", recording)
    return losses


def test_accumulation_equals_a_larger_batch(tmp_path: Path) -> None:
    # 240 pictures: 3 full updates of 64 and one of 48, which takes 3 passes of 16.
    plain = {"smoothing": 0.1, "opt": "sgd", "lr": 0.05, "epochs": 1}
    train(small_config(tmp_path / "large", **plain, batch_size=64))
    train(small_config(tmp_path / "small", **plain, batch_size=16, grad_accum_steps=4))
    large, small = state_of(tmp_path / "large"), state_of(tmp_path / "small")
    assert large["progress"]["updates"] == small["progress"]["updates"] == 4
    for name, value in large["model"].items():
        torch.testing.assert_close(small["model"][name], value, rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    train(small_config(tmp_path / "a", epochs=1, drop_path=0.2))
    train(small_config(tmp_path / "b", epochs=1, drop_path=0.2, grad_checkpointing=True))
    a, b = state_of(tmp_path / "a")["model"], state_of(tmp_path / "b")["model"]
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)


def poison(monkeypatch: pytest.MonkeyPatch, bad: set[int], value: float = math.inf) -> None:
    """Put a value that is not finite into one picture of the updates counted in `bad`."""
    original = loop_module.Loop._update
    count = 0

    def poisoned(self: Any, group: Any) -> None:
        nonlocal count
        if count in bad:
            group[0][0][3, 0, 1, 1] = value
        count += 1
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", poisoned)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_batch_is_skipped_counted_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], accumulate: int
) -> None:
    out = tmp_path / "run"
    poison(monkeypatch, {4})
    summary = train(
        small_config(out, mixup=0.2, model_ema=True, batch_size=32 // accumulate, grad_accum_steps=accumulate)
    )
    assert summary["bad_updates"] == 1
    assert summary["updates"] == 15  # the schedule counts updates that were made
    assert "1 updates skipped" in capsys.readouterr().out
    assert all(value.isfinite().all() for value in state_of(out)["model"].values())
    found = replay(out)
    assert found["same"] and math.isnan(found["replayed"])
    assert found["update"] == 4 and found["bad_weights"] == []
    # Mixup pairs each picture with its mirror in the batch, so the poison sits in two inputs as saved: before mixing.
    assert found["bad_inputs"] == [3]
    assert 3 in found["bad_samples"]
    run_replay(ReplayConfig(run=str(out)))
    assert "the same" in capsys.readouterr().out


def test_a_bad_gradient_with_a_finite_loss_is_skipped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Classification.step
    count = 0

    class Burst(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * math.inf

    def step(self: Any, model: Any, batch: Any, seed: int) -> torch.Tensor:
        nonlocal count
        count += 1
        losses = original(self, model, batch, seed)
        return Burst.apply(losses) if count == 3 else losses

    monkeypatch.setattr(Classification, "step", step)
    summary = train(small_config(tmp_path / "run", epochs=1))
    assert summary["bad_updates"] == 1 and summary["updates"] == 7
    assert all(value.isfinite().all() for value in state_of(tmp_path / "run")["model"].values())


def test_fp16_with_a_loss_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # fp16 is for GPUs; a scaler for the CPU shows the same code what happens to an update that is skipped.
    class HalfOnCpu(Fabric):
        def __init__(self, precision: str, **kwargs: Any) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
            super().__init__(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **kwargs)

    monkeypatch.setattr(fabric_module, "Fabric", HalfOnCpu)
    monkeypatch.setattr(fabric_module, "pick_precision", lambda *_: "fp16")
    poison(monkeypatch, {60})
    summary = train(small_config(tmp_path / "run", epochs=8))
    assert summary["precision"] == "fp16"
    assert summary["bad_updates"] == 1  # the poisoned one
    assert 10 <= summary["rescaled_updates"] < 40  # from 2**40 down to what fp16 holds
    assert summary["updates"] + summary["bad_updates"] + summary["rescaled_updates"] == 64
    state = state_of(tmp_path / "run")
    assert state["precision"]["scale"] < 2.0**30
    assert all(value.isfinite().all() for value in state["model"].values())


def test_steady_nan_stops_with_the_best_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    poison(monkeypatch, set(range(9, 1000)))
    with pytest.raises(UserError, match=rf"{STEADY_NAN} updates in a row \(epoch 2.*best model \(epoch 1\) is intact"):
        train(small_config(out, epochs=3))
    content = torch.load(out / "last.ckpt", weights_only=True)
    assert all(value.isfinite().all() for value in content["model"].values())
    assert (out / "model" / "model.safetensors").exists()


def test_a_huge_rate_never_overwrites_the_best(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match="not finite"):
        train(small_config(out, epochs=30, lr=1e30, clip_grad=0.0, opt="sgd", warmup_epochs=0.0))


def test_a_model_of_nan_is_never_the_best(tmp_path: Path) -> None:
    # One update an epoch makes the weights NaN before any loss shows it.
    out = tmp_path / "run"
    options = {"lr": 1e25, "min_lr": 1e25, "clip_grad": 0.0, "opt": "sgd", "warmup_epochs": 0.0, "batch_size": 240}
    with pytest.raises(UserError, match="no epoch gave a finite top1, so no model was kept: lower --lr"):
        train(small_config(out, epochs=3, **options))
    assert not (out / "model").exists()
    assert all(math.isnan(row["val_top1"]) for row in state_of(out)["progress"]["history"])


def test_a_failing_logger_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "tensorboard").write_text("in the way")
    train(small_config(out, logger=["tensorboard"], epochs=1))
    assert "the logger TensorBoardLogger failed and is left out" in capsys.readouterr().out
    assert (out / "last.ckpt").exists()


def test_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no bad-batch.pt"):
        replay(tmp_path)
    (tmp_path / "bad-batch.pt").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UserError, match="is cut off"):
        replay(tmp_path)


def scripted(monkeypatch: pytest.MonkeyPatch, scores: list[dict[str, float]]) -> list[tuple[int, str]]:
    """Replace the scores of a run by a script, and list which models were kept."""
    kept: list[tuple[int, str]] = []
    script = iter(scores)

    def score(self: Any) -> dict[str, dict[str, Any]]:
        return {kind: {"top1": value, "loss": 1.0, "n": 1} for kind, value in next(script).items()}

    def keep(self: Any, progress: Any, kind: str) -> None:
        kept.append((progress.epoch, kind))

    monkeypatch.setattr(run_module.Run, "_score", score)
    monkeypatch.setattr(run_module.Run, "_keep", keep)
    return kept


def test_ties_keep_the_earlier_and_nan_never_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = math.nan
    scores = [nan, 0.5, 0.5, nan, 0.4, 0.6]
    kept = scripted(monkeypatch, [{"plain": score} for score in scores])
    summary = train(small_config(tmp_path / "run", epochs=6, batch_size=240))
    assert kept == [(2, "plain"), (6, "plain")]
    assert (summary["score"], summary["best_epoch"]) == (0.6, 6)


def test_the_better_of_plain_and_averaged_is_kept_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [(0.3, 0.3), (0.4, 0.5), (math.nan, 0.6), (0.7, math.nan)]
    kept = scripted(monkeypatch, [{"plain": plain, "averaged": average} for plain, average in scores])
    train(small_config(tmp_path / "run", epochs=4, batch_size=240, model_ema=True))
    assert kept == [(1, "plain"), (2, "averaged"), (3, "averaged"), (4, "plain")]


def test_early_stopping_is_counted_in_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [{"plain": score} for score in (0.1, 0.5, 0.4, 0.5, 0.9, 0.9)])
    summary = train(small_config(tmp_path / "run", epochs=6, batch_size=240, patience=2))
    assert (summary["epochs"], summary["stopped_early"], summary["best_epoch"]) == (4, True, 2)


@given(highest=st.floats(0, 0.99999), updates=st.integers(0, 10**6))
def test_decay_grows_to_its_limit(highest: float, updates: int) -> None:
    decay = growing_decay(highest, updates)
    assert 0 <= decay <= highest
    assert growing_decay(highest, updates + 1) >= decay


@settings(max_examples=20)
@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=12), highest=st.floats(0.1, 0.9999))
def test_the_average_follows_its_formula(values: list[float], highest: float) -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.7)
    average = averaged(model, highest)
    expected = 0.7
    for number, value in enumerate(values):
        torch.nn.init.constant_(model.weight, value)
        average.update_parameters(model)
        # torch's AveragedModel takes the first value whole, then counts from 1.
        decay = 0.0 if number == 0 else min(highest, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * value
    assert average.module.weight.item() == pytest.approx(expected, abs=1e-12)


CURVES: dict[str, dict[str, Any]] = {
    "plain": {"smoothing": 0.0, "hflip": 0.0, "scale": (0.8, 1.0), "lr": 5e-4},
    "everything": {
        "mixup": 0.8,
        "cutmix": 1.0,
        "smoothing": 0.1,
        "drop_path": 0.1,
        "model_ema": True,
        "layer_decay": 0.75,
        "grad_accum_steps": 2,
        "aa": "3a",
        "color_jitter": 0.3,
        "reprob": 0.25,
        "hflip": 0.5,
        "in_chans": 3,
    },
}


@pytest.mark.parametrize("name", CURVES)
def test_golden_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """50 updates of the micro model; made by `python -m tests.make_golden_curves` and changed only on purpose."""
    losses = golden_run(tmp_path / "run", monkeypatch, name)
    expected = json.loads(GOLDEN.read_text())[name]
    assert losses == pytest.approx(expected, abs=5e-3)


def golden_run(out: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> list[float]:
    losses = record_losses(monkeypatch)
    accumulate = CURVES[name].get("grad_accum_steps", 1)
    options = CURVES[name] | {
        "batch_size": 32 // accumulate,
        "epochs": 2,
        "model": "jumbo_vit_micro",
        "data": "digits",
        "val_fraction": 0.1,
    }

    class Enough(Exception):
        pass

    original = loop_module.Loop._update

    def limited(self: Any, group: Any) -> None:
        if len(losses) == 50:
            raise Enough
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", limited)
    with pytest.raises(Enough):
        train(small_config(out, **options))
    return losses
