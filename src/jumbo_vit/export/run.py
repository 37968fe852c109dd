"""Running an exported file: one callable for every format, made from the file alone."""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.export import pt2
from jumbo_vit.export.formats import FORMATS, SUFFIXES, check_installed
from jumbo_vit.export.write import KEY, VERSION, Form, beside_pte, sha256

Session = Callable[[Tensor], Tensor]


class ExportedModel(nn.Module):
    """An exported file in place of a model: (B, C, H, W) in fp32 -> (B, ...) in fp32, on the CPU, for any B.

    A file of a fixed batch is run in parts of that size, the last one filled with zeros; a dynamic one in parts of at
    most its largest batch.

    Args:
        session: Runs one batch.
        form: What the file says about itself.
        computes: The precision that the runtime computes in here.
    """

    def __init__(self, session: Session, form: Form, computes: str) -> None:
        super().__init__()
        self._session, self.form, self.computes = (session,), form, computes
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """As the model that was exported.

        Raises:
            UserError: Pictures of another shape than the file was made for.
        """
        shape = self.form.input_shape
        if tuple(images.shape[1:]) != shape or not len(images):
            raise UserError(
                f"the exported file takes pictures (B, {', '.join(map(str, shape))}), not {tuple(images.shape)}: "
                "export again with --img-size for another size"
            )
        images = images.detach().cpu().float().contiguous()
        parts = [self._part(images[start : start + self.form.most]) for start in range(0, len(images), self.form.most)]
        return torch.cat(parts)

    def _part(self, images: Tensor) -> Tensor:
        count, session = len(images), self._session[0]
        if self.form.batch and count < self.form.batch:
            images = torch.cat([images, images.new_zeros(self.form.batch - count, *images.shape[1:])])
        with torch.inference_mode():
            return session(images)[:count].float()

    def forward_features(self, *_: Any, **__: Any) -> NoReturn:
        """Not there.

        Raises:
            UserError: Always.
        """
        raise UserError("an exported file gives its outputs alone: for features take the model folder it was made from")


def open_exported(path: str | Path) -> tuple[ExportedModel, dict[str, Any]]:
    """Open a file that `export_module` wrote, with nothing else at hand.

    Nothing in the file is run as code: see `pt2` for the format that could hold some.

    Returns:
        The model, and the metadata that was written with it.

    Raises:
        UserError: No such file, a damaged or foreign one, or a runtime that is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    format = SUFFIXES.get(path.suffix.lower())
    if format is None:
        endings = ", ".join(row.suffix for row in FORMATS.values())
        raise UserError(f"{path} is no exported file; their endings are {endings}")
    check_installed(format)
    text, make = {"torch": _torch, "onnx": _onnx, "openvino": _openvino, "executorch": _executorch}[format](path)
    form, metadata = _form_of(text, path, format)
    session, computes = make(form)
    return ExportedModel(session, form, computes), metadata


def _form_of(text: str | None, path: Path, format: str) -> tuple[Form, dict[str, Any]]:
    if not text:
        raise UserError(
            f"{path} was not written by jumbo-vit export: it carries no labels and no preparation of pictures"
        )
    try:
        metadata = json.loads(text)
        fields = metadata.pop("export")
        version = fields["version"]
        if version > VERSION:
            raise UserError(f"{path} is of version {version}; this jumbo-vit reads up to {VERSION}, so upgrade it")
        known = {name: fields[name] for name in Form.__dataclass_fields__}
        form = Form(**{**known, "input_shape": tuple(fields["input_shape"])})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"what {path} says about itself is damaged ({error})") from error
    sizes = (*form.input_shape, form.most, form.batch or 1)
    if form.format != format or not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(f"what {path} says about itself is damaged: {form}")
    return form, metadata


def _sum_in(text: str, path: Path) -> str:
    """The checksum of the weights that a file's metadata name."""
    try:
        return str(json.loads(text)["export"]["weights_sha256"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged, or not what jumbo-vit export writes ({error})") from error


Opened = tuple[str | None, Callable[[Form], tuple[Session, str]]]


def _torch(path: Path) -> Opened:
    module, text = pt2.load(path)
    return text, lambda form: (module, form.precision)


def _onnx(path: Path) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of exceptions for each fault
        raise UserError(
            f"{path} is damaged, or onnxruntime {onnxruntime.__version__} cannot run it: {error}"
        ) from error
    name = session.get_inputs()[0].name
    text = session.get_modelmeta().custom_metadata_map.get(KEY)

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(np.array(session.run(None, {name: images.numpy()})[0]))

    # Its CPU kernels of the operations here are fp32's; fp16 nodes stand between casts.
    return text, lambda form: (run, "fp32" if form.precision == "fp16" else form.precision)


def _openvino(path: Path) -> Opened:
    import openvino

    core = openvino.Core()
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise UserError(f"{path} has its weights in {weights.name}, which must lie beside it")
    try:
        model = core.read_model(path)
        text = model.get_rt_info([KEY, "metadata"]).astype(str) if model.has_rt_info([KEY, "metadata"]) else None
    except RuntimeError as error:
        raise UserError(f"{path} is damaged, or OpenVINO cannot read it: {error}") from error
    if text and _sum_in(text, path) != sha256(weights):
        raise UserError(f"{weights} is damaged, or does not belong to {path.name}: export again")

    def make(form: Form) -> tuple[Session, str]:
        # Said explicitly: by itself OpenVINO computes fp32 models in bf16 where the CPU has it.
        able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        computes = form.precision if form.precision.upper() in able and form.precision != "int8" else "fp32"
        hints = {
            "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[computes],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        compiled = core.compile_model(model, "CPU", hints)

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(np.array(compiled(images.numpy())[0]))

        return run, computes

    return text, make


def _executorch(path: Path) -> Opened:
    beside = beside_pte(path)
    if not beside.is_file():
        raise UserError(f"{path} has its labels and preparation in {beside.name}, which must lie beside it")
    data = path.read_bytes()
    try:
        text = beside.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{beside} is damaged ({error})") from error
    # The runtime is C++ and trusts a file: only the very bytes that were written are handed to it.
    if _sum_in(text, beside) != hashlib.sha256(data).hexdigest():
        raise UserError(f"{path} is damaged, or does not belong to {beside.name}: export again")

    def make(form: Form) -> tuple[Session, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its Python interface calls itself experimental
            from executorch.runtime import Runtime, Verification

        try:
            program = Runtime.get().load_program(data, verification=Verification.InternalConsistency)
            method = program.load_method("forward")
        except RuntimeError as error:
            raise UserError(f"this version of ExecuTorch cannot run {path}: {error}") from error

        # The method reads from the program, and the program from the bytes: all of them have to stay.
        def run(images: Tensor, _kept: Any = (data, program)) -> Tensor:
            out: Tensor = method.execute((images,))[0]
            return out.clone()  # the runtime writes the next output over this one

        return run, form.precision

    return text, make
