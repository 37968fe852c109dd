"""`jumbo-vit evaluate`: a trained model on held-out pictures."""

from typing import Any

from jumbo_vit.data.folds import take_fold
from jumbo_vit.data.pipeline import EvalSet, eval_loader
from jumbo_vit.data.sets import ImageSet, check_images, open_data, open_held_out
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.evaluate import score_models
from jumbo_vit.tasks.report import new_outputs, report_file, shown, write_report


def evaluate(
    model: str, data: str, device: str = "auto", workers: int = 0, report: str | None = None
) -> dict[str, Any]:
    """Score a model folder, run or official checkpoint on `data`; the same numbers as training's own.

    Args:
        model: What `jumbo_vit.load` opens.
        data: "digits", a folder (its held-out part if it has one, else the folder itself), or a CSV.
        device: "auto", "cpu", "cuda" or "mps".
        workers: Processes that load pictures.
        report: A folder for a page that shows the numbers and the pictures behind them.

    Returns:
        Fractions by name, `n`, `skipped` (path and reason) and `notes`; with a report also its path, `report`.

    Raises:
        UserError: No such model or data, classes that the model does not know, or no place for a report.
    """
    if workers < 0:
        raise UserError(f"--workers is {workers}, but must be 0 or more")
    page = None if report is None else report_file(report)
    predictor = load(model, device)
    contract = predictor.contract
    images = _drawn_in_training(data, contract) or _held_out(data, contract)
    loader = eval_loader(EvalSet(images, contract.task, contract.preparation), workers)
    outputs = None if page is None else new_outputs(contract)
    scores = score_models(
        {"model": predictor.model},
        loader,
        contract.task,
        contract.labels,
        predictor.device,
        thresholds=contract.thresholds,
        watch=None if outputs is None else outputs.update,
    )
    skipped = [{"path": s.path, "reason": s.reason} for s in images.skipped]
    numbers = {**scores["model"], "skipped": skipped, "notes": [shown(note) for note in images.notes]}
    if page is not None and outputs is not None:
        write_report(page, (model, data), predictor, images, outputs, numbers)
        numbers["report"] = shown(str(page))
    return numbers


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
        if splits.drawn and split.get("fold"):
            splits = take_fold(splits, split["folds"], split["fold"], split["seed"])
    except UserError:
        return None
    if not splits.drawn or splits.val.classes != contract.labels:
        return None
    images = check_images(splits.val, contract.preparation.in_chans)
    if images.checksum() != split["checksum"]:
        return None
    images.notes.append(f"Scored are the {len(images)} pictures that training held out: {splits.held_out}.")
    return images
