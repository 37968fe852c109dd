"""An exported classifier as a `Predictor`."""

from pathlib import Path
from typing import Any

from jumbo_vit.errors import UserError
from jumbo_vit.export.run import ExportedModel, open_exported
from jumbo_vit.folder import contract_entry, contract_of
from jumbo_vit.predictor import Contract, Predictor


def contract_metadata(architecture: str, contract: Contract) -> dict[str, Any]:
    """What a classifier's file carries: a model folder's `config.json`, as far as it is about using the model."""
    return {
        "architecture": architecture,
        "num_classes": len(contract.labels),
        "pretrained_cfg": contract.preparation.to_cfg(),
        "jumbo_vit": contract_entry(contract),
        "input": {
            "layout": "NCHW",
            "channels": {1: "L", 3: "RGB"}.get(contract.preparation.in_chans, "as given"),
            "range": "0..1, then minus mean, divided by std",
        },
    }


def open_classifier(path: str | Path, device: str = "auto") -> Predictor:
    """A file that `export` wrote, ready to predict: the rows are those of the model it was made from.

    Args:
        path: A .pt2, .onnx, .xml or .pte file.
        device: "auto" or "cpu".

    Raises:
        UserError: No such file, a damaged or foreign one, a runtime that is missing, or another device.
    """
    if device not in ("auto", "cpu"):
        raise UserError(f"exported files run on the CPU here: use --device cpu, or the model folder for {device}")
    path = Path(path)
    model, metadata = open_exported(path)
    _, _, contract = contract_of(metadata, path)
    if model.form.input_shape != tuple(contract.preparation.input_size):
        raise UserError(
            f"{path} takes {model.form.input_shape}, but says that pictures become {contract.preparation.input_size}"
        )
    # Not asked of the file by its shapes, which say nothing of how many labels its outputs are.
    return _checked(model, contract, path)


def _checked(model: ExportedModel, contract: Contract, path: Path) -> Predictor:
    import torch

    with torch.inference_mode():
        shape = tuple(model(torch.zeros(1, *model.form.input_shape)).shape)
    if shape != (1, len(contract.labels)):
        raise UserError(f"{path} gives {shape}, not one number for each of its {len(contract.labels)} classes")
    return Predictor(model, contract)
