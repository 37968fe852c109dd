"""`jumbo-vit evaluate`: a trained model on held-out pictures."""

from typing import Any

from jumbo_vit.data.pipeline import EvalSet, eval_loader
from jumbo_vit.data.sets import check_images, open_held_out
from jumbo_vit.folder import load
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
    predictor = load(model, device)
    contract = predictor.contract
    found = open_held_out(data, contract.task, contract.labels)  # type: ignore[arg-type]
    images = check_images(found, contract.preparation.in_chans)
    loader = eval_loader(EvalSet(images, contract.task, contract.preparation), workers)
    scores = score_models({"model": predictor.model}, loader, contract.task, contract.labels, predictor.device)
    skipped = [{"path": s.path, "reason": s.reason} for s in images.skipped]
    return {**scores["model"], "skipped": skipped, "notes": images.notes}
