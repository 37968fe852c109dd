"""Several runs over folds and seeds: what is held out, what the summary says, and going on after a stop."""

import json
import math
import os
import shutil
import signal
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jumbo_vit.cli.parser import main
from jumbo_vit.data.folds import fold_numbers, fold_set, shared_by_folds, take_fold
from jumbo_vit.data.records import ImageSet, Sample
from jumbo_vit.data.sets import open_data
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import build as build_module
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks import members as members_module
from jumbo_vit.tasks import repeat as repeat_module
from jumbo_vit.tasks import run as run_module
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.repeat import spread
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL, colour_tree
from tests.runs import differences, small_config, state_of
from tests.test_parallel import run_python
from tests.test_resume import run_until

QUICK: dict[str, Any] = {"model": TEST_MODEL, "epochs": 1, "batch_size": 8, "workers": 0, "logger": ["none"]}


def config(data: Path | str, out: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{**QUICK, "data": str(data), "out": str(out), **options})


def resume(out: Path, **options: Any) -> dict[str, Any]:
    return train(TrainConfig(resume=str(out), **options, given=frozenset({"resume", *options})))


def images_of(labels: list[tuple[int, ...]], classes: int) -> ImageSet:
    samples = [Sample(f"/{index}.png", own) for index, own in enumerate(labels)]
    return ImageSet([f"class {number}" for number in range(classes)], samples, root=Path("/"))


# Folds


@given(counts=st.lists(st.integers(2, 30), min_size=1, max_size=4), seed=st.integers(0, 2**40), data=st.data())
@settings(max_examples=40)
def test_folds_hold_equal_shares_of_each_class(counts: list[int], seed: int, data: st.DataObject) -> None:
    folds = data.draw(st.integers(2, min(counts)))
    images = images_of([(number,) for number, count in enumerate(counts) for _ in range(count)], len(counts))
    numbers = fold_numbers(images, folds, seed)
    assert numbers == fold_numbers(images, folds, seed) and set(numbers) == set(range(folds))
    for number, count in enumerate(counts):
        shares = Counter(fold for fold, (own,) in zip(numbers, images.labels, strict=True) if own == number)
        assert all(shares[fold] in (count // folds, -(-count // folds)) for fold in range(folds))


def test_folds_of_pictures_with_several_labels() -> None:
    labels = [(0,), (0, 1), (), (0, 2)] * 6 + [(1, 2)] * 3
    images = images_of(labels, 3)
    numbers = fold_numbers(images, 3, seed=5)
    assert numbers != fold_numbers(images, 3, seed=6)
    for number in range(3):
        shares = Counter(fold for fold, own in zip(numbers, labels, strict=True) if number in own)
        assert len(shares) == 3 and max(shares.values()) - min(shares.values()) <= 2
    assert max(Counter(numbers).values()) <= 11


@pytest.mark.parametrize("labels", [[(0,)] * 9 + [(1,)] * 3, [(0,)] * 9 + [(0, 1)] * 3])
def test_more_folds_than_pictures_of_a_class(labels: list[tuple[int, ...]]) -> None:
    with pytest.raises(UserError, match=r"--folds 4, but the class class 1 has 3 training pictures.* --folds 3 at the"):
        fold_numbers(images_of(labels, 2), 4, 0)


def test_each_picture_is_held_out_once(colours: Path, tmp_path: Path) -> None:
    tree = colour_tree(tmp_path / "tree", 5)
    for data in (colours, tree):
        splits = open_data(str(data), "multiclass", 3, 0.3)
        whole = fold_set(splits)
        parts = [take_fold(splits, 4, fold, seed=3) for fold in (1, 2, 3, 4)]
        names = sorted(part.val.name(index) for part in parts for index in range(len(part.val)))
        assert names == sorted(whole.name(index) for index in range(len(whole)))
        for part in parts:
            assert {*part.train.samples}.isdisjoint(part.val.samples)
            assert len(part.train) + len(part.val) == len(whole)
    assert len(fold_set(open_data(str(tree), "multiclass", 0, 0.1))) == 15
    # A held-out folder is no part of any fold.
    assert len(fold_set(open_data(str(colours), "multiclass", 0, 0.1))) == 24


def test_copies_in_other_folds_are_found(tmp_path: Path) -> None:
    data = colour_tree(tmp_path / "tree", 4)
    for name in ("copy.png", "copy2.png"):
        shutil.copy(data / "red" / "00.png", data / "red" / name)
    (data / "green" / "00.png").unlink()
    images = fold_set(open_data(str(data), "multiclass", 0, 0.3))
    (data / "green" / "01.png").unlink()  # gone since
    groups = shared_by_folds(images, list(range(len(images))))
    assert groups == [["red/00.png", "red/copy.png", "red/copy2.png"]]
    assert shared_by_folds(images, [0] * len(images)) == []
    digits = fold_set(open_data("digits", "multiclass", 0, 0.3)).subset([0, 1, 0])
    assert len(shared_by_folds(digits, [0, 1, 2])) == 1


# What the scores say together


def test_the_interval_is_students() -> None:
    found = spread([0.7, 0.8, 0.9], [1, 2, 3])
    reach = 4.302653 * 0.1 / math.sqrt(3)  # the table's 97.5 % quantile for two degrees of freedom
    assert found["mean"] == pytest.approx(0.8) and found["std"] == pytest.approx(0.1)
    assert found["interval"] == pytest.approx([0.8 - reach, 0.8 + reach], abs=1e-6)


def test_runs_on_the_same_fold_count_once_in_the_interval() -> None:
    found = spread([0.6, 0.8, 0.7, 0.9], [1, 2, 1, 2])
    alone = spread([0.65, 0.85], [1, 2])
    assert found["interval"] == pytest.approx(alone["interval"])
    assert found["std"] == pytest.approx(statistics.stdev([0.6, 0.8, 0.7, 0.9]))


def test_few_scores() -> None:
    assert spread([0.5, None], [1, 2]) == {"mean": 0.5, "std": None, "interval": None, "confidence": 0.95, "scored": 1}
    assert spread([0.5, 0.5], [1, 2])["interval"] == [0.5, 0.5]
    assert spread([None], [1])["mean"] is None


# Runs


@pytest.fixture(scope="module")
def folds(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("folds") / "out"
    train(config(colours, out, folds=3, seed=4))
    return out


def test_folds_leave_a_run_each_and_a_summary(folds: Path, colours: Path) -> None:
    summary = json.loads((folds / "summary.json").read_text())
    rows = summary["runs"]
    assert [row["run"] for row in rows] == ["fold-1", "fold-2", "fold-3"] and summary["finished"]
    assert all(row["images"]["train"] == 16 and row["images"]["val"] == 8 for row in rows)
    for row in rows:
        own = json.loads((folds / row["run"] / "summary.json").read_text())
        assert own["score"] == row["score"] and own["images"]["held_out"] == f"fold {row['fold']} of 3, seed 4"
        # The folder val has no part in the folds; each model is scored on it.
        outside = evaluate(str(folds / row["run"]), str(colours))
        assert outside["n"] == 12 and row["held_out_score"] == outside["top1"]
    assert summary["mean"] == pytest.approx(statistics.fmean(row["score"] for row in rows))
    assert summary["held_out"] == "the folder val" and summary["held_out_spread"]["scored"] == 3
    assert (summary["metric"], summary["interval_over"], summary["seeds"]) == ("top1", "folds", [4])


def test_a_fold_may_be_trained_alone(folds: Path, colours: Path, tmp_path: Path) -> None:
    train(config(colours, tmp_path / "alone", folds=3, fold=2, seed=4))
    assert differences(state_of(folds / "fold-2"), state_of(tmp_path / "alone")) == []


def test_seeds_and_folds_with_the_same_folds_for_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = colour_tree(tmp_path / "tree", 5)
    shutil.copy(data / "red" / "00.png", data / "red" / "copy.png")
    for seed in range(20):  # a seed that parts the copies
        images = fold_set(open_data(str(data), "multiclass", 0, 0.1))
        if shared_by_folds(images, fold_numbers(images, 2, seed)):
            break
    out = tmp_path / "out"
    summary = train(config(data, out, folds=2, seeds=2, seed=seed))
    names = [f"seed-{s}/fold-{f}" for s in (seed, seed + 1) for f in (1, 2)]
    assert [row["run"] for row in summary["runs"]] == names
    assert summary["shared_by_folds"] == [["red/00.png", "red/copy.png"]] and summary["held_out"] is None
    prints = [state_of(out / name)["fingerprint"] for name in names]
    assert prints[0] == prints[2] != prints[1] == prints[3]
    weights = [state_of(out / name)["model"] for name in names]
    assert differences(weights[0], weights[2])
    # The same tree again: the fold's own pictures, not all of them.
    numbers = evaluate(str(out / names[2]), str(data))
    assert (numbers["n"], numbers["top1"]) == (8, summary["runs"][2]["score"])
    printed = capsys.readouterr().out
    for words in (
        "2 pictures have an exact copy in another fold, such as red/00.png and red/copy.png",
        "over 4 runs, 95% interval of the mean",
        "(t distribution over the folds)",
        "training parts overlap",
        f"models: in {out}, {names[0]} to {names[3]}, each in model/",
    ):
        assert words in printed


def test_seeds_alone_share_what_is_held_out(tmp_path: Path) -> None:
    data = colour_tree(tmp_path / "tree", 5)
    summary = train(config(data, tmp_path / "out", seeds=2, val_fraction=0.4))
    assert [row["run"] for row in summary["runs"]] == ["seed-0", "seed-1"] and summary["interval_over"] == "seeds"
    first, second = (state_of(tmp_path / "out" / name) for name in ("seed-0", "seed-1"))
    assert first["fingerprint"] == second["fingerprint"] and first["identity"]["seed"] != second["identity"]["seed"]
    # The first is the run without --seeds.
    train(config(data, tmp_path / "single", val_fraction=0.4))
    assert differences(first, state_of(tmp_path / "single")) == []
    with pytest.raises(UserError, match="holds a run already"):
        train(config(data, tmp_path / "out"))


def test_a_stopped_run_goes_on_with_the_first_that_is_not_finished(
    folds: Path, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    # 2 updates a run: the first is finished, the second has made one and a checkpoint.
    run_until(monkeypatch, config(colours, out, folds=3, seed=4, recovery_interval=1), 3)
    done = json.loads((out / "summary.json").read_text())
    assert not done["finished"] and [row["run"] for row in done["runs"]] == ["fold-1"]
    assert state_of(out / "fold-2")["progress"]["update"] == 1 and not (out / "fold-3").exists()
    finished = (out / "fold-1" / "last.ckpt").stat().st_mtime_ns
    moved = tmp_path / "moved"
    out.rename(moved)
    scored: list[str] = []

    def recorded(model: str, *args: Any) -> dict[str, Any]:
        scored.append(model)
        return evaluate(model, *args)

    monkeypatch.setattr(repeat_module, "evaluate", recorded)
    summary = resume(moved)
    assert scored == [f"{moved}/fold-{number}/model" for number in (2, 3)]
    assert (moved / "fold-1" / "last.ckpt").stat().st_mtime_ns == finished
    straight = json.loads((folds / "summary.json").read_text())
    for name in ("mean", "std", "interval", "held_out_spread"):
        assert summary[name] == straight[name]
    for name in ("fold-1", "fold-2", "fold-3"):
        assert differences(state_of(folds / name), state_of(moved / name)) == []
    assert "fold-1: the run is finished" in capsys.readouterr().out
    assert resume(moved, epochs=2)["runs"][0]["epochs"] == 2
    with pytest.raises(UserError, match="only --epochs may be changed, not --folds"):
        resume(moved, folds=2)


@pytest.mark.parametrize(("at", "update"), [(3, None), (4, 1)])
def test_ctrl_c_keeps_what_is_finished(
    colours: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: int,
    update: int | None,
) -> None:
    # 3 updates a run: in the last of the first run, and in the first of the second.
    original = loop_module.Loop._update
    count = 0

    def interrupted(self: Any, group: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", interrupted)
    with pytest.raises(SystemExit) as caught:
        train(config(colours, tmp_path / "out", seeds=2))
    assert caught.value.code == 130
    assert f"1 of 2 runs are finished; go on with --resume {tmp_path}/out" in capsys.readouterr().out
    second = tmp_path / "out" / "seed-1"
    assert (state_of(second)["progress"]["update"] if second.exists() else None) == update
    assert resume(tmp_path / "out")["finished"]


def test_two_processes_share_the_folds(colours: Path, tmp_path: Path) -> None:
    words = ["--data", str(colours), "--out", str(tmp_path / "out"), "--model", TEST_MODEL, "--epochs", "1"]
    words += ["--batch-size", "8", "--workers", "0", "--logger", "none", "--folds", "2", "--devices", "2"]
    done = run_python(["-m", "jumbo_vit_command", "train", *words])
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["finished"] and [row["images"]["val"] for row in summary["runs"]] == [12, 12]
    assert done.stdout.count("run 2 of 2: fold-2") == done.stdout.count("standard deviation") / 2 == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--folds", "1"], "--folds is 1, but must be 0 for none, or 2 and more"),
        (["--fold", "2"], "--fold 2 needs --folds of at least as many, not 0"),
        (["--folds", "2", "--fold", "3"], "--fold 3 needs --folds of at least as many, not 2"),
        (["--folds", "9"], "--folds 9, but the class blue has 8 training pictures"),
        (["--seeds", "0"], "--seeds is 0, but must be at least 1"),
    ],
)
def test_options_that_do_not_fit_are_told(
    options: list[str], words: str, colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["train", "--data", str(colours), "--out", str(out), "--model", TEST_MODEL, *options]) == 2
    assert words in capsys.readouterr().err and not out.exists()


# What is there already must be of the plan


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folds of a tree beside it, of which the first alone is left; not to be changed."""
    root = tmp_path_factory.mktemp("half")
    train(config(colour_tree(root / "tree", 4), root / "out", folds=2))
    shutil.rmtree(root / "out" / "fold-2")
    return root


@pytest.fixture
def started(half: Path, tmp_path: Path) -> Path:
    """A copy of it, whose plan names the copy's data."""
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "out").rglob("config.yaml"):
        file.write_text(file.read_text().replace(str(half), str(tmp_path)))
    return tmp_path


def test_a_plan_goes_on_with_the_pictures_it_began_with(started: Path) -> None:
    out = started / "out"
    colour_tree(started / "tree", 6)
    with pytest.raises(UserError, match=r"not those that the runs in .* began with .*12:\w+ then, 18:\w+ now"):
        resume(out)
    # Without the record the finished run tells.
    (out / "pictures.json").unlink()
    with pytest.raises(UserError, match=r"not those that the run began with .*fold-1"):
        resume(out)
    assert not (out / "fold-2").exists()


def test_what_is_held_out_of_all_folds_must_stay_too(tmp_path: Path) -> None:
    for part in ("train", "val"):
        colour_tree(tmp_path / "data" / part, 2)
    train(config(tmp_path / "data", tmp_path / "out", folds=2))
    colour_tree(tmp_path / "data" / "val", 3)
    with pytest.raises(UserError, match=r"not those that the runs in .* began with"):
        resume(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fold": 1}, "--fold 1, but the plan gives it --fold 2"),
        ({"split_seed": 4}, "--split-seed 4, but the plan gives it --split-seed 0"),
        ({"seed": 9, "split_seed": 0}, "--seed 9, but the plan gives it --seed 0"),
        ({"lr": 0.1}, "--lr 0.1, but the plan gives it --lr 0.001"),
        ({"scale": (0.5, 1.0)}, r"--scale \[0.5, 1.0\], but the plan gives it --scale \[0.35, 1.0\]"),
        ({"batch_size": 4}, "4 pictures an update, but the plan has 8"),
    ],
)
def test_a_run_with_other_options_is_not_of_the_plan(started: Path, options: dict[str, Any], words: str) -> None:
    train(config(started / "tree", started / "out" / "fold-2", **({"folds": 2, "fold": 2} | options)))
    with pytest.raises(UserError, match=rf"fold-2 holds a run with {words}.*remove the folder"):
        resume(started / "out")


def test_options_of_a_checkpoint_that_config_yaml_belies(started: Path) -> None:
    fold = started / "out" / "fold-2"
    shutil.copytree(started / "out" / "fold-1", fold)
    (fold / "config.yaml").write_text((fold / "config.yaml").read_text().replace("\nfold: 1", "\nfold: 2"))
    with pytest.raises(UserError, match=r"not those that the run began with .*fold-2"):
        resume(started / "out")


def test_a_fold_of_another_machine_joins_the_plan(started: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(started / "tree", other / "elsewhere")
    train(config(other / "elsewhere", other / "run", folds=2, fold=2))
    shutil.rmtree(other / "elsewhere")
    shutil.copytree(other / "run", started / "out" / "fold-2")
    before = (started / "out" / "fold-2" / "last.ckpt").stat().st_mtime_ns
    assert resume(started / "out")["finished"]
    assert (started / "out" / "fold-2" / "last.ckpt").stat().st_mtime_ns == before
    # And it goes on where the plan's pictures are.
    assert [row["epochs"] for row in resume(started / "out", epochs=2)["runs"]] == [2, 2]


def test_an_edited_scale_is_noticed(tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    run_until(monkeypatch, config(colours, out, recovery_interval=1), 2)
    file = out / "config.yaml"
    file.write_text(file.read_text().replace("scale:\n- 0.35", "scale:\n- 0.5"))
    with pytest.raises(UserError, match="they differ in scale"):
        resume(out)


def test_cut_summaries(started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = started / "out"
    for file in (out / "summary.json", out / "fold-1" / "summary.json"):
        file.write_text(file.read_text()[:200])
    with pytest.raises(UserError, match=r"fold-1.summary.json is cut off .*: remove it and resume again"):
        resume(out)
    (out / "fold-1" / "summary.json").unlink()
    assert resume(out)["finished"]
    assert "summary.json cannot be read" in capsys.readouterr().out


def test_pictures_are_checked_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = colour_tree(tmp_path / "tree", 5)
    for index in range(2, 5):
        (data / "red" / f"{index:02}.png").unlink()
    (data / "red" / "01.png").write_bytes(b"no picture")
    out = tmp_path / "out"
    words = r"fold \d of 2 would (hold out|train on) no picture of the class red: 1 cannot be read, first red/01.png"
    with pytest.raises(UserError, match=words):
        train(config(data, out, folds=2))
    assert not out.exists()
    for index in range(2, 5):
        shutil.copy(data / "red" / "00.png", data / "red" / f"{index:02}.png")
    looked = list[int]()
    original = members_module.check_images

    def counted(images: ImageSet, *args: Any, **options: Any) -> ImageSet:
        looked.append(len(images))
        return original(images, *args, **options)

    monkeypatch.setattr(members_module, "check_images", counted)
    monkeypatch.setattr(run_module, "check_images", counted)
    summary = train(config(data, out, folds=2))
    assert looked == [15] and [row["skipped"] for row in summary["runs"]] == [1, 1]
    for row in summary["runs"]:
        train(config(data, tmp_path / row["run"], folds=2, fold=row["fold"], split_seed=0))
        assert differences(state_of(out / row["run"]), state_of(tmp_path / row["run"])) == []
    looked.clear()
    shutil.rmtree(out / "fold-2")
    assert resume(out)["runs"] and looked == []


# Optimizers


@pytest.mark.parametrize("updates", [3, 10])
def test_lookahead_goes_on_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    # Its slow weights begin at the sixth update.
    train(small_config(tmp_path / "straight", opt="lookahead_adamw"))
    run_until(monkeypatch, small_config(tmp_path / "run", opt="lookahead_adamw", recovery_interval=1), updates)
    resume(tmp_path / "run")
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "run")) == []
    content = state_of(tmp_path / "run")["optimizer"]
    assert content["param_groups"][0]["lookahead_step"] == 16 and "lookahead_slow_buff" in content["state"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opt": "bnbadamw"}, "needs the package bitsandbytes, which is not here: pip install bitsandbytes"),
        ({"opt": "lookahead_fusedadam"}, "needs the package apex, which is not here: build it"),
        ({"opt": "lookahead_adamw", "strategy": "fsdp2"}, "does not go with --strategy fsdp2"),
        ({"opt": "lookahead_nothing"}, "is no optimizer of timm"),
        ({"opt": "adahessian"}, "needs second derivatives"),
    ],
)
def test_optimizers_that_are_refused(options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=words):
        build_module.make_optimizer(torch.nn.Linear(2, 2), TrainConfig(lr=0.1, **options))
