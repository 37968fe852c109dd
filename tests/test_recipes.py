"""The recipes: each is read by its command, names what exists, and says command, hardware and expectation."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from timm.models import is_model

from jumbo_vit.cli.parser import Command
from jumbo_vit.data.pipeline import Augmentation, Preparation
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.dry_data import KNOWN
from jumbo_vit.tasks.stages import plan_stages

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SIZES = ("pico", "nano", "tiny", "small", "base", "large")


def parsed(path: Path) -> Any:
    text = path.read_text()
    command = "pretrain" if "jumbo-vit pretrain --config" in text else "train"
    return Command(command).parse(["--config", str(path)])


def runs_of(path: Path) -> list[Any]:
    config = parsed(path)
    if not isinstance(config, TrainConfig):
        return [config]
    return plan_stages(config, Path("out")) if config.stages else [with_defaults(config)]


def test_all_that_the_paper_has_are_there() -> None:
    wanted = {f"in1k_{kind}_{size}.yaml" for kind in ("jumbo", "registers") for size in SIZES}
    wanted |= {f"in21k_{kind}_{size}.yaml" for kind in ("jumbo", "registers") for size in ("small", "base")}
    wanted |= {f"in1k_{kind}_small_no_teacher.yaml" for kind in ("jumbo", "registers")}
    minis = ("hard_labels", "function_matching", "feature_distillation", "two_stages", "token_dropping", "lora")
    wanted |= {f"{name}_mini.yaml" for name in (*minis, "jumboized_start", "freeze", "zoo")}
    assert wanted <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_options_models_and_augmentations_are_known(path: Path) -> None:
    for config in runs_of(path):
        assert config.model is None or is_model(config.model)
        teachers = [config.teacher] if isinstance(config.teacher, str) else config.teacher or []
        assert all(is_model(name) or name.startswith("runs/") for name in teachers)
        Augmentation(aa=config.aa or "").transform(Preparation((3, 32, 32)))
        assert config.data == "digits" or Path(config.data).name in KNOWN


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_header_says_command_hardware_and_expectation(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    for word in ("# Command:  ", "# Hardware: ", "# Expected: "):
        assert word in head
    assert f"recipes/{path.name}" in head or path.stem == "zoo_mini"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("in*.yaml")), ids=lambda path: path.stem)
def test_the_global_batch_is_1024(path: Path) -> None:
    for config in runs_of(path):
        assert config.batch_size * config.devices * config.nodes * config.grad_accum_steps == 1024
    written = int(re.search(r"# pictures: ([\d,]+)", path.read_text())[1].replace(",", ""))  # type: ignore[index]
    assert written == KNOWN[yaml.safe_load(path.read_text())["data"]].train


@pytest.mark.parametrize("path", sorted(FOLDER.glob("in*_jumbo_*.yaml")), ids=lambda path: path.stem)
def test_the_registers_baseline_differs_in_the_model_alone(path: Path) -> None:
    ours = yaml.safe_load(path.read_text())
    theirs = yaml.safe_load(Path(str(path).replace("_jumbo_", "_registers_")).read_text())
    models = {ours.pop("model"), theirs.pop("model")}
    assert ours == theirs and any("reg16" in name for name in models)


def test_the_papers_stages() -> None:
    first, second = runs_of(FOLDER / "in1k_jumbo_tiny.yaml")
    assert (first.img_size, first.epochs, second.img_size, second.epochs) == ("128", 400, "224", 20)
    assert (first.mixup, first.cutmix, first.aa, first.lr) == (0.8, 1.0, "3a", 0.003)
    assert second.init_from == "out/stage-1/model" and second.lr == 1e-5 and second.weight_decay == 0.1
    assert first.layer_decay == second.layer_decay == 1.0 and first.smoothing == second.smoothing == 0.0
    (large,) = runs_of(FOLDER / "in21k_jumbo_base.yaml")
    assert (large.epochs, large.patch_drop, large.loss, large.img_size) == (50, (0.9, 0.1), "bce", "224")


def test_function_matching_differs_from_hard_labels_in_the_target_alone() -> None:
    hard, taught = (
        dataclasses.asdict(parsed(FOLDER / f"{name}_mini.yaml")) for name in ("hard_labels", "function_matching")
    )
    differ = {name for name in hard if hard[name] != taught[name]}
    assert differ == {"teacher", "smoothing", "given"}
