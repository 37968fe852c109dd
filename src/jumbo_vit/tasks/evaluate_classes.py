"""Evaluation on pictures whose classes or labels are not written as the model's: numbers, WordNet numbers, parts, ReaL.

Whatever is mapped is mapped by a rule that the user names, checked against the model's own labels, and said in a note.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo
from timm.data.real_labels import RealLabelsImagenet
from torch import Tensor

from jumbo_vit.data.sets import ImageSet
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.tasks.score import Gather, MulticlassScore, Reduce, as_is

WAYS = ("name", "index", "wnid")
"""How folders, or labels in a list, name classes: as the model does, by the class's number from 0, or by the number
that WordNet has for ImageNet-1K's class."""

_SECOND = re.compile(r" \(\d+\)$")  # two classes are called crane, so the later one is "crane, ... (2)"
_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")


def names_for(way: str, labels: Sequence[str]) -> list[str]:
    """The names under which data call the model's classes, in the order of its outputs.

    Args:
        way: One of `WAYS`.
        labels: The model's.

    Raises:
        UserError: An unknown way, or one that the model's labels do not allow.
    """
    if way not in WAYS:
        raise UserError(f"--classes-by {way} is not known{nearest(way, WAYS)}: use {', '.join(WAYS)}")
    numbers = [str(number) for number in range(len(labels))]
    if way == "name":
        return list(labels)
    if way == "wnid":
        check_imagenet(labels, "--classes-by wnid")
        return imagenet_numbers()
    if list(labels) != numbers and all(label.isdecimal() for label in labels):
        raise UserError(
            f"--classes-by index would mix up classes that are numbers themselves: the model's class 0 is called "
            f"{labels[0]}; leave it out, and they are found by their names"
        )
    return numbers


def mapping_note(way: str, labels: Sequence[str]) -> str:
    """What a user can check the mapping by."""
    first, last = names_for(way, labels)[0], names_for(way, labels)[-1]
    return f"Classes were found by {way}: {first} is {labels[0]}, and {last} is {labels[-1]}."


def imagenet_numbers() -> list[str]:
    """The WordNet numbers of ImageNet-1K's classes, in their order."""
    found: list[str] = ImageNetInfo("imagenet-1k").label_names()
    return found


def check_imagenet(labels: Sequence[str], flag: str) -> None:
    """Refuse a model whose outputs are not ImageNet-1K's classes in their order, as far as its labels tell.

    WordNet numbers, timm's descriptions of them, and plain numbers from 0 to 999 are taken.

    Raises:
        UserError: They are none of these.
    """
    info = ImageNetInfo("imagenet-1k")
    described = [info.index_to_description(number) for number in range(info.num_classes())]
    plain = [_SECOND.sub("", label) for label in labels]
    if plain not in (info.label_names(), described, [str(number) for number in range(1000)]):
        raise UserError(
            f"{flag} is for models of ImageNet-1K's 1,000 classes in their order; this one's {len(labels)} classes "
            f"begin with {labels[0]}"
        )


class SubsetScore:
    """A `MulticlassScore` in which only some classes can be answered.

    Args:
        labels: All of the model's classes.
        kept: Numbers of those that can be answered, in rising order.
    """

    metric = "top1"

    def __init__(self, labels: Sequence[str], kept: Sequence[int]) -> None:
        self.kept = torch.tensor(kept)
        self.place = torch.full((len(labels),), -1)
        self.place[self.kept] = torch.arange(len(kept))
        self.score = MulticlassScore([labels[number] for number in kept])

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, C) of all classes, targets (B,) of class indices among all."""
        self.score.update(logits.cpu()[:, self.kept], self.place[targets.cpu()])

    def result(self, total: Reduce = as_is, gather: Gather = as_is) -> dict[str, Any]:
        """The numbers of the whole set, over the kept classes."""
        return self.score.result(total, gather)


class RealScore:
    """Accuracy where a picture has several right answers, or none and is left out (ReaL, arXiv:2006.07159).

    Args:
        answers: The right classes of each picture, in the set's order; empty where there is none.
    """

    def __init__(self, answers: Sequence[frozenset[int]]) -> None:
        self.answers = answers
        self.hits, self.hits5, self.counted, self.left_out = 0, 0, 0, 0
        self.finite = True

    def update(self, logits: Tensor, _: Tensor, index: Tensor) -> None:
        """Add a batch: logits (B, C), and the pictures' indices in the set (B,)."""
        self.finite = self.finite and bool(logits.isfinite().all())
        best = logits.topk(min(5, logits.shape[1])).indices.tolist()
        for place, guesses in zip(index.tolist(), best, strict=True):
            right = self.answers[place]
            if not right:
                self.left_out += 1
                continue
            self.counted += 1
            self.hits += guesses[0] in right
            self.hits5 += any(guess in right for guess in guesses)

    def result(self) -> dict[str, Any]:
        """ "real_top1" and "real_top5" as fractions, "real_n", and "real_left_out" without a right answer."""
        good = self.counted and self.finite
        top1, top5 = (hits / self.counted if good else float("nan") for hits in (self.hits, self.hits5))
        return {"real_top1": top1, "real_top5": top5, "real_n": self.counted, "real_left_out": self.left_out}


def real_answers(source: str, images: ImageSet, labels: Sequence[str]) -> list[frozenset[int]]:
    """The right answers of each picture.

    Args:
        source: A JSON file: the list of ReaL, an entry of class numbers for each of ILSVRC2012_val_00000001 and so on;
            or a mapping from file name to names of classes. "imagenet": ReaL's own list, which timm has.
        images: The pictures; those of a list are known by their names.
        labels: The model's.

    Raises:
        UserError: No such file, or one of another form; a picture that it does not name; a class that is not known.
    """
    content = list(RealLabelsImagenet(range(50_000)).real_labels.values()) if source == "imagenet" else _read(source)
    names = [images.name(index) for index in range(len(images))]
    if isinstance(content, Mapping):
        return _by_name(source, content, names, labels)
    check_imagenet(labels, f"--real {source}")
    found = []
    for name in names:
        match = _VALIDATION.search(Path(name).name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(content):
            raise UserError(
                f"--real {source} has an entry for each picture ILSVRC2012_val_00000001 to {len(content):08}, and "
                f"{name} is none of these: give the validation pictures under their own names"
            )
        found.append(frozenset(content[number - 1]))
    return found


def _by_name(
    source: str, content: Mapping[str, Any], names: Sequence[str], labels: Sequence[str]
) -> list[frozenset[int]]:
    number = {label: place for place, label in enumerate(labels)}
    found = []
    for name in names:
        entry = content.get(name, content.get(Path(name).name))
        if not isinstance(entry, list):
            raise UserError(f"--real {source} has no list of classes for {name}")
        odd = [label for label in entry if not isinstance(label, str)]
        if odd:
            raise UserError(
                f"--real {source}: {name} has {json.dumps(odd[0])[:80]} in its list, which is no class's name"
            )
        unknown = next((label for label in entry if label not in number), None)
        if unknown is not None:
            raise UserError(
                f"--real {source}: {name} has the class {unknown}, which is none of the model's"
                f"{nearest(str(unknown), labels)}"
            )
        found.append(frozenset(number[label] for label in entry))
    return found


def _read(source: str) -> Any:
    try:
        content = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--real {source} cannot be read as JSON: {error}") from error
    numbers = isinstance(content, list) and all(
        isinstance(entry, list) and all(type(value) is int and 0 <= value < 1000 for value in entry)
        for entry in content
    )
    if not numbers and not isinstance(content, dict):
        raise UserError(
            f"--real {source} holds neither a list of lists of class numbers, nor a mapping from file name to classes"
        )
    return content
