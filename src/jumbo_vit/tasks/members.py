"""The runs of a plan of several: what each has to be, and the pictures that all of them share."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumbo_vit.data.folds import fold_numbers, fold_set
from jumbo_vit.data.records import ImageSet, Splits, check_images
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json
from jumbo_vit.tasks.build import build_model, fingerprint, identity, load_config
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.state import Progress, holds_run

Unreadable = dict[str, str] | None
"""Why each picture that cannot be read cannot, by its name; None where nobody looked (`--no-check-images`)."""

RECORD = "pictures.json"
"""In the folder of all runs: the checksum of the pictures that the plan began with, and which cannot be read."""


@dataclass(frozen=True)
class Member:
    """One run of several.

    Args:
        name: Its folder in that of all.
        seed: Its seed.
        fold: Its fold, counted from 1, or None.
        config: Its complete options.
    """

    name: str
    seed: int
    fold: int | None
    config: TrainConfig


def members(config: TrainConfig, out: Path) -> list[Member]:
    """The runs that `--folds` and `--seeds` ask for, seed by seed, in `out`.

    What is held out is fixed by the first seed, so that seeds differ in weights, order and augmentation alone.
    """
    found = []
    folds = range(1, config.folds + 1) if config.folds and config.fold is None else [config.fold]
    for seed in range(config.seed, config.seed + config.seeds):
        for fold in folds:
            parts = [f"seed-{seed}"] * (config.seeds > 1) + [f"fold-{fold}"] * (len(folds) > 1)
            changes: dict[str, Any] = {"seed": seed, "seeds": 1, "fold": fold, "split_seed": config.held_out_seed}
            own = dataclasses.replace(config, **changes, out=str(out.joinpath(*parts)), resume=None)
            found.append(Member("/".join(parts), seed, fold, own))
    return found


def begin(config: TrainConfig, out: Path, splits: Splits, resumed: bool) -> tuple[Unreadable, list[str]]:
    """Before the first run: refuse what would make the runs no runs of one plan, and record the plan's pictures.

    Args:
        config: Complete options of the plan.
        out: The folder of all runs; the record is written there.
        splits: All pictures, before folds are cut.
        resumed: Runs may be there already.

    Returns:
        The pictures that cannot be read, and notes for the user.

    Raises:
        UserError: The pictures have changed since, a run that is there was made with other options, or a fold would be
            without a class because its pictures cannot be read.
    """
    checksum, notes = _checksum(config, splits), list[str]()
    if resumed:
        for member in members(config, out):
            folder = Path(member.config.out or ".")
            if holds_run(folder):
                check_options(folder, load_config(folder), member.config)
        record = _read_record(out / RECORD)
        if record is None:
            notes.append(
                f"{out / RECORD} is not there or damaged: it is written anew, each run's pictures are compared"
            )
        elif record["checksum"] != checksum:
            raise UserError(
                f"the pictures in {config.data} are not those that the runs in {out} began with (added, removed, "
                f"renamed; {record['checksum']} then, {checksum} now): put them back, or start anew with another --out"
            )
        else:
            unreadable: Unreadable = record["unreadable"]
            return unreadable, notes
    build_model(config, len(splits.train.classes))  # a wrong name is told before all pictures are read
    unreadable = _find_unreadable(config, splits) if config.check_images else None
    write_json(out / RECORD, {"checksum": checksum, "unreadable": unreadable})
    if unreadable:
        notes.append(f"{len(unreadable)} pictures cannot be read; each run names those that it leaves out")
    return unreadable, notes


def _checksum(config: TrainConfig, splits: Splits) -> str:
    """Of all that is trained on or scored: of a set that is cut into folds as a whole, else of either part."""
    if config.folds and splits.drawn:
        images = fold_set(splits)
        return f"{len(images)}:{images.checksum():08x}"
    return fingerprint(splits)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("checksum"), str):
        return None
    return record if isinstance(record.get("unreadable", 0), dict | None) else None


def _find_unreadable(config: TrainConfig, splits: Splits) -> dict[str, str]:
    chans = config.in_chans or 3
    parts = [fold_set(splits)] if config.folds else [splits.train, splits.val]
    found: dict[str, str] = {}
    for number, part in enumerate(parts):
        checked = check_images(part, chans, require_all_classes=number == 0)
        found |= {entry.path: entry.reason for entry in checked.skipped[len(part.skipped) :]}
    if config.folds and found:
        _check_folds(config, parts[0], found)
    return found


def _check_folds(config: TrainConfig, images: ImageSet, unreadable: dict[str, str]) -> None:
    """Each fold, and what is left without it, needs a readable picture of every class it has pictures of."""
    numbers = fold_numbers(images, config.folds, config.held_out_seed)
    readable = [images.name(index) not in unreadable for index in range(len(images))]
    wanted = range(config.folds) if config.fold is None else [config.fold - 1]
    for fold in wanted:
        for held_out in (True, False):
            part = [index for index, number in enumerate(numbers) if (number == fold) == held_out]
            before = images.subset(part).class_counts()
            after = images.subset([index for index in part if readable[index]]).class_counts()
            lost = next((label for label, count in enumerate(before) if count and not after[label]), None)
            if lost is None:
                continue
            first = next(index for index in part if not readable[index] and lost in images.samples[index].labels)
            name = images.name(first)
            raise UserError(
                f"fold {fold + 1} of {config.folds} would {'hold out' if held_out else 'train on'} no picture of the "
                f"class {images.classes[lost]}: {before[lost]} cannot be read, first {name}: {unreadable[name]}; "
                "replace or remove such files, or remove the class"
            )


# Beside what `identity` compares. The place of the data is not compared: another machine may have them elsewhere.
_OF_THE_PLAN = ("folds", "fold", "held_out_seed", "seed", "val_fraction", "patience")


def check_options(out: Path, saved: TrainConfig, plan: TrainConfig) -> None:
    """Refuse a run that was not made with the options that its plan gives it, whatever put it there.

    Args:
        out: Its folder.
        saved: The options in that folder.
        plan: What the plan gives this run.

    Raises:
        UserError: The first option that differs.
    """

    def all_of(config: TrainConfig) -> dict[str, Any]:
        first = {name: getattr(config, name) for name in _OF_THE_PLAN}
        # Weights to start from may lie elsewhere on another machine too, but are given or not.
        return first | identity(config) | {"init_from": "given" if config.init_from else None}

    has, wants = all_of(saved), all_of(plan)
    name = next((name for name in wants if has[name] != wants[name]), None)
    if name is not None:
        flag = "--split-seed" if name == "held_out_seed" else f"--{name.replace('_', '-')}"
        raise UserError(
            f"{out} holds a run with {flag} {has[name]}, but the plan gives it {flag} {wants[name]}: put a run with "
            "the plan's own options there, or remove the folder, and it is trained anew"
        )


def check_state(out: Path, saved: TrainConfig, plan: TrainConfig, content: dict[str, Any]) -> None:
    """Refuse a finished run whose checkpoint is not of the plan's options or pictures; `Run` does it for the others.

    Args:
        out: Its folder.
        saved: The options in that folder.
        plan: What the plan gives this run.
        content: Its checkpoint.

    Raises:
        UserError: What differs.
    """
    processes = int(os.environ.get("WORLD_SIZE", plan.devices * plan.nodes))
    size = (plan.batch_size or 1) * plan.grad_accum_steps * processes
    if content["update_size"] != size:
        raise UserError(
            f"{out} holds a run with {content['update_size']} pictures an update, but the plan has {size} "
            "(--batch-size x --grad-accum-steps x processes): put a run with the plan's own options there, or remove "
            "the folder, and it is trained anew"
        )
    MemberRun(saved, None, content).verify()


class MemberRun(Run):
    """One of several runs, which does not look again for pictures that cannot be read.

    Args:
        config: Complete options.
        unreadable: What the plan found, or None.
        content: The state to go on from, or None.
        progress: Where that state stands, or None.
    """

    def __init__(
        self,
        config: TrainConfig,
        unreadable: Unreadable,
        content: dict[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(config, content, progress)
        self._known = unreadable

    def verify(self) -> None:
        """Compare options and pictures with those of the checkpoint.

        Raises:
            UserError: They are not the same.
        """
        self.out = Path(self.config.out or ".")
        self._fingerprint = fingerprint(self._check(self._open()))
        self._verify_same_run()

    def _unreadable_of(self, splits: Splits) -> list[list[tuple[str, str]]]:
        known = self._known
        if known is None:
            return super()._unreadable_of(splits)
        named = [[part.name(index) for index in range(len(part))] for part in (splits.train, splits.val)]
        return [[(name, known[name]) for name in names if name in known] for names in named]
