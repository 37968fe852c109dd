"""Training on a stream: which options that allows, and the run that reads it."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jumbo_vit.data.folders import composed
from jumbo_vit.data.records import ImageSet, Splits, listed
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.sets import open_held_out
from jumbo_vit.data.stream_files import FileStream, open_files
from jumbo_vit.data.streams import Stream, StreamBatches, StreamLoader, StreamSet, named_classes
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.build import augmentation
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.schedules import shapes
from jumbo_vit.tasks.state import Progress, restoring

GIVEN = "stream"
"""What a run's options call data that are an object in Python."""


def stream_options(config: TrainConfig, stream: Any, classes: Sequence[str] | None) -> TrainConfig:
    """The options of a new run on `stream`, or those of any other run, unchanged.

    Args:
        config: As the user gave it.
        stream: An iterable, or None.
        classes: The names of its classes, or None for those that it states.

    Raises:
        UserError: An option that a stream does not allow, or one that it needs, or one that goes with a stream alone.
    """
    if stream is not None and (config.data != "digits" or config.streaming):
        raise UserError(f"the data are either a stream or {config.data}: leave out one of stream and data")
    if stream is None and not config.streaming:
        usual = TrainConfig()
        names = ("val_data", "steps_per_epoch", "shuffle_window", "classes")
        odd = [name for name in names if getattr(config, name) != getattr(usual, name)] + ["classes"] * bool(classes)
        if odd:
            raise UserError(f"{_flag(odd[0])} is for a run on a stream: add --streaming, or leave it out")
        return config
    _refuse(config)
    if stream is None and config.data == "digits":
        raise UserError("--streaming reads files, not the digits: give tar shards, parquet or a URL by --data")
    data = GIVEN
    if stream is None:
        data = config.data if "://" in config.data else _absolute(config.data)
    stated = named_classes(stream) if data == GIVEN else open_files(data, 0).classes
    classes = _checked(classes or config.classes or stated)
    if stated and classes != _checked(stated):
        raise UserError(
            f"the data name their classes {listed(stated)}, in this order, and not {listed(classes)}: "
            "leave out --classes"
        )
    return dataclasses.replace(
        config,
        streaming=True,
        data=data,
        val_data=config.val_data if config.val_data == "digits" else _absolute(config.val_data or ""),
        classes=classes,
    )


def the_same_stream(saved: TrainConfig, stream: Any, classes: Sequence[str] | None) -> None:
    """Refuse to go on with a run without its stream, or with one that it never had.

    Raises:
        UserError: It is so.
    """
    if stream is None and saved.streaming and saved.data == GIVEN:
        raise UserError("this run trains on a stream of Python's: go on with it by train(config, stream=...)")
    if stream is not None and not (saved.streaming and saved.data == GIVEN):
        raise UserError(f"the run to go on with trains on {saved.data}, not on a stream: leave out stream")
    if classes is not None and _checked(classes) != saved.classes:
        raise UserError(f"the run to go on with has the classes {saved.classes}, not {list(classes)}: leave them out")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _refuse(config: TrainConfig) -> None:
    missing = next((name for name in ("steps_per_epoch", "val_data") if getattr(config, name) is None), None)
    if missing is not None:
        what = {"steps_per_epoch": "says how many updates an epoch has", "val_data": "names the held-out pictures"}
        raise UserError(f"training on a stream needs {_flag(missing)}, which {what[missing]}")
    usual = TrainConfig()
    reasons = {
        "folds": "folds need a list of all pictures",
        "fold": "folds need a list of all pictures",
        "seeds": "several seeds need it several times",
        "balance": "the sizes of its classes are not known",
        "val_fraction": "its held-out part is --val-data",
        "split_seed": "its held-out part is --val-data",
        "aug_repeats": "repeats need a list of all pictures",
        "naflex_loader": "sequences are cut from a list of pictures",
    }
    odd = next((name for name in reasons if getattr(config, name) != getattr(usual, name)), None)
    if odd is not None:
        raise UserError(f"a stream allows no {_flag(odd)}: {reasons[odd]}")
    _refuse_processes(max(config.devices * config.nodes, int(os.environ.get("WORLD_SIZE", "1"))))


def _refuse_processes(world: int) -> None:
    if world > 1:
        raise UserError(f"a stream is read by one process, not {world}: set --devices 1 and --nodes 1")


def _checked(classes: Sequence[str]) -> list[str]:
    names = [] if isinstance(classes, str) else [composed(str(name)) for name in classes]
    if len(names) < 2 or "" in names or len(set(names)) < len(names):
        raise UserError(
            "training on a stream needs the names of all classes, two or more and each once, in the order of their "
            f"numbers: --classes cat dog, or classes=[...]; here they are {names or 'none'}"
        )
    return names


class StreamRun(Run):
    """A run whose training pictures come from a stream.

    Args:
        config: Complete options (`stream_options`, `with_defaults`).
        source: What `Stream` reads, or None for what `config.data` names.
        content: The state to go on from, or None.
        progress: Where that state stands, or None.
    """

    def __init__(
        self, config: TrainConfig, source: Any, content: dict[str, Any] | None = None, progress: Progress | None = None
    ) -> None:
        super().__init__(config, content, progress)
        source = open_files(config.data, config.seed) if source is None else source
        self.stream = Stream(source, config.classes or [], config.task, config.seed, config.shuffle_window)

    def _open(self) -> Splits:
        config = self.config
        val = open_held_out(config.val_data or "", config.task, config.classes or [])
        train = ImageSet(list(config.classes or []), [])
        if isinstance(source := self.stream.source, FileStream):
            train.notes.append(
                f"The stream has {len(source.files)} files, first {source.files[0]}, which each pass takes in another "
                "order."
            )
        return Splits(train, val, str(config.val_data))

    def _order(self) -> tuple[EpochBatches, Any]:
        config = self.config
        _refuse_processes(self.fabric.world_size)
        if self.content is not None:
            with restoring(self.out):
                self.stream.load_state_dict(self.content["stream"])
        augment = augmentation(config)
        sizes, sized, _ = shapes(config, self.model, self.preparation, augment)
        batches = StreamBatches(
            config.steps_per_epoch or 1, config.batch_size or 1, config.seed, config.grad_accum_steps, sizes
        )
        return batches, StreamLoader(StreamSet(self.stream, self.preparation, augment, sized), batches)

    def _more_state(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def _facts(self) -> dict[str, Any]:
        window = self.config.shuffle_window
        return super()._facts() | {"training": f"a stream, shuffled in windows of {window} examples,"}

    def _more_summary(self) -> dict[str, Any]:
        """What the stream gave; an example that came in several passes counts in each."""
        stream, val = self.stream, self.splits.val
        skipped = [{"path": name, "reason": reason} for name, reason in stream.named]
        note = f"The stream gave {stream.used} examples; it was read to its end {stream.passes} times"
        note += f", and {stream.left_out} examples could not be used" if stream.left_out else ""
        note += f", first {stream.named[0][0]}: {stream.named[0][1]}." if stream.named else "."
        print(f"  {note}", flush=True)
        return {
            "val_data": self.config.val_data,
            "images": {"train": stream.used, "val": len(val), "held_out": self.splits.held_out},
            "skipped": [*skipped, *(dataclasses.asdict(entry) for entry in val.skipped)],
            "notes": [note, *self.splits.train.notes, *val.notes],
            "class_counts": dict(zip(stream.classes, stream.counts, strict=True)),
            "stream": {
                "used": stream.used,
                "passes": stream.passes,
                "left_out": stream.left_out,
                "window": self.config.shuffle_window,
            },
        }
