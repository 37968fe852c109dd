"""The script behind the recipes' experiments: what it starts, keeps, compares and says; nothing is trained here."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("recipe_experiments")


@pytest.fixture
def place(script: Any, tmp_path: Path) -> Any:
    folders = {"work": tmp_path / "work", "out": tmp_path / "out", "zoo": str(tmp_path / "zoo")}
    return script.Place(cifar="C", tiny="T", taught="L", teacher="", **folders)


def write_run(folder: Path, seed: int, top1: float, **more: Any) -> None:
    (folder / f"seed-{seed}").mkdir(parents=True)
    row = {"seed": seed, "top1": top1, "seconds": 9.6, "updates": 12, **more}
    (folder / f"seed-{seed}" / "run.json").write_text(json.dumps(row))


def test_every_recipe_that_is_named_is_there(script: Any):
    arms = [arm for group in script.EXPERIMENTS.values() for arm in group.values() if not isinstance(arm, str)]
    recipes = {arm.words[arm.words.index("--config") + 1] for arm in arms}
    assert len(recipes) >= 6 and all((SCRIPTS.parent / recipe).is_file() for recipe in recipes)


def test_places_are_filled_in_and_missing_ones_named(script: Any, place: Any):
    arm = script.EXPERIMENTS["jumboized_start"]["jumboized, 96 px"]
    words = place.filled(arm.words, 2)
    assert words[words.index("--init-from") + 1] == f"{place.work}/jumboized-2"
    assert place.filled(arm.prepare, 2)[1] == f"{place.zoo}/tiny-imagenet-100/vit_micro_cls/seed-2"
    assert place.missing(arm) == ""
    assert place.missing(script.EXPERIMENTS["feature_distillation"]["distilled"]) == "--teacher"


def test_a_run_is_prepared_started_and_resumed(script: Any, place: Any):
    arm = script.EXPERIMENTS["jumboized_start"]["jumboized, 64 px"]
    calls: list[list[str]] = []

    def start(words: list[str], log: Path) -> int:
        calls.append(words)
        return 0 if words[0] == "jumboize" else 143

    assert "start again" in script.run(place, "jumboized_start", "jumboized, 64 px", arm, 1, start)
    work = place.work / "jumboized_start" / "jumboized--64-px" / "seed-1"
    assert [words[0] for words in calls] == ["jumboize", "train"] and calls[1][-1] == str(work)
    assert calls[1][calls[1].index("--seed") + 1] == "1"
    work.mkdir(parents=True)
    (work / "config.yaml").write_text("")  # killed before its first state: that run is begun again
    script.run(place, "jumboized_start", "jumboized, 64 px", arm, 1, start)
    assert [words[0] for words in calls] == ["jumboize", "train", "jumboize", "train"] and "--out" in calls[3]
    del calls[2:]
    (work / "last.ckpt").write_text("")
    (place.work / "jumboized-1").mkdir()
    script.run(place, "jumboized_start", "jumboized, 64 px", arm, 1, start)
    assert calls[2:] == [["train", "--resume", str(work)]]
    write_run(place.out / "jumboized_start" / "jumboized--64-px", 1, 0.5)
    assert script.run(place, "jumboized_start", "jumboized, 64 px", arm, 1, start) == "" and len(calls) == 3


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.02, 0.021, 0.019], "higher"),
        ([-0.02, -0.021, -0.019], "lower"),
        ([0.02, -0.02, 0.01], "not resolved"),
        ([0.02], "one seed, no verdict"),
    ],
)
def test_verdicts_follow_the_plan(script: Any, gains: list[float], verdict: str):
    first = {seed: 0.5 + 0.1 * seed for seed in range(len(gains))}
    found = script.compare(first, {seed: first[seed] + gain for seed, gain in enumerate(gains)})
    assert found["verdict"] == verdict and found["mean"] == pytest.approx(sum(gains) / len(gains))


def test_tables_compare_like_with_like(script: Any, place: Any):
    zoo = Path(place.zoo) / "cifar10" / "jumbo_vit_micro"
    for seed in range(2):
        write_run(zoo, seed, 0.1, top1_before_rounding=0.5 + 0.1 * seed)
        write_run(place.out / "token_dropping" / "90-to-10---dropped", seed, 0.45 + 0.1 * seed)
        write_run(place.out / "jumboized_start" / "as-it-is--96-px", seed, 0.7)
        write_run(place.out / "jumboized_start" / "jumboized--96-px", seed, 0.75)
    content = script.summarise(place)
    dropped = content["token_dropping"][1]
    assert dropped["difference"]["mean"] == pytest.approx(-0.05) and dropped["compared_to"] == "all patches"
    larger = {row["arm"]: row for row in content["jumboized_start"]}["jumboized, 96 px"]
    assert larger["compared_to"] == "as it is, 96 px" and larger["difference"]["mean"] == pytest.approx(0.05)
    text = script.markdown(content)
    assert "| token_dropping | 90 to 10 % dropped | 2 | 12 | 10 / 10 | 50.00 | all patches | -5.00" in text
    assert content["two_stages"][0]["seeds"] == [] and "| two_stages | 40, then 64 px | 0 |" in text
