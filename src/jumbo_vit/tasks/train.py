"""`jumbo-vit train`: from options to a run, and from its folder back to where it stood."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.build import load_config
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.dry_run import dry_run
from jumbo_vit.tasks.members import MemberRun, Unreadable, check_options, check_state
from jumbo_vit.tasks.repeat import repeat
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.stages import holds_stages, resume_stages, train_stages
from jumbo_vit.tasks.state import Progress, find_state, holds_run
from jumbo_vit.tasks.stream import StreamRun, stream_options, the_same_stream


def train(config: TrainConfig, stream: Any = None, classes: Sequence[str] | None = None) -> dict[str, Any]:
    """Run a training, or several, new or resumed, and give the summary (the content of `summary.json`).

    Args:
        config: The options. With a stream, `steps_per_epoch` and `val_data` are needed.
        stream: Training pictures that can be read only one after another (`jumbo_vit.data.streams.Stream` says what it
            has to be), in place of `config.data`; None for any other data. To go on with a run, give it again, as it
            was when the run began.
        classes: The names of the stream's classes, in the order of their numbers; None for those that it states.

    Raises:
        UserError: Anything that the user can mend: data, options, disk, a rate that is too high.
    """
    if config.resume:
        return _resume(config, config.resume, stream, classes)
    if config.dry_run:
        return dry_run(config)
    if config.stages is not None:
        if stream is not None or classes is not None:
            raise UserError("stages need data that can be opened anew for each: give --data, not a stream of Python's")
        return train_stages(config, _begin_or_go_on_with_stage)
    config = with_defaults(stream_options(config, stream, classes))
    if config.data != "digits" and not config.streaming:
        # config.yaml must mean the same pictures wherever the run is gone on with.
        config = dataclasses.replace(config, data=str(Path(config.data).expanduser().absolute()))
    return repeat(config, _begin_or_go_on) if config.repeated else _run(config, stream).train()


def _run(
    config: TrainConfig, stream: Any, content: dict[str, Any] | None = None, progress: Progress | None = None
) -> Run:
    return StreamRun(config, stream, content, progress) if config.streaming else Run(config, content, progress)


def _resume(config: TrainConfig, where: str, stream: Any, classes: Sequence[str] | None) -> dict[str, Any]:
    extra = sorted(config.given - {"resume", "epochs"})
    if extra:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise UserError(f"--resume takes everything from the run; only --epochs may be changed, not {flags}")
    out = Path(where)
    if holds_stages(out):
        return resume_stages(out, config.epochs, _begin_or_go_on_with_stage)
    if (out / "config.yaml").is_file():
        saved = load_config(out)
        if saved.repeated:
            saved = dataclasses.replace(saved, out=str(out), epochs=raised_epochs(saved, config.epochs))
            return repeat(saved, _begin_or_go_on, resumed=True)
    return _go_on(where, config.epochs, stream, classes)[0]


def _begin_or_go_on(config: TrainConfig, unreadable: Unreadable) -> tuple[dict[str, Any], int]:
    """One of several runs, from the start or from where it stands; and the signal that came at its very end, or 0."""
    out = Path(config.out or ".")
    if holds_run(out):
        return _go_on(str(out), config.epochs, plan=config)
    run = MemberRun(config, unreadable)
    return run.train(), run.stop


def _begin_or_go_on_with_stage(config: TrainConfig, begun: bool) -> tuple[dict[str, Any], int]:
    if begun:
        return _go_on(config.out or ".", config.epochs)
    run = _run(config, None)
    return run.train(), run.stop


def raised_epochs(saved: TrainConfig, epochs: int | None) -> int:
    """The epochs of a run that goes on: its own, or as many more as asked. Raises `UserError` if it would be fewer."""
    assert saved.epochs is not None
    if epochs is not None and epochs < saved.epochs:
        raise UserError(f"--epochs {epochs} is less than the run's {saved.epochs}; it can only be raised")
    return epochs or saved.epochs


def _go_on(
    where: str,
    epochs: int | None,
    stream: Any = None,
    classes: Sequence[str] | None = None,
    plan: TrainConfig | None = None,
) -> tuple[dict[str, Any], int]:
    """Go on with a run; one of several has to be what its `plan` says."""
    out, content, progress = find_state(where)
    saved = load_config(out)
    if plan is not None:
        check_options(out, saved, plan)
        # It may have been made on another machine; its pictures are compared, not their place.
        saved = dataclasses.replace(saved, data=plan.data)
    # The folder may have been moved, and a lengthened run may have been killed before its first state.
    saved = dataclasses.replace(saved, out=str(out), epochs=raised_epochs(saved, epochs))
    assert saved.epochs is not None
    raised = saved.epochs > content["epochs"]
    if progress.finished and not raised and (out / "summary.json").is_file():
        if plan is not None:
            check_state(out, saved, plan, content)
        summary = finished_summary(out)
        how = "stopped early" if progress.stopped_early else f"all {saved.epochs} epochs"
        print(f"{out}: the run is finished ({how}); to go on, raise --epochs")
        return summary, 0
    the_same_stream(saved, stream, classes)
    if raised:
        progress.finished = progress.stopped_early = False
        progress.stale = 0
    run = _run(saved, stream, content, progress)
    return run.train(), run.stop


def finished_summary(out: Path) -> dict[str, Any]:
    """The content of a finished run's `summary.json`. Raises `UserError` if it is damaged."""
    path = out / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = None
    if not isinstance(summary, dict) or "score" not in summary:
        raise UserError(
            f"{path} is cut off or no summary of a run: remove it and resume again, it is then written anew"
        )
    return summary
