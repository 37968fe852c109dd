"""What a run says of itself: lines at its start and end, and `summary.json`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from jumbo_vit.data.sets import Splits
from jumbo_vit.tasks.balance import balance_facts
from jumbo_vit.tasks.build import versions
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.state import Progress


def opening_lines(config: TrainConfig, splits: Splits, facts: dict[str, Any], progress: Progress) -> list[str]:
    """What is about to happen: model, pictures (with what is skipped and why), recipe, and from where.

    Args:
        config: Complete options.
        splits: The pictures in use.
        facts: "training" (in words), "parameters", "input_size", "world", "device", "precision", "resumed", "out";
            "classes" (in words) where there are none to count; "beside", parameters of a method's own, where there are.
        progress: Where the run stands.
    """
    train, val = splits.train, splits.val
    size = "x".join(map(str, facts["input_size"]))
    skipped = [*train.skipped, *val.skipped]
    lines = [
        f"{config.model}: {facts['parameters'] / 1e6:.2f} M parameters{_beside(facts)}{_trained(facts)}, input {size}",
        f"{facts['training']} for training, {len(val)} held out ({splits.held_out}), "
        f"{facts.get('classes') or f'{len(train.classes)} classes'}, {len(skipped)} skipped",
    ]
    lines += [f"  skipped {entry.path}: {entry.reason}" for entry in skipped[:20]]
    if len(skipped) > 20:
        lines.append(f"  and {len(skipped) - 20} more, all in summary.json")
    lines += [f"  {note}" for note in [*train.notes, *val.notes]]
    where = f"epoch {progress.epoch + 1}, update {progress.update}" if facts["resumed"] else "the start"
    lines.append(
        f"{config.epochs} epochs of {config.batch_size} x {facts['world']} x {config.grad_accum_steps} pictures an "
        f"update, rate {config.lr}, on {facts['device']} in {facts['precision']}, from {where}; {facts['out']}"
    )
    return lines


def _beside(facts: dict[str, Any]) -> str:
    """What a method trains beside the model."""
    return f" and {facts['beside'] / 1e6:.2f} M beside the encoder" if facts.get("beside") else ""


def _trained(facts: dict[str, Any]) -> str:
    """How many of the parameters are trained, where not all are."""
    whole = facts["parameters"] + facts.get("beside", 0)
    count = facts.get("trained", whole)
    return "" if count == whole else f", {count} of them trained"


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """How it went, and what to try next."""
    model, data = shlex.quote(f"{summary['out']}/model"), summary.get("val_data") or summary["data"]
    score = "none" if summary["score"] is None else f"{summary['score']:.4f}"
    best = f"best {summary['metric']} {score} at epoch {summary['best_epoch']} ({summary['best_weights']} weights)"
    if summary["stopped_early"]:
        best += ", stopped early"
    if summary["bad_updates"]:
        best += f", {summary['bad_updates']} updates skipped for a loss or gradient that was not finite"
    lines = [
        "",
        best,
        *_lowest(summary),
        "try next:",
        f"  jumbo-vit evaluate {model} --data {shlex.quote(data)}",
        f"  jumbo-vit predict {model} {shlex.quote(data) if Path(data).is_dir() else 'PICTURE.png'}",
    ]
    return [*lines, "  jumbo-vit train --data FOLDER        (your own pictures)"] if data == "digits" else lines


def _lowest(summary: dict[str, Any]) -> list[str]:
    """A line on the class that does worst, where one stands out: the mean hides it."""
    each = {k: v for k, v in summary["best_numbers"].get("per_class_accuracy", {}).items() if v is not None}
    if len(each) < 2 or min(each.values()) == max(each.values()):
        return []
    name, balanced = min(each, key=lambda k: each[k]), summary["best_numbers"]["balanced_accuracy"]
    return [f"balanced accuracy {balanced:.4f}; the class found least often is {name}, accuracy {each[name]:.4f}"]


def make_summary(
    config: TrainConfig, splits: Splits, facts: dict[str, Any], progress: Progress, metric: str
) -> dict[str, Any]:
    """The content of `summary.json`; `facts` as for `opening_lines`."""
    train, val = splits.train, splits.val
    return {
        "out": str(facts["out"]),
        "data": config.data,
        "model": config.model,
        "parameters": facts["parameters"],
        "trained_parameters": facts.get("trained", facts["parameters"]),
        "classes": train.classes,
        "task": config.task,
        "images": {"train": len(train), "val": len(val), "held_out": splits.held_out},
        "skipped": [dataclasses.asdict(entry) for entry in [*train.skipped, *val.skipped]],
        "notes": [*train.notes, *val.notes],
        "class_counts": dict(zip(train.classes, train.class_counts(), strict=True)),
        "balance": balance_facts(config, train),
        "metric": metric,
        "score": progress.best_score,
        "best_epoch": progress.best_epoch,
        "best_weights": progress.best_weights,
        "best_numbers": progress.best_numbers,
        "epochs": progress.epoch,
        "updates": progress.updates,
        "bad_updates": progress.bad,
        "rescaled_updates": progress.rescaled,
        "stopped_early": progress.stopped_early,
        "seed": config.seed,
        "precision": facts["precision"],
        "device": facts["device"],
        "processes": facts["world"],
        "versions": versions(),
        "seconds": round(progress.seconds, 1),
    }
