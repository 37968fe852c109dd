"""`jumbo-vit predict`."""

from dataclasses import dataclass, field
from typing import Literal

POSITIONALS = ("model", "inputs")


@dataclass
class Config:
    """Label pictures with a trained model: files, flat or nested folders.

    Args:
        model: A model folder, a run's folder, an official .pth file, or a file that `export` wrote.
        inputs: Picture files or folders.
        csv: Write path, label, probability and error, one row a picture, to this file.
        json: Write to this file how many pictures were labelled, and which files were not and why.
        topk: Give the K likeliest classes of each picture.
        device: Where to compute.
    """

    model: str = ""
    inputs: list[str] = field(default_factory=list)
    csv: str | None = None
    json: str | None = None
    topk: int = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"


def run(config: Config) -> None:
    """Print or write the rows; unreadable pictures have their reason in `error` and are counted."""
    import sys

    from jumbo_vit.data.inputs import expand_inputs
    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_json, write_text
    from jumbo_vit.folder import load
    from jumbo_vit.predictor import rows_as_csv

    predictor = load(config.model, config.device)
    if predictor.labels and not 1 <= config.topk <= len(predictor.labels):
        raise UserError(f"--topk is {config.topk}, but must be from 1 to the model's {len(predictor.labels)} classes")
    entries, skipped = expand_inputs(config.inputs)
    rows = list(predictor.predict_entries(entries, config.topk))
    text = rows_as_csv(rows, config.topk)
    if config.csv:
        write_text(config.csv, text)
    else:
        print(text, end="")
    failed = sum(bool(row.error) for row in rows)
    if config.json:
        bad = [{"path": row.path, "reason": row.error} for row in rows if row.error]
        others = [{"path": entry.path, "reason": entry.reason} for entry in skipped]
        write_json(config.json, {"labelled": len(rows) - failed, "unreadable": bad, "skipped": others})
    if failed == len(rows):
        raise UserError(f"none of the {len(rows)} pictures could be read, such as {rows[0].path}: {rows[0].error}")
    left_out = f", {len(skipped)} other files left out, such as {skipped[0].path}" if skipped else ""
    where = f", in {config.csv}" if config.csv else ""
    print(f"{len(rows) - failed} pictures labelled, {failed} unreadable{left_out}{where}", file=sys.stderr)
