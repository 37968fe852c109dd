"""The zoo: what is trained, what is kept of it, what its table says, and going on after a stop."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import jumbo_vit
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.repeat import spread
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL

ROOT = Path(__file__).parents[1]
MODELS = [TEST_MODEL, "vit_test_patch8_cls_32"]


@pytest.fixture
def zoo_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")  # the script imports its table by name
    return importlib.import_module("train_zoo")


def options(place: Path, data: Path, **changes: Any) -> argparse.Namespace:
    recipe = {"epochs": 9, "batch_size": 8, "lr": 0.002, "workers": 0, "logger": "none"}
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    given = {"cifar": str(data), "tiny": None, "cifar_epochs": 1, "tiny_epochs": 1, "models": MODELS, "seeds": 2}
    folders = {"recipe": place / "recipe.yaml", "work": place / "work", "out": place / "out"}
    return argparse.Namespace(**{**given, **folders, **changes})


def here(words: list[str], log: Path) -> int:
    log.touch()
    return main(words)


@pytest.fixture
def patches(zoo_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data at the size of the test models."""
    original = zoo_script.Data
    monkeypatch.setattr(
        zoo_script, "Data", lambda name, folder, size, patch, epochs: original(name, folder, 32, 8, epochs)
    )


def test_the_runs_differ_in_model_data_and_seed_alone(zoo_script: Any, tmp_path: Path) -> None:
    args = options(tmp_path, tmp_path / "a", tiny="b", cifar_epochs=3, tiny_epochs=5, models=list(zoo_script.MODELS))
    args.recipe = zoo_script.ROOT / "recipes" / "zoo_mini.yaml"
    zoo = zoo_script.zoo_of(args)
    assert [task.name for task in zoo.tasks][:4] == [
        "cifar10/jumbo_vit_micro/seed-0",
        "cifar10/vit_micro_cls/seed-0",
        "cifar10/vit_micro_reg16/seed-0",
        "tiny-imagenet-100/jumbo_vit_micro/seed-0",
    ]
    assert len(zoo.tasks) == 12 and str(tmp_path) not in zoo.command.replace(str(tmp_path / "out"), "")
    own = ("model", "img_size", "patch_size", "seed", "epochs")
    shared = [{name: value for name, value in task.options.items() if name not in own} for task in zoo.tasks]
    assert all(one == shared[0] for one in shared)
    sizes = {(t.data.name, t.options["img_size"], t.options["patch_size"], t.options["epochs"]) for t in zoo.tasks}
    assert sizes == {("cifar10", "32", 4, 3), ("tiny-imagenet-100", "64", 8, 5)}


def test_from_the_first_run_to_the_table_and_on_after_a_stop(
    zoo_script: Any, patches: None, tmp_path: Path, colours: Path
) -> None:
    zoo = zoo_script.zoo_of(options(tmp_path, colours))
    started: list[list[str]] = []

    def stopping(words: list[str], log: Path) -> int:
        started.append(words)
        return 143 if len(started) == 2 else here(words, log)

    faults = zoo_script.train_zoo(zoo, 1, stopping)
    assert faults == [f"cifar10/{MODELS[1]}/seed-0: stopped, start again to go on"]
    assert json.loads((tmp_path / "out" / "zoo.json").read_text())["runs_finished"] == 3
    started.clear()
    assert zoo_script.train_zoo(zoo, 1, stopping) == []
    assert len(started) == 1  # finished ones are not run again
    content = json.loads((tmp_path / "out" / "zoo.json").read_text())
    assert content["runs_finished"] == content["runs_planned"] == 4
    for row in content["runs"]:
        folder = tmp_path / "out" / row["data"] / row["model"] / f"seed-{row['seed']}"
        weights = load_file(folder / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {torch.float16}
        assert row["parameters"] == sum(value.numel() for value in weights.values())
        predictor = jumbo_vit.load(folder)
        assert predictor.contract.lineage["stored_as"] == "float16" and predictor.contract.lineage["epoch"] == 1
        state = torch.load(tmp_path / "work" / folder.relative_to(tmp_path / "out") / "last.ckpt", weights_only=True)
        assert all(torch.equal(weights[name], value.half()) for name, value in state["model"].items())
        assert row["updates"] == 3 and row["options"]["seed"] == row["seed"]
        assert (folder / "metrics.csv").is_file()
    assert all(f"| `{model}` |" in (tmp_path / "out" / "README.md").read_text() for model in MODELS)


def test_a_run_that_was_killed_goes_on(zoo_script: Any, patches: None, tmp_path: Path, colours: Path) -> None:
    zoo = zoo_script.zoo_of(options(tmp_path, colours, seeds=1, models=[TEST_MODEL]))
    task = zoo.tasks[0]
    assert main([*zoo_script.words_of(task), "--epochs", "1"]) == 0
    assert zoo_script.words_of(task) == ["train", "--resume", str(task.work)]
    assert zoo_script.train_zoo(zoo, 1, here) == []


def test_other_options_are_refused(zoo_script: Any, patches: None, tmp_path: Path, colours: Path) -> None:
    few = {"seeds": 1, "models": [TEST_MODEL]}
    assert zoo_script.train_zoo(zoo_script.zoo_of(options(tmp_path, colours, **few)), 1, here) == []
    longer = zoo_script.zoo_of(options(tmp_path, colours, cifar_epochs=2, **few))
    with pytest.raises(UserError, match="trained with epochs 1, and would now be with 2"):
        zoo_script.train_zoo(longer, 1, here)
    elsewhere = zoo_script.zoo_of(options(tmp_path, colours, cifar_epochs=2, out=tmp_path / "other", **few))
    with pytest.raises(UserError, match="trained with epochs 1, and would now be with 2"):
        zoo_script.train_zoo(elsewhere, 1, here)


def test_other_data_are_refused(zoo_script: Any, patches: None, tmp_path: Path, colours: Path) -> None:
    few: dict[str, Any] = {"seeds": 1, "models": [TEST_MODEL]}
    task = zoo_script.zoo_of(options(tmp_path, colours, **few)).tasks[0]
    assert main([*zoo_script.words_of(task), "--epochs", "1"]) == 0
    moved = zoo_script.zoo_of(options(tmp_path, tmp_path / "elsewhere", **few))
    for _ in range(2):
        with pytest.raises(UserError, match=r"was begun with the data in .*colours, and would now be with those in"):
            zoo_script.train_zoo(moved, 1, here)
        plan = task.work / "plan.json"  # as the script wrote it before it noted the data
        plan.write_text(
            json.dumps({name: value for name, value in json.loads(plan.read_text()).items() if name != "data"})
        )


def test_the_command_names_a_recipe_of_ours_by_its_place(zoo_script: Any, tmp_path: Path) -> None:
    args = options(tmp_path, tmp_path, recipe=ROOT / "recipes" / "zoo_mini.yaml")
    assert "--recipe recipes/zoo_mini.yaml " in zoo_script.zoo_of(args).command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "argument --jobs: '0' is no number from 1 on"),
        (["--seeds", "two"], "argument --seeds: 'two' is no number from 1 on"),
        (["--recipe", "nofile"], "--recipe nofile is no file"),
    ],
)
def test_wrong_words(
    words: list[str],
    message: str,
    zoo_script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["train_zoo", "--cifar", "x", *words])
    with pytest.raises(SystemExit) as caught:
        zoo_script.read_options()
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [("[1, 2]", "holds no options"), ("a: [", "cannot be read")])
def test_a_recipe_of_another_form(text: str, message: str, zoo_script: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        zoo_script.read_recipe(tmp_path / "bad.yaml")
    assert "\n" not in str(caught.value)


def test_a_run_that_fails_does_not_stop_the_others(
    zoo_script: Any, patches: None, tmp_path: Path, colours: Path
) -> None:
    zoo = zoo_script.zoo_of(options(tmp_path, colours, seeds=1, models=["nonsense", TEST_MODEL]))

    def failing(words: list[str], log: Path) -> int:
        code = here(words, log)
        log.write_text("first\nunknown model nonsense\n")
        return code

    assert zoo_script.train_zoo(zoo, 2, failing) == ["cifar10/nonsense/seed-0: failed (unknown model nonsense)"]
    assert json.loads((tmp_path / "out" / "zoo.json").read_text())["runs_finished"] == 1


def test_only_one_zoo_in_a_folder(zoo_script: Any, tmp_path: Path) -> None:
    with (
        zoo_script.locked(tmp_path),
        pytest.raises(UserError, match="a zoo is being trained in"),
        zoo_script.locked(tmp_path),
    ):
        pass
    with zoo_script.locked(tmp_path) as lock:
        assert lock > 0


def test_differences_are_paired_by_seed(zoo_script: Any) -> None:
    scores = {"a": [0.9, 0.8, 0.7], "b": [0.8, 0.75, 0.5]}
    rows = [
        {"data": "d", "model": model, "seed": seed, "top1": top1, "updates": 5, "seconds": 2.0}
        for model, own in scores.items()
        for seed, top1 in enumerate(own)
    ]
    found = zoo_script.summarise("command", rows, ["d"], ["a", "b"], 6)
    first, second = found["groups"]
    assert first["gain_of_first"] is None and first["top1"]["mean"] == pytest.approx(0.8)
    expected = spread([0.1, 0.05, 0.2], [0, 1, 2])
    assert second["gain_of_first"]["mean"] == pytest.approx(expected["mean"])
    assert second["gain_of_first"]["interval"] == pytest.approx(expected["interval"])
    missing = zoo_script.summarise("command", rows[1:], ["d"], ["a", "b"], 6)["groups"][1]
    assert missing["gain_of_first"]["scored"] == 2 and missing["top1"]["scored"] == 3
