"""`jumbo-vit pretrain --dry-run`: a run of `pretrain` is tried as `trial` says; only a temporary folder is written."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.dry_data import Known, absent, known, make_folder
from jumbo_vit.tasks.dry_run import ask_for_model
from jumbo_vit.tasks.methods import Distillation, Method
from jumbo_vit.tasks.pretrain import PretrainRun
from jumbo_vit.tasks.pretrain_config import PretrainConfig, with_pretrain_defaults
from jumbo_vit.tasks.trial import MICRO, Trial, attempt, lines, of_the_hub, replaced, report_on, stand_in, stands_in
from jumbo_vit.teachers import Teacher


def dry_pretrain(config: PretrainConfig) -> dict[str, Any]:
    """Say what a pre-training would take.

    Args:
        config: As the user gave it.

    Returns:
        "stages", of one report as `trial.report_on` gives it, with "method", "encoder_parameters", "extra_parameters"
        (what is trained beside the encoder) and what the method says of itself; and "notes", of which there are none.

    Raises:
        UserError: What the run itself would refuse, as far as it shows before the training; data that are not there and
            not known.
    """
    if config.model in (None, "jumboized"):
        ask_for_model(config.init_from)
    with tempfile.TemporaryDirectory(prefix="jumbo-vit-dry-run-") as scratch:
        options = with_pretrain_defaults(dataclasses.replace(config, out=str(Path(scratch) / "out" / "run")))
        report = _try(options, Path(scratch))
    print("\n".join([*_lines(report), "dry run: nothing was written"]), flush=True)
    return {"stages": [report], "notes": []}


class _Distillation(Distillation):
    """Distillation whose teacher may have random weights, where its own cannot be had."""

    def _open_teacher(self, name: str) -> Teacher:
        self.random = False
        try:
            return super()._open_teacher(name)
        except UserError as error:
            if "cannot be had" not in str(error) or not of_the_hub(name):
                raise
        self.random = True
        return stand_in(name, "fp32", torch.device("cpu"))  # `ready` moves it


class _Outputs(nn.Module):
    """A learner whose outputs are one row a picture, (B, all numbers), which is what is kept for a loss on them."""

    def __init__(self, learner: nn.Module) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.learner(images)
        if isinstance(outputs, Tensor):
            return outputs.flatten(1)
        return torch.cat([output.flatten(1) for output in outputs], 1)


class DryPretrain(Trial, PretrainRun):
    """The trial of a run of `pretrain`.

    Args:
        options: Complete options of the whole run.
    """

    def __init__(self, options: PretrainConfig) -> None:
        self.full = options.as_train()
        small, self.told = replaced(options, starts_anew=True)
        PretrainRun.__init__(self, dataclasses.replace(options, **small))

    def _open_method(self) -> Method:
        if self.options.method != "distill":
            return super()._open_method()
        method = _Distillation(self.options)
        if method.random:
            self.told.append(stands_in(method.teacher.name))
        return method

    def teachers(self) -> list[Teacher]:
        """That of the method, if it has one."""
        return [self.method.teacher] if isinstance(self.method, Distillation) else []

    def largest(self, pictures: int) -> tuple[nn.Module, Tensor]:
        """The learner, with outputs as one row a picture; without an order of patches it draws its masks."""
        learner, images = super().largest(pictures)
        return _Outputs(learner), images


def _try(options: PretrainConfig, scratch: Path) -> dict[str, Any]:
    size: Known | None = None
    real = options
    if absent(options.data):
        size = known(options.data)
        folder = scratch / "data"
        make_folder(folder, 2 * MICRO, options.in_chans or 3)
        options = dataclasses.replace(options, data=str(folder))
    trial = DryPretrain(options)
    attempt(trial, scratch)
    if size is not None:
        trial.pictures = size.train
        trial.splits.train.notes[:] = trial.method.notes  # the others are on the made folder
        trial.told.insert(0, f"{Path(real.data).name} is not there: the trial read a made folder.")
    report = report_on(trial)
    encoder = trial._parameters
    more = {"encoder_parameters": encoder, "extra_parameters": report["parameters"] - encoder}
    return {"method": real.method, **report, **more, **trial.method.facts()}


def _lines(report: dict[str, Any]) -> list[str]:
    what = (
        f"{report['model']}, method {report['method']}: {report['encoder_parameters'] / 1e6:.2f} M parameters and "
        f"{report['extra_parameters'] / 1e6:.2f} M beside the encoder"
    )
    return ["", *lines(report, what, "no labels")]
