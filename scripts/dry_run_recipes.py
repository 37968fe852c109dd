"""Dry-run every full-scale recipe, and write what each would take.

    OMP_NUM_THREADS=1 python scripts/dry_run_recipes.py --out results/recipes/dry_run.json

A recipe has a process of its own, one after the other, so that the memory of one is free for the next; large ones with
two teachers take about 10 GB. The hub is not asked: weights that are not here are random ones, which is said. What
is written so far is kept when the script is stopped; --only takes some recipes alone and keeps the others' entries.
"""

import argparse
import fnmatch
import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def command_of(path: Path) -> str:
    """The command that a recipe is for, by its header: train, pretrain or probe."""
    found = re.search(rf"jumbo-vit (\w+) (\S+ )?--config recipes/{re.escape(path.name)}", path.read_text())
    return found[1] if found else "train"


def one(path: str) -> dict[str, Any]:
    """The report on a recipe."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from jumbo_vit.cli.parser import Command
    from jumbo_vit.cli.probe import plan_of
    from jumbo_vit.tasks.dry_probe import dry_probe
    from jumbo_vit.tasks.pretrain import pretrain
    from jumbo_vit.tasks.train import train

    command = command_of(Path(path))
    config = Command(command).parse(["--config", path, "--dry-run"])
    if command == "probe":
        return dry_probe(config.model, config.data, plan_of(config), config.val_fraction, config.split_seed)
    return pretrain(config) if command == "pretrain" else train(config)


def main() -> None:
    """Try the recipes and write the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=Path, default=ROOT / "recipes")
    parser.add_argument("--only", default="in*", help="a pattern of names")
    parser.add_argument("--out", type=Path, default=Path("results/recipes/dry_run.json"))
    args = parser.parse_args()
    from jumbo_vit.files import write_json
    from jumbo_vit.measure.versus import commit, machine

    paths = [path for path in sorted(args.recipes.glob("*.yaml")) if fnmatch.fnmatch(path.stem, args.only)]
    if not paths:
        parser.error(f"--only {args.only} matches no recipe in {args.recipes}")
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {"recipes": {}}
    facts = {"command": "python scripts/dry_run_recipes.py", "commit": commit(ROOT), "machine": machine()}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for path, report in zip(paths, pool.imap(one, map(str, paths)), strict=True):
            content = {**facts, "recipes": {**content["recipes"], path.name: report}}
            write_json(args.out, content)
            print(f"{path.name}: done", flush=True)


if __name__ == "__main__":
    main()
