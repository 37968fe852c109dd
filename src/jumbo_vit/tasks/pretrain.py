"""`jumbo-vit pretrain`: an encoder learns from pictures without labels.

The run is that of `train`: its loop, order, checkpoints and processes. What differs is here. The model is a `Learner`,
the encoder with the modules that the method trains beside it; the objective and the score are the method's; what is
kept as the best model is the encoder alone.
"""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jumbo_vit.data.pipeline import Augmentation, Sized
from jumbo_vit.data.sets import Splits
from jumbo_vit.data.unlabelled import open_unlabelled
from jumbo_vit.errors import UserError
from jumbo_vit.folder import save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.average import weights_of
from jumbo_vit.tasks.build import build_model, load_options, save_config
from jumbo_vit.tasks.evaluate import score_models
from jumbo_vit.tasks.learner import Learner, encoder_weights
from jumbo_vit.tasks.loop import Objective
from jumbo_vit.tasks.methods import Method, open_method
from jumbo_vit.tasks.pretrain_config import PretrainConfig, with_pretrain_defaults
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.state import Progress, find_state
from jumbo_vit.tasks.train import finished_summary, raised_epochs
from jumbo_vit.version import __version__


def pretrain(config: PretrainConfig) -> dict[str, Any]:
    """Run a pre-training, new or resumed, and give the summary (the content of `summary.json`), or try it.

    Raises:
        UserError: Anything that the user can mend: data, teacher, options, disk, a rate that is too high.
    """
    if config.resume:
        return _resume(config, config.resume)
    if config.dry_run:
        from jumbo_vit.tasks.dry_pretrain import dry_pretrain  # here, for what it tries is a run of this module

        return dry_pretrain(config)
    config = with_pretrain_defaults(config)
    # config.yaml must mean the same pictures and the same teacher wherever the run is gone on with.
    data = config.data if config.data == "digits" else _absolute(config.data)
    teacher = config.teacher
    if teacher is not None and Path(teacher).expanduser().is_dir():
        teacher = _absolute(teacher)
    return PretrainRun(dataclasses.replace(config, data=data, teacher=teacher)).train()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _resume(config: PretrainConfig, where: str) -> dict[str, Any]:
    extra = sorted(config.given - {"resume", "epochs"})
    if extra:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise UserError(f"--resume takes everything from the run; only --epochs may be changed, not {flags}")
    out, content, progress = find_state(where)
    saved = load_options(out, PretrainConfig)
    # The folder may have been moved, and a lengthened run may have been killed before its first state.
    saved = dataclasses.replace(saved, out=str(out), epochs=raised_epochs(saved.as_train(), config.epochs))
    assert saved.epochs is not None
    raised = saved.epochs > content["epochs"]
    if progress.finished and not raised and (out / "summary.json").is_file():
        how = "stopped early" if progress.stopped_early else f"all {saved.epochs} epochs"
        summary = finished_summary(out)
        print(f"{out}: the run is finished ({how}); to go on, raise --epochs")
        return summary
    if raised:
        progress.finished = progress.stopped_early = False
        progress.stale = 0
    return PretrainRun(saved, content, progress).train()


class PretrainRun(Run):
    """A run without labels.

    Args:
        options: Complete options (`with_pretrain_defaults`).
        content: The state to go on from, or None.
        progress: Where that state stands, or None.
    """

    model: Learner

    def __init__(
        self, options: PretrainConfig, content: dict[str, Any] | None = None, progress: Progress | None = None
    ) -> None:
        super().__init__(options.as_train(), content, progress)
        self.options = options
        # Pictures without labels are the case of several labels, none of which is there.
        self.task = "multilabel"
        self._warned = False

    def _open(self) -> Splits:
        options, config = self.options, self.config
        # Before the pictures are read, which takes longer than to be told that there is no such teacher.
        self.method = self._open_method()
        splits = open_unlabelled(options.data, config.held_out_seed, config.val_fraction)
        splits.train.notes += self.method.notes
        return splits

    def _open_method(self) -> Method:
        return open_method(self.options)

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"method": self.options.method} | self.method.identity

    def _write_config(self) -> None:
        save_config(self.out, dataclasses.replace(self.options, out=str(self.out)))

    def _with_extras(self, model: nn.Module) -> nn.Module:
        known = len(self.method.notes)
        learner = self.method.ready(model, self.preparation, self.fabric.device, self.precision)
        self.splits.train.notes += self.method.notes[known:]
        self.options = self.method.options  # in which nothing is open any more
        return learner

    def _objective(self) -> Objective:
        objective: Objective = self.method.objective
        return objective

    def _training_set(self, augment: Augmentation, sized: Sized) -> Any:
        return self.method.training_set(super()._training_set(augment, sized))

    def _score(self) -> dict[str, dict[str, Any]]:
        models, loader, passes = self._scoring()
        scores = score_models(
            models,
            self.method.held_out(loader, self.fabric.device),
            self.task,
            self.labels,
            self.fabric.device,
            self._total,
            self._gather,
            passes,
            make_score=lambda: self.method.score(self.model),
        )
        remark = self.method.remark(scores["plain"])
        if remark and not self._warned:
            self._warned = True  # an epoch may be too early to tell; the end says it again
            self.fabric.print(f"  warning: {remark}")
        return scores

    def _keep(self, progress: Progress, kind: str) -> None:
        chosen: Any = self.average if kind == "averaged" else self.model
        weights = encoder_weights(weights_of(chosen))
        lineage: dict[str, Any] = {
            "source": f"jumbo-vit {__version__} pretrain",
            "method": self.options.method,
            **self.method.lineage,
            "init_from": self.options.init_from,
            "weights": kind,
            "epoch": progress.epoch,
            "metric": self._metric,
            "score": progress.best_score,
            "seed": self.options.seed,
        }
        contract = Contract("multiclass", [], self.preparation, lineage=lineage)
        self._on_main(lambda: save_folder(self.out / "model", self.model.encoder, contract, weights))

    @property
    def _metric(self) -> str:
        return self.method.metric

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"classes": "no labels", "beside": self._extras}

    @property
    def _extras(self) -> int:
        """Parameters beside the encoder's."""
        return sum(parameter.numel() for parameter in self.model.parameters()) - self._parameters

    def _more_summary(self) -> dict[str, Any]:
        notes = [*self.splits.train.notes, *self.splits.val.notes]
        remark = self.method.remark(self.progress.best_numbers) if self.progress.best_numbers else ""
        return {
            "task": "pretrain",
            "method": self.options.method,
            **self.method.facts(),
            "extra_parameters": self._extras,
            "notes": [*notes, remark] if remark else notes,
            "collapsed": bool(remark),
        }

    def _closing(self, summary: dict[str, Any]) -> list[str]:
        model, numbers = shlex.quote(f"{summary['out']}/model"), summary["best_numbers"]
        data = shlex.quote(self.options.data) if Path(self.options.data).is_dir() else "PICTURES"
        best = f"lowest held-out loss {numbers['loss']:.4f} at epoch {summary['best_epoch']} "
        best += f"({summary['best_weights']} weights)" + ", stopped early" * summary["stopped_early"]
        if summary["bad_updates"]:
            best += f", {summary['bad_updates']} updates skipped for a loss or gradient that was not finite"
        remark = self.method.remark(numbers)
        lines = ["", best, *self.method.lines(numbers), *([f"warning: {remark}"] if remark else [])]
        show = f"  jumbo-vit reconstruct {shlex.quote(summary['out'])} PICTURE.png --png masked.png"
        return [
            *lines,
            "try next:",
            f"  jumbo-vit train --init-from {model} --data FOLDER        (pictures with labels)",
            f"  jumbo-vit probe {model} --data FOLDER",
            f"  jumbo-vit embed {model} {data} --out features.npz",
            *([show] if self.options.method == "mae" else []),
        ]


def parts_of(run: Path, precision: str) -> tuple[nn.Module, Objective]:
    """The learner and the objective of a run on disk, on the CPU, with first weights, in its precision; for `replay`.

    Raises:
        UserError: Its options or its teacher cannot be read.
    """
    options = load_options(run, PretrainConfig)
    learner, method = learner_of(options, precision)
    return learner, method.objective


def learner_of(options: PretrainConfig, precision: str = "fp32") -> tuple[Learner, Method]:
    """What a run with these complete options trains, on the CPU, with first weights, and its method.

    Raises:
        UserError: There is no such teacher, or the model does not go with the method.
    """
    encoder, preparation = build_model(options.as_train(), 0)
    if options.grad_checkpointing:
        encoder.set_grad_checkpointing(True)  # type: ignore[operator]
    method = open_method(options)
    return method.ready(encoder, preparation, torch.device("cpu"), precision), method
