"""What teachers said beforehand: the same views, the same losses, and no folder taken for another."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jumbo_vit.cli.parser import main
from jumbo_vit.cli.teach import Config as TeachConfig
from jumbo_vit.data import views
from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet, train_loader
from jumbo_vit.data.sampler import Draw, EpochBatches
from jumbo_vit.data.sets import open_data
from jumbo_vit.data.views import TaughtSet, open_taught, part_path, read_taught
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import teach as teach_module
from jumbo_vit.tasks.build import augmentation, build_model
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.distill import FunctionMatching, Lesson, open_lesson
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.teach import teach
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL, colour_folder, square
from tests.runs import differences, digit_pictures, small_config, small_options, state_of
from tests.teachers import teacher_folder
from tests.test_loop import poison, record_losses
from tests.test_resume import run_until

DIGITS = [str(number) for number in range(10)]
GREY = Preparation((1, 16, 16), mean=(0.2,), std=(0.4,))
AUGMENT: dict[str, Any] = {"scale": (0.5, 1.0), "hflip": 0.5, "aa": "rand-m5-mstd0.5-inc1", "reprob": 0.2}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("teachers")
    first = teacher_folder(root / "a", "test_efficientnet", DIGITS, GREY, seed=1)
    return [first, teacher_folder(root / "b", TEST_MODEL, DIGITS[::-1], GREY, seed=2, img_size=16, patch_size=4)]


def small_parts(patch: pytest.MonkeyPatch) -> None:
    """Parts of 50 pictures: 240 are five, the last one smaller."""
    patch.setattr(teach_module, "_PART_ROWS", (50, 50))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, teachers: list[str]) -> str:
    """Two views of the digits, said of by two teachers; not to be changed."""
    out = tmp_path_factory.mktemp("taught") / "out"
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch)
        found = teach(small_config(out, **AUGMENT, batch_size=32), teachers, 2)
    assert found["pictures"] == 240 and found["parts"] == found["written"] == 10
    return str(out)


def run_options(**changes: Any) -> dict[str, Any]:
    return AUGMENT | changes


# The same as teachers that run beside the student


def test_views_are_those_of_the_first_epochs_again_and_again(taught: str) -> None:
    config = with_defaults(TrainConfig(**small_options(**AUGMENT)))
    images = open_data(digit_pictures(), "multiclass", 0, 0.1).train
    _, preparation = build_model(config, 10)
    usual = TrainSet(images, "multiclass", preparation, augmentation(config), seed=0)
    folder = open_taught(Path(taught), DIGITS, preparation, augmentation(config))
    fixed = TaughtSet(images, "multiclass", preparation, augmentation(config), folder)
    for epoch, again, sample in ((0, 0, 3), (1, 0, 3), (2, 0, 3), (7, 0, 200), (0, 1, 5), (4, 3, 9)):
        picture, target, weight = fixed[Draw(epoch, sample, again=again)]
        expected = usual[Draw((epoch + again) % 2, sample)]
        assert torch.equal(picture, expected[0]) and weight == 1
        assert target.shape == (21,) and target[0] == expected[1]
    assert not torch.equal(fixed[Draw(0, 3)][0], fixed[Draw(1, 3)][0])


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_the_losses_are_those_of_teachers_beside_the_student(taught: str, teachers: list[str], weight: float) -> None:
    config = with_defaults(TrainConfig(**small_options(**AUGMENT)))
    images = open_data(digit_pictures(), "multiclass", 0, 0.1).train
    model, preparation = build_model(config, 10)
    torch.nn.init.normal_(model.head.weight)
    augment = augmentation(config)
    usual = TrainSet(images, "multiclass", preparation, augment, seed=0)

    def losses(names: list[str]) -> list[torch.Tensor]:
        named = with_defaults(TrainConfig(**small_options(**AUGMENT, teacher=names, label_weight=weight)))
        lesson = open_lesson(named, DIGITS, preparation, augment, "cpu", "fp32")
        assert lesson is not None
        objective = FunctionMatching(10, Mixing(), lesson, weight)
        batches = EpochBatches(len(images), 80, seed=3)
        found = []
        for batches.epoch in range(2):
            loader = train_loader(lesson.pictures(usual, augment), batches, 0, None, False)
            found += [objective.step(model, (pictures, targets), seed=1) for pictures, targets, _ in loader]
        return found

    for stored, asked in zip(losses([taught]), losses(teachers), strict=True):
        torch.testing.assert_close(stored, asked, rtol=2e-3, atol=2e-3)


def test_a_whole_run_is_that_of_teachers_beside_the_student(
    taught: str, teachers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = run_options(opt="sgd", lr=0.01, label_weight=0.2)
    asked = record_losses(monkeypatch)
    train(small_config(tmp_path / "asked", **options, teacher=teachers))
    monkeypatch.undo()
    stored = record_losses(monkeypatch)
    monkeypatch.setattr("jumbo_vit.tasks.distill.open_teachers", None)  # nobody is asked again
    train(small_config(tmp_path / "stored", **options, teacher=[taught]))
    assert len(stored) == 16 and np.ptp(stored) > 0.1
    np.testing.assert_allclose(stored, asked, rtol=2e-3)


def test_loader_processes_read_the_same(taught: str, tmp_path: Path) -> None:
    for workers in (0, 2):
        train(small_config(tmp_path / str(workers), **run_options(teacher=[taught], workers=workers, epochs=1)))
    assert not differences(state_of(tmp_path / "0"), state_of(tmp_path / "2"))


@pytest.mark.parametrize("size", [6, 5])
def test_mixed_pictures_have_the_mixture_of_what_was_said(taught: str, size: int) -> None:
    folder, mixing = read_taught(Path(taught)), Mixing(0.8, 1.0)
    objective = FunctionMatching(10, mixing, Lesson(GREY, taught=folder, lineage=folder.teachers), 0.5)
    logits, labels = torch.randn(size, 2, 10), torch.arange(size)
    images = torch.randn(size, 1, 8, 8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    for seed in range(4):
        packed = torch.cat([labels[:, None].float(), logits.flatten(1)], 1)
        found = objective.step(model, (images, packed), seed)
        # A run without teachers mixes the same pictures in the same shares, which its labels tell.
        labelled = Classification("multiclass", 10, mixing)
        mixed, soft = labelled.mix(images, labels, seed)
        answers = torch.einsum("bi,itc->btc", soft[:, :size], logits.softmax(-1))
        own = model(mixed).log_softmax(-1)
        divergence = (answers * (answers.log() - own[:, None])).sum((1, 2))
        torch.testing.assert_close(found, 0.5 * divergence + 0.5 * labelled.losses(model(mixed), soft))


def test_a_killed_run_goes_on_to_the_same_bits(taught: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = run_options(teacher=[taught], mixup=0.5, cutmix=0.5, label_weight=0.1, epochs=3)
    train(small_config(tmp_path / "straight", **options))
    run_until(monkeypatch, small_config(tmp_path / "killed", **options), 13)
    train(TrainConfig(resume=str(tmp_path / "killed"), given=frozenset({"resume"})))
    assert not differences(state_of(tmp_path / "straight"), state_of(tmp_path / "killed"))


def test_a_bad_batch_is_replayed_with_what_was_said(
    taught: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2})
    train(small_config(tmp_path / "run", **run_options(teacher=[taught], epochs=1)))
    found = replay(tmp_path / "run")
    assert found["same"] and found["bad_samples"] == [3]


def test_the_teachers_go_into_the_model_folder(taught: str, teachers: list[str], tmp_path: Path) -> None:
    summary = train(small_config(tmp_path / "run", **run_options(teacher=[taught], epochs=1)))
    assert any("of 2 fixed views of each picture" in note for note in summary["notes"])
    told = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["jumbo_vit"]["teacher"]
    assert [entry["name"] for entry in told] == teachers


# Going on, and adding views


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def test_a_killed_teach_goes_on(
    taught: str,
    teachers: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small_parts(monkeypatch)
    original, count = teach_module.write_atomically, 0

    class Killed(BaseException):
        pass

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise Killed
        original(*args)

    config = small_config(tmp_path / "out", **AUGMENT, batch_size=32)
    monkeypatch.setattr(teach_module, "write_atomically", counted)
    with pytest.raises(Killed):
        teach(config, teachers, 2)
    monkeypatch.setattr(teach_module, "write_atomically", original)
    with pytest.raises(UserError, match="is unfinished: 7 of its 10 parts"):
        train(small_config(tmp_path / "run", **run_options(teacher=[str(tmp_path / "out")])))
    assert teach(config, teachers, 2)["written"] == 7
    assert "going on: 3 of 10 parts are there" in capsys.readouterr().out
    assert content(tmp_path / "out") == content(Path(taught))
    assert teach(config, teachers, 2)["written"] == 0
    assert teach(config, teachers, 3)["written"] == 5
    assert read_taught(tmp_path / "out").views == 3
    assert teach(config, teachers, 1)["views"] == 3  # what is there stays


def test_a_teach_killed_before_its_record_goes_on(teachers: list[str], tmp_path: Path) -> None:
    config = small_config(tmp_path / "out")
    teach(config, teachers[:1], 1)
    (tmp_path / "out" / "taught.json").unlink()
    shutil.rmtree(tmp_path / "out" / "view-000")
    assert teach(config, teachers[:1], 1)["written"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hflip": 0.0}, r"hflip was 0.5, is 0.0 \(--hflip\)"),
        ({"img_size": "16"}, r"input_size was \[1, 8, 8\], is \[1, 16, 16\] \(--img-size"),
        ({"scale": (0.4, 1.0)}, r"scale was \[0.5, 1.0\], is \[0.4, 1.0\]"),
        ({"seed": 5}, "seed was 0, is 5"),
        ({"data": "digits"}, "the pictures were 240:.*, are 1437:"),
    ],
)
def test_a_folder_is_not_gone_on_with_in_another_way(
    taught: str, teachers: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        teach(TrainConfig(**small_options(out=taught, **(AUGMENT | changes))), teachers, 2)


def test_a_folder_is_not_gone_on_with_by_other_teachers(taught: str, teachers: list[str], tmp_path: Path) -> None:
    config = small_config(Path(taught), **AUGMENT)
    with pytest.raises(UserError, match=r"the teachers were .*, are "):
        teach(config, teachers[:1], 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty, and no folder that"):
        teach(small_config(tmp_path / "full"), teachers, 1)


# No folder is taken for another


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hflip": 0.0}, r"hflip was 0.5, is 0.0 \(--hflip\)"),
        ({"aa": "3a"}, r"aa was 'rand-m5-mstd0.5-inc1', is '3a' \(--aa\)"),
        ({"scale": (0.4, 1.0)}, r"scale was \[0.5, 1.0\], is \[0.4, 1.0\] \(--scale\)"),
        ({"img_size": "16"}, r"input_size was \[1, 8, 8\], is \[1, 16, 16\]"),
        ({"reprob": 0.0, "hflip": 0.1}, "hflip was 0.5, is 0.1 .*; reprob was 0.2, is 0.0"),
        ({"data": "digits"}, "knows nothing of 1437 of the 1437 training pictures"),
        ({"img_sizes": ["8", "16"]}, "--img-sizes 8 16: .* knows fixed views of listed pictures alone"),
    ],
)
def test_other_options_or_data_are_refused(taught: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(small_config(tmp_path / "run", **(run_options(teacher=[taught]) | changes)))
    assert not (tmp_path / "run").exists()


def test_a_stream_has_no_list_of_pictures(taught: str) -> None:
    with pytest.raises(UserError, match=r"--teacher does not go with --streaming: .* knows fixed views of listed"):
        with_defaults(TrainConfig(data="shards", streaming=True, teacher=[taught]))


def test_it_is_given_alone(taught: str, teachers: list[str], tmp_path: Path) -> None:
    for names in ([taught, teachers[0]], [teachers[0], taught]):
        with pytest.raises(UserError, match="has its teachers in it already; give it alone"):
            train(small_config(tmp_path / "run", **run_options(teacher=names)))


def colour_run(data: Path, out: Path, **changes: Any) -> TrainConfig:
    options = {"epochs": 1, "batch_size": 8, "workers": 0, "logger": ["none"]}
    return TrainConfig(data=str(data), model=TEST_MODEL, out=str(out), **(options | changes))


def test_other_classes_are_refused(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    teach(colour_run(colours, tmp_path / "taught"), [run["out"]], 1)
    data = tmp_path / "data"
    shutil.copytree(colours, data)
    for part in ("train", "val"):
        (data / part / "red").rename(data / part / "rot")
    with pytest.raises(UserError, match="classes were blue, green, red, are blue, green, rot"):
        train(colour_run(data, tmp_path / "run", teacher=[str(tmp_path / "taught")]))


def test_a_picture_that_changed_in_one_corner_is_refused(run: dict[str, Any], tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", 4, 2)
    teach(colour_run(data, tmp_path / "taught"), [run["out"]], 1)
    path = data / "train" / "red" / "02.png"
    with Image.open(path) as picture:
        picture.putpixel((0, 0), (0, 0, 0))
        picture.save(path)
    with pytest.raises(UserError, match=r"^train/red/02.png has changed since .* was taught"):
        train(colour_run(data, tmp_path / "run", teacher=[str(tmp_path / "taught")]))
    with pytest.raises(UserError, match=r"1 pictures have changed since .* first train/red/02.png"):
        teach(colour_run(data, tmp_path / "taught"), [run["out"]], 2)


def test_a_view_that_comes_out_otherwise_is_refused(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (views, teach_module):  # another library behind the same file
        monkeypatch.setattr(module, "content_checksum", lambda images, index: 0)
    data = colour_folder(tmp_path / "data", 4, 2)
    teach(colour_run(data, tmp_path / "taught"), [run["out"]], 1)
    square("blue", 77).save(data / "train" / "red" / "02.png")
    with pytest.raises(UserError, match=r"^train/red/02.png in view 0 is not the picture that .* was taught with"):
        train(colour_run(data, tmp_path / "run", teacher=[str(tmp_path / "taught")]))


def test_a_run_goes_on_with_the_views_that_it_began_with(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    teach(colour_run(colours, tmp_path / "taught"), [run["out"]], 1)
    train(colour_run(colours, tmp_path / "run", teacher=[str(tmp_path / "taught")]))
    teach(colour_run(colours, tmp_path / "taught"), [run["out"]], 2)
    with pytest.raises(UserError, match="this run began with other stored views"):
        train(TrainConfig(resume=str(tmp_path / "run"), epochs=3, given=frozenset({"resume", "epochs"})))


def test_damaged_folders(taught: str, tmp_path: Path) -> None:
    folder = tmp_path / "taught"
    shutil.copytree(taught, folder)
    options = run_options(teacher=[str(folder)])
    path = part_path(folder, 1, 2)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"view-001/part-00002.npy is cut off or gone: run the same"):
        train(small_config(tmp_path / "a", **options))
    np.save(path, np.zeros((3, 3), np.float16))
    with pytest.raises(UserError, match=r"holds \(3, 3\) of float16, not \(50, 24\)"):
        train(small_config(tmp_path / "b", **options))
    (folder / "pictures.json").write_text("{")
    with pytest.raises(UserError, match="is damaged, or not written by `jumbo-vit teach`"):
        train(small_config(tmp_path / "c", **options))


# Any split of what was taught


@pytest.mark.parametrize("changes", [{"val_fraction": 0.4}, {"split_seed": 9, "seed": 2}, {"folds": 3, "fold": 2}])
def test_a_tree_is_taught_as_a_whole_so_that_any_split_of_it_will_do(
    run: dict[str, Any], colours: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    data = colours / "train"
    assert teach(colour_run(data, tmp_path / "taught"), [run["out"]], 1)["pictures"] == 24
    summary = train(colour_run(data, tmp_path / "run", teacher=[str(tmp_path / "taught")], **changes))
    assert summary["bad_updates"] == 0 and summary["images"]["train"] < 24


def test_what_cannot_be_read_is_left_out_and_named(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = colour_folder(tmp_path / "data", 4, 2)
    (data / "train" / "red" / "bad.png").write_text("no picture")
    found = teach(colour_run(data, tmp_path / "taught"), [run["out"]], 1)
    assert found["pictures"] == 12 and "skipped train/red/bad.png" in capsys.readouterr().out
    assert teach(colour_run(data, tmp_path / "taught"), [run["out"]], 2)["written"] == 1
    train(colour_run(data, tmp_path / "run", teacher=[str(tmp_path / "taught")]))


# The command


def test_the_command(run: dict[str, Any], colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "taught")
    words = ["--model", TEST_MODEL, "--data", str(colours), "--workers", "0", "--hflip", "0.25"]
    assert main(["teach", "--teacher", run["out"], "--views", "2", "--out", out, *words]) == 0
    text = capsys.readouterr().out
    assert "24 pictures, 2 views of each, 1 teacher(s), 3 classes, 0 skipped" in text
    assert "view 2 of 2: 24 of 24 pictures" in text and f"--teacher {out}" in text
    more = ["--teacher", out, "--out", str(tmp_path / "run"), "--epochs", "3", "--batch-size", "8", "--logger", "none"]
    assert main(["train", *words, *more]) == 0
    for missing in ("teacher", "data", "out"):
        given = {"teacher": run["out"], "data": str(colours), "out": out}
        rest = [word for name, value in given.items() if name != missing for word in (f"--{name}", value)]
        assert main(["teach", *rest]) == 2
        assert f"--{missing} is missing" in capsys.readouterr().err
    assert main(["teach", "--teacher", run["out"], "--views", "0", "--out", out, *words]) == 2


def test_its_options_mean_what_they_mean_in_train() -> None:
    theirs = TrainConfig.__dataclass_fields__
    for name, field in TeachConfig.__dataclass_fields__.items():
        if name not in ("teacher", "views", "data", "out", "batch_size"):
            assert (field.type, field.default) == (theirs[name].type, theirs[name].default), name
    assert Augmentation().train_interpolation == "bicubic"


@pytest.mark.parametrize(
    ("options", "words"), [({"mixup": 0.5}, "Pictures are mixed"), ({"aug_repeats": 3}, "--aug-repeats 3 shows some")]
)
def test_what_stored_views_cannot_do_is_said(taught: str, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    plain = train(small_config(tmp_path / "plain", **run_options(teacher=[taught], epochs=1)))
    summary = train(small_config(tmp_path / "run", **run_options(teacher=[taught], epochs=1, **options)))
    assert any(words in note for note in summary["notes"]) and not any(words in note for note in plain["notes"])
