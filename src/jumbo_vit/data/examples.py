"""One example of a stream: from a mapping, as a dataset or a tar shard gives it, to a picture and its classes."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jumbo_vit.data.find import picture_extensions
from jumbo_vit.data.folders import class_index
from jumbo_vit.data.listing import Task, row_of
from jumbo_vit.data.records import listed
from jumbo_vit.errors import UnreadableImage, UserError, nearest


class Example(NamedTuple):
    """One example: its name for messages, its picture as it came, and the indices of its classes in rising order."""

    name: str
    picture: Any
    labels: tuple[int, ...]

    def content(self) -> bytes | Path | Image.Image | np.ndarray:
        """The picture as `read_image` takes it.

        Raises:
            UnreadableImage: There is none, or it is of another type.
        """
        value = self.picture
        if isinstance(value, Mapping):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if isinstance(value, str | Path) and not Path(value).is_file():
            raise UnreadableImage(self.name, f"there is no file {value}")
        if isinstance(value, bytes | Image.Image | np.ndarray):
            return value
        if isinstance(value, str | Path):
            return Path(value)
        kind = "missing" if value is None else f"a {type(value).__name__}, not bytes, a PIL image or an array"
        raise UnreadableImage(self.name, f"its picture is {kind}")


class Reading:
    """How mappings become examples.

    Args:
        column: The key of the picture; without it in a mapping, the one field of a tar shard that is a picture.
        classes: All names of classes; the label 3 is `classes[3]`.
        task: "multiclass" or "multilabel".
    """

    def __init__(self, column: str, classes: Sequence[str], task: Task) -> None:
        self.column, self.classes, self.task = column, list(classes), task
        self.number = class_index(self.classes)
        self.extensions = picture_extensions()
        # Names such as 1, 2, 3, of which the number 1 may mean the first or the second.
        self.doubtful = any(name.isdecimal() and name != str(place) for place, name in enumerate(self.classes))

    def example(self, raw: Any, place: str) -> tuple[Example, str]:
        """The example, called `place` if it has no name of its own; and why it cannot be used, or "".

        Raises:
            UserError: It is no mapping, or its label is none of the classes.
        """
        if not isinstance(raw, Mapping):
            raise UserError(
                f"the stream yields {type(raw).__name__}, where a mapping of one example's image and label is expected"
            )
        name = _name(raw, raw.get(self.column)) or place
        fields = [key for key in raw if f".{key}" in self.extensions and raw[key] is not None]
        keys = [self.column] if self.column in raw else fields
        if len(keys) != 1:
            shown = listed([str(key) for key in raw], 12)
            return Example(name, None, ()), f"has {len(keys) or 'no'} pictures, only {shown}"
        value, joined = _label(raw)
        numbers = [part for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, int)]
        if self.doubtful and numbers:
            raise UserError(
                f"{name}: the label {numbers[0]} may be a number or a name, for the classes are "
                f"{listed(self.classes)}: give labels as text"
            )
        row = row_of(name, "", value, joined, self.task, self.classes)
        unknown = [label for label in row.labels if label not in self.number]
        if unknown:
            raise UserError(
                f"{name}: the label {unknown[0]} is none of the classes{nearest(unknown[0], self.classes)}; they are "
                f"{listed(self.classes)}: correct it, or the classes"
            )
        labels = tuple(sorted({self.number[label] for label in row.labels}))
        return Example(name, raw[keys[0]], labels), row.fault


def checksum(examples: Sequence[Any]) -> int:
    """Of the examples' content as far as it is known without decoding, in order."""
    total = 0
    for raw in examples:
        total = zlib.crc32(_bytes(raw), total)
    return total


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        return b"".join(str(key).encode("utf-8", "replace") + _bytes(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return b",".join(_bytes(part) for part in value)
    if isinstance(value, Image.Image):  # its pixels may not be decoded yet
        return f"{value.mode}{value.size}".encode()
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    # Of other objects the text may name a place in memory.
    return str(value).encode("utf-8", "replace") if isinstance(value, bool | int | float | str) else b""


def _name(raw: Mapping[Any, Any], picture: Any) -> str:
    """Its key in a shard or its path, else ""."""
    path = picture.get("path") if isinstance(picture, Mapping) else picture
    name = str(path) if isinstance(path, str | Path) else ""
    if isinstance(raw.get("__key__"), str):
        name = f"{Path(str(raw.get('__url__', 'shard'))).name}:{raw['__key__']}"
    # As everywhere, a name that is not UTF-8 is shown escaped.
    return name.encode("utf-8", "backslashreplace").decode()


def _label(raw: Mapping[Any, Any]) -> tuple[Any, bool]:
    """The label as it came, None without one, and whether `|` joins several."""
    inner = raw["json"] if isinstance(raw.get("json"), Mapping) and raw.get("cls") is None else raw
    key = next((key for key in ("label", "labels", "cls", "txt") if inner.get(key) is not None), None)
    value: Any = None if key is None else inner[key]
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else value), key in ("labels", "txt")
