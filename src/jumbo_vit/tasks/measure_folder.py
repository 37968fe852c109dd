"""`jumbo-vit evaluate`: a trained model on held-out pictures."""

from dataclasses import replace
from typing import Any

from jumbo_vit.data.folds import take_fold
from jumbo_vit.data.pipeline import EvalSet, eval_loader
from jumbo_vit.data.sets import ImageSet, check_images, open_data, open_held_out
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.config import parse_size
from jumbo_vit.tasks.evaluate import score_models
from jumbo_vit.tasks.evaluate_classes import RealScore, SubsetScore, mapping_note, names_for, real_answers
from jumbo_vit.tasks.report import new_outputs, report_file, shown, write_report
from jumbo_vit.vit import check_size


def evaluate(
    model: str,
    data: str,
    device: str = "auto",
    workers: int = 0,
    report: str | None = None,
    classes_by: str = "name",
    subset: bool = False,
    real: str | None = None,
    img_size: str | None = None,
) -> dict[str, Any]:
    """Score a model folder, run or official checkpoint on `data`; the same numbers as training's own.

    Args:
        model: What `jumbo_vit.load` opens.
        data: "digits", a folder (its held-out part if it has one, else the folder itself), or a CSV.
        device: "auto", "cpu", "cuda" or "mps".
        workers: Processes that load pictures.
        report: A folder for a page that shows the numbers and the pictures behind them.
        classes_by: How the data name classes, one of `jumbo_vit.tasks.evaluate_classes.WAYS`.
        subset: Answer only classes that the data have.
        real: Right answers beside those of the data, as `real_answers` takes them.
        img_size: Another size than the model's own, as "384" or "192x256"; positions are resampled. NaFlex models
            take none.

    Returns:
        Fractions by name, `n`, `skipped` (path and reason) and `notes`; with `real` also the entries of `RealScore`;
        with a report also its path, `report`.

    Raises:
        UserError: No such model or data, classes that the model does not know, or no place for a report.
    """
    if workers < 0:
        raise UserError(f"--workers is {workers}, but must be 0 or more")
    page = None if report is None else report_file(report)
    predictor = load(model, device)
    contract = predictor.contract
    if not contract.labels:
        raise UserError(
            f"{model} has no classes to score: no head was trained on it; train one by jumbo-vit train --init-from "
            f"{model} --data FOLDER"
        )
    if (subset or real) and (contract.task != "multiclass" or report):
        what = "--report, which shows all classes and one label" if report else "a multi-label model"
        raise UserError(f"{'--subset' if subset else '--real'} does not go with {what}: leave one out")
    if subset and real:
        raise UserError("--subset and --real are two questions: ask them one after the other")
    if img_size is not None:
        contract = _resized(predictor.model, contract, img_size)
    images = _drawn_in_training(data, contract) if classes_by == "name" else None
    images = images or _held_out(data, contract, classes_by)
    kept = [number for number, count in enumerate(images.class_counts()) if count]
    if subset:
        images.notes.append(f"Answered were the {len(kept)} classes of the data only, of {len(contract.labels)}.")
    answers = RealScore(real_answers(real, images, contract.labels)) if real else None
    loader = eval_loader(EvalSet(images, contract.task, contract.preparation), workers)
    outputs = None if page is None else new_outputs(contract)
    scores = score_models(
        {"model": predictor.model},
        loader,
        contract.task,
        contract.labels,
        predictor.device,
        thresholds=contract.thresholds,
        watch=outputs.update if outputs is not None else answers.update if answers is not None else None,
        make_score=(lambda: SubsetScore(contract.labels, kept)) if subset else None,
    )
    skipped = [{"path": s.path, "reason": s.reason} for s in images.skipped]
    numbers = {
        **scores["model"],
        **(answers.result() if answers is not None else {}),
        "skipped": skipped,
        "notes": [shown(note) for note in images.notes],
    }
    if page is not None and outputs is not None:
        write_report(page, (model, data), predictor, contract, images, outputs, numbers)
        numbers["report"] = shown(str(page))
    return numbers


def _resized(model: Any, contract: Contract, img_size: str) -> Contract:
    """Make the model take pictures of another size, and give the contract that says so."""
    size = parse_size(img_size)
    if not hasattr(model, "set_input_size"):
        raise UserError(f"{type(model).__name__} takes no other size than its own: leave out --img-size")
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is not None:
        check_size(size, patch)
    model.set_input_size(img_size=size)
    chans = contract.preparation.in_chans
    return replace(contract, preparation=replace(contract.preparation, input_size=(chans, *size)))


def _held_out(data: str, contract: Contract, classes_by: str) -> ImageSet:
    names = names_for(classes_by, contract.labels)
    try:
        found = open_held_out(data, contract.task, names)  # type: ignore[arg-type]
    except UserError as error:
        if classes_by != "name" or "none of the model's classes" not in str(error):
            raise
        raise UserError(
            f"{error}; where folders are numbers of the classes from 0, add --classes-by index, where they are "
            "WordNet numbers, --classes-by wnid"
        ) from error
    if classes_by != "name":
        found.classes = list(contract.labels)
        found.notes.append(mapping_note(classes_by, contract.labels))
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
