"""One run: its parts are built, given to the loop, and what comes of it is written."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumbo_vit.data.find import Skipped
from jumbo_vit.data.folds import take_fold
from jumbo_vit.data.pipeline import Augmentation, EvalSet, Sized, TrainSet, eval_loader, train_loader
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.sets import ImageSet, Splits, check_images, open_data
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json
from jumbo_vit.tasks.average import averaged
from jumbo_vit.tasks.balance import balance_notes, drawn_classes, loss_weights
from jumbo_vit.tasks.build import (
    augmentation,
    build_model,
    fingerprint,
    make_logger,
    make_objective,
    make_optimizer,
    make_plan,
)
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.distill import Lesson, open_lesson
from jumbo_vit.tasks.evaluate import passes_of_rank_zero, score_models
from jumbo_vit.tasks.fabric import make_fabric, on_main
from jumbo_vit.tasks.frozen import check_start, store_for_run, trained_parameters, trained_part
from jumbo_vit.tasks.loop import Loop, Objective, Parts
from jumbo_vit.tasks.progress import Reporter, draw_curves
from jumbo_vit.tasks.run_files import RunFiles
from jumbo_vit.tasks.schedules import before_update, shapes
from jumbo_vit.tasks.sharding import load_optimizer, shard
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.state import Progress, claim_out, restoring
from jumbo_vit.tasks.summary import closing_lines, make_summary, opening_lines


class Run(RunFiles):
    """One training run: builds the parts, gives them to the loop, and writes what comes of it.

    Args:
        config: Complete options (`with_defaults`).
        content: The state to go on from, or None.
        progress: Where that state stands, or None.

    Attributes:
        stop: The number of the signal that asked for a stop when nothing was left to do, or 0.
    """

    stop = 0

    def __init__(
        self, config: TrainConfig, content: dict[str, Any] | None = None, progress: Progress | None = None
    ) -> None:
        self.config, self.content = config, content
        self.progress = progress or Progress()
        self.task: str = config.task

    def train(self) -> dict[str, Any]:
        """Build, run, summarise."""
        config = self.config
        self.splits = self._open()
        self.labels = self.splits.train.classes
        template, self.preparation = build_model(config, len(self.labels))
        width = int(getattr(template, "embed_dim", getattr(template, "num_features", 0)))
        self.fabric, self.precision = make_fabric(
            config.device, config.devices, config.nodes, config.strategy, config.precision, width
        )
        self.main = bool(self.fabric.is_global_zero)
        known = None if self.content is None else config.out or "."
        self.out = Path(known or self._on_main(lambda: str(claim_out(config))))
        self._lesson = self._open_lesson()
        self.splits = self._check(self.splits)
        self._class_weights = loss_weights(config, self.splits.train)
        self._classes = drawn_classes(config, self.splits.train)
        self.splits.train.notes += balance_notes(config, self.splits.train)
        self.splits.train.notes += self._lesson.notes if self._lesson else []
        self._fingerprint = fingerprint(self.splits)
        self._verify_same_run()
        self._parameters = sum(parameter.numel() for parameter in template.parameters())
        loop = self._loop(template)
        if self.main:
            self._write_config()
            print("\n".join(opening_lines(config, self.splits, self._facts(), self.progress)), flush=True)
        loop.run()
        self.stop = loop.stop
        return self._finish()

    def _open(self) -> Splits:
        config = self.config
        splits = open_data(config.data, config.task, config.held_out_seed, config.val_fraction)
        return take_fold(splits, config.folds, config.fold, config.held_out_seed) if config.fold else splits

    def _open_lesson(self) -> Lesson | None:
        config, device = self.config, self.fabric.device
        lesson = open_lesson(config, self.labels, self.preparation, augmentation(config), device, self.precision)
        if lesson is not None and self.content is not None:
            lesson.check_same(self.content.get("teachers"), self.out)
        return lesson

    def _check(self, splits: Splits) -> Splits:
        """Leave out what cannot be read; the main process looks, all processes learn the result."""
        if not self.config.check_images:
            return splits
        known = self.content["unreadable"] if self.content else None
        if known is None:
            known = self._on_main(lambda: self._unreadable_of(splits))
        self.unreadable = known
        parts = (splits.train, splits.val)
        train, val = (_without(part, bad) for part, bad in zip(parts, known, strict=True))
        return dataclasses.replace(splits, train=train, val=val)

    def _unreadable_of(self, splits: Splits) -> list[list[tuple[str, str]]]:
        chans = self.preparation.in_chans
        train = check_images(splits.train, chans, require_all_classes=True)
        val = check_images(splits.val, chans)
        pairs = ((train, splits.train), (val, splits.val))
        return [[(s.path, s.reason) for s in new.skipped[len(old.skipped) :]] for new, old in pairs]

    def _on_main(self, work: Callable[[], Any]) -> Any:
        return on_main(self.fabric, work)

    def _verify_same_run(self) -> None:
        if self.content is None:
            return
        now, then = self._identity(), self.content["identity"]
        changed = sorted(name for name in now if now[name] != then.get(name))
        if changed:
            raise UserError(
                f"{self.out}: checkpoint and config.yaml are of different runs, they differ in {', '.join(changed)} "
                f"(checkpoint: {then.get(changed[0])}, config.yaml: {now[changed[0]]})"
            )
        if self.content["fingerprint"] != self._fingerprint:
            raise UserError(
                f"the pictures in {self.config.val_data or self.config.data} are not those that the run began with "
                f"(added, removed, renamed); put them back, or start a new run with --init-from {self.out / 'model'}"
            )

    def _loop(self, model: nn.Module) -> Loop:
        config, fabric = self.config, self.fabric
        if config.init_from and self.content is None:
            report = start_from(model, config.init_from, self.labels)
            fabric.print(f"from {config.init_from}: {report}")
            check_start(model, report, config)
        if config.grad_checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        model = self._with_extras(model)
        average = averaged(model, config.model_ema_decay).to(fabric.device) if config.model_ema else None
        if self.content is not None:
            with restoring(self.out):
                model.load_state_dict(self.content["model"])
                if average is not None:
                    average.load_state_dict(self.content["average"])
        trained = trained_part(model, config)
        self._trained = trained_parameters(model)
        wrapped = fabric.setup_module(trained)
        if average is not None and self._sharded:
            shard(average.module, fabric.strategy.device_mesh)
        # Sharding replaces the parameters, so the optimizer is made of what there is after it.
        optimizer = make_optimizer(model, config)
        if self.content is not None:
            with restoring(self.out):
                load_optimizer(optimizer, self.content["optimizer"])
                fabric.strategy.precision.load_state_dict(self.content["precision"])
        self.model, self.average, self.optimizer = model, average, optimizer
        wrapped_optimizer = fabric.setup_optimizers(optimizer)
        self.batches, loader = self._order()
        batches = self.batches
        if self.content is not None and self.content["update_size"] != batches.samples_per_update:
            raise UserError(
                f"an update of this run takes {self.content['update_size']} pictures, with these options "
                f"{batches.samples_per_update}: set batch_size, grad_accum_steps and the processes in "
                f"{self.out / 'config.yaml'} so that their product stays the same"
            )
        objective = self._objective()
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
            before_update(config, model),
        )
        return Loop(parts, make_plan(config, self._metric), self.progress, Reporter(self.main, self._loggers()))

    def _with_extras(self, model: nn.Module) -> nn.Module:
        """The model with what a run of another kind trains beside it."""
        return model

    def _objective(self) -> Objective:
        return make_objective(self.config, len(self.labels), self._class_weights, self._lesson)

    def _order(self) -> tuple[EpochBatches, Any]:
        """The order of the samples, and a loader over it."""
        config, fabric = self.config, self.fabric
        augment = augmentation(config)
        sizes, sized, collate = shapes(config, self.model, self.preparation, augment)
        batches = EpochBatches(
            len(self.splits.train),
            config.batch_size or 1,
            config.seed,
            fabric.global_rank,
            fabric.world_size,
            config.grad_accum_steps,
            classes=self._classes,
            repeats=max(1, config.aug_repeats),
            sizes=sizes,
        )
        if config.freeze:
            parts = (self.model, self.splits, self.preparation, config, self.out, fabric, self._workers)
            self._stored = store_for_run(*parts, self._all_objects)
            return batches, self._stored.loader(batches)
        dataset = self._training_set(augment, sized)
        pin = fabric.device.type == "cuda"
        return batches, train_loader(dataset, batches, self._workers, config.worker_start, pin, collate)

    def _training_set(self, augment: Augmentation, sized: Sized) -> Any:
        """Augmented pictures, with whatever the objective needs beside them."""
        dataset = TrainSet(self.splits.train, self.task, self.preparation, augment, self.config.seed, sized)
        return dataset if self._lesson is None else self._lesson.pictures(dataset, augment)

    @property
    def _workers(self) -> int:
        if self.config.workers is not None:
            return self.config.workers
        # Digits are in memory; a process to fetch them costs more than it saves.
        return 0 if self.config.data == "digits" else min(8, torch.get_num_threads())

    def _loggers(self) -> list[Any]:
        return [make_logger(kind, self.out) for kind in self.config.logger if kind != "none"] if self.main else []

    def _score(self) -> dict[str, dict[str, Any]]:
        models, loader, passes = self._scoring()
        if self.config.freeze:
            models, loader = self._stored.scoring(models, self.fabric.global_rank, self.fabric.world_size)
        return score_models(
            models, loader, self.task, self.labels, self.fabric.device, self._total, self._gather, passes
        )

    def _scoring(self) -> tuple[dict[str, nn.Module], Any, int | None]:
        """Models to score, a loader of this process's held-out pictures, and how many passes to make, if it matters."""
        fabric = self.fabric
        models: dict[str, nn.Module] = {"plain": self.model}
        if self.average is not None:
            models["averaged"] = self.average
        dataset = EvalSet(self.splits.val, self.task, self.preparation)
        loader = eval_loader(dataset, self._workers, fabric.global_rank, fabric.world_size, self.config.worker_start)
        # A sharded model's forward pass is a joint effort: all processes make as many as the busiest.
        return models, loader, passes_of_rank_zero(len(dataset), fabric.world_size) if self._sharded else None

    @property
    def _sharded(self) -> bool:
        return self.config.strategy == "fsdp2"

    def _total(self, value: Tensor) -> Tensor:
        total: Tensor = self.fabric.all_reduce(value.to(self.fabric.device), reduce_op="sum").cpu()
        return total

    def _gather(self, value: Tensor) -> Tensor:
        return torch.cat(self._all_objects(value))

    def _facts(self) -> dict[str, Any]:
        return {
            "training": f"{len(self.splits.train)} pictures",
            "parameters": self._parameters,
            "trained": self._trained,
            "input_size": self.preparation.input_size,
            "world": self.fabric.world_size,
            "device": self.fabric.device.type,
            "precision": self.precision,
            "resumed": self.content is not None,
            "out": self.out,
        }

    def _more_summary(self) -> dict[str, Any]:
        """What a run of another kind says in place of, or beside, the entries of `make_summary`."""
        return {}

    def _closing(self, summary: dict[str, Any]) -> list[str]:
        return closing_lines(summary)

    def _finish(self) -> dict[str, Any]:
        summary = make_summary(self.config, self.splits, self._facts(), self.progress, self._metric)
        summary |= self._more_summary()
        if self.main:
            write_json(self.out / "summary.json", summary)
            title = f"{self.config.model} on {Path(self.config.data).name}"
            draw_curves(self.out / "curves.png", self.progress.history, self._metric, title)
            if self.progress.best_score is not None:
                print("\n".join(self._closing(summary)), flush=True)
        self.fabric.barrier()
        if self.progress.best_score is None:
            raise UserError(
                f"no epoch gave a finite {self._metric}, so no model was kept: lower --lr ({self.config.lr}), or look "
                f"at {self.out / 'metrics.csv'}"
            )
        return summary


def _without(images: ImageSet, bad: list[Any]) -> ImageSet:
    names = {path for path, _ in bad}
    kept = images.subset([i for i in range(len(images)) if images.name(i) not in names])
    kept.skipped.extend(Skipped(*entry) for entry in bad)
    return kept
