"""The batch that gave no finite loss: written as it happened, and computed again on request."""

import io
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jumbo_vit.errors import UserError
from jumbo_vit.files import write_bytes
from jumbo_vit.tasks.fabric import PRECISIONS
from jumbo_vit.tasks.loop import Bad
from jumbo_vit.tasks.state import Progress

FILE = "bad-batch.pt"


def write_bad(
    path: Path,
    weights: dict[str, Tensor],
    progress: Progress,
    place: tuple[int, int],
    bad: Bad,
    precision: str,
    size: int,
    class_weights: Tensor | None,
    labels: list[str],
) -> None:
    """Write weights, batches, seeds and loss of a bad update: plain tensors and numbers.

    Args:
        path: The file to write.
        weights: The model's, as the update saw them.
        progress: Where the run stands.
        place: The update's number in the whole run, and the run's number of updates.
        bad: The update's passes, of all processes.
        precision: "fp32", "bf16" or "fp16".
        size: The number of samples in the update.
        class_weights: Of the loss, or None.
        labels: Names of the classes.
    """
    content = {
        "jumbo_vit_bad_batch": 1,
        "model": weights,
        "batches": bad.batches,
        "seeds": bad.seeds,
        "loss": bad.loss,
        "size": size,
        "class_weights": class_weights,
        "labels": labels,
        "precision": precision,
        "epoch": progress.epoch,
        "update": progress.update,
        "place": place,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def replay(run: Path) -> dict[str, Any]:
    """Compute the saved bad update of a run again, on the CPU, in the run's precision.

    Returns:
        `recorded` and `replayed` loss, whether they are the `same` value or `close` (sums in another order), the
        gradient's norm, which samples have a loss that is not finite, and which inputs hold values that are not finite.

    Raises:
        UserError: The run has no bad batch, or the file is damaged.
    """
    from jumbo_vit.tasks.build import augmentation, build_model, command_of, load_config, make_objective
    from jumbo_vit.tasks.distill import open_lesson
    from jumbo_vit.tasks.frozen import trained_part
    from jumbo_vit.tasks.schedules import before_update

    path = run / FILE
    if not path.is_file():
        raise UserError(f"{run} holds no {FILE}: no loss of that run was other than finite, or it is another folder")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        state, place = content["model"], content["place"]
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise UserError(f"{path} is cut off or no batch that was saved by a run") from error
    if command_of(run) == "pretrain":
        from jumbo_vit.tasks.pretrain import parts_of

        model, objective = parts_of(run, content["precision"])
        model.load_state_dict(state)
    else:
        config = load_config(run)
        classes = state[_head_name(state)].shape[0]
        model, preparation = build_model(config, classes)
        model.load_state_dict(state)
        model = trained_part(model, config)
        before_update(config, model)(*place)
        lesson = open_lesson(config, content["labels"], preparation, augmentation(config), "cpu", content["precision"])
        objective = make_objective(config, classes, content["class_weights"], lesson)
    model.train()
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(content["precision"])
    assert content["precision"] in PRECISIONS
    total = torch.zeros(())
    losses = []
    for (images, targets, weights), seed in zip(content["batches"], content["seeds"], strict=True):
        with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
            each = objective.step(model, (images, targets), seed)
        share = (each * weights).sum()
        (share / content["size"]).backward()
        losses.append(each.detach())
        total += share.detach().float()
    loss, recorded = float(total) / content["size"], float(content["loss"])
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    each_loss = torch.cat(losses)
    finite_inputs = torch.cat([_pixels(images).flatten(1).isfinite().all(1) for (images, _, _) in content["batches"]])
    return {
        "epoch": content["epoch"] + 1,
        "update": content["update"],
        "recorded": recorded,
        "replayed": loss,
        "same": loss == recorded or (math.isnan(loss) and math.isnan(recorded)),
        "close": math.isclose(loss, recorded, rel_tol=1e-4),
        "gradient_norm": norm,
        "samples": len(each_loss),
        "bad_samples": (~each_loss.isfinite()).nonzero().flatten().tolist(),
        "bad_inputs": (~finite_inputs).nonzero().flatten().tolist(),
        "bad_weights": [name for name, value in state.items() if not value.isfinite().all()],
    }


def _pixels(images: Any) -> Tensor:
    """The pictures of a batch, whole or cut into patches."""
    pixels: Tensor = images["patches"] if isinstance(images, dict) else images
    return pixels


def _head_name(state: dict[str, Any]) -> str:
    names = [
        name for name in ("head.bias", "head.weight", "fc.bias", "classifier.bias", "head.fc.bias") if name in state
    ]
    return names[0] if names else list(state)[-1]
