"""`jumbo-vit train`: from options to a run, and from its folder back to where it stood."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.build import load_config
from jumbo_vit.tasks.config import TrainConfig, with_defaults
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.state import find_state


def train(config: TrainConfig) -> dict[str, Any]:
    """Run a training, new or resumed, and give its summary (the content of `summary.json`).

    Raises:
        UserError: Anything that the user can mend: data, options, disk, a rate that is too high.
    """
    if config.resume:
        return _resume(config)
    config = with_defaults(config)
    if config.data != "digits":
        # config.yaml must mean the same pictures wherever the run is gone on with.
        config = dataclasses.replace(config, data=str(Path(config.data).expanduser().absolute()))
    return Run(config).train()


def _resume(config: TrainConfig) -> dict[str, Any]:
    assert config.resume is not None
    extra = sorted(config.given - {"resume", "epochs"})
    if extra:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise UserError(f"--resume takes everything from the run; only --epochs may be changed, not {flags}")
    out, content, progress = find_state(config.resume)
    saved = load_config(out)
    assert saved.epochs is not None
    if config.epochs is not None and config.epochs < saved.epochs:
        raise UserError(f"--epochs {config.epochs} is less than the run's {saved.epochs}; it can only be raised")
    # The folder may have been moved, and a lengthened run may have been killed before its first state.
    saved = dataclasses.replace(saved, out=str(out), epochs=config.epochs or saved.epochs)
    raised = saved.epochs > content["epochs"]
    if progress.finished and not raised and (out / "summary.json").is_file():
        how = "stopped early" if progress.stopped_early else f"all {saved.epochs} epochs"
        print(f"{out}: the run is finished ({how}); to go on, raise --epochs")
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return summary
    if raised:
        progress.finished = progress.stopped_early = False
        progress.stale = 0
    return Run(saved, content, progress).train()
