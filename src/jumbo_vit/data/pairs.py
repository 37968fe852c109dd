"""Pictures and their masks on disk, found by name: which file belongs to which, and what has no partner."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jumbo_vit.data.find import Skipped, find_images
from jumbo_vit.data.folders import composed
from jumbo_vit.data.listing import HELD_OUT_NAMES
from jumbo_vit.data.records import listed
from jumbo_vit.errors import UserError


class Pair(NamedTuple):
    """Absolute paths of a picture and of its mask."""

    picture: str
    mask: str


@dataclass
class Pairs:
    """The pairs of one split, in the order of their names, and what was left out of it."""

    pairs: list[Pair] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


@dataclass
class Layout:
    """Where pictures and masks lie below a folder.

    `{split}` stands for the name of one folder, `{name}` for what a picture and its mask share (it may cross folders),
    `*` for anything but a slash. Capitals do not matter.
    """

    images: str
    masks: str

    def __post_init__(self) -> None:
        for flag, pattern in (("--image-pattern", self.images), ("--mask-pattern", self.masks)):
            if pattern.count("{name}") != 1 or pattern.count("{split}") > 1:
                raise UserError(f"{flag} {pattern} needs {{name}} once, and {{split}} at the most once")
        if ("{split}" in self.images) != ("{split}" in self.masks):
            raise UserError(
                f"{{split}} stands in one of --image-pattern {self.images} and --mask-pattern {self.masks}: "
                "give it in both, or in neither"
            )

    @property
    def parted(self) -> bool:
        """Whether the layout has splits."""
        return "{split}" in self.images

    def with_ending(self, ending: str) -> "Layout":
        """The same with `ending` behind the name of a mask."""
        return Layout(self.images, self.masks.replace("{name}", "{name}" + ending))


LAYOUTS = (
    Layout("{split}/images/{name}.*", "{split}/masks/{name}.*"),
    Layout("images/{split}/{name}.*", "masks/{split}/{name}.*"),
    Layout("images/{split}/{name}.*", "annotations/{split}/{name}.*"),
    Layout("leftImg8bit/{split}/{name}_leftImg8bit.*", "gtFine/{split}/{name}_gtFine_labelTrainIds.*"),
    Layout("images/{name}.*", "masks/{name}.*"),
    Layout("images/{name}.*", "annotations/{name}.*"),
    Layout("JPEGImages/{name}.*", "SegmentationClass/{name}.*"),
)
"""Tried in this order; the first that has both pictures and masks is taken."""

ENDINGS = ("", "_L", "_mask", "_label", "_labels", "_seg", "_gt")
"""What masks have behind the name of their picture; the ending with the most pairs is taken."""

_TRAIN = ("train", "training")


@dataclass
class Found:
    """All pairs below a folder: by split, or under "" where the layout has none."""

    root: Path
    layout: Layout
    splits: dict[str, Pairs]
    notes: list[str] = field(default_factory=list)

    def split(self, names: Sequence[str]) -> str | None:
        """The first of `names`, in any case, that is a split with pairs."""
        lower = {split.lower(): split for split, pairs in self.splits.items() if pairs.pairs}
        return next((lower[name] for name in names if name in lower), None)

    @property
    def train(self) -> str | None:
        """The training split."""
        return self.split(_TRAIN)

    @property
    def held_out(self) -> str | None:
        """The held-out split."""
        return self.split(HELD_OUT_NAMES)

    def unused(self) -> list[str]:
        """A note on the splits that are neither."""
        rest = sorted({*self.splits} - {self.train, self.held_out}) if self.layout.parted else []
        words = [f"{name} ({len(self.splits[name].pairs)} pairs)" for name in rest]
        return [f"Splits that are not used: {listed(words)}."] if words else []


def find_pairs(data: str | Path, image_pattern: str = "", mask_pattern: str = "") -> Found:
    """Every picture below `data` with its mask; a picture or a mask without partner is skipped, with that reason.

    Args:
        data: A folder in one of `LAYOUTS`, or as the patterns say.
        image_pattern: A `Layout.images`, or "".
        mask_pattern: A `Layout.masks`; both patterns or none.

    Raises:
        UserError: There is no such folder, nothing pairs, or two files would be the same partner.
    """
    root = Path(data).expanduser().absolute()
    if bool(image_pattern) != bool(mask_pattern):
        raise UserError("--image-pattern and --mask-pattern go together: give both, or none")
    paths, others = find_images(data)
    names = [path.relative_to(root).as_posix() for path in paths]
    own = Layout(image_pattern, mask_pattern) if image_pattern else None
    layout = own or next((one for one in LAYOUTS if _fits(one, names)), None)
    if layout is None:
        raise UserError(
            f"{data} holds no pictures with masks in a form that is known ({len(names)} pictures): give "
            "train/images, train/masks, val/images and val/masks, or images and masks, or say where they lie by "
            "--image-pattern and --mask-pattern"
        )
    notes = []
    if own is None:
        tried = {ending: layout.with_ending(ending) for ending in ENDINGS}
        ending = max(ENDINGS, key=lambda text: _count(tried[text], names))  # the first of equal ones
        layout = tried[ending]
        if ending:
            notes.append(f"Masks are called as their pictures with {ending} behind.")
    splits = _pair(layout, root, names)
    if not any(part.pairs for part in splits.values()):
        raise UserError(
            f"no picture in {data} has a mask: {_example(layout, names)}; rename them, or give --image-pattern and "
            "--mask-pattern"
        )
    _place_others(layout, splits, others)
    used = {Path(path) for part in splits.values() for pair in part.pairs for path in pair}
    used |= {root / skipped.path for part in splits.values() for skipped in part.skipped}
    rest = [name for name in names if root / name not in used]
    if rest:
        notes.append(f"{len(rest)} pictures lie elsewhere in {root.name} and are not used, such as {rest[0]}.")
    return Found(root, layout, splits, notes)


def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{split\}|\{name\}|\*)", composed(pattern))
    made = {"{split}": "(?P<split>[^/]+)", "{name}": "(?P<name>.+)", "*": "[^/]*"}
    return re.compile("".join(made.get(part, re.escape(part)) for part in parts), re.IGNORECASE)


def _keys(pattern: str, names: Sequence[str], ending: str = "") -> list[tuple[tuple[str, str], str]]:
    """Of each name that fits: its split and what `{name}` stands for, and the name itself."""
    regex = _regex(pattern.replace("{name}", "{name}" + ending))
    found = ((regex.fullmatch(composed(name)), name) for name in names)
    return [((match.groupdict().get("split") or "", match["name"]), name) for match, name in found if match is not None]


def _fits(layout: Layout, names: Sequence[str]) -> bool:
    """Whether there are both pictures and masks. A folder of any other name than that of a split is no split."""
    images, masks = _keys(layout.images, names), _keys(layout.masks, names, "*")
    parts = {split.lower() for (split, _), _ in images}
    return bool(images and masks) and (not layout.parted or not parts.isdisjoint({*_TRAIN, *HELD_OUT_NAMES}))


def _count(layout: Layout, names: Sequence[str]) -> int:
    masks = {key for key, _ in _keys(layout.masks, names)}
    return sum(key in masks for key, _ in _keys(layout.images, names))


def _pair(layout: Layout, root: Path, names: Sequence[str]) -> dict[str, Pairs]:
    images, masks = _unique(layout.images, names, "pictures"), _unique(layout.masks, names, "masks")
    both = [name for key, name in images.items() if masks.get(key) == name]
    if both:
        raise UserError(f"{both[0]} is a picture and a mask by the patterns: make them tell the two apart")
    splits: dict[str, Pairs] = {}
    for (split, name), path in images.items():
        part = splits.setdefault(split, Pairs())
        if (split, name) in masks:
            part.pairs.append(Pair(str(root / path), str(root / masks[split, name])))
        else:
            part.skipped.append(Skipped(path, "has no mask"))
    for (split, name), path in masks.items():
        if (split, name) not in images:
            splits.setdefault(split, Pairs()).skipped.append(Skipped(path, "is a mask without a picture"))
    return splits


def _unique(pattern: str, names: Sequence[str], what: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for key, name in _keys(pattern, names):
        if found.setdefault(key, name) != name:
            raise UserError(
                f"two {what} have the same name, {found[key]} and {name}, so that it is open which one belongs to its "
                "partner: remove one"
            )
    return found


def _example(layout: Layout, names: Sequence[str]) -> str:
    images = [name for _, name in _keys(layout.images, names)][:1] or [f"none like {layout.images}"]
    masks = [name for _, name in _keys(layout.masks, names)][:1] or [f"none like {layout.masks}"]
    return f"a picture is {images[0]}, a mask {masks[0]}"


def _place_others(layout: Layout, splits: dict[str, Pairs], others: Sequence[Skipped]) -> None:
    """Files that are no pictures but lie among pictures or masks; those elsewhere (lists, licences) are no loss."""
    for pattern in (layout.images, layout.masks):
        regex = _regex(pattern[: pattern.index("{name}")].rpartition("/")[0])
        for item in others:
            path = composed(item.path)
            match = regex.match(path)
            if match is not None and path[match.end() : match.end() + 1] in ("/", ""):
                part = splits.get(match.groupdict().get("split") or "")
                if part is not None and item not in part.skipped:
                    part.skipped.append(item)
