"""What a set of pictures holds and what is wrong with it, found in one pass over the files that training would use."""

import hashlib
import io
import statistics
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from jumbo_vit.data.images import BACKGROUND
from jumbo_vit.data.records import ImageSet, Splits, check_images, listed
from jumbo_vit.errors import UnreadableImage

IMBALANCE = 10
"""Above this ratio of the largest class to the smallest a warning is given."""

SHEET_CLASSES, SHEET_PICTURES = 12, 6
_CELL, _TEXT, _DPI = 144, 20, 100  # a picture's square and a line of text in pixels


class Facts(NamedTuple):
    """Of one file: `size` (width, height) upright, format and mode as stored, SHA-256 of its bytes."""

    size: tuple[int, int]
    format: str
    mode: str
    sha256: str


@dataclass
class Witness(ImageSet):
    """A set that remembers the `Facts` of what is read from it, by path, so that one reading serves both purposes."""

    source: ImageSet = field(default_factory=lambda: ImageSet([], []))
    facts: dict[str, Facts] = field(default_factory=dict)
    done: Callable[[], Any] = lambda: None

    def read(self, index: int, in_chans: int = 3, enough: int | None = None) -> Image.Image:
        try:
            image = self.source.read(index, in_chans)
            self.facts[self.samples[index].path] = _facts(self.source, index, image)
            return image
        finally:
            self.done()

    def subset(self, indices: Iterable[int]) -> Self:
        chosen = list(indices)
        return replace(super().subset(chosen), source=self.source.subset(chosen))

    def plain(self) -> ImageSet:
        """What is left, as an ordinary set."""
        return replace(self.source, skipped=self.skipped)


def _facts(source: ImageSet, index: int, image: Image.Image) -> Facts:
    if source.root is None:  # the built-in digits
        return Facts(image.size, "in memory", image.mode, hashlib.sha256(image.tobytes()).hexdigest())
    try:
        content = source.content(index)
        with Image.open(io.BytesIO(content)) as opened:
            return Facts(image.size, opened.format or "unknown", opened.mode, hashlib.sha256(content).hexdigest())
    except OSError as error:
        raise UnreadableImage(source.samples[index].path, "changed while it was read") from error


def inspect(splits: Splits, workers: int | None = None) -> tuple[Splits, dict[str, Any]]:
    """The pictures that training would use, and the report on them, which `write_json` can write.

    Raises:
        UserError: Training would refuse these pictures.
    """
    from tqdm import tqdm

    parts = {"train": splits.train, "val": splits.val}
    total = sum(map(len, parts.values()))
    lock = threading.Lock()
    checked: dict[str, Witness] = {}
    with tqdm(total=total, desc="checking pictures", unit=" pictures", leave=False, disable=None) as bar:

        def done() -> None:
            with lock:
                bar.update()

        for name, part in parts.items():
            seen = Witness(part.classes, part.samples, part.skipped, part.notes, part.root, source=part, done=done)
            good = check_images(seen, progress=False, workers=workers, require_all_classes=name == "train")
            assert isinstance(good, Witness)
            checked[name] = good
    kept = replace(splits, train=checked["train"].plain(), val=checked["val"].plain())
    return kept, _report(splits, checked)


def _report(splits: Splits, checked: dict[str, Witness]) -> dict[str, Any]:
    scanned = {"train": splits.train, "val": splits.val}
    facts = [part.facts[sample.path] for part in checked.values() for sample in part.samples]
    counts = checked["train"].class_counts()
    present = [count for count in counts if count]
    ratio = max(present) / min(present) if present else None
    duplicates = _duplicates(checked)
    skipped, unreadable = [], []
    for name, part in checked.items():
        known = len(scanned[name].skipped)
        skipped += [{"split": name, **asdict(entry)} for entry in part.skipped[:known]]
        unreadable += [{"split": name, **asdict(entry)} for entry in part.skipped[known:]]
    return {
        "classes": checked["train"].classes,
        "held_out": splits.held_out,
        "splits": {
            name: {
                "pictures": len(part),
                "per_class": dict(zip(part.classes, part.class_counts(), strict=True)),
            }
            for name, part in checked.items()
        },
        "width": _range([fact.size[0] for fact in facts]),
        "height": _range([fact.size[1] for fact in facts]),
        "sizes": [
            {"width": size[0], "height": size[1], "count": count}
            for size, count in _most_frequent([fact.size for fact in facts])
        ],
        "formats": dict(_most_frequent([fact.format for fact in facts])),
        "modes": dict(_most_frequent([fact.mode for fact in facts])),
        "unreadable": unreadable,
        "skipped": skipped,
        "duplicates": duplicates,
        "imbalance": ratio,
        "warnings": _warnings(checked, ratio, duplicates),
        "notes": [note for part in checked.values() for note in part.notes],
    }


def _range(values: list[int]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _most_frequent(values: list[Any]) -> list[tuple[Any, int]]:
    """Most frequent first, ties in the order of the values, so that two runs write the same."""
    return sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))


def _duplicates(checked: dict[str, Witness]) -> list[dict[str, Any]]:
    groups: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for split, part in checked.items():
        for index, sample in enumerate(part.samples):
            found = (part.name(index), split, sample.labels)
            groups.setdefault(part.facts[sample.path].sha256, []).append(found)
    classes = checked["train"].classes
    return [
        {
            "sha256": digest,
            "across_splits": len({split for _, split, _ in group}) > 1,
            "different_labels": len({labels for _, _, labels in group}) > 1,
            "files": [
                {"path": path, "split": split, "labels": [classes[label] for label in labels]}
                for path, split, labels in group
            ],
        }
        for digest, group in groups.items()
        if len(group) > 1
    ]


def _warnings(checked: dict[str, Witness], ratio: float | None, duplicates: list[dict[str, Any]]) -> list[str]:
    found = []
    train, val = checked["train"], checked["val"]
    counts = train.class_counts()
    if ratio is not None and ratio > IMBALANCE:
        largest, smallest = max(counts), min(count for count in counts if count)
        most, least = (train.classes[counts.index(count)] for count in (largest, smallest))
        found.append(
            f"The largest class, {most}, has {largest} training pictures, the smallest, {least}, {smallest}: "
            f"{ratio:.1f} times as many."
        )
    for part, words in ((train, "Without a training picture"), (val, "Without a held-out picture")):
        absent = [name for name, count in zip(part.classes, part.class_counts(), strict=True) if not count]
        if absent:
            found.append(f"{words}: {listed(absent)}.")
    across = sum(group["across_splits"] for group in duplicates)
    if across:
        found.append(f"Pictures both in training and held out: {across}; the score will be too good.")
    different = sum(group["different_labels"] for group in duplicates)
    if different:
        found.append(f"Pictures that are there more than once, with different labels: {different}.")
    return found


def contact_sheet(images: ImageSet) -> bytes:
    """A PNG with a row of pictures, spread over the class, for each of the first classes, and their names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(number, name) for number, name in enumerate(images.classes)][:SHEET_CLASSES]
    counts = images.class_counts()
    wide, high = SHEET_PICTURES * (_CELL + 4), len(rows) * (_CELL + 2 * _TEXT) + _TEXT
    sheet = Image.new("RGB", (wide, high), BACKGROUND)
    figure = Figure(figsize=(wide / _DPI, high / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)

    def write(x: int, y: int, text: str, at_most: int, **style: Any) -> None:
        shown = text if len(text) <= at_most else f"…{text[1 - at_most :]}"
        # A name may hold dollar signs, which are no formula.
        figure.text(x / wide, 1 - y / high, shown, va="center", parse_math=False, **style)

    for row, (label, name) in enumerate(rows):
        top = row * (_CELL + 2 * _TEXT)
        write(4, top + _TEXT // 2, f"{name} ({counts[label]})", 100, fontsize=9, weight="bold")
        own = [index for index, sample in enumerate(images.samples) if label in sample.labels]
        chosen = [own[len(own) * place // SHEET_PICTURES] for place in range(SHEET_PICTURES)] if own else []
        for column, index in enumerate(dict.fromkeys(chosen)):
            picture = images.read(index).convert("RGB")
            scale = _CELL / max(picture.size)
            # Small pictures keep their hard pixels; large ones are averaged.
            way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
            picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), way)
            left = column * (_CELL + 4)
            sheet.paste(picture, (left, top + _TEXT))
            write(left, top + _TEXT + _CELL + _TEXT // 2, images.name(index).rpartition("/")[2], 26, fontsize=6)
    if len(rows) < len(images.classes):
        write(4, high - _TEXT // 2, f"and {len(images.classes) - len(rows)} more classes", 100, fontsize=9)
    figure.figimage(np.asarray(sheet), 0, 0, origin="upper")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks is drawn as boxes
        figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
