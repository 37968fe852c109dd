"""`jumbo-vit evaluate`: a trained model on held-out pictures."""

from typing import Any

from jumbo_vit.data.pipeline import EvalSet, eval_loader
from jumbo_vit.data.sets import ImageSet, check_images, open_data, open_held_out
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.evaluate import score_models


def evaluate(model: str, data: str, device: str = "auto", workers: int = 0) -> dict[str, Any]:
    """Score a model folder, run or official checkpoint on `data`; the same numbers as training's own.

    Args:
        model: What `jumbo_vit.load` opens.
        data: "digits", a folder (its held-out part if it has one, else the folder itself), or a CSV.
        device: "auto", "cpu", "cuda" or "mps".
        workers: Processes that load pictures.

    Returns:
        Fractions by name, `n`, `skipped` (path and reason) and `notes`.

    Raises:
        UserError: No such model or data, or classes that the model does not know.
    """
    if workers < 0:
        raise UserError(f"--workers is {workers}, but must be 0 or more")
    predictor = load(model, device)
    contract = predictor.contract
    images = _drawn_in_training(data, contract) or _held_out(data, contract)
    loader = eval_loader(EvalSet(images, contract.task, contract.preparation), workers)
    scores = score_models(
        {"model": predictor.model},
        loader,
        contract.task,
        contract.labels,
        predictor.device,
        thresholds=contract.thresholds,
    )
    skipped = [{"path": s.path, "reason": s.reason} for s in images.skipped]
    return {**scores["model"], "skipped": skipped, "notes": images.notes}


def _held_out(data: str, contract: Contract) -> ImageSet:
    found = open_held_out(data, contract.task, contract.labels)  # type: ignore[arg-type]
    if not found.samples:
        first = f", first {found.skipped[0].path}: {found.skipped[0].reason}" if found.skipped else ""
        raise UserError(f"there is no picture to score in {data}{first}")
    return check_images(found, contract.preparation.in_chans)


def _drawn_in_training(data: str, contract: Contract) -> ImageSet | None:
    """The part that training held out, where `data` is the very tree or table from which it drew it."""
    split = contract.lineage.get("split")
    if not split:
        return None
    try:
        splits = open_data(data, contract.task, split["seed"], split["val_fraction"])  # type: ignore[arg-type]
    except UserError:
        return None
    if not splits.drawn or splits.val.classes != contract.labels:
        return None
    images = check_images(splits.val, contract.preparation.in_chans)
    if images.checksum() != split["checksum"]:
        return None
    images.notes.append(f"Scored are the {len(images)} pictures that training held out: {splits.held_out}.")
    return images
