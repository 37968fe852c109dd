"""A model on disk: `model.safetensors` and `config.json` in the Hugging Face hub's form, as timm writes and reads them.

The folder carries the whole contract: architecture and arguments, label names, preparation, task, lineage. Evaluation,
prediction and export need nothing else.
"""

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from safetensors.torch import save as to_safetensors
from timm.data import ImageNetInfo
from timm.models import is_model, list_models
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

import jumbo_vit.registry  # noqa: F401  (a folder names a registered model)
from jumbo_vit.checkpoints import check_fits, load_exactly, read_json, read_weights
from jumbo_vit.data.listing import TASKS
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError, nearest
from jumbo_vit.export.formats import SUFFIXES
from jumbo_vit.files import write_bytes, write_text
from jumbo_vit.predictor import Contract, Predictor
from jumbo_vit.sizes import MODEL_NAMES, SIZES

FORMAT = 1
# Above these a configuration is damaged: its lists and pictures would fill the memory.
_MOST_CLASSES, _MOST_PIXELS = 10**6, 10**8
# Arguments of timm.create_model that fetch weights or say how a file is read: a folder's own weights are all it needs.
_NOT_FOR_A_FOLDER = frozenset(
    {
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "checkpoint_path",
        "cache_dir",
        "scriptable",
        "weights_only",
    }
)


def make_model(name: str, **kwargs: Any) -> nn.Module:
    """`timm.create_model` for any registered name, with an unknown name or a wrong argument as one clear line.

    Raises:
        UserError: The name is unknown (the nearest is named), or the model does not take an argument or value.
    """
    if not isinstance(name, str) or not is_model(name):
        hint = _nearest_model(str(name))
        raise UserError(f"unknown model {name}{hint}; `jumbo-vit models` lists ours, timm.list_models() all others")
    try:
        model: nn.Module = timm.create_model(name, **kwargs)
    except UserError:
        raise
    except Exception as error:  # a wrong value makes a constructor raise anything, by where it is first used
        if kwargs.get("pretrained") and isinstance(error, OSError | RuntimeError):
            raise  # the weights cannot be had, which the caller words
        raise UserError(f"{name} cannot be made with {kwargs}: {error}") from error
    return model


def _nearest_model(name: str) -> str:
    # Ours are compared without the ending that they share, which would make any two of them alike.
    ours = {full.split("_patch")[0]: full for full in MODEL_NAMES} | {size: full for full, size in MODEL_NAMES.items()}
    close = difflib.get_close_matches(name.split("_patch", maxsplit=1)[0], ours, n=1, cutoff=0.7)
    return f" (did you mean {ours[close[0]]}?)" if close else nearest(name, list_models())


def save_folder(
    folder: str | Path, model: nn.Module, contract: Contract, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model folder; each of its two files is replaced whole.

    Args:
        folder: Made if it is missing.
        model: A timm model; its recorded arguments make the configuration.
        contract: The rest of what the folder says.
        state: Weights to write instead of the model's own (averaged ones, say).
    """
    folder = Path(folder)
    own = contract_entry(contract)
    # The preparation is written below as it is; timm would complete a partial one from the source weights' own.
    cfg = {**contract.preparation.to_cfg(), "test_input_size": None, "test_crop_pct": None}
    with TemporaryDirectory() as scratch:
        draft = Path(scratch) / "config.json"
        save_config_for_hf(model, str(draft), {"label_names": contract.labels, "jumbo_vit": own}, data_config=cfg)
        config = json.loads(draft.read_text())
    config["pretrained_cfg"].update(contract.preparation.to_cfg())
    tensors = {name: value.detach().cpu().contiguous() for name, value in (state or model.state_dict()).items()}
    data = to_safetensors(tensors, metadata={"format": "pt"})
    write_bytes(folder / "model.safetensors", data)
    write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def contract_entry(contract: Contract) -> dict[str, Any]:
    """What `config.json` holds under "jumbo_vit"; exported files carry it too."""
    return {
        "format": FORMAT,
        "task": contract.task,
        "labels": contract.labels,
        "thresholds": contract.thresholds,
        **contract.lineage,
    }


def resolve_folder(path: str | Path) -> Path:
    """The model folder that `path` means: itself, or `path/model` where `path` is a run.

    Raises:
        UserError: Neither is one.
    """
    path = Path(path)
    for candidate in (path, path / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    if not path.exists():
        raise UserError(f"no such model: {path}; give a model folder such as runs/digits/model, or an official .pth")
    raise UserError(f"{path} is no model folder: it holds no config.json (a run keeps its best model in DIR/model)")


def read_contract(folder: Path) -> tuple[str, dict[str, Any], Contract]:
    """Read `config.json`: the architecture's name, its arguments, and the contract.

    Raises:
        UserError: The file is cut, or lacks what a model needs.
    """
    return contract_of(read_json(folder / "config.json"), folder / "config.json")


def contract_of(config: dict[str, Any], where: Path) -> tuple[str, dict[str, Any], Contract]:
    """`read_contract` of what was read from the file `where`.

    Raises:
        UserError: It is damaged, or lacks what a model needs.
    """
    try:
        return _contract_of(config, where)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"{where} is damaged or not in timm's hub form ({error})") from error


def _contract_of(config: dict[str, Any], where: Path) -> tuple[str, dict[str, Any], Contract]:
    cfg = config.get("pretrained_cfg", {})
    own = config.get("jumbo_vit", {})
    labels = own.get("labels") or config.get("label_names")
    classes = config.get("num_classes", cfg.get("num_classes"))
    if not isinstance(config.get("architecture"), str) or type(classes) is not int or not 0 <= classes <= _MOST_CLASSES:
        raise UserError(f"{where} names no architecture and number of classes, as timm's hub form does")
    if own.get("format", FORMAT) > FORMAT:
        raise UserError(
            f"{where} is of format {own['format']}; this version reads up to {FORMAT}, so upgrade jumbo-vit"
        )
    if isinstance(labels, str):
        raise TypeError("the labels are one text, where a list is expected")
    if isinstance(labels, dict):
        labels = [labels[key] for key in sorted(labels, key=int)]
    labels = [str(label) for label in labels] if labels else [str(i) for i in range(classes)]
    if len(labels) != classes:
        raise UserError(f"{where} holds {len(labels)} label names for {classes} classes")
    task, thresholds = own.get("task", "multiclass"), own.get("thresholds")
    if task not in TASKS:
        raise UserError(f"{where} is of the task {task!r}, which this version does not know: {', '.join(TASKS)}")
    if thresholds is not None and len(thresholds) != classes:
        raise UserError(f"{where} holds {len(thresholds)} thresholds for {classes} classes")
    known = ("format", "task", "labels", "thresholds")
    preparation = Preparation.from_cfg(cfg)
    _check_preparation(preparation)
    _check_split(own.get("split"))
    contract = Contract(
        task=task,
        labels=labels,
        preparation=preparation,
        thresholds=[float(value) for value in thresholds] if thresholds is not None else None,
        lineage={key: value for key, value in own.items() if key not in known},
    )
    args = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (config.get("model_args") or {}).items()
        if key not in _NOT_FOR_A_FOLDER
    }
    return config["architecture"], {**args, "num_classes": classes}, contract


def _check_preparation(preparation: Preparation) -> None:
    """Raises an error of any kind where a picture could not be prepared so."""
    chans, height, width = preparation.input_size
    if not all(type(side) is int and side > 0 for side in (chans, height, width)) or height * width > _MOST_PIXELS:
        raise ValueError(f"input_size is {preparation.input_size}")
    for name, values in (("mean", preparation.mean), ("std", preparation.std)):
        if len(values) != chans or not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name} is {values}, where {chans} numbers are expected")
    if not min(preparation.std) > 0:
        raise ValueError(f"std is {preparation.std}, and must be above 0")
    if not 0.1 <= preparation.crop_pct <= 2:
        raise ValueError(f"crop_pct is {preparation.crop_pct}")
    preparation.evaluation()


def _check_split(split: Any) -> None:
    """Raises an error of any kind where this is not what training writes of the split that it drew."""
    if split is None:
        return
    if not all(type(split[key]) is int and split[key] >= 0 for key in ("seed", "checksum")):
        raise ValueError("split holds no seed and checksum")
    if not 0 < split["val_fraction"] < 1:
        raise ValueError(f"split's val_fraction is {split['val_fraction']}")
    folds, fold = split.get("folds", 0), split.get("fold")  # folders from before folds hold neither
    if type(folds) is not int or not (fold is None or (type(fold) is int and 1 <= fold <= folds)):
        raise ValueError(f"split's fold is {fold} of {folds}")


def _check_sizes(
    name: str, args: dict[str, Any], contract: Contract, state: Mapping[str, Tensor], source: Path
) -> None:
    """Check a configuration against its weights before memory is taken for what it says.

    Raises:
        UserError: They do not belong together, or the model does not take the pictures as they are prepared.
    """
    config = source.with_name("config.json")
    deep = [key for key, value in args.items() if "depth" in key and _largest(value) > len(state)]
    if deep:
        raise UserError(f"{config}: {deep[0]} is {args[deep[0]]}, more than the {len(state)} tensors of the weights")
    with torch.device("meta"):
        model = make_model(name, **args).eval()
        check_fits(model, state, source)
        size = contract.preparation.input_size
        try:
            shape = tuple(model(torch.empty(1, *size)).shape)
        except Exception as error:  # by the model, as it first uses what it cannot take
            raise UserError(f"{config}: {name} does not take pictures of its own input_size {size}: {error}") from error
    if contract.labels and shape != (1, len(contract.labels)):
        raise UserError(f"{config}: {name} gives {shape}, not one number for each of its classes")


def _largest(value: Any) -> int:
    return max((v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, int)), default=0)


def open_folder(path: str | Path) -> tuple[nn.Module, Contract]:
    """A model folder's model, in evaluation mode on the CPU, and its contract.

    Raises:
        UserError: No such folder, a cut or foreign file, or weights that do not fit the architecture.
    """
    folder = resolve_folder(path)
    name, args, contract = read_contract(folder)
    weights = next((p for p in (folder / "model.safetensors", folder / "pytorch_model.bin") if p.is_file()), None)
    if weights is None:
        raise UserError(f"{folder} holds no model.safetensors; a model folder is config.json and model.safetensors")
    state = read_weights(weights)
    _check_sizes(name, args, contract, state, weights)
    model = make_model(name, **args)
    load_exactly(model, state, weights)
    return model.eval(), contract


def open_official(path: str | Path) -> tuple[nn.Module, Contract]:
    """An official checkpoint file's model and contract; the size is told by names and shapes.

    Raises:
        UserError: Corrupt, or not one of the authors' checkpoints.
    """
    state = read_weights(path)
    token = state.get("reg_token")
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    for name, size in MODEL_NAMES.items():
        row = SIZES[size]
        if row.official_top1 is None or token is None:
            continue
        bias = state.get("head.bias")
        shape = (1, row.num_jumbo, row.dim)
        if tuple(token.shape) == shape and depth == row.depth and bias is not None and bias.ndim == 1:
            info = ImageNetInfo()
            model: Any = make_model(name, num_classes=len(bias))
            load_exactly(model, state, path)
            labels = [info.index_to_description(i) for i in range(1000)] if model.num_classes == 1000 else []
            lineage = {"source": f"antofuller/jumbo {Path(path).name}", "license": "not stated (code: MIT)"}
            preparation = Preparation.from_cfg(model.pretrained_cfg)
            names = _unique(labels) or [str(i) for i in range(int(model.num_classes))]
            return model.eval(), Contract("multiclass", names, preparation, lineage=lineage)
    seen = f"its token is {tuple(token.shape)}" if token is not None else "it has no jumbo_token"
    raise UserError(
        f"{path} is not one of the official Jumbo checkpoints ({seen}, {depth} blocks); give a model folder, "
        "or start a training from it with --init-from"
    )


def _unique(labels: list[str]) -> list[str]:
    """ImageNet has two classes called crane and two called maillot: number the later ones, names must be unique."""
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def load(path: str | Path, device: str = "auto") -> Predictor:
    """Open a model folder, a run's folder, an official checkpoint file or an exported file, ready to predict.

    Args:
        path: `DIR/model`, `DIR`, `jumbo_<size>.pth` as the authors publish it, or a file that `export` wrote.
        device: "auto", "cpu", "cuda" or "mps"; exported files run on the CPU.

    Raises:
        UserError: Nothing there, a corrupt or foreign file, a file that wants to run code, or no such device.
    """
    path = Path(path)
    if path.name in ("model.safetensors", "config.json") and (path.parent / "config.json").is_file():
        path = path.parent
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        from jumbo_vit.export.classifier import open_classifier

        return open_classifier(path, device)
    model, contract = open_official(path) if path.is_file() else open_folder(path)
    return Predictor(model, contract, pick_device(device))


def pick_device(name: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "mps" means here.

    Raises:
        UserError: The machine does not have it.
    """
    have = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device("cuda" if have["cuda"] else "mps" if have["mps"] else "cpu")
    if not have.get(name, False):
        usable = ", ".join(key for key, there in have.items() if there)
        raise UserError(f"device {name} is not usable on this machine; use auto or one of: {usable}")
    return torch.device(name)
