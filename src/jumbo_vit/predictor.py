"""A model that is ready to use: give it pictures, get labels or features."""

import csv
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jumbo_vit.data.images import Skipped, read_image
from jumbo_vit.data.inputs import Entry, expand_inputs
from jumbo_vit.data.pipeline import EVAL_BATCH, Preparation
from jumbo_vit.errors import UnreadableImage, UserError


@dataclass
class Contract:
    """What a model folder says beside weights and architecture.

    Args:
        task: "multiclass" or "multilabel".
        labels: Class names in the order of the head's outputs.
        preparation: How a picture becomes the input.
        thresholds: Per class, the probability from which a label is given; multilabel only, 0.5 where missing.
        lineage: Where the weights come from: source, license, teacher, epoch, score, which weights (plain or averaged).
    """

    task: str
    labels: list[str]
    preparation: Preparation
    thresholds: list[float] | None = None
    lineage: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """One row of `predict`.

    Args:
        path: Name of the picture, relative to the INPUT that contained it.
        label: The likeliest class; for multilabel all labels at or above their threshold, joined by `|`.
        probability: Its probability in 0..1; for multilabel those of the labels given, joined by `|`.
        error: Why there is no answer, or "".
        top: The K likeliest classes with their probabilities, likeliest first.
    """

    path: str
    label: str
    probability: str
    error: str
    top: tuple[tuple[str, float], ...] = ()


class Predictor:
    """A model with its labels and its preparation.

    Calling it gives the model's logits for a prepared batch (B, C, H, W) on its device.

    Args:
        model: A timm model whose outputs are `contract.labels`.
        contract: Task, labels, preparation.
        device: Where it runs.
    """

    def __init__(self, model: nn.Module, contract: Contract, device: torch.device | str = "cpu") -> None:
        self.contract = contract
        self.device = torch.device(device)
        self.model = model.eval().to(self.device)
        self._transform = contract.preparation.evaluation()

    @property
    def labels(self) -> list[str]:
        """Class names in the order of the outputs."""
        return self.contract.labels

    def __call__(self, batch: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(batch.to(self.device))
        return logits

    def prepare(self, source: Any) -> Tensor:
        """One picture (path, PIL image or array) as the model's input (C, H, W).

        Raises:
            UnreadableImage: It cannot be read.
        """
        prepared: Tensor = self._transform(read_image(source, self.contract.preparation.in_chans))
        return prepared

    def predict(self, inputs: Any, topk: int = 1) -> list[Prediction]:
        """Predict for a path, a PIL image, an array, or a list of them; folders stand for all pictures below.

        Returns:
            One row a picture, in order; a picture that cannot be read has its reason in `error`.

        Raises:
            UserError: A path does not exist, no picture was found, or `topk` is below 1.
        """
        entries, _ = expand_inputs(inputs)
        return list(self.predict_entries(entries, topk))

    def predict_entries(self, entries: list[Entry], topk: int = 1) -> Iterator[Prediction]:
        """`predict` for entries from `expand_inputs`, row by row."""
        if topk < 1:
            raise UserError(f"topk is {topk}, but must be at least 1")
        if not self.labels:
            raise UserError("this model has no classes to predict, only features: use embed")
        for names, batch, errors in self._batches(entries):
            rows = iter(self._rows(batch, topk) if batch is not None else ())
            for name, error in zip(names, errors, strict=True):
                label, probability, top = ("", "", ()) if error else next(rows)
                # A NaN would make the first class look likeliest.
                fault = error or ("" if top else "the model's output is not finite")
                yield Prediction(name, label, probability, fault, top)

    def embed(self, inputs: Any) -> tuple[list[str], np.ndarray, list[Skipped]]:
        """Features that the head reads, one row a readable picture.

        Returns:
            Names (N), features (N, head_hidden_size) in float32, and the pictures that could not be read.

        Raises:
            UserError: A path does not exist, or no picture could be read.
        """
        entries, skipped = expand_inputs(inputs)
        names: list[str] = []
        features: list[np.ndarray] = []
        for batch_names, batch, errors in self._batches(entries):
            skipped += [Skipped(n, e) for n, e in zip(batch_names, errors, strict=True) if e]
            names += [n for n, e in zip(batch_names, errors, strict=True) if not e]
            if batch is not None:
                features.append(self._features(batch).float().cpu().numpy())
        if not features:
            raise UserError(f"none of the {len(entries)} pictures could be read, such as {skipped[-1].path}")
        return names, np.concatenate(features), skipped

    def _features(self, batch: Tensor) -> Tensor:
        with torch.inference_mode():
            tokens = self.model.forward_features(batch.to(self.device))  # type: ignore[operator]
            features: Tensor = self.model.forward_head(tokens, pre_logits=True)  # type: ignore[operator]
        return features

    def _batches(self, entries: list[Entry]) -> Iterator[tuple[list[str], Tensor | None, list[str]]]:
        """Batches of EVAL_BATCH pictures: names, the readable ones stacked, and an error or "" for each."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            for start in range(0, len(entries), EVAL_BATCH):
                part = entries[start : start + EVAL_BATCH]
                loaded = list(pool.map(self._try_prepare, part))
                good = [x for x in loaded if isinstance(x, Tensor)]
                errors = ["" if isinstance(x, Tensor) else x for x in loaded]
                yield [entry.name for entry in part], torch.stack(good) if good else None, errors

    def _try_prepare(self, entry: Entry) -> Tensor | str:
        try:
            return self.prepare(entry.source)
        except UnreadableImage as error:
            return error.reason

    def _rows(self, batch: Tensor, topk: int) -> Iterator[tuple[str, str, tuple[tuple[str, float], ...]]]:
        logits = self(batch).double().cpu()
        multilabel = self.contract.task == "multilabel"
        table = logits.sigmoid() if multilabel else logits.softmax(-1)
        order = table.argsort(dim=-1, descending=True, stable=True)[:, :topk]
        finite = logits.isfinite().all(-1).tolist()
        for row, best, whole in zip(table.tolist(), order.tolist(), finite, strict=True):
            if not whole:
                yield "", "", ()
                continue
            top = tuple((self.labels[i], row[i]) for i in best)
            given = [(self.labels[best[0]], row[best[0]])]
            if multilabel:
                limits = self.contract.thresholds or [0.5] * len(row)
                given = [(self.labels[i], p) for i, p in enumerate(row) if p >= limits[i]]
            yield "|".join(label for label, _ in given), "|".join(f"{p:.6f}" for _, p in given), top


def rows_as_csv(rows: list[Prediction], topk: int = 1) -> str:
    """CSV with the columns `path,label,probability,error`; for K > 1 then `label_2,probability_2`, ... ."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    more = [name for rank in range(2, topk + 1) for name in (f"label_{rank}", f"probability_{rank}")]
    writer.writerow(["path", "label", "probability", "error", *more])
    for row in rows:
        rest = [cell for label, p in row.top[1:topk] for cell in (label, f"{p:.6f}")]
        writer.writerow([row.path, row.label, row.probability, row.error, *rest, *[""] * (len(more) - len(rest))])
    return buffer.getvalue()
