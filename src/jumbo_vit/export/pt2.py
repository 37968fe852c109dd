"""Reading a .pt2 without running anything from it.

`torch.export.load` unpickles parts of the file, evaluates its shape expressions as Python and can load a compiled
library from it. So our files hold none of that, and a file is looked through before torch sees it: raw weights only, no
pickles, names and expressions of letters and digits, operations of PyTorch's own set.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from jumbo_vit.errors import UserError

EXTRA = "jumbo_vit.json"

# Where torch keeps source lines and module names of the machine that wrote the file. Nothing reads them.
_TRACES = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node")
_ENTRY = re.compile(
    r"(models/model\.json|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)|data/sample_inputs/model\.pt|extra/jumbo_vit\.json"
    r"|archive_format|archive_version|byteorder|\.data/[a-z_]+|version)"
)
_WORD = re.compile(r"[\w.+\-]*")
_EXPRESSION = re.compile(
    r"(Symbol\('s\d+', positive=True, integer=True\)|Integer\(-?\d+\)|s\d+|\d+|Mul\(|Add\(|, |\))+"
)
_TARGET = re.compile(r"torch\.ops\.aten\.\w+\.\w+|_operator\.(add|sub|mul|floordiv|eq|ne|lt|le|gt|ge|getitem)")
_TOUCHES_FILES = re.compile(r"torch\.ops\.aten\.from_file")
_SPEC_TYPES = ("builtins.tuple", "builtins.list", "builtins.dict", None)


def save(program: ExportedProgram, path: Path, metadata: str) -> None:
    """Write a program with `metadata` (JSON) beside it in the archive.

    Raises:
        UserError: It holds what `load` would refuse.
    """
    for node in program.graph.nodes:
        for key in _TRACES:
            node.meta.pop(key, None)
    program.example_inputs = None
    # Shapes are checked by ExportedModel; these would be Python text that torch compiles on loading.
    program._guards_code = []
    torch.export.save(program, path, extra_files={EXTRA: metadata})
    fault = _fault(path.read_bytes())
    if fault:
        raise UserError(f"this model cannot be written as a .pt2 that is safe to open: {fault}; use another format")


def load(path: Path) -> tuple[nn.Module, str]:
    """The program of a file that `save` wrote, as a module, and the metadata.

    Raises:
        UserError: Damaged, of another torch, or holding anything that `save` does not write.
    """
    data = path.read_bytes()
    try:
        fault = _fault(data)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or no .pt2 of ours: {error}") from error
    if fault:
        raise UserError(
            f"{path} was not opened: {fault}; only files that jumbo-vit export wrote, with a torch like this one "
            f"({torch.__version__}), are"
        )
    extra = {EXTRA: ""}
    try:
        program = torch.export.load(io.BytesIO(data), extra_files=extra)
        return program.module(), extra[EXTRA]
    except Exception as error:  # a damaged graph makes torch raise anything
        raise UserError(f"{path} cannot be read by torch {torch.__version__}: {error}") from error


def _fault(data: bytes) -> str:
    """What in an archive `save` does not write, in words; "" for nothing."""
    if not data.startswith(b"PK"):
        return "it is no archive"
    # The reader that torch.export.load uses, so that both see the same entries.
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    names = list(reader.get_all_records())
    odd = [name for name in names if not _ENTRY.fullmatch(name)]
    if odd:
        return f"it holds {odd[0]!r}"
    if f"extra/{EXTRA}" not in names:
        return "it holds no jumbo_vit.json, so jumbo-vit did not write it"
    if reader.get_record("data/sample_inputs/model.pt"):
        return "it holds pickled inputs"
    for part in ("weights", "constants"):
        config = json.loads(reader.get_record(f"data/{part}/model_{part}_config.json"))["config"]
        for name, entry in config.items():
            if entry["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
                return f"the {part} hold a pickle, {name}"
    graph = json.loads(reader.get_record("models/model.json"))
    return _fault_of_graph(graph)


def _fault_of_graph(graph: dict[str, Any]) -> str:
    if graph.get("guards_code"):
        return "it holds Python text"
    for key, text in _texts(graph):
        if key == "target":
            good = bool(_TARGET.fullmatch(text)) and not _TOUCHES_FILES.match(text)
        elif key == "expr_str":
            good = bool(_EXPRESSION.fullmatch(text))
        elif key in ("in_spec", "out_spec"):
            good = all(kind in _SPEC_TYPES for kind in _spec_types(json.loads(text)[1]))
        else:
            good = bool(_WORD.fullmatch(text))
        if not good:
            return f"its {key} is {text[:80]!r}"
    return ""


def _texts(value: Any, key: str = "") -> Any:
    """All texts of a nested structure, keys of mappings included, each with the key it stands under."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield "key", name
            yield from _texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value


def _spec_types(spec: Any) -> Any:
    yield spec["type"]
    for child in spec["children_spec"]:
        yield from _spec_types(child)
