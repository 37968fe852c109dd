"""What pictures with masks hold and what is wrong with them, as a report that `write_json` can write."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from jumbo_vit.data.records import listed
from jumbo_vit.data.survey import Facts, Survey, class_pixels


def segment_report(found: Survey) -> dict[str, Any]:
    """The report on a survey.

    Keys: `labels`, the meaning of the numbers (`Labels.to_dict`), and `rule`, the same in words; `held_out`; `splits`,
    for `train` and `val` the pictures, pixels and pictures of each class, `ignored` pixels and their share of all,
    `unknown_values`, `all_ignored` (masks without a labelled pixel), and sizes; `skipped` and `faults` (path, reason;
    with any fault training is refused); `duplicates` (pictures with the same bytes in both parts); `warnings`; `notes`.
    """
    labels = found.parts["train"].labels
    return {
        "labels": labels.to_dict(),
        "rule": labels.rule(),
        "held_out": found.held_out,
        "splits": {name: _split(found, name) for name in found.parts},
        "skipped": [{"split": name, **asdict(entry)} for name, part in found.parts.items() for entry in part.skipped],
        "faults": [{"path": path, "reason": reason} for path, reason in found.faults],
        "duplicates": _duplicates(found),
        "warnings": _warnings(found),
        "notes": [note for part in found.parts.values() for note in part.notes],
    }


def _split(found: Survey, name: str) -> dict[str, Any]:
    part, facts = found.parts[name], found.facts[name]
    pixels, pictures, ignored, unknown = class_pixels(part, facts)
    total = sum(pixels) + ignored + unknown
    sizes: dict[str, int] = {}
    for fact in facts:
        key = f"{fact.size[0]}x{fact.size[1]}"
        sizes[key] = sizes.get(key, 0) + 1
    return {
        "pictures": len(part),
        "pixels": total,
        "per_class": [
            {"class": label, "pixels": p, "share": p / max(1, sum(pixels)), "pictures": n}
            for label, p, n in zip(part.classes, pixels, pictures, strict=True)
        ],
        "ignored": ignored,
        "ignored_share": ignored / max(1, total),
        "unknown_values": _unknown_values(found, name),
        "all_ignored": [part.mask_name(index) for index in _all_ignored(found, name)],
        "sizes": dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))),
    }


def _unknown_values(found: Survey, name: str) -> list[dict[str, int]]:
    """Values that are no class and not ignored, with their pixels and masks."""
    pixels, masks = Counter[int](), Counter[int]()
    for fact in found.facts[name]:
        meaning = found.parts[name].labels.meaning(fact.kind)
        for value, number in fact.counts.items():
            if value not in meaning:
                pixels[value] += number
                masks[value] += 1
    return [{"value": value, "pixels": pixels[value], "masks": masks[value]} for value in sorted(pixels)]


def _all_ignored(found: Survey, name: str) -> list[int]:
    part = found.parts[name]

    def empty(fact: Facts) -> bool:
        meaning = part.labels.meaning(fact.kind)
        return all(meaning.get(value) == part.ignore_index for value in fact.counts)

    return [index for index, fact in enumerate(found.facts[name]) if empty(fact)]


def _duplicates(found: Survey) -> list[dict[str, list[str]]]:
    groups: dict[str, dict[str, list[str]]] = {}
    for name, part in found.parts.items():
        for index, fact in enumerate(found.facts[name]):
            groups.setdefault(fact.sha256, {}).setdefault(name, []).append(part.name(index))
    return [group for group in groups.values() if len(group) > 1]


def _warnings(found: Survey) -> list[str]:
    warnings = []
    words = {"train": "training", "val": "held-out"}
    for name, part in found.parts.items():
        pixels = class_pixels(part, found.facts[name])[0]
        absent = [label for label, number in zip(part.classes, pixels, strict=True) if not number]
        if absent:
            after = "cannot be learned" if name == "train" else "has no part in the mean IoU"
            warnings.append(f"Without a {words[name]} pixel: {listed(absent)}; such a class {after}.")
        empty = _all_ignored(found, name)
        if empty:
            warnings.append(
                f"{len(empty)} {words[name]} masks have no labelled pixel, such as {part.mask_name(empty[0])}; they "
                "teach nothing."
            )
    across = _duplicates(found)
    if across:
        warnings.append(
            f"Pictures both in training and held out: {len(across)}, such as {across[0]['train'][0]} and "
            f"{across[0]['val'][0]}; the score will be too good."
        )
    return warnings
