"""Two processes on the CPU train as one does, and count each held-out picture once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.pipeline import EvalSet, Preparation, eval_loader
from jumbo_vit.tasks.evaluate import passes_of_rank_zero
from tests.runs import differences, small_command, state_of

OPTIONS: dict[str, Any] = {"epochs": 5, "model_ema": True, "smoothing": 0.1}


def launch(out: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    words = small_command(out, **(OPTIONS | changes))
    return run_python(["-m", "tests.recorded_run", str(out), *words])


def run_python(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def seen(out: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"rank{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("single") / "run"
    done = launch(out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(single: Path, tmp_path: Path, strategy: str) -> None:
    out = tmp_path / "run"
    # One process takes 32 pictures an update; two take 16 each. 40 updates, the last of each epoch with 16 pictures.
    done = launch(out, devices=2, strategy=strategy, batch_size=16)
    assert done.returncode == 0, done.stderr
    one, first, second = seen(single, 0), seen(out, 0), seen(out, 1)
    assert len(one["losses"]) == 40
    assert first["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert first == second  # the same losses and the same weights, to the bit
    assert first["idle"] == one["idle"] == []
    before, after = state_of(single)["progress"]["history"], state_of(out)["progress"]["history"]
    for left, right in zip(before, after, strict=True):
        for name in ("val_loss", "val_averaged_loss"):
            assert left[name] == pytest.approx(right[name], abs=1e-4)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["processes"] == 2
    assert done.stdout.count("epoch 1/5") == 1  # one log
    assert sorted(p.name for p in out.glob("*.ckpt")) == ["last.ckpt", "previous.ckpt"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_resume_with_two_processes_is_exact(tmp_path: Path, strategy: str) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes: dict[str, Any] = {"devices": 2, "strategy": strategy, "batch_size": 16, "epochs": 2}
    done = launch(straight, **changes)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "dies.py"
    script.write_text(
        """
import os
import signal
import sys
import jumbo_vit_command
from jumbo_vit.tasks import loop
original = loop.Loop._update
def update(self, group):
    if self.progress.epoch == 1 and self.progress.update == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, group)
loop.Loop._update = update
sys.exit(jumbo_vit_command.main(sys.argv[1:]))
"""
    )
    killed = run_python([str(script), "train", *small_command(broken, **(OPTIONS | changes))])
    assert killed.returncode != 0
    progress = torch.load(broken / "last.ckpt", weights_only=True)["progress"]
    assert (progress["epoch"], progress["update"]) == (1, 3)
    done = run_python(["-m", "jumbo_vit_command", "train", "--resume", str(broken)])
    assert done.returncode == 0, done.stderr
    assert differences(state_of(straight), state_of(broken)) == []


@pytest.mark.parametrize(("pictures", "world"), [(50, 1), (50, 2), (3, 2), (130, 2), (1, 2)])
def test_each_held_out_picture_counts_once(pictures: int, world: int) -> None:
    images = digits_splits().val.subset(range(pictures))
    dataset = EvalSet(images, "multiclass", Preparation((1, 8, 8), mean=(0.4,), std=(0.2,)))
    seen_by = [[int(i) for _, _, index in eval_loader(dataset, 0, rank, world) for i in index] for rank in range(world)]
    assert sorted(index for share in seen_by for index in share) == list(range(pictures))
    passes = [len(eval_loader(dataset, 0, rank, world)) for rank in range(world)]
    assert max(passes) == passes_of_rank_zero(pictures, world) == passes[0]
