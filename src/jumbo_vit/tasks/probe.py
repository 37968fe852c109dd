"""`jumbo-vit probe`: what can be read off a model's features, with its trunk as it is."""

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jumbo_vit.data.folds import take_fold
from jumbo_vit.data.pipeline import EVAL_BATCH, EvalSet
from jumbo_vit.data.sets import ImageSet, Splits, check_images, open_data, stratified_split
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load, save_folder
from jumbo_vit.naflex import JumboNaFlexVit
from jumbo_vit.predictor import Contract, Predictor
from jumbo_vit.tasks.build import versions
from jumbo_vit.tasks.features import CLASS, PATCHES, PIECES, Trunk, folder_of_model, store_features
from jumbo_vit.tasks.probe_heads import MEAN, Bank, Plan, Source, Spec, fit, nearest_vote, outputs
from jumbo_vit.tasks.score import new_score
from jumbo_vit.trunk import PaperVisionTransformer
from jumbo_vit.version import __version__

__all__ = ["Plan", "probe"]


def probe(
    model: str,
    data: str,
    plan: Plan,
    val_fraction: float | None = None,
    split_seed: int | None = None,
    features: str | None = None,
    save: str | None = None,
    device: str = "auto",
    workers: int = 0,
) -> dict[str, Any]:
    """Train heads on a model's features, choose on a part of the training pictures, score on those held out.

    Args:
        model: What `jumbo_vit.load` opens, exported files apart.
        data: As for training; one label a picture.
        plan: The heads.
        val_fraction: Share held out where no held-out folder is there; default as in the model's training, else 0.1.
        split_seed: What is held out; default as in the model's own training, else the plan's seed.
        features: Folder for the features; default beside the run.
        save: Folder for the model with the best head that it can hold.
        device: "auto", "cpu", "cuda" or "mps".
        workers: Processes that load pictures.

    Returns:
        `heads`: every head with its top-1 on the choosing part (None where it diverged). `chosen`: of each kind of
        features the best of these, trained again on all training pictures, with its scores on those held out, and
        k-NN's. `best`: the one of them that the choosing part prefers. Accuracies are fractions.

    Raises:
        UserError: No such model or data, a model without features, or rates at which every head diverges.
    """
    if workers < 0:
        raise UserError(f"--workers is {workers}, but must be 0 or more")
    predictor = load(model, device)
    check_features(predictor, model)
    for option, place in (("features", features), ("save", save)):
        if place is not None and Path(place).is_file():
            raise UserError(f"--{option} {place} is a file: give a folder")
    splits, split = open_pictures(data, predictor, plan.seed, split_seed, val_fraction)
    cache = folder_of_model(model) if features is None else Path(features)
    clock = time.monotonic()
    train, val = (source_of(predictor, images, cache, workers) for images in (splits.train, splits.val))
    seconds = {"features": time.monotonic() - clock}
    classes = len(splits.train.classes)
    fit_on, tune_on = split_for_choice(splits.train, plan)
    clock = time.monotonic()
    banks = fit(train, fit_on, dict.fromkeys(train.widths, plan.specs()), classes, plan)
    heads = _judge(train, tune_on, banks, splits.train.classes)
    seconds["heads"] = time.monotonic() - clock
    chosen = _choose(heads)
    clock = time.monotonic()
    whole = np.arange(len(splits.train))
    final = fit(train, whole, {row["features"]: [Spec(row["opt"], row["rate"])] for row in chosen}, classes, plan)
    logits = outputs(val, np.arange(len(splits.val)), final)
    for row in chosen:
        row.update(_scores(logits[row["features"]][0], val.labels.cpu(), splits.train.classes))
    seconds["chosen heads again"] = time.monotonic() - clock
    clock = time.monotonic()
    for row in chosen:
        row["knn_top1"] = None
        if plan.neighbours:
            votes = nearest_vote(train, val, row["features"], classes, plan.neighbours)
            row["knn_top1"] = float((votes == val.labels.cpu()).double().mean())
    seconds["k-NN"] = time.monotonic() - clock
    best = max(chosen, key=lambda row: (row["tune_top1"], -row["tune_loss"]))
    skipped = [dataclasses.asdict(entry) for entry in [*splits.train.skipped, *splits.val.skipped]]
    notes = _notes(plan, splits, (train, val), tune_on)
    if save is not None:
        notes.append(_save(save, predictor, splits, chosen, final, logits, val.features.trunk, (model, split)))
    return {
        "model": model,
        "data": data,
        "plan": dataclasses.asdict(plan),
        "classes": splits.train.classes,
        "pictures": {"train": len(splits.train), "tune": len(tune_on), "held_out": len(splits.val)},
        "held_out": splits.held_out,
        "heads": heads,
        "chosen": chosen,
        "best": best,
        "features": [str(source.features.folder) for source in (train, val)],
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "skipped": skipped,
        "notes": notes,
        "versions": versions(),
    }


def check_features(predictor: Predictor, model: str) -> None:
    """Refuse a model that gives classes alone.

    Raises:
        UserError: It is one.
    """
    if not hasattr(predictor.model, "forward_features"):
        raise UserError(f"{model} gives no features: probe the model folder that it was made from")


def open_pictures(
    data: str,
    predictor: Predictor,
    seed: int,
    split_seed: int | None,
    val_fraction: float | None,
    check: bool = True,
) -> tuple[Splits, dict[str, Any] | None]:
    """The pictures, and how they were split, or None where the data have a held-out part.

    Held out is what the model's own training held out, where that drew it from these very pictures. With `check` every
    picture is decoded, and left out if it cannot be.

    Raises:
        UserError: There are no such data, or none held out.
    """
    chans = predictor.contract.preparation.in_chans

    def checked(splits: Splits) -> Splits:
        train, val = splits.train, splits.val
        if check:
            train, val = check_images(train, chans, require_all_classes=True), check_images(val, chans)
        if not len(val):
            raise UserError(f"there is no held-out picture in {data}")
        return dataclasses.replace(splits, train=train, val=val)

    split = predictor.contract.lineage.get("split") if split_seed is None and val_fraction is None else None
    if split:
        splits = _as_trained(data, split)
        if splits is not None:
            splits = checked(splits)
            if splits.val.checksum() == split["checksum"]:
                return splits, split
    seed, share = seed if split_seed is None else split_seed, 0.1 if val_fraction is None else val_fraction
    splits = checked(open_data(data, "multiclass", seed, share))
    if not splits.drawn:
        return splits, None
    splits.val.notes.append(
        f"What is held out was drawn for this probe, with seed {seed}: if the model was trained on pictures of {data}, "
        "some of these may be among them, and the scores are then too good."
    )
    checksum = splits.val.checksum()
    return splits, {"seed": seed, "val_fraction": share, "folds": 0, "fold": None, "checksum": checksum}


def _as_trained(data: str, split: dict[str, Any]) -> Splits | None:
    """The data split as the model's training split its own, or None where they are not split so."""
    splits = open_data(data, "multiclass", split["seed"], split["val_fraction"])
    if not splits.drawn:
        return None
    if not split.get("fold"):
        return splits
    try:
        return take_fold(splits, split["folds"], split["fold"], split["seed"])
    except UserError:
        return None  # too few pictures for so many folds: these are other data


def source_of(predictor: Predictor, images: ImageSet, cache: Path, workers: int) -> Source:
    """The features of pictures with their labels, from the folder `cache` where they are there."""
    model: Any = predictor.model
    found = store_features(model, images, predictor.contract.preparation, cache, predictor.device, workers)
    labels = torch.tensor([sample.labels[0] for sample in images.samples])
    wide = "jumbo_avg" if hasattr(model, "num_jumbo") else "prefix_avg"
    has_class_token = bool(getattr(model, "has_class_token", getattr(model, "cls_token", None) is not None))
    return Source(found, labels, wide, has_class_token, predictor.device)


def split_for_choice(images: ImageSet, plan: Plan) -> tuple[Any, Any]:
    """The training pictures that heads are fitted on, and those that choose among them.

    Raises:
        UserError: There are too few for both.
    """
    fit_on, tune_on = stratified_split(images.labels, len(images.classes), plan.tune_fraction, plan.seed)
    if len(fit_on) < 2 or not tune_on:
        raise UserError(
            f"{len(images)} training pictures of {len(images.classes)} classes are too few to fit heads on some and "
            "choose on others: two a class are needed at least"
        )
    return np.asarray(fit_on), np.asarray(tune_on)


def _judge(source: Source, places: Any, banks: dict[str, Bank], classes: list[str]) -> list[dict[str, Any]]:
    """A row for each head: how it was trained, and its numbers on the choosing part."""
    labels = source.labels.cpu()[torch.from_numpy(places)]
    rows: list[dict[str, Any]] = []
    for kind, logits in outputs(source, places, banks).items():
        for spec, own in zip(banks[kind].specs, logits, strict=True):
            numbers = _scores(own, labels, classes) if bool(own.isfinite().all()) else {}
            row = {"features": kind, "width": source.widths[kind], "opt": spec.opt, "rate": spec.rate}
            rows.append(row | {"tune_top1": numbers.get("top1"), "tune_loss": numbers.get("loss")})
    return rows


def _choose(heads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the best row of each kind of features."""
    chosen = []
    for kind in dict.fromkeys(row["features"] for row in heads):
        good = [row for row in heads if row["features"] == kind and row["tune_top1"] is not None]
        if not good:
            raise UserError(f"every head on the features {kind} diverged: lower --rates")
        chosen.append(dict(max(good, key=lambda row: (row["tune_top1"], -row["tune_loss"]))))
    return chosen


def _scores(logits: Tensor, labels: Tensor, classes: list[str]) -> dict[str, Any]:
    score = new_score("multiclass", classes)
    score.update(logits, labels)
    return {name: value for name, value in score.result(lambda x: x, lambda x: x).items() if isinstance(value, float)}


def _notes(plan: Plan, splits: Splits, sources: tuple[Source, Source], tune_on: Any) -> list[str]:
    found = [*splits.train.notes, *splits.val.notes]
    total = sum(len(source.features) for source in sources)
    computed = sum(source.features.computed for source in sources)
    found.append(f"Features of {total} pictures: {computed} computed, {total - computed} stored before.")
    found.append(
        f"Heads were chosen on {len(tune_on)} of the training pictures, never on those held out; the chosen ones were "
        "trained again on all."
    )
    if plan.neighbours > len(sources[0].features):
        found.append(f"k-NN took all {len(sources[0].features)} training pictures, fewer than {plan.neighbours}.")
    return found


def _save(
    folder: str,
    predictor: Predictor,
    splits: Splits,
    chosen: list[dict[str, Any]],
    banks: dict[str, Bank],
    logits: dict[str, Tensor],
    trunk: Trunk,
    origin: tuple[str, dict[str, Any] | None],
) -> str:
    """Write the model with the best head that it can hold; what was written, in words."""
    ranked = sorted(chosen, key=lambda row: (-row["tune_top1"], row["tune_loss"]))
    for row in ranked:
        model = _with_head(predictor.model, trunk, row["features"], *banks[row["features"]].folded(0))
        if model is None:
            continue
        contract = predictor.contract
        pictures = EvalSet(splits.val, "multiclass", contract.preparation)
        first = torch.stack([pictures[index][0] for index in range(min(EVAL_BATCH, len(splits.val)))])
        with torch.no_grad():
            given = model.eval()(first.to(predictor.device)).cpu()
        expected = logits[row["features"]][0][: len(first)]
        assert torch.allclose(given, expected, rtol=0, atol=1e-3 * float(expected.abs().max() + 1)), "another head"
        lineage = {
            "source": f"jumbo-vit {__version__} probe",
            "init_from": origin[0],
            "probe": {name: row[name] for name in ("features", "opt", "rate", "top1")},
        }
        lineage |= {name: contract.lineage[name] for name in ("license", "teacher") if name in contract.lineage}
        if origin[1] is not None:
            lineage["split"] = origin[1]
        save_folder(folder, model, Contract("multiclass", splits.train.classes, contract.preparation, lineage=lineage))
        best = "the best head" if row is ranked[0] else "the best head that the model can hold"
        return f"{folder} is the model with {best}: {row['features']}, {row['opt']}, rate {row['rate']:g}."
    raise UserError(f"this {type(predictor.model).__name__} can hold none of the heads, so {folder} was not written")


def _with_head(model: nn.Module, trunk: Trunk, kind: str, weight: Tensor, bias: Tensor) -> nn.Module | None:
    """A copy of the model whose head is this one, or None where its pools give no such features."""
    copied: Any = copy.deepcopy(model)
    wide = (PIECES, PATCHES)
    reads_own = trunk.head == (kind,) or (trunk.head == wide and kind.endswith("_avg"))
    lone = trunk.head == (PIECES,) and trunk.num_global == 1 and kind == CLASS
    pool: str | None = None
    if not (reads_own or lone):
        if not isinstance(model, PaperVisionTransformer | JumboNaFlexVit) or not isinstance(model.fc_norm, nn.Identity):
            return None
        jumbo = hasattr(model, "num_jumbo")
        alone = "jumbo" if jumbo else "prefix"
        pool = {PATCHES: "avg", CLASS: "token", PIECES: alone, MEAN: alone}.get(kind, f"{alone}_avg")
        if kind == MEAN:
            weight = weight.repeat(1, trunk.num_global) / trunk.num_global
    if pool is None:
        copied.reset_classifier(len(bias))
    else:
        copied.reset_classifier(len(bias), pool)
    head = copied.get_classifier()
    if not isinstance(head, nn.Linear) or head.weight.shape != weight.shape:
        return None
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return copied.to(next(model.parameters()).device)  # type: ignore[no-any-return]
