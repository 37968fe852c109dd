"""Encoder and decoder of a run of `pretrain --method mae`, as its checkpoint holds them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import pick_device
from jumbo_vit.tasks.build import build_model, command_of, identity, load_config, load_options
from jumbo_vit.tasks.masked import MaskedLearner
from jumbo_vit.tasks.methods import open_method
from jumbo_vit.tasks.pretrain_config import PretrainConfig
from jumbo_vit.tasks.state import LAST, PREVIOUS, Progress, read_state, restoring

_WANTED = "give the folder of a run of jumbo-vit pretrain --method mae"
_MODEL_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Trained:
    """Encoder and decoder of a run, in evaluation mode.

    Args:
        learner: On its device.
        preparation: Of its pictures.
        per_patch: Whether what it foretells of a patch is scaled to mean 0 and variance 1.
        origin: Which weights these are, as entries of JSON: `checkpoint`, `weights` ("plain" or "averaged"), `epoch`
            (epochs done), `update` (updates done of the next one), `updates` (of the whole run), and `best_epoch` and
            `best_weights`, of the encoder in the run's model folder.
        notes: Sentences on the choice of the weights.
    """

    learner: MaskedLearner
    preparation: Preparation
    per_patch: bool
    origin: dict[str, Any]
    notes: list[str]


def open_trained(run: str | Path, averaged: bool = False, device: str = "auto") -> Trained:
    """Encoder and decoder of a run's last checkpoint.

    Args:
        run: The run's folder, or one of its .ckpt files.
        averaged: Its averaged weights in place of the plain ones.
        device: "auto", "cpu", "cuda" or "mps".

    Raises:
        UserError: No such run, one of another kind, an encoder alone, a damaged checkpoint, no averaged weights, or no
            such device.
    """
    path = Path(run).expanduser()
    out = _folder_of(path)
    options = _options_of(out)
    file, where = _checkpoint_of(path, out), pick_device(device)
    content, progress = _read(file, out)
    method = open_method(options)
    now, then = identity(options.as_train()) | {"method": options.method} | method.identity, content["identity"]
    changed = sorted(name for name in now if now[name] != then.get(name))
    if changed:
        raise UserError(f"{file} and {out / 'config.yaml'} are of different runs, they differ in {', '.join(changed)}")
    encoder, preparation = build_model(options.as_train(), 0)
    if preparation.in_chans not in (1, 3):
        raise UserError(f"{out}: its model takes {preparation.in_chans} channels, but pictures have 1 or 3")
    learner: Any = method.ready(encoder, preparation, torch.device("cpu"), "fp32")
    state, notes = content["model"], []
    if file.name == PREVIOUS and path.is_dir():
        notes.append(f"{out / LAST} is missing, so {file} was taken.")
    if averaged and content["average"] is None:
        raise UserError(f"{out} kept no averaged weights: leave --averaged out, or pretrain with --model-ema")
    if not averaged and content["average"] is not None:
        notes.append("The run kept averaged weights too: --averaged shows what these do.")
    if options.norm_pix_loss:
        notes.append(
            "The run foretells patches scaled to mean 0 and variance 1: true means and deviations are put back, so the "
            "brightness of each patch is right however little was learned, and the errors are flattered."
        )
    with restoring(out):
        if averaged:
            state = {name.removeprefix("module."): v for name, v in content["average"].items() if name != "n_averaged"}
        learner.load_state_dict(state)
    origin = {
        "checkpoint": str(file),
        "weights": "averaged" if averaged else "plain",
        "epoch": progress.epoch,
        "update": progress.update,
        "updates": progress.updates,
        "best_epoch": progress.best_epoch,
        "best_weights": progress.best_weights,
    }
    return Trained(learner.eval().to(where), preparation, options.norm_pix_loss, origin, notes)


def _read(file: Path, out: Path) -> tuple[dict[str, Any], Progress]:
    try:
        return read_state(file)
    except UserError as error:
        others = (out / name for name in (LAST, PREVIOUS) if out / name != file)
        hint = next((f"; try {other}, another state of the run" for other in others if other.is_file()), "")
        raise UserError(f"{error}{hint}") from error


def _folder_of(path: Path) -> Path:
    """The run's folder, where `config.yaml` is."""
    if not path.exists():
        raise UserError(f"no such run: {path}; {_WANTED}")
    if path.is_file() and path.suffix != ".ckpt":
        raise UserError(
            f"{path} is no run: a file of weights is encoder-only, without a decoder to reconstruct with; {_WANTED}"
        )
    out = path if path.is_dir() else path.parent
    if (out / "config.yaml").is_file():
        return out
    if path.is_dir() and _holds(path, _MODEL_FILES):
        whole = out.absolute().parent
        more = f", here {whole}" if (whole / "config.yaml").is_file() else ""
        raise UserError(f"{path} is encoder-only, it has no decoder to reconstruct with: give the run's folder{more}")
    raise UserError(f"{out} is no run's folder, it holds no config.yaml; {_WANTED}")


def _holds(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _options_of(out: Path) -> PretrainConfig:
    if command_of(out) == "train":
        load_config(out)  # also where it is damaged, which this says
        raise UserError(f"{out} is a run of train, which has no decoder to reconstruct with; {_WANTED}")
    options = load_options(out, PretrainConfig)
    if options.method != "mae":
        raise UserError(f"{out} is a run of --method {options.method}, which has no decoder for pixels; {_WANTED}")
    return options


def _checkpoint_of(path: Path, out: Path) -> Path:
    if path.is_file():
        return path
    found = next((out / name for name in (LAST, PREVIOUS) if (out / name).is_file()), None)
    if found is not None:
        return found
    if _holds(out / "model", _MODEL_FILES):
        raise UserError(
            f"{out} holds no {LAST} any more, and {out / 'model'} is encoder-only: give a run that is whole"
        )
    raise UserError(f"{out} holds no {LAST}: the run was stopped before its first checkpoint, so start it again")
