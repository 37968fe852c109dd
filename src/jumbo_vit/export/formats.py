"""The table of formats: endings, precisions, packages. Free of torch, so that the command line answers at once."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

from jumbo_vit.errors import UserError, nearest

INSTALL = "pip install 'jumbo-vit[export]'"


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Args:
        suffix: The ending of its file.
        precisions: What it can hold, most exact first.
        automatic: The precisions that "auto" measures on a CPU.
        to_write: Packages, beside torch, that writing needs, by precision; "" for all of them.
        to_run: Packages that running needs.
    """

    suffix: str
    precisions: tuple[str, ...]
    automatic: tuple[str, ...]
    to_write: dict[str, tuple[str, ...]] = field(default_factory=dict)
    to_run: tuple[str, ...] = ()


FORMATS = {
    "torch": Format(".pt2", ("fp32", "bf16", "fp16", "int8"), ("fp32", "bf16", "int8"), {"int8": ("torchao",)}),
    "onnx": Format(".onnx", ("fp32", "fp16", "int8"), ("fp32", "int8"), {"": ("onnx", "onnxscript")}, ("onnxruntime",)),
    "openvino": Format(
        ".xml", ("fp32", "bf16", "fp16", "int8"), ("fp32", "bf16", "int8"), {"int8": ("nncf",)}, ("openvino",)
    ),
    "executorch": Format(".pte", ("fp32",), ("fp32",), {}, ("executorch",)),
}
SUFFIXES = {row.suffix: name for name, row in FORMATS.items()}


def format_of(path: str | Path, wanted: str = "auto") -> str:
    """The format that a file's ending means, checked against the one asked for.

    Raises:
        UserError: An ending of no format, or of another than `wanted`.
    """
    suffix = Path(path).suffix.lower()
    if wanted != "auto" and wanted not in FORMATS:
        raise UserError(
            f"unknown format {wanted!r}{nearest(wanted, FORMATS)}; there are {', '.join(FORMATS)}, and auto"
        )
    endings = ", ".join(f"{row.suffix} ({name})" for name, row in FORMATS.items())
    if suffix not in SUFFIXES:
        raise UserError(f"{path} has the ending of no format; give it one of: {endings}")
    if wanted not in ("auto", SUFFIXES[suffix]):
        raise UserError(
            f"{path} ends in {suffix}, and a file of the format {wanted} in {FORMATS[wanted].suffix}: change one"
        )
    return SUFFIXES[suffix]


def check_precision(format: str, precision: str) -> None:
    """Raises UserError where a format has no such precision; the line says what it has."""
    have = FORMATS[format].precisions
    if precision not in ("auto", *have):
        raise UserError(f"{format} has no precision {precision!r} here; use {', '.join(('auto', *have))}")


def check_installed(format: str, precision: str | None = None) -> None:
    """Check that the packages are here which run a format's file, and with a precision those that write it.

    Raises:
        UserError: One is missing; the line says what installs it.
    """
    row = FORMATS[format]
    packages = list(row.to_run)
    if precision is not None:
        packages += [*row.to_write.get("", ()), *row.to_write.get(precision, ())]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        what = f"{format} in {precision}" if precision else f"running a {row.suffix} file"
        raise UserError(f"{what} needs {', '.join(missing)}, which is not installed: {INSTALL}")
