"""The training step: speed and memory against the authors' code and registers, and what makes the micro model's faster.

    git clone https://github.com/antofuller/jumbo /somewhere/jumbo      (needs einops)
    python scripts/bench_training.py --official /somewhere/jumbo --out results/speed/training.json

A step is forward, cross-entropy, backward and an AdamW update. Each arm lives in processes of its own, since threads
and the allocator belong to a process; a round asks one after the other for a step, each round beginning with another
arm, with a pause in which the threads of the one before fall asleep. Kept bytes are the tensors saved for the backward
pass. The machine must do nothing else.
"""

import argparse
import multiprocessing
import os
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jumbo_vit.files import write_json
from jumbo_vit.measure.timing import Timing


@dataclass(frozen=True)
class Arm:
    """One way to make a step.

    `code` is "official" or a name of timm's; `processes` split the batch and average their gradients.
    """

    name: str
    code: str
    pixels: int
    batch: int
    classes: int
    autocast: bool = False
    fused: bool = False
    keep_memory: bool = False
    processes: int = 1


TINY, MICRO = "jumbo_vit_tiny_patch16_224", "jumbo_vit_micro"
ARMS = {
    "tiny": (
        Arm("official fp32", "official", 128, 32, 1000),
        Arm("ours fp32", TINY, 128, 32, 1000),
        Arm("ours fp32, fused AdamW, memory kept", TINY, 128, 32, 1000, fused=True, keep_memory=True),
        Arm("ours bf16 autocast", TINY, 128, 32, 1000, autocast=True),
        Arm("ours bf16 autocast, fused AdamW, memory kept", TINY, 128, 32, 1000, True, True, True),
        Arm("ViT + 16 registers fp32", "vit_tiny_patch16_reg16_224", 128, 32, 1000),
    ),
    "micro": (
        Arm("eager fp32", MICRO, 32, 128, 10),
        Arm("fused AdamW", MICRO, 32, 128, 10, fused=True),
        Arm("fused AdamW, memory kept", MICRO, 32, 128, 10, fused=True, keep_memory=True),
        Arm("fused AdamW, memory kept, two processes", MICRO, 32, 128, 10, False, True, True, 2),
    ),
}


def worker(arm: Arm, rank: int, threads: int, port: int, clone: str, pipe: Connection) -> None:
    """A process of an arm: builds its model, then makes a step for each message."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from jumbo_vit.memory import keep_freed_memory

    if arm.keep_memory:
        keep_freed_memory()
    import timm
    import torch
    from torch import nn

    from jumbo_vit.measure.bench import loss_of, saved_tensors
    from jumbo_vit.measure.profile import shares
    from jumbo_vit.measure.versus import official_model

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if arm.code == "official":
        model = official_model(Path(clone), "tiny", arm.pixels)
    else:
        model = timm.create_model(arm.code, img_size=arm.pixels, num_classes=arm.classes)
    images = torch.randn(arm.batch, 3, arm.pixels, arm.pixels)[rank :: arm.processes]
    trained: nn.Module = model.train()
    kept = saved_tensors(model, images, arm.autocast)
    if arm.processes > 1:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=arm.processes)
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=arm.fused)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(trained, images, arm.autocast).backward()
        optimizer.step()

    pipe.send(kept)
    while (asked := pipe.recv()) != "stop":
        pipe.send(step() if asked == "step" else shares(step, len(images), repeats=4))
    if arm.processes > 1:
        torch.distributed.destroy_process_group()


class Running:
    """The processes of an arm, waiting for work."""

    def __init__(self, arm: Arm, threads: int, clone: Path) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(arm.processes):
            ours, theirs = context.Pipe()
            own = max(1, threads // arm.processes)
            process = context.Process(target=worker, args=(arm, rank, own, port, str(clone), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.kept = sum(pipe.recv() for pipe in self.pipes)

    def step(self) -> float:
        """Seconds from asking all processes for a step to the last one's answer."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("step")
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - start

    def shares(self) -> dict[str, float]:
        """The parts of the first process' step by kind of work."""
        for pipe in self.pipes:
            pipe.send("shares")
        found: list[dict[str, float]] = [pipe.recv() for pipe in self.pipes]
        return found[0]

    def stop(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send("stop")
        for process in self.processes:
            process.join()


def measure(arms: tuple[Arm, ...], threads: int, clone: Path, repeats: int, pause: float) -> list[dict[str, Any]]:
    """Median step times of arms, alternating, and ratios over the first."""
    running = {arm.name: Running(arm, threads, clone) for arm in arms}
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    names = list(running)
    for round_ in range(-2, repeats):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(pause)
            running[name].step()  # wakes threads and caches after the others'
            took = running[name].step()
            if round_ >= 0:
                seconds[name].append(took)
    kept = {name: run.kept for name, run in running.items()}
    parts = {name: run.shares() for name, run in running.items()}
    for run in running.values():
        run.stop()
    timings = {name: Timing.of(values) for name, values in seconds.items()}
    base = arms[0].name
    return [
        {
            **asdict(arm),
            "median_s": timings[arm.name].median,
            "p95_s": timings[arm.name].p95,
            "ratio": timings[base].median / timings[arm.name].median,
            "kept_bytes": kept[arm.name],
            "kept_ratio": kept[arm.name] / kept[base],
            "shares": parts[arm.name],
            "seconds": seconds[arm.name],
        }
        for arm in arms
    ]


def main() -> None:
    """Measure both groups and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True, help="a clone of antofuller/jumbo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between arms")
    parser.add_argument("--only", choices=list(ARMS))
    args = parser.parse_args()
    from jumbo_vit.measure.versus import commit, machine

    result: dict[str, Any] = {
        "command": shlex.join(["python", "scripts/bench_training.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(Path(__file__).parent),
        "official_commit": commit(args.official),
        "machine": machine() | {"threads": args.threads},
    }
    for group, arms in ARMS.items():
        if args.only in (None, group):
            result[group] = measure(arms, args.threads, args.official, args.repeats, args.pause)
            for row in result[group]:
                took, kept = f"{row['median_s'] * 1e3:7.1f} ms  {row['ratio']:.2f}x", f"kept {row['kept_ratio']:.2f}x"
                print(f"{group}: {row['name']:48s} {took}  {kept}")
    write_json(args.out, result)


if __name__ == "__main__":
    main()
