"""The experiments on the recipes in results/PLAN.md: arms that differ in one thing, by seeds, with paired differences.

    python scripts/train_zoo.py --cifar CIFAR10 --tiny TINY_IMAGENET_100 --out results/zoo      (their common reference)
    jumbo-vit teach --teacher TEACHER --data CIFAR10 --views 3 --img-size 32 ... --out TAUGHT
    python scripts/recipe_experiments.py --cifar CIFAR10 --tiny TINY_IMAGENET_100 --taught TAUGHT --jobs 2

A run is `jumbo-vit train` in a process of its own with one thread, resumed where it stands; what is finished is not run
again. The score is top-1 on the held-out part after the last epoch. A verdict is that of the plan: the 95 % interval of
the paired differences over seeds excludes 0, or the difference is not resolved.
"""

import argparse
import json
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_zoo import ROOT, Processes, locked

from jumbo_vit.files import write_json, write_text
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.tasks.repeat import spread
from jumbo_vit.tasks.state import LAST, PREVIOUS, read_state

HARD = ("train", "--config", "recipes/hard_labels_mini.yaml", "--data", "{cifar}")
CLASS_TOKEN, JUMBO = (
    f"{{zoo}}/tiny-imagenet-100/{name}/seed-{{seed}}" for name in ("vit_micro_cls", "jumbo_vit_micro")
)
START = ("train", "--config", "recipes/jumboized_start_mini.yaml", "--data", "{cifar}")
FREEZE = ("train", "--config", "recipes/freeze_mini.yaml", "--data", "{cifar}")
LORA = ("train", "--config", "recipes/lora_mini.yaml", "--data", "{cifar}", "--init-from", JUMBO, "--img-size", "64")


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        words: The command; braces are filled in.
        prepare: A command before it, whose last word is what it makes; () for none.
        seeds: How many.
    """

    words: tuple[str, ...]
    prepare: tuple[str, ...] = ()
    seeds: int = 3


EXPERIMENTS: dict[str, dict[str, Arm | str]] = {
    # A word in place of an arm is a model of the zoo on CIFAR-10. The others are compared to the first.
    "function_matching": {
        "labels": "jumbo_vit_micro",
        "teacher": Arm(
            ("train", "--config", "recipes/function_matching_mini.yaml", "--data", "{cifar}", "--teacher", "{taught}")
        ),
    },
    "token_dropping": {
        "all patches": "jumbo_vit_micro",
        "90 to 10 % dropped": Arm((*HARD, "--patch-drop", "0.9", "0.1")),
    },
    "jumboized_start": {
        f"{name}, {side} px": Arm(
            (*START, "--img-size", str(side), "--epochs", str(epochs), "--init-from", source), prepare
        )
        for side, epochs in ((64, 3), (96, 1))
        for name, source, prepare in (
            ("as it is", CLASS_TOKEN, ()),
            ("jumboized", "{work}/jumboized-{seed}", ("jumboize", CLASS_TOKEN, "--out", "{work}/jumboized-{seed}")),
        )
    },
    "part_of_a_model": {
        "head alone": Arm(
            (*FREEZE, "--init-from", JUMBO, "--img-size", "64", "--epochs", "3", "--batch-size", "36"), seeds=1
        ),
        "LoRA": Arm(LORA, seeds=1),
        "all weights": Arm((*LORA, "--lora-rank", "0"), seeds=1),
    },
    "two_stages": {
        "40, then 64 px": Arm(("train", "--config", "recipes/two_stages_mini.yaml", "--data", "{tiny}"), seeds=1)
    },
    "feature_distillation": {
        "distilled": Arm(
            (
                "pretrain",
                "--config",
                "recipes/feature_distillation_mini.yaml",
                "--data",
                "{tiny}",
                "--teacher",
                "{teacher}",
            ),
            seeds=1,
        )
    },
}


@dataclass(frozen=True)
class Place:
    """Where things are.

    Args:
        cifar: CIFAR-10 as pictures.
        tiny: Tiny-ImageNet-100 as pictures.
        taught: What the teacher said of CIFAR-10.
        teacher: A teacher of features.
        zoo: The zoo's folder.
        work: Where runs are while they go on.
        out: What is kept.
    """

    cifar: str
    tiny: str
    taught: str
    teacher: str
    zoo: str
    work: Path
    out: Path

    def filled(self, words: tuple[str, ...], seed: int) -> list[str]:
        """A command with its places."""
        names = {name: getattr(self, name) for name in ("cifar", "tiny", "taught", "teacher", "zoo", "work")}
        whole = [word.format(**names, seed=seed) for word in words]
        return [str(ROOT / word) if word.startswith("recipes/") else word for word in whole]

    def missing(self, arm: Arm) -> str:
        """The first option that an arm needs and that was not given, or ""."""
        needed = (
            name for name in ("cifar", "tiny", "taught", "teacher") for word in arm.words if f"{{{name}}}" in word
        )
        return next((f"--{name}" for name in needed if not getattr(self, name)), "")


def run(place: Place, experiment: str, name: str, arm: Arm, seed: int, start: Processes) -> str:
    """Make one run, unless it is finished; "" or what went wrong."""
    kept = place.out / experiment / slug(name) / f"seed-{seed}"
    if (kept / "run.json").is_file():
        return ""
    work = place.work / experiment / slug(name) / f"seed-{seed}"
    work.parent.mkdir(parents=True, exist_ok=True)
    log = work.parent / f"seed-{seed}.log"
    prepare = place.filled(arm.prepare, seed)
    if prepare and not Path(prepare[-1]).exists() and start(prepare, log):
        return f"{experiment}, {name}, seed {seed}: its preparation failed, see {log}"
    begun = any((work / file).is_file() for file in (LAST, PREVIOUS, "stages.yaml"))
    whole = [*place.filled(arm.words, seed), "--seed", str(seed), "--logger", "none", "--out", str(work)]
    code = start([arm.words[0], "--resume", str(work)] if begun else whole, log)
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return f"{experiment}, {name}, seed {seed}: stopped, start again to go on"
    if code:
        return f"{experiment}, {name}, seed {seed}: failed, see {log}"
    keep(work, kept, [word.format(**dict.fromkeys(place.__dict__, "FOLDER"), seed=seed) for word in arm.words], seed)
    return ""


def keep(work: Path, kept: Path, words: list[str], seed: int) -> None:
    """The numbers and curves of a finished run; of one in stages those of each, in order."""
    stages = sorted(work.glob("stage-*")) or [work]
    rows, seconds, updates = [], 0.0, 0
    kept.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        _, progress = read_state(stage / LAST)
        rows, seconds, updates = progress.history, seconds + progress.seconds, updates + progress.updates
        mark = f"{stage.name}-" if stage is not work else ""
        for file in ("metrics.csv", "curves.png"):
            shutil.copy(stage / file, kept / f"{mark}{file}")
    summary = json.loads((work / "summary.json").read_text(encoding="utf-8"))
    row = {
        "words": words,
        "seed": seed,
        "last": rows[-1],
        "top1": rows[-1].get("val_top1"),
        "seconds": seconds,
        "updates": updates,
        "skipped": len(summary.get("skipped", ())),
        "trained_parameters": summary.get("trained_parameters"),
        "commit": commit(ROOT),
        "machine": machine(),
    }
    write_json(kept / "run.json", row)


def slug(name: str) -> str:
    """A name as a folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def rows_of(place: Place, experiment: str, name: str, arm: Arm | str) -> dict[int, dict[str, Any]]:
    """Finished runs of an arm by seed."""
    if isinstance(arm, str):
        files = Path(place.zoo, "cifar10", arm).glob("seed-*/run.json")
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return {row["seed"]: {**row, "top1": row["top1_before_rounding"]} for row in found}
    found = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in (place.out / experiment / slug(name)).glob("seed-*/run.json")
    ]
    return {row["seed"]: row for row in found}


def compare(first: dict[int, float], other: dict[int, float]) -> dict[str, Any]:
    """Paired differences, other less first, with the plan's verdict."""
    seeds = sorted(first.keys() & other.keys())
    found = spread([other[seed] - first[seed] for seed in seeds], seeds)
    low, high = found["interval"] or (0.0, 0.0)
    verdict = "higher" if low > 0 else "lower" if high < 0 else "not resolved"
    return {**found, "verdict": verdict if found["interval"] else "one seed, no verdict"}


def summarise(place: Place) -> dict[str, Any]:
    """All experiments' arms with their scores, times and paired differences, from the runs there are."""
    content: dict[str, Any] = {}
    for experiment, arms in EXPERIMENTS.items():
        found = {name: rows_of(place, experiment, name, arm) for name, arm in arms.items()}
        # At another size of the pictures an arm has another partner.
        table = []
        for name, rows in found.items():
            tail = name.partition(", ")[2] if experiment == "jumboized_start" else ""
            first = next(other for other in found if other.endswith(tail))
            scores, reference = ({seed: row["top1"] for seed, row in found[arm].items()} for arm in (name, first))
            known = sorted(seed for seed in scores if scores[seed] is not None)
            difference = None if name == first or not known else compare(reference, scores)
            table.append(
                {
                    "arm": name,
                    "seeds": sorted(rows),
                    "top1": spread([scores[seed] for seed in known], known) if known else None,
                    "seconds": [round(rows[seed]["seconds"]) for seed in sorted(rows)],
                    "updates": sorted({row["updates"] for row in rows.values()}),
                    "compared_to": None if name == first else first,
                    "difference": difference,
                }
            )
        content[experiment] = table
    return content


def markdown(content: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = ["# Experiments on the recipes", "", "Arms, lengths and verdict rule: [PLAN.md](../PLAN.md).", ""]
    lines += [
        "| experiment | arm | seeds | updates | seconds a run | top-1, % | against | difference, points | verdict |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for experiment, table in content.items():
        for row in table:
            top1, difference = row["top1"], row["difference"]
            cells = [experiment, row["arm"], str(len(row["seeds"])), " / ".join(map(str, row["updates"]))]
            cells += [" / ".join(map(str, row["seconds"])), f"{100 * top1['mean']:.2f}" if top1 else "-"]
            if difference is None:
                cells += ["-", "-", "-"]
            else:
                interval = difference["interval"]
                span = f" ({100 * interval[0]:+.2f} to {100 * interval[1]:+.2f})" if interval else ""
                mean = "-" if difference["mean"] is None else f"{100 * difference['mean']:+.2f}{span}"
                cells += [row["compared_to"], mean, difference["verdict"]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is not finished, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar", "tiny", "taught", "teacher"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--zoo", default="results/zoo")
    parser.add_argument("--work", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--out", type=Path, default=Path("results/recipes"))
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    place = Place(args.cifar, args.tiny, args.taught, args.teacher, args.zoo, args.work, args.out)
    faults: list[str] = []
    with locked(args.work) as lock:
        start = Processes(lock)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, start.on_signal)
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = []
            # Seeds outermost, so that all arms are about equally far at any moment.
            for seed in range(3):
                for experiment in args.only:
                    for name, arm in EXPERIMENTS[experiment].items():
                        if isinstance(arm, str) or seed >= arm.seeds:
                            continue
                        if missing := place.missing(arm):
                            faults.append(f"{experiment}, {name}, seed {seed}: needs {missing}")
                            continue
                        jobs.append(pool.submit(run, place, experiment, name, arm, seed, start))
            faults += [fault for job in jobs if (fault := job.result())]
    content = summarise(place)
    write_json(args.out / "experiments.json", content)
    write_text(args.out / "README.md", markdown(content))
    for fault in faults:
        print(fault, file=sys.stderr)
    if start.stop:
        sys.exit(128 + start.stop)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
