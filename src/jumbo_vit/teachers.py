"""Models that teach: frozen, with a preparation of their own, and shown the picture that the student sees.

What is unusual: a teacher takes the student's normalised batch. It takes the student's mean and standard deviation off
again, resizes the very same crop to its own size, and normalises in its own way, so that both look at one view.
"""

import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import is_model
from torch import Tensor, nn

from jumbo_vit.checkpoints import read_json
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.records import listed
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.folder import open_folder, resolve_folder


class Features(NamedTuple):
    """What a teacher says of pictures without classes.

    Args:
        vector: The class token, the Jumbo vector, or what the head reads where there is neither, (B, Dg).
        patches: The patch tokens on their grid, or the last map of a convolutional model, (B, Dp, gh, gw).
    """

    vector: Tensor
    patches: Tensor


@dataclass
class Teacher:
    """A frozen model and what it needs to look at a student's pictures; made by `open_teacher`.

    Args:
        name: As the user named it.
        model: In evaluation mode, without gradients.
        preparation: Its own.
        device: Where it is.
        order: For each class of the student, the teacher's output (C,); None where only features are asked for.
        notes: What was guessed, each a sentence for the summary.
        lineage: Name, source and licence, as far as they are known.
        low: The type that it computes in, or None for fp32.
    """

    name: str
    model: nn.Module
    preparation: Preparation
    device: torch.device
    order: Tensor | None = None
    notes: list[str] = field(default_factory=list)
    lineage: dict[str, Any] = field(default_factory=dict)
    low: torch.dtype | None = None

    def logits(self, images: Tensor, preparation: Preparation) -> Tensor:
        """Logits in fp32 in the order of the student's classes, without gradient.

        Args:
            images: The student's batch (B, C, H, W), normalised as `preparation` says, of any size.
            preparation: The student's.

        Returns:
            (B, classes of the student).

        Raises:
            UserError: Its channels do not fit the student's.
        """
        assert self.order is not None, "open_teacher was not told the student's classes"
        with torch.no_grad(), self._precision(images):
            output: Tensor = self.model(self.view(images, preparation))
        return output.float()[:, self.order]

    def features(self, images: Tensor, preparation: Preparation) -> Features:
        """Global vector and patches in fp32, without gradient; arguments as in `logits`.

        Raises:
            UserError: Its channels do not fit the student's, or it gives tokens that make no grid.
        """
        with torch.no_grad(), self._precision(images):
            view = self.view(images, preparation)
            found = self._split(self.model.forward_features(view), view)  # type: ignore[operator]
        return Features(found.vector.float(), found.patches.float())

    def shapes(self) -> tuple[int, int, tuple[int, int]]:
        """Width of the global vector, width of a patch, and (rows, columns) of the grid, from one empty picture."""
        size = self.preparation.input_size
        found = self.features(torch.zeros(1, *size, device=self.device), self.preparation)
        return found.vector.shape[1], found.patches.shape[1], (found.patches.shape[2], found.patches.shape[3])

    def checksum(self) -> int:
        """Of its weights: a run that goes on must have the same teacher."""
        total = 0
        for name, value in sorted(self.model.state_dict().items()):
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            total = zlib.crc32(raw, zlib.crc32(name.encode(), total))
        return total

    def view(self, images: Tensor, preparation: Preparation) -> Tensor:
        """The student's batch as the teacher's input (B, its channels, its height, its width).

        Raises:
            UserError: Its channels do not fit the student's.
        """
        mine, chans = self.preparation, images.shape[1]
        own_mean, own_std = _columns(mine, images)
        mean, std = _columns(preparation, images)
        if chans not in (1, mine.in_chans):
            raise UserError(
                f"the teacher {self.name} takes pictures of {mine.in_chans} channel(s), the data have {chans}: set "
                f"--in-chans {mine.in_chans}, or choose another teacher"
            )
        images = images.float()
        if images.shape[-2:] != mine.input_size[1:]:
            images = F.interpolate(images, mine.input_size[1:], mode="bicubic", antialias=True, align_corners=False)
        if (mine.mean, mine.std) == (preparation.mean, preparation.std):
            return images
        # Grey broadcasts to as many channels as the teacher has.
        return (images * std + mean - own_mean) / own_std

    def _precision(self, images: Tensor) -> Any:
        # Its own, so that a caller's autocast changes nothing.
        return torch.autocast(images.device.type, dtype=self.low or torch.bfloat16, enabled=self.low is not None)

    def _split(self, tokens: Any, view: Tensor) -> Features:
        model: Any = self.model
        if isinstance(tokens, dict) and isinstance(tokens.get("patches"), Tensor):  # timm's NaFlex models
            tokens = tokens["patches"]
        if isinstance(tokens, Tensor) and tokens.ndim == 4:
            channels_last = str(getattr(model, "output_fmt", "NCHW")).upper().endswith("NHWC")
            patches = tokens.permute(0, 3, 1, 2) if channels_last else tokens
            return Features(patches.mean((2, 3)), patches)
        if not isinstance(tokens, Tensor) or tokens.ndim != 3:
            raise UserError(f"the teacher {self.name} gives neither patch tokens nor a map: choose another teacher")
        prefix = int(getattr(model, "num_prefix_tokens", 1 if _has_class_token(model) else 0))
        rows, columns = self._grid(tokens.shape[1] - prefix, view)
        patches = tokens[:, prefix:].transpose(1, 2).unflatten(2, (rows, columns))
        return Features(self._vector(tokens), patches)

    def _vector(self, tokens: Tensor) -> Tensor:
        model: Any = self.model
        if getattr(model, "num_jumbo", 0):
            jumbo: Tensor = model.split(tokens)[0]
            return jumbo.flatten(1)
        if _has_class_token(model):
            return tokens[:, 0]
        pooled: Tensor = model.forward_head(tokens, pre_logits=True)
        return pooled

    def _grid(self, patches: int, view: Tensor) -> tuple[int, int]:
        """Rows and columns of the tokens: by the size of a patch, else a square."""
        embed = getattr(self.model, "patch_embed", None) or getattr(self.model, "embeds", None)
        size = getattr(embed, "patch_size", None)
        if isinstance(size, int):
            size = (size, size)
        if size is not None:
            rows, columns = (side // part for side, part in zip(view.shape[-2:], size, strict=True))
            if rows * columns == patches:
                return rows, columns
        side = math.isqrt(max(0, patches))
        if side == 0 or side * side != patches:
            raise UserError(f"the {patches} patch tokens of the teacher {self.name} make no grid: choose another one")
        return side, side


def open_teacher(source: str, device: torch.device | str, labels: list[str] | None = None) -> Teacher:
    """A teacher by name.

    Args:
        source: A model folder, a run's folder, or a name of timm with pretrained weights.
        device: Where it shall be.
        labels: The student's classes, for teachers whose logits are wanted; None for features alone.

    Raises:
        UserError: There is no such thing, it cannot be read or had, or its classes are not the student's.
    """
    path = Path(source).expanduser()
    teacher = _open_folder(source, path, labels) if path.is_dir() else _open_timm(source, labels)
    teacher.model = teacher.model.eval().requires_grad_(False).to(device)
    teacher.device = torch.device(device)
    if teacher.order is not None:
        teacher.order = teacher.order.to(device)
    return teacher


def match_classes(source: str, theirs: list[str], labels: list[str]) -> tuple[list[int], list[str]]:
    """For each class of the student, the place of its name among the teacher's; and notes.

    Raises:
        UserError: The teacher lacks names; they are listed.
    """
    places = {name: place for place, name in enumerate(theirs)}
    missing = [name for name in labels if name not in places]
    if missing:
        raise UserError(
            f"the teacher {source} does not know {len(missing)} of the {len(labels)} classes: {listed(missing)}; its "
            f"own are {listed(theirs)}"
        )
    notes = []
    if len(theirs) > len(labels):
        notes.append(
            f"The teacher {source} has {len(theirs)} classes; only its outputs for the {len(labels)} of the data are "
            "used."
        )
    return [places[name] for name in labels], notes


def _open_folder(source: str, path: Path, labels: list[str] | None) -> Teacher:
    folder = resolve_folder(path)
    model, contract = open_folder(folder)
    lineage = {"name": source} | {key: contract.lineage[key] for key in _KNOWN if key in contract.lineage}
    teacher = Teacher(source, model, contract.preparation, torch.device("cpu"), lineage=lineage)
    if labels is None:
        return teacher
    if contract.task != "multiclass":
        raise UserError(
            f"the teacher {source} was trained with --task {contract.task}: its outputs are no distribution over "
            "classes, so it can teach features alone"
        )
    config = read_json(folder / "config.json")
    named = config.get("label_names") or config.get("jumbo_vit", {}).get("labels")
    if named:
        order, teacher.notes = match_classes(source, contract.labels, labels)
        teacher.order = torch.tensor(order)
    else:
        _guess_order(teacher, len(contract.labels), labels)
    return teacher


_KNOWN = ("source", "license", "init_from", "epoch", "metric", "score", "weights")


def _open_timm(source: str, labels: list[str] | None) -> Teacher:
    if not is_model(source):
        hint = nearest(source, timm.list_models(pretrained=True))
        raise UserError(f"--teacher {source}: no such folder, and no model of timm{hint}")
    try:
        model: Any = timm.create_model(source, pretrained=True)
    except Exception as error:  # the hub's client raises its own and its libraries' errors, by version
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--teacher {source}: its pretrained weights cannot be had ({first})") from error
    cfg = model.pretrained_cfg
    lineage = {
        "name": source,
        "source": cfg.get("hf_hub_id") or cfg.get("url") or cfg.get("file") or "timm",
        "license": cfg.get("license") or "not stated",
    }
    teacher = Teacher(source, model, Preparation.from_cfg(cfg), torch.device("cpu"), lineage=lineage)
    if labels is None:
        return teacher
    subset = infer_imagenet_subset(model)
    synsets = ImageNetInfo(subset).label_names() if subset else []
    if set(labels) <= set(synsets) and len(synsets) == model.num_classes:
        order, teacher.notes = match_classes(source, synsets, labels)
        teacher.order = torch.tensor(order)
    else:
        _guess_order(teacher, int(model.num_classes), labels)
    return teacher


def _guess_order(teacher: Teacher, classes: int, labels: list[str]) -> None:
    """Take a teacher's classes in the student's order where it has as many and does not name them."""
    if classes != len(labels):
        has = f"has {classes} classes without names" if classes else "has no classes, only features"
        raise UserError(
            f"the teacher {teacher.name} {has}, the data have {len(labels)}: fine-tune it on these data first "
            "(jumbo-vit train --init-from), and give its folder"
        )
    teacher.order = torch.arange(classes)
    teacher.notes.append(
        f"The teacher {teacher.name} does not name its {classes} classes: they are taken to be those of the data in "
        f"the same order ({listed(labels)}); if they are not, it teaches wrong answers."
    )


def _has_class_token(model: Any) -> bool:
    embeds = getattr(model, "embeds", None)
    return getattr(model, "cls_token", None) is not None or getattr(embeds, "cls_token", None) is not None


def _columns(preparation: Preparation, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as (1, C, 1, 1)."""
    mean, std = (torch.tensor(v, device=like.device).view(1, -1, 1, 1) for v in (preparation.mean, preparation.std))
    return mean, std
