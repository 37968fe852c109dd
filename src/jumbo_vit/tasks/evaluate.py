"""Measuring models on a set: one code for training's own score, for `evaluate`, and for every later command."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from jumbo_vit.data.pipeline import EVAL_BATCH
from jumbo_vit.tasks.score import Gather, Reduce, as_is, new_score


def score_models(
    models: Mapping[str, nn.Module],
    loader: Any,
    task: str,
    labels: list[str],
    device: torch.device,
    total: Reduce = as_is,
    gather: Gather = as_is,
    batches: int | None = None,
    thresholds: list[float] | None = None,
    watch: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    make_score: Callable[[], Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Score several models in one pass over a loader of (images, targets, index); always in fp32.

    Args:
        models: By name; put in evaluation mode for the pass, and back after it.
        loader: Batches of at most EVAL_BATCH samples.
        task: "multiclass" or "multilabel".
        labels: Class names.
        device: Where the models are.
        total: Sums a tensor over the processes.
        gather: Concatenates a tensor of each process.
        batches: Forward passes to make, where sharded models need every process to make equally many.
        thresholds: Per class, the probability from which a label is given; multilabel only.
        watch: Gets the last model's logits, the targets and the samples' indices, batch by batch.
        make_score: Makes an empty score for outputs and targets of another kind than `task`'s.

    Returns:
        The numbers of each model, by its name.
    """
    scores = {name: make_score() if make_score else new_score(task, labels, thresholds) for name in models}
    modes = {name: model.training for name, model in models.items()}
    done = 0
    images = None
    try:
        for model in models.values():
            model.eval()
        with torch.no_grad(), _no_autocast(device):
            for images, targets, index in loader:
                for name, model in models.items():
                    logits = model(images.to(device))
                    scores[name].update(logits, targets)
                if watch is not None:
                    watch(logits, targets, index)
                done += 1
            while batches is not None and done < batches:
                _idle_pass(models, images, loader, device)
                done += 1
    finally:
        for name, model in models.items():
            model.train(modes[name])
    return {name: score.result(total, gather) for name, score in scores.items()}


def _idle_pass(models: Mapping[str, nn.Module], images: Tensor | None, loader: Any, device: torch.device) -> None:
    """Take part in a sharded model's communication without a sample of one's own."""
    if images is None:
        images = loader.dataset[0][0][None]
    for model in models.values():
        model(images[:1].to(device))


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else nullcontext()


def passes_of_rank_zero(samples: int, world: int) -> int:
    """Batches that the process with the largest share makes."""
    share = math.ceil(samples / world)
    return math.ceil(share / EVAL_BATCH)
