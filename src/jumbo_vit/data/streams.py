"""Examples that can be read only one after another, such as a Hugging Face `IterableDataset`, as training pictures.

What is unusual: the shuffle can be taken up again exactly. A window of examples is read, then drawn from in an order
that is a function of the seed and the window's number. The state is that of the source at the window's start and the
place in the window; to go on, the window is read again, and its checksum tells whether the source gave the same.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from jumbo_vit.data.examples import Example, Reading, checksum
from jumbo_vit.data.folders import composed
from jumbo_vit.data.images import read_image
from jumbo_vit.data.listing import Task
from jumbo_vit.data.pipeline import Augmentation, Preparation, Sized, target_tensor
from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.data.sizes import SizeSchedule
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.seeds import mix_seed, seed_everything

NAMED = 100
"""So many of the examples that cannot be used are named; all are counted."""
HOPELESS = 1000
"""So many examples, none of them usable, end the run before the stream's end does."""


class StreamBatches(EpochBatches):
    """Epochs of `steps` updates, all of them full, whose draws are places in the epoch.

    Args:
        steps: Updates in an epoch.
        batch_size: Samples in one forward pass.
        seed: The run's seed.
        accumulate: Forward passes per update.
        sizes: The size of each update, or None.
    """

    def __init__(
        self, steps: int, batch_size: int, seed: int, accumulate: int = 1, sizes: SizeSchedule | None = None
    ) -> None:
        samples = steps * batch_size * accumulate
        super().__init__(samples, batch_size, seed, accumulate=accumulate, shuffle=False, sizes=sizes)

    def __iter__(self) -> Iterator[list[Draw]]:
        for first in range(self.start * self.samples_per_update, self.size, self.batch_size):
            size = self.size_of(first // self.samples_per_update)
            yield [Draw(self.epoch, place, size=size) for place in range(first, first + self.batch_size)]


class Stream:
    """Examples of an iterable, shuffled in windows, pass after pass, with a state.

    Args:
        source: Yields mappings with a picture (`image`: the bytes of a file, {"bytes", "path"}, a path, a PIL image, or
            an array as `read_image` takes it) and a label (`label`, or `labels` for several: names or numbers of
            classes); fields of tar shards (`jpg`, `cls`, ...) are understood too. It has `state_dict()` and
            `load_state_dict()`, and `set_epoch(pass)` if its order depends on the pass. A pass begins where it stands
            when given; one of Hugging Face always at its beginning.
        classes: All names of classes; the label 3 is `classes[3]`.
        task: "multiclass" or "multilabel".
        seed: The run's seed.
        window: Examples among which one is drawn; 1 keeps the order of the source.

    Attributes:
        passes: How often the source was read to its end.
        used: Examples that were trained on.
        left_out: Examples that could not be used, each counted as often as it came.
        named: (name, reason) of the first of these.
        counts: Examples used, by class.

    Raises:
        UserError: The source has no state, or one that does not lead back to the same examples.
    """

    def __init__(self, source: Any, classes: Sequence[str], task: Task, seed: int, window: int) -> None:
        if not all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict", "__iter__")):
            raise UserError(
                f"a stream needs state_dict() and load_state_dict(), so that a run can go on exactly, and "
                f"{type(source).__name__} has not: give one that has them, such as a Hugging Face IterableDataset "
                "(Dataset.to_iterable_dataset())"
            )
        self.source, column = undecoded(source)
        self.classes, self.task, self.seed, self.window = list(classes), task, seed, window
        self._reading = Reading(column, classes, task)
        self.passes = self.used = self.left_out = 0
        self.named: list[tuple[str, str]] = []
        self.counts = [0] * len(self.classes)
        self._used_before = 0  # in the passes before this one
        self._origin = _plain(self.source.state_dict())
        self._iterator: Iterator[Any] | None = None
        self._start: Any = None  # the source's state before the window, None for the beginning of a pass
        self._first = 0  # the window's first example, counted in the pass
        self._examples: list[Any] = []
        self._order: list[int] = []
        self._place = 0
        self._checksum: int | None = None
        self._loaded: dict[str, Any] | None = None

    def take(self) -> Example:
        """The next example whose label can be used; its picture may still prove unreadable (`leave_out`).

        Raises:
            UserError: The stream is empty, breaks off, holds nothing usable, or has a label that is no class.
        """
        if self._loaded is not None:
            self._return()
        while True:
            if self._place == len(self._examples):
                self._read_window()
            chosen = self._order[self._place]
            self._place += 1
            place = f"example {self._first + chosen + 1} of pass {self.passes + 1}"
            example, fault = self._reading.example(self._examples[chosen], place)
            if not fault:
                return example
            self.leave_out(example.name, fault)

    def leave_out(self, name: str, reason: str) -> None:
        """Count an example that cannot be used.

        Raises:
            UserError: None of the first examples can be.
        """
        self.left_out += 1
        if len(self.named) < NAMED and (name, reason) not in self.named:
            self.named.append((name, reason))
        if not self.used and self.left_out >= HOPELESS:
            self._refuse_hopeless(f"the first {self.left_out} examples")

    def count(self, labels: tuple[int, ...]) -> None:
        """Count an example as trained on."""
        self.used += 1
        for label in labels:
            self.counts[label] += 1

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, in plain values."""
        if self._loaded is not None:
            return self._loaded
        return {
            "passes": self.passes,
            "origin": self._origin,
            "start": self._start,
            "first": self._first,
            "place": self._place,
            "checksum": self._checksum,
            "used": self.used,
            "used_before": self._used_before,
            "left_out": self.left_out,
            "named": [list(pair) for pair in self.named],
            "counts": list(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was taken; the source is asked when the next example is.

        Raises:
            ValueError, LookupError, TypeError: It is none that `state_dict` gave.
        """
        numbers = [state[name] for name in ("passes", "first", "place", "used", "used_before", "left_out")]
        numbers += [*state["counts"], state["checksum"] or 0]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a count of the stream is no number")
        if len(state["counts"]) != len(self.classes):
            raise ValueError("the stream has another number of classes")
        self.passes, self._origin, self._start = state["passes"], state["origin"], state["start"]
        self._first, self._place, self._checksum = state["first"], state["place"], state["checksum"]
        self.used, self._used_before, self.left_out = state["used"], state["used_before"], state["left_out"]
        self.named = [(str(name), str(reason)) for name, reason in state["named"]]
        self.counts = list(state["counts"])
        self._loaded = state

    def _return(self) -> None:
        """Read the window of the loaded state again."""
        self._loaded = None
        if self._checksum is None:
            return
        before, place = self._checksum, self._place
        self._open(self._start)
        self._take_window()
        if self._checksum != before or place > len(self._examples):
            raise UserError(
                "the stream does not come back to the examples at which the run was stopped: it holds others now, or "
                "its load_state_dict() is not exact; put them back, or start a new run with --init-from"
            )
        self._place = place

    def _open(self, start: Any) -> None:
        """Let the source begin: where `start` says, or with None at the beginning of the pass."""
        with _told("the stream does not begin where it should"):
            if callable(getattr(self.source, "set_epoch", None)):
                self.source.set_epoch(self.passes)
            self.source.load_state_dict(self._origin if start is None else start)
            self._iterator = iter(self.source)
        self._start = start

    def _read_window(self) -> None:
        if self._iterator is None:
            self._open(None)
            self._first = 0
        else:
            self._start = _plain(self.source.state_dict())
            self._first += len(self._examples)
        self._take_window()
        if not self._examples:
            self._end_pass()
            self._read_window()

    def _take_window(self) -> None:
        assert self._iterator is not None
        with _told(f"the stream broke off after {self._first} examples or more"):
            self._examples = list(islice(self._iterator, self.window))
        rng = np.random.default_rng(mix_seed(self.seed, "window", self.passes, self._first))
        self._order = rng.permutation(len(self._examples)).tolist()
        self._place = 0
        self._checksum = checksum(self._examples)

    def _end_pass(self) -> None:
        if self._first == 0:
            again = f" when it is started again after {self.passes} passes" if self.passes else ""
            raise UserError(f"the stream gives no example{again}: training needs some")
        if self.used == self._used_before:
            self._refuse_hopeless(f"the {self._first} examples of pass {self.passes + 1}")
        self.passes += 1
        self._used_before = self.used
        self._iterator = None

    def _refuse_hopeless(self, which: str) -> None:
        name, reason = self.named[0]
        raise UserError(f"none of {which} of the stream can be used, such as {name}: {reason}; correct the data")


class StreamSet:
    """Augmented pictures of a stream; each place in an epoch seeds its own randomness."""

    def __init__(
        self, stream: Stream, preparation: Preparation, augment: Augmentation, sized: Sized | None = None
    ) -> None:
        self.stream, self.in_chans = stream, preparation.in_chans
        self.usual = augment.transform(preparation), augment.enough(preparation)
        self.sized: Sized = sized or {}

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """The next picture that can be read (C, H, W), its target, and the weight 1; the draw only seeds."""
        stream = self.stream
        transform, enough = self.sized.get(draw.size, self.usual)
        while True:
            example = stream.take()
            try:
                picture = read_image(example.content(), self.in_chans, example.name, enough)
                break
            except UnreadableImage as error:
                stream.leave_out(example.name, error.reason)
        stream.count(example.labels)
        seed_everything(mix_seed(stream.seed, "augment", *draw.position))
        target = target_tensor(example.labels, len(stream.classes), stream.task)
        return transform(picture), target, torch.tensor(1.0)


class StreamLoader:
    """A loader over `batches` that goes on where the stream stands, and never reads ahead of the update under way."""

    def __init__(self, pictures: StreamSet, batches: StreamBatches) -> None:
        self.pictures, self.batches = pictures, batches

    def __iter__(self) -> Iterator[Any]:
        for draws in self.batches:
            yield default_collate([self.pictures[draw] for draw in draws])


def named_classes(source: Any) -> list[str]:
    """The names of the classes that a Hugging Face dataset states, none of anything else."""
    features = getattr(source, "features", None)
    for key in ("label", "labels"):
        feature = features.get(key) if isinstance(features, dict) else None
        inner: Any = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
        if names := getattr(inner, "names", None):
            return [composed(str(name)) for name in names]
    return []


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever goes wrong in a source, in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: network, decoders, the user's own functions
        raise UserError(f"{what}: {' '.join(str(error).split())[:200] or type(error).__name__}") from error


def undecoded(source: Any) -> tuple[Any, str]:
    """The source, one of Hugging Face from its beginning and without decoding; and the name of its column of pictures.

    Raises:
        UserError: It is shuffled in a way that its state does not hold.
    """
    library = sys.modules.get("datasets")
    if library is None or not isinstance(source, library.IterableDataset):
        return source, "image"
    if _has_buffer(source._ex_iterable):
        raise UserError(
            "the dataset is shuffled by .shuffle(), whose buffer is not in its state, so that no run could go on "
            "exactly: leave .shuffle() out; --shuffle-window shuffles here"
        )
    features = source.features or {}
    pictures = [name for name in features if isinstance(features[name], library.Image)]
    column = pictures[0] if len(pictures) == 1 and "image" not in features else "image"
    source = source.with_format(None)  # a new one, which does not stand where this one was read to
    # Undecoded, a damaged picture is one example that is left out; decoded, it would break off the whole stream.
    return (source.decode(False) if pictures else source), column


def _has_buffer(part: Any) -> bool:
    if type(part).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or [])]
    return any(_has_buffer(one) for one in inner if one is not None)


def _plain(state: Any) -> Any:
    """A copy of the state. Raises `UserError` where it holds more than plain values, which a checkpoint may not."""
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, dict) and all(type(key) in (str, int) for key in state):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state] if isinstance(state, list) else tuple(_plain(v) for v in state)
    raise UserError(
        f"the stream's state_dict() holds a {type(state).__name__}, which a checkpoint cannot hold: it may have "
        " numbers, text, None, lists and dicts of these"
    )
