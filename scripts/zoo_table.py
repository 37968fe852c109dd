"""The table of the zoo: mean and interval of each model, and paired differences, from the rows of its runs."""

import json
from typing import Any

from jumbo_vit.tasks.repeat import spread

OF_THE_RUN = ("model", "img_size", "patch_size", "seed", "epochs")
"""Options that differ between the runs of a zoo; all others are the recipe's."""


def summarise(
    command: str, rows: list[dict[str, Any]], sets: list[str], models: list[str], planned: int
) -> dict[str, Any]:
    """The content of zoo.json: all rows, mean and interval of each model, and paired differences to the first model.

    A difference is the first model's top-1 less the other's with the same seed.
    """
    groups: list[dict[str, Any]] = []
    for data in sets:
        by_model = {
            model: {row["seed"]: row["top1"] for row in rows if (row["data"], row["model"]) == (data, model)}
            for model in models
        }
        first = by_model[models[0]]
        for model, own in by_model.items():
            pairs = {seed: first[seed] - score for seed, score in own.items() if seed in first}
            there = [row for row in rows if (row["data"], row["model"]) == (data, model)]
            groups.append(
                {
                    "data": data,
                    "model": model,
                    "seeds": sorted(own),
                    "top1": spread([own[seed] for seed in sorted(own)], sorted(own)),
                    "gain_of_first": None
                    if model == models[0]
                    else spread([pairs[seed] for seed in sorted(pairs)], sorted(pairs)),
                    "updates": sorted({row["updates"] for row in there}),
                    "seconds": sum(row["seconds"] for row in there),
                }
            )
    return {
        "command": command,
        "runs_planned": planned,
        "runs_finished": len(rows),
        "first": models[0],
        "groups": groups,
        "runs": rows,
    }


def table(content: dict[str, Any]) -> str:
    """The README of the zoo, from the content of zoo.json."""
    rows = content["runs"]
    options = {key: value for key, value in (rows[0]["options"] if rows else {}).items() if key not in OF_THE_RUN}
    lines = [
        "# The zoo of micro models",
        "",
        f"{content['runs_finished']} of {content['runs_planned']} runs are finished. All have the options of "
        "`recipes/zoo_mini.yaml`; within a kind of data all have the same pictures and the same number of updates. "
        "Kept are the weights of the last epoch in fp16, which no score chose; top-1 is theirs on the held-out part.",
        "",
        "| data | model | parameters | updates | top-1 by seed | mean | 95 % interval | "
        f"{content['first']} minus it | 95 % interval |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for group in content["groups"]:
        own = [r for r in rows if (r["data"], r["model"]) == (group["data"], group["model"])]
        own.sort(key=lambda row: row["seed"])
        if not own:
            continue
        gain = group["gain_of_first"]
        cells = [group["data"], f"`{group['model']}`", f"{own[0]['parameters']:,}"]
        cells += [" / ".join(map(str, group["updates"])), ", ".join(f"{100 * row['top1']:.2f}" for row in own)]
        cells += [*_percent(group["top1"]), *(("", "") if gain is None else _percent(gain))]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Intervals: mean over seeds, t distribution; the differences are paired by seed. They speak of chance in",
        "training, not of the choice of pictures, which is the same for all.",
        "",
        "```python",
        f'jumbo_vit.load("results/zoo/{rows[0]["data"]}/{rows[0]["model"]}/seed-{rows[0]["seed"]}")' if rows else "",
        "```",
        "",
        f"Made by `{content['command']}`; options: `{json.dumps(options)}`.",
        f"Commits: {', '.join(sorted({str(row['commit']) for row in rows}))}. Machines: "
        f"{', '.join(sorted({str(row['machine']['cpu']) + ', one thread' for row in rows}))}.",
        "Every number of every run is in `zoo.json`, each run's curve in its `metrics.csv`.",
    ]
    return "\n".join(lines) + "\n"


def _percent(numbers: dict[str, Any]) -> tuple[str, str]:
    mean, interval = numbers["mean"], numbers["interval"]
    return (
        "" if mean is None else f"{100 * mean:.2f}",
        "" if interval is None else f"{100 * interval[0]:.2f} to {100 * interval[1]:.2f}",
    )
