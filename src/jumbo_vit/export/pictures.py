"""The pictures on which an exported file is compared with its model."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from jumbo_vit.data.inputs import expand_inputs
from jumbo_vit.data.pipeline import EvalSet
from jumbo_vit.data.sets import check_images, open_held_out
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.predictor import Predictor

MOST = 500
"""Pictures that are looked at; of more, as many evenly spaced ones."""


@dataclass
class Pictures:
    """Prepared pictures.

    Args:
        images: (N, C, H, W).
        targets: (N,) class indices or (N, C) of 0 and 1; None without labels.
        words: Where they come from.
        notes: What was left out or guessed.
    """

    images: Tensor
    targets: Tensor | None
    words: str
    notes: list[str] = field(default_factory=list)


def pictures_of(predictor: Predictor, data: str | None) -> Pictures:
    """The pictures of `data`, with labels where it has the model's classes; without `data`, crops of two photographs.

    Raises:
        UserError: There is no picture in `data`.
    """
    if not data:
        return _photographs(predictor)
    contract = predictor.contract
    try:
        found = open_held_out(data, contract.task, contract.labels)  # type: ignore[arg-type]
    except UserError as error:
        if not Path(data).expanduser().is_dir():
            raise
        return _without_labels(predictor, data, str(error))
    if not found.samples:
        raise UserError(f"there is no picture in {data}")
    total = len(found)
    images = check_images(found.subset(_spread(total)), contract.preparation.in_chans)
    rows = EvalSet(images, contract.task, contract.preparation)
    loaded = [rows[index] for index in range(len(rows))]
    notes = [f"{entry.path} left out: {entry.reason}" for entry in images.skipped]
    return Pictures(
        torch.stack([row[0] for row in loaded]),
        torch.stack([row[1] for row in loaded]),
        _counted(len(loaded), total, data),
        notes,
    )


def _without_labels(predictor: Predictor, data: str, reason: str) -> Pictures:
    entries, _ = expand_inputs(data)
    images, notes = [], [f"taken without labels: {reason}"]
    for index in _spread(len(entries)):
        try:
            images.append(predictor.prepare(entries[index].source))
        except UnreadableImage as error:
            notes.append(f"{entries[index].name} left out: {error.reason}")
    if not images:
        raise UserError(f"none of the {len(entries)} pictures in {data} can be read, such as {notes[1]}")
    return Pictures(torch.stack(images), None, _counted(len(images), len(entries), data), notes)


def _photographs(predictor: Predictor) -> Pictures:
    from sklearn.datasets import load_sample_images

    crops = []
    for photograph in load_sample_images().images:
        for rows in np.array_split(photograph, 2, axis=0):
            crops += [Image.fromarray(part) for part in np.array_split(rows, 4, axis=1)]
    chans = predictor.contract.preparation.in_chans
    if chans not in (1, 3):
        raise UserError(f"the model takes pictures of {chans} channels, and there are none to compare on: give --data")
    images = torch.stack([predictor.prepare(crop) for crop in crops])
    return Pictures(images, None, f"{len(crops)} crops of scikit-learn's two photographs")


def _spread(count: int) -> list[int]:
    return list(range(count)) if count <= MOST else [index * count // MOST for index in range(MOST)]


def _counted(taken: int, total: int, data: str) -> str:
    return f"{taken} pictures of {data}" if taken == total else f"{taken} of the {total} pictures of {data}"
