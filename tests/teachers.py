"""Teachers that are made, not trained: model folders whose answers differ from picture to picture."""

from pathlib import Path
from typing import Any

import torch

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.folder import make_model, save_folder
from jumbo_vit.predictor import Contract
from tests.pictures import TEST_MODEL

OWN = Preparation((3, 32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
"""How these teachers prepare pictures, where nothing else is said."""


def teacher_folder(
    folder: Path,
    name: str = TEST_MODEL,
    labels: list[str] | None = None,
    preparation: Preparation = OWN,
    seed: int = 0,
    task: str = "multiclass",
    **args: Any,
) -> str:
    """A model folder; the head has random weights, for a new one of ours answers alike to everything."""
    labels = labels or ["a", "b", "c"]
    torch.manual_seed(seed)
    model: Any = make_model(name, num_classes=len(labels), in_chans=preparation.in_chans, **args)
    torch.nn.init.normal_(model.get_classifier().weight)
    lineage = {"source": f"made by hand, seed {seed}", "license": "none"}
    save_folder(folder, model, Contract(task, labels, preparation, lineage=lineage))
    return str(folder)
