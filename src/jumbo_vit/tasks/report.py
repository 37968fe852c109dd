"""The page that `evaluate --report` writes: one HTML file that needs nothing else, neither network nor date."""

import base64
import io
import tempfile
import unicodedata
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from jumbo_vit.data.records import ImageSet
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.files import is_temporary, write_text
from jumbo_vit.predictor import Contract, Predictor
from jumbo_vit.tasks.report_numbers import (
    Case,
    MulticlassOutputs,
    MultilabelOutputs,
    Outputs,
    interval,
    probability,
)
from jumbo_vit.version import __version__

NAME = "index.html"
MARK = '<meta name="generator" content="jumbo-vit evaluate">'
"""By this line in its first bytes a page is known as ours, which may be replaced."""

WHOLE = 40
"""Up to so many classes the confusion matrix is drawn whole; of more, only the `CONDENSED` most confused ones."""

CONDENSED = 24
WORST, BARELY = 24, 12
THUMBNAIL = 160  # pixels of the longer side

# Names of the score, what they are called on the page, and what they mean.
_TILES = {
    "top1": ("top-1", "the likeliest class is the right one"),
    "top5": ("top-5", "the right class is among the five likeliest"),
    "balanced_accuracy": ("balanced accuracy", "each class counts the same, however many pictures it has"),
    "map": ("mean average precision", "over the labels that occur, at every threshold"),
    "f1_macro": ("F1, macro", "at the thresholds; each label counts the same"),
    "f1_micro": ("F1, micro", "at the thresholds; each picture's label counts the same"),
    "loss": ("loss", "mean cross-entropy, lower is better"),
}


def report_file(folder: str) -> Path:
    """Where the page of a report in `folder` goes, once it is sure that it can go there; the folder is made.

    Raises:
        UserError: `folder` is a file, cannot be written, or holds anything but an earlier report.
    """
    path = Path(folder)
    advice = "give a new or empty folder, or one with an earlier report"
    if not folder.strip():
        raise UserError(f"--report is empty: {advice}")
    page = path / NAME
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"--report {shown(folder)} is a file: {advice}")
        path.mkdir(parents=True, exist_ok=True)
        # What an interrupted writing left behind is no one's file.
        others = [entry.name for entry in path.iterdir() if not is_temporary(entry.name, NAME)]
        ours = page.is_file() and _is_ours(page)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"--report {shown(folder)} cannot be written ({error.strerror}): {advice}") from error
    if others and not ours:
        first = NAME if NAME in others else min(others)
        raise UserError(f"--report {shown(folder)} holds other files, such as {shown(first)}: {advice}")
    return page


def _is_ours(page: Path) -> bool:
    with page.open("rb") as file:
        return MARK.encode() in file.read(300)


def new_outputs(contract: Contract) -> Outputs:
    """The collector for a pass over the pictures."""
    if contract.task == "multiclass":
        return MulticlassOutputs(contract.labels)
    return MultilabelOutputs(contract.labels, contract.thresholds)


def write_report(
    page: Path,
    names: tuple[str, str],
    predictor: Predictor,
    contract: Contract,
    images: ImageSet,
    outputs: Outputs,
    numbers: dict[str, Any],
) -> None:
    """Write the page.

    Args:
        page: From `report_file`.
        names: The model and the data as the user named them.
        predictor: The model.
        contract: What it was scored by: the predictor's, or that of another size.
        images: The pictures that were scored, in their order.
        outputs: What the pass over them collected.
        numbers: What `evaluate` answers: scores, `n`, `skipped`, `notes`.
    """
    content = _content(outputs, images, numbers) if not outputs.not_finite else {}
    environment = Environment(
        loader=PackageLoader("jumbo_vit.tasks", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": probability, "whole": lambda number: f"{number:,}"}
    text = environment.get_template("report.html.j2").render(
        mark=Markup(MARK),
        model=names[0],
        data=names[1],
        facts=_facts(predictor, contract, images, numbers),
        tiles=[(key, *_TILES[key], numbers[key]) for key in _TILES if key in numbers],
        task=contract.task,
        classes=len(predictor.labels),
        numbers=numbers,
        not_finite=outputs.not_finite,
        thumbnail=THUMBNAIL,
        **content,
    )
    write_text(page, text)


def shown(text: str) -> str:
    """Text as a page can hold it: bytes that are no UTF-8, and characters without a shape, are written as escapes."""
    sound = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in sound)


def _facts(
    predictor: Predictor, contract: Contract, images: ImageSet, numbers: dict[str, Any]
) -> list[tuple[str, str]]:
    cfg = getattr(predictor.model, "pretrained_cfg", None) or {}
    name = cfg.get("architecture") or type(predictor.model).__name__
    parameters = sum(p.numel() for p in predictor.model.parameters())
    size = " x ".join(map(str, contract.preparation.input_size))
    lineage = contract.lineage
    epoch = f"epoch {lineage['epoch']}" if lineage.get("epoch") is not None else ""
    found = [
        ("architecture", name),
        ("parameters", f"{parameters / 1e6:.2f} M"),
        ("input", f"{size}"),
        ("made by", str(lineage.get("source") or "")),
        ("weights", ", ".join(filter(None, [str(lineage.get("weights") or ""), epoch]))),
        ("task", f"{contract.task}, {len(contract.labels):,} classes"),
        ("pictures", f"{numbers['n']:,} scored, {len(images.skipped):,} skipped"),
        ("measured by", f"jumbo-vit {__version__}"),
    ]
    return [(name, value) for name, value in found if value]


def _content(outputs: Outputs, images: ImageSet, numbers: dict[str, Any]) -> dict[str, Any]:
    """What the page shows below its headline."""
    bins, error = outputs.reliability()
    answers = sum(entry.count for entry in bins)
    content: dict[str, Any] = {
        "rows": outputs.rows(numbers),
        "wrong": outputs.wrong(),
        "bins": bins,
        "calibration_error": error,
        "mean_confidence": sum(entry.confidence * entry.count for entry in bins) / answers,
        "mean_right": sum(entry.right * entry.count for entry in bins) / answers,
        "worst": [_card(case, images) for case in outputs.cases(right=False, at_most=WORST)],
        "barely": [_card(case, images) for case in outputs.cases(right=True, at_most=BARELY)],
    }
    if isinstance(outputs, MulticlassOutputs):
        counts = [row.n for row in content["rows"]]
        largest = max(range(len(counts)), key=counts.__getitem__)
        content |= {
            "hits": outputs.hits(),
            "interval": interval(outputs.hits(), numbers["n"]),
            "most_frequent": (outputs.labels[largest], counts[largest] / numbers["n"]),
            **_confusion(outputs),
        }
    return content


def _confusion(outputs: MulticlassOutputs) -> dict[str, Any]:
    """Matrix and most confused pairs; of many classes, only those that are confused most."""
    labels, pairs = outputs.labels, outputs.pairs()
    chosen = list(range(len(labels)))
    if len(labels) > WHOLE:
        frequent = sorted(chosen, key=lambda number: -int((outputs.truth == number).sum()))
        ordered = [*(number for pair in pairs for number in (pair.truth, pair.given)), *frequent]
        chosen = sorted(list(dict.fromkeys(ordered))[:CONDENSED])
    counts, right_elsewhere = outputs.confusion(chosen)
    names = [labels[number] for number in chosen]
    if len(counts) > len(names):
        names.append(f"{len(labels) - len(chosen)} others")
    matrix = [
        {
            "label": names[row],
            "n": int(line.sum()),
            "others": row == len(chosen),
            "cells": [_cell(counts.tolist(), row, column, len(chosen)) for column in range(len(names))],
        }
        for row, line in enumerate(counts)
    ]
    return {
        "matrix": matrix,
        "columns": names,
        "condensed": len(chosen) < len(labels),
        "right_elsewhere": right_elsewhere,
        "pairs": [asdict(pair) | {"truth": labels[pair.truth], "given": labels[pair.given]} for pair in pairs[:10]],
        "kinds_of_pairs": len(pairs),
    }


def _cell(counts: list[list[int]], row: int, column: int, others: int) -> dict[str, Any]:
    count, n = counts[row][column], sum(counts[row])
    share = count / n if n else None
    kind = "others" if row == column == others else "hit" if row == column else "miss"
    # By its root, so that rare confusions can be seen.
    shade = 0.0 if not share else 0.06 + 0.84 * share**0.5
    return {"count": count, "share": share, "kind": kind if count else "none", "shade": shade}


def _card(case: Case, images: ImageSet) -> dict[str, Any]:
    card = {"path": images.name(case.index), **asdict(case), "src": None, "small": False, "fault": ""}
    try:
        picture = images.read(case.index, 3)
    except UnreadableImage as error:  # it was there when it was scored
        return card | {"fault": error.reason}
    small = max(picture.size) <= THUMBNAIL // 2
    return card | {"src": f"data:image/jpeg;base64,{thumbnail(picture)}", "small": small}


def thumbnail(picture: Image.Image) -> str:
    """A JPEG of at most `THUMBNAIL` pixels a side, in base64; smaller pictures keep their size."""
    small = picture.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Few pixels are shown large, with every artefact.
    fine = max(picture.size) <= THUMBNAIL // 2
    small.save(buffer, "JPEG", quality=95 if fine else 85, subsampling=0 if fine else 2)
    return base64.b64encode(buffer.getvalue()).decode()
