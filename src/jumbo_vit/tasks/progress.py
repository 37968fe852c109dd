"""What a person sees of a run: a bar within an epoch, a line after it, and curves at the end."""

import csv
import io
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.files import write_atomically, write_text
from jumbo_vit.tasks.state import Progress


class Reporter:
    """Bar and lines on the main process, nothing on the others.

    Args:
        active: Whether this is the main process.
        loggers: Fabric's loggers, fed with every epoch's row and the loss of every 50th update.
    """

    def __init__(self, active: bool, loggers: list[Any]) -> None:
        self.active, self.loggers = active, loggers
        self.bar: Any = None
        self.samples, self.clock, self.smooth = 0, time.monotonic(), math.nan
        self.step = 0
        self.epochs = 0

    def start_epoch(self, progress: Progress, epochs: int, batches: EpochBatches) -> None:
        """A new bar, starting where the epoch stands."""
        self.samples, self.clock, self.epochs, self.step = 0, time.monotonic(), epochs, progress.updates
        if self.active and sys.stderr.isatty():
            self.bar = tqdm(
                total=batches.updates, initial=progress.update, desc=f"epoch {progress.epoch + 1}/{epochs}", leave=False
            )

    def update(self, loss: float, groups: list[dict[str, Any]], size: int) -> None:
        """After an update: loss, rate, pictures a second."""
        self.samples += size
        self.step += 1
        self.smooth = loss if math.isnan(self.smooth) else 0.95 * self.smooth + 0.05 * loss
        if self.active and self.step % 50 == 0:
            self._log({"train_loss_update": loss, "lr": groups[-1]["lr"]})
        if self.bar is not None:
            speed = self.samples / max(time.monotonic() - self.clock, 1e-9)
            self.bar.set_postfix_str(
                f"loss {self.smooth:.3f}, lr {groups[-1]['lr']:.1e}, {speed:.0f} images/s", refresh=False
            )
            self.bar.update(1)

    def end_epoch(
        self, row: dict[str, Any], progress: Progress, metric: str, scores: dict[str, dict[str, Any]]
    ) -> None:
        """The epoch's line, and its row to the loggers."""
        self._close_bar()
        if not self.active:
            return
        speed = self.samples / max(time.monotonic() - self.clock, 1e-9)
        numbers = ", ".join(f"{metric} {s[metric]:.4f} ({kind})" for kind, s in scores.items())
        if len(scores) == 1:
            numbers = f"{metric} {scores['plain'][metric]:.4f}"
        best = "  best so far" if progress.best_epoch == progress.epoch else ""
        bad = f"  {progress.bad} bad updates skipped" if progress.bad else ""
        if progress.rescaled:
            bad += f"  {progress.rescaled} updates skipped to find the loss scale"
        print(
            f"epoch {progress.epoch}/{self.epochs}  loss {row['train_loss']:.4f}  {numbers}  "
            f"{speed:.0f} images/s{best}{bad}",
            flush=True,
        )
        self._log({key: value for key, value in row.items() if key != "epoch"})

    def stopped(self, progress: Progress) -> None:
        """After a signal, with the state written."""
        self._close_bar()
        if self.active:
            print(
                f"stopped in epoch {progress.epoch + 1} after {progress.updates} updates, state written; "
                "go on with --resume DIR",
                flush=True,
            )

    def _log(self, numbers: dict[str, Any]) -> None:
        self._each(lambda logger: logger.log_metrics(numbers, step=self.step))

    def _each(self, act: Callable[[Any], None]) -> None:
        """A logger that fails costs one line and itself, not the run."""
        for logger in list(self.loggers):
            try:
                act(logger)
            except Exception as error:
                self.loggers.remove(logger)
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"the logger {type(logger).__name__} failed and is left out from here on: {reason}", flush=True)

    def _close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        """End the bar and flush the loggers, also after a failure."""
        self._close_bar()
        self._each(lambda logger: logger.finalize("finished"))


def write_metrics(path: Path, history: list[dict[str, Any]]) -> None:
    """`metrics.csv`: one row an epoch, written whole each time so that a resumed run has each epoch once."""
    buffer = io.StringIO()
    names = list(dict.fromkeys(name for row in history for name in row))
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_text(path, buffer.getvalue())


def draw_curves(path: Path, history: list[dict[str, Any]], metric: str, title: str) -> None:
    """`curves.png`: losses on the left, the score on the right, over epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in history]
    style = ".-" if len(history) < 30 else "-"  # a line through one point would not be seen
    for name, label in (("train_loss", "training"), ("val_loss", "held out"), ("val_averaged_loss", "averaged")):
        if history and name in history[-1]:
            left.plot(epochs, [row.get(name, math.nan) for row in history], style, label=label)
    left.set(xlabel="epoch", ylabel="loss")
    for name, label in ((f"val_{metric}", "held out"), (f"val_averaged_{metric}", "averaged")):
        if history and name in history[-1]:
            right.plot(epochs, [row.get(name, math.nan) for row in history], style, label=label)
    right.set(xlabel="epoch", ylabel=metric)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
