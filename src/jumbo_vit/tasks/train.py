"""`jumbo-vit train`: from options to a run, and from its folder back to where it stood."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumbo_vit.data.find import Skipped
from jumbo_vit.data.pipeline import EvalSet, TrainSet, eval_loader, train_loader
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.sets import ImageSet, Splits, check_images, open_data
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json
from jumbo_vit.folder import save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.average import averaged, weights_of
from jumbo_vit.tasks.build import (
    augmentation,
    build_model,
    fingerprint,
    load_config,
    make_logger,
    make_objective,
    make_optimizer,
    make_plan,
    save_config,
    versions,
)
from jumbo_vit.tasks.config import TrainConfig, with_defaults
from jumbo_vit.tasks.evaluate import passes_of_rank_zero, score_models
from jumbo_vit.tasks.fabric import make_fabric
from jumbo_vit.tasks.loop import Bad, Loop, Parts
from jumbo_vit.tasks.progress import Reporter, draw_curves, write_metrics
from jumbo_vit.tasks.score import new_score
from jumbo_vit.tasks.sharding import load_optimizer, shard, whole
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.state import Progress, find_state, write_state
from jumbo_vit.tasks.summary import closing_lines, make_summary, opening_lines
from jumbo_vit.version import __version__


def train(config: TrainConfig) -> dict[str, Any]:
    """Run a training, new or resumed, and give its summary (the content of `summary.json`).

    Raises:
        UserError: Anything that the user can mend: data, options, disk, a rate that is too high.
    """
    if config.resume:
        return _resume(config)
    config = with_defaults(config)
    if config.data != "digits":
        # config.yaml must mean the same pictures wherever the run is gone on with.
        config = dataclasses.replace(config, data=str(Path(config.data).expanduser().absolute()))
    return Run(config).train()


def _resume(config: TrainConfig) -> dict[str, Any]:
    assert config.resume is not None
    extra = sorted(config.given - {"resume", "epochs"})
    if extra:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise UserError(f"--resume takes everything from the run; only --epochs may be changed, not {flags}")
    out, content, progress = find_state(config.resume)
    saved = load_config(out)
    assert saved.epochs is not None
    if config.epochs is not None and config.epochs < saved.epochs:
        raise UserError(f"--epochs {config.epochs} is less than the run's {saved.epochs}; it can only be raised")
    # The folder may have been moved, and a lengthened run may have been killed before its first state.
    saved = dataclasses.replace(saved, out=str(out), epochs=config.epochs or saved.epochs)
    raised = saved.epochs > content["epochs"]
    if progress.finished and not raised and (out / "summary.json").is_file():
        how = "stopped early" if progress.stopped_early else f"all {saved.epochs} epochs"
        print(f"{out}: the run is finished ({how}); to go on, raise --epochs")
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return summary
    if raised:
        progress.finished = progress.stopped_early = False
        progress.stale = 0
    return Run(saved, content, progress).train()


class Run:
    """One training run: builds the parts, gives them to the loop, and writes what comes of it.

    Args:
        config: Complete options (`with_defaults`).
        content: The state to go on from, or None.
        progress: Where that state stands, or None.
    """

    def __init__(
        self, config: TrainConfig, content: dict[str, Any] | None = None, progress: Progress | None = None
    ) -> None:
        self.config, self.content = config, content
        self.progress = progress or Progress()
        self.task: str = config.task

    def train(self) -> dict[str, Any]:
        """Build, run, summarise."""
        config = self.config
        self.splits = open_data(config.data, config.task, config.seed, config.val_fraction)
        self.labels = self.splits.train.classes
        template, self.preparation = build_model(config, len(self.labels))
        width = int(getattr(template, "embed_dim", getattr(template, "num_features", 0)))
        self.fabric, self.precision = make_fabric(
            config.device, config.devices, config.nodes, config.strategy, config.precision, width
        )
        self.main = bool(self.fabric.is_global_zero)
        self.out = Path(self.fabric.broadcast(str(self._claim_out())))
        self.splits = self._check(self.splits)
        self._fingerprint = fingerprint(self.splits)
        self._verify_same_data()
        self._parameters = sum(parameter.numel() for parameter in template.parameters())
        loop = self._loop(template)
        if self.main:
            save_config(self.out, dataclasses.replace(config, out=str(self.out)))
            print("\n".join(opening_lines(config, self.splits, self._facts(), self.progress)), flush=True)
        loop.run()
        return self._finish()

    def _claim_out(self) -> Path:
        config = self.config
        if not self.main:
            return Path()
        if self.content is not None or config.out is not None:
            out = Path(config.out or ".")
            if self.content is None and (out / "config.yaml").exists():
                raise UserError(f"--out {out} holds a run already; give another folder, or go on with --resume {out}")
            return out
        stem = Path(config.data).resolve().name.removesuffix(".csv") if config.data != "digits" else "digits"
        return next(path for path in _numbered(Path("runs") / stem) if not path.exists())

    def _check(self, splits: Splits) -> Splits:
        """Leave out what cannot be read; the main process looks, all processes learn the result."""
        if not self.config.check_images:
            return splits
        known = self.content["unreadable"] if self.content else None
        if known is None:
            found = None
            if self.main:
                chans = self.preparation.in_chans
                train = check_images(splits.train, chans, require_all_classes=True)
                val = check_images(splits.val, chans)
                found = [
                    [dataclasses.astuple(s) for s in new.skipped[len(old.skipped) :]]
                    for new, old in ((train, splits.train), (val, splits.val))
                ]
            known = self.fabric.broadcast(found)
        self.unreadable = known
        parts = (splits.train, splits.val)
        train, val = (_without(part, bad) for part, bad in zip(parts, known, strict=True))
        return dataclasses.replace(splits, train=train, val=val)

    def _verify_same_data(self) -> None:
        if self.content is not None and self.content["fingerprint"] != self._fingerprint:
            raise UserError(
                f"the pictures in {self.config.data} are not those that the run began with (added, removed, renamed); "
                f"put them back, or start a new run with --init-from {self.out / 'model'}"
            )

    def _loop(self, model: nn.Module) -> Loop:
        config, fabric = self.config, self.fabric
        if config.init_from and self.content is None:
            report = start_from(model, config.init_from, self.labels)
            fabric.print(f"from {config.init_from}: {report}")
        if config.grad_checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        average = averaged(model, config.model_ema_decay).to(fabric.device) if config.model_ema else None
        if self.content is not None:
            model.load_state_dict(self.content["model"])
            if average is not None:
                average.load_state_dict(self.content["average"])
        wrapped = fabric.setup_module(model)
        if average is not None and self._sharded:
            shard(average.module, fabric.strategy.device_mesh)
        # Sharding replaces the parameters, so the optimizer is made of what there is after it.
        optimizer = make_optimizer(model, config)
        if self.content is not None:
            load_optimizer(optimizer, self.content["optimizer"])
            fabric.strategy.precision.load_state_dict(self.content["precision"])
        self.model, self.average, self.optimizer = model, average, optimizer
        wrapped_optimizer = fabric.setup_optimizers(optimizer)
        self.batches = batches = EpochBatches(
            len(self.splits.train),
            config.batch_size or 1,
            config.seed,
            fabric.global_rank,
            fabric.world_size,
            config.grad_accum_steps,
        )
        dataset = TrainSet(self.splits.train, self.task, self.preparation, augmentation(config), config.seed)
        pin = fabric.device.type == "cuda"
        loader = train_loader(dataset, batches, self._workers, config.worker_start, pin)
        objective = make_objective(config, len(self.labels))
        parts = Parts(
            fabric,
            wrapped,
            average,
            wrapped_optimizer,
            objective,
            batches,
            loader,
            self._score,
            self._save,
            self._keep,
            self._keep_bad,
        )
        return Loop(parts, make_plan(config, self.labels), self.progress, Reporter(self.main, self._loggers()))

    @property
    def _workers(self) -> int:
        if self.config.workers is not None:
            return self.config.workers
        # Digits are in memory; a process to fetch them costs more than it saves.
        return 0 if self.config.data == "digits" else min(8, torch.get_num_threads())

    def _loggers(self) -> list[Any]:
        return [make_logger(kind, self.out) for kind in self.config.logger if kind != "none"] if self.main else []

    def _score(self) -> dict[str, dict[str, Any]]:
        fabric = self.fabric
        models: dict[str, nn.Module] = {"plain": self.model}
        if self.average is not None:
            models["averaged"] = self.average
        dataset = EvalSet(self.splits.val, self.task, self.preparation)
        loader = eval_loader(dataset, self._workers, fabric.global_rank, fabric.world_size, self.config.worker_start)
        # A sharded model's forward pass is a joint effort: all processes make as many as the busiest.
        passes = passes_of_rank_zero(len(dataset), fabric.world_size) if self._sharded else None
        return score_models(models, loader, self.task, self.labels, fabric.device, self._total, self._gather, passes)

    @property
    def _sharded(self) -> bool:
        return self.config.strategy == "fsdp2"

    def _total(self, value: Tensor) -> Tensor:
        total: Tensor = self.fabric.all_reduce(value.to(self.fabric.device), reduce_op="sum").cpu()
        return total

    def _gather(self, value: Tensor) -> Tensor:
        if self.fabric.world_size == 1:
            return value
        shares: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(shares, value)
        return torch.cat(shares)

    def _save(self, progress: Progress) -> None:
        content = {
            "model": whole(self.model.state_dict()),
            "average": whole(self.average.state_dict()) if self.average is not None else None,
            "optimizer": whole(self.optimizer.state_dict()),
            "precision": self.fabric.strategy.precision.state_dict(),
            "fingerprint": self._fingerprint,
            "epochs": self.config.epochs,
            "unreadable": getattr(self, "unreadable", None),
            "versions": versions(),
        }
        if self.main:
            write_metrics(self.out / "metrics.csv", progress.history)
            write_state(self.out, content, progress)
        self.fabric.barrier()

    def _keep(self, progress: Progress, kind: str) -> None:
        chosen: Any = self.average if kind == "averaged" else self.model
        weights = weights_of(chosen)
        if not self.main:
            return
        lineage: dict[str, Any] = {
            "source": f"jumbo-vit {__version__} train",
            "init_from": self.config.init_from,
            "weights": kind,
            "epoch": progress.epoch,
            "metric": self._metric,
            "score": progress.best_score,
            "seed": self.config.seed,
        }
        if self.splits.drawn:
            # With this, `evaluate --data` of the same tree scores the pictures that were held out, not the whole.
            lineage["split"] = {
                "seed": self.config.seed,
                "val_fraction": self.config.val_fraction,
                "checksum": self.splits.val.checksum(),
            }
        contract = Contract(self.task, self.labels, self.preparation, lineage=lineage)
        save_folder(self.out / "model", self.model, contract, weights)

    def _keep_bad(self, progress: Progress, bad: Bad) -> None:
        weights = weights_of(self.model)
        if not self.main:
            return
        from jumbo_vit.tasks.replay import FILE, write_bad

        share = 1 / self.batches.update_size(progress.update)
        write_bad(self.out / FILE, weights, progress, bad, self.precision, share)

    @property
    def _metric(self) -> str:
        return new_score(self.task, self.labels).metric

    def _facts(self) -> dict[str, Any]:
        return {
            "parameters": self._parameters,
            "input_size": self.preparation.input_size,
            "world": self.fabric.world_size,
            "device": self.fabric.device.type,
            "precision": self.precision,
            "resumed": self.content is not None,
            "out": self.out,
        }

    def _finish(self) -> dict[str, Any]:
        summary = make_summary(self.config, self.splits, self._facts(), self.progress, self._metric)
        if self.main:
            write_json(self.out / "summary.json", summary)
            title = f"{self.config.model} on {Path(self.config.data).name}"
            draw_curves(self.out / "curves.png", self.progress.history, self._metric, title)
            print("\n".join(closing_lines(summary)), flush=True)
        self.fabric.barrier()
        return summary


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def _without(images: ImageSet, bad: list[Any]) -> ImageSet:
    names = {path for path, _ in bad}
    kept = images.subset([i for i in range(len(images)) if images.name(i) not in names])
    kept.skipped.extend(Skipped(*entry) for entry in bad)
    return kept
