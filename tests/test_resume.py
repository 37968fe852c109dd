"""A run that is stopped goes on as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from jumbo_vit.cli.parser import main
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks import run as run_module
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.train import train
from tests.runs import differences, small_command, small_config, state_of

FULL = {
    "model_ema": True,
    "mixup": 0.2,
    "cutmix": 0.5,
    "drop_path": 0.1,
    "smoothing": 0.1,
    "patience": 9,
    "layer_decay": 0.8,
}


class Killed(BaseException):
    """Stands for a kill: nothing of the run's own clean-up gets a chance to write."""


def run_until(monkeypatch: pytest.MonkeyPatch, config: TrainConfig, updates: int, **given: Any) -> None:
    """Run, and stop dead after so many updates; `given` is for `train`."""
    original = loop_module.Loop._update
    count = 0

    def counted(self: Any, group: Any) -> None:
        nonlocal count
        if count == updates:
            raise Killed
        count += 1
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", counted)
    with pytest.raises(Killed):
        train(config, **given)
    monkeypatch.setattr(loop_module.Loop, "_update", original)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(small_config(out, **FULL))
    return out


@pytest.mark.parametrize("updates", [3, 5, 8, 9, 15])
def test_a_killed_run_ends_with_the_same_bits(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, small_config(out, **FULL), updates)
    train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    assert differences(state_of(straight), state_of(out)) == []
    for name in ("model/model.safetensors", "metrics.csv"):
        assert (straight / name).read_bytes() == (out / name).read_bytes()


def test_workers_do_not_change_the_run(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small_config(out, **FULL, workers=2))
    assert differences(state_of(straight), state_of(out)) == []


def test_workers_started_by_spawn_give_the_same_run(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small_config(out, **FULL, workers=1, worker_start="spawn", epochs=2))
    assert differences(state_of(straight), state_of(out)) == []


def test_the_seed_decides_the_run(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small_config(out, **FULL, seed=1))
    assert differences(state_of(straight)["model"], state_of(out)["model"])


def test_a_finished_run_says_so_and_can_be_lengthened(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    text = (out / "config.yaml").read_text().replace(str(straight), str(out))
    (out / "config.yaml").write_text(text)
    before = state_of(out)
    summary = train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    assert "finished (all 2 epochs)" in capsys.readouterr().out
    assert summary["epochs"] == 2
    assert differences(before, state_of(out)) == []
    longer = train(TrainConfig(resume=str(out), epochs=3, given=frozenset({"resume", "epochs"})))
    assert longer["epochs"] == 3
    assert len((out / "metrics.csv").read_text().splitlines()) == 4
    with pytest.raises(UserError, match="less than the run's 3"):
        train(TrainConfig(resume=str(out), epochs=2, given=frozenset({"resume", "epochs"})))


def test_only_epochs_may_change(straight: Path) -> None:
    with pytest.raises(UserError, match=r"only --epochs may be changed, not --lr"):
        train(TrainConfig(resume=str(straight), lr=1.0, given=frozenset({"resume", "lr"})))


def test_changed_pictures_are_refused(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, small_config(out, **FULL), 5)
    monkeypatch.setattr(run_module, "fingerprint", lambda splits: "other")
    with pytest.raises(UserError, match="are not those that the run began with"):
        train(TrainConfig(resume=str(out), given=frozenset({"resume"})))


def test_a_cut_checkpoint_is_named_and_the_one_before_it_offered(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, small_config(out, **FULL), 10)
    last = out / "last.ckpt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    with pytest.raises(UserError, match=r"last.ckpt is cut off.*previous.ckpt is whole .*--resume") as error:
        train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    offered = str(error.value).split("--resume ")[1]
    train(TrainConfig(resume=offered, given=frozenset({"resume"})))
    assert differences(state_of(straight), state_of(out)) == []


def test_a_foreign_checkpoint_is_named(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    (out / "previous.ckpt").unlink()
    torch.save({"weights": torch.zeros(2)}, out / "last.ckpt")
    with pytest.raises(UserError, match=r"last.ckpt is no checkpoint of a run.*no whole checkpoint is left"):
        train(TrainConfig(resume=str(out), given=frozenset({"resume"})))


def test_a_missing_last_checkpoint_is_replaced_by_the_one_before(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A kill between the two renames leaves the run like this.
    out = tmp_path / "run"
    run_until(monkeypatch, small_config(out, **FULL), 10)
    (out / "last.ckpt").unlink()
    train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    assert differences(state_of(straight), state_of(out)) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_from_outside(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "jumbo_vit_command", "train", *small_command(out, epochs=200)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(number)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert ("state written" in text) == (number != signal.SIGKILL)
    assert torch.load(out / "last.ckpt", weights_only=True)["progress"]["finished"] is False


def test_a_cut_config_is_refused(straight: Path, tmp_path: Path) -> None:
    lines = (straight / "config.yaml").read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        out = tmp_path / f"run{count}"
        out.mkdir()
        shutil.copy(straight / "last.ckpt", out)
        (out / "config.yaml").write_text("".join(lines[:count]))
        with pytest.raises(UserError, match=r"config\.yaml"):
            train(TrainConfig(resume=str(out), epochs=3, given=frozenset({"resume", "epochs"})))


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("model_ema: true", "model_ema: false", "differ in model_ema"),
        ("seed: 0", "seed: 5", "differ in seed"),
        ("batch_size: 32", "batch_size: 16", "takes 32 pictures, with these options 16"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    straight: Path, tmp_path: Path, line: str, changed: str, message: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    text = (out / "config.yaml").read_text()
    assert line in text
    (out / "config.yaml").write_text(text.replace(line, changed))
    with pytest.raises(UserError, match=message):
        train(TrainConfig(resume=str(out), epochs=3, given=frozenset({"resume", "epochs"})))


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, small_config(out, **FULL), 1)
    with pytest.raises(UserError, match="start it again"):
        train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    train(small_config(out, **FULL))
    assert differences(state_of(straight), state_of(out)) == []


def test_a_finished_run_without_its_summary_writes_it(straight: Path, tmp_path: Path) -> None:
    # A kill after the last state and before the summary leaves the run like this.
    out = tmp_path / "elsewhere"
    shutil.copytree(straight, out)
    (out / "summary.json").unlink()
    summary = train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    assert summary["epochs"] == 2 and (out / "summary.json").is_file()


def test_the_options_of_a_run_start_another(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    assert main(["train", "--config", str(straight / "config.yaml"), "--out", str(out)]) == 0
    assert differences(state_of(straight), state_of(out)) == []


def test_raised_epochs_survive_a_kill(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    run_until(monkeypatch, TrainConfig(resume=str(out), epochs=3, given=frozenset({"resume", "epochs"})), 1)
    summary = train(TrainConfig(resume=str(out), given=frozenset({"resume"})))
    assert summary["epochs"] == 3
