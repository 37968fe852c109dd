"""`jumbo-vit probe`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jumbo_vit.tasks.probe_heads import Plan

POSITIONALS = ("model",)


@dataclass
class Config:
    """Measure a model's features: its trunk stays as it is, linear heads and k-NN are trained on what it gives.

    Features are computed once and kept on the disk. Heads (batch norm without weights, then linear) are trained side by
    side on all kinds of features at all rates; the best of each kind is chosen on a part of the training pictures,
    trained again on all of them, and scored once on the held-out pictures.

    Args:
        model: A model folder, a run, or an official checkpoint; with --dry-run also a registered model's name.
        data: A folder, a table, shards, or "digits", as for `train`; its classes need not be the model's.
        rates: Learning rates for a batch of 256; what is used grows with the batch.
        opt: Optimizers to try: sgd, and lars, which is for large batches and wants rates some ten times higher.
        epochs: Passes over the training pictures' features.
        batch_size: Pictures in an update.
        weight_decay: Weight decay of the heads.
        knn: Neighbours that vote in k-NN, by cosine with temperature 0.07; 0 for no k-NN.
        tune_fraction: Share of the training pictures that chooses among the heads.
        val_fraction: Share of the pictures held out where no held-out folder is there; default as in the model's own
            training, else 0.1.
        split_seed: Fixes which pictures are held out; default as in the model's own training, else the seed.
        seed: Fixes first weights, order, and which training pictures choose.
        features: Folder for the features; default features/ beside the run.
        json: Write all rows to this file.
        save: Write the model with the best head that it can hold to this folder.
        dry_run: Build everything, make two small updates of the heads, say what the whole would take, and stop. A
            registered model's name in the place of MODEL stands for one with random weights.
        device: Where to compute the features; heads are trained there too.
        workers: Processes that load pictures; 0 loads them in this one.
    """

    model: str
    data: str = ""
    rates: list[float] = field(default_factory=lambda: [0.003, 0.01, 0.03, 0.1, 0.3])
    opt: list[Literal["sgd", "lars"]] = field(default_factory=lambda: ["sgd"])
    epochs: int = 50
    batch_size: int = 1024
    weight_decay: float = 0.0
    knn: int = 20
    tune_fraction: float = 0.1
    val_fraction: float | None = None
    split_seed: int | None = None
    seed: int = 0
    features: str | None = None
    json: str | None = None
    save: str | None = None
    dry_run: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    workers: int = 0


def run(config: Config) -> None:
    """Print the rows, and write them and the model where asked; or say what all that would take."""
    from pathlib import Path

    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_json
    from jumbo_vit.memory import keep_freed_memory
    from jumbo_vit.tasks.probe import probe

    if not config.data:
        raise UserError("--data is missing: give a folder of class folders, a CSV, or digits")
    if config.json and Path(config.json).is_dir():
        raise UserError(f"--json {config.json} is a folder: give a file")
    keep_freed_memory()
    if config.dry_run:
        from jumbo_vit.tasks.dry_probe import dry_probe

        dry_probe(
            config.model, config.data, plan_of(config), config.val_fraction, config.split_seed, device=config.device
        )
        return
    result = probe(
        config.model,
        config.data,
        plan_of(config),
        val_fraction=config.val_fraction,
        split_seed=config.split_seed,
        features=config.features,
        save=config.save,
        device=config.device,
        workers=config.workers,
    )
    if config.json:
        write_json(config.json, result)
    print("\n".join(lines(result)))


def plan_of(config: Config) -> "Plan":
    """The options on the heads.

    Raises:
        UserError: A number outside its range.
    """
    from jumbo_vit.tasks.probe_heads import Plan

    return Plan(
        rates=tuple(config.rates),
        opts=tuple(config.opt),
        epochs=config.epochs,
        batch_size=config.batch_size,
        weight_decay=config.weight_decay,
        neighbours=config.knn,
        tune_fraction=config.tune_fraction,
        seed=config.seed,
    )


def lines(result: dict[str, Any]) -> list[str]:
    """The rows for people."""
    found = [f"{'features':12} {'width':>6} {'opt':5} {'rate':>8} {'tuning top-1':>13}"]
    for row in result["heads"]:
        found.append(
            f"{row['features']:12} {row['width']:6} {row['opt']:5} {row['rate']:8g} {_share(row['tune_top1'], 13)}"
        )
    found += ["", f"{'chosen':12} {'width':>6} {'opt':5} {'rate':>8} {'held-out top-1':>15} {'k-NN top-1':>11}"]
    for row in result["chosen"]:
        mark = "  <- best on the tuning part" if row["features"] == result["best"]["features"] else ""
        found.append(
            f"{row['features']:12} {row['width']:6} {row['opt']:5} {row['rate']:8g} {_share(row['top1'], 15)} "
            f"{_share(row['knn_top1'], 11)}{mark}"
        )
    pictures = result["pictures"]
    found.append(
        f"{pictures['train']} pictures for training, {pictures['tune']} of them to choose, {pictures['held_out']} held "
        f"out ({result['held_out']})"
    )
    found += [f"skipped {entry['path']}: {entry['reason']}" for entry in result["skipped"]]
    found += [f"note: {note}" for note in result["notes"]]
    return found


def _share(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.4f}"
