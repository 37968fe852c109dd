"""`jumbo-vit export`: a classifier's file, written aside, run, compared with the model, and only then put in place."""

import copy
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.layers import Format as Layout
from torch import Tensor, nn
from torch.export import ExportedProgram

from jumbo_vit.errors import UserError
from jumbo_vit.export.choose import Measured, choose, measure
from jumbo_vit.export.compare import Comparison, answers, compare, verdict
from jumbo_vit.export.formats import FORMATS, check_installed, check_precision, format_of
from jumbo_vit.export.halves import MOST_FP16, largest_value
from jumbo_vit.export.open import contract_metadata, open_classifier
from jumbo_vit.export.pictures import Pictures, pictures_of
from jumbo_vit.export.run import ExportedModel
from jumbo_vit.export.write import OPSET, export_module, operations
from jumbo_vit.folder import load
from jumbo_vit.predictor import Contract, Predictor

BATCHES = (1, 2, 7)
"""Batch sizes at which a dynamic file is run."""

_RESIZE = ("upsample", "interpolate", "grid_sampler", "_resize")
_AT_ONCE = 16


@dataclass(frozen=True)
class Options:
    """How to export; the names are the command's.

    Args:
        format: A name of `FORMATS`, or "auto" by the ending.
        precision: One that the format has, or "auto": the fastest here that is still the same model.
        batch: A fixed batch size, or None for any.
        size: (height, width) in pixels; None for the model's own.
        data: Pictures to compare on.
        tolerance: Instead of the precision's own, see `BOUNDS`.
        max_drop: What "auto" may lose.
    """

    format: str = "auto"
    precision: str = "fp32"
    batch: int | None = None
    size: tuple[int, int] | None = None
    data: str | None = None
    tolerance: float | None = None
    max_drop: float = 0.005


@dataclass
class _Job:
    """All that the forms of one export have in common."""

    model: nn.Module
    reference: Predictor
    pictures: Pictures
    expected: Tensor
    options: Options
    format: str

    @property
    def thresholds(self) -> Tensor | None:
        contract = self.reference.contract
        if contract.task != "multilabel":
            return None
        return torch.tensor(contract.thresholds or [0.5] * len(contract.labels), dtype=torch.float64)


def export(model: str | Path | Predictor, out: str | Path, options: Options | None = None) -> dict[str, Any]:
    """Export a classifier and check the file by running it.

    Args:
        model: What `jumbo_vit.load` opens, or a Predictor.
        out: The file to write. One that stands there is replaced when the new one has passed.
        options: How.

    Returns:
        What was written and how it compares, for `--json`.

    Raises:
        UserError: A wrong option, a package that is missing, a model that cannot be traced, or a file that is not the
            model any more; then nothing is left behind.
    """
    options, out = options or Options(), Path(out)
    format = format_of(out, options.format)
    check_precision(format, options.precision)
    _check_numbers(options)
    forms = FORMATS[format].automatic if options.precision == "auto" else (options.precision,)
    for precision in forms:
        check_installed(format, precision)
    job = _job(model, options, format)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            found = {precision: _try_form(job, precision, Path(scratch) / precision / out.name) for precision in forms}
            chosen, choice = _choose(job, found)
            files = []
            for file in found[chosen]["paths"]:
                os.replace(file, out.parent / file.name)
                files.append(str(out.parent / file.name))
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}; what stood there before is untouched"
        ) from error
    return _summary(job, out, files, found[chosen], chosen, choice)


def _check_numbers(options: Options) -> None:
    if options.batch is not None and options.batch < 1:
        raise UserError(f"--batch is {options.batch}, but must be dynamic, or 1 or more")
    if options.tolerance is not None and not options.tolerance > 0:
        raise UserError(f"--tolerance is {options.tolerance}, but must be above 0")
    if not 0 <= options.max_drop <= 1:
        raise UserError(f"--max-drop is {options.max_drop}, but must lie between 0 and 1")


def _job(model: str | Path | Predictor, options: Options, format: str) -> _Job:
    predictor = model if isinstance(model, Predictor) else load(model, "cpu")
    if not predictor.labels:
        raise UserError(
            "this model has no classes, no head was trained on it: train one by jumbo-vit train --init-from MODEL "
            "--data FOLDER, and export that"
        )
    if isinstance(predictor.model, ExportedModel):
        raise UserError(f"{model} is an exported file already: export from the model folder it was made from")
    whole = copy.deepcopy(predictor.model).cpu().float().eval()
    contract = predictor.contract
    chans, *own = contract.preparation.input_size
    size = options.size or (own[0], own[1])
    if size != (own[0], own[1]):
        _resize(whole, size)
        shape = (chans, size[0], size[1])
        contract = dataclasses.replace(
            contract, preparation=dataclasses.replace(contract.preparation, input_size=shape)
        )
    reference = Predictor(whole, contract)
    pictures = pictures_of(reference, options.data)
    expected = _outputs(reference, pictures.images, _AT_ONCE)
    if not expected.isfinite().all():
        raise UserError(f"the model's own outputs are not finite on {pictures.words}: there is nothing to compare with")
    return _Job(_with_constant_positions(whole, size), reference, pictures, expected, options, format)


def _resize(model: Any, size: tuple[int, int]) -> None:
    """Make a model take another size; its positions are resampled now, once."""
    if not hasattr(model, "set_input_size"):
        raise UserError(f"{type(model).__name__} takes no other size than its own: leave out --img-size")
    try:
        model.set_input_size(img_size=size)
    except UserError:
        raise
    except Exception as error:  # by the model, as it first uses what it cannot take
        raise UserError(f"{type(model).__name__} cannot take {size[0]}x{size[1]} pixels: {error}") from error


def _with_constant_positions(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A copy that does not resample its positions for each picture, as models with `dynamic_img_size` do."""
    fixed: Any = copy.deepcopy(model)
    learned = getattr(fixed, "pos_embed", None) is not None  # rotary positions are computed, not resampled
    if getattr(fixed, "dynamic_img_size", False) and learned and hasattr(fixed, "set_input_size"):
        fixed.set_input_size(img_size=size)
        fixed.dynamic_img_size = False
        fixed.patch_embed.flatten, fixed.patch_embed.output_fmt = True, Layout.NCHW
    whole: nn.Module = fixed
    return whole


def _no_resizing(program: ExportedProgram) -> None:
    found = sorted(name for name in operations(program) if any(word in name for word in _RESIZE))
    if found:
        raise UserError(
            f"this model resamples its positions for each picture ({found[0]}), which an exported file cannot: "
            "export a model of a fixed size"
        )


def _outputs(model: Callable[[Tensor], Tensor], images: Tensor, at_once: int) -> Tensor:
    parts = [model(images[start : start + at_once]) for start in range(0, len(images), at_once)]
    return torch.cat([part.detach().float().cpu() for part in parts])


def _try_form(job: _Job, precision: str, path: Path) -> dict[str, Any]:
    """Write one form and compare it. A fault ends the export, unless other forms are tried too ("auto")."""
    try:
        return _form(job, precision, path)
    except UserError as error:
        if job.options.precision != "auto":
            raise
        return {"fault": str(error)}


def _form(job: _Job, precision: str, path: Path) -> dict[str, Any]:
    options, images = job.options, job.pictures.images
    if precision == "fp16":
        parts = list(images.split(_AT_ONCE))
        largest, where = largest_value(job.reference.model, parts)
        if largest > MOST_FP16:
            raise UserError(
                f"fp16 holds no number above {MOST_FP16:g}, and {where} reaches {largest:.6g}: use bf16 or fp32"
            )
    path.parent.mkdir()
    contract = job.reference.contract
    architecture = str((getattr(job.model, "pretrained_cfg", None) or {}).get("architecture", type(job.model).__name__))
    metadata = contract_metadata(architecture, contract)
    paths = export_module(
        job.model, images[:1], path, job.format, precision, options.batch, metadata, check=_no_resizing
    )
    opened = open_classifier(path)
    _same_contract(opened.contract, contract, path)
    session: Any = opened.model
    if precision == "bf16" and session.computes != "bf16":
        raise UserError(f"this CPU does not compute in bf16, so {job.format} in bf16 cannot be checked here: use fp32")
    outputs = _outputs(opened, images, options.batch or _AT_ONCE)
    whole = compare(outputs, job.expected, job.thresholds)
    sizes = BATCHES if options.batch is None else (options.batch,)
    by_batch = {}
    for size in sizes:
        rows = torch.arange(size) % len(images)  # of few pictures some come again
        by_batch[size] = compare(opened(images[rows]), job.expected[rows], job.thresholds)
    for size, found in [(0, whole), *by_batch.items()]:
        fault = verdict(found, precision, options.tolerance)
        if fault:
            where = f"in batches of {size}" if size else f"on {job.pictures.words}"
            raise UserError(f"the {job.format} file in {precision} is not the model any more, {where}: {fault}")
    accuracy = _accuracy(job, outputs), _accuracy(job, job.expected)
    return {
        "fault": "",
        "paths": paths,
        "model": session,
        "computes": session.computes,
        "whole": whole,
        "by_batch": by_batch,
        "top1": accuracy[0],
        "top1_model": accuracy[1],
        "bytes": sum(file.stat().st_size for file in paths),
    }


def _same_contract(read: Contract, written: Contract, path: Path) -> None:
    if read != written:
        odd = [name for name in Contract.__dataclass_fields__ if getattr(read, name) != getattr(written, name)]
        raise AssertionError(f"{path.name} does not give back {', '.join(odd)} as it was")


def _accuracy(job: _Job, outputs: Tensor) -> float | None:
    """Share of right answers; of right decisions on labels for multilabel; None without labels."""
    if job.pictures.targets is None:
        return None
    return float((answers(outputs.double(), job.thresholds) == job.pictures.targets).double().mean())


def _drop(found: dict[str, Any]) -> float:
    whole: Comparison = found["whole"]
    if found["top1"] is None:
        return 1 - whole.agreement
    return float(found["top1_model"] - found["top1"])


def _choose(job: _Job, found: dict[str, dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The precision to keep, and for "auto" what was measured of each."""
    if job.options.precision != "auto":
        return job.options.precision, []
    good = [precision for precision, form in found.items() if not form["fault"]]
    batch = job.options.batch or 1
    images = job.pictures.images[:1].repeat(batch, 1, 1, 1)
    seconds = dict(zip(good, measure([_call(found[name]["model"], images) for name in good]), strict=True))
    forms = [
        Measured(name, seconds[name], _drop(form)) if name in seconds else Measured(name, 0.0, 0.0, form["fault"])
        for name, form in found.items()
    ]
    best, reasons = choose(forms, job.options.max_drop)
    if best is None:
        raise UserError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    rows = [
        {
            "precision": form.precision,
            "milliseconds": None if form.fault else 1000 * form.seconds,
            "drop": None if form.fault else form.drop,
            "batch": batch,
            "not_taken": reasons.get(form.precision, ""),
        }
        for form in forms
    ]
    return best.precision, rows


def _call(model: nn.Module, images: Tensor) -> Callable[[], object]:
    return lambda: model(images)


def _summary(
    job: _Job, out: Path, files: list[str], form: dict[str, Any], precision: str, choice: list[dict[str, Any]]
) -> dict[str, Any]:
    options, contract = job.options, job.reference.contract
    compared = {"all": form["whole"], **form["by_batch"]}
    notes = list(job.pictures.notes)
    if not options.data:
        notes.append("compared on stand-ins: --data FOLDER compares on your own pictures")
    if precision == "fp16":
        notes.append(
            f"fp16 is for GPUs and accelerators: this CPU ran the file in {form['computes']}, and one without fp16 "
            "arithmetic computes it in fp32, which gains nothing over fp32 but the size"
        )
    return {
        "out": str(out),
        "files": files,
        "bytes": form["bytes"],
        "format": job.format,
        "precision": precision,
        "asked": options.precision,
        "computes": form["computes"],
        "opset": OPSET if job.format == "onnx" else None,
        "batch": options.batch or "dynamic",
        "input_size": list(contract.preparation.input_size),
        "pictures": len(job.pictures.images),
        "pictures_from": job.pictures.words,
        "differences": {str(key): dataclasses.asdict(value) for key, value in compared.items()},
        "agreement": form["whole"].agreement,
        "top1": form["top1"],
        "top1_model": form["top1_model"],
        "tolerance": options.tolerance,
        "forms": choice,
        "lineage": contract.lineage,
        "notes": notes,
    }
