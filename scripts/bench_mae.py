"""Masked autoencoding: what a step takes, and keeps in memory, with 75 % of the patches masked against none.

    python scripts/bench_mae.py --out results/speed/mae.json

Two steps, each with the encoder on kept patches alone and on all of them. "encoder": its forward pass and the backward
pass of the mean square of its tokens. "whole": forward pass with the decoder, loss on the masked patches, backward pass
and an AdamW update; where the encoder sees all patches, the decoder still gets the kept ones alone, so that nothing but
the encoder's patches differs. The steps of a model are made one after the other in rounds, each round beginning with
another one. The batch matters: for each block the weights of the Jumbo FFN are read and their gradients written,
however few pictures there are, and no mask saves that. Memory is the bytes of the tensors saved for the backward pass,
not the peak of the process. The machine must do nothing else.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train_zoo import at_least_one

from jumbo_vit.files import write_json
from jumbo_vit.measure.bench import kept_bytes
from jumbo_vit.measure.timing import alternate
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.tasks.mae import MaskedPixels, random_order
from jumbo_vit.tasks.masked import MaskedLearner, take
from jumbo_vit.tasks.pretrain import learner_of
from jumbo_vit.tasks.pretrain_config import PretrainConfig, with_pretrain_defaults

STEPS = ("encoder", "whole")
RATIO = 0.75


@dataclass(frozen=True)
class Arm:
    """A model, the side of its pictures and patches in pixels, and the pictures of a step."""

    model: str
    pixels: int
    patch: int
    batch: int


ARMS = (
    Arm("jumbo_vit_micro", 64, 8, 64),
    Arm("vit_micro_reg16", 64, 8, 64),
    Arm("jumbo_vit_tiny_patch16_224", 224, 16, 32),
    Arm("vit_tiny_patch16_reg16_224", 224, 16, 32),
    Arm("jumbo_vit_small_patch16_224", 224, 16, 16),
    Arm("vit_small_patch16_reg16_224", 224, 16, 16),
)


class WithAllPatches(nn.Module):
    """A learner whose encoder computes all patches, of which the decoder gets those that are kept."""

    def __init__(self, learner: MaskedLearner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, images: Tensor, order: Tensor) -> Tensor:
        """As the learner's."""
        learner = self.learner
        tokens, prefix = learner.encoder.forward_features(images), learner.keep.prefix
        kept = take(tokens[:, prefix:], order[:, : learner.kept])
        foretold: Tensor = learner.decoder(torch.cat([tokens[:, :prefix], kept], dim=1), order)
        return foretold


def learner_for(arm: Arm) -> tuple[MaskedLearner, MaskedPixels]:
    """What a run with the default options of `pretrain --method mae` trains, and its objective."""
    options = PretrainConfig(
        method="mae",
        data="none",
        model=arm.model,
        img_size=str(arm.pixels),
        patch_size=arm.patch,
        mask_ratio=RATIO,
    )
    learner, method = learner_of(with_pretrain_defaults(options))
    assert isinstance(learner, MaskedLearner) and isinstance(method.objective, MaskedPixels)
    return learner.train(), method.objective


def losses_of(
    learner: MaskedLearner, objective: MaskedPixels, images: Tensor, order: Tensor
) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """The forward passes, each to a loss, by step and by what the encoder sees."""
    whole = WithAllPatches(learner)

    def encoder(kept: Tensor | None) -> Tensor:
        learner.keep.kept = kept
        tokens: Tensor = learner.encoder.forward_features(images)
        learner.keep.kept = None
        return tokens.square().mean()

    return {
        ("encoder", "masked"): lambda: encoder(order[:, : learner.kept]),
        ("encoder", "all"): lambda: encoder(None),
        ("whole", "masked"): lambda: objective.step(learner, (images, order), 0).mean(),
        ("whole", "all"): lambda: objective.step(whole, (images, order), 0).mean(),
    }


def step_of(learner: MaskedLearner, loss: Callable[[], Tensor], update: bool) -> Callable[[], None]:
    """A loss with its backward pass, and an update of all weights if asked for."""
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        if update:
            optimizer.step()

    return step


def measure(arm: Arm, pairs: int) -> list[dict[str, Any]]:
    """A row for each step: seconds and kept bytes with masked patches and with all, and the ratios of both."""
    learner, objective = learner_for(arm)
    torch.manual_seed(0)
    images = torch.randn(arm.batch, 3, arm.pixels, arm.pixels)
    patches = math.prod(learner.grid)
    order = torch.stack([random_order(patches, seed) for seed in range(arm.batch)])
    losses = losses_of(learner, objective, images, order)
    kept = {key: kept_bytes(learner, loss) for key, loss in losses.items()}
    steps = {" ".join(key): step_of(learner, loss, key[0] == "whole") for key, loss in losses.items()}
    timings = alternate(steps, pairs)
    rows = []
    for name in STEPS:
        row: dict[str, Any] = {"model": arm.model, "step": name, "img_size": arm.pixels, "batch_size": arm.batch}
        row |= {"patches": patches, "kept_patches": learner.kept, "global_tokens": learner.keep.prefix}
        for seen in ("masked", "all"):
            timing = timings[f"{name} {seen}"]
            own = {"median_s": timing.median, "p95_s": timing.p95, "spread": timing.spread}
            row[seen] = own | {"kept_bytes": kept[name, seen], "seconds": timing.seconds}
        for ratio, key in (("time_ratio", "median_s"), ("memory_ratio", "kept_bytes")):
            row[ratio] = row["masked"][key] / row["all"][key]
        rows.append(row)
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The rows for people."""
    found = [
        f"{'model':28} {'step':8} {'masked':>10} {'all':>10} {'time':>6} {'kept':>10} {'of all':>10} {'memory':>7}"
    ]
    for row in rows:
        times = " ".join(f"{1e3 * row[seen]['median_s']:7.1f} ms" for seen in ("masked", "all"))
        sizes = " ".join(f"{row[seen]['kept_bytes'] / 1e6:7.1f} MB" for seen in ("masked", "all"))
        found.append(
            f"{row['model']:28} {row['step']:8} {times} {row['time_ratio']:6.2f} {sizes} {row['memory_ratio']:7.2f}"
        )
    widest = max(row[seen]["spread"] for row in rows for seen in ("masked", "all"))
    return [*found, f"largest spread (quartiles over median): {widest:.0%}; MB are tensors saved for the backward pass"]


def main() -> None:
    """Measure, write, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [arm.model for arm in ARMS]
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", default=names, help=", ".join(names))
    parser.add_argument("--batch", type=at_least_one, help="pictures in a step, of all models")
    parser.add_argument("--pairs", type=int, choices=range(2, 1000), metavar="N", default=15, help="rounds, 2 at least")
    parser.add_argument("--threads", type=at_least_one, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for arm in (arm for arm in ARMS if arm.model in args.models):
        rows += measure(replace(arm, batch=args.batch or arm.batch), args.pairs)
        print(f"{arm.model}: done", file=sys.stderr, flush=True)
    content = {
        "command": shlex.join(["python", "scripts/bench_mae.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "mask_ratio": RATIO,
        "steps": {
            "encoder": "forward and backward pass of the encoder",
            "whole": "forward pass with the decoder, loss, backward pass, AdamW update",
        },
        "kept_bytes": "tensors saved for the backward pass, parameters not counted; no peak of the process",
        "rows": rows,
    }
    write_json(args.out, content)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
