"""`jumbo-vit embed`."""

from dataclasses import dataclass, field
from typing import Literal

POSITIONALS = ("model", "inputs")


@dataclass
class Config:
    """Write the features of pictures, those that the head reads, and each picture's nearest others.

    Args:
        model: A model folder, a run's folder, or an official .pth file.
        inputs: Picture files or folders.
        out: The .npz file to write: features (N, width) in float32, paths, and for each picture the indices and
            cosine similarities of its nearest others.
        nearest: How many nearest pictures to find for each; 0 for none.
        device: Where to compute.
    """

    model: str = ""
    inputs: list[str] = field(default_factory=list)
    out: str = ""
    nearest: int = 5
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"


def run(config: Config) -> None:
    """Write the file and say what is in it."""
    import io

    import numpy as np

    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_bytes
    from jumbo_vit.folder import load
    from jumbo_vit.neighbours import nearest

    if not config.out:
        raise UserError("--out is missing: give the .npz file to write")
    if config.nearest < 0:
        raise UserError(f"--nearest is {config.nearest}, but must be 0 or more")
    names, features, skipped = load(config.model, config.device).embed(config.inputs)
    indices, similarity = nearest(features, min(config.nearest, len(names) - 1))
    buffer = io.BytesIO()
    np.savez(buffer, paths=np.array(names), features=features, nearest=indices, similarity=similarity)
    write_bytes(config.out, buffer.getvalue())
    for name, row, values in list(zip(names, indices, similarity, strict=True))[:10]:
        others = ", ".join(f"{names[i]} ({value:.3f})" for i, value in zip(row, values, strict=True))
        print(f"{name}: {others}" if others else name)
    print(f"{len(names)} pictures, {features.shape[1]} features each, {len(skipped)} skipped, in {config.out}")
    for entry in skipped[:20]:
        print(f"skipped {entry.path}: {entry.reason}")
