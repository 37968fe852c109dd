"""A recipe in stages: each goes on from the model of the one before, and the whole goes on after a stop."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import jumbo_vit
from jumbo_vit.cli.parser import main
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks import run as run_module
from jumbo_vit.tasks.build import load_config
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.stage_checks import check_models, with_full_paths
from jumbo_vit.tasks.stages import plan_stages
from jumbo_vit.tasks.train import train
from tests.runs import differences, digit_pictures, small_config, state_of
from tests.test_resume import run_until

STAGES: list[dict[str, Any]] = [{"img_size": 8, "epochs": 1}, {"img-size": "12", "lr": 1e-4, "epochs": 2}]


def staged(out: Path, *stages: dict[str, Any], **changes: Any) -> TrainConfig:
    config = small_config(out, **({"epochs": None, "img_size": None} | changes))
    config.stages = list(stages or STAGES)
    return config


def resume(out: Path, **options: Any) -> dict[str, Any]:
    return train(TrainConfig(resume=str(out), **options, given=frozenset({"resume", *options})))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of two stages; its folder is not to be changed."""
    return train(staged(tmp_path_factory.mktemp("stages") / "out"))


def test_the_second_stage_starts_from_the_first_ones_model_at_its_own_size(done: dict[str, Any]) -> None:
    out = Path(done["out"])
    first, second = (load_config(out / name) for name in ("stage-1", "stage-2"))
    assert (first.img_size, second.img_size) == ("8", "12")
    assert second.init_from == f"{out}/stage-1/model" and second.lr == 1e-4
    assert (first.epochs, second.epochs) == (1, 2)
    assert first.preset == "scratch" and second.preset == "finetune"
    assert [row["folder"] for row in done["stages"]] == [f"{out}/stage-1", f"{out}/stage-2"]
    assert [row["updates"] for row in done["stages"]] == [8, 16] and done["updates"] == 24
    assert done["finished"] and done["score"] == done["stages"][1]["score"]
    assert json.loads((out / "summary.json").read_text())["stages"] == done["stages"]


def test_the_model_beside_the_stages_is_the_last_ones(done: dict[str, Any]) -> None:
    out = Path(done["out"])
    for name in ("model.safetensors", "config.json"):
        assert (out / "model" / name).read_bytes() == (out / "stage-2" / "model" / name).read_bytes()
    assert jumbo_vit.load(out).contract.preparation.input_size == (1, 12, 12)


def test_positions_are_those_of_the_first_stage_resampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate of 0 the second stage's weights are where it started."""
    told: list[str] = []
    original = run_module.start_from

    def noting(*args: Any) -> Any:
        report = original(*args)
        told.extend(report.resized)
        assert not report.new and not report.unused
        return report

    monkeypatch.setattr(run_module, "start_from", noting)
    train(staged(tmp_path, STAGES[0], {"img_size": 12, "lr": 0, "min_lr": 0}, epochs=1))
    states = [jumbo_vit.load(tmp_path / name).model.state_dict() for name in ("stage-1", "stage-2")]
    assert told == ["pos_embed"]
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == ["pos_embed"] or (
        states[0]["pos_embed"].shape != states[1]["pos_embed"].shape
    )


@pytest.mark.parametrize("updates", [3, 8, 13], ids=["in the first", "between the two", "in the second"])
def test_killed_and_gone_on_with_to_the_same_bits(
    updates: int, done: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(monkeypatch, staged(tmp_path), updates)
    before = (tmp_path / "stage-1" / "last.ckpt").stat().st_mtime_ns if updates >= 8 else None
    found = resume(tmp_path)
    for name in ("stage-1", "stage-2"):
        left, right = (state_of(Path(place) / name) for place in (done["out"], tmp_path))
        assert differences(left, right) == []
    if before is not None:  # a finished stage is not run again
        assert (tmp_path / "stage-1" / "last.ckpt").stat().st_mtime_ns == before
    assert found["score"] == done["score"] and (tmp_path / "model" / "config.json").is_file()


def test_a_finished_recipe_trains_nothing_and_gives_its_summary(done: dict[str, Any], tmp_path: Path) -> None:
    out = shutil.copytree(done["out"], tmp_path / "out")
    shutil.rmtree(out / "model")
    found = resume(out)
    assert found["stages"][1]["score"] == done["score"] and found["finished"]
    assert (out / "model" / "model.safetensors").is_file()


def test_a_signal_at_the_end_of_a_stage_stops_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = loop_module.Loop._end_epoch

    def signalled(self: Any) -> None:
        original(self)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop_module.Loop, "_end_epoch", signalled)
    with pytest.raises(SystemExit) as stopped:
        train(staged(tmp_path))
    assert stopped.value.code == 143
    assert "1 of 2 stages are finished; go on with --resume" in capsys.readouterr().out
    assert (tmp_path / "stage-1" / "model").is_dir() and not (tmp_path / "stage-2").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] is False


def test_the_recipe_in_the_folder_is_a_recipe(done: dict[str, Any], tmp_path: Path) -> None:
    path = Path(done["out"]) / "stages.yaml"
    assert len(yaml.safe_load(path.read_text())["stages"]) == 2
    assert main(["train", "--config", str(path), "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "summary.json").read_text())["score"] == done["score"]


def test_without_a_model_the_second_stage_has_that_of_the_first(done: dict[str, Any], tmp_path: Path) -> None:
    source = f"{done['out']}/stage-1"
    config = TrainConfig(data="digits", init_from=source, stages=[{"epochs": 2}, {"img_size": 16}])
    first, second = plan_stages(config, tmp_path)
    assert first.model == second.model == "jumbo_vit_test_patch8_32"
    assert (first.img_size, second.img_size) == ("8x8", "16") and (first.patch_size, second.patch_size) == (2, 2)
    assert first.init_from == source and second.init_from == f"{tmp_path}/stage-1/model"


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "stages is empty"),
    ([{"img_sise": 8}], {}, "stage 1: unknown option img_sise (did you mean img_size?)"),
    ([{"epochs": 1}, {"epoch": 2}], {}, "stage 2: unknown option epoch (did you mean epochs?)"),
    ([["epochs"]], {}, "stage 1 is ['epochs'], but must be a mapping"),
    ([{"epochs": "many"}], {}, "stage 1: epochs is 'many'"),
    ([{"epochs": 0}], {}, "--epochs is 0"),
    ([{"out": "x"}], {}, "stage 1: out belongs to the whole recipe"),
    ([{"stages": []}], {}, "stages belongs to the whole"),
    ([{"devices": 2}], {}, "devices belongs to the whole"),
    ([{"epochs": 1}, {"init_from": "x"}], {}, "stage 2 starts from stage 1"),
    (STAGES, {"seeds": 2}, "do not go with --seeds or --folds"),
    (STAGES, {"folds": 3}, "do not go with --seeds or --folds"),
    ([*STAGES, {"img_size": 9}], {}, "stage 3: "),
    ([*STAGES, {"model": "jumbo_vit_tinny"}], {}, "stage 3: unknown model jumbo_vit_tinny"),
    ([*STAGES, {"aa": "none-such"}], {}, "stage 3: --aa none-such"),
    ([*STAGES, {"opt": "none-such"}], {}, "stage 3: --opt none-such"),
    ([*STAGES, {"teacher": "none-such", "smoothing": 0}], {}, "stage 3: --teacher none-such"),
    ([*STAGES, {"data": "none-such"}], {}, "none-such is not there"),
    ([*STAGES, {"naflex_loader": True}], {}, "takes no pictures cut into patches"),
    ([*STAGES, {"img_size": 8, "img_sizes": [8, 9]}], {}, "stage 3: "),
    ([{"init_from": "none-such"}], {}, "stage 1: --init-from none-such"),
    ([*STAGES, {"model": "jumbo_vit_micro"}], {}, "stage 3 has another model than stage 2"),
    ([*STAGES, {"model_args": "share_jumbo_mlp=false"}], {}, "stage 3 has another model than stage 2"),
    ([*STAGES, {"model_args": "num_jumbo=2"}], {}, "stage 3 has another model than stage 2"),
    ([*STAGES, {"patch_size": 4}, {"lora_rank": 2}, {}], {}, "stage 5 would lose the bypasses of stage 4: give lora_r"),
    (STAGES, {"given": frozenset({"epochs"})}, "epochs is given for all stages, but each stage has its own"),
]


@pytest.mark.parametrize(("stages", "options", "message"), MISTAKES, ids=[row[2][:40] for row in MISTAKES])
def test_mistakes_are_told_before_anything_is_written(
    stages: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "out", **options)
    config.stages = stages
    with pytest.raises(UserError) as told:
        train(config)
    assert message in str(told.value) and not (tmp_path / "out").exists()


def test_epochs_cannot_be_raised_for_the_whole(done: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="takes no --epochs"):
        resume(Path(done["out"]), epochs=5)


def test_a_stage_made_with_other_options_is_refused(done: dict[str, Any], tmp_path: Path) -> None:
    out = shutil.copytree(done["out"], tmp_path / "out")
    recipe = yaml.safe_load((out / "stages.yaml").read_text())
    recipe["stages"][0]["smoothing"] = 0.3
    (out / "stages.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=r"stage-1 holds a run with --smoothing 0\.1, but the plan gives it"):
        resume(out)


OTHER: list[tuple[str, Any]] = [
    ("epochs", 3),
    ("batch_size", 16),
    ("grad_accum_steps", 2),
    ("precision", "bf16"),
    ("grad_checkpointing", True),
    ("check_images", False),
]


@pytest.mark.parametrize(("name", "value"), OTHER)
def test_a_stage_made_in_another_way_is_refused(name: str, value: Any, done: dict[str, Any], tmp_path: Path) -> None:
    out = shutil.copytree(done["out"], tmp_path / "out")
    recipe = yaml.safe_load((out / "stages.yaml").read_text())
    recipe["stages"][0][name] = value
    (out / "stages.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=rf"stage-1 holds a run with {name} .*, but the recipe gives it {name} {value}"):
        resume(out)


WRONG = [("lr", "abc", "lr is 'abc'"), ("lrr", 1, "unknown option lrr"), ("stages", "x", "no list called stages")]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_edit_of_the_recipe_is_one_line(
    name: str, value: Any, message: str, done: dict[str, Any], tmp_path: Path
) -> None:
    recipe = yaml.safe_load((Path(done["out"]) / "stages.yaml").read_text())
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(recipe | {name: value}))
    with pytest.raises(UserError) as told:
        resume(tmp_path)
    assert message in str(told.value) and "stages.yaml" in str(told.value)


def test_a_recipe_goes_on_from_another_directory(
    done: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, teacher and first weights are given by relative paths, outside and inside the stages."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").symlink_to(digit_pictures())
    shutil.copytree(Path(done["out"]) / "stage-1" / "model", tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    stages = [{"img_size": 8, "init-from": "first"}, {"img_size": 8, "teacher": "first", "smoothing": 0.0}]
    config = staged(Path("out"), *stages, data="data", teacher=["first"], smoothing=0.0, epochs=1)
    run_until(monkeypatch, config, 10)
    recipe = yaml.safe_load(Path("out/stages.yaml").read_text())
    assert recipe["data"] == f"{tmp_path}/data" and recipe["teacher"] == [f"{tmp_path}/first"]
    assert recipe["stages"][0]["init-from"] == f"{tmp_path}/first"
    assert recipe["stages"][1]["teacher"] == [f"{tmp_path}/first"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume(Path("../out"))["finished"]


def test_paths_of_a_recipe_are_absolute_and_names_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"val-data": "val", "data": "hf://x/y", "init_from": "vit_tiny_patch16_224", "teacher": "resnet18"}
    assert with_full_paths(options) == options | {"val-data": f"{tmp_path}/val", "teacher": ["resnet18"]}
    assert with_full_paths({"data": "digits", "val_data": None}) == {"data": "digits", "val_data": None}


def test_models_that_go_on_from_each_other_pass(tmp_path: Path) -> None:
    """Other size, patch, channels, head and fresh bypasses lose nothing."""
    stages = [*STAGES, {"img_size": 16, "patch_size": 4, "in_chans": 3}, {"img_sizes": [8, 12]}, {"lora_rank": 2}]
    check_models(plan_stages(staged(tmp_path, *stages), tmp_path))


def test_a_new_recipe_does_not_go_into_the_folder_of_one(done: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="holds a run already"):
        train(staged(Path(done["out"])))
