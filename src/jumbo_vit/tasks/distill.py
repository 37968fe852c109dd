"""Function matching: the student learns to answer like its teachers, on the very view that all of them see.

Beyer et al., "Knowledge distillation: A good teacher is patient and consistent" (arXiv:2106.05237): the same augmented
and mixed pictures for student and teacher, the KL divergence at temperature 1, no labels; of several teachers the sum.
Teachers run beside the student, or have been asked beforehand (`jumbo-vit teach`).
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.views import Taught, TaughtSet, is_taught, open_taught
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.teachers import Teacher, open_teacher

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type that teachers compute in, by the run's precision; fp32 where it is not named."""


@dataclass
class Lesson:
    """What a run is taught by: teachers that run beside it, or what they said beforehand.

    Args:
        preparation: The student's.
        teachers: Those that run beside it.
        taught: What was said beforehand, in place of them.
        lineage: Of each teacher: name, source and licence as far as they are known, and a checksum of its weights.
    """

    preparation: Preparation
    teachers: list[Teacher] = field(default_factory=list)
    taught: Taught | None = None
    lineage: list[dict[str, Any]] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Sentences for the log and the summary: who teaches, and what was guessed."""
        names = ", ".join(str(entry["name"]) for entry in self.lineage)
        if self.taught is None:
            return [
                f"Taught by {names}, on the pictures that the student sees.",
                *(n for t in self.teachers for n in t.notes),
            ]
        return [
            f"Taught by what {names} said of {self.taught.views} fixed views of each picture, in {self.taught.folder}.",
            *self.taught.notes,
        ]

    @property
    def checksums(self) -> list[int]:
        """One for each teacher, of its weights; of stored views also how many there are, their seed, and of what."""
        found = [int(entry["checksum"]) for entry in self.lineage]
        if self.taught is None:
            return found
        return [*found, self.taught.views, self.taught.seed, zlib.crc32(str(self.taught.record.get("listed")).encode())]

    def check_same(self, then: list[int] | None, out: Path) -> None:
        """Refuse to go on with a run whose teachers were others.

        Raises:
            UserError: Their weights have changed.
        """
        if then != self.checksums:
            names = ", ".join(str(entry["name"]) for entry in self.lineage)
            what = "weights of its teachers" if self.taught is None else "stored views"
            raise UserError(
                f"{out}: this run began with other {what} ({names}): put the old ones back, or start a new run with "
                f"--init-from {out / 'model'}"
            )

    def pictures(self, usual: TrainSet, augment: Augmentation) -> TrainSet:
        """The training pictures: the usual ones, or the fixed views with what was said of them.

        Raises:
            UserError: A picture has no views there.
        """
        if self.taught is None:
            return usual
        return TaughtSet(usual.images, usual.task, self.preparation, augment, self.taught)


def open_lesson(
    config: TrainConfig,
    labels: list[str],
    preparation: Preparation,
    augment: Augmentation,
    device: torch.device | str,
    precision: str,
) -> Lesson | None:
    """The teachers that complete options name, or None.

    Args:
        config: Complete options.
        labels: The student's classes.
        preparation: The student's.
        augment: How training pictures are changed.
        device: Of the run.
        precision: Of the run: "fp32", "bf16" or "fp16".

    Raises:
        UserError: A teacher cannot be had or does not fit the data, or the views were made in another way.
    """
    if not config.teacher:
        return None
    if is_taught(config.teacher[0]):
        taught = open_taught(Path(config.teacher[0]), labels, preparation, augment)
        taught.notes += list(_limits_of_views(config, taught.views))
        return Lesson(preparation, taught=taught, lineage=taught.teachers)
    teachers = open_teachers(config.teacher, labels, device, precision)
    return Lesson(preparation, teachers, lineage=[told_of(teacher) for teacher in teachers])


def _limits_of_views(config: TrainConfig, views: int) -> Iterator[str]:
    """In what a run on stored views is not what its options say of a teacher beside it."""
    if config.mixup or config.cutmix:
        yield "Pictures are mixed, and so is what was said of each: a teacher would say something else of the mixture."
    if config.aug_repeats > views:
        yield f"--aug-repeats {config.aug_repeats} shows some of a picture's {views} stored views twice in an epoch."


def open_teachers(names: list[str], labels: list[str], device: torch.device | str, precision: str) -> list[Teacher]:
    """Teachers for logits, computing in the given precision.

    Raises:
        UserError: One cannot be had, or does not fit the classes.
    """
    teachers = [open_teacher(name, device, labels) for name in names]
    for teacher in teachers:
        teacher.low = LOW.get(precision)
    return teachers


def told_of(teacher: Teacher) -> dict[str, Any]:
    """What model folders and taught folders say of a teacher."""
    return teacher.lineage | {"checksum": teacher.checksum()}


class FunctionMatching(Classification):
    """The objective of a run with teachers: for each sample the sum over the teachers of KL(teacher || student).

    Args:
        num_classes: C.
        mixing: Mixup and cutmix, which teachers that run beside the student see too; and smoothing of the labels.
        lesson: The teachers.
        label_weight: w in (1 - w) * KL + w * loss of the labels.
        class_weights: Of the loss of the labels, as in `Classification`.
        loss: Of the labels, "ce" or "bce".
    """

    def __init__(
        self,
        num_classes: int,
        mixing: Mixing,
        lesson: Lesson,
        label_weight: float = 0.0,
        class_weights: Tensor | None = None,
        loss: str = "ce",
    ) -> None:
        super().__init__("multiclass", num_classes, mixing, class_weights, loss)
        self.lesson, self.label_weight = lesson, label_weight
        if lesson.taught is not None and self._mixup is not None:
            # What the teachers said of two pictures is mixed as the two pictures' labels are.
            width = num_classes * (1 + len(lesson.lineage))
            self._mixup = Mixup(
                mixing.mixup,
                mixing.cutmix,
                prob=mixing.mixup_prob,
                label_smoothing=0.0,
                num_classes=width,
                multi_label=True,
            )

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Losses (B,) of one forward pass in training; `seed` fixes mixing, dropout and drop path."""
        images, targets, answers = self._remembered(*batch, seed) if self.lesson.taught else self._asked(*batch, seed)
        logits = self.logits(model, images, seed)
        matched = matching_losses(logits, answers)
        if not self.label_weight:
            return matched
        return (1 - self.label_weight) * matched + self.label_weight * self.losses(logits, targets)

    def _asked(self, images: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mixed pictures, their labels, and the answers (B, T, C) of teachers that look at them."""
        images, targets = self.mix(images, targets, seed)
        answers = [teacher.logits(images, self.lesson.preparation).softmax(-1) for teacher in self.lesson.teachers]
        return images, targets, torch.stack(answers, 1)

    def _remembered(self, images: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same of what `TaughtSet` gives, where `targets` are the label and the logits of all teachers.

        Mixed pictures have the mixture of the answers on either picture, which is not what the teachers would say of
        the mixed one.
        """
        classes = self.num_classes
        labels, answers = targets[:, 0].long(), targets[:, 1:].unflatten(1, (-1, classes)).softmax(-1)
        if self._mixup is None:
            return images, labels, answers
        dense = torch.cat([F.one_hot(labels, classes).float(), answers.flatten(1)], 1)
        images, dense = self.mix(images, dense, seed)
        return images, dense[:, :classes], dense[:, classes:].unflatten(1, (-1, classes))


def matching_losses(logits: Tensor, answers: Tensor) -> Tensor:
    """For each sample the sum over the teachers of KL(teacher || student) in nats, (B,), in fp32.

    Args:
        logits: The student's (B, C).
        answers: The teachers' probabilities (B, T, C).
    """
    own = logits.float().log_softmax(-1)[:, None].expand_as(answers)
    return F.kl_div(own, answers, reduction="none").sum((1, 2))
