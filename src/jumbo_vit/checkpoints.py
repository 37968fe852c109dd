"""Reading weight files safely, and saying exactly what was taken from them.

Never runs code from a file: PyTorch's weights-only loader and safetensors are the only readers.
"""

import json
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jumbo_vit.errors import UserError

# Wrappers add these in front of names: DataParallel/DDP, torch.compile, and our own training module.
_WRAPPERS = ("module.", "_orig_mod.", "model.")
# Where training frameworks keep the weights inside a checkpoint, in the order in which they are looked for.
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")

# How PyTorch's weights-only reader says that a file names a function or class of its own.
_ASKS_FOR_CODE = re.compile(
    r"GLOBAL \S+ (was not an allowed|whose module)|unrecognized function|Can only (build|create)"
)


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Strip `module.`, `_orig_mod.` and `model.` in any order and number, and take the authors' names as ours.

    Only stripped when every name carries the wrapper: a prefix on some names alone is part of the model's own naming.
    """
    names = dict(state)
    names.pop("n_averaged", None)  # the counter that torch's AveragedModel keeps beside the weights
    while names and any(all(name.startswith(wrapper) for name in names) for wrapper in _WRAPPERS):
        names = {name.split(".", 1)[1]: value for name, value in names.items()}
    if "jumbo_token" in names:
        names["reg_token"] = names.pop("jumbo_token")
        names.pop("cls_token", None)  # the official class inherits it and never reads it
    return names


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a `.safetensors`, `.pth`, `.pt`, `.bin` or `.ckpt` file as a flat dict of tensors with plain names.

    Raises:
        UserError: No such file; a corrupt or cut one; one that needs to run code; or one that holds no weights.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    for key in _NESTED:
        nested = content.get(key) if isinstance(content, Mapping) else None
        if isinstance(nested, Mapping) and nested:
            content = nested
            break
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dict of weights (a state dict)")
    tensors = {name: v for name, v in content.items() if isinstance(name, str) and isinstance(v, Tensor)}
    if not tensors:
        raise UserError(
            f"{path} holds no weights: its entries are {', '.join(sorted(map(str, content))[:5]) or 'none'}"
        )
    odd = [name for name, value in tensors.items() if not _is_plain(value)]
    if odd:
        raise UserError(
            f"{path} holds tensors that are no weights (sparse, quantised, without data, or larger than what is "
            f"stored of them): {', '.join(_grouped(odd, 4))}"
        )
    return plain_names(tensors)


def _is_plain(value: Tensor) -> bool:
    """Whether every element of a tensor is in the file; a view may say that a number repeats a million times."""
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file, or is cut off: {_first_line(error)}") from error


def _read_pickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            if not file.read(2).startswith((b"PK", b"\x80")):
                raise UserError("it is neither a zip archive nor a pickle")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return load_safely(path)
    except Exception as error:  # a damaged pickle makes the weights-only reader raise almost anything
        if _ASKS_FOR_CODE.search(str(error)) or _is_pickle_that_calls(path):
            raise UserError(
                f"{path} wants to run code when it is read, so it was not opened; if you trust its source, convert it "
                "yourself: load it with torch.load(..., weights_only=False) and save the plain state dict"
            ) from error
        raise UserError(f"{path} is not a readable checkpoint, or is cut off: {_first_line(error)}") from error


def load_safely(path: Path) -> Any:
    """`torch.load` to the CPU, without running code, and without unpacking more than the file's own size.

    Raises:
        Exception: Almost any kind, where the file is damaged; UserError for an archive that is compressed.
    """
    with path.open("rb") as file:
        archive = file.read(4) == b"PK\x03\x04"
    if archive:
        with zipfile.ZipFile(path) as entries:
            unpacked = sum(entry.file_size for entry in entries.infolist())
        if unpacked > path.stat().st_size:  # a small archive can unpack to all the memory there is
            raise UserError(
                f"its entries unpack to {unpacked} bytes from {path.stat().st_size}, but torch.save does not compress"
            )
    return torch.load(path, map_location="cpu", weights_only=True)


def _is_pickle_that_calls(path: Path) -> bool:
    """Whether the file is a plain pickle, not one of torch.save's, that names a function. Looks without running."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
            if len(head) < 2 or head[0] != 0x80 or head[1] < 3:  # torch.save writes zip archives, and wrote protocol 2
                return False
            file.seek(0)
            return any(opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") for opcode, _, _ in pickletools.genops(file))
    except (OSError, ValueError, MemoryError, OverflowError):
        return False


def _first_line(error: Exception) -> str:
    # PyTorch puts advice to open the file unsafely in front of what is wrong with it, and advice on its sources behind.
    lines = (
        str(error).rpartition("WeightsUnpickler error:")[2].partition(". This is an internal")[0].strip().splitlines()
    )
    return lines[0][:160] if lines else type(error).__name__


@dataclass
class LoadReport:
    """What became of each tensor of a checkpoint.

    Args:
        loaded: Names taken unchanged.
        resized: Names whose value was resampled or converted to the model's shape.
        folded: Names whose value took in a LayerScale that the model does not have.
        new: The model's names that the file does not serve; they keep their fresh start.
        unused: The file's names that the model does not have, or cannot take.
        notes: What else the reader should know.
    """

    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        taken = len(self.loaded) + len(self.resized) + len(self.folded)
        parts = [f"loaded {taken} of {taken + len(self.new)} tensors"]
        rows = (("resized", self.resized), ("LayerScale folded into", self.folded), ("new", self.new))
        for word, names in (*rows, ("not used", self.unused)):
            if names:
                parts.append(f"{word}: {', '.join(_grouped(names))}")
        return "; ".join([*parts, *self.notes])


def _grouped(names: list[str], most: int = 8) -> list[str]:
    """Names of all blocks folded into one entry, so that a report stays readable."""
    folded: dict[str, int] = {}
    for name in names:
        words = name.split(".")
        key = ".".join("*" if word.isdigit() and words[0] == "blocks" else word for word in words)
        folded[key] = folded.get(key, 0) + 1
    rows = [key if count == 1 else f"{key} ({count})" for key, count in folded.items()]
    return rows if len(rows) <= most else [*rows[:most], f"and {len(rows) - most} more"]


def load_exactly(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load `state` into `model`, which must match in every name, shape and kind of number.

    Raises:
        UserError: Something is missing, left over or of another shape or kind; the first few are named.
    """
    check_fits(model, state, source)
    model.load_state_dict(dict(state))


def same_kind(one: Tensor, other: Tensor) -> bool:
    """Whether both hold real, both complex or both whole numbers; copying turns one into the other without a word."""
    return one.is_floating_point() == other.is_floating_point() and one.is_complex() == other.is_complex()


def check_fits(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Check that `load_exactly` would load; `model` may be on the meta device.

    Raises:
        UserError: Something is missing, left over or of another shape or kind; the first few are named.
    """
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys())
    unknown = sorted(state.keys() - own.keys())
    both = sorted(own.keys() & state.keys())
    other = [k for k in both if own[k].shape != state[k].shape]
    kind = [k for k in both if not same_kind(own[k], state[k])]
    if missing or unknown or other or kind:
        faults = [
            f"{word} {', '.join(_grouped(names, 4))}"
            for word, names in (
                ("missing:", missing),
                ("unknown:", unknown),
                ("other shape:", [f"{k} {tuple(state[k].shape)} instead of {tuple(own[k].shape)}" for k in other]),
                ("other type:", [f"{k} {state[k].dtype} instead of {own[k].dtype}" for k in kind]),
            )
            if names
        ]
        raise UserError(f"{source} does not fit the model ({'; '.join(faults)})")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: The file is missing, cut or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}") from error
    except (ValueError, RecursionError, OSError) as error:  # not UTF-8, not JSON, nested too deep, a number too long
        raise UserError(f"{path} is not readable JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, where a JSON object is expected")
    return content
