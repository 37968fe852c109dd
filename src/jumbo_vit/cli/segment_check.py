"""`jumbo-vit segment check`."""

from dataclasses import dataclass
from typing import Any

POSITIONALS = ("data",)

_MOST_LINES = 20


@dataclass
class Config:
    """Look through pictures and masks before training: classes, pixels, and what does not fit.

    DATA holds train/images, train/masks, val/images and val/masks, or images and masks alone, which are split; a
    picture and its mask have the same name. Other forms: see --image-pattern. The exit code is 2 if training would
    refuse them.

    Args:
        data: A folder of pictures and masks.
        num_classes: Number of classes; default the names, else the highest number in the training masks.
        classes: File with the name of a class a line, in the order of their numbers.
        colour_map: File of names and colours, CSV lines name,r,g,b or JSON; masks in colour are read by it. The name
            ignore is for colours that are no class.
        ignore_index: Numbers in masks that mean "not labelled"; default 255.
        reduce_zero_label: 0 means "not labelled" and classes count from 1, as in ADE20K.
        image_pattern: Where pictures lie below DATA, such as "{split}/rgb/{name}.*"; goes with --mask-pattern.
        mask_pattern: Where masks lie, such as "{split}/gt/{name}_L.png".
        val_fraction: Share of the pictures held out where no held-out part is there.
        seed: Fixes which pictures are held out.
        workers: Threads that read; default one for each core.
        json: Write everything that was found to this file.
    """

    data: str
    num_classes: int | None = None
    classes: str = ""
    colour_map: str = ""
    ignore_index: list[int] | None = None
    reduce_zero_label: bool = False
    image_pattern: str = ""
    mask_pattern: str = ""
    val_fraction: float = 0.1
    seed: int = 0
    workers: int | None = None
    json: str | None = None


def run(config: Config) -> None:
    """Print what was found, and write it where asked.

    Raises:
        UserError: Training would refuse these masks; after the report.
    """
    from tqdm import tqdm

    from jumbo_vit.data.mask_labels import LabelOptions
    from jumbo_vit.data.segment_check import segment_report
    from jumbo_vit.data.survey import survey
    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_json

    if config.seed < 0:
        raise UserError(f"--seed is {config.seed}, but must be 0 or more")
    if config.workers is not None and config.workers < 1:
        raise UserError(f"--workers is {config.workers}, but must be 1 or more")
    options = LabelOptions(
        config.classes, config.colour_map, config.num_classes, config.ignore_index, config.reduce_zero_label
    )
    patterns = (config.image_pattern, config.mask_pattern)
    with tqdm(desc="checking pictures and masks", unit=" pairs", leave=False, disable=None) as bar:
        found = survey(
            config.data, options, patterns, config.seed, config.val_fraction, config.workers, done=bar.update
        )
    report = segment_report(found)
    if config.json:
        write_json(config.json, {"data": config.data, **report})
    print("\n".join(lines(report)))
    found.require_sound()


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people; long lists are cut, and say so."""
    train, val = report["splits"]["train"], report["splits"]["val"]
    classes = report["labels"]["classes"]
    width = max(map(len, ["class", *classes]))
    found = [
        f"{train['pictures']} pictures for training, {val['pictures']} held out ({report['held_out']}), "
        f"{len(classes)} classes, {len(report['skipped'])} skipped; {report['rule']}",
        f"{'class':{width}}  number  training: pixels  share  pictures   held out: pixels  share  pictures",
    ]
    for number, own, held in zip(report["labels"]["values"], train["per_class"], val["per_class"], strict=True):
        found.append(
            f"{own['class']:{width}}  {number:6}  {own['pixels']:16} {own['share']:6.1%}  {own['pictures']:8}  "
            f"{held['pixels']:17} {held['share']:6.1%}  {held['pictures']:8}"
        )
    for name, part in (("training", train), ("held out", val)):
        sizes = list(part["sizes"].items())
        more = f" and {len(sizes) - 5} others" if len(sizes) > 5 else ""
        found.append(
            f"{name}: {part['ignored_share']:.1%} of the pixels ignored; sizes "
            + ", ".join(f"{size} ({count})" for size, count in sizes[:5])
            + more
        )
    for kind in ("skipped", "faults"):
        rows = [f"{kind.removesuffix('s')} {entry['path']}: {entry['reason']}" for entry in report[kind]]
        found += rows[:_MOST_LINES]
        if len(rows) > _MOST_LINES:
            found.append(f"and {len(rows) - _MOST_LINES} more {kind}, all with --json FILE")
    found += [f"warning: {warning}" for warning in report["warnings"]]
    return found + [f"note: {note}" for note in report["notes"]]
