"""The trial of a run: two updates on four pictures, and from it what the whole run would take.

What is measured: that all parts go together; parameters; what a forward pass keeps for the backward pass, with two and
with four pictures. What is computed: updates, rates, and the memory of a full batch on one device, in which what
libraries and the allocator take is not contained. `dry_run` tries runs of `train`, `dry_pretrain` those of `pretrain`.
"""

import contextlib
import dataclasses
import io
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
from jumbo_vit.tasks.build import make_plan
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.distill import LOW
from jumbo_vit.tasks.dry_data import OfSequences
from jumbo_vit.tasks.loop import Loop, make_schedule
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.schedules import naflex_embeds, rate_at
from jumbo_vit.tasks.state import Progress
from jumbo_vit.tasks.token_options import training_sizes
from jumbo_vit.teachers import Teacher

MICRO = 2
"""Pictures of a small update."""

SMALL: dict[str, Any] = {
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
"""What a trial changes in the options of every run."""


class Trial(Run):
    """A run of two updates on four pictures, which keeps nothing but, where it is asked, its model.

    Mixed in before the kind of run that is tried, whose constructor a subclass gives small options.

    Attributes:
        full: Complete options of the whole run.
        pictures: Training pictures there are.
        told: What was replaced for the trial, each a sentence.
        keep_model: Write the model, for the next stage to start from.
    """

    full: TrainConfig
    pictures = 0
    told: list[str]
    keep_model = False

    def _open(self) -> Splits:
        splits = super()._open()
        self.pictures = len(splits.train)
        step = max(1, len(splits.train) // (2 * MICRO))
        few = [index * step % len(splits.train) for index in range(2 * MICRO)]
        val = splits.val.subset(range(min(2, len(splits.val))))
        return dataclasses.replace(splits, train=splits.train.subset(few), val=val)

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

    def teachers(self) -> list[Teacher]:
        """Those that lie on the device beside the model."""
        return self._lesson.teachers if self._lesson else []

    def largest(self, pictures: int) -> tuple[nn.Module, Tensor]:
        """What the loop calls, giving numbers (B, ...) to make a loss of, and random inputs of the largest size."""
        chans, *size = self.preparation.input_size
        device = self.fabric.device
        if self.full.naflex_loader:
            patch = naflex_embeds(self.model, self.full).patch_size
            length = max(self.full.naflex_train_seq_lens or [size[0] // patch[0] * (size[1] // patch[1])])
            return OfSequences(self.model), torch.randn(pictures, length, patch[0] * patch[1] * chans, device=device)
        height, width = max([tuple(size), *training_sizes(self.full)], key=lambda sides: sides[0] * sides[1])
        return self.model, torch.randn(pictures, chans, height, width, device=device)


def replaced(options: Any, starts_anew: bool) -> tuple[dict[str, Any], list[str]]:
    """What a trial changes in complete options of either command, and sentences on what is not as in the run.

    Args:
        options: Of the whole run.
        starts_anew: Whether weights to start from that are not there may be left out: what is trained does not depend
            on them.
    """
    small, told = dict(SMALL), []
    if options.precision == "fp16" and pick_device(options.device).type == "cpu":
        small["precision"] = "bf16"
        told.append("A CPU does not train in fp16: the trial is in bf16, which takes as much memory.")
    if starts_anew and start_is_absent(options.init_from):
        small["init_from"] = None
        told.append(f"{options.init_from} is not there: the trial starts from random weights, but the run needs it.")
    return small, told


def start_is_absent(init_from: str | None) -> bool:
    """Whether `--init-from` is the path of nothing; a name without a folder may be a model's, and is looked up."""
    return bool(init_from) and "/" in str(init_from) and not Path(str(init_from)).exists()


def stand_in(name: str, precision: str, device: torch.device) -> Teacher:
    """A teacher of timm's with random weights, for features; its classes are the caller's matter."""
    model: Any = timm.create_model(name)
    model = model.eval().requires_grad_(False).to(device)
    teacher = Teacher(name, model, Preparation.from_cfg(model.pretrained_cfg), device)
    teacher.lineage, teacher.low = {"name": name}, LOW.get(precision)
    return teacher


def stands_in(name: str) -> str:
    """That it does, as a sentence."""
    return f"The weights of the teacher {name} cannot be had here: random ones stand in for them."


def of_the_hub(name: str) -> bool:
    """Whether a teacher's weights are to be downloaded, and may be out of reach."""
    return is_model(name) and not Path(name).is_dir()


def attempt(trial: Trial, scratch: Path) -> None:
    """Make the two updates in silence; of what the run said, the report on its first weights is kept.

    Raises:
        UserError: What the run itself would refuse, or a loss that is not finite.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # it speaks of four pictures
        trial.train()
    if trial.progress.updates < 2:
        raise UserError("the two small updates gave no finite loss: lower --lr")
    lines = [line for line in said.getvalue().splitlines() if line.startswith("from ")]
    trial.told += [line.replace(f"{scratch}/out/", "") for line in lines]


def report_on(trial: Trial) -> dict[str, Any]:
    """What the whole run would take, of a trial that was made."""
    config = trial.full
    world = config.devices * config.nodes
    batches = EpochBatches(trial.pictures, config.batch_size or 1, config.seed, 0, world, config.grad_accum_steps)
    parameters = list(trial.model.parameters())
    return {
        "model": config.model,
        "input_size": list(trial.preparation.input_size),
        "classes": len(trial.labels),
        "pictures": trial.pictures,
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "teachers": {t.name: sum(p.numel() for p in t.model.parameters()) for t in trial.teachers()},
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


def _schedule(trial: Trial, config: TrainConfig, updates_per_epoch: int) -> list[dict[str, Any]]:
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


def _memory(trial: Trial, config: TrainConfig, world: int) -> dict[str, Any]:
    """Bytes on one device for a full batch, by what takes them."""
    shares = world if config.strategy == "fsdp2" else 1
    model, batch = trial.model, config.batch_size or 1
    weights = _bytes([*model.parameters(), *model.buffers()])
    gradients = _bytes([p for p in model.parameters() if p.requires_grad])
    states = [value for state in trial.optimizer.state.values() for value in state.values()]
    # Most tokens, and so most memory, are kept at the lower of the two rates.
    trial.loop.parts.before_update(int(config.patch_drop[1] <= config.patch_drop[0]), 2)
    autocast = trial.precision != "fp32"
    few, more = (saved_tensors(*trial.largest(pictures), autocast=autocast) for pictures in (MICRO, 2 * MICRO))
    each = (more - few) / MICRO
    parts = {
        "weights": weights // shares,
        "gradients": gradients // shares,
        "optimizer": _bytes([value for value in states if isinstance(value, Tensor)]) // shares,
        "averaged_weights": weights // shares if config.model_ema else 0,
        "teachers": sum(_bytes(list(teacher.model.parameters())) for teacher in trial.teachers()),
        # DDP copies gradients into buckets of its own, to send them.
        "ddp_buckets": gradients if world > 1 and config.strategy != "fsdp2" else 0,
        "activations": max(0, round(few + each * (batch - MICRO))),
    }
    return {**parts, "total": sum(parts.values()), "activations_per_picture": round(each)}


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def lines(report: dict[str, Any], what: str, labels: str) -> list[str]:
    """A report for people.

    Args:
        report: As `report_on` gives it.
        what: Whose parameters are counted.
        labels: What is known of the pictures beside their number.
    """
    size = "x".join(map(str, report["input_size"]))
    memory = report["memory"]
    parts = ", ".join(f"{name.replace('_', ' ')} {memory[name] / 2**30:.2f}" for name in _PARTS if memory[name])
    found = [
        f"{what}, {report['trained_parameters'] / 1e6:.2f} M trained, input {size}, {labels}",
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
    return found + [f"  {note}" for note in report["notes"]]


_PARTS = ("weights", "gradients", "optimizer", "averaged_weights", "teachers", "ddp_buckets", "activations")
