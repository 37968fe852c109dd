"""Token dropping: what a training step takes, and keeps in memory, by the share of patches that is dropped.

    python scripts/bench_patch_drop.py --out results/speed/patch_drop.json

A step is forward, cross-entropy, backward and an AdamW update, as in scripts/bench_training.py; the steps at the rates
are made one after the other in rounds, each round beginning with another one. The last row is the mean over a run whose
rate falls linearly from 0.9 to 0.1, as the paper's on ImageNet-21K does, by the trapezoidal rule over the rates between
them. Kept bytes are the tensors saved for the backward pass. The machine must do nothing else.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import jumbo_vit  # noqa: F401  (registers the models)
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.files import write_json
from jumbo_vit.measure.bench import loss_of, saved_tensors
from jumbo_vit.measure.timing import alternate
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.tasks.schedules import PatchDrop

NONE = 0.0
SCHEDULE = (0.9, 0.7, 0.5, 0.3, 0.1)
RATES = (NONE, *SCHEDULE)


def make_step(model: nn.Module, drop: PatchDrop, images: torch.Tensor, autocast: bool) -> Callable[[], None]:
    """A training step at the rate that `drop` starts with."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        drop(0, 1)
        optimizer.zero_grad()
        loss_of(model.train(), images, autocast).backward()
        optimizer.step()

    return step


def over_schedule(values: list[float]) -> float:
    """The mean over the run of a figure that is known at the rates of `SCHEDULE`."""
    return (sum(values) - (values[0] + values[-1]) / 2) / (len(values) - 1)


def make(name: str, pixels: int) -> nn.Module:
    """A model of timm that can drop patches.

    Raises:
        UserError: There is no such model, it has no place where patches can be dropped, or it takes no other size.
    """
    if not timm.is_model(name):
        raise UserError(f"--model {name} is none of timm's{nearest(name, timm.list_models())}")
    try:
        return timm.create_model(name, img_size=pixels)
    except TypeError as error:
        PatchDrop(timm.create_model(name), NONE, NONE, name)
        raise UserError(f"{name} takes no other size than its own ({error})") from error


def measure(name: str, pixels: int, batch: int, repeats: int, autocast: bool) -> list[dict[str, Any]]:
    """A row for each rate and one for the schedule: seconds, kept bytes, and both over those without dropping."""
    torch.manual_seed(0)
    model = make(name, pixels)
    images = torch.randn(batch, 3, pixels, pixels)
    # All share one model: at rate 0 each gives back the place that it took.
    drops = {rate: PatchDrop(model, rate, rate, name) for rate in RATES}
    kept = {}
    for rate, drop in drops.items():
        drop(0, 1)
        kept[rate] = saved_tensors(model, images, autocast)
    steps = {str(rate): make_step(model, drop, images, autocast) for rate, drop in drops.items()}
    timings = alternate(steps, repeats)
    rows: list[dict[str, Any]] = [
        {
            "rate": rate,
            "median_s": timings[str(rate)].median,
            "p95_s": timings[str(rate)].p95,
            "kept_bytes": kept[rate],
            "seconds": timings[str(rate)].seconds,
        }
        for rate in RATES
    ]
    mean = {
        key: over_schedule([row[key] for row in rows if row["rate"] in SCHEDULE]) for key in ("median_s", "kept_bytes")
    }
    rows.append({"rate": f"{SCHEDULE[0]} to {SCHEDULE[-1]}", **mean})
    for row in rows:
        row["speed"] = rows[0]["median_s"] / row["median_s"]
        row["kept_ratio"] = row["kept_bytes"] / rows[0]["kept_bytes"]
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="jumbo_vit_tiny_patch16_224")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        rows = measure(args.model, args.img_size, args.batch_size, args.repeats, args.bf16)
    except UserError as error:
        parser.error(str(error))
    write_json(
        args.out,
        {
            "command": shlex.join(["python", "scripts/bench_patch_drop.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(Path(__file__).parent),
            "machine": machine() | {"threads": args.threads},
            "model": args.model,
            "img_size": args.img_size,
            "batch_size": args.batch_size,
            "autocast": args.bf16,
            "rows": rows,
        },
    )
    for row in rows:
        kept = f"kept {row['kept_bytes'] / 1e6:7.1f} MB  {row['kept_ratio']:.2f}x"
        print(f"rate {row['rate']!s:12s} {row['median_s'] * 1e3:8.1f} ms  {row['speed']:.2f}x  {kept}")


if __name__ == "__main__":
    main()
