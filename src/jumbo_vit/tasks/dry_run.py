"""`jumbo-vit train --dry-run`: all is built as for the run, two small updates are made, and the rest is arithmetic.

`trial` says what is measured and what is computed. Only a temporary folder is written.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.build import augmentation
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.distill import Lesson, open_lesson, told_of
from jumbo_vit.tasks.dry_data import Known, absent, known, make_folder
from jumbo_vit.tasks.partial import partial_flag
from jumbo_vit.tasks.stage_checks import check_models
from jumbo_vit.tasks.stages import plan_stages
from jumbo_vit.tasks.trial import (
    Trial,
    attempt,
    lines,
    of_the_hub,
    replaced,
    report_on,
    stand_in,
    stands_in,
    start_is_absent,
)
from jumbo_vit.teachers import Teacher


def dry_run(config: TrainConfig) -> dict[str, Any]:
    """Say what a run, or each stage of a recipe, would take.

    Args:
        config: As the user gave it.

    Returns:
        "stages", each as `trial.report_on` gives it (one for a recipe without stages), and "notes".

    Raises:
        UserError: What the run itself would refuse, as far as it shows before the training; data that are not there and
            not known.
    """
    if config.streaming or any(isinstance(stage, dict) and stage.get("streaming") for stage in config.stages or []):
        raise UserError("--dry-run reads no stream: leave --streaming out, for the model and its memory are the same")
    notes: list[str] = []
    missing: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="jumbo-vit-dry-run-") as scratch:
        out = Path(scratch) / "out"
        plan = plan_stages(config, out) if config.stages is not None else [_single(config, out, notes)]
        if len(plan) > 1:
            check_models(plan)
        stages = []
        for number, stage in enumerate(plan, start=1):
            report = _try(stage, Path(scratch), number == len(plan), missing, config.stages is None)
            stages.append(report)
            print("\n".join(_lines(report, number, len(plan))), flush=True)
    print("\n".join([f"  {note}" for note in notes] + ["dry run: nothing was written"]), flush=True)
    return {"stages": stages, "notes": notes}


def _single(config: TrainConfig, out: Path, notes: list[str]) -> TrainConfig:
    if config.repeated:
        notes.append("The options ask for several runs; this is what one of them takes.")
    if config.model in (None, "jumboized"):
        ask_for_model(config.init_from)
    one: dict[str, Any] = {"seeds": 1, "fold": config.fold or (1 if config.folds else None)}
    return with_defaults(dataclasses.replace(config, out=str(out / "run"), **one))


def ask_for_model(init_from: str | None) -> None:
    """Refuse to guess which model the weights would be of, where they are not there and no model is named.

    Raises:
        UserError: It is so.
    """
    if start_is_absent(init_from):
        raise UserError(f"--init-from {init_from} is not there, and with it the model: name it by --model, to try it")


class DryRun(Trial):
    """The trial of a run of `train`.

    Args:
        config: Complete options of the whole run.
        keep_model: Write the model, for the next stage to start from.
        missing: Teachers whose weights cannot be had, which is looked for once.
        starts_anew: Whether weights to start from may be left out where they are not there.
    """

    def __init__(self, config: TrainConfig, keep_model: bool, missing: set[str], starts_anew: bool) -> None:
        self.full, self.keep_model, self.missing = config, keep_model, missing
        # A part of a model is trained on what the rest was trained to, and which part that is depends on it.
        small, self.told = replaced(config, starts_anew and not partial_flag(config))
        if config.balance != "none":
            small["balance"] = "none"  # four pictures have no counts of classes
            self.told.append(f"The trial leaves out --balance {config.balance}, which the memory does not depend on.")
        super().__init__(dataclasses.replace(config, **small))

    def _open_lesson(self) -> Lesson | None:
        """The teachers; where the weights of one cannot be had, the same network with random ones."""
        names = self.config.teacher or []
        if not any(map(of_the_hub, names)):
            return super()._open_lesson()
        teachers = [self._teacher(name) for name in names]
        return Lesson(self.preparation, teachers, lineage=[told_of(teacher) for teacher in teachers])

    def _teacher(self, name: str) -> Teacher:
        device, augment = self.fabric.device, augmentation(self.config)
        if name in self.missing:
            return self._stand_in(name)
        try:
            one = dataclasses.replace(self.config, teacher=[name])
            lesson = open_lesson(one, self.labels, self.preparation, augment, device, self.precision)
            assert lesson is not None
            return lesson.teachers[0]
        except UserError as error:
            if "cannot be had" not in str(error):
                raise
        self.missing.add(name)
        return self._stand_in(name)

    def _stand_in(self, name: str) -> Teacher:
        teacher = stand_in(name, self.precision, self.fabric.device)
        classes = teacher.model.num_classes
        if classes != len(self.labels):
            raise UserError(f"the teacher {name} has {classes} classes, the data have {len(self.labels)}")
        self.told.append(stands_in(name))
        teacher.order = torch.arange(len(self.labels), device=self.fabric.device)
        return teacher


def _try(config: TrainConfig, scratch: Path, last: bool, missing: set[str], starts_anew: bool) -> dict[str, Any]:
    """Make the trial of one run and report on it."""
    size: Known | None = None
    real = config
    if absent(config.data):
        size = known(config.data)
        folder = scratch / f"data-{size.classes}"
        if not folder.exists():
            make_folder(folder, size.classes, config.in_chans or 3)
        config = dataclasses.replace(config, data=str(folder), folds=0, fold=None)
    trial = DryRun(config, not last, missing, starts_anew)
    attempt(trial, scratch)
    if size is not None:
        # A fold is held out of the training pictures; a held-out part of the data's own is left aside.
        trial.pictures = size.train - (size.train // real.folds if real.fold else 0)
        trial.told.insert(0, f"{Path(real.data).name} is not there: the trial read a made folder with as many classes.")
    return report_on(trial)


def _lines(report: dict[str, Any], number: int, total: int) -> list[str]:
    what = f"{report['model']}: {report['parameters'] / 1e6:.2f} M parameters"
    return [
        "",
        *([f"stage {number} of {total}"] if total > 1 else []),
        *lines(report, what, f"{report['classes']} classes"),
    ]
