"""`jumbo-vit export`."""

from dataclasses import dataclass
from typing import Any, Literal

POSITIONALS = ("model",)


@dataclass
class Config:
    """Write a trained model as a file for another runtime, run that file, and compare its answers with the model's.

    The file carries labels and preparation: `jumbo-vit predict FILE PICTURES` needs nothing else.

    Args:
        model: A model folder, a run's folder, or an official .pth file.
        out: The file to write: .pt2 (torch), .onnx, .xml (openvino), .pte (executorch).
        format: The format; auto goes by the ending of OUT.
        precision: Precision of weights and computation; auto measures what the format has on this machine and takes
            the fastest that answers like the model.
        batch: "dynamic", or a fixed batch size.
        img_size: Side of the input in pixels, or HEIGHTxWIDTH; default the model's own.
        data: Pictures to compare on, best your own test pictures; default crops of two photographs.
        tolerance: Largest difference that is let pass, instead of the precision's own.
        max_drop: What auto may lose: accuracy as a fraction or, without labels, the share of other answers.
        json: Write the numbers to this file.
    """

    model: str = ""
    out: str = ""
    format: Literal["auto", "torch", "onnx", "openvino", "executorch"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "fp32"
    batch: str = "dynamic"
    img_size: str | None = None
    data: str | None = None
    tolerance: float | None = None
    max_drop: float = 0.005
    json: str | None = None


def run(config: Config) -> None:
    """Write the file; say what is in it and how far it is from the model."""
    from jumbo_vit.errors import UserError
    from jumbo_vit.export.formats import check_precision, format_of

    if not config.out:
        raise UserError("--out is missing: give the file to write, ending in .pt2, .onnx, .xml or .pte")
    if config.batch != "dynamic" and not (config.batch.isdecimal() and int(config.batch) > 0):
        raise UserError(f"--batch is {config.batch!r}, but must be dynamic, or a number such as 1")
    # Before torch is loaded: the likely mistakes are answered at once.
    check_precision(format_of(config.out, config.format), config.precision)

    from jumbo_vit.export.classifier import Options, export
    from jumbo_vit.files import write_json
    from jumbo_vit.tasks.config import parse_size

    options = Options(
        format=config.format,
        precision=config.precision,
        batch=None if config.batch == "dynamic" else int(config.batch),
        size=None if config.img_size is None else parse_size(config.img_size),
        data=config.data,
        tolerance=config.tolerance,
        max_drop=config.max_drop,
    )
    summary = export(config.model, config.out, options)
    if config.json:
        write_json(config.json, summary)
    print("\n".join(lines(summary)))


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    size = "x".join(map(str, summary["input_size"]))
    opset = f", opset {summary['opset']}" if summary["opset"] else ""
    found = [
        f"{', '.join(summary['files'])}: {summary['format']}{opset}, {summary['precision']} "
        f"(runs in {summary['computes']} here), {summary['bytes'] / 1e6:.1f} MB, pictures {size}, "
        f"batch {summary['batch']}",
        f"compared with the model on {summary['pictures_from']}:",
    ]
    for key, row in summary["differences"].items():
        name = "all" if key == "all" else f"batch {key}"
        found.append(
            f"  {name:9} largest difference {row['difference']:.2g} (largest output {row['scale']:.3g}), "
            f"relative {row['relative']:.2g}, same answer {row['agreement']:.2%}"
        )
    if summary["top1"] is not None:
        found.append(f"  right answers {summary['top1']:.4f}, the model {summary['top1_model']:.4f}")
    for form in summary["forms"]:
        speed = "" if form["milliseconds"] is None else f" {form['milliseconds']:.2f} ms, loses {form['drop']:.4f}"
        why = f": {form['not_taken']}" if form["not_taken"] else ": taken"
        found.append(f"  {form['precision']:5}{speed}{why}")
    lineage = summary["lineage"]
    found += [f"{name}: {lineage[name]}" for name in ("source", "license", "teacher") if lineage.get(name)]
    found += [f"note: {note}" for note in summary["notes"]]
    return [*found, f"try next:\n  jumbo-vit predict {summary['out']} PICTURES"]
