"""Features of a frozen trunk, computed once and kept on disk.

What is unusual: the folder is named by all that the features depend on (weights, arguments, preparation, pictures,
versions, device), so changed weights or pictures never meet old features. Rows are computed in evaluation's own batches
and written chunk by chunk, each whole or not at all; a run that was killed goes on with the chunk that is missing. And
the first batch is always computed again and compared.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import timm
import torch
from timm.models._input import get_model_args
from torch import Tensor, nn
from torch.utils.data import DataLoader

from jumbo_vit.data.pipeline import EVAL_BATCH, EvalSet, Preparation, single_thread
from jumbo_vit.data.sets import ImageSet
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.files import write_atomically, write_json
from jumbo_vit.folder import resolve_folder
from jumbo_vit.version import __version__

CHUNK = 16 * EVAL_BATCH
"""Rows in one file; whole batches, so that a chunk's numbers do not depend on which others were there."""

PIECES, PATCHES, CLASS, HEAD = "pieces", "patches", "class", "head"
"""Columns: the global tokens one after another, the patch mean, the first of the tokens (a view), the head's input."""

_FORMAT = 1
_NEAR = 1e-3  # of the largest feature: more than the order of a sum ever makes


class Trunk:
    """A model up to what its head reads, in evaluation mode: pictures (B, C, H, W) to features (B, width) in fp32.

    Args:
        model: Any timm model. Of one whose trunk gives tokens (B, L, D), global ones first, all that a head reads is
            made of the global tokens and the patch mean; of any other, and for other pools, its own head's input.
        images: A batch to find out with.

    Attributes:
        columns: Where the parts are in a row, by name: (first, behind the last).
        head: The parts which, one after another, are what the model's own head reads.
        dim: D, or the width of the head's input where there are no tokens.
        num_global: J; 0 without global tokens.
    """

    def __init__(self, model: Any, images: Tensor) -> None:
        self.model = model
        self.columns: dict[str, tuple[int, int]] = {}
        self.num_global, self._prefix, self._stores_head = 0, 0, False
        tokens, own = self._run(images)
        if self._has_tokens(tokens):
            self._prefix = self.model.num_prefix_tokens
            jumbo: int | None = getattr(self.model, "num_global", getattr(self.model, "num_jumbo", None))
            self.num_global = self._prefix if jumbo is None else jumbo
        self.dim = int(tokens.shape[2] if self._has_tokens(tokens) else own.shape[1])
        parts = self._parts(tokens)
        views = parts | ({CLASS: parts[PIECES][:, : self.dim]} if PIECES in parts else {})
        choices = ((PIECES, PATCHES), (PIECES,), (PATCHES,), (CLASS,))
        fitting = [names for names in choices if all(name in views for name in names)]
        same = (names for names in fitting if torch.equal(torch.cat([views[name] for name in names], 1), own))
        self.head: tuple[str, ...] = next(same, (HEAD,))
        self._stores_head = self.head == (HEAD,)
        at = 0
        for name, part in (parts | ({HEAD: own} if self._stores_head else {})).items():
            self.columns[name] = (at, at + part.shape[1])
            at += part.shape[1]
        if PIECES in self.columns:
            self.columns[CLASS] = (0, self.dim)
        self.width = at

    def __call__(self, images: Tensor) -> Tensor:
        tokens, own = self._run(images)
        parts = list(self._parts(tokens).values()) + ([own] if self._stores_head else [])
        return torch.cat(parts, 1)

    @torch.no_grad()
    def _run(self, images: Tensor) -> tuple[Any, Tensor]:
        """Tokens or whatever the trunk gives, and the head's input (B, H)."""
        tokens = self.model.forward_features(images)
        own = self.model.forward_head(tokens, pre_logits=True)
        if not isinstance(own, Tensor) or own.ndim != 2:
            raise UserError(
                f"the head of this {type(self.model).__name__} does not read one vector a picture, which alone can be "
                "stored: give the model a global_pool such as avg"
            )
        return tokens, own.float()

    def _has_tokens(self, tokens: Any) -> bool:
        """Whether these are tokens, global ones first, with at least one patch."""
        prefix = getattr(self.model, "num_prefix_tokens", None)
        return prefix is not None and isinstance(tokens, Tensor) and tokens.ndim == 3 and tokens.shape[1] > prefix

    def _parts(self, tokens: Any) -> dict[str, Tensor]:
        if not self._has_tokens(tokens):
            return {}
        first = {PIECES: tokens[:, : self.num_global].flatten(1).float()} if self.num_global else {}
        return {**first, PATCHES: tokens[:, self._prefix :].mean(1).float()}


@dataclass
class Features:
    """Stored features of a set of pictures.

    Args:
        folder: Where the chunks are.
        size: Rows, one a picture.
        trunk: What the columns are.
        computed: Rows that were computed now.
    """

    folder: Path
    size: int
    trunk: Trunk
    computed: int

    def __post_init__(self) -> None:
        self._chunks: dict[int, npt.NDArray[np.float32]] = {}

    def __len__(self) -> int:
        return self.size

    def rows(self, indices: Sequence[int] | npt.NDArray[Any], *parts: str) -> Tensor:
        """The features (n, width) of the pictures at `indices`: these parts, one after another."""
        places = np.asarray(indices, dtype=np.int64)
        spans = [self.trunk.columns[name] for name in parts]
        found = np.empty((len(places), sum(end - start for start, end in spans)), np.float32)
        numbers = places // CHUNK
        for number in np.unique(numbers):
            mine = numbers == number
            block = self._chunk(int(number))[places[mine] - number * CHUNK]
            found[mine] = np.concatenate([block[:, start:end] for start, end in spans], axis=1)
        return torch.from_numpy(found)

    def _chunk(self, number: int) -> npt.NDArray[np.float32]:
        if number not in self._chunks:
            chunk = _read_chunk(self.folder, number, self.size, self.trunk.width)
            if chunk is None:
                raise UserError(f"{_chunk_path(self.folder, number)} is gone or cut off: start again, it is made anew")
            self._chunks[number] = chunk
        return self._chunks[number]


def features_folder(run: str | Path) -> Path:
    """Where features are kept by default: `features` beside a run, so that runs beside each other share them."""
    return Path(run).absolute().parent / "features"


def folder_of_model(model: str) -> Path:
    """`features_folder` of the run that a model folder, run or weights file is of."""
    path = Path(model)
    folder = resolve_folder(path).absolute() if path.is_dir() else path.absolute()
    return features_folder(folder.parent if folder.name == "model" else folder)


def store_features(
    model: nn.Module,
    images: ImageSet,
    preparation: Preparation,
    cache: Path,
    device: torch.device,
    workers: int = 0,
    start_method: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> Features:
    """The features of `images`, from the disk where they are there, else computed and written; always in fp32.

    Args:
        model: On `device`; put in evaluation mode for the time, and back after it.
        images: At least one picture.
        preparation: Evaluation's.
        cache: A folder in which each set of features has one of its own.
        device: Where to compute.
        workers: Processes that load pictures.
        start_method: How these are started.
        share: (rank, world): of several processes each computes its share of the chunks; they wait for each other
            before they read.

    Raises:
        UserError: A picture cannot be read, the disk is full, or what is stored is not what the model gives.
    """
    mode = model.training
    model.eval()
    try:
        with torch.autocast(device.type, enabled=False):
            return _store(model, images, preparation, cache, device, workers, start_method, share)
    finally:
        model.train(mode)


def _store(
    model: nn.Module,
    images: ImageSet,
    preparation: Preparation,
    cache: Path,
    device: torch.device,
    workers: int,
    start_method: str | None,
    share: tuple[int, int],
) -> Features:
    dataset = EvalSet(images, "multilabel", preparation)  # whatever the labels are: they are not looked at here
    first = torch.stack([dataset[index][0] for index in range(min(EVAL_BATCH, len(images)))]).to(device)
    trunk = Trunk(model, first)
    folder = cache / fingerprint(model, images, preparation, device)
    found = Features(folder, len(images), trunk, 0)
    chunks = range(-(-len(images) // CHUNK))
    missing = [number for number in chunks if _read_chunk(folder, number, len(images), trunk.width) is None]
    if 0 not in missing:
        _compare(found, trunk(first).cpu())
    if missing and share[0] == 0:
        write_json(folder / "features.json", {"pictures": len(images), "columns": trunk.columns, "chunk": CHUNK})
    mine = missing[share[0] :: share[1]]
    batches = [list(range(at, min(at + EVAL_BATCH, len(images)))) for number in mine for at in _starts(number, images)]
    loader: Any = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=min(workers, len(batches)),
        worker_init_fn=single_thread,
        multiprocessing_context=start_method if workers and batches else None,
    )
    rows: list[npt.NDArray[np.float32]] = []
    done = 0
    for pictures, _, _ in loader:
        rows.append(trunk(pictures.to(device)).cpu().numpy())
        if sum(map(len, rows)) == _length(mine[done], len(images)):
            _write_chunk(folder, mine[done], np.concatenate(rows))
            rows.clear()
            done += 1
    found.computed = sum(_length(number, len(images)) for number in mine)
    return found


def _starts(number: int, images: ImageSet) -> range:
    return range(number * CHUNK, min((number + 1) * CHUNK, len(images)), EVAL_BATCH)


def _length(number: int, size: int) -> int:
    return min(CHUNK, size - number * CHUNK)


def _chunk_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npy"


def _write_chunk(folder: Path, number: int, rows: npt.NDArray[np.float32]) -> None:
    write_atomically(_chunk_path(folder, number), lambda file: np.save(file, rows, allow_pickle=False))


def _read_chunk(folder: Path, number: int, size: int, width: int) -> npt.NDArray[np.float32] | None:
    """A chunk, not yet read into memory; None where there is none, or a damaged one."""
    try:
        rows: npt.NDArray[np.float32] = np.load(_chunk_path(folder, number), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return rows if rows.shape == (_length(number, size), width) and rows.dtype == np.float32 else None


def _compare(stored: Features, computed: Tensor) -> None:
    """The name vouches for what is stored; this is a second look, which costs one batch."""
    known = torch.from_numpy(np.array(stored._chunk(0)[: len(computed)]))
    if not torch.allclose(known, computed, rtol=0, atol=_NEAR * float(computed.abs().max())):
        raise UserError(f"the features in {stored.folder} are not what the model gives: remove that folder")


def fingerprint(model: nn.Module, images: ImageSet, preparation: Preparation, device: torch.device) -> str:
    """What names a set of features: a checksum of everything that they depend on, the model's head left out.

    Pictures in files count by path, size and time of change, others by their content.
    """
    head = _classifiers(model)
    arguments = {name: value for name, value in get_model_args(model).items() if name != "num_classes"}
    facts = {
        "format": _FORMAT,
        "versions": [__version__, torch.__version__, timm.__version__],
        "model": [type(model).__qualname__, str(getattr(model, "pretrained_cfg", {}).get("architecture"))],
        "arguments": arguments,
        "preparation": preparation.to_cfg(),
        "precision": "fp32",
        "device": device.type,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items():
        if not name.startswith(head):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for index in range(len(images)):
        digest.update(_stamp(images, index, preparation.in_chans))
    return digest.hexdigest()[:24]


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    """How the names of the weights of a model's classifiers begin."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))


def _stamp(images: ImageSet, index: int, in_chans: int) -> bytes:
    path = images.samples[index].path
    if images.store is not None:
        return hashlib.sha256(images.content(index)).digest()
    if images.root is None:  # in memory
        return hashlib.sha256(images.read(index, in_chans).tobytes()).digest()
    try:
        facts = Path(path).stat()
    except OSError as error:
        raise UnreadableImage(path, error.strerror or str(error)) from error
    return f"{path}\0{facts.st_size} {facts.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
