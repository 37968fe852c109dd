"""Kill one run again and again at random moments, and compare its end with an undisturbed one, bit by bit.

    python scripts/kill_and_resume.py --kills 20 --out results/kill_and_resume.json

The run has averaged weights, mixup and cutmix, drop path, and two loading processes. SIGTERM and SIGKILL take turns;
each is followed by `jumbo-vit train --resume`. The script fails if a single bit of weights, averages or optimizer
state, or any number in the history, differs.
"""

import argparse
import json
import math
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

COMMAND = [sys.executable, "-m", "jumbo_vit_command", "train"]
RUN = (
    "--model jumbo_vit_test_patch8_32 --img-size 8 --patch-size 2 --batch-size 100 --model-ema --mixup 0.2 "
    "--cutmix 0.5 --drop-path 0.1 --workers 2 --recovery-interval 5 --logger none --seed 3"
)


def same(left: Any, right: Any) -> bool:
    """Equality to the last bit through dicts and lists, NaN included."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return bool(left == right) or nan


def state(out: Path) -> dict[str, Any]:
    """A finished run's state without what may differ: the time it took."""
    content: dict[str, Any] = torch.load(out / "last.ckpt", weights_only=True)
    content["progress"].pop("seconds")
    return content


def wait_for(log: Path, text: str, child: "subprocess.Popen[bytes]") -> None:
    """Wait until the run has written `text`, or has ended."""
    while text not in log.read_text() and child.poll() is None:
        time.sleep(0.05)


def main() -> None:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds from the start of training to a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", default="", help="more options for the run, such as '--devices 2 --strategy ddp'")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    work = Path(tempfile.mkdtemp())
    options = [*RUN.split(), "--epochs", str(args.epochs), *args.extra.split()]
    plain, disturbed = work / "plain", work / "disturbed"
    start = time.monotonic()
    subprocess.run([*COMMAND, *options, "--out", str(plain)], check=True, stdout=subprocess.DEVNULL)
    whole = time.monotonic() - start
    print(f"undisturbed: {whole:.0f} s", flush=True)
    kills: list[dict[str, Any]] = []
    log = work / "log"
    while True:
        begun = any(disturbed.glob("*.ckpt"))
        if not begun:
            shutil.rmtree(disturbed, ignore_errors=True)
        words = ["--resume", str(disturbed)] if begun else [*options, "--out", str(disturbed)]
        with log.open("w") as file:
            child = subprocess.Popen([*COMMAND, *words], stdout=file, stderr=subprocess.STDOUT)
            if len(kills) == args.kills:
                break
            kind = signal.SIGKILL if len(kills) % 2 else signal.SIGTERM
            # One in five falls into the start of the program, the others into training, scoring and writing.
            if len(kills) % 5 != 4:
                wait_for(log, "pictures an update", child)
            delay = draw.uniform(0.0, args.longest)
            time.sleep(delay)
            if child.poll() is not None:
                sys.exit(f"the run ended after {len(kills)} kills: raise --epochs\n{log.read_text()}")
            child.send_signal(kind)
            child.wait()
        found = torch.load(disturbed / "last.ckpt", weights_only=True)["progress"] if begun else {}
        place = {key: found.get(key, 0) for key in ("epoch", "update", "updates")}
        kills.append({"signal": kind.name, "after_s": round(delay, 2), **place, "exit": child.returncode})
        print(kills[-1], flush=True)
    if child.wait():
        sys.exit(f"the last resume failed\n{log.read_text()}")
    left, right = state(plain), state(disturbed)
    parts = {key: same(left[key], right[key]) for key in left if key != "versions"}
    model = [
        (plain / "model" / n).read_bytes() == (disturbed / "model" / n).read_bytes()
        for n in ("model.safetensors", "config.json")
    ]
    result = {
        "command": "python scripts/kill_and_resume.py " + " ".join(map(shlex.quote, sys.argv[1:])),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "run": " ".join(options),
        "undisturbed_s": round(whole, 1),
        "kills": kills,
        "equal": {**parts, "model.safetensors": model[0], "config.json": model[1]},
    }
    print(json.dumps(result["equal"]))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(work)
    if not all(result["equal"].values()):
        sys.exit("the resumed run differs from the undisturbed one")
    print(f"{args.kills} kills: every bit equal")


if __name__ == "__main__":
    main()
