"""Speed against the authors' code: forward and training step of the same weights, in alternating pairs.

    git clone https://github.com/antofuller/jumbo /somewhere/jumbo        (needs einops)
    OMP_NUM_THREADS=2 python -m jumbo_vit.measure.versus --official /somewhere/jumbo --json results/versus.json

Both run eager in fp32 on the CPU, without drop path. A pair times each once, the first place alternates, and a ratio
above 1 says that ours is faster. The machine must do nothing else.
"""

import argparse
import importlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import jumbo_vit.registry  # noqa: F401  (registers the models)
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json
from jumbo_vit.sizes import SIZES, model_name
from jumbo_vit.version import __version__

Step = Callable[[], object]


def official_model(clone: Path, size: str, pixels: int) -> nn.Module:
    """The authors' model of a size, built by the code in `clone`.

    Raises:
        UserError: There is no such code, or something that it imports is missing.
    """
    if not (clone / "models" / "jumbo.py").is_file():
        raise UserError(f"{clone} is no clone of antofuller/jumbo: it has no models/jumbo.py")
    sys.path.insert(0, str(clone))
    try:
        config: dict[str, Any] = importlib.import_module("configs").get_config(size)
        jumbo = importlib.import_module("models.jumbo").Jumbo
    except ImportError as error:
        raise UserError(f"the code in {clone} cannot be imported: {error}") from error
    finally:
        sys.path.remove(str(clone))
    num_jumbo = config.pop("J")
    model: nn.Module = jumbo("cpu", num_jumbo, **(config | {"img_size": pixels, "drop_path_rate": 0.0}))
    return model


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Give both the same weights, the head's drawn too, so that equal logits say that both compute the same."""
    with torch.no_grad():
        for parameter in ours.head.parameters():  # type: ignore[union-attr]
            parameter.normal_(std=0.02)
    unused = theirs.state_dict()["cls_token"]
    state = {"jumbo_token" if name == "reg_token" else name: value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state | {"cls_token": unused})


def largest_difference(ours: nn.Module, theirs: nn.Module, images: Tensor) -> float:
    """The largest difference between logits in evaluation mode."""
    with torch.inference_mode():
        return float((ours.eval()(images) - theirs.eval()(images)).abs().max())


def forward_pass(model: nn.Module, images: Tensor) -> Step:
    """One batch in evaluation mode."""
    model.eval()

    @torch.inference_mode()
    def step() -> object:
        return model(images)

    return step


def training_step(model: nn.Module, images: Tensor) -> Step:
    """Forward, backward and an AdamW update."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    targets = torch.arange(len(images)) % 1000

    def step() -> object:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        return None

    return step


def time_pairs(ours: Step, theirs: Step, pairs: int, warm_up: int = 2) -> dict[str, Any]:
    """Seconds of each of `pairs` pairs, their medians, and theirs over ours."""
    for _ in range(warm_up):
        ours()
        theirs()
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for pair in range(pairs):
        order = (("ours", ours), ("theirs", theirs))
        for name, step in order if pair % 2 == 0 else order[::-1]:
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {f"{name}_median_s": statistics.median(values) for name, values in seconds.items()}
    return {**medians, "ratio": medians["theirs_median_s"] / medians["ours_median_s"], **seconds}


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1] for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    )
    return {
        "cpu": names[0].strip() if names else platform.processor(),
        "cores": len(names) or None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "threads": torch.get_num_threads(),
    }


def commit(folder: Path) -> str | None:
    """The commit of the checkout at `folder`, with a plus where files were changed since; None outside one."""
    try:
        calls = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        head, changes = (
            subprocess.run(["git", "-C", str(folder), *call], capture_output=True, text=True, check=True).stdout.strip()
            for call in calls
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def compare(clone: Path, size: str, pixels: int, batch: int, pairs: int) -> dict[str, Any]:
    """Time both codes and say what was timed."""
    torch.manual_seed(0)
    theirs = official_model(clone, size, pixels)
    ours = timm.create_model(model_name(size), img_size=pixels)
    same_weights(ours, theirs)
    images = torch.randn(batch, 3, pixels, pixels)
    result: dict[str, Any] = {
        "command": " ".join(["python -m jumbo_vit.measure.versus", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "commit": commit(Path(__file__).parent),
        "official_commit": commit(clone),
        "machine": machine(),
        "size": size,
        "pixels": pixels,
        "batch": batch,
        "pairs": pairs,
        "largest_difference": largest_difference(ours, theirs, images),
    }
    for name, make in (("forward", forward_pass), ("training_step", training_step)):
        result[name] = time_pairs(make(ours, images), make(theirs, images), pairs)
    return result


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m jumbo_vit.measure.versus", description="Speed against the authors")
    parser.add_argument("--official", type=Path, required=True, help="a clone of github.com/antofuller/jumbo")
    parser.add_argument("--size", choices=[key for key, row in SIZES.items() if row.official_top1], default="tiny")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the times to this file")
    args = parser.parse_args(argv)
    try:
        result = compare(args.official, args.size, args.pixels, args.batch, args.pairs)
        if args.json:
            write_json(args.json, result)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    for name in ("forward", "training_step"):
        row = result[name]
        ours, theirs = row["ours_median_s"] * 1e3, row["theirs_median_s"] * 1e3
        print(f"{name}: ours {ours:.1f} ms, theirs {theirs:.1f} ms, ratio {row['ratio']:.3f} (median of {args.pairs})")
    print(f"largest difference of logits: {result['largest_difference']:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
