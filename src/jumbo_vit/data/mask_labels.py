"""From a user's options and what masks hold to the meaning of the numbers in them (`Labels`)."""

import colorsys
import csv
import io
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumbo_vit.data.folders import composed
from jumbo_vit.data.masks import Colour, ColourMap, Labels
from jumbo_vit.data.records import listed
from jumbo_vit.errors import UserError

IGNORE_NAME = "ignore"
"""A colour of this name, in any case, means "not labelled"."""

_MOST_CLASSES = 65535


@dataclass(frozen=True)
class LabelOptions:
    """What a user says of the numbers in masks.

    Args:
        classes: File with the name of a class a line, in the order of the numbers; "" for none.
        colour_map: File of name and colour of each class, CSV or JSON; "" for none.
        num_classes: Number of classes; None takes the names, else the highest number in the training masks.
        ignore_index: Numbers that mean "not labelled"; None stands for 255.
        reduce_zero_label: 0 means "not labelled" and classes count from 1.
    """

    classes: str = ""
    colour_map: str = ""
    num_classes: int | None = None
    ignore_index: Sequence[int] | None = None
    reduce_zero_label: bool = False

    def read_colour_map(self) -> ColourMap | None:
        """The colour map, if one is given."""
        return read_colour_map(self.colour_map) if self.colour_map else None


def resolve_labels(
    options: LabelOptions, colour_map: ColourMap | None, numbers: Collection[int], bits: bool
) -> tuple[Labels, list[str]]:
    """The meaning of the masks' numbers, and notes on what was guessed.

    Where the user names neither the number of classes (or 2) nor what is ignored, and the training masks hold nothing
    but 0 and 255, these are two classes; in all other cases 255 is ignored unless the user says otherwise.

    Args:
        options: The user's.
        colour_map: Theirs too, already read.
        numbers: All values of kind "number" in the training masks.
        bits: Whether there are 1-bit masks among them.

    Raises:
        UserError: The options contradict each other, or leave open what the numbers mean.
    """
    names = _names(options, colour_map)
    given = options.num_classes if options.num_classes is not None else len(names) if names else None
    _check_options(options, names, given)
    notes: list[str] = []
    binary = (
        options.ignore_index is None
        and not options.reduce_zero_label
        and given in (None, 2)
        and 255 in numbers
        and set(numbers) <= {0, 255}
        and (0 in numbers or bits)
    )
    ignored = [255] if options.ignore_index is None else list(dict.fromkeys(options.ignore_index))
    if options.ignore_index is None and given is not None and given > 255:
        ignored = []
    if options.reduce_zero_label and 0 not in ignored:
        ignored.insert(0, 0)
    first = 1 if options.reduce_zero_label else 0
    if binary:
        values: tuple[int, ...] = (0, 255)
        ignored = []
        notes.append(
            "The training masks hold 0 and 255 alone, so these are two classes and nothing is ignored; if 255 means "
            "unlabelled, give --ignore-index 255."
        )
    else:
        number = given if given is not None else _guess(numbers, bits, ignored, first, notes)
        values = tuple(range(first, first + number))
    names = names or [str(value) for value in values]
    both = [value for value in ignored if value in values]
    if both:
        raise UserError(
            f"--ignore-index {both[0]} is also the number of the class {names[values.index(both[0])]}: if classes "
            "count from 1, give --reduce-zero-label; else leave the class out, or give another number"
        )
    colours = colour_map.colours if colour_map is not None else default_colours(len(values))
    return Labels(tuple(names), values, tuple(ignored), colours, colour_map), notes


def _check_options(options: LabelOptions, names: Sequence[str], given: int | None) -> None:
    if given is not None and not 2 <= given <= _MOST_CLASSES:
        what = f"--num-classes {given}" if options.num_classes is not None else f"{given} class"
        raise UserError(
            f"{what}: segmentation needs at least 2 classes (background is one) and at most {_MOST_CLASSES}"
        )
    if names and given != len(names):
        source = options.classes or options.colour_map
        raise UserError(f"--num-classes {given}, but {source} has {len(names)} classes: make them agree")
    for value in options.ignore_index or ():
        if not 0 <= value <= 65535:
            raise UserError(f"--ignore-index {value}: a number in a mask lies in 0..65535")


def _guess(numbers: Collection[int], bits: bool, ignored: list[int], first: int, notes: list[str]) -> int:
    """Classes by the highest number, if most numbers below it are there too."""
    present = ({*numbers} | ({0, 1} if bits else set())) - {*ignored}
    if not present:
        raise UserError("no pixel of the training masks is labelled: check --ignore-index, or give --num-classes")
    number = max(present) + 1 - first
    if min(present) < 0 or 2 * len(present) < number:
        raise UserError(
            f"the training masks hold the numbers {listed([str(value) for value in sorted(present)])}, from which the "
            "number of classes cannot be told: give --num-classes N, or correct the masks"
        )
    if number < 2:
        raise UserError(
            f"the training masks hold one class only, {max(present)}: training needs two (background is one); if "
            f"{' or '.join(map(str, ignored))} is a class, give --num-classes or another --ignore-index"
        )
    notes.append(
        f"{number} classes by the highest number in the training masks, {max(present)}; --num-classes sets it."
    )
    return number


def _names(options: LabelOptions, colour_map: ColourMap | None) -> list[str]:
    names = list(colour_map.names) if colour_map is not None else []
    if not options.classes:
        return names
    listed_names = read_class_names(options.classes)
    if names and names != listed_names:
        raise UserError(
            f"{options.classes} and {options.colour_map} differ in names or order, {listed(listed_names)} and "
            f"{listed(names)}: make them agree, or give one of them"
        )
    return listed_names


def read_class_names(path: str | Path) -> list[str]:
    """Names of classes, one a line, without empty lines. Raises `UserError` if one comes twice or there is none."""
    names = [composed(line.strip()) for line in _text(path).splitlines() if line.strip()]
    twice = [name for name in names if names.count(name) > 1]
    if twice or not names:
        raise UserError(f"{path} {f'names the class {twice[0]} twice' if twice else 'names no class'}: correct it")
    return names


def read_colour_map(path: str | Path) -> ColourMap:
    """Names and colours of classes in their order: CSV lines `name,r,g,b`, or JSON `{"name": [r, g, b], ...}`.

    A first line of a CSV without numbers is a header. The name `ignore`, as often as needed, is no class: its colours
    mean "not labelled".

    Raises:
        UserError: A line is none, or a name or a colour comes twice.
    """
    text = _text(path)
    if Path(path).suffix.lower() == ".json":
        rows = _json_rows(text, path)
    else:
        found = list(enumerate(csv.reader(io.StringIO(text)), start=1))
        rows = [(f"{path} line {line}", fields) for line, fields in found if any(field.strip() for field in fields)]
        if rows and not any(_number(field) is not None for field in rows[0][1][1:]):
            rows = rows[1:]
    names: list[str] = []
    colours: dict[Colour, str] = {}
    ignored: list[Colour] = []
    for where, fields in rows:
        name, *parts = [str(field).strip() for field in fields] or [""]
        channels = [_number(part) for part in parts]
        if len(channels) != 3 or not name or None in channels:
            raise UserError(f"{where} is not name,r,g,b with numbers 0 to 255: {', '.join(map(str, fields))}")
        colour = (channels[0] or 0, channels[1] or 0, channels[2] or 0)
        if colour in colours:
            raise UserError(f"{where}: {name} and {colours[colour]} have the same colour {colour}: give each its own")
        colours[colour] = composed(name)
        if name.lower() == IGNORE_NAME:
            ignored.append(colour)
        elif composed(name) in names:
            raise UserError(f"{where}: the class {name} comes twice: a class has one colour")
        else:
            names.append(composed(name))
    own = tuple(colour for colour in colours if colour not in ignored)
    if len(names) < 2:
        raise UserError(f"{path} has {len(names)} classes: segmentation needs at least 2 (background is one)")
    return ColourMap(tuple(names), own, tuple(ignored))


def _json_rows(text: str, path: str | Path) -> list[tuple[str, list[Any]]]:
    try:
        # As pairs, for a dict would keep the last of two equal names and say nothing.
        pairs = json.loads(text, object_pairs_hook=list)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    fine = isinstance(pairs, list) and all(isinstance(p, tuple) and isinstance(p[1], list) for p in pairs)
    if not fine:
        raise UserError(f'{path} must hold {{"name": [r, g, b], ...}}')
    return [(f"{path}, {name}", [name, *colour]) for name, colour in pairs]


def _number(text: Any) -> int | None:
    value = str(text).strip()
    return int(value) if value.isascii() and value.isdigit() and int(value) <= 255 else None


def _text(path: str | Path) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as a text in UTF-8: {error}") from None


def default_colours(number: int) -> tuple[Colour, ...]:
    """As many colours, far apart, always the same ones."""
    golden = 0.618034
    hues = [(k * golden % 1, 0.85 if k % 2 else 0.6, (0.95, 0.7, 0.45)[k % 3]) for k in range(number)]
    found = [colorsys.hsv_to_rgb(*hue) for hue in hues]
    return tuple((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in found)
