"""The tables and the plot of masked pre-training in small, from the rows of its runs, with the verdicts of the plan."""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_experiments import compare

from jumbo_vit.files import write_bytes
from jumbo_vit.tasks.repeat import spread

CLASS_TOKEN, REGISTERS, JUMBO = range(3)
"""Places of the models in every list of them."""

MEASURES = {"linear": "top1", "k-NN": "knn_top1"}
"""What is said of features, and the name of it in what `probe` writes."""

QUESTIONS = (
    ("the paper's: pieces against class token", (CLASS_TOKEN, "class"), (JUMBO, "pieces")),
    ("equal kind: all global tokens, concatenated", (REGISTERS, "pieces"), (JUMBO, "pieces")),
    ("equal width: mean of the pieces against class token", (CLASS_TOKEN, "class"), (JUMBO, "mean")),
    ("equal width: mean of all global tokens", (REGISTERS, "mean"), (JUMBO, "mean")),
    ("equal width: mean of the patches", (CLASS_TOKEN, "patches"), (JUMBO, "patches")),
    ("equal width: mean of the patches", (REGISTERS, "patches"), (JUMBO, "patches")),
)
"""What is compared: question, the features of the one model, and those of the other."""

PRETRAINING = ("masked_error", "best_epoch", "epochs", "updates", "seconds", "skipped_updates")
"""What is said of a pre-training."""

Scores = dict[int, float]


@dataclass(frozen=True)
class Found:
    """What there is of one model with one seed.

    Args:
        model: Its name.
        seed: Its seed.
        rows: By step: untrained, pretrain, probe, fine-tune, scratch; None where it is missing.
        faults: What is missing or left out, in words.
    """

    model: str
    seed: int
    rows: dict[str, dict[str, Any] | None]
    faults: list[str]


def read(model: str, seed: int, kept: Path, scratch: Path, options: dict[str, Any]) -> Found:
    """What there is of a model and seed, with what does not belong together left out.

    Args:
        model: Its name.
        seed: Its seed.
        kept: What was kept of it.
        scratch: The row of its training from scratch.
        options: What that training has to have had.
    """
    files = {name: kept / f"{name}.json" for name in ("untrained", "probe")}
    files |= {name: kept / name / "run.json" for name in ("pretrain", "fine-tune")} | {"scratch": scratch}
    rows = {
        name: json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None for name, path in files.items()
    }
    begin = f"{model}, seed {seed}:"
    faults = [f"{begin} {name} is missing" for name, row in rows.items() if row is None]
    encoder = (rows["pretrain"] or {}).get("encoder")
    for name, key in (("probe", "of"), ("fine-tune", "start")):
        row = rows[name]
        if row is not None and row[key] != encoder:
            faults.append(f"{begin} {name} is of another pre-training, and is left out")
            rows[name] = None
    whole, fine = rows["scratch"], rows["fine-tune"]
    other = [] if whole is None or whole["options"] == options else ["options"]
    other += [name for name in ("updates", "images") if whole and fine and whole[name] != fine[name]]
    if other:
        faults.append(f"{begin} the run from scratch has other {' and '.join(other)}, and is left out")
        rows["scratch"] = None
    return Found(model, seed, rows, faults)


def probed(found: list[Found], model: str, step: str, kind: str, measure: str) -> Scores:
    """Held-out accuracies by seed of a kind of features, of first weights ("untrained") or pre-trained ("probe")."""
    scores = {}
    for one in found:
        row = one.rows[step] if one.model == model else None
        for entry in row["chosen"] if row else ():
            if entry["features"] == kind and entry[MEASURES[measure]] is not None:
                scores[one.seed] = entry[MEASURES[measure]]
    return scores


def trained(found: list[Found], model: str, step: str, name: str) -> Scores:
    """A number by seed of the runs of one step."""
    rows = {one.seed: one.rows[step] for one in found if one.model == model}
    return {seed: row[name] for seed, row in rows.items() if row is not None}


def of(scores: Scores) -> dict[str, Any]:
    """Scores with their mean and interval."""
    seeds = sorted(scores)
    return {"by_seed": {str(seed): scores[seed] for seed in seeds}, **spread([scores[seed] for seed in seeds], seeds)}


def against(first: Scores, other: Scores) -> dict[str, Any]:
    """Paired differences, other less first, with the plan's verdict."""
    row = compare(first, other)
    return row if row["scored"] else {**row, "verdict": "no pair of runs"}


def summarise(command: str, found: list[Found], models: list[str]) -> dict[str, Any]:
    """The content of mae.json.

    Args:
        command: What makes it.
        found: What there is, for every model and seed that is planned.
        models: With a class token, with registers, and with the Jumbo token.
    """
    rows = [(one, step, row) for one in found for step, row in one.rows.items() if row is not None]
    return {
        "command": command,
        "models": models,
        "seeds": sorted({one.seed for one in found}),
        "missing": [fault for one in found for fault in one.faults],
        "features": [row for model in models for row in _features(found, model)],
        "questions": _questions(found, models),
        "fine_tuning": _fine_tuning(found, models),
        "pretraining": [_pretraining(found, model) for model in models],
        "commits": sorted({str(row["commit"]) for _, _, row in rows}),
        "machines": sorted({f"{row['machine']['cpu']}, one thread a run" for _, _, row in rows}),
    }


def _features(found: list[Found], model: str) -> list[dict[str, Any]]:
    """A row for each kind of features that the model has."""
    entries = [
        entry
        for one in found
        for step in ("untrained", "probe")
        if one.model == model
        for entry in (one.rows[step] or {"chosen": []})["chosen"]
    ]
    widths = {entry["features"]: entry["width"] for entry in entries}
    table = []
    for kind, width in widths.items():
        row: dict[str, Any] = {"model": model, "features": kind, "width": width}
        for measure in MEASURES:
            before, after = (probed(found, model, step, kind, measure) for step in ("untrained", "probe"))
            row[measure] = {"pretrained": of(after), "first_weights": of(before), "gain": against(before, after)}
        table.append(row)
    return table


def _questions(found: list[Found], models: list[str]) -> list[dict[str, Any]]:
    table = []
    for measure in MEASURES:
        for question, *sides in QUESTIONS:
            named = [(models[place], kind) for place, kind in sides]
            first, other = (probed(found, model, "probe", kind, measure) for model, kind in named)
            row = {"measure": measure, "question": question, "first": list(named[0]), "other": list(named[1])}
            table.append({**row, **against(first, other)})
    jumbo = trained(found, models[JUMBO], "fine-tune", "top1")
    for place in (CLASS_TOKEN, REGISTERS):
        row = {"measure": "fine-tuned", "question": "all weights", "first": [models[place], "the whole"]}
        row |= {"other": [models[JUMBO], "the whole"]}
        table.append({**row, **against(trained(found, models[place], "fine-tune", "top1"), jumbo)})
    return table


def _fine_tuning(found: list[Found], models: list[str]) -> list[dict[str, Any]]:
    table = []
    for model in models:
        fine = trained(found, model, "fine-tune", "top1")
        scratch = trained(found, model, "scratch", "top1_before_rounding")
        updates = {*trained(found, model, "fine-tune", "updates").values()}
        row = {"model": model, "fine_tuned": of(fine), "scratch": of(scratch), "gain": against(scratch, fine)}
        table.append({**row, "updates": sorted(updates)})
    return table


def _pretraining(found: list[Found], model: str) -> dict[str, Any]:
    columns = {name: trained(found, model, "pretrain", name) for name in PRETRAINING}
    return {
        "model": model,
        **{name: {str(seed): v for seed, v in sorted(own.items())} for name, own in columns.items()},
    }


def markdown(content: dict[str, Any]) -> str:
    """The README of the results, from the content of mae.json."""
    lines = ["# Masked pre-training in small", "", "Arms, lengths and verdict rule: [PLAN.md](../PLAN.md).", ""]
    if content["missing"]:
        lines += ["**Not finished.** What is missing has no part in the figures:", ""]
        lines += [f"- {fault}" for fault in content["missing"]] + [""]
    lines += ["![accuracies with intervals](mae.png)", "", "## Comparisons", ""]
    lines += ["Differences in points, the second less the first, paired by seed, with their 95 % interval.", ""]
    head = "measure, question, first, second, difference, pairs, verdict"
    lines += _table(head, (_question_cells(row, content) for row in content["questions"]))
    for measure in MEASURES:
        head = "model, features, width, top-1 %, seeds, first weights %, gain in points, verdict"
        lines += ["", f"## Frozen features, {measure}", ""]
        lines += _table(head, (_feature_cells(row, measure) for row in content["features"]))
    lines += ["", "## All weights trained, from the pre-trained encoder and from scratch", ""]
    head = "model, fine-tuned %, seeds, from scratch %, seeds, gain in points, verdict, updates"
    lines += _table(head, map(_fine_cells, content["fine_tuning"]))
    lines += ["", "## Pre-training, by seed", ""]
    head = "model, masked error, epoch kept, epochs, updates, seconds, skipped updates"
    lines += _table(head, map(_pretraining_cells, content["pretraining"]))
    return "\n".join([*lines, *_notes(content)]) + "\n"


def _question_cells(row: dict[str, Any], content: dict[str, Any]) -> list[Any]:
    sides = [_side(row[name], content) for name in ("first", "other")]
    return [row["measure"], row["question"], *sides, _numbers(row, "+"), row["scored"], row["verdict"]]


def _feature_cells(row: dict[str, Any], measure: str) -> list[Any]:
    own = row[measure]
    after, before, gain = own["pretrained"], own["first_weights"], own["gain"]
    cells = [f"`{row['model']}`", row["features"], row["width"], _numbers(after), after["scored"], _numbers(before)]
    return [*cells, _numbers(gain, "+"), gain["verdict"]]


def _fine_cells(row: dict[str, Any]) -> list[Any]:
    sides = [cell for name in ("fine_tuned", "scratch") for cell in (_numbers(row[name]), row[name]["scored"])]
    updates = " / ".join(map(str, row["updates"]))
    return [f"`{row['model']}`", *sides, _numbers(row["gain"], "+"), row["gain"]["verdict"], updates]


def _pretraining_cells(row: dict[str, Any]) -> list[Any]:
    forms = {"masked_error": ".4f"} | dict.fromkeys(PRETRAINING[1:], ".0f")
    columns = (" / ".join(format(value, form) for value in row[name].values()) for name, form in forms.items())
    return [f"`{row['model']}`", *columns]


def _notes(content: dict[str, Any]) -> list[str]:
    return [
        "",
        "Intervals: mean over seeds, t distribution, 95 %. They speak of chance in training, not of the choice of",
        "pictures, which is the same for all. First weights are those that pre-training began with. The encoder is",
        "that of the epoch with the lowest loss on held-out pictures, without their labels; where all weights are",
        "trained, top-1 is that after the last epoch. The epochs of pre-training come on top of those of fine-tuning.",
        "A probe's head was chosen on a tenth of the training pictures. Masked error: share of the masked pixels'",
        "variance that is missed. pieces: all global tokens, concatenated; mean: their mean; jumbo_avg, prefix_avg:",
        "pieces and the mean of the patches together.",
        "",
        f"Made by `{content['command']}`.",
        f"Commits: {', '.join(content['commits']) or 'none'}. Machines: {'; '.join(content['machines']) or 'none'}.",
        "All numbers are in `mae.json`, each run's in its folder.",
    ]


def _table(head: str, rows: Iterable[list[Any]]) -> list[str]:
    names = head.split(", ")
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def _side(side: list[str], content: dict[str, Any]) -> str:
    width = next((row["width"] for row in content["features"] if [row["model"], row["features"]] == side), None)
    return f"`{side[0]}`, {side[1]}" + (f" ({width})" if width else "")


def _numbers(numbers: dict[str, Any], sign: str = "") -> str:
    if numbers["mean"] is None:
        return "-"
    mean, *ends = (f"{100 * value:{sign}.2f}" for value in (numbers["mean"], *(numbers["interval"] or ())))
    return f"{mean} ({ends[0]} to {ends[1]})" if ends else mean


def draw(content: dict[str, Any], path: Path) -> None:
    """Accuracies with intervals: both measures by features, and all weights trained; pale is what there was before."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, list[tuple[str, str, dict[str, Any], dict[str, Any]]]]] = []
    for measure in MEASURES:
        rows = [
            (row["model"], f"{row['features']} ({row['width']})", *(row[measure][k] for k in _SIDES))
            for row in content["features"]
        ]
        panels.append((f"frozen features, {measure}", rows))
    whole = [(row["model"], "", row["fine_tuned"], row["scratch"]) for row in content["fine_tuning"]]
    panels.append(("all weights trained", whole))
    figure = Figure(figsize=(15, 1.5 + 0.35 * max(1, len(content["features"]))), layout="constrained")
    for axes, (title, entries) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, (model, _, after, before) in enumerate(entries):
            colour = f"C{content['models'].index(model)}"
            for numbers, up, alpha in ((after, 0.12, 1.0), (before, -0.12, 0.35)):
                if numbers["mean"] is None:
                    continue
                low, high = numbers["interval"] or [numbers["mean"]] * 2
                axes.plot([100 * low, 100 * high], [place - up] * 2, color=colour, alpha=alpha)
                axes.plot(100 * numbers["mean"], place - up, "o", color=colour, alpha=alpha)
        labels = [f"{model} {kind}".strip() for model, kind, *_ in entries]
        axes.set_yticks(range(len(entries)), labels, fontsize=8)
        axes.invert_yaxis()
        before_words = "from scratch" if title.startswith("all") else "first weights"
        axes.set(title=title, xlabel=f"top-1, % (pale: {before_words})")
        axes.grid(alpha=0.3, axis="x")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())


_SIDES = ("pretrained", "first_weights")
