"""Two processes on the CPU train as one does, and count each held-out picture once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import differences, small_command, state_of

OPTIONS: dict[str, Any] = {"epochs": 5, "model_ema": True, "smoothing": 0.1}


def launch(out: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jumbo_vit_command", "train", *small_command(out, **(OPTIONS | changes))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


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
    one, two = state_of(single), state_of(out)
    assert one["progress"]["updates"] == two["progress"]["updates"] == 40
    for left, right in zip(one["progress"]["history"], two["progress"]["history"], strict=True):
        for name in ("train_loss", "val_loss", "val_averaged_loss"):
            assert left[name] == pytest.approx(right[name], abs=1e-4)
        assert left["val_top1"] == pytest.approx(right["val_top1"], abs=0.021)  # one picture of 50
    summary = json.loads((out / "summary.json").read_text())
    assert summary["processes"] == 2
    assert done.stdout.count("epoch 1/5") == 1  # one log
    assert sorted(p.name for p in out.glob("*.ckpt")) == ["last.ckpt", "previous.ckpt"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_agree_and_every_parameter_learns(tmp_path: Path, strategy: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        """
import sys, torch, hashlib
from pathlib import Path
import jumbo_vit
from jumbo_vit.tasks import loop, train as t
from jumbo_vit.tasks.sharding import whole
from tests.runs import small_config
out, strategy = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
config = small_config(out, batch_size=16, devices=2, strategy=strategy, epochs=1)
config.given = frozenset()
seen = {}
original = loop.Loop._step
def step(self, finite):
    for name, p in self.parts.model.named_parameters():
        seen[name] = seen.get(name, False) or (p.grad is not None and bool(whole(p.grad).abs().sum() > 0))
    return original(self, finite)
loop.Loop._step = step
run = t.Run(t.with_defaults(config))
run.train()
weights = whole(run.model.state_dict())
digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in weights.values())).hexdigest()
missing = [name for name, there in seen.items() if not there]
(out / f"rank{run.fabric.global_rank}.txt").write_text(f"{digest} {missing}")
"""
    )
    out = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), str(out), strategy], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = ((out / f"rank{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert first.endswith(" []")


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
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, str(script), "train", *small_command(broken, **(OPTIONS | changes))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert killed.returncode != 0
    progress = torch.load(broken / "last.ckpt", weights_only=True)["progress"]
    assert (progress["epoch"], progress["update"]) == (1, 3)
    command = [sys.executable, "-m", "jumbo_vit_command", "train", "--resume", str(broken)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert differences(state_of(straight), state_of(broken)) == []
