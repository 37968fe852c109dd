"""`jumbo-vit probe --dry-run`: features of a few pictures, two updates of all heads, and what the whole would take.

MODEL may be the name of a registered model too, which has random weights then: a recipe can be tried before there is a
trained model. Only a temporary folder is written.
"""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models import is_model

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.sets import Splits
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load, make_model, pick_device
from jumbo_vit.predictor import Contract, Predictor
from jumbo_vit.tasks.dry_data import Known, absent, known, make_folder
from jumbo_vit.tasks.probe import check_features, open_pictures, source_of, split_for_choice
from jumbo_vit.tasks.probe_heads import BASE_BATCH, Plan, Source, fit, outputs
from jumbo_vit.tasks.trial import MICRO

_FLOAT = 4
"""Bytes of a number in fp32, in which features are stored and heads are trained."""


def dry_probe(
    model: str,
    data: str,
    plan: Plan,
    val_fraction: float | None = None,
    split_seed: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Say what a probe would take; arguments are those of `probe`, but `model` may be a registered name.

    Returns:
        "pictures" (of known data that are not there, "tune" is their share of all, which rounding may change),
        "features" (by kind: width, heads, their parameters), "stored_bytes", "updates", "memory" (bytes of one update
        on paper) and "notes".

    Raises:
        UserError: What the probe itself would refuse, as far as it shows before the features are computed; no such
            model or data.
    """
    notes: list[str] = []
    predictor = _predictor(model, device, notes)
    check_features(predictor, model)
    with tempfile.TemporaryDirectory(prefix="jumbo-vit-dry-run-") as scratch:
        size: Known | None = None
        where = data
        if absent(data):
            size = known(data)
            where = str(Path(scratch) / "data")
            make_folder(Path(where), 2 * MICRO, predictor.contract.preparation.in_chans)
            notes.append(f"{Path(data).name} is not there: the trial read a made folder.")
        splits, _ = open_pictures(where, predictor, plan.seed, split_seed, val_fraction, check=False)
        classes = size.classes if size is not None else len(splits.train.classes)
        source = _try(predictor, splits, classes, plan, Path(scratch))
        pictures = _pictures(splits, size, plan)
    report = {
        "model": model,
        "parameters": sum(p.numel() for p in predictor.model.parameters()),
        "input_size": list(predictor.contract.preparation.input_size),
        "classes": classes,
        "pictures": pictures,
        **_heads(source, classes, plan),
        **_work(source, classes, plan, pictures),
        "notes": notes,
    }
    print("\n".join(_lines(report, plan)), flush=True)
    return report


def _predictor(model: str, device: str, notes: list[str]) -> Predictor:
    if Path(model).exists():
        return load(model, device)
    if not is_model(model):
        raise UserError(
            f"there is no {model}: give a model folder, a run or a checkpoint, or, for a dry run alone, the name of a "
            "registered model such as jumbo_vit_base_patch16_224, which has random weights then"
        )
    notes.append(f"{model} is the name of a model: random weights stand in for trained ones.")
    torch.manual_seed(0)
    made: Any = make_model(model).eval()
    contract = Contract("multiclass", [], Preparation.from_cfg(made.pretrained_cfg))
    where = pick_device(device)
    return Predictor(made.to(where), contract, where)


def _try(predictor: Predictor, splits: Splits, classes: int, plan: Plan, scratch: Path) -> Source:
    """The features of four pictures, and two updates of all heads on them."""
    step = max(1, len(splits.train) // (2 * MICRO))
    few = splits.train.subset([index * step % len(splits.train) for index in range(2 * MICRO)])
    source = source_of(predictor, few, scratch / "features", 0)
    places = np.arange(len(few))
    small = dataclasses.replace(plan, epochs=1, batch_size=MICRO)
    banks = fit(source, places, dict.fromkeys(source.widths, plan.specs()), classes, small)
    found = outputs(source, places, banks)
    finite = [head.isfinite().all() for logits in found.values() for head in logits]
    if not any(finite):
        raise UserError("two small updates made every head's output infinite: lower --rates")
    return source


def _pictures(splits: Splits, size: Known | None, plan: Plan) -> dict[str, int]:
    if size is not None:
        return {"train": size.train, "tune": round(size.train * plan.tune_fraction), "held_out": size.held_out}
    _, tune = split_for_choice(splits.train, plan)
    return {"train": len(splits.train), "tune": len(tune), "held_out": len(splits.val)}


def _heads(source: Source, classes: int, plan: Plan) -> dict[str, Any]:
    number = len(plan.specs())
    kinds = [
        {"features": kind, "width": width, "heads": number, "parameters": number * (width + 1) * classes}
        for kind, width in source.widths.items()
    ]
    return {"features": kinds, "heads": number * len(kinds)}


def _work(source: Source, classes: int, plan: Plan, pictures: dict[str, int]) -> dict[str, Any]:
    """Bytes on the disk, updates, and bytes of an update, by what takes them."""
    width, number = source.features.trunk.width, len(plan.specs())
    fit_on = pictures["train"] - pictures["tune"]
    first, again = (math.ceil(count / plan.batch_size) for count in (fit_on, pictures["train"]))
    batch = min(plan.batch_size, fit_on)
    parameters = sum(number * (w + 1) * classes for w in source.widths.values())
    logits = batch * classes * number * len(source.widths)
    parts = {
        "heads": _FLOAT * parameters,
        "gradients": _FLOAT * parameters,
        "momentum": _FLOAT * parameters,
        # As they are stored, and normalised for the heads of each kind.
        "features": _FLOAT * batch * (width + sum(source.widths.values())),
        # With the logarithms of the shares, which are kept, and the gradient.
        "logits": 3 * _FLOAT * logits,
    }
    return {
        "numbers_a_picture": width,
        "stored_bytes": _FLOAT * width * (pictures["train"] + pictures["held_out"]),
        "rates": [rate * batch / BASE_BATCH for rate in plan.rates],
        "updates_per_epoch": first,
        "updates": first * plan.epochs,
        "updates_of_the_chosen": again * plan.epochs,
        "memory": {**parts, "total": sum(parts.values())},
    }


def _lines(report: dict[str, Any], plan: Plan) -> list[str]:
    pictures, memory = report["pictures"], report["memory"]
    size = "x".join(map(str, report["input_size"]))
    parts = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in memory.items() if name != "total")
    stated, used = (" ".join(f"{rate:.3g}" for rate in rates) for rates in (plan.rates, report["rates"]))
    batch = min(plan.batch_size, pictures["train"] - pictures["tune"])
    return [
        "",
        f"{report['model']}: {report['parameters'] / 1e6:.2f} M parameters, which stay as they are, input {size}",
        f"{pictures['train']:,} pictures for training, {pictures['tune']:,} of them to choose, "
        f"{pictures['held_out']:,} held out, {report['classes']:,} classes",
        f"features: {report['numbers_a_picture']:,} numbers a picture, "
        f"{report['stored_bytes'] / 1e9:.3f} GB on the disk for all",
        f"{'features':12} {'width':>6} {'heads':>6} {'parameters':>14}",
        *(
            f"{row['features']:12} {row['width']:6} {row['heads']:6} {row['parameters']:14,}"
            for row in report["features"]
        ),
        f"{report['heads']} heads: {' and '.join(plan.opts)}, rates {stated} for a batch of {BASE_BATCH}, which are "
        f"{used} for {batch:,}",
        f"updates: {report['updates_per_epoch']:,} an epoch, {report['updates']:,} in {plan.epochs} epochs; then the "
        f"best of each kind again on all training pictures, {report['updates_of_the_chosen']:,}",
        f"memory of an update, on paper: {memory['total'] / 2**30:.2f} GiB ({parts}), the model not counted",
        *(f"  {note}" for note in report["notes"]),
        "dry run: nothing was written",
    ]
