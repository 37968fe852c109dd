"""`export_module`: any module of one tensor to one tensor, as a file of another runtime. Knows nothing of classes.

The graph is always traced by `torch.export` from a copy in evaluation mode; the formats differ in what becomes of it.
"""

import contextlib
import copy
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from jumbo_vit.errors import UserError
from jumbo_vit.export import pt2
from jumbo_vit.export.formats import check_installed, check_precision, format_of
from jumbo_vit.export.halves import Half

VERSION = 1
KEY = "jumbo_vit"
"""The name under which a file carries its metadata."""

OPSET = 18
"""ONNX: LayerNormalization needs 17, and PyTorch's exporter writes 18 without converting."""

MOST = 4096
"""The largest batch that a dynamic file takes at once; more are run in parts."""

MOST_EXECUTORCH = 16
"""ExecuTorch reserves the memory for its largest batch when it loads."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Form:
    """What a file says about itself, beside its owner's metadata.

    Args:
        format: A name of `FORMATS`.
        precision: The precision of weights, and where the runtime has it of computing.
        batch: The fixed batch size, or None for any.
        most: The largest batch at once.
        input_shape: (C, H, W).
        version: Of this record.
    """

    format: str
    precision: str
    batch: int | None
    most: int
    input_shape: tuple[int, ...]
    version: int = VERSION


def export_module(
    module: nn.Module,
    example: Tensor,
    path: str | Path,
    format: str = "auto",
    precision: str = "fp32",
    batch: int | None = None,
    metadata: dict[str, Any] | None = None,
    check: Callable[[ExportedProgram], None] | None = None,
) -> list[Path]:
    """Write a module, in evaluation mode whatever its own, as one file (OpenVINO and ExecuTorch: two).

    The file is not compared with anything here; see `compare`.

    Args:
        module: Takes a tensor (B, C, H, W) in fp32 and gives one tensor (B, ...). It stays as it is.
        example: An input (B, C, H, W); C, H and W become fixed.
        path: Where to; its ending must be the format's.
        format: A name of `FORMATS`, or "auto" by the ending.
        precision: One that the format has.
        batch: A fixed batch size, or None for any.
        metadata: What JSON can hold; travels in the file.
        check: Looks at the graph before it is written, and raises what it has against it.

    Returns:
        The files written.

    Raises:
        UserError: A wrong ending, a precision that the format lacks, a package that is missing, or a module that
            torch.export cannot trace.
    """
    path = Path(path)
    format = format_of(path, format)
    check_precision(format, precision)
    check_installed(format, precision)
    if batch is not None and batch < 1:
        raise UserError(f"the batch is {batch}, but must be 1 or more, or dynamic")
    if precision == "auto":
        raise UserError("export_module writes one precision: name it")
    most = batch or (MOST_EXECUTORCH if format == "executorch" else MOST)
    form = Form(format, precision, batch, most, tuple(example.shape[1:]))
    source = copy.deepcopy(module).eval().cpu().float().requires_grad_(False)
    with _quiet(), torch.no_grad():
        if format == "torch":
            source = _torch_form(source, precision)
        program = trace(source, example, form)
        if check is not None:
            check(program)
        writers = {"torch": _write_torch, "onnx": _write_onnx, "openvino": _write_openvino}
        return writers.get(format, _write_executorch)(program, path, form, metadata or {})


def trace(module: nn.Module, example: Tensor, form: Form) -> ExportedProgram:
    """`torch.export` of a module in evaluation mode, with a batch axis as `form` says.

    Raises:
        UserError: torch.export cannot trace it.
    """
    sample = example.cpu().float()[:1].repeat(form.batch or 2, 1, 1, 1)
    axis = None if form.batch else ({0: Dim("batch", min=1, max=form.most)},)
    try:
        return torch.export.export(module, (sample,), dynamic_shapes=axis)
    except Exception as error:  # by the module, wherever its code is such that it cannot be traced
        hint = "" if form.batch else "; a fixed batch, --batch 1, may do"
        raise UserError(f"torch.export cannot trace {type(module).__name__}: {error}{hint}") from error


def operations(program: ExportedProgram) -> set[str]:
    """The names of all operations in a graph, such as "aten.linear.default"."""
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def _torch_form(module: nn.Module, precision: str) -> nn.Module:
    if precision in _DTYPES:
        return Half(module, _DTYPES[precision]).eval().requires_grad_(False)
    if precision == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.utils import unwrap_tensor_subclass

        quantize_(module, Int8WeightOnlyConfig())  # of every Linear, one scale a row
        # Plain tensors in the file: it then opens without torchao, and without a pickle.
        unwrap_tensor_subclass(module)
    return module


def _text(form: Form, metadata: dict[str, Any], **more: Any) -> str:
    return json.dumps({**metadata, "export": {**asdict(form), **more}}, allow_nan=False, sort_keys=True)


def _write_torch(program: ExportedProgram, path: Path, form: Form, metadata: dict[str, Any]) -> list[Path]:
    pt2.save(program, path, _text(form, metadata))
    return [path]


def _write_onnx(program: ExportedProgram, path: Path, form: Form, metadata: dict[str, Any]) -> list[Path]:
    import onnx

    sample = torch.zeros(form.batch or 2, *form.input_shape)
    axis = None if form.batch else ({0: "batch"},)
    made = torch.onnx.export(
        program,
        (sample,),
        dynamo=True,
        verbose=False,
        opset_version=OPSET,
        input_names=["images"],
        output_names=["output"],
        dynamic_shapes=axis,
    )
    assert made is not None
    model = made.model_proto
    # Source lines of the machine that wrote the file.
    for part in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
    for value in (*model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    model = _onnx_form(model, form.precision)
    onnx.checker.check_model(model, full_check=True)
    onnx.helper.set_model_props(model, {KEY: _text(form, metadata)})
    onnx.save(model, path)
    return [path]


def _onnx_form(model: Any, precision: str) -> Any:
    if precision == "fp16":
        from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel

        exact = [*DEFAULT_OP_BLOCK_LIST, "LayerNormalization", "Softmax"]
        halved = OnnxModel(convert_float_to_float16(model, keep_io_types=True, op_block_list=exact))
        halved.topological_sort()  # the converter appends its casts,
        del halved.model.graph.value_info[:]  # and leaves types as they were before
        return halved.model
    if precision == "int8":
        from tempfile import TemporaryDirectory

        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with TemporaryDirectory() as scratch:
            # Unsigned weights: sums of products with signed ones saturate on CPUs without VNNI, which would then
            # answer otherwise. The patch embedding is left as it is: small, and the most sensitive.
            quantize_dynamic(
                model,
                f"{scratch}/q.onnx",
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=QuantType.QUInt8,
            )
            return onnx.load(f"{scratch}/q.onnx")
    return model


def _write_openvino(program: ExportedProgram, path: Path, form: Form, metadata: dict[str, Any]) -> list[Path]:
    import openvino

    model = openvino.convert_model(program)
    model.reshape([form.batch or -1, *form.input_shape])
    model.inputs[0].get_tensor().set_names({"images"})
    if form.precision == "int8":
        import nncf

        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    weights, half = path.with_suffix(".bin"), form.precision == "fp16"
    openvino.save_model(model, path, compress_to_fp16=half)
    # OpenVINO takes any .bin of the name: the sum tells another model's weights, and damaged ones.
    model.set_rt_info(_text(form, metadata, weights_sha256=sha256(weights)), [KEY, "metadata"])
    openvino.save_model(model, path, compress_to_fp16=half)
    return [weights, path]


def _write_executorch(program: ExportedProgram, path: Path, form: Form, metadata: dict[str, Any]) -> list[Path]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    buffer = io.BytesIO()
    lowered.write_to_file(buffer)
    path.write_bytes(buffer.getvalue())
    beside = beside_pte(path)
    beside.write_text(_text(form, metadata, weights_sha256=sha256(path)), encoding="utf-8")
    return [beside, path]


def beside_pte(path: Path) -> Path:
    """The file that carries a .pte's metadata, which its format has no place for."""
    return path.with_name(path.name + ".json")


def sha256(path: Path) -> str:
    """A file's sum, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters' chatter (progress, hints for their own developers) is no message to the user."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
