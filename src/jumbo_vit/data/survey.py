"""From what a user names after `--data` to sets of pictures with masks: every file is read once before training."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jumbo_vit.data.find import Skipped
from jumbo_vit.data.images import read_image
from jumbo_vit.data.mask_labels import LabelOptions, resolve_labels
from jumbo_vit.data.masks import ColourMap, Labels, UnusableMask, read_stored_values
from jumbo_vit.data.pairs import Found, Pair, Pairs, find_pairs
from jumbo_vit.data.records import relative_name
from jumbo_vit.data.segments import SegmentSet, SegmentSplits, is_turned, size_fault
from jumbo_vit.data.sets import stratified_split
from jumbo_vit.errors import UnreadableImage, UserError

_FAULTS_NAMED = 3


class Facts(NamedTuple):
    """Of one pair: `size` (width, height) upright, `mask_size`, whether the picture was turned by its EXIF data,
    pixels of each stored value, the mask's kind, SHA-256 of the picture's file."""

    size: tuple[int, int]
    mask_size: tuple[int, int]
    turned: bool
    counts: dict[int, int]
    kind: str
    sha256: str


@dataclass
class Survey:
    """What one pass over all files found: the sets without unreadable pairs, the facts of each pair left, and faults.

    `faults` are (name of the mask, reason); with any of them training is refused.
    """

    parts: dict[str, SegmentSet]
    facts: dict[str, list[Facts]]
    faults: list[tuple[str, str]]
    held_out: str = ""
    drawn: bool = False

    def require_sound(self) -> None:
        """Raises `UserError` that names the first faults and says how many there are."""
        if self.faults:
            many = len(self.faults)
            shown = [f"{name} {reason}" for name, reason in self.faults[:_FAULTS_NAMED]]
            rest = [f"and {many - _FAULTS_NAMED} more" if many > _FAULTS_NAMED else ""]
            advice = [next(iter(self.parts.values())).labels.advice() if "no class" in "".join(shown) else ""]
            words = "; ".join(filter(None, [*shown, *rest, *advice]))
            raise UserError(f"{many} mask{'s' if many > 1 else ''} cannot be used: {words}")
        for name, part in self.parts.items():
            pixels = class_pixels(part, self.facts[name])[0]
            seen = [label for label, number in zip(part.classes, pixels, strict=True) if number]
            if not seen:
                raise UserError(
                    f"no pixel of the {name} masks is labelled: check --ignore-index and --reduce-zero-label"
                )
            if name == "train" and len(seen) < 2:
                raise UserError(
                    f"the training masks hold one class only, {seen[0]}: training needs two "
                    f"(background is one); {part.labels.rule()}"
                )

    def splits(self) -> SegmentSplits:
        """The sets to train on."""
        return SegmentSplits(self.parts["train"], self.parts["val"], self.held_out, self.drawn)


def open_segments(
    data: str | Path,
    options: LabelOptions | None = None,
    patterns: tuple[str, str] = ("", ""),
    seed: int = 0,
    val_fraction: float = 0.1,
    workers: int | None = None,
) -> SegmentSplits:
    """Training and held-out pictures of `data` with their masks, every file read once; see `survey`.

    Raises:
        UserError: Also if any mask cannot be used, by names and values.
    """
    found = survey(data, options or LabelOptions(), patterns, seed, val_fraction, workers)
    found.require_sound()
    return found.splits()


def open_held_out_segments(
    data: str | Path, labels: Labels, patterns: tuple[str, str] = ("", ""), workers: int | None = None
) -> SegmentSet:
    """The pictures to evaluate a model of these `labels` on: the held-out part if `data` has one, else all of it.

    Raises:
        UserError: As `find_pairs`; a mask cannot be used; or `data` has a training part and no held-out one.
    """
    found = find_pairs(data, *patterns)
    name = found.held_out if found.layout.parted else ""
    if name is None:
        raise UserError(f"{data} has no held-out part (val or test) with masks: add one, or give one part as --data")
    pairs, notes = found.splits[name], list(found.notes)
    if name:
        notes.append(f"The held-out part is {name}.")
    facts, part, faults = _look(pairs, labels, found.root, workers)
    part.notes += [*notes, *_notes(part, facts)]
    result = Survey({"held-out": part}, {"held-out": facts}, faults + _faults(part, facts))
    result.require_sound()
    return part


def survey(
    data: str | Path,
    options: LabelOptions,
    patterns: tuple[str, str],
    seed: int,
    val_fraction: float,
    workers: int | None = None,
    done: Callable[[], object] | None = None,
) -> Survey:
    """Find all pairs, read every picture and mask once, and settle what the numbers in masks mean.

    A layout with splits gives `train` (or `training`) beside the first of `HELD_OUT_NAMES`; without a held-out split,
    and in a layout without splits, a share is held out by seed. What cannot be read is skipped with its partner.

    Args:
        data: The user's folder.
        options: What its masks mean.
        patterns: `--image-pattern` and `--mask-pattern`, or two empty texts.
        seed: Fixes which pictures are held out where no held-out split is there.
        val_fraction: Their share.
        workers: Threads that read; default one for each core.
        done: Called after each pair.

    Raises:
        UserError: As `find_pairs` and `resolve_labels`; too few pictures; or no pair can be read.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"the held-out fraction must lie between 0 and 1, not {val_fraction}: change --val-fraction")
    colour_map = options.read_colour_map()
    found = find_pairs(data, *patterns)
    parts, held_out, drawn = _parts(found, data, seed, val_fraction)
    # Not yet known: what the numbers mean. No set with these leaves this function.
    unknown = Labels((), (), (), (), colour_map)
    looked = {name: _look(part, unknown, found.root, workers, done) for name, part in parts.items()}
    faults = [fault for _, _, own in looked.values() for fault in own]
    # Where chance says what is held out, its numbers are as good as the others.
    tell = [facts for name, (own, _, _) in looked.items() for facts in own if drawn or name == "train"]
    if not tell and faults and not (colour_map or options.classes or options.num_classes):
        raise UserError(f"{len(faults)} masks cannot be used, first {faults[0][0]}: it {faults[0][1]}")
    numbers = {value for facts in tell if facts.kind == "number" for value in facts.counts}
    labels, notes = resolve_labels(options, colour_map, numbers, any(facts.kind == "bit" for facts in tell))
    result = Survey({}, {}, faults, held_out, drawn)
    for name, (facts, part, _) in looked.items():
        part.labels = labels
        part.notes += [*found.notes, *found.unused(), *notes] if name == "train" else []
        part.notes += _notes(part, facts)
        result.parts[name], result.facts[name] = part, facts
        result.faults += _faults(part, facts)
    return result


def _parts(found: Found, data: str | Path, seed: int, val_fraction: float) -> tuple[dict[str, Pairs], str, bool]:
    """Training and held-out pairs, which these are in words, and whether they were drawn."""
    train = found.train if found.layout.parted else ""
    if train is None:
        raise UserError(f"{data} has no training part with masks, only {', '.join(sorted(found.splits))}: add train")
    held_out = found.held_out if found.layout.parted else None
    if held_out is not None:
        return {"train": found.splits[train], "val": found.splits[held_out]}, f"the split {held_out}", False
    words = f"{val_fraction:.0%} of the pictures, split with seed {seed}"
    return _drawn(found.splits[train], seed, val_fraction, data), words, True


def _notes(part: SegmentSet, facts: list[Facts]) -> list[str]:
    """What cannot be known from the files and may be otherwise than was taken."""
    notes = []
    turned = [index for index, fact in enumerate(facts) if fact.turned]
    if turned:
        notes.append(
            f"{len(turned)} pictures are turned upright by their EXIF orientation, such as {part.name(turned[0])}; "
            "masks are taken as drawn on the upright picture."
        )
    if part.labels.values == (0, 1) and 255 in part.labels.ignored:
        high = [index for index, fact in enumerate(facts) if fact.kind == "number" and 255 in fact.counts]
        if high and not any(1 in facts[index].counts for index in high):
            notes.append(
                f"{len(high)} masks hold 255, which is ignored, and never 1, such as {part.mask_name(high[0])}: if 255 "
                "is class 1 there, write 1."
            )
    return notes


def _drawn(whole: Pairs, seed: int, val_fraction: float, data: str | Path) -> dict[str, Pairs]:
    if len(whole.pairs) < 2:
        raise UserError(
            f"{data} has one picture with a mask for training, so none can be held out: add pictures, or a part val"
        )
    train, val = stratified_split([()] * len(whole.pairs), 0, val_fraction, seed)
    return {
        "train": Pairs([whole.pairs[index] for index in train], whole.skipped),
        "val": Pairs([whole.pairs[index] for index in val]),
    }


def _look(
    pairs: Pairs,
    labels: Labels,
    root: Path,
    workers: int | None,
    done: Callable[[], object] | None = None,
) -> tuple[list[Facts], SegmentSet, list[tuple[str, str]]]:
    """Read all pairs: the facts and the set of those that can be read, and masks of a form that cannot be used."""
    part = SegmentSet(labels, [], list(pairs.skipped), root=root)
    facts: list[Facts] = []
    faults: list[tuple[str, str]] = []
    for pair, found in zip(pairs.pairs, _facts_of(pairs.pairs, workers, labels.colour_map, done), strict=True):
        if isinstance(found, UnusableMask):
            faults.append((relative_name(pair.mask, root), found.reason))
        elif isinstance(found, UnreadableImage):
            part.skipped.append(Skipped(relative_name(found.path, root), found.reason))
        else:
            part.samples.append(pair)
            facts.append(found)
    if pairs.pairs and not part.samples and not faults:
        first = part.skipped[-1]
        raise UserError(f"none of the {len(pairs.pairs)} pairs can be read, last {first.path}: {first.reason}")
    return facts, part, faults


def _facts_of(
    pairs: list[Pair], workers: int | None, colour_map: ColourMap | None, done: Callable[[], object] | None
) -> Iterator[Facts | UnreadableImage | UnusableMask]:
    def look(pair: Pair) -> Facts | UnreadableImage | UnusableMask:
        try:
            size = read_image(pair.picture).size
            stored = read_stored_values(pair.mask, colour_map)
        except (UnreadableImage, UnusableMask) as error:
            return error
        finally:
            if done is not None:
                done()
        digest = hashlib.sha256(Path(pair.picture).read_bytes()).hexdigest()
        height, width = stored.values.shape
        return Facts(size, (width, height), is_turned(pair.picture), stored.counts(), stored.kind, digest)

    # In blocks, so that many pairs are not as many waiting futures, and Ctrl-C answers soon.
    block = 256
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for start in range(0, len(pairs), block):
            yield from pool.map(look, pairs[start : start + block])


def _faults(part: SegmentSet, facts: list[Facts]) -> list[tuple[str, str]]:
    """Masks of another size or with values of no meaning. One fault a mask, the size first."""
    found = []
    for index, fact in enumerate(facts):
        reason = size_fault(fact.size, fact.mask_size, fact.turned) or part.labels.fault(fact.counts, fact.kind)
        if reason is not None:
            found.append((part.mask_name(index), reason))
    return found


def class_pixels(part: SegmentSet, facts: Sequence[Facts]) -> tuple[list[int], list[int], int, int]:
    """Of a set: pixels of each class, pictures with each class, ignored pixels, and pixels of no meaning."""
    pixels, pictures = [0] * len(part.classes), [0] * len(part.classes)
    ignored = unknown = 0
    for fact in facts:
        meaning, here = part.labels.meaning(fact.kind), Counter[int]()
        for value, number in fact.counts.items():
            here[meaning.get(value, -1)] += number
        unknown += here.pop(-1, 0)
        ignored += here.pop(part.ignore_index, 0)
        for index, number in here.items():
            pixels[index] += number
            pictures[index] += 1
    return pixels, pictures, ignored, unknown
