"""`--balance`: what it means for a run's loss, order, and choice of the best model, and what the run says of it."""

from typing import Any

import torch
from torch import Tensor

from jumbo_vit.data.balance import class_weights, label_weights
from jumbo_vit.data.check import IMBALANCE
from jumbo_vit.data.records import ImageSet
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.score import new_score


def best_metric(config: TrainConfig, labels: list[str]) -> str:
    """The score that decides which model is kept: who balances wants each class to count equally here too."""
    if config.balance != "none" and config.task == "multiclass":
        return "balanced_accuracy"
    return new_score(config.task, labels).metric


def loss_weights(config: TrainConfig, train: ImageSet) -> Tensor | None:
    """The weights of the classes in the loss: (C,), for "multilabel" (2, C) of absent and present; None without any.

    Args:
        config: Complete options.
        train: The training pictures in use, without those that cannot be read.

    Raises:
        UserError: A class has no picture.
    """
    if config.balance != "weights":
        return None
    counts = train.class_counts()
    if config.task == "multilabel":
        return torch.tensor(label_weights(counts, train.classes, len(train))).T.contiguous()
    return torch.tensor(class_weights(counts, train.classes))


def drawn_classes(config: TrainConfig, train: ImageSet) -> list[int] | None:
    """The class of each picture, where the order of an epoch has to be balanced over them; else None.

    Raises:
        UserError: A class has no picture.
    """
    if config.balance != "sampler":
        return None
    class_weights(train.class_counts(), train.classes)  # for its complaint
    return [labels[0] for labels in train.labels]


def balance_facts(config: TrainConfig, train: ImageSet) -> dict[str, Any]:
    """For `summary.json`: the way, and by class the weights, or how often an epoch draws its pictures in the mean."""
    names, counts = train.classes, train.class_counts()
    if config.balance == "none":
        return {"by": "none"}
    if config.task == "multilabel":
        pairs = zip(names, label_weights(counts, names, len(train)), strict=True)
        weights: dict[str, Any] = {name: {"absent": absent, "present": present} for name, (absent, present) in pairs}
    else:
        weights = dict(zip(names, class_weights(counts, names), strict=True))
    return {"by": config.balance, "class_weights" if config.balance == "weights" else "draws_per_picture": weights}


def balance_notes(config: TrainConfig, train: ImageSet) -> list[str]:
    """What a reader of the log should know: what is balanced by how much, or that it may be wise to."""
    counts = train.class_counts()
    present = [count for count in counts if count]
    if not present:
        return []
    rare, common = (train.classes[counts.index(find(present))] for find in (min, max))
    sizes = f"{common} has {max(present)} training pictures, {rare} {min(present)}"
    if config.balance == "none":
        if config.task == "multilabel" or max(present) <= IMBALANCE * min(present):
            return []
        return [f"{sizes}: look at balanced_accuracy beside top1, and see --balance weights."]
    facts = balance_facts(config, train)
    if config.balance == "sampler":
        draws = facts["draws_per_picture"]
        return [
            f"Every class is drawn equally often; {sizes}: in an epoch a picture of {rare} comes {draws[rare]:.3g} "
            f"times, one of {common} {draws[common]:.3g} times, in the mean."
        ]
    weights = facts["class_weights"]
    if config.task == "multilabel":
        return [f"Each label's presence and absence weigh alike in the loss; present, {rare} weighs "
                f"{weights[rare]['present']:.3g}, {common} {weights[common]['present']:.3g}."]  # fmt: skip
    return [f"{sizes}; in the loss they weigh {weights[common]:.3g} and {weights[rare]:.3g}, the mean picture 1."]
