"""Fixed views of training pictures, and what teachers said of them beforehand: a folder that `jumbo-vit teach` writes.

A view is a picture as augmentation makes it from a seed, the picture's place in the folder's list, and the view's
number. It is made again in training, and only the teachers' logits are stored: view v of picture p is what a run of the
folder's seed sees of it in epoch v. With each view goes a mark, the means of its quarters, so that another file,
another augmentation or another library behind the same names does not pass for it.

    taught.json              what has to be the same in training: preparation, augmentation, classes; and the teachers
    pictures.json            the names of the pictures, in order, and a checksum of each one's file
    view-000/part-00000.npy  (pictures, T*C + M) in fp16: logits of each teacher less the largest of its row; the mark
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.records import ImageSet, listed
from jumbo_vit.data.sampler import Draw
from jumbo_vit.errors import UserError

RECORD, PICTURES = "taught.json", "pictures.json"
FORMAT = 1
# In the units of normalised pixels. Rounding to fp16 changes a mark by less than 0.002, another crop by much more.
_TOLERANCE = 0.05
_MOST_OPEN = 64

# The flags that change what has to be the same.
_FLAGS = {
    "input_size": "--img-size and --in-chans",
    "mean": "--model, whose mean it is",
    "std": "--model, whose std it is",
    "aa": "--aa",
    "color_jitter": "--color-jitter",
    "hflip": "--hflip",
    "scale": "--scale",
    "reprob": "--reprob",
}


def is_taught(path: str | Path) -> bool:
    """Whether this is a folder that `jumbo-vit teach` writes."""
    return (Path(path).expanduser() / RECORD).is_file()


def conditions(labels: list[str], preparation: Preparation, augment: Augmentation) -> dict[str, Any]:
    """What must not differ between the views that were taught and those that are trained on, in JSON's types."""
    how = preparation.to_cfg()
    fields: dict[str, Any] = {name: how[name] for name in ("input_size", "mean", "std")}
    fields |= {name: getattr(augment, name) for name in augment.__dataclass_fields__}
    found: dict[str, Any] = json.loads(json.dumps(fields | {"classes": labels}))
    return found


def part_path(folder: Path, view: int, part: int) -> Path:
    """The file of one part of one view."""
    return folder / f"view-{view:03}" / f"part-{part:05}.npy"


def content_checksum(images: ImageSet, index: int) -> int:
    """Of a picture's file."""
    return zlib.crc32(images.content(index))


def mark(view: Tensor) -> Tensor:
    """The means of the quarters of a view (channels, H, W): (M,), which is 4 times its channels."""
    return F.adaptive_avg_pool2d(view.float(), 2).flatten()


@dataclass
class Taught:
    """An opened folder; parts are mapped into memory as they are needed, in each process for itself.

    Args:
        folder: Where it is.
        record: What is in its `taught.json`.
        names: Of its pictures, in order.
        checksums: Of their files, in the same order.
        notes: Sentences for the log.
    """

    folder: Path
    record: dict[str, Any]
    names: list[str]
    checksums: list[int]
    notes: list[str] = field(default_factory=list)
    _open: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # A mapped file would be copied whole to another process.
        return self.__dict__ | {"_open": {}}

    @property
    def views(self) -> int:
        """N."""
        return int(self.record["views"])

    @property
    def seed(self) -> int:
        """The seed of the augmentation."""
        return int(self.record["seed"])

    @property
    def teachers(self) -> list[dict[str, Any]]:
        """Name, source and checksum of each."""
        teachers: list[dict[str, Any]] = self.record["teachers"]
        return teachers

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the logits."""
        classes: list[str] = self.record["conditions"]["classes"]
        return classes

    @property
    def parts(self) -> int:
        """Files of one view."""
        return -(-len(self.names) // int(self.record["rows"]))

    @property
    def logits(self) -> int:
        """Numbers of all teachers for one view, T*C; its mark comes after them."""
        return len(self.teachers) * len(self.classes)

    @property
    def width(self) -> int:
        """Numbers that are stored of one view, T*C + M."""
        return self.logits + 4 * int(self.record["conditions"]["input_size"][0])

    def missing(self) -> list[tuple[int, int]]:
        """The (view, part) of files that are not there yet."""
        every = [(view, part) for view in range(self.views) for part in range(self.parts)]
        return [(view, part) for view, part in every if not part_path(self.folder, view, part).is_file()]

    def members(self, part: int) -> range:
        """The places of the pictures of a part."""
        rows = int(self.record["rows"])
        return range(part * rows, min((part + 1) * rows, len(self.names)))

    def row(self, view: int, place: int) -> tuple[Tensor, Tensor]:
        """Logits (T*C,) and mark (M,) of a view.

        Raises:
            UserError: The file is damaged.
        """
        part, place = divmod(place, int(self.record["rows"]))
        row = torch.from_numpy(self._part(view, part)[place].astype(np.float32))
        return row[: self.logits], row[self.logits :]

    def _part(self, view: int, part: int) -> np.ndarray:
        if (view, part) not in self._open:
            path = part_path(self.folder, view, part)
            shape = (len(self.members(part)), self.width)
            try:
                content: np.ndarray = np.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise UserError(f"{path} is cut off or gone: run the same `jumbo-vit teach` again ({error})") from error
            if content.shape != shape or content.dtype != np.float16:
                raise UserError(
                    f"{path} holds {content.shape} of {content.dtype}, not {shape} of float16: remove it, and run the "
                    "same `jumbo-vit teach` again"
                )
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[view, part] = content
        return self._open[view, part]


def read_taught(folder: Path) -> Taught:
    """A taught folder, whole or not.

    Raises:
        UserError: Its lists are damaged, or of a later version.
    """
    try:
        record, lists = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (RECORD, PICTURES))
        wanted = {"jumbo_vit_taught", "views", "seed", "rows", "teachers", "conditions", "versions"}
        if missing := sorted(wanted - record.keys()):
            raise ValueError(f"it lacks {listed(missing)}")
        names, checksums = lists["names"], lists["checksums"]
        if len(names) != len(checksums):
            raise ValueError(f"{PICTURES} is cut off")
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{folder} is damaged, or not written by `jumbo-vit teach`: {error}") from error
    if record["jumbo_vit_taught"] > FORMAT:
        raise UserError(f"{folder} is of format {record['jumbo_vit_taught']}; this version reads up to {FORMAT}")
    return Taught(folder, record, names, checksums)


def open_taught(folder: Path, labels: list[str], preparation: Preparation, augment: Augmentation) -> Taught:
    """A whole taught folder, for training in the same way.

    Raises:
        UserError: It is damaged or unfinished, or was made with other classes, sizes or augmentation; what differs is
            named.
    """
    taught = read_taught(folder)
    if missing := taught.missing():
        raise UserError(
            f"{folder} is unfinished: {len(missing)} of its {taught.views * taught.parts} parts are not there yet; run "
            "the same `jumbo-vit teach` again, and it goes on"
        )
    then, now = taught.record["conditions"], conditions(labels, preparation, augment)
    if differing := list(differences(then, now)):
        raise UserError(
            f"{folder} was taught in another way: {'; '.join(differing)}. Train with the options that it was taught "
            "with, or run `jumbo-vit teach` with these"
        )
    return taught


def differences(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs between a folder's conditions and others, in words."""
    if then.get("classes") != now["classes"]:
        yield f"classes were {listed(then.get('classes') or [])}, are {listed(now['classes'])}"
    for name, value in now.items():
        if name != "classes" and then.get(name) != value:
            flag = f" ({_FLAGS[name]})" if name in _FLAGS else ""
            yield f"{name} was {then.get(name)!r}, is {value!r}{flag}"


class TaughtSet(TrainSet):
    """Training pictures in their fixed views, one after the other from epoch to epoch, with what was said of them.

    A target is the label and then the logits of each teacher, (1 + T*C,).

    Raises:
        UserError: Pictures have no views in the folder.
    """

    def __init__(
        self, images: ImageSet, task: str, preparation: Preparation, augment: Augmentation, taught: Taught
    ) -> None:
        super().__init__(images, task, preparation, augment, taught.seed)
        self.taught = taught
        known = {name: place for place, name in enumerate(taught.names)}
        names = [images.name(index) for index in range(len(images))]
        strange = [name for name in names if name not in known]
        if strange:
            raise UserError(
                f"{taught.folder} knows nothing of {len(strange)} of the {len(names)} training pictures, first "
                f"{strange[0]}: it was taught with other data; run `jumbo-vit teach` with these"
            )
        self.places = [known[name] for name in names]
        self._compared: set[int] = set()

    def seen(self, draw: Draw) -> Draw:
        """The view: its number in place of the epoch, the picture's place in the folder in place of that in the set."""
        return Draw((draw.epoch + draw.again) % self.taught.views, self.places[draw.sample])

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """View (C, H, W), label and logits, and the weight 1 of a real sample or 0 of a filler.

        Raises:
            UserError: The view is not the one that was taught.
        """
        number, place = self.seen(draw)[:2]
        self._compare(draw.sample, place)
        view, label, weight = super().__getitem__(draw)
        logits, marked = self.taught.row(number, place)
        # Written so that a mark that is no number is refused too.
        if not bool(((mark(view) - marked).abs() <= _TOLERANCE).all()):
            versions = ", ".join(f"{name} {version}" for name, version in self.taught.record["versions"].items())
            raise UserError(
                f"{self.taught.names[place]} in view {number} is not the picture that {self.taught.folder} was taught "
                f"with: its file has changed since, or a library (then {versions}); run "
                "`jumbo-vit teach` again, into another folder"
            )
        return view, torch.cat([label[None].float(), logits]), weight

    def _compare(self, sample: int, place: int) -> None:
        """Once for each picture in each process: its file is the one that was taught."""
        if place in self._compared:
            return
        if content_checksum(self.images, sample) != self.taught.checksums[place]:
            raise UserError(
                f"{self.taught.names[place]} has changed since {self.taught.folder} was taught: put it back, or run "
                "`jumbo-vit teach` again, into another folder"
            )
        self._compared.add(place)
