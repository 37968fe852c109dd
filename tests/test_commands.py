"""evaluate, predict, embed and models as a user meets them, and what each mistake is answered with."""

import csv
import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

import jumbo_vit
from jumbo_vit.cli.models import table
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load, make_model, save_folder
from jumbo_vit.neighbours import nearest
from jumbo_vit.predictor import Contract, Prediction, rows_as_csv
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL, colour_tree, square

# The names of classes


@pytest.mark.parametrize("missing", ["remove", "empty"])
def test_pictures_are_scored_by_the_names_of_the_classes(missing: str, run: dict[str, Any], tmp_path: Path) -> None:
    data = colour_tree(tmp_path / "data", 3)
    shutil.rmtree(data / "blue")
    if missing == "empty":
        (data / "blue").mkdir()
    numbers = evaluate(run["out"], str(data))
    assert numbers["top1"] == numbers["balanced_accuracy"] == 1.0 and numbers["n"] == 6
    assert numbers["per_class_accuracy"] == {"blue": None, "green": 1.0, "red": 1.0}


def test_a_class_that_the_model_does_not_know_is_named(run: dict[str, Any], tmp_path: Path) -> None:
    data = colour_tree(tmp_path / "data", 2, names={"red": "reed"})
    with pytest.raises(UserError, match=r"folder reed .*did you mean red\?"):
        evaluate(run["out"], str(data))


def test_classes_called_by_numbers_keep_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"red": "10", "green": "2", "blue": "1"}
    for part, count in (("train", 6), ("val", 2)):
        colour_tree(tmp_path / "data" / part, count, names=names)
    words = ["--model", TEST_MODEL, "--epochs", "3", "--batch-size", "6", "--workers", "0", "--logger", "none"]
    assert main(["train", "--data", f"{tmp_path}/data", "--out", f"{tmp_path}/out", *words]) == 0
    rows = load(tmp_path / "out").predict([square("red", 5), square("green", 6), square("blue", 7)])
    assert [row.label for row in rows] == ["10", "2", "1"]
    assert [row.path for row in rows] == ["#0", "#1", "#2"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["classes"] == ["1", "10", "2"]


def test_unreadable_pictures_are_named_and_left_out(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = colour_tree(tmp_path / "data", 2)
    (data / "red" / "text.jpg").write_text("no picture")
    (data / "red" / "empty.png").touch()
    assert main(["evaluate", run["out"], "--data", str(data), "--json", str(tmp_path / "n.json")]) == 0
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["n"] == 6 and {entry["path"] for entry in numbers["skipped"]} == {"red/text.jpg", "red/empty.png"}
    assert "skipped red/empty.png: is empty" in capsys.readouterr().out


# Prediction


def predicted(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, str]], str]:
    capsys.readouterr()
    assert main(["predict", *words]) == 0
    shown = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(shown.out))), shown.err


def test_paths_of_predictions(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    colour_tree(tmp_path / "a", 1)
    colour_tree(tmp_path / "b", 1)
    (tmp_path / "a" / "notes.txt").touch()
    square("red", 1).save(tmp_path / "flat.png")
    monkeypatch.chdir(tmp_path)
    rows, said = predicted([run["out"], "a"], capsys)
    assert [row["path"] for row in rows] == ["blue/00.png", "green/00.png", "red/00.png"]
    assert [row["label"] for row in rows] == ["blue", "green", "red"]
    assert said.strip() == "3 pictures labelled, 0 unreadable, 1 other files left out, such as notes.txt"
    rows, _ = predicted([run["out"], "a", "./b/", "flat.png"], capsys)
    assert [row["path"] for row in rows[:4]] == ["a/blue/00.png", "a/green/00.png", "a/red/00.png", "b/blue/00.png"]
    assert rows[-1]["path"] == "flat.png"
    rows, _ = predicted([f"{run['out']}/model/model.safetensors", str(tmp_path / "a" / "red")], capsys)
    assert [row["path"] for row in rows] == ["00.png"]


def test_the_likeliest_classes(run: dict[str, Any], capsys: pytest.CaptureFixture[str], colours: Path) -> None:
    rows, _ = predicted([run["out"], str(colours / "val" / "red"), "--topk", "3"], capsys)
    for row in rows:
        assert row["label"] == "red" and {row["label"], row["label_2"], row["label_3"]} == {"red", "green", "blue"}
        shares = [float(row[name]) for name in ("probability", "probability_2", "probability_3")]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=3e-6)


def test_names_survive_the_csv(run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ['comma, "quote".png', "new\nline.png", "größe 猫 😀.png", "#0.png"]
    for name in names:
        square("green", 3).save(tmp_path / name)
    (tmp_path / "bad, file.jpg").write_text("no picture")
    assert main(["predict", run["out"], str(tmp_path), "--csv", str(tmp_path / "rows.csv")]) == 0
    assert capsys.readouterr().err.startswith("4 pictures labelled, 1 unreadable")
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["path"] for row in rows} == {*names, "bad, file.jpg"}
    assert all(row["label"] == "green" and not row["error"] for row in rows if row["path"] in names)
    bad = next(row for row in rows if row["path"] not in names)
    assert bad["error"] == "is not a picture" and bad["label"] == bad["probability"] == ""


def test_rows_with_fewer_classes_than_asked() -> None:
    row = Prediction("a.png", "x", "0.500000", "", (("x", 0.5),))
    assert rows_as_csv([row], 2).splitlines() == [
        "path,label,probability,error,label_2,probability_2",
        "a.png,x,0.500000,,,",
    ]


def test_more_pictures_than_a_batch_stay_in_order(run: dict[str, Any]) -> None:
    pictures = [np.asarray(square(colour, seed)) for seed in range(50) for colour in ("red", "blue")]
    rows = jumbo_vit.load(run["out"]).predict(pictures)
    assert [row.label for row in rows] == ["red", "blue"] * 50 and rows[99].path == "#99"


# Embedding


def test_features_and_nearest_pictures(
    run: dict[str, Any], colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "features.npz"
    assert main(["embed", run["out"], str(colours / "val"), "--out", str(out), "--nearest", "3"]) == 0
    assert "12 pictures, 128 features each, 0 skipped" in capsys.readouterr().out
    with np.load(out) as content:
        paths, features, indices, similarity = (content[k] for k in ("paths", "features", "nearest", "similarity"))
    names, again, skipped = jumbo_vit.load(run["out"]).embed(colours / "val")
    assert paths.tolist() == names and not skipped
    np.testing.assert_array_equal(features, again)
    assert features.shape == (12, 128) and features.dtype == np.float32
    assert indices.shape == similarity.shape == (12, 3)
    assert all(row not in others for row, others in enumerate(indices))
    assert (np.diff(similarity, axis=1) <= 0).all() and (similarity <= 1 + 1e-6).all()
    colour = np.array([path.split("/")[0] for path in paths])
    assert (colour[indices] == colour[:, None]).mean() > 0.9
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    for row, others in enumerate(indices):
        np.testing.assert_allclose(unit[others] @ unit[row], similarity[row], atol=1e-5)


def test_features_are_what_the_head_reads(run: dict[str, Any]) -> None:
    predictor = jumbo_vit.load(run["out"])
    picture = square("red", 4)
    _, features, _ = predictor.embed(picture)
    head: Any = predictor.model.head
    with torch.inference_mode():
        logits = head(torch.from_numpy(features))
    torch.testing.assert_close(logits, predictor(predictor.prepare(picture)[None]))


def test_one_picture_has_no_neighbours(run: dict[str, Any], tmp_path: Path) -> None:
    square("red", 4).save(tmp_path / "a.png")
    assert main(["embed", run["out"], str(tmp_path), "--out", str(tmp_path / "f.npz")]) == 0
    with np.load(tmp_path / "f.npz") as content:
        assert content["nearest"].shape == (1, 0)


def test_equal_pictures_are_each_others_neighbours_not_their_own() -> None:
    features = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], np.float32)
    indices, _ = nearest(features, 2)
    assert all(row not in others for row, others in enumerate(indices))
    assert {0, 1, 2} - {0} == set(indices[0].tolist())


# The table of models


def built(name: str) -> Any:
    with torch.device("meta"):
        return make_model(name)


JUMBO = table()


@pytest.mark.parametrize("row", table(all=True), ids=lambda row: row["name"])
def test_the_table_counts_what_is_built(row: dict[str, Any]) -> None:
    model = built(row["name"])
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    assert row["shared_ffn"] == sum(p.numel() for name, p in model.named_parameters() if name.startswith("jumbo_mlp"))


@pytest.mark.parametrize("pixels", [128, 224])
@pytest.mark.parametrize("row", JUMBO, ids=lambda row: row["name"])
def test_the_table_counts_the_operations_of_linears_and_convolutions(row: dict[str, Any], pixels: int) -> None:
    with torch.device("meta"):
        model: Any = make_model(row["name"], img_size=pixels).eval()
        counter = FlopCounterMode(display=False)
        with counter, torch.inference_mode():
            model(torch.empty(1, 3, pixels, pixels))
    flops = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten
    wanted = (aten.addmm, aten.mm, aten.convolution)
    assert row[f"gmacs_{pixels}"] == pytest.approx(sum(flops.get(op, 0) for op in wanted) / 2e9, rel=1e-9)


def test_the_table_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json", str(tmp_path / "m.json")]) == 0
    shown = capsys.readouterr().out
    assert json.loads((tmp_path / "m.json").read_text()) == json.loads(json.dumps(table()))
    assert "jumbo_vit_tiny_patch16_224" in shown and "78.37" in shown and "not stated (code: MIT)" in shown
    assert "naflexvit_jumbo_SIZE_patch16" in shown and "vit_tiny_patch16_reg16_224" not in shown
    assert main(["models", "--all"]) == 0
    assert "vit_tiny_patch16_reg16_224" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["models"]])
def test_help_takes_less_than_a_second(words: list[str]) -> None:
    code = f"from jumbo_vit_command import main; raise SystemExit(main({words!r}))"

    def seconds() -> float:
        # Of the processor, so that other work on the machine does not count.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds(), seconds()) < 1.0


# Mistakes


class Marker:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture(scope="module")
def place(run: dict[str, Any], colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good and bad things, under short names."""
    place = tmp_path_factory.mktemp("place")
    (place / "run").symlink_to(run["out"])
    (place / "colours").symlink_to(colours)
    for name in ("empty", "files", "one/x"):
        (place / name).mkdir(parents=True)
    (place / "files" / "a.txt").touch()
    square("red", 0).save(place / "one" / "x" / "a.png")
    square("red", 1).save(place / "one" / "x" / "b.png")
    colour_tree(place / "unknown", 1, names={"red": "pink"})
    (place / "bad.jpg").write_text("no picture")
    (place / "raw.pth").write_bytes(pickle.dumps({"a": Marker(place / "marker")}))
    torch.save({"head.bias": Marker(place / "marker")}, place / "zip.pth")
    torch.save({"head.bias": torch.zeros(3), "x": torch.zeros(2)}, place / "foreign.pth")
    (place / "cut.pth").write_bytes((place / "foreign.pth").read_bytes()[:300])
    model = Path(run["out"]) / "model"
    for name in ("cut", "resnet", "nojson", "nothing", "noinput", "pickle", "future", "arguments", "labels"):
        shutil.copytree(model, place / name)
    (place / "cut" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    (place / "nojson" / "config.json").write_text("{")
    (place / "nothing" / "config.json").write_text("{}")
    (place / "pickle" / "model.safetensors").unlink()
    shutil.copy(place / "raw.pth", place / "pickle" / "pytorch_model.bin")
    rewrite(place / "resnet", lambda config: config.update(architecture="resnet18", model_args={}))
    rewrite(place / "noinput", lambda config: config["pretrained_cfg"].pop("input_size"))
    rewrite(place / "future", lambda config: config["jumbo_vit"].update(format=9))
    rewrite(place / "arguments", lambda config: config["model_args"].update(img_size=30))
    rewrite(place / "labels", lambda config: config["jumbo_vit"].update(labels=["a"]))
    return place


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


TRAIN = f"train --model {TEST_MODEL} --data colours --epochs 1 --logger none --workers 0 "
MISTAKES = [
    ("train --data nowhere", "nowhere: give a folder of class folders"),
    ("train --data empty", "no pictures in"),
    ("train --data files", "no pictures in"),
    ("train --data one", "one class only, x"),
    (TRAIN + "--model jumbo_vit_tny", "did you mean jumbo_vit_tiny_patch16_224?"),
    (TRAIN + "--model resnt18", "did you mean resnet18?"),
    (TRAIN + "--epohcs 2", "did you mean --epochs?"),
    (TRAIN + "--img-size 30", "30x30 is not a multiple of the patch size 8x8: 30 must be a multiple of 8"),
    (TRAIN + "--img-size big", "--img-size is 'big'"),
    (TRAIN + "--lr fast", "--lr takes a number"),
    (TRAIN + "--lr -1", "--lr is -1.0, but must be 0 or more"),
    (TRAIN + "--mixup nan", "--mixup"),
    (TRAIN + "--lr inf", "--lr"),
    (TRAIN + "--drop-path 1", "from 0 to below 1"),
    (TRAIN + "--device gpu", "--device takes one of"),
    (TRAIN + "--devices 0", "--devices is 0"),
    (TRAIN + "--precision fp16", "fp16"),
    (TRAIN + "--out run", "holds a run already"),
    (TRAIN + "--opt adm", "no optimizer"),
    (TRAIN + "--aa rnad-m9", "--aa rnad-m9"),
    (TRAIN + "--task multilabel", "multilabel"),
    (TRAIN + "--init-from nowhere", "no such folder or file"),
    (TRAIN + "--init-from raw.pth", "raw.pth wants to run code"),
    (TRAIN + "--init-from zip.pth", "zip.pth wants to run code"),
    (TRAIN + "--init-from cut.pth", "cut.pth is not a readable checkpoint, or is cut off"),
    (TRAIN + "--init-from foreign.pth", "holds nothing of this model's blocks"),
    (TRAIN + "--init-from cut", "cut/model.safetensors is not a readable safetensors file"),
    ("train --resume nowhere", "no such folder"),
    ("train --resume colours", "holds no config.yaml"),
    ("train --resume run --epochs 2", "can only be raised"),
    ("train --resume run --lr 2", "not --lr"),
    ("evaluate run", "--data is missing"),
    ("evaluate run --data nowhere", "there is no nowhere"),
    ("evaluate run --data unknown", "folder pink in"),
    ("evaluate run --data digits", "none of the model's classes"),
    ("evaluate run --data colours --workers -1", "--workers is -1"),
    ("evaluate nowhere --data colours", "no such model: nowhere"),
    ("evaluate colours --data colours", "colours is no model folder"),
    ("evaluate cut --data colours", "cut/model.safetensors is not a readable safetensors file, or is cut off"),
    ("evaluate resnet --data colours", "resnet/model.safetensors does not fit the model (missing: bn1.bias"),
    ("evaluate nojson --data colours", "is not readable JSON"),
    ("evaluate nothing --data colours", "names no architecture"),
    ("evaluate noinput --data colours", "noinput/config.json is damaged"),
    ("evaluate pickle --data colours", "wants to run code"),
    ("evaluate future --data colours", "upgrade jumbo-vit"),
    ("evaluate arguments --data colours", "30x30 is not a multiple"),
    ("evaluate labels --data colours", "1 label names for 3 classes"),
    ("evaluate raw.pth --data colours", "wants to run code"),
    ("evaluate foreign.pth --data colours", "not one of the official Jumbo checkpoints"),
    ("evaluate run/last.ckpt --data colours", "not one of the official Jumbo checkpoints"),
    ("predict run empty", "no images found in empty"),
    ("predict run files", "no images found in files (1 other files, such as a.txt)"),
    ("predict run nowhere.png", "no such file or folder: nowhere.png"),
    ("predict run bad.jpg", "none of the 1 pictures could be read, such as bad.jpg: is not a picture"),
    ("predict run colours --topk 9", "--topk is 9, but must be from 1 to the model's 3 classes"),
    ("predict run colours --topk 0", "--topk is 0"),
    ("embed run colours", "--out is missing"),
    ("embed run colours --out f.npz --nearest -1", "--nearest is -1"),
    ("embed run bad.jpg --out f.npz", "none of the 1 pictures could be read"),
    ("replay run", "holds no bad-batch.pt"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words.replace(TRAIN, "T ") for words, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(words.split()) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("jumbo-vit: error: ")
    assert message in lines[0]
    assert not (place / "marker").exists() and not (place / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device")
def test_a_device_that_is_not_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["predict", f"{place}/run", f"{place}/colours"], ["evaluate", f"{place}/run", "--data", "digits"]):
        assert main([*words, "--device", "cuda"]) == 2
        assert "device cuda is not usable on this machine; use auto or one of: cpu" in capsys.readouterr().err


def test_a_folder_cannot_make_timm_open_another_file(place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "run" / "model", tmp_path / "model")
    fetches = {"checkpoint_path": str(place / "zip.pth"), "pretrained": True, "cache_dir": str(tmp_path)}
    rewrite(folder, lambda config: config["model_args"].update(fetches, weights_only=False))
    assert load(folder).labels == ["blue", "green", "red"]
    assert not (place / "marker").exists()


def test_the_console_script_ends_with_2(tmp_path: Path) -> None:
    words = [Path(sys.executable).parent / "jumbo-vit", "predict", "nowhere", "nothing.png"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("jumbo-vit: error: no such model: nowhere")


def test_a_picture_from_memory_and_from_disk_are_equal(run: dict[str, Any], tmp_path: Path) -> None:
    picture = square("blue", 8)
    picture.save(tmp_path / "a.png")
    predictor = load(run["out"])
    forms = [tmp_path / "a.png", str(tmp_path / "a.png"), picture, np.asarray(picture), Image.open(tmp_path / "a.png")]
    answers = {predictor.predict(form)[0].probability for form in forms}
    assert len(answers) == 1


def test_a_folder_without_classes_embeds_and_does_not_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(TEST_MODEL, num_classes=0)
    save_folder(tmp_path / "model", model, Contract("multiclass", [], Preparation((3, 32, 32))))
    Image.new("RGB", (32, 32)).save(tmp_path / "picture.png")
    picture = str(tmp_path / "picture.png")
    assert main(["predict", str(tmp_path / "model"), picture]) == 2
    assert "no classes to predict" in capsys.readouterr().err
    with pytest.raises(UserError, match="use embed"):
        jumbo_vit.load(tmp_path / "model").predict(picture)
    assert main(["embed", str(tmp_path / "model"), picture, "--out", str(tmp_path / "f.npz")]) == 0
