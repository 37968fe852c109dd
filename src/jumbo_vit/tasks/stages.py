"""One recipe in several steps: each stage is a whole run that starts from the best model of the one before.

    epochs: 20                # holds for all stages, where a stage says nothing else
    stages:
      - {img_size: 128, epochs: 400}
      - {img_size: 224, lr: 1e-5}

Of all stages the options, models, sizes, augmentation, optimizers, and that data and teachers are there are checked
before the first begins; data and teachers are opened as their stage begins. The options as given are kept in
`stages.yaml`, which is itself such a file; each stage's folder has its own `config.yaml`, state and model.
"""

import dataclasses
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from jumbo_vit.errors import UserError
from jumbo_vit.files import write_bytes, write_json, write_text
from jumbo_vit.tasks.build import load_config, versions
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.fabric import make_fabric, on_main
from jumbo_vit.tasks.members import check_options
from jumbo_vit.tasks.stage_checks import check_models, check_places, typed_options, with_full_paths
from jumbo_vit.tasks.state import claim_out, holds_run
from jumbo_vit.tasks.stream import stream_options

RECIPE = "stages.yaml"

# What a run takes over from the model folder that it starts from.
_OF_A_FOLDER = ("model", "model_args", "img_size", "patch_size", "in_chans")

One = Callable[[TrainConfig, bool], tuple[dict[str, Any], int]]
"""Makes the run of complete options, or goes on with it where `True` says that it has begun. Gives its summary, and the
number of a signal that came when it had nothing left to do, or 0."""

# What belongs to the whole: a stage of its own folder, machine or number of seeds would be another recipe.
_OF_THE_WHOLE = frozenset(
    {"stages", "out", "resume", "dry_run", "given", "seeds", "folds", "fold", "devices", "nodes", "device", "strategy"}
)


_OPTIONS = frozenset(field.name for field in dataclasses.fields(TrainConfig))

# Of one call, not of a recipe.
_OF_A_CALL = frozenset({"given", "out", "resume", "dry_run"})


def holds_stages(out: Path) -> bool:
    """Whether a folder is that of a recipe in stages."""
    return (out / RECIPE).is_file() and not (out / "config.yaml").is_file()


def plan_stages(config: TrainConfig, out: Path) -> list[TrainConfig]:
    """The complete options of each stage, checked as far as that is possible before the first one has run.

    Args:
        config: As the user gave it, with `stages`; nothing filled in.
        out: The folder of all stages.

    Raises:
        UserError: An unknown option or a wrong value in a stage, one that belongs to the whole, or one that does not go
            with stages.
    """
    stages = config.stages
    if not stages:
        raise UserError("stages is empty: give at least one mapping of options, such as {img_size: 128, epochs: 400}")
    if config.seeds > 1 or (config.folds and config.fold is None):
        raise UserError(
            "stages do not go with --seeds or --folds: start the recipe once for each, with another --seed (or --fold) "
            "and --out"
        )
    checked = [_checked(stage, number) for number, stage in enumerate(stages, start=1)]
    for name in sorted(config.given - _OF_THE_WHOLE):
        if all(name in stage for stage in checked):
            raise UserError(
                f"{name} is given for all stages, but each stage has its own, so it would be without effect: leave "
                "it out, or change it in the stages"
            )
    plan: list[TrainConfig] = []
    for number, stage in enumerate(checked, start=1):
        own: dict[str, Any] = {**stage, "stages": None, "out": str(out / f"stage-{number}"), "resume": None}
        own["given"] = config.given - {"stages"} | stage.keys()
        if plan:
            if stage.get("init_from"):
                raise UserError(f"stage {number} starts from stage {number - 1}: leave init_from out of it")
            own["init_from"] = f"{plan[-1].out}/model"
        filled = dataclasses.replace(config, **own)
        if plan and plan[-1].lora_rank not in (0, filled.lora_rank):
            raise UserError(
                f"stage {number} would lose the bypasses of stage {number - 1}: give lora_rank {plan[-1].lora_rank} in "
                "this stage too"
            )
        if plan and filled.model in (None, "jumboized"):
            filled = _like_the_one_before(filled, plan[-1])
        filled = with_defaults(stream_options(filled, None, None))
        if filled.data != "digits" and not filled.streaming:
            filled = dataclasses.replace(filled, data=str(Path(filled.data).expanduser().absolute()))
        plan.append(filled)
    return plan


def _like_the_one_before(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """What going on from that model's folder would fill in: the folder is not there yet when the stages are planned."""
    if config.model not in (None, before.model):
        return config
    return dataclasses.replace(
        config, **{name: getattr(before, name) for name in _OF_A_FOLDER if getattr(config, name) is None}
    )


def _checked(stage: Any, number: int) -> dict[str, Any]:
    """A stage's options by their names and in their types.

    Raises:
        UserError: What is wrong with the first that is wrong.
    """
    if not isinstance(stage, dict):
        raise UserError(f"stage {number} is {stage!r}, but must be a mapping of options, such as {{img_size: 128}}")
    for key in stage:
        name = str(key).replace("-", "_")
        if name in _OF_THE_WHOLE and name != "given":
            raise UserError(
                f"stage {number}: {name} belongs to the whole recipe, not to a stage: put it outside stages"
            )
    return typed_options(stage, _OPTIONS - _OF_THE_WHOLE, f"stage {number}")


def train_stages(config: TrainConfig, one: One) -> dict[str, Any]:
    """Make all stages of a new recipe, and give the summary (the content of `summary.json`).

    Raises:
        UserError: Anything that the user can mend; the stages that are finished stay.
        SystemExit: After a signal, with the state of the stage under way written.
    """
    plan = plan_stages(config, Path(config.out or "runs/new"))  # what is wrong is told before a folder is taken
    check_places(plan)
    check_models(plan)
    fabric = _launched(config)

    def prepare() -> str:
        out = claim_out(config)
        write_text(out / RECIPE, _recipe_text(config, plan[0]))
        return str(out)

    out = Path(on_main(fabric, prepare))
    return _go_through(config, out, one, fabric)


def resume_stages(out: Path, epochs: int | None, one: One) -> dict[str, Any]:
    """Go on with a recipe where it stands.

    Raises:
        UserError: Another number of epochs, a damaged recipe, or a stage that was made with other options.
    """
    if epochs is not None:
        raise UserError(f"{out} is a recipe in stages, each with its epochs: --resume takes no --epochs there")
    config = _read_recipe(out / RECIPE)
    return _go_through(config, out, one, _launched(config))


def _launched(config: TrainConfig) -> Any:
    # All processes need to know the folder before the first stage; later launches find the processes there.
    return make_fabric(config.device, config.devices, config.nodes, config.strategy, config.precision, 0)[0]


def _recipe_text(config: TrainConfig, first: TrainConfig) -> str:
    """The options that are not the defaults, as a file for --config.

    The first stage names its model, so that the folder in --init-from is not needed a second time.
    """
    usual = TrainConfig()
    fields = {name: getattr(config, name) for name in vars(usual) if name not in _OF_A_CALL | {"stages"}}
    fields = {name: value for name, value in fields.items() if value != getattr(usual, name)}
    stages = [dict(stage) for stage in config.stages or []]
    if config.model in (None, "jumboized"):
        stages[0] |= {name: getattr(first, name) for name in _OF_A_FOLDER if getattr(first, name) is not None}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    content = with_full_paths(plain) | {"stages": [with_full_paths(stage) for stage in stages]}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _read_recipe(path: Path) -> TrainConfig:
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a recipe in stages: {error}") from error
    stages = fields.pop("stages", None) if isinstance(fields, dict) else None
    if not isinstance(stages, list):
        raise UserError(f"{path} cannot be read as a recipe in stages: it has no list called stages")
    return TrainConfig(**typed_options(fields, _OPTIONS - _OF_A_CALL, str(path)), stages=stages)


def _go_through(config: TrainConfig, out: Path, one: One, fabric: Any) -> dict[str, Any]:
    main = bool(fabric.is_global_zero)
    plan = plan_stages(config, out)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for number, stage in enumerate(plan, start=1):
        if main:
            print(f"\nstage {number} of {len(plan)}: {stage.out}", flush=True)
        try:
            found, stop = one(stage, on_main(fabric, partial(_begun, stage)))
        except SystemExit:
            _say_stopped(number - 1, len(plan), out, main)
            raise
        if found["score"] is None:
            raise UserError(f"stage {number} kept no model, since no epoch gave a finite score: lower its lr")
        rows.append(_row(stage, found))
        if main:
            write_json(out / "summary.json", _summary(out, found, rows, len(plan)))
        stop = int(fabric.all_reduce(torch.tensor(float(stop), device=fabric.device), reduce_op="max"))
        if stop and number < len(plan):
            _say_stopped(number, len(plan), out, main)
            raise SystemExit(128 + stop)
    summary = _summary(out, found, rows, len(plan))
    if main:
        _copy_model(Path(plan[-1].out or ".") / "model", out / "model")
        print("\n".join(_closing_lines(summary)), flush=True)
    fabric.barrier()
    return summary


def _begun(stage: TrainConfig) -> bool:
    """Whether the stage's run is there, with the options that the recipe gives it."""
    folder = Path(stage.out or ".")
    if not holds_run(folder):
        return False
    saved = load_config(folder)
    for name in _OF_A_STAGE:
        has, wants = getattr(saved, name), getattr(stage, name)
        if has != wants:
            raise UserError(
                f"{folder} holds a run with {name} {has}, but the recipe gives it {name} {wants}: put it back in "
                f"{folder.parent / RECIPE}, or remove the folder, and the stage is trained anew"
            )
    check_options(folder, saved, stage)
    return True


# Beside what `check_options` compares, and before it: its defaults may depend on these.
_OF_A_STAGE = (
    "epochs",
    "batch_size",
    "grad_accum_steps",
    "precision",
    "grad_checkpointing",
    "val_data",
    "check_images",
)


def _say_stopped(done: int, total: int, out: Path, main: bool) -> None:
    if main:
        print(f"{done} of {total} stages are finished; go on with --resume {shlex.quote(str(out))}", flush=True)


def _row(stage: TrainConfig, found: dict[str, Any]) -> dict[str, Any]:
    names = ("score", "best_epoch", "best_weights", "epochs", "updates", "bad_updates", "stopped_early", "seconds")
    return {
        "folder": stage.out,
        "model": stage.model,
        "img_size": stage.img_size,
        "init_from": stage.init_from,
        "lr": stage.lr,
        **{name: found[name] for name in names},
        "images": found["images"],
        "skipped": len(found["skipped"]),
    }


def _summary(out: Path, last: dict[str, Any], rows: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """The content of `summary.json`, finished or not; the score is that of the last stage there is."""
    return {
        "out": str(out),
        "finished": len(rows) == total,
        "stages_planned": total,
        "stages": rows,
        **{name: last[name] for name in ("data", "model", "parameters", "classes", "task", "metric")},
        **{name: last[name] for name in ("score", "best_epoch", "best_weights", "best_numbers")},
        "model_folder": str(out / "model") if len(rows) == total else f"{rows[-1]['folder']}/model",
        "updates": sum(row["updates"] for row in rows),
        "versions": versions(),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def _copy_model(source: Path, target: Path) -> None:
    """A copy, each file whole or not there: the weights first, so that no configuration stands beside other weights."""
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == "config.json", name))
    if target.exists():
        shutil.rmtree(target)
    for name in names:
        write_bytes(target / name, (source / name).read_bytes())


def _closing_lines(summary: dict[str, Any]) -> list[str]:
    metric = summary["metric"]
    lines = ["", f"all {summary['stages_planned']} stages are finished"]
    for number, row in enumerate(summary["stages"], start=1):
        size = row["img_size"] or "the model's own size"
        lines.append(
            f"  stage {number}: {metric} {row['score']:.4f} at epoch {row['best_epoch']} of {row['epochs']}, {size}"
        )
    return [*lines, f"the last stage's model: {summary['model_folder']}"]
