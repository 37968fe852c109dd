"""The speed table on a GPU: compile, bf16, large batches, in under ten minutes.

    git clone https://github.com/antofuller/jumbo /somewhere/jumbo      (needs einops)
    python scripts/bench_gpu.py --official /somewhere/jumbo --out results/speed/gpu.json

For each size the authors' code, ours and timm's ViT with 16 registers, in fp32 (TF32 off), bf16, and bf16 compiled,
alternating, synchronised; then a training step of tiny at 128 px in bf16 autocast. Nothing new is begun after
`--minutes`; what was left out is in the file.
"""

import argparse
import copy
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from jumbo_vit.files import write_json
from jumbo_vit.measure.bench import training_step
from jumbo_vit.measure.timing import Step, alternate
from jumbo_vit.measure.versus import commit, machine, official_model, same_weights
from jumbo_vit.sizes import baseline_name, model_name

SIZES = ("tiny", "small", "nano", "pico", "base")
BATCHES = (256, 32, 1)
PIXELS = 224


def step(model: nn.Module, images: Tensor) -> Step:
    """A forward pass without gradients."""

    def call() -> object:
        with torch.inference_mode():
            return model(images)

    return call


def networks(size: str, clone: Path, pixels: int = PIXELS) -> dict[str, nn.Module]:
    """The authors' code, ours with the same weights, and registers."""
    theirs = official_model(clone, size, pixels).eval()
    ours = timm.create_model(model_name(size), img_size=pixels).eval()
    same_weights(ours, theirs)
    registers = timm.create_model(baseline_name(size, "reg16"), img_size=pixels).eval()
    return {"official": theirs.cuda(), "ours": ours.cuda(), "ViT + 16 registers": registers.cuda()}


def rows_of(timings: dict[str, Any], batch: int, **more: Any) -> list[dict[str, Any]]:
    """One row an arm, with its ratio over the first."""
    first = next(iter(timings.values())).median
    return [
        {
            **more,
            "batch": batch,
            "form": name,
            "median_s": timing.median,
            "p95_s": timing.p95,
            "ratio": first / timing.median,
            "images_per_second": batch / timing.median,
        }
        for name, timing in timings.items()
    ]


def inference(size: str, batch: int, clone: Path) -> list[dict[str, Any]]:
    """One size at one batch size in all forms."""
    device = torch.device("cuda")
    images = torch.randn(batch, 3, PIXELS, PIXELS, device=device)
    steps: dict[str, Step] = {}
    for name, model in networks(size, clone).items():
        half = copy.deepcopy(model).bfloat16()
        steps[f"{name} fp32"] = step(model, images)
        steps[f"{name} bf16"] = step(half, images.bfloat16())
        compiled = torch.compile(half, mode="max-autotune-no-cudagraphs" if batch > 1 else "reduce-overhead")
        steps[f"{name} bf16 compiled"] = step(compiled, images.bfloat16())  # type: ignore[arg-type]
    return rows_of(alternate(steps, 15, device, warm_up=3), batch, size=size)


def training(clone: Path, batch: int = 256) -> list[dict[str, Any]]:
    """A training step of tiny at 128 px in bf16 autocast."""
    images = torch.randn(batch, 3, 128, 128, device="cuda")
    steps = {name: training_step(model, images, True) for name, model in networks("tiny", clone, 128).items()}
    return rows_of(alternate(steps, 15, torch.device("cuda"), warm_up=3), batch, size="tiny", step="training at 128 px")


def measure(args: argparse.Namespace) -> None:
    """Measure part by part until the time is used up, writing after each."""
    if not torch.cuda.is_available():
        sys.exit("bench_gpu.py: there is no GPU here: use scripts/bench_rivals.py on a CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    parts: dict[str, Any] = {"training": lambda: training(args.official)}
    for batch in BATCHES:
        parts |= {
            f"{size} {batch}": (lambda size=size, batch=batch: inference(size, batch, args.official)) for size in SIZES
        }
    result: dict[str, Any] = {
        "command": shlex.join(["python", "scripts/bench_gpu.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(Path(__file__).parent),
        "official_commit": commit(args.official),
        "machine": machine(),
        "gpu": torch.cuda.get_device_name(),
        "rows": [],
        "left_out": [],
    }
    start = time.monotonic()
    for name, part in parts.items():
        if time.monotonic() - start > args.minutes * 60:
            result["left_out"].append(name)
            continue
        found = part()
        result["rows"] += found
        write_json(args.out, result)
        for row in found:
            print(f"{name:12s} {row['form']:36s} {row['median_s'] * 1e3:9.2f} ms  {row['ratio']:.2f}x", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    write_json(args.out, result)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True, help="a clone of antofuller/jumbo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing new after so many")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
