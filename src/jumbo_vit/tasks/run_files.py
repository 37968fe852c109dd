"""What a run leaves in its folder: the state to go on from, its best model, and a batch that gave no finite loss."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.sets import Splits
from jumbo_vit.folder import save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.average import weights_of
from jumbo_vit.tasks.balance import best_metric
from jumbo_vit.tasks.build import identity, save_config, saved_form, versions
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.distill import Lesson
from jumbo_vit.tasks.loop import Bad
from jumbo_vit.tasks.progress import write_metrics
from jumbo_vit.tasks.replay import FILE, write_bad
from jumbo_vit.tasks.sharding import whole
from jumbo_vit.tasks.state import Progress, write_state
from jumbo_vit.version import __version__


class RunFiles:
    """The part of a run that writes; `Run` builds what it reads."""

    config: TrainConfig
    splits: Splits
    labels: list[str]
    preparation: Preparation
    fabric: Any
    precision: str
    out: Path
    task: str
    model: nn.Module
    average: AveragedModel | None
    optimizer: Any
    batches: EpochBatches
    _fingerprint: str
    _class_weights: Tensor | None
    _lesson: Lesson | None = None
    _on_main: Callable[[Callable[[], Any]], Any]

    def _save(self, progress: Progress) -> None:
        content = {
            "model": whole(self.model.state_dict()),
            "average": whole(self.average.state_dict()) if self.average is not None else None,
            "optimizer": whole(self.optimizer.state_dict()),
            "precision": self.fabric.strategy.precision.state_dict(),
            "fingerprint": self._fingerprint,
            "epochs": self.config.epochs,
            "identity": self._identity(),
            "update_size": self.batches.samples_per_update,
            "unreadable": getattr(self, "unreadable", None),
            "versions": versions(),
            "teachers": self._lesson.checksums if self._lesson else None,
        } | self._more_state()

        def write() -> None:
            write_metrics(self.out / "metrics.csv", progress.history)
            write_state(self.out, content, progress)

        self._on_main(write)

    def _identity(self) -> dict[str, Any]:
        """What must not differ between a checkpoint and the `config.yaml` beside it."""
        return identity(self.config)

    def _write_config(self) -> None:
        save_config(self.out, dataclasses.replace(self.config, out=str(self.out)))

    def _more_state(self) -> dict[str, Any]:
        """What a run of another kind has to add to its checkpoint."""
        return {}

    def _keep(self, progress: Progress, kind: str) -> None:
        chosen: Any = self.average if kind == "averaged" else self.model
        weights = weights_of(chosen)
        lineage: dict[str, Any] = {
            "source": f"jumbo-vit {__version__} train",
            "init_from": self.config.init_from,
            "weights": kind,
            "epoch": progress.epoch,
            "metric": self._metric,
            "score": progress.best_score,
            "seed": self.config.seed,
        }
        if self._lesson is not None:
            lineage["teacher"] = self._lesson.lineage
        if self.splits.drawn:
            # With this, `evaluate --data` of the same tree scores the pictures that were held out, not the whole.
            lineage["split"] = {
                "seed": self.config.held_out_seed,
                "val_fraction": self.config.val_fraction,
                "folds": self.config.folds,
                "fold": self.config.fold,
                "checksum": self.splits.val.checksum(),
            }
        contract = Contract(self.task, self.labels, self.preparation, lineage=lineage)
        model = saved_form(self.model, self.config, len(self.labels))
        self._on_main(lambda: save_folder(self.out / "model", model, contract, weights))

    def _keep_bad(self, progress: Progress, bad: Bad) -> None:
        weights = weights_of(self.model)
        passes = [move_data_to_device(batch, torch.device("cpu")) for batch in bad.batches]
        shares = self._all_objects(list(zip(passes, bad.seeds, strict=True)))
        every = [entry for share in shares for entry in share]
        whole_bad = Bad([batch for batch, _ in every], [seed for _, seed in every], bad.loss)
        size, path = self.batches.update_size(progress.update), self.out / FILE
        total = (self.config.epochs or 1) * self.batches.updates
        place = (progress.epoch * self.batches.updates + progress.update, total)
        args = (weights, progress, place, whole_bad, self.precision, size, self._class_weights, self.labels)
        self._on_main(lambda: write_bad(path, *args))

    def _all_objects(self, value: Any) -> list[Any]:
        if self.fabric.world_size == 1:
            return [value]
        shares: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(shares, value)
        return shares

    @property
    def _metric(self) -> str:
        return best_metric(self.config, self.labels)
