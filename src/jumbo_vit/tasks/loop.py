"""The training loop: one for every task, on one process or many.

What is unusual: nothing depends on the state of a random generator or on how far a loader has read ahead. Each update
is a function of the weights and of its own number, so a run that is killed at any moment goes on to the same bits.
Lightning's Fabric brings devices, precision, processes and loggers; the loop itself is spelled out.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import mix_seed
from jumbo_vit.tasks.progress import Reporter
from jumbo_vit.tasks.state import Progress

# So many updates in a row without a finite loss end the run.
STEADY_NAN = 5
# Without --recovery-interval, the state is written so often.
RECOVERY_SECONDS = 600.0


class Objective(Protocol):
    """What a task brings to the loop."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Losses (B,) of one forward pass; every random choice comes from `seed`."""
        ...


@dataclass
class Bad:
    """An update whose loss or gradient was not finite, with what is needed to compute it again.

    Args:
        batches: The forward passes: (images, targets, weights).
        seeds: The seed of each.
        loss: The loss as it came out.
    """

    batches: list[tuple[Tensor, Tensor, Tensor]]
    seeds: list[int]
    loss: float


@dataclass
class Parts:
    """Everything that the loop drives.

    Args:
        fabric: Lightning's Fabric, launched.
        model: The model as Fabric set it up.
        average: Its averaged copy, or None.
        optimizer: As Fabric set it up.
        objective: The task.
        batches: The order of samples, with its position.
        loader: A loader over `batches`.
        score: Gives the row of scores of the epoch that just ended.
        save: Writes the state.
        keep: Writes the model of the given kind ("plain" or "averaged") as the best so far.
        keep_bad: Writes the batch that gave no finite loss.
        before_update: Called before each update with its number in the whole run, skipped ones counted, and the run's
            number of updates: what changes over a run takes its value there, so that a resumed run takes the same.
    """

    fabric: Any
    model: nn.Module
    average: AveragedModel | None
    optimizer: Any
    objective: Objective
    batches: EpochBatches
    loader: Any
    score: Callable[[], dict[str, dict[str, Any]]]
    save: Callable[[Progress], None]
    keep: Callable[[Progress, str], None]
    keep_bad: Callable[[Progress, Bad], None]
    before_update: Callable[[int, int], None] = lambda number, total: None


@dataclass
class Plan:
    """The numbers of a run.

    Args:
        epochs: Passes over the set.
        lr: Highest rate.
        min_lr: Last rate.
        warmup_epochs: Linear warm-up.
        clip_grad: Largest gradient norm; 0 for no limit.
        seed: Of the run.
        metric: Name of the score that decides which model is best; higher is better.
        patience: Epochs without a better score before stopping; 0 never.
        recovery_interval: Updates between two states; 0 by time.
    """

    epochs: int
    lr: float
    min_lr: float
    warmup_epochs: float
    clip_grad: float
    seed: int
    metric: str
    patience: int = 0
    recovery_interval: int = 0


def make_schedule(optimizer: Any, plan: Plan, updates_per_epoch: int) -> CosineLRScheduler:
    """Linear warm-up, then a cosine to `min_lr`, counted in updates."""
    total = plan.epochs * updates_per_epoch
    warmup = min(round(plan.warmup_epochs * updates_per_epoch), total - 1)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(2, total - warmup),  # timm warns of a cosine over one update
        lr_min=min(plan.min_lr, plan.lr),
        warmup_t=warmup,
        warmup_lr_init=min(plan.lr / 100, plan.lr),
        warmup_prefix=True,
        t_in_epochs=False,
    )


@dataclass
class Loop:
    """Runs a plan over its parts, from wherever `progress` stands."""

    parts: Parts
    plan: Plan
    progress: Progress
    reporter: Reporter
    stop: int = 0
    last_saved: float = field(default_factory=time.monotonic)

    def run(self) -> Progress:
        """Train to the end of the plan, or until early stopping.

        Raises:
            UserError: Too many updates in a row without a finite loss, or the disk fails.
            SystemExit: 143 after SIGTERM, 130 after Ctrl-C, with the state written.
        """
        # Python allows handlers in the main thread only; elsewhere a signal does what it always does.
        caught = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._on_signal) for number in caught}
        try:
            schedule = make_schedule(self.parts.optimizer, self.plan, self.parts.batches.updates)
            while self.progress.epoch < self.plan.epochs and not self.progress.finished:
                self._epoch(schedule)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.reporter.close()
        return self.progress

    def _on_signal(self, number: int, _: Any) -> None:
        if self.stop and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once, from the state written last
        self.stop = number  # between two updates everything is whole; the loop looks there

    def _epoch(self, schedule: CosineLRScheduler) -> None:
        progress, batches = self.progress, self.parts.batches
        batches.epoch, batches.start = progress.epoch, progress.update
        self.reporter.start_epoch(progress, self.plan.epochs, batches)
        clock = time.monotonic()
        passes: Iterator[Any] = iter(self.parts.loader)
        while progress.update < batches.updates:
            schedule.step_update(progress.updates)
            group = [next(passes) for _ in range(batches.passes(progress.update))]
            self._update(group)
            progress.update += 1
            now = time.monotonic()
            progress.seconds += now - clock
            clock = now
            self._maybe_save()
        self._end_epoch()
        progress.seconds += time.monotonic() - clock
        self._save()

    def _update(self, group: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """One update from its forward passes; skipped and counted where loss or gradient is not finite."""
        parts, progress, fabric = self.parts, self.progress, self.parts.fabric
        size = parts.batches.update_size(progress.update)
        per_epoch = parts.batches.updates
        parts.before_update(progress.epoch * per_epoch + progress.update, self.plan.epochs * per_epoch)
        seeds = [
            mix_seed(self.plan.seed, "step", progress.epoch, progress.update, number, fabric.global_rank)
            for number in range(len(group))
        ]
        parts.model.train()
        total = torch.zeros((), device=fabric.device)
        for number, (batch, seed) in enumerate(zip(group, seeds, strict=True)):
            images, targets, weights = fabric.to_device(batch)
            with fabric.no_backward_sync(parts.model, enabled=number < len(group) - 1):
                losses = parts.objective.step(parts.model, (images, targets), seed)
                share = (losses * weights).sum()
                # Processes average their gradients; each sample must weigh 1/size in the end.
                fabric.backward(share * fabric.world_size / size)
            total += share.detach().float()
        loss = self._sum_over_processes(total) / size
        limit = self.plan.clip_grad or math.inf
        norm = fabric.clip_gradients(parts.model, parts.optimizer, max_norm=limit, error_if_nonfinite=False)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not math.isfinite(loss):
            if self._scaler is not None:
                self._scaler.update()  # it has unscaled for this update, and must close it before the next
            self._skip(group, seeds, loss)
        elif self._step(bool(torch.isfinite(norm))):
            self._count(loss, size)
        elif self._rescaling():
            self.progress.rescaled += 1
        else:
            self._skip(group, seeds, loss)
        parts.optimizer.zero_grad(set_to_none=True)

    def _step(self, finite: bool) -> bool:
        """Take the step, unless the gradient is not finite. fp16's scaler has to see such a gradient all the same."""
        if finite or self._scaler is not None:
            self.parts.optimizer.step()
        return finite

    @property
    def _scaler(self) -> Any:
        return getattr(self.parts.fabric.strategy.precision, "scaler", None)

    def _rescaling(self) -> bool:
        """In fp16 an overflow at a high scale is the search for the scale, not a fault of the batch."""
        return self._scaler is not None and self._scaler.get_scale() >= 1.0

    def _count(self, loss: float, size: int) -> None:
        progress = self.progress
        progress.updates += 1
        progress.bad_in_a_row = 0
        progress.loss_sum += loss * size
        progress.loss_count += size
        if self.parts.average is not None:
            self.parts.average.update_parameters(_inner(self.parts.model))
        self.reporter.update(loss, self.parts.optimizer.param_groups, size)

    def _skip(self, group: list[tuple[Tensor, Tensor, Tensor]], seeds: list[int], loss: float) -> None:
        progress = self.progress
        progress.bad += 1
        progress.bad_in_a_row += 1
        if progress.bad_in_a_row == 1:
            self.parts.keep_bad(progress, Bad(group, seeds, loss))
        if progress.bad_in_a_row < STEADY_NAN:
            return
        best = f"the best model (epoch {progress.best_epoch}) is intact" if progress.best_epoch else "no model was kept"
        raise UserError(
            f"the loss or its gradient was not finite in {STEADY_NAN} updates in a row (epoch {progress.epoch + 1}, "
            f"loss {loss}, rate {self.parts.optimizer.param_groups[0]['lr']:.3g}); {best}; lower --lr, or look at the "
            "first such batch with `jumbo-vit replay DIR`"
        )

    def _end_epoch(self) -> None:
        progress, metric = self.progress, self.plan.metric
        progress.epoch += 1
        progress.update = 0
        scores = self.parts.score()
        row: dict[str, Any] = {
            "epoch": progress.epoch,
            "updates": progress.updates,
            "lr": self.parts.optimizer.param_groups[-1]["lr"],
            "train_loss": progress.loss_sum / progress.loss_count if progress.loss_count else math.nan,
        }
        for kind, numbers in scores.items():
            prefix = "val_" if kind == "plain" else f"val_{kind}_"
            row |= {prefix + name: value for name, value in numbers.items() if isinstance(value, float)}
        progress.history.append(row)
        progress.loss_sum, progress.loss_count = 0.0, 0
        # max keeps the first of equals: plain before averaged.
        kind = max(scores, key=lambda name: _or_lowest(scores[name][metric]))
        self._judge(scores[kind], kind)
        self.reporter.end_epoch(row, progress, metric, scores)

    def _judge(self, numbers: dict[str, Any], kind: str) -> None:
        """Keep the model if it is strictly better than all before it: ties keep the earlier, NaN never wins."""
        progress, score = self.progress, numbers[self.plan.metric]
        if not math.isnan(score) and (progress.best_score is None or score > progress.best_score):
            progress.best_score, progress.best_epoch, progress.best_weights = score, progress.epoch, kind
            progress.best_numbers = numbers
            progress.stale = 0
            self.parts.keep(progress, kind)
        else:
            progress.stale += 1
        if self.plan.patience and progress.stale >= self.plan.patience and progress.epoch < self.plan.epochs:
            progress.finished = progress.stopped_early = True
        progress.finished |= progress.epoch == self.plan.epochs

    def _maybe_save(self) -> None:
        every = self.plan.recovery_interval
        due = self.progress.update % every == 0 if every else time.monotonic() - self.last_saved > RECOVERY_SECONDS
        stop = self.stop
        if self._many:  # all processes stop and save together, whichever got the signal
            flags = torch.tensor([float(stop), float(due)], device=self.parts.fabric.device)
            stop, due = int(self._max_over_processes(flags[0])), self._max_over_processes(flags[1]) > 0
        # After an epoch's last update the state is written with its scores.
        if (due or stop) and self.progress.update < self.parts.batches.updates:
            self._save(stop)

    def _save(self, stop: int = 0) -> None:
        self.parts.save(self.progress)
        self.last_saved = time.monotonic()
        stop = stop or self.stop
        if self._many:  # a signal may have reached one of them while scoring
            stop = int(self._max_over_processes(torch.tensor(float(stop), device=self.parts.fabric.device)))
        if stop and not self.progress.finished:
            self.reporter.stopped(self.progress)
            raise SystemExit(128 + stop)

    def _max_over_processes(self, value: Tensor) -> float:
        return float(self.parts.fabric.all_reduce(value.clone(), reduce_op="max"))

    @property
    def _many(self) -> bool:
        return bool(self.parts.fabric.world_size > 1)

    def _sum_over_processes(self, value: Tensor) -> float:
        return float(self.parts.fabric.all_reduce(value.clone(), reduce_op="sum")) if self._many else float(value)


def _or_lowest(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _inner(model: nn.Module) -> nn.Module:
    """The user's model inside Fabric's and DDP's wrappers."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model
