"""Several runs of one recipe, over folds and seeds, and the spread of their scores."""

import dataclasses
import importlib
import json
import math
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from jumbo_vit.data.folds import fold_numbers, fold_set, shared_by_folds
from jumbo_vit.data.records import Splits
from jumbo_vit.data.sets import open_data
from jumbo_vit.files import write_json
from jumbo_vit.tasks.build import save_config, versions
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.fabric import make_fabric, on_main
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.members import Member, Unreadable, begin, members
from jumbo_vit.tasks.state import claim_out

CONFIDENCE = 0.95

One = Callable[[TrainConfig, Unreadable], tuple[dict[str, Any], int]]
"""Makes one run, or goes on with it where it stands; a finished one only gives its summary. Besides the options it is
given the pictures that cannot be read. Besides the summary it gives the number of the signal that asked for a stop when
the run had nothing left to do, or 0."""


def repeat(config: TrainConfig, one: One, resumed: bool = False) -> dict[str, Any]:
    """Make all runs, or those that are not finished yet, and give the summary (the content of `summary.json`).

    Args:
        config: Complete options with `--folds` or `--seeds`.
        one: Makes the runs.
        resumed: `config.out` is the folder of runs to go on with.

    Raises:
        UserError: Anything that the user can mend; the runs that are finished stay.
        SystemExit: After a signal, with the state of the run under way written.
    """
    # All processes need to know the folder before the first run starts; later launches find the processes there.
    fabric, _ = make_fabric(config.device, config.devices, config.nodes, config.strategy, config.precision, 0)
    main = bool(fabric.is_global_zero)

    def prepare() -> tuple[str, dict[str, Any], Unreadable]:
        out = Path(config.out or ".") if resumed else claim_out(config)
        splits = open_data(config.data, config.task, config.held_out_seed, config.val_fraction)
        facts = _facts(config, splits)
        unreadable, notes = begin(config, out, splits, resumed)
        facts["notes"] += notes
        save_config(out, dataclasses.replace(config, out=str(out)))
        return str(out), facts, unreadable

    where, facts, unreadable = on_main(fabric, prepare)
    out = Path(where)
    plan, done = members(config, out), list[dict[str, Any]]()
    if main:
        print("\n".join(f"  {note}" for note in [f"{len(plan)} runs in {out}", *facts["notes"]]), flush=True)
    known = _known_scores(out) if main else {}
    for number, member in enumerate(plan, start=1):
        if main:
            print(f"\nrun {number} of {len(plan)}: {member.name}", flush=True)
        try:
            found, stop = one(member.config, unreadable)
        except SystemExit:
            _say_stopped(number - 1, len(plan), where, main)
            raise
        if "wandb" in config.logger:
            importlib.import_module("wandb").finish()  # the next run is a run of its own there too
        done.append(_row(member, found, facts["held_out"], known) if main else {})
        if main:
            write_json(out / "summary.json", make_summary(config, out, facts, found, done))
        stop = int(fabric.all_reduce(torch.tensor(float(stop), device=fabric.device), reduce_op="max"))
        if stop and number < len(plan):
            _say_stopped(number, len(plan), where, main)
            raise SystemExit(128 + stop)
    summary: dict[str, Any] = on_main(fabric, lambda: make_summary(config, out, facts, found, done))
    if main:
        print("\n".join(table_lines(summary)), flush=True)
    return summary


def _say_stopped(done: int, total: int, where: str, main: bool) -> None:
    if main:
        print(f"{done} of {total} runs are finished; go on with --resume {shlex.quote(where)}", flush=True)


def _facts(config: TrainConfig, splits: Splits) -> dict[str, Any]:
    """What holds for all runs: the held-out part that none of them touches, and what is wrong with the folds."""
    facts: dict[str, Any] = {"held_out": None, "shared_by_folds": [], "notes": []}
    if not config.folds:
        return facts
    images = fold_set(splits)
    numbers = fold_numbers(images, config.folds, config.held_out_seed)
    facts["shared_by_folds"] = groups = shared_by_folds(images, numbers)
    facts["notes"].append(f"{len(images)} training pictures in {config.folds} folds, seed {config.held_out_seed}")
    if groups:
        facts["notes"].append(
            f"{sum(map(len, groups))} pictures have an exact copy in another fold, such as {groups[0][0]} and "
            f"{groups[0][1]}: the scores are too good; all are named in summary.json"
        )
    if not splits.drawn:
        facts["held_out"] = splits.held_out
        facts["notes"].append(
            f"{splits.held_out}, {len(splits.val)} pictures, stays out of all folds; each run's model is scored on it "
            "at the end of the run"
        )
    return facts


def _known_scores(out: Path) -> dict[tuple[str, int, int], float]:
    """Scores on the held-out part from before a resume: by run, its epochs, and the epoch of its model."""
    path = out / "summary.json"
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {
            (row["run"], row["epochs"], row["best_epoch"]): row["held_out_score"]
            for row in rows
            if row["held_out_score"] is not None
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"  {path} cannot be read ({error}): it is written anew, and all models are scored again", flush=True)
        return {}


def _row(
    member: Member, found: dict[str, Any], held_out: str | None, known: dict[tuple[str, int, int], float]
) -> dict[str, Any]:
    config, score = member.config, None
    if held_out is not None and found["score"] is not None:
        key = (member.name, found["epochs"], found["best_epoch"])
        score = known.get(key)
        if score is None:
            numbers = evaluate(f"{config.out}/model", config.data, config.device, config.workers or 0)
            score = numbers[found["metric"]]
    return {
        "run": member.name,
        "folder": config.out,
        "seed": member.seed,
        "fold": member.fold,
        "score": found["score"],
        "held_out_score": score,
        "numbers": found["best_numbers"],
        "best_epoch": found["best_epoch"],
        "epochs": found["epochs"],
        "stopped_early": found["stopped_early"],
        "images": found["images"],
        "skipped": len(found["skipped"]),
        "seconds": found["seconds"],
    }


def make_summary(
    config: TrainConfig, out: Path, facts: dict[str, Any], last: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of `summary.json` of several runs, finished or not.

    Args:
        config: Complete options.
        out: The folder of all runs.
        facts: As `_facts` gives them.
        last: The summary of a run.
        rows: A row for each run that is finished.
    """
    total = len(members(config, out))
    return {
        "out": str(out),
        "data": config.data,
        "model": config.model,
        "classes": last["classes"],
        "task": config.task,
        "folds": config.folds,
        "seeds": [config.seed + number for number in range(config.seeds)],
        "split_seed": config.held_out_seed,
        "finished": len(rows) == total,
        "runs_planned": total,
        "runs": rows,
        "metric": last["metric"],
        **spread([row["score"] for row in rows], [_group(config, row) for row in rows]),
        "interval_over": "folds" if _over_folds(config) else "seeds",
        "held_out": facts["held_out"],
        "held_out_spread": spread([row["held_out_score"] for row in rows], [_group(config, row) for row in rows])
        if facts["held_out"]
        else None,
        "shared_by_folds": facts["shared_by_folds"],
        "notes": facts["notes"],
        "versions": versions(),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def _group(config: TrainConfig, row: dict[str, Any]) -> int:
    """Runs that score the same fold are no independent draws: their mean counts once."""
    return int(row["fold"] if _over_folds(config) else row["seed"])


def _over_folds(config: TrainConfig) -> bool:
    return config.folds > 0 and config.fold is None


def spread(scores: list[float | None], groups: list[int]) -> dict[str, Any]:
    """Mean, standard deviation and the interval of the mean, from the runs that have a score.

    With means m_1 ... m_n of the groups and their standard deviation s, the interval is mean(m) +- t s / sqrt(n), where
    t is Student's quantile for n - 1 degrees of freedom.

    Args:
        scores: Of each run; None where it has none.
        groups: Runs of one group share what they are scored on.

    Returns:
        "mean" of the groups' means, "std" of all scores (n - 1), "interval" as a pair or None below two groups,
        "confidence", and "scored", the number of runs with a score.
    """
    by_group: dict[int, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        if score is not None:
            by_group.setdefault(group, []).append(score)
    there = [score for own in by_group.values() for score in own]
    means = [statistics.fmean(own) for own in by_group.values()]
    mean = statistics.fmean(means) if means else None
    interval = None
    if mean is not None and len(means) > 1:
        reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(means) - 1)) * statistics.stdev(means)
        reach /= math.sqrt(len(means))
        interval = [mean - reach, mean + reach]
    deviation = statistics.stdev(there) if len(there) > 1 else None
    return {"mean": mean, "std": deviation, "interval": interval, "confidence": CONFIDENCE, "scored": len(there)}


def table_lines(summary: dict[str, Any]) -> list[str]:
    """The runs as a table, and what they say together."""
    metric, rows = summary["metric"], summary["runs"]
    balanced = metric == "top1"
    head = [
        "run",
        metric,
        *["balanced"] * balanced,
        "epoch",
        "train",
        "held out",
        *["outside"] * bool(summary["held_out"]),
    ]
    lines = [head]
    for row in rows:
        cells = [row["run"], _number(row["score"])]
        cells += [_number(row["numbers"].get("balanced_accuracy"))] * balanced
        cells += [str(row["best_epoch"]), str(row["images"]["train"]), str(row["images"]["val"])]
        lines.append([*cells, *[_number(row["held_out_score"])] * bool(summary["held_out"])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    missing = [row["run"] for row in rows if row["score"] is None]
    over = summary["interval_over"]
    text = ["", *table, f"{metric}: {_in_words(summary, over)}"]
    if summary["held_out"]:
        text.append(f"outside, on {summary['held_out']}: {_in_words(summary['held_out_spread'], over)}")
    text.append(
        "  the folds' training parts overlap, so their scores depend on each other and the interval is approximate"
        if over == "folds"
        else "  all seeds hold out the same pictures: the interval is that of chance in training, not in the pictures"
    )
    if missing:
        text.append(f"  without a score, and left out of the mean: {', '.join(missing)}")
    names = f"{rows[0]['run']} to {rows[-1]['run']}" if len(rows) > 1 else rows[0]["run"]
    return [*text, f"models: in {summary['out']}, {names}, each in model/; all numbers: {summary['out']}/summary.json"]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _in_words(numbers: dict[str, Any], over: str) -> str:
    words = (
        f"mean {_number(numbers['mean'])}, standard deviation {_number(numbers['std'])} over {numbers['scored']} runs"
    )
    if numbers["interval"] is None:
        return words
    low, high = numbers["interval"]
    return f"{words}, {CONFIDENCE:.0%} interval of the mean {low:.4f} to {high:.4f} (t distribution over the {over})"
