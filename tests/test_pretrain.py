"""`jumbo-vit pretrain`: pictures without labels, a run that goes on and divides as that of `train`, what it leaves."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

import jumbo_vit
from jumbo_vit.cli.parser import main
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.unlabelled import open_unlabelled
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model, save_folder
from jumbo_vit.neighbours import nearest
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks.pretrain import pretrain
from jumbo_vit.tasks.pretrain_config import PretrainConfig
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL, colour_folder, colour_tree, square
from tests.runs import differences, digit_pictures, small_command, small_config, small_options, state_of
from tests.test_parallel import run_python, seen

RESUME = frozenset({"resume"})
FULL: dict[str, Any] = {
    "model_ema": True,
    "mixup": 0.2,
    "cutmix": 0.5,
    "drop_path": 0.1,
    "layer_decay": 0.8,
    "patch_weight": 0.5,
    "aug_repeats": 2,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that was trained on the digits, with another width of global vector than the student's."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    train(small_config(out, model="vit_test_patch8_cls_32", epochs=3))
    return str(out / "model")


def options(out: Path, teacher: str, **changes: Any) -> PretrainConfig:
    return PretrainConfig(**small_options(out=str(out), teacher=teacher, **changes))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, teacher: str) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    pretrain(options(out, teacher, **FULL))
    return out


# Pictures


def names(images: Any) -> list[str]:
    return [images.name(index) for index in range(len(images))]


def test_a_flat_folder_and_a_nested_one(tmp_path: Path) -> None:
    for index in range(9):
        square("red", index).save(tmp_path / f"{index}.png")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    square("blue", 1).save(tmp_path / "deep" / "er" / "9.png")
    (tmp_path / "a.txt").touch()
    splits = open_unlabelled(str(tmp_path), 0, 0.2)
    assert (len(splits.train), len(splits.val), splits.drawn) == (8, 2, True)
    assert sorted(names(splits.train) + names(splits.val)) == sorted([f"{i}.png" for i in range(9)] + ["deep/er/9.png"])
    assert splits.train.classes == splits.val.classes == [] and splits.train.labels == [()] * 8
    assert [item.path for item in splits.train.skipped] == ["a.txt"] and splits.val.skipped == []
    assert any("(deep/er) mean nothing here" in note for note in splits.train.notes)
    assert names(open_unlabelled(str(tmp_path), 0, 0.2).val) == names(splits.val)
    others = [names(open_unlabelled(str(tmp_path), seed, 0.2).val) for seed in range(1, 6)]
    assert any(other != names(splits.val) for other in others)


def test_train_and_val_are_taken_as_such(tmp_path: Path) -> None:
    colour_folder(tmp_path, 3, 2)
    (tmp_path / "more").mkdir()
    square("red", 1).save(tmp_path / "loose.png")
    (tmp_path / "train" / "bad.txt").touch()
    splits = open_unlabelled(str(tmp_path), 0, 0.1)
    assert (len(splits.train), len(splits.val), splits.drawn, splits.held_out) == (9, 6, False, "the folder val")
    assert all(name.startswith("train/") for name in names(splits.train))
    assert all(name.startswith("val/") for name in names(splits.val))
    assert [item.path for item in splits.train.skipped] == ["train/bad.txt"]
    text = " ".join(splits.train.notes)
    assert "folders are not used: more" in text and "1 pictures are not used, such as loose.png" in text


def test_train_without_val_is_split(tmp_path: Path) -> None:
    colour_tree(tmp_path / "train", 4)
    splits = open_unlabelled(str(tmp_path), 0, 0.25)
    assert (len(splits.train), len(splits.val), splits.drawn) == (9, 3, True)


def test_train_among_classes_is_one_of_them(tmp_path: Path) -> None:
    colour_tree(tmp_path, 4, names={"red": "train", "blue": "test"})
    shutil.move(tmp_path / "test", tmp_path / "bus")
    splits = open_unlabelled(str(tmp_path), 0, 0.25)
    assert len(splits.train) + len(splits.val) == 12
    shutil.move(tmp_path / "train", tmp_path / "val")
    splits = open_unlabelled(str(tmp_path), 0, 0.25)
    assert len(splits.train) + len(splits.val) == 12
    assert any("val is a folder like any other here" in note for note in splits.train.notes)


def test_labels_of_digits_and_tables_are_left_out(tmp_path: Path) -> None:
    digits = open_unlabelled("digits", 0, 0.1)
    assert digits.train.classes == [] and set(digits.train.labels) == {()}
    assert "The labels of the data are not used." in digits.train.notes
    lines = ["path,label"]
    for index in range(4):
        square("red", index).save(tmp_path / f"{index}.png")
        lines.append(f"{index}.png,{index % 2}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    table = open_unlabelled(str(tmp_path / "list.csv"), 0, 0.3)
    assert (len(table.train), len(table.val), table.val.classes) == (2, 2, [])


def test_pictures_that_cannot_be_read_are_counted_and_named(
    tmp_path: Path, teacher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    colour_tree(tmp_path / "pictures", 4)
    (tmp_path / "pictures" / "red" / "bad.png").write_bytes(b"no picture")
    summary = pretrain(options(tmp_path / "run", teacher, data=str(tmp_path / "pictures"), epochs=1))
    assert [item["path"] for item in summary["skipped"]] == ["red/bad.png"]
    assert "no labels, 1 skipped" in capsys.readouterr().out


# What a run leaves


def test_the_folder_of_a_run(straight: Path, teacher: str) -> None:
    found = {path.name for path in straight.iterdir()}
    assert found == {
        "model", "last.ckpt", "previous.ckpt", "config.yaml", "metrics.csv", "curves.png", "summary.json"
    }  # fmt: skip
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["task"] == "pretrain" and summary["method"] == "distill"
    assert summary["teacher"]["name"] == teacher and summary["metric"] == "negative_loss"
    assert summary["score"] == -summary["best_numbers"]["loss"]
    assert summary["images"]["train"] == 240 and summary["images"]["val"] == 50
    assert summary["extra_parameters"] > 0
    with (straight / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for name in ("val_loss", "val_global_std", "val_teacher_std", "val_patch_cosine", "val_averaged_loss"):
        assert math.isfinite(float(rows[1][name]))
    own = json.loads((straight / "model" / "config.json").read_text())["jumbo_vit"]
    assert own["method"] == "distill" and own["teacher"]["name"] == teacher and own["labels"] == []


def test_the_checkpoint_holds_the_projections_and_the_model_the_encoder_alone(straight: Path) -> None:
    content = state_of(straight)
    weights = load_file(straight / "model" / "model.safetensors")
    extras = {name for name in content["model"] if not name.startswith("encoder.")}
    assert extras == {"to_vector.weight", "to_vector.bias", "to_patches.weight", "to_patches.bias"}
    assert {f"encoder.{name}" for name in weights} == content["model"].keys() - extras
    assert {f"module.{name}" for name in content["model"]} <= content["average"].keys()


def test_the_encoder_opens_in_timm_embeds_and_starts_a_training(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = timm.create_model(f"local-dir:{straight / 'model'}", pretrained=True).eval()
    pictures = digit_pictures() + "/val"
    predictor = jumbo_vit.load(straight)
    paths, features, _ = predictor.embed(pictures)
    picture = predictor.prepare(Path(pictures) / paths[0])
    with torch.no_grad():
        torch.testing.assert_close(model(picture[None])[0], torch.from_numpy(features[0]), atol=1e-5, rtol=1e-5)
    assert main(["embed", str(straight / "model"), pictures, "--out", str(tmp_path / "f.npz")]) == 0
    capsys.readouterr()
    summary = train(small_config(tmp_path / "fine", model=None, epochs=1, init_from=str(straight / "model")))
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("from "))
    weights = load_file(straight / "model" / "model.safetensors")
    assert f"{len(weights)} of" in shown
    assert summary["classes"] == [str(digit) for digit in range(10)]


@pytest.mark.parametrize("words", ["evaluate {run} --data {data}", "predict {run} {data}"])
def test_an_encoder_without_a_head_answers_nothing(
    straight: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(run=straight, data=digit_pictures()).split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "has no classes to" in lines[0]


# Learning


def test_a_student_learns_its_teachers_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model(TEST_MODEL, num_classes=0)
    save_folder(tmp_path / "teacher", model, Contract("multiclass", [], Preparation((3, 32, 32))))
    data = colour_folder(tmp_path / "data", 8, 8)
    plain: dict[str, Any] = {"img_size": "32", "patch_size": 8, "in_chans": 3, "batch_size": 12, "lr": 3e-3}
    summary = pretrain(options(tmp_path / "run", str(tmp_path / "teacher"), data=str(data), epochs=25, **plain))
    rows = state_of(tmp_path / "run")["progress"]["history"]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] / 20
    numbers = summary["best_numbers"]
    # No picture was seen in training, and the mean of the teacher's features would explain 0.
    assert numbers["global_explained"] > 0.9 and numbers["patch_explained"] > 0.9
    assert not summary["collapsed"] and numbers["global_std"] > 0.5 * numbers["teacher_std"]
    assert rows[0]["val_global_explained"] < 0.5
    paths, features, _ = jumbo_vit.load(tmp_path / "run").embed(data / "val")
    colours = np.array([path.split("/")[0] for path in paths])
    indices, _ = nearest(features - features.mean(0), 3)
    assert (colours[indices] == colours[:, None]).all()


def test_a_student_that_learns_nothing_is_said_to_have_collapsed(
    tmp_path: Path, teacher: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jumbo_vit.tasks import feature_matching

    original = feature_matching.encode

    def alike(encoder: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vector, patches = original(encoder, images)
        return 0 * vector + 1, patches

    monkeypatch.setattr(feature_matching, "encode", alike)
    summary = pretrain(options(tmp_path / "run", teacher, epochs=1))
    assert summary["collapsed"] and summary["best_numbers"]["global_std"] == pytest.approx(0, abs=1e-6)
    assert any("it has collapsed" in note for note in summary["notes"])
    assert capsys.readouterr().out.count("warning: The student's global vectors hardly differ") == 2


def test_a_student_of_another_kind_and_grid_learns(tmp_path: Path, teacher: str) -> None:
    changes: dict[str, Any] = {"model": "test_efficientnet", "img_size": "32", "patch_size": None, "epochs": 1}
    summary = pretrain(options(tmp_path / "run", teacher, **changes))
    assert math.isfinite(summary["score"])


# Resuming


class Killed(BaseException):
    """Stands for a kill: nothing of the run's own clean-up gets a chance to write."""


def run_until(monkeypatch: pytest.MonkeyPatch, config: PretrainConfig, updates: int) -> None:
    """Run, and stop dead after so many updates."""
    original, count = loop_module.Loop._update, 0

    def counted(self: Any, group: Any) -> None:
        nonlocal count
        if count == updates:
            raise Killed
        count += 1
        original(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Loop, "_update", counted)
        with pytest.raises(Killed):
            pretrain(config)


@pytest.mark.parametrize("updates", [5, 9])
def test_a_killed_run_ends_with_the_same_bits(
    straight: Path, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, options(out, teacher, **FULL), updates)
    pretrain(PretrainConfig(resume=str(out), given=RESUME))
    assert differences(state_of(straight), state_of(out)) == []
    for name in ("model/model.safetensors", "metrics.csv"):
        assert (straight / name).read_bytes() == (out / name).read_bytes()


def test_workers_do_not_change_the_run(straight: Path, teacher: str, tmp_path: Path) -> None:
    pretrain(options(tmp_path / "run", teacher, **FULL, workers=2))
    assert differences(state_of(straight), state_of(tmp_path / "run")) == []


def test_a_finished_run_says_so_and_can_be_lengthened(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    summary = pretrain(PretrainConfig(resume=str(out), given=RESUME))
    assert summary["epochs"] == 2 and "finished (all 2 epochs)" in capsys.readouterr().out
    longer = pretrain(PretrainConfig(resume=str(out), epochs=3, given=RESUME | {"epochs"}))
    assert longer["epochs"] == 3 and len((out / "metrics.csv").read_text().splitlines()) == 4


def test_a_run_is_not_gone_on_with_by_another_command_or_another_teacher(
    straight: Path, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"is a run of pretrain: go on with jumbo-vit pretrain --resume"):
        train(small_config(tmp_path / "x", resume=str(straight), given=RESUME))
    with pytest.raises(UserError, match=r"is a run of train: go on with jumbo-vit train --resume"):
        pretrain(PretrainConfig(resume=str(Path(teacher).parent), given=RESUME))
    with pytest.raises(UserError, match="only --epochs may be changed, not --lr"):
        pretrain(PretrainConfig(resume=str(straight), lr=1.0, given=RESUME | {"lr"}))
    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    run_until(monkeypatch, options(tmp_path / "run", str(other)), 5)
    weights = load_file(other / "model.safetensors")
    weights["norm.weight"] += 1
    from safetensors.torch import save_file

    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="are of different runs, they differ in teacher"):
        pretrain(PretrainConfig(resume=str(tmp_path / "run"), given=RESUME))


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an infinite pixel into the fourth picture of the fifth update of each epoch."""
    original = loop_module.Loop._update

    def poisoned(self: Any, group: Any) -> None:
        if self.progress.update == 4:
            group[0][0][3, 0, 1, 1] = math.inf
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", poisoned)


def test_a_bad_batch_is_skipped_counted_and_replayed(
    tmp_path: Path, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    summary = pretrain(options(tmp_path / "run", teacher, epochs=1, mixup=0.2))
    assert (summary["bad_updates"], summary["updates"]) == (1, 7)
    found = replay(tmp_path / "run")
    assert found["same"] and math.isnan(found["replayed"]) and found["bad_inputs"] == [3]
    assert 3 in found["bad_samples"] and found["bad_weights"] == []


# Processes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(tmp_path: Path, teacher: str, strategy: str) -> None:
    plain: dict[str, Any] = {"teacher": teacher, "model_ema": True, "patch_weight": 0.5}
    folders = [tmp_path / "one", tmp_path / "two"]
    for out, changes in zip(
        folders, ({"batch_size": 32}, {"batch_size": 16, "devices": 2, "strategy": strategy}), strict=True
    ):
        done = run_python(["-m", "tests.recorded_run", str(out), "pretrain", *small_command(out, **plain, **changes)])
        assert done.returncode == 0, done.stderr
    one, first, second = seen(folders[0], 0), seen(folders[1], 0), seen(folders[1], 1)
    assert len(one["losses"]) == 16 and first["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert first == second
    assert first["idle"] == one["idle"] == []
    rows = [state_of(out)["progress"]["history"] for out in folders]
    for left, right in zip(*rows, strict=True):
        for name in ("val_loss", "val_averaged_loss", "val_global_std"):
            assert left[name] == pytest.approx(right[name], abs=1e-4)


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--teacher {teacher}", "--data is missing"),
        ("--method distill --data {pictures}", "--method distill needs --teacher"),
        ("--data {pictures} --teacher nowhere", "--teacher nowhere: no such folder, and no model of timm"),
        ("--data nowhere --teacher {teacher}", "nowhere: give a folder of pictures"),
        ("--data {empty} --teacher {teacher}", "there are no pictures in"),
        ("--data {single} --teacher {teacher}", "one picture for training, so none can be held out"),
        ("--data {pictures} --teacher {teacher} --patch-weight -1", "--patch-weight is -1.0, but must be 0 or more"),
        ("--data {pictures} --teacher {teacher} --method mea", "--method takes"),
        ("--data {pictures} --teacher {teacher} --lr -1", "--lr is -1.0"),
        ("--data {pictures} --teacher {teacher} --img-size 30", "30x30 is not a multiple"),
        ("--data {pictures} --teacher {teacher} --in-chans 3", "--in-chans 1"),
        ("--data {pictures} --teacher {pictures}", "no model folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, message: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "single").mkdir()
    square("red", 1).save(tmp_path / "single" / "a.png")
    places = {"teacher": teacher, "pictures": digit_pictures(), "empty": "empty", "single": "single"}
    common = f"pretrain --model {TEST_MODEL} --epochs 1 --logger none --workers 0 "
    assert main((common + words.format(**places)).split()) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("jumbo-vit: error: ") and message in lines[0]
    assert not (tmp_path / "runs").exists()
