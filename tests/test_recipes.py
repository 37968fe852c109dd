"""The recipes: each is read by its command, names what exists, and says command, hardware and expectation."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from timm.models import is_model

from jumbo_vit.cli.parser import Command
from jumbo_vit.cli.probe import plan_of
from jumbo_vit.data.pipeline import Augmentation, Preparation
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.dry_data import KNOWN
from jumbo_vit.tasks.pretrain_config import PretrainConfig, with_pretrain_defaults
from jumbo_vit.tasks.stages import plan_stages
from tests.test_measuring_scripts import script

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SIZES = ("pico", "nano", "tiny", "small", "base", "large")


def parsed(path: Path) -> Any:
    return Command(script("dry_run_recipes").command_of(path)).parse(["--config", str(path)])


def runs_of(path: Path) -> list[Any]:
    config = parsed(path)
    if isinstance(config, PretrainConfig):
        return [with_pretrain_defaults(config)]
    if not isinstance(config, TrainConfig):
        return [config]
    return plan_stages(config, Path("out")) if config.stages else [with_defaults(config)]


def test_all_that_the_paper_has_are_there() -> None:
    wanted = {f"in1k_{kind}_{size}.yaml" for kind in ("jumbo", "registers") for size in SIZES}
    wanted |= {f"in21k_{kind}_{size}.yaml" for kind in ("jumbo", "registers") for size in ("small", "base")}
    wanted |= {f"in1k_{kind}_small_no_teacher.yaml" for kind in ("jumbo", "registers")}
    minis = ("hard_labels", "function_matching", "feature_distillation", "two_stages", "token_dropping", "lora")
    wanted |= {f"{name}_mini.yaml" for name in (*minis, "jumboized_start", "freeze", "zoo", "mae")}
    wanted |= {f"in1k_mae_{name}.yaml" for name in ("jumbo_base", "registers_base")}
    wanted |= {f"in1k_mae_jumbo_base_{name}.yaml" for name in ("probe", "finetune")}
    assert wanted <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_options_models_and_augmentations_are_known(path: Path) -> None:
    for config in runs_of(path):
        assert config.model is None or is_model(config.model)
        assert config.data == "digits" or Path(config.data).name in KNOWN
        if not hasattr(config, "aa"):
            assert plan_of(config).specs()
            continue
        teachers = [config.teacher] if isinstance(config.teacher, str) else config.teacher or []
        assert all(is_model(name) or name.startswith("runs/") for name in teachers)
        Augmentation(aa=config.aa or "").transform(Preparation((3, 32, 32)))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_header_says_command_hardware_and_expectation(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    for word in ("# Command:  ", "# Hardware: ", "# Expected: "):
        assert word in head
    assert f"recipes/{path.name}" in head or path.stem == "zoo_mini"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("in*.yaml")), ids=lambda path: path.stem)
def test_the_global_batch_is_what_the_header_says(path: Path) -> None:
    text = path.read_text()
    for config in runs_of(path):
        processes = config.devices * config.nodes * config.grad_accum_steps if hasattr(config, "devices") else 1
        batch = config.batch_size * processes
        assert f"= {batch:,}" in text.split("\n\n")[0]
        kind = "pretrain" if isinstance(config, PretrainConfig) else "train" if processes > 1 else "probe"
        assert batch == {"pretrain": 4096, "train": 1024, "probe": 16384}[kind]
    assert number_in(text, r"# pictures: ([\d,]+)") == KNOWN[yaml.safe_load(text)["data"]].train


def number_in(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found
    return int(found[1].replace(",", ""))


# Probe and fine-tuning serve both models: the baseline's are given on the command line.
WITH_TWIN = [path for path in FOLDER.glob("in*_jumbo_*.yaml") if not path.stem.endswith(("_probe", "_finetune"))]


@pytest.mark.parametrize("path", sorted(WITH_TWIN), ids=lambda path: path.stem)
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


def test_the_authors_masked_autoencoder() -> None:
    (config,) = runs_of(FOLDER / "in1k_mae_jumbo_base.yaml")
    assert config.lr == pytest.approx(1.5e-4 * 4096 / 256) and config.opt_betas == (0.9, 0.95)
    assert (config.epochs, config.warmup_epochs, config.min_lr, config.weight_decay) == (1600, 40, 1e-5, 0.05)
    assert (config.mask_ratio, config.norm_pix_loss, config.scale, config.hflip) == (0.75, False, (0.2, 1.0), 0.5)
    assert (config.decoder_width, config.decoder_depth, config.decoder_heads) == (512, 8, 16)
    (fine,) = runs_of(FOLDER / "in1k_mae_jumbo_base_finetune.yaml")
    assert fine.init_from == "runs/in1k_mae_jumbo_base/model" and fine.layer_decay == 0.75 and fine.lr == 0.001
    assert (fine.epochs, fine.warmup_epochs, fine.drop_path, fine.smoothing) == (110, 10, 0.1, 0.1)
    assert (fine.mixup, fine.cutmix, fine.aa, fine.opt_betas) == (0.8, 1.0, "rand-m9-mstd0.5-inc1", (0.9, 0.999))
    (heads,) = runs_of(FOLDER / "in1k_mae_jumbo_base_probe.yaml")
    assert (heads.epochs, heads.batch_size, heads.weight_decay) == (90, 16384, 0.0)
    assert "lars" in heads.opt and 0.1 in heads.rates


def test_the_miniature_has_the_updates_that_its_header_says() -> None:
    text = (FOLDER / "mae_mini.yaml").read_text()
    (config,) = runs_of(FOLDER / "mae_mini.yaml")
    assert number_in(text, r"([\d,]+) updates an epoch") == -(-KNOWN["tiny-imagenet-100"].train // config.batch_size)


def test_function_matching_differs_from_hard_labels_in_the_target_alone() -> None:
    hard, taught = (
        dataclasses.asdict(parsed(FOLDER / f"{name}_mini.yaml")) for name in ("hard_labels", "function_matching")
    )
    differ = {name for name in hard if hard[name] != taught[name]}
    assert differ == {"teacher", "smoothing", "given"}
