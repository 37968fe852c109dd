"""`jumbo-vit teach`: teachers look at fixed views of all training pictures once, and what they say is kept.

The folder is written part by part, each file whole or not at all, and nothing depends on where a run of the command
ends: the same command goes on with the parts that are not there.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL
import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader

from jumbo_vit.data.folds import fold_set
from jumbo_vit.data.pipeline import Preparation, TrainSet, single_thread
from jumbo_vit.data.records import ImageSet, listed
from jumbo_vit.data.sampler import Draw
from jumbo_vit.data.sets import check_images, open_data
from jumbo_vit.data.views import (
    FORMAT,
    PICTURES,
    RECORD,
    Taught,
    conditions,
    content_checksum,
    differences,
    is_taught,
    mark,
    part_path,
    read_taught,
)
from jumbo_vit.errors import UserError
from jumbo_vit.files import is_temporary, write_atomically, write_bytes, write_json
from jumbo_vit.folder import pick_device
from jumbo_vit.tasks.build import augmentation, build_model, versions
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.distill import open_teachers, told_of
from jumbo_vit.tasks.fabric import pick_precision
from jumbo_vit.tasks.loss_options import full_paths
from jumbo_vit.teachers import Teacher

# A part is what a kill costs at the most, and a file; so it is neither large nor one of very many.
_PART_BYTES, _PART_ROWS = 2**25, (256, 8192)
# A kill may leave these before the record, which says what the folder is.


def _of_a_beginning(name: str) -> bool:
    """Whether a file may be there before the record is: `teach` was killed as it began."""
    return name == PICTURES or is_temporary(name, PICTURES) or is_temporary(name, RECORD)


def teach(config: TrainConfig, names: list[str], views: int) -> dict[str, Any]:
    """Write what teachers say of `views` views of each picture, or go on with it.

    Args:
        config: Options of a run on these views: its data, model, sizes, augmentation, seed; `out` is the folder.
        names: Of the teachers.
        views: N.

    Returns:
        The number of `pictures`, `views` and `parts`, how many parts were `written` by this call, and `bytes` in all.

    Raises:
        UserError: Data, options or teachers that do not fit, a folder that was begun in another way, or a full disk.
    """
    if views < 1:
        raise UserError(f"--views is {views}, but must be at least 1")
    config = with_defaults(config)
    out = Path(config.out or ".").expanduser()
    if out.is_file():
        raise UserError(f"--out {out} is a file: give a folder")
    begun = read_taught(out) if is_taught(out) else None
    if begun is None and out.is_dir() and any(not _of_a_beginning(entry.name) for entry in out.iterdir()):
        raise UserError(f"--out {out} is not empty, and no folder that `jumbo-vit teach` began: give another one")
    images = fold_set(open_data(config.data, "multiclass", config.held_out_seed, config.val_fraction))
    with torch.device("meta"):
        _, preparation = build_model(config, len(images.classes))
    augment, device = augmentation(config), pick_device(config.device)
    precision = pick_precision(config.precision, device, 0)
    teachers = open_teachers(full_paths(names) or [], images.classes, device, precision)
    record = {
        "jumbo_vit_taught": FORMAT,
        "views": views,
        "seed": config.seed,
        "rows": _rows(len(teachers) * len(images.classes)),
        "precision": precision,
        "listed": f"{len(images)}:{images.checksum():08x}",
        "teachers": [told_of(teacher) for teacher in teachers],
        "conditions": conditions(images.classes, preparation, augment),
        "versions": versions() | {"torchvision": torchvision.__version__, "pillow": PIL.__version__},
    }
    images = _begin(out, record, images, preparation, config.check_images, begun)
    taught = read_taught(out)
    print("\n".join(_opening(taught, images, teachers)), flush=True)
    missing = taught.missing()
    dataset = TrainSet(images, "multiclass", preparation, augment, config.seed)
    loader = _loader(dataset, taught, missing, config)
    _write_parts(taught, missing, loader, teachers, preparation)
    size = sum(
        part_path(out, view, part).stat().st_size for view in range(taught.views) for part in range(taught.parts)
    )
    print(f"parts written: {len(missing)}; {size / 2**20:.1f} MiB in all, in {out}; try next, with the same options:")
    print(f"  jumbo-vit train --data {config.data} --teacher {out}")
    parts = taught.views * taught.parts
    return {"pictures": len(images), "views": taught.views, "parts": parts, "written": len(missing), "bytes": size}


def _rows(width: int) -> int:
    least, most = _PART_ROWS
    return min(most, max(least, _PART_BYTES // (2 * width)))


def _begin(
    out: Path,
    record: dict[str, Any],
    images: ImageSet,
    preparation: Preparation,
    check: bool,
    begun: Taught | None,
) -> ImageSet:
    """Write the lists of a new folder, or compare those of an old one. Gives the pictures that are taught."""
    if begun is None:
        images = check_images(images, preparation.in_chans, require_all_classes=True) if check else images
        names = [images.name(index) for index in range(len(images))]
        twice = len(names) - len(set(names))
        if twice:
            raise UserError(f"{twice} pictures are listed several times: views go by names, so list each once")
        lists = {"names": names, "checksums": [content_checksum(images, index) for index in range(len(images))]}
        text = json.dumps(lists, ensure_ascii=False).encode("utf-8", "backslashreplace")
        write_bytes(out / PICTURES, text)
    else:
        faults = list(_other(begun.record, record))
        if faults:
            raise UserError(
                f"{out} was begun in another way: {'; '.join(faults)}. Give the same options to go on, or another --out"
            )
        known = set(begun.names)
        images = images.subset([index for index in range(len(images)) if images.name(index) in known])
        then = dict(zip(begun.names, begun.checksums, strict=True))
        changed = [
            images.name(index)
            for index in range(len(images))
            if content_checksum(images, index) != then[images.name(index)]
        ]
        if changed:
            raise UserError(
                f"{len(changed)} pictures have changed since {out} was begun, first {changed[0]}: give another --out"
            )
        record = begun.record | {"views": max(record["views"], begun.views)}
    if begun is None or record != begun.record:
        write_json(out / RECORD, record)
    return images


def _other(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    yield from differences(then["conditions"], now["conditions"])
    if then["seed"] != now["seed"]:
        yield f"seed was {then['seed']}, is {now['seed']}"
    if then.get("precision") != now["precision"]:
        yield f"precision was {then.get('precision')}, is {now['precision']}"
    if then.get("listed") != now["listed"]:
        yield f"the pictures were {then.get('listed')}, are {now['listed']} (number and checksum of names and labels)"
    weights = [[entry.get("checksum") for entry in record["teachers"]] for record in (then, now)]
    if weights[0] != weights[1]:
        names = [listed([str(entry["name"]) for entry in record["teachers"]]) for record in (then, now)]
        yield f"the teachers were {names[0]}, are {names[1]}" + (", with other weights" if names[0] == names[1] else "")


def _opening(taught: Taught, images: ImageSet, teachers: list[Teacher]) -> list[str]:
    lines = [
        f"{len(images)} pictures, {taught.views} views of each, {len(taught.teachers)} teacher(s), "
        f"{len(taught.classes)} classes, {len(images.skipped)} skipped"
    ]
    lines += [f"  skipped {entry.path}: {entry.reason}" for entry in images.skipped[:20]]
    lines += [f"  {note}" for note in [*images.notes, *(note for teacher in teachers for note in teacher.notes)]]
    there = taught.views * taught.parts - len(taught.missing())
    return [*lines, f"going on: {there} of {taught.views * taught.parts} parts are there"] if there else lines


@dataclasses.dataclass(frozen=True)
class _PartBatches:
    """The draws of parts, one after the other, in batches that do not cross their borders."""

    taught: Taught
    parts: list[tuple[int, int]]
    batch_size: int

    def __iter__(self) -> Iterator[list[Draw]]:
        for view, part in self.parts:
            members = self.taught.members(part)
            for start in range(0, len(members), self.batch_size):
                yield [Draw(view, place) for place in members[start : start + self.batch_size]]

    def __len__(self) -> int:
        return sum(-(-len(self.taught.members(part)) // self.batch_size) for _, part in self.parts)


def _loader(dataset: TrainSet, taught: Taught, missing: list[tuple[int, int]], config: TrainConfig) -> Any:
    usual = 0 if config.data == "digits" else min(8, torch.get_num_threads())
    workers = usual if config.workers is None else config.workers
    batches: Any = _PartBatches(taught, missing, config.batch_size or 1)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers if missing else 0,
        worker_init_fn=single_thread,
        multiprocessing_context=config.worker_start if workers and missing else None,
    )


def _write_parts(
    taught: Taught,
    missing: list[tuple[int, int]],
    loader: Any,
    teachers: list[Teacher],
    preparation: Preparation,
) -> None:
    batches = iter(loader)
    for view, part in missing:
        begin, members = time.monotonic(), taught.members(part)
        content = np.empty((len(members), taught.width), np.float16)
        done = 0
        while done < len(members):
            images = next(batches)[0]
            rows = _answers(images, teachers, preparation)
            odd = (~rows.isfinite().all(1)).nonzero()
            if len(odd):
                name = taught.names[members[done + int(odd[0])]]
                raise UserError(f"a teacher's output for {name} in view {view} is not finite: choose another teacher")
            # Below what fp16 reaches a probability is 0.
            content[done : done + len(rows)] = rows.clamp_min(torch.finfo(torch.float16).min).numpy()
            done += len(rows)
        _save(part_path(taught.folder, view, part), content)
        rate = len(members) / max(1e-9, time.monotonic() - begin)
        seen = f"{members[-1] + 1} of {len(taught.names)}"
        print(f"view {view + 1} of {taught.views}: {seen} pictures, {rate:.0f} a second", flush=True)


def _save(path: Path, content: np.ndarray) -> None:
    def write(file: BinaryIO) -> None:
        np.save(file, content)

    write_atomically(path, write)


def _answers(images: Tensor, teachers: list[Teacher], preparation: Preparation) -> Tensor:
    """What is stored of a batch of views: (B, T*C + M) in fp32."""
    rows = []
    for teacher in teachers:
        logits = teacher.logits(images.to(teacher.device), preparation)
        # Classes that matter are then near 0, where fp16 is finest; a shift changes no probability.
        rows.append((logits - logits.amax(1, keepdim=True)).cpu())
    return torch.cat([*rows, torch.stack([mark(view) for view in images])], 1)
