"""Training a part of a model: which weights move, and the head's training on stored features."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from jumbo_vit.checkpoints import LoadReport
from jumbo_vit.data.pipeline import EvalSet, Preparation, eval_loader, target_tensor
from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.data.sets import ImageSet, Splits
from jumbo_vit.errors import UserError
from jumbo_vit.lora import bypass_names
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.features import Features, features_folder, store_features
from jumbo_vit.tasks.partial import partial_flag

Batch = tuple[Tensor, Tensor, Tensor]


class HeadOnly(nn.Module):
    """A model of which only the classifier runs: the head's input (B, H) to logits (B, num_classes).

    It registers the whole model, so that averages, optimizers and checkpoints meet the parameters they always meet.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.model.get_classifier()(features)
        return logits


def trained_part(model: nn.Module, config: TrainConfig) -> nn.Module:
    """What the loop trains: the model; with `--freeze` its head. Weights that stay as they are lose their gradient.

    Raises:
        UserError: The model has no single head.
    """
    if not partial_flag(config):
        return model
    head = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    if not isinstance(head, nn.Module) or not list(head.parameters()):
        raise UserError(
            f"{partial_flag(config)} trains the head, and {config.model} has not one: choose another --model"
        )
    model.requires_grad_(False)
    head.requires_grad_(True)
    if config.freeze:
        return HeadOnly(model)
    bypasses = set(bypass_names(model))
    for name, parameter in model.named_parameters():
        if name in bypasses:
            parameter.requires_grad_(True)
    return model


def check_start(model: Any, report: LoadReport, config: TrainConfig) -> None:
    """Refuse a trunk that would stay random, or without bypasses that it was trained with.

    Args:
        model: As it was started from `config.init_from`.
        report: What was taken.
        config: Complete options.

    Raises:
        UserError: It is so.
    """
    flag = partial_flag(config)
    if not flag:
        return
    names = model.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
    # The norm behind the pool starts as a plain normalisation, with nothing random in it.
    own = [name for name in report.new if not name.startswith((*heads, "fc_norm."))]
    lost = [name for name in report.unused if ".lora" in name]
    if lost:
        raise UserError(
            f"{flag}: {config.init_from} was trained with bypasses of another rank or form ({lost[0]}): give the model "
            "its own --lora-rank and lora_form, or merge them first by jumbo_vit.merge_lora"
        )
    bypasses = set(bypass_names(model)) if config.lora_rank else set()
    random = [name for name in own if name not in bypasses]
    if random:
        raise UserError(
            f"{flag} keeps the trunk as it is, but {len(random)} of its tensors are not in {config.init_from} and "
            f"would stay random, first {random[0]}: choose the --model (and --model-args) of these weights"
        )


def trained_parameters(model: nn.Module) -> int:
    """The number of parameters that a run trains."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class StoredTrainSet(Dataset[Batch]):
    """Stored features in place of augmented pictures: whole batches (B, H), targets, and weights 1 or 0."""

    def __init__(self, features: Features, images: ImageSet, task: str) -> None:
        self.features, self.images, self.task = features, images, task

    def __len__(self) -> int:
        return len(self.features)

    def __getitems__(self, draws: Sequence[Draw]) -> Batch:
        samples = [self.images.samples[draw.sample] for draw in draws]
        targets = [target_tensor(sample.labels, len(self.images.classes), self.task) for sample in samples]
        rows = self.features.rows([draw.sample for draw in draws], *self.features.trunk.head)
        return rows, torch.stack(targets), torch.tensor([float(draw.real) for draw in draws])


class StoredEvalSet(EvalSet):
    """Stored features in place of pictures, in the set's order."""

    def __init__(self, features: Features, images: ImageSet, task: str) -> None:
        self.features, self.images, self.task = features, images, task

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        target = target_tensor(self.images.samples[index].labels, len(self.images.classes), self.task)
        return self.features.rows([index], *self.features.trunk.head)[0], target, index


@dataclass(frozen=True)
class Stored:
    """The features of a run's pictures.

    Args:
        train: Of the training pictures.
        val: Of those held out.
        splits: The pictures.
        task: "multiclass" or "multilabel".
    """

    train: Features
    val: Features
    splits: Splits
    task: str

    def loader(self, batches: EpochBatches) -> Any:
        """A loader over `batches`, as the loop wants it."""
        dataset = StoredTrainSet(self.train, self.splits.train, self.task)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=_as_it_is)

    def scoring(self, models: Mapping[str, Any], rank: int, world: int) -> tuple[dict[str, nn.Module], Any]:
        """The models' heads by name, and a loader of the held-out features for them."""
        # An averaged model holds the model itself in `module`.
        heads: dict[str, nn.Module] = {
            name: HeadOnly(getattr(model, "module", model)) for name, model in models.items()
        }
        return heads, eval_loader(StoredEvalSet(self.val, self.splits.val, self.task), 0, rank, world)


def _as_it_is(batch: Any) -> Any:
    return batch


def store_for_run(
    model: nn.Module,
    splits: Splits,
    preparation: Preparation,
    config: TrainConfig,
    out: Path,
    fabric: Any,
    workers: int,
    everywhere: Callable[[Any], Iterable[Any]],
) -> Stored:
    """The features of a run's pictures, kept beside its folder; each process computes its share.

    Args:
        model: On its device, with the weights it is to keep.
        splits: The pictures.
        preparation: Evaluation's.
        config: Complete options.
        out: The run's folder.
        fabric: Lightning's Fabric.
        workers: Processes that load pictures.
        everywhere: Gives the values of all processes for that of this one, and so waits for all.

    Raises:
        UserError: A process could not do its share.
    """
    found: list[Features] = []
    fault = ""
    try:
        for images in (splits.train, splits.val):
            share = (fabric.global_rank, fabric.world_size)
            args = (features_folder(out), fabric.device, workers, config.worker_start, share)
            found.append(store_features(model, images, preparation, *args))
    except UserError as error:
        fault = str(error)
    faults = [text for text in everywhere(fault) if text]
    if faults:
        raise UserError(faults[0])
    computed = sum(everywhere(sum(features.computed for features in found)))
    total = sum(map(len, found))
    where = ", ".join(str(features.folder) for features in found)
    fabric.print(f"features of {total} pictures: {computed} computed, {total - computed} stored before, in {where}")
    train, val = found
    return Stored(train, val, splits, config.task)
