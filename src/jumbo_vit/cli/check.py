"""`jumbo-vit check`."""

from dataclasses import dataclass
from typing import Any, Literal

POSITIONALS = ("data",)

_MOST_LINES = 20


@dataclass
class Config:
    """Look through pictures before training: what is there, what cannot be read, what is there twice.

    Args:
        data: A folder, a table (CSV, JSONL), tar shards, a dataset on disk, or "digits", as for `train`.
        task: "multilabel" takes any number of labels a picture, from a CSV with labels joined by "|".
        val_fraction: Share of the pictures held out where no held-out folder is there.
        seed: Fixes which pictures are held out.
        workers: Threads that read pictures; default one for each core.
        json: Write everything that was found to this file.
        png: Draw some pictures of each class, with their names, into this file.
    """

    data: str
    task: Literal["multiclass", "multilabel"] = "multiclass"
    val_fraction: float = 0.1
    seed: int = 0
    workers: int | None = None
    json: str | None = None
    png: str | None = None


def run(config: Config) -> None:
    """Print what was found, and write it where asked."""
    from jumbo_vit.data.check import contact_sheet, inspect
    from jumbo_vit.data.sets import open_data
    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_bytes, write_json

    if config.seed < 0:
        raise UserError(f"--seed is {config.seed}, but must be 0 or more")
    if config.workers is not None and config.workers < 1:
        raise UserError(f"--workers is {config.workers}, but must be 1 or more")
    splits, report = inspect(open_data(config.data, config.task, config.seed, config.val_fraction), config.workers)
    if config.json:
        write_json(config.json, {"data": config.data, **report})
    if config.png:
        write_bytes(config.png, contact_sheet(splits.train))
    print("\n".join(lines(report)))


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people; long lists are cut, and say so."""
    train, val = report["splits"]["train"], report["splits"]["val"]
    left_out = len(report["unreadable"]) + len(report["skipped"])
    width = max(map(len, ["class", *report["classes"]]))
    found = [
        f"{train['pictures']} pictures for training, {val['pictures']} held out ({report['held_out']}), "
        f"{len(report['classes'])} classes, {left_out} skipped",
        f"{'class':{width}}  training  held out",
    ]
    found += [f"{name:{width}}  {train['per_class'][name]:8}  {val['per_class'][name]:8}" for name in report["classes"]]
    for side in ("width", "height"):
        found.append(f"{side}: min {{min}}, median {{median:g}}, max {{max}}".format(**report[side]))
    sizes = {f"{entry['width']}x{entry['height']}": entry["count"] for entry in report["sizes"]}
    for title, counts in (("sizes", sizes), ("formats", report["formats"]), ("modes", report["modes"])):
        found.append(f"{title}: {_counted(counts)}")
    if report["imbalance"] is not None:
        found.append(f"largest class to smallest: {report['imbalance']:.1f}")
    found += _cut([f"unreadable {entry['path']}: {entry['reason']}" for entry in report["unreadable"]])
    found += _cut([f"skipped {entry['path']}: {entry['reason']}" for entry in report["skipped"]])
    found += _cut([_duplicate(group) for group in report["duplicates"]])
    found += [f"warning: {warning}" for warning in report["warnings"]]
    return found + [f"note: {note}" for note in report["notes"]]


def _counted(counts: dict[str, int], at_most: int = 5) -> str:
    shown = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:at_most])
    return shown + (f" and {len(counts) - at_most} others" if len(counts) > at_most else "")


def _duplicate(group: dict[str, Any]) -> str:
    from jumbo_vit.data.records import listed

    where = "across the splits" if group["across_splits"] else f"within {group['files'][0]['split']}"
    marked = group["different_labels"]
    names = [
        f"{file['path']} ({'|'.join(file['labels']) or 'no label'})" if marked else file["path"]
        for file in group["files"]
    ]
    return f"duplicates {where}{', DIFFERENT LABELS' if marked else ''}: {listed(names)}"


def _cut(found: list[str]) -> list[str]:
    if len(found) <= _MOST_LINES:
        return found
    return [*found[:_MOST_LINES], f"and {len(found) - _MOST_LINES} more {found[0].split()[0]}, all with --json FILE"]
