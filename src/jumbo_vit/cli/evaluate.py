"""`jumbo-vit evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

POSITIONALS = ("model",)


@dataclass
class Config:
    """Measure a trained model on held-out pictures.

    Args:
        model: A model folder such as runs/digits/model, a run's folder, an official .pth, or an exported file.
        data: "digits", a folder (its held-out part if it has one, else the folder itself), or a CSV.
        json: Write the numbers to this file.
        report: Write a page with numbers, confusions, the worst mistakes and reliability to index.html in this folder.
        device: Where to compute.
        workers: Processes that load pictures; 0 loads them in this one.
    """

    model: str = ""
    data: str = ""
    json: str | None = None
    report: str | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    workers: int = 0


def run(config: Config) -> None:
    """Print the numbers, and write them where asked."""
    from jumbo_vit.errors import UserError
    from jumbo_vit.tasks.measure_folder import evaluate

    if not config.data:
        raise UserError("--data is missing: give a folder of class folders, a CSV, or digits")
    if config.json and config.report and Path(config.json).resolve() == (Path(config.report) / "index.html").resolve():
        raise UserError(f"--json {config.json} is the report's own page: give the numbers another name")
    numbers = evaluate(config.model, config.data, config.device, config.workers, config.report)
    if config.json:
        from jumbo_vit.files import write_json

        write_json(config.json, numbers)
    for name, value in numbers.items():
        if isinstance(value, float):
            print(f"{name:18} {value:.4f}")
    print(f"{'n':18} {numbers['n']}")
    for key in ("per_class_accuracy", "per_class_ap"):
        for label, value in numbers.get(key, {}).items():
            print(f"  {label:20} {'absent' if value is None else f'{value:.4f}'}")
    for skipped in numbers["skipped"]:
        print(f"skipped {skipped['path']}: {skipped['reason']}")
    for note in numbers["notes"]:
        print(f"note: {note}")
    if config.report:
        print(f"report: {numbers['report']}")
