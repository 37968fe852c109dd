"""`jumbo-vit attention`."""

from dataclasses import dataclass
from typing import Literal

POSITIONALS = ("model", "image")


@dataclass
class Config:
    """Show where a model looks: attention of its global tokens, laid over the picture.

    Args:
        model: A model folder, a run's folder, or an official .pth file.
        image: A picture file.
        png: The PNG file to write.
        layer: The block whose attention is shown; -1 is the last.
        heads: Show each head beside the others, instead of their mean.
        device: Where to compute.
    """

    model: str = ""
    image: str = ""
    png: str = ""
    layer: int = -1
    heads: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"


def run(config: Config) -> None:
    """Write the picture and say what it shows."""
    from pathlib import Path

    from jumbo_vit.data.images import read_image
    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_bytes
    from jumbo_vit.folder import load
    from jumbo_vit.measure.attention import attention_maps
    from jumbo_vit.measure.overlay import draw, seen_box

    if not config.png:
        raise UserError("--png is missing: give the PNG file to write")
    if Path(config.png).exists() and Path(config.image).exists() and Path(config.png).samefile(config.image):
        raise UserError(f"--png {config.png} is the picture itself, which would be lost; give another file")
    predictor = load(config.model, config.device)
    preparation = predictor.contract.preparation
    picture = read_image(config.image, preparation.in_chans)
    maps = attention_maps(predictor.model, predictor.prepare(picture)[None], config.layer, reduce=False)
    shown = maps[0].mean(dim=1).float().cpu().numpy()
    titles = [f"head {i}" for i in range(len(shown))]
    if not config.heads:
        shown, titles = shown.mean(axis=0, keepdims=True), [""]
    box = seen_box(preparation.evaluation(), picture)
    write_bytes(config.png, draw(picture, shown, titles, box))
    asking, (high, wide) = maps.shape[2], shown.shape[1:]
    share = ", ".join(f"{title} {m.sum():.1%}".strip() for title, m in zip(titles, shown, strict=True))
    print(
        f"{config.png}: layer {config.layer}, mean over {asking} global tokens, a map of {high}x{wide} patches; "
        f"attention that goes to patches: {share}"
    )
    print(f"the model saw columns {box[0]:.0f} to {box[1]:.0f} and rows {box[2]:.0f} to {box[3]:.0f} of the picture")
