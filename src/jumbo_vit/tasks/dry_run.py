"""`jumbo-vit train --dry-run`: all is built as for the run, two small updates are made, and the rest is arithmetic.

What is measured: that model, data, teachers, optimizer and loss go together; parameters; what a forward pass keeps for
the backward pass, with two and with four pictures. What is computed: updates, rates, and the memory of a full batch on
one device, in which what libraries and the allocator take is not contained. Only a temporary folder is written.
"""

import contextlib
import dataclasses
import io
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model
from torch import Tensor, nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.sets import Splits
from jumbo_vit.errors import UserError
from jumbo_vit.folder import pick_device
from jumbo_vit.measure.bench import saved_tensors
from jumbo_vit.tasks.build import augmentation, make_plan
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.distill import LOW, Lesson, open_lesson, told_of
from jumbo_vit.tasks.dry_data import OfSequences, absent, known, make_folder
from jumbo_vit.tasks.loop import Loop, make_schedule
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.schedules import naflex_embeds, rate_at
from jumbo_vit.tasks.stage_checks import check_models
from jumbo_vit.tasks.stages import plan_stages
from jumbo_vit.tasks.state import Progress
from jumbo_vit.tasks.token_options import training_sizes
from jumbo_vit.teachers import Teacher

MICRO = 2
"""Pictures of a small update."""


def dry_run(config: TrainConfig) -> dict[str, Any]:
    """Say what a run, or each stage of a recipe, would take.

    Args:
        config: As the user gave it.

    Returns:
        "stages", each as `_report` gives it (one for a recipe without stages), and "notes".

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
            report = _try(stage, Path(scratch), number == len(plan), missing)
            stages.append(report)
            print("\n".join(_lines(report, number, len(plan))), flush=True)
    print("\n".join([f"  {note}" for note in notes] + ["dry run: nothing was written"]), flush=True)
    return {"stages": stages, "notes": notes}


def _single(config: TrainConfig, out: Path, notes: list[str]) -> TrainConfig:
    if config.repeated:
        notes.append("The options ask for several runs; this is what one of them takes.")
    one: dict[str, Any] = {"seeds": 1, "fold": config.fold or (1 if config.folds else None)}
    return with_defaults(dataclasses.replace(config, out=str(out / "run"), **one))


class DryRun(Run):
    """A run of two updates on four pictures, which keeps nothing but, where it is asked, its model.

    Args:
        config: Complete options of the whole run.
        keep_model: Write the model, for the next stage to start from.
        missing: Teachers whose weights cannot be had, which is looked for once.

    Attributes:
        full: The options of the whole run.
        pictures: Training pictures there are.
        told: What was replaced for the trial, each a sentence.
    """

    def __init__(self, config: TrainConfig, keep_model: bool, missing: set[str]) -> None:
        self.full, self.keep_model, self.missing = config, keep_model, missing
        self.pictures = 0
        self.told: list[str] = []
        small: dict[str, Any] = {
            "batch_size": MICRO,
            "grad_accum_steps": 1,
            "epochs": 1,
            "warmup_epochs": 0.0,
            "devices": 1,
            "nodes": 1,
            "strategy": "auto",
            "workers": 0,
            "logger": ["none"],
            "check_images": False,
            "patience": 0,
            "dry_run": False,
        }
        if config.balance != "none":
            small["balance"] = "none"  # four pictures have no counts of classes
            self.told.append(f"The trial leaves out --balance {config.balance}, which the memory does not depend on.")
        if config.precision == "fp16" and pick_device(config.device).type == "cpu":
            small["precision"] = "bf16"
            self.told.append("A CPU does not train in fp16: the trial is in bf16, which takes as much memory.")
        super().__init__(dataclasses.replace(config, **small))

    def _open(self) -> Splits:
        splits = super()._open()
        self.pictures = len(splits.train)
        step = max(1, len(splits.train) // (2 * MICRO))
        few = [index * step % len(splits.train) for index in range(2 * MICRO)]
        val = splits.val.subset(range(min(2, len(splits.val))))
        return dataclasses.replace(splits, train=splits.train.subset(few), val=val)

    def _open_lesson(self) -> Lesson | None:
        """The teachers; where the weights of one cannot be had, the same network with random ones."""
        names = self.config.teacher or []
        if not any(is_model(name) and not Path(name).is_dir() for name in names):
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
        device = self.fabric.device
        model: Any = timm.create_model(name)
        if model.num_classes != len(self.labels):
            raise UserError(f"the teacher {name} has {model.num_classes} classes, the data have {len(self.labels)}")
        self.told.append(f"The weights of the teacher {name} cannot be had here: random ones stand in for them.")
        model = model.eval().requires_grad_(False).to(device)
        teacher = Teacher(name, model, Preparation.from_cfg(model.pretrained_cfg), device)
        teacher.order = torch.arange(len(self.labels), device=device)
        teacher.lineage, teacher.low = {"name": name}, LOW.get(self.precision)
        return teacher

    def _loop(self, model: nn.Module) -> Loop:
        self.loop = super()._loop(model)
        return self.loop

    def _save(self, progress: Progress) -> None:
        """Nothing is to be gone on with."""

    def _keep(self, progress: Progress, kind: str) -> None:
        if self.keep_model:
            super()._keep(progress, kind)

    def _finish(self) -> dict[str, Any]:
        return {}


def _try(config: TrainConfig, scratch: Path, last: bool, missing: set[str]) -> dict[str, Any]:
    """Make the trial of one run and report on it."""
    size = None
    real = config
    if absent(config.data):
        size = known(config.data)
        folder = scratch / f"data-{size.classes}"
        if not folder.exists():
            make_folder(folder, size.classes, config.in_chans or 3)
        config = dataclasses.replace(config, data=str(folder), folds=0, fold=None)
    trial = DryRun(config, not last, missing)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # it speaks of four pictures
        trial.train()
    if trial.progress.updates < 2:
        raise UserError("the two small updates gave no finite loss: lower --lr")
    if size is not None:
        # A fold is held out of the training pictures; a held-out part of the data's own is left aside.
        trial.pictures = size.train - (size.train // real.folds if real.fold else 0)
        trial.told.insert(0, f"{Path(real.data).name} is not there: the trial read a made folder with as many classes.")
    lines = [line for line in said.getvalue().splitlines() if line.startswith("from ")]
    trial.told += [line.replace(f"{scratch}/out/", "") for line in lines]
    return _report(trial, real)


def _report(trial: DryRun, config: TrainConfig) -> dict[str, Any]:
    world = config.devices * config.nodes
    batches = EpochBatches(trial.pictures, config.batch_size or 1, config.seed, 0, world, config.grad_accum_steps)
    parameters = list(trial.model.parameters())
    teachers = trial._lesson.teachers if trial._lesson else []
    return {
        "model": config.model,
        "input_size": list(trial.preparation.input_size),
        "classes": len(trial.labels),
        "pictures": trial.pictures,
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "teachers": {t.name: sum(p.numel() for p in t.model.parameters()) for t in teachers},
        "epochs": config.epochs,
        "pictures_per_update": batches.samples_per_update,
        "batch_size_per_device": config.batch_size,
        "devices": world,
        "updates_per_epoch": batches.updates,
        "updates": batches.updates * (config.epochs or 1),
        "opt": config.opt,
        "groups": _groups(trial.optimizer, config.lr or 0.0),
        "schedule": _schedule(trial, config, batches.updates),
        "loss_of_two_updates": trial.progress.history[-1]["train_loss"],
        "precision": trial.precision,
        "memory": _memory(trial, config, world),
        "notes": trial.told + trial.splits.train.notes,
    }


def _groups(optimizer: Any, rate: float) -> list[dict[str, Any]]:
    """Of each group of parameters its size, weight decay and highest rate."""
    return [
        {
            "tensors": len(group["params"]),
            "parameters": sum(p.numel() for p in group["params"]),
            "weight_decay": group["weight_decay"],
            "lr": rate * group.get("lr_scale", 1.0),
        }
        for group in optimizer.param_groups
    ]


def _schedule(trial: DryRun, config: TrainConfig, updates_per_epoch: int) -> list[dict[str, Any]]:
    """Rate, and share of dropped patches, at the first update, after the warm-up, at each quarter, and at the last."""
    plan = make_plan(config, trial._metric)
    total = updates_per_epoch * plan.epochs
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=plan.lr)
    schedule = make_schedule(optimizer, plan, updates_per_epoch)
    warm = round(plan.warmup_epochs * updates_per_epoch)
    rows = []
    for number in sorted({0, min(warm, total - 1), total // 4, total // 2, 3 * total // 4, total - 1}):
        schedule.step_update(number)
        row = {"update": number, "epoch": number / updates_per_epoch, "lr": optimizer.param_groups[0]["lr"]}
        if any(config.patch_drop):
            row["patch_drop"] = rate_at(*config.patch_drop, number, total)
        rows.append(row)
    return rows


def _memory(trial: DryRun, config: TrainConfig, world: int) -> dict[str, Any]:
    """Bytes on one device for a full batch, by what takes them."""
    shares = world if config.strategy == "fsdp2" else 1
    model, batch = trial.model, config.batch_size or 1
    weights = _bytes([*model.parameters(), *model.buffers()])
    gradients = _bytes([p for p in model.parameters() if p.requires_grad])
    states = [value for state in trial.optimizer.state.values() for value in state.values()]
    # Most tokens, and so most memory, are kept at the lower of the two rates.
    trial.loop.parts.before_update(int(config.patch_drop[1] <= config.patch_drop[0]), 2)
    few, more = (_kept(trial, pictures) for pictures in (MICRO, 2 * MICRO))
    each = (more - few) / MICRO
    parts = {
        "weights": weights // shares,
        "gradients": gradients // shares,
        "optimizer": _bytes([value for value in states if isinstance(value, Tensor)]) // shares,
        "averaged_weights": weights // shares if config.model_ema else 0,
        "teachers": sum(_bytes(list(t.model.parameters())) for t in (trial._lesson.teachers if trial._lesson else [])),
        # DDP copies gradients into buckets of its own, to send them.
        "ddp_buckets": gradients if world > 1 and config.strategy != "fsdp2" else 0,
        "activations": max(0, round(few + each * (batch - MICRO))),
    }
    return {**parts, "total": sum(parts.values()), "activations_per_picture": round(each)}


def _kept(trial: DryRun, pictures: int) -> int:
    chans, *size = trial.preparation.input_size
    autocast, device = trial.precision != "fp32", trial.fabric.device
    if trial.full.naflex_loader:
        patch = naflex_embeds(trial.model, trial.full).patch_size
        length = max(trial.full.naflex_train_seq_lens or [size[0] // patch[0] * (size[1] // patch[1])])
        sequences = torch.randn(pictures, length, patch[0] * patch[1] * chans, device=device)
        return saved_tensors(OfSequences(trial.model), sequences, autocast=autocast)
    height, width = max([tuple(size), *training_sizes(trial.full)], key=lambda sides: sides[0] * sides[1])
    images = torch.randn(pictures, chans, height, width, device=device)
    return saved_tensors(trial.model, images, autocast=autocast)


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _lines(report: dict[str, Any], number: int, total: int) -> list[str]:
    size = "x".join(map(str, report["input_size"]))
    memory = report["memory"]
    parts = ", ".join(f"{name.replace('_', ' ')} {memory[name] / 2**30:.2f}" for name in _PARTS if memory[name])
    lines = [
        "",
        *([f"stage {number} of {total}"] if total > 1 else []),
        f"{report['model']}: {report['parameters'] / 1e6:.2f} M parameters, {report['trained_parameters'] / 1e6:.2f} M "
        f"trained, input {size}, {report['classes']} classes",
        *(f"teacher {name}: {count / 1e6:.2f} M parameters" for name, count in report["teachers"].items()),
        f"{report['pictures']:,} pictures, {report['pictures_per_update']:,} an update ("
        f"{report['batch_size_per_device']} on each of {report['devices']} devices): "
        f"{report['updates_per_epoch']:,} updates an epoch, "
        f"{report['updates']:,} in {report['epochs']} epochs",
        f"{report['opt']}, {len(report['groups'])} groups:",
        *(
            f"  {g['parameters']:>12,} in {g['tensors']} tensors, rate {g['lr']:.3g}, "
            f"weight decay {g['weight_decay']:g}"
            for g in report["groups"]
        ),
        "schedule:",
        *(
            f"  update {row['update']:>9,}, epoch {row['epoch']:6.1f}: rate {row['lr']:.3g}"
            + (f", {row['patch_drop']:.0%} of the patches dropped" if "patch_drop" in row else "")
            for row in report["schedule"]
        ),
        f"two updates of {MICRO} pictures in {report['precision']}: loss {report['loss_of_two_updates']:.4f}",
        f"memory of one device, on paper: {memory['total'] / 2**30:.2f} GiB ({parts}); kept activations measured with "
        f"{MICRO} and {2 * MICRO} pictures, {memory['activations_per_picture'] / 2**20:.1f} MiB a picture",
    ]
    return lines + [f"  {note}" for note in report["notes"]]


_PARTS = ("weights", "gradients", "optimizer", "averaged_weights", "teachers", "ddp_buckets", "activations")
