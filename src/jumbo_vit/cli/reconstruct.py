"""`jumbo-vit reconstruct`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jumbo_vit.tasks.reconstruct import Reconstructions

POSITIONALS = ("run", "images")


@dataclass
class Config:
    """Mask pictures and show what a masked autoencoder makes of them: original, masked, reconstructed, side by side.

    Args:
        run: The folder of a run of `pretrain --method mae`, or its last.ckpt.
        images: Picture files or folders.
        png: The PNG file to write, one row a picture.
        json: Write each picture's error, and which files were left out and why, to this file.
        mask_ratio: Share of the patches that is hidden; default the run's.
        seed: Fixes the masks, with a picture's position.
        averaged: Take the run's averaged weights in place of its plain ones.
        max_images: Show so many pictures and leave the others out.
        device: Where to compute.
    """

    run: str = ""
    images: list[str] = field(default_factory=list)
    png: str = ""
    json: str | None = None
    mask_ratio: float | None = None
    seed: int = 0
    averaged: bool = False
    max_images: int = 16
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"


def run(config: Config) -> None:
    """Write the pictures and print how well each is foretold; pictures that cannot be read are named and counted."""
    from jumbo_vit.files import write_bytes, write_json

    _check_files(config)
    from jumbo_vit.tasks.reconstruct import reconstruct, sheet_bytes

    found = reconstruct(
        config.run,
        config.images,
        config.mask_ratio,
        config.seed,
        config.averaged,
        config.max_images,
        config.device,
    )
    write_bytes(config.png, sheet_bytes(found.pictures))
    if config.json:
        write_json(config.json, _as_json(found, config.seed))
    print("\n".join(_lines(found, config.png)))


def _check_files(config: Config) -> None:
    """Refuse names of results, before the work, that cannot be written or would cost the user a picture."""
    from pathlib import Path

    from jumbo_vit.data.inputs import expand_inputs
    from jumbo_vit.errors import UserError

    if not config.png:
        raise UserError("--png is missing: give the PNG file to write")
    png = Path(config.png)
    if png.is_dir():
        raise UserError(f"--png {png} is a folder: give the PNG file to write")
    if png.suffix.lower() != ".png":
        raise UserError(f"--png {png} does not end in .png: a PNG file is written")
    results = [("--png", png)]
    if config.json:
        file = Path(config.json)
        if file.is_dir():
            raise UserError(f"--json {file} is a folder: give the JSON file to write")
        if file.absolute() == png.absolute():
            raise UserError(f"--json and --png are the same file, {png}: give another")
        results.append(("--json", file))
    existing = [(flag, path) for flag, path in results if path.exists()]
    sources = [entry.source for entry in expand_inputs(config.images)[0]] if existing else []
    for flag, path in existing:
        if any(isinstance(source, str | Path) and path.samefile(source) for source in sources):
            raise UserError(f"{flag} {path} is one of the pictures, which would be lost: give another file")


def _as_json(found: "Reconstructions", seed: int) -> dict[str, Any]:
    return {
        **found.origin,
        "notes": found.notes,
        "mask_ratio": found.ratio,
        "patches": found.patches,
        "kept_patches": found.kept,
        "seed": seed,
        "pictures": [{"path": p.path, "masked_error": p.masked_error, "mse": p.mse} for p in found.pictures],
        "unreadable": [{"path": item.path, "reason": item.reason} for item in found.unreadable],
        "skipped": [{"path": item.path, "reason": item.reason} for item in found.skipped],
        "left_out": found.left_out,
    }


def _lines(found: "Reconstructions", png: str) -> list[str]:
    import math

    origin = found.origin
    more = f" and {origin['update']} updates of the next" * bool(origin["update"])
    lines = [
        f"{origin['checkpoint']}: {origin['weights']} weights after {origin['epoch']} epochs{more}, "
        f"{_standing(origin)}",
        *found.notes,
        f"{found.kept} of {found.patches} patches are seen, {found.patches - found.kept} are masked",
    ]
    for picture in found.pictures:
        share = f"masked error {picture.masked_error:.4f} of the variance"
        if math.isnan(picture.masked_error):
            share = "masked pixels all the same, so there is no variance"
        lines.append(f"{_on_a_line(picture.path)}: {share} (mean squared error {picture.mse:.4f})")
    lines += [f"skipped {_on_a_line(item.path)}: {item.reason}" for item in found.unreadable]
    left_out = f", {found.left_out} more pictures left out (--max-images {len(found.pictures)})" * bool(found.left_out)
    if found.skipped:
        left_out += f", {len(found.skipped)} other files left out, such as {_on_a_line(found.skipped[0].path)}"
    return [*lines, f"{len(found.pictures)} pictures in {png}, {len(found.unreadable)} skipped{left_out}"]


def _standing(origin: dict[str, Any]) -> str:
    """Which of the run's weights these are: not always the best, whose encoder is in the model folder."""
    standing = (
        "the run's last" if origin["checkpoint"].endswith("last.ckpt") else "of a state that is not the run's last"
    )
    if not origin["best_epoch"]:
        return standing
    if (origin["best_epoch"], origin["best_weights"], 0) == (origin["epoch"], origin["weights"], origin["update"]):
        return f"{standing}, the best so far"
    return f"{standing}; the best are the {origin['best_weights']} ones of epoch {origin['best_epoch']}"


def _on_a_line(name: str) -> str:
    """A file's name without line ends or bytes that no terminal takes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
