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
        classes_by: How folders or labels name classes: by the model's own names; by the class's number from 0, in the
            order of numbers, as in ImageNet-v2; or by the WordNet number of an ImageNet-1K class.
        subset: Answer only classes that the data have, as for the 200 of ImageNet-R.
        real: Score other right answers too: "imagenet" for ReaL's labels of the ImageNet validation pictures, a JSON
            file of that form, or one that maps file names to lists of classes.
        img_size: Another input size than the model's own, pixels or HEIGHTxWIDTH; positions are resampled. Not
            for NaFlex models.
        report: Write a page with numbers, confusions, the worst mistakes and reliability to index.html in this folder.
        device: Where to compute.
        workers: Processes that load pictures; 0 loads them in this one.
    """

    model: str = ""
    data: str = ""
    classes_by: Literal["name", "index", "wnid"] = "name"
    subset: bool = False
    real: str | None = None
    img_size: str | None = None
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
    numbers = evaluate(
        config.model,
        config.data,
        config.device,
        config.workers,
        config.report,
        config.classes_by,
        config.subset,
        config.real,
        config.img_size,
    )
    if config.json:
        from jumbo_vit.files import write_json

        write_json(config.json, numbers)
    for name, value in numbers.items():
        if isinstance(value, float):
            print(f"{name:18} {value:.4f}")
    for name in ("n", "real_n", "real_left_out"):
        if name in numbers:
            print(f"{name:18} {numbers[name]}")
    for key in ("per_class_accuracy", "per_class_ap"):
        for label, value in numbers.get(key, {}).items():
            print(f"  {label:20} {'absent' if value is None else f'{value:.4f}'}")
    for skipped in numbers["skipped"]:
        print(f"skipped {skipped['path']}: {skipped['reason']}")
    for note in numbers["notes"]:
        print(f"note: {note}")
    if config.report:
        print(f"report: {numbers['report']}")
