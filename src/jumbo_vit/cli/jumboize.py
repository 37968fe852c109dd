"""`jumbo-vit jumboize`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jumbo_vit.predictor import Contract

POSITIONALS = ("model",)


@dataclass
class Config:
    """Give a vision transformer of timm a Jumbo token, made of the class and register tokens that it has.

    With its FFNs kept, the outputs are exactly those of before, and `train --init-from OUT` teaches the new wide FFN.

    Args:
        model: A name of timm's, such as vit_small_patch16_dinov3, or a model folder.
        out: The model folder to write.
        num_jumbo: How many of the class and register tokens become the Jumbo token; default all.
        keep_mlp: Let these tokens keep the FFN of each block. Without it they skip it, as in the paper's block, and
            the outputs change.
        pretrained: Take the trained weights that timm has for the name; without them the weights are random.
    """

    model: str = ""
    out: str = ""
    num_jumbo: int | None = None
    keep_mlp: bool = True
    pretrained: bool = True


def run(config: Config) -> None:
    """Write the folder; say which tokens were taken, what was added, and how exact it is."""
    import torch

    from jumbo_vit.errors import UserError
    from jumbo_vit.folder import save_folder
    from jumbo_vit.jumboized import jumboize

    out = Path(config.out)
    if not config.out:
        raise UserError("--out is missing: give the model folder to write")
    if (out / "config.json").exists():
        raise UserError(f"--out {out} holds a model already; give another folder")
    torch.manual_seed(0)
    model, contract = _open_folder(config.model) if Path(config.model).is_dir() else _open_name(config)
    batch = torch.randn(2, *contract.preparation.input_size)
    old = sum(p.numel() for p in model.parameters()) / 1e6
    with torch.inference_mode():
        before = model(batch)
    jumboize(model, config.num_jumbo, config.keep_mlp)
    with torch.inference_mode():
        difference = float((model(batch) - before).abs().max())
    save_folder(out, model, contract)
    total, ffn = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (model, model.jumbo_mlp))
    taken, have = model.num_jumbo, model.num_prefix_tokens
    print(
        f"{config.model}: {taken} of its {have} class and register tokens are the Jumbo token now, "
        f"J={taken}, width {taken}x{model.embed_dim}"
    )
    print(f"{total:.2f} M parameters, {total - old:.2f} M of them new (the shared FFN has {ffn:.2f} M)")
    kept = "and keep" if config.keep_mlp else "instead of"
    print(f"its tokens pass the shared FFN {kept} the FFN of each block")
    print(f"largest difference of outputs on a random batch: {difference:g}")
    print(f"written to {out}; try next:\n  jumbo-vit train --data FOLDER --init-from {out}")


def _open_folder(path: str) -> "tuple[Any, Contract]":
    from jumbo_vit.folder import open_folder

    model, contract = open_folder(path)
    contract.lineage["jumboized_from"] = path
    return model, contract


def _open_name(config: Config) -> "tuple[Any, Contract]":
    """A model by timm's name, and its contract; ImageNet's label names where it has that head."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    from jumbo_vit.data.pipeline import Preparation
    from jumbo_vit.errors import UserError
    from jumbo_vit.folder import _unique, make_model
    from jumbo_vit.predictor import Contract

    name = config.model
    if "/" in name or name.startswith("."):
        raise UserError(f"no such model folder: {name}")
    try:
        model: Any = make_model(name, pretrained=config.pretrained).eval()
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the trained weights of {name} cannot be had ({reason}); give a model folder, or --no-pretrained for "
            "random weights"
        ) from error
    subset = infer_imagenet_subset(model)
    info = ImageNetInfo(subset) if subset else None
    labels = [info.index_to_description(i) if info else str(i) for i in range(model.num_classes)]
    weights = "timm" if config.pretrained else "random weights,"
    lineage = {"source": f"{weights} {name}", "license": model.pretrained_cfg.get("license"), "jumboized_from": name}
    return model, Contract("multiclass", _unique(labels), Preparation.from_cfg(model.pretrained_cfg), lineage=lineage)
