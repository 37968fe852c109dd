"""The state of a run on disk: written whole or not at all, read safely, always with one before it.

`last.ckpt` holds everything that the next update depends on. Random numbers need no state (see `seeds`). The file it
replaces becomes `previous.ckpt`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from jumbo_vit.checkpoints import load_safely
from jumbo_vit.data.sources import run_name
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_atomically
from jumbo_vit.tasks.config import TrainConfig

FORMAT = 1
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
RUNS = ("fold-*", "seed-*", "seed-*/fold-*", "stage-*")
"""Where a folder of several runs has them."""


# What every run's checkpoint holds beside its progress.
_ENTRIES: dict[str, type | tuple[type, ...]] = {
    "jumbo_vit_run": int,
    "model": dict,
    "average": (dict, type(None)),
    "optimizer": dict,
    "precision": dict,
    "fingerprint": str,
    "epochs": int,
    "identity": dict,
    "update_size": int,
    "stream": (dict, type(None)),  # of a run on a stream alone
}


@contextmanager
def restoring(out: Path) -> Iterator[None]:
    """Within, a state that was read is handed to the parts of its run.

    Raises:
        UserError: It does not fit them, as no state does that was written by the run.
    """
    try:
        yield
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        first = (str(error).strip().splitlines() or [""])[-1].strip()
        raise UserError(f"the checkpoint in {out} is damaged, it does not fit the run ({first[:200]})") from error


@dataclass
class Progress:
    """Where a run is.

    Args:
        epoch: Epochs done.
        update: Updates done of the epoch under way, bad ones counted.
        updates: Updates that changed the weights; the schedule counts these.
        bad: Updates skipped because the loss or its gradient was not finite.
        rescaled: Updates skipped while fp16's loss scale was being found.
        bad_in_a_row: How many of them came last without a good one between.
        loss_sum: Sum over the samples of the epoch under way of their training losses, good updates only.
        loss_count: Samples in that sum.
        seconds: Time of training so far, in all sessions.
        finished: The last epoch is done, or early stopping ended the run.
        stopped_early: Early stopping ended it.
        stale: Epochs since the best score.
        best_score: The best score so far, or None.
        best_epoch: The epoch (counted from 1) that gave it.
        best_weights: "plain" or "averaged".
        best_numbers: All scores of that epoch with those weights.
        history: A row of numbers for each epoch.
    """

    epoch: int = 0
    update: int = 0
    updates: int = 0
    bad: int = 0
    rescaled: int = 0
    bad_in_a_row: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    seconds: float = 0.0
    finished: bool = False
    stopped_early: bool = False
    stale: int = 0
    best_score: float | None = None
    best_epoch: int = 0
    best_weights: str = "plain"
    best_numbers: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def holds_run(out: Path) -> bool:
    """Whether a folder holds a run that made a checkpoint or a summary, or several (`--folds`, `--seeds`, stages).

    A run that was stopped before its first checkpoint holds options at most, and is started again.
    """
    folders = [out, *(folder for pattern in RUNS for folder in out.glob(pattern))]
    return any((folder / name).exists() for folder in folders for name in (LAST, PREVIOUS, "summary.json"))


def claim_out(config: TrainConfig) -> Path:
    """The folder of a new run, or of several.

    Raises:
        UserError: It holds a run.
    """
    if config.out is None:
        stem = run_name(config.data) if config.data != "digits" else "digits"
        return next(path for path in _numbered(Path("runs") / stem) if not path.exists())
    if holds_run(Path(config.out)):
        raise UserError(
            f"--out {config.out} holds a run already; give another folder, or go on with --resume {config.out}"
        )
    return Path(config.out)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def write_state(out: Path, content: dict[str, Any], progress: Progress) -> None:
    """Write `last.ckpt`; the one that stood there becomes `previous.ckpt`.

    Raises:
        UserError: The disk is full or read-only; the checkpoints that stood there are untouched.
    """
    whole = {"jumbo_vit_run": FORMAT, "progress": asdict(progress), **content}
    last, fresh = out / LAST, out / f".{LAST}.new"
    write_atomically(fresh, lambda file: torch.save(whole, file))
    if last.exists():
        os.replace(last, out / PREVIOUS)
    os.replace(fresh, last)


def read_state(path: Path) -> tuple[dict[str, Any], Progress]:
    """Read a run's checkpoint, without running code from it.

    Raises:
        UserError: It is cut, or not a run's checkpoint; one line.
    """
    try:
        whole = load_safely(path)
    except Exception as error:  # whatever a damaged file makes the reader raise, the user's case is the same
        raise UserError(f"{path} is cut off or no checkpoint of a run") from error
    if not isinstance(whole, dict) or "jumbo_vit_run" not in whole:
        raise UserError(f"{path} is no checkpoint of a run (a model's weights start a new one by --init-from)")
    version = whole["jumbo_vit_run"]
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"{path} is of format {version}; this version reads up to {FORMAT}: upgrade")
    progress = whole.get("progress")
    wrong = [key for key, kinds in _ENTRIES.items() if not isinstance(whole.get(key), kinds)]
    wrong += [] if _is_skipped(whole.get("unreadable")) else ["unreadable"]
    try:
        found = Progress(**(progress if isinstance(progress, dict) else {"": ""}))
        # A default tells a field's type; the one without is a score.
        wrong += [key for key, value in asdict(Progress()).items() if not isinstance(getattr(found, key), _like(value))]
    except TypeError:
        wrong.append("progress")
    if wrong:
        raise UserError(f"{path} is damaged, or was written by another version of jumbo-vit ({', '.join(wrong)})")
    return whole, found


def _is_skipped(parts: Any) -> bool:
    """Whether this is None or, for training and held-out part, a list of (path, reason)."""
    if parts is None:
        return True
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, list) for part in parts):
        return False
    pairs = [pair for part in parts for pair in part]
    return all(isinstance(pair, list | tuple) and [type(text) for text in pair] == [str, str] for pair in pairs)


def _like(value: Any) -> tuple[type, ...]:
    return (float, int, type(None)) if value is None or isinstance(value, float) else (type(value),)


def find_state(resume: str) -> tuple[Path, dict[str, Any], Progress]:
    """The run's folder and the state that `--resume` means: a run's folder, or one of its `.ckpt` files.

    Raises:
        UserError: No such folder, no checkpoint in it, or a damaged one (the one before it is offered).
    """
    path = Path(resume)
    if not path.exists():
        raise UserError(f"--resume {resume}: no such folder")
    out = path if path.is_dir() else path.parent
    if not (out / "config.yaml").is_file():
        raise UserError(f"--resume {resume}: no run, {out} holds no config.yaml")
    chosen = next((p for p in (out / LAST, out / PREVIOUS) if p.is_file()), None) if path.is_dir() else path
    if chosen is None:
        raise UserError(f"--resume {resume}: the run was stopped before its first checkpoint; start it again as before")
    try:
        return out, *read_state(chosen)
    except UserError as error:
        raise UserError(f"{error}{_offer(out, chosen)}") from error


def _offer(out: Path, broken: Path) -> str:
    for other in (out / LAST, out / PREVIOUS):
        if other == broken or not other.is_file():
            continue
        try:
            _, progress = read_state(other)
        except UserError:
            continue
        where = f"epoch {progress.epoch + 1}, update {progress.update}"
        return f"; {other} is whole ({where}): go on with --resume {other}"
    return "; no whole checkpoint is left, so start again (the best model so far is in model/, usable by --init-from)"
