"""What a training leaves behind, and training on tiny, odd and multi-label data."""

import csv
import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from tqdm import tqdm

import jumbo_vit
from jumbo_vit.data.pipeline import Augmentation, Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder, read_contract, resolve_folder, save_folder
from jumbo_vit.predictor import rows_as_csv
from jumbo_vit.tasks import progress as progress_module
from jumbo_vit.tasks import run as run_module
from jumbo_vit.tasks.build import build_model
from jumbo_vit.tasks.config import TrainConfig, parse_size
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.progress import draw_curves
from jumbo_vit.tasks.train import train
from tests.pictures import COLOURS, TEST_MODEL, colour_folder, colour_tree, square

QUICK: dict[str, Any] = {"model": TEST_MODEL, "epochs": 1, "batch_size": 32, "workers": 0, "logger": ["none"]}


def history(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((out / "metrics.csv").read_text())))


def fit(data: Path, out: Path, **options: Any) -> dict[str, Any]:
    """A short run; its losses must be finite and its weights must move."""
    config = TrainConfig(**{**QUICK, "data": str(data), "out": str(out), **options})
    summary = train(config)
    assert summary["updates"] >= summary["epochs"]
    assert all(math.isfinite(float(row["train_loss"])) for row in history(out))
    state = torch.load(out / "last.ckpt", weights_only=True)["model"]
    fresh, _ = build_model(with_defaults(config), len(summary["classes"]))
    assert any(not torch.equal(state[name], value) for name, value in fresh.state_dict().items())
    return summary


# What a run leaves behind


def test_a_run_reaches_every_picture_and_writes_all_it_promises(run: dict[str, Any], colours: Path) -> None:
    out = Path(run["out"])
    assert run["score"] == 1.0 and run["metric"] == "top1"
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(run))
    assert run["model"] == TEST_MODEL and run["classes"] == ["blue", "green", "red"] and run["seed"] == 3
    assert run["images"] == {"train": 24, "val": 12, "held_out": "the folder val"} and run["skipped"] == []
    assert run["versions"].keys() >= {"jumbo_vit", "torch", "timm", "python"} and run["seconds"] > 0
    rows = history(out)
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert float(rows[run["best_epoch"] - 1]["val_top1"]) == run["score"]
    assert Image.open(out / "curves.png").size[0] > 500
    assert torch.load(out / "last.ckpt", weights_only=True)["progress"]["finished"]
    assert list((out / "tensorboard").glob("events*"))
    model, contract = open_folder(out)
    assert sum(p.numel() for p in model.parameters()) == run["parameters"]
    assert contract.labels == run["classes"] and contract.lineage["epoch"] == run["best_epoch"]
    options = yaml.safe_load((out / "config.yaml").read_text())
    assert options["data"] == str(colours) and options["lr"] == 1e-3 and options["epochs"] == 5


def test_the_model_folder_opens_in_timm_with_the_same_logits(run: dict[str, Any]) -> None:
    predictor = jumbo_vit.load(run["out"])
    theirs = timm.create_model(f"local-dir:{run['out']}/model", pretrained=True).eval()
    batch = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(theirs(batch), predictor(batch))
    assert tuple(theirs.pretrained_cfg["mean"]) == predictor.contract.preparation.mean
    assert sorted(path.name for path in (Path(run["out"]) / "model").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("options", [{"img_size": "16x24", "patch_size": 4, "in_chans": 1}, {"model": "resnet18"}])
def test_odd_models_come_back_from_their_folder(options: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    options = {"img_size": "40"} | options
    fit(colours, tmp_path / "out", **options)
    predictor = jumbo_vit.load(tmp_path / "out")
    size = predictor.contract.preparation.input_size
    assert size == (options.get("in_chans", 3), *parse_size(options["img_size"]))
    assert predictor(torch.randn(1, *size)).shape == (1, 3)
    theirs = timm.create_model(f"local-dir:{tmp_path}/out/model", pretrained=True).eval()
    batch = torch.randn(1, *size)
    with torch.inference_mode():
        assert torch.equal(theirs(batch), predictor(batch))


def test_a_second_run_gets_a_folder_of_its_own(
    colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outs = [train(TrainConfig(**{**QUICK, "data": str(colours)}))["out"] for _ in range(2)]
    assert outs == ["runs/colours", "runs/colours-2"]
    printed = capsys.readouterr().out
    assert "24 pictures for training, 12 held out (the folder val), 3 classes" in printed
    assert "epoch 1/1  loss 1.0" in printed and "images/s" in printed
    assert "jumbo-vit evaluate runs/colours-2/model --data" in printed


def test_a_folder_that_holds_a_run_is_refused(run: dict[str, Any], colours: Path) -> None:
    before = (Path(run["out"]) / "summary.json").read_bytes()
    with pytest.raises(UserError, match=r"holds a run already; .*--resume"):
        train(TrainConfig(**{**QUICK, "data": str(colours), "out": run["out"]}))
    assert (Path(run["out"]) / "summary.json").read_bytes() == before


def test_another_process_in_another_folder_agrees_to_the_digit(
    run: dict[str, Any], colours: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from jumbo_vit_command import main\n"
        "model, data = sys.argv[1:]\n"
        "assert main(['evaluate', model, '--data', data, '--json', 'numbers.json']) == 0\n"
        "assert main(['predict', model, data + '/val', '--csv', 'rows.csv', '--topk', '2']) == 0\n"
    )
    words = [sys.executable, "-c", code, f"{run['out']}/model", str(colours)]
    # The run had one thread (conftest); sums over two threads differ in the ninth digit.
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=tmp_path, env=one_thread, check=True, capture_output=True, timeout=300)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    best = history(Path(run["out"]))[run["best_epoch"] - 1]
    assert numbers["top1"] == run["score"] and numbers["loss"] == float(best["val_loss"])
    assert numbers["balanced_accuracy"] == float(best["val_balanced_accuracy"]) and numbers["n"] == 12
    assert numbers["skipped"] == [] and "top5" not in numbers
    text = (tmp_path / "rows.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    hits = [row["label"] == row["path"].split("/")[0] for row in rows]
    assert sum(hits) / len(rows) == numbers["top1"] and rows[0]["path"] == "blue/00.png"
    python = jumbo_vit.load(run["out"]).predict(str(colours / "val"), topk=2)
    assert rows_as_csv(python, 2) == text


def test_averaged_weights_are_kept_where_they_are_better(
    colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run_module.score_models

    def averaged_wins(*args: Any, **kwargs: Any) -> dict[str, Any]:
        scores = original(*args, **kwargs)
        return {kind: numbers | {"top1": 0.9 if kind == "averaged" else 0.5} for kind, numbers in scores.items()}

    monkeypatch.setattr(run_module, "score_models", averaged_wins)
    summary = fit(colours, tmp_path / "out", model_ema=True, batch_size=8)
    assert (summary["best_weights"], summary["score"]) == ("averaged", 0.9)
    model, contract = open_folder(tmp_path / "out")
    assert contract.lineage["weights"] == "averaged"
    content = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)
    average = {name.removeprefix("module."): value for name, value in content["average"].items()}
    weights = model.state_dict()
    assert all(torch.equal(value, average[name]) for name, value in weights.items())
    assert any(not torch.equal(value, content["model"][name]) for name, value in weights.items())
    assert "val_averaged_top1" in history(tmp_path / "out")[0]


def test_with_a_short_run_the_average_is_close_to_the_plain_weights(colours: Path, tmp_path: Path) -> None:
    fit(colours, tmp_path / "out", model_ema=True, epochs=5, batch_size=8, lr=3e-3)
    assert float(history(tmp_path / "out")[-1]["val_averaged_top1"]) == 1.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    # tqdm draws ten times a second, which a run this short may never reach.
    monkeypatch.setattr(progress_module, "tqdm", partial(tqdm, mininterval=0))
    fit(colours, tmp_path / "out", batch_size=4)
    bar = terminal.getvalue()
    assert "epoch 1/1" in bar and "/6 [" in bar and "loss" in bar and "lr" in bar and "images/s" in bar


def test_curves_of_one_epoch_can_be_seen(tmp_path: Path) -> None:
    rows = [{"epoch": 1, "train_loss": 1.0, "val_loss": 2.0, "val_top1": 0.5}]
    draw_curves(tmp_path / "one.png", rows, "top1", "one epoch")
    draw_curves(tmp_path / "none.png", [{**row, "val_top1": math.nan} for row in rows], "top1", "no score")
    # The blue of the first line is in the picture.
    blue = sum(n for n, (r, _, b) in Image.open(tmp_path / "one.png").convert("RGB").getcolors(1 << 24) if b > r + 60)
    assert blue > 20


def test_early_stopping(colours: Path, tmp_path: Path) -> None:
    summary = fit(colours, tmp_path / "out", epochs=9, patience=2, batch_size=8)
    assert summary["stopped_early"] and summary["epochs"] == summary["best_epoch"] + 2


# Tiny and odd data


def thin_out(folder: Path, keep: int) -> None:
    """Remove pictures of a tree until `keep` are left, at least one a class."""
    pictures = sorted(folder.rglob("*.png"), key=lambda path: (path.name, path))
    for path in pictures[keep:]:
        path.unlink()


@pytest.mark.parametrize(
    ("pictures", "options", "updates"),
    [
        (7, {}, 1),
        (33, {}, 2),
        (5, {"batch_size": 5, "mixup": 0.8, "cutmix": 1.0}, 1),
        (5, {"batch_size": 1, "mixup": 0.8, "cutmix": 1.0}, 5),
        (5, {"batch_size": 2, "grad_accum_steps": 2, "model_ema": True}, 2),
        (3, {"epochs": 2, "warmup_epochs": 0, "lr": 1e-2}, 2),
    ],
)
def test_tiny_sets_train(pictures: int, options: dict[str, Any], updates: int, tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=11, val=1)
    thin_out(data / "train", pictures)
    thin_out(data / "val", 1)
    summary = fit(data, tmp_path / "out", **options)
    assert summary["images"]["train"] == pictures and summary["images"]["val"] == 1
    assert summary["updates"] == updates


def test_two_classes_with_mixup(tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=4, val=2)
    for part in ("train", "val"):
        for path in (data / part / "blue").iterdir():
            path.unlink()
    summary = fit(data, tmp_path / "out", mixup=0.2, smoothing=0.1)
    assert summary["classes"] == ["green", "red"]
    assert summary["notes"][0] == "train: folders without pictures are no classes: blue."


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_picture_that_was_not_checked_for_is_named(workers: int, tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=2, val=1)
    (data / "train" / "red" / "bad.png").write_text("no picture")
    with pytest.raises(UserError, match=r"^cannot read the picture .*/red/bad.png: is not a picture$"):
        fit(data, tmp_path / "out", check_images=False, workers=workers)
    assert fit(data, tmp_path / "checked", workers=workers)["skipped"][0]["path"] == "train/red/bad.png"


def test_batch_norm_and_a_batch_of_one(colours: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch of one picture: change --batch-size"):
        fit(colours, tmp_path / "out", model="resnet18", img_size="32", batch_size=1)


@pytest.mark.parametrize("aa", ["", "3a", "rand-m9-mstd0.5-inc1"])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_augmentation_keeps_the_channels(in_chans: int, aa: str) -> None:
    mean, std = (0.45,) * in_chans, (0.22,) * in_chans
    augment = Augmentation(aa=aa, color_jitter=0.4, reprob=0.5)
    transform = augment.transform(Preparation((in_chans, 32, 24), mean, std))
    picture = square("red", 0, (40, 50)).convert("L" if in_chans == 1 else "RGB")
    for seed in range(60):
        torch.manual_seed(seed)
        result = transform(picture)
        assert result.shape == (in_chans, 32, 24) and bool(result.isfinite().all())


@pytest.mark.parametrize("aa", ["3a", "rand-m9-mstd0.5-inc1"])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_augmented_training(in_chans: int, aa: str, colours: Path, tmp_path: Path) -> None:
    fit(colours, tmp_path / "out", aa=aa, in_chans=in_chans, color_jitter=0.3)
    assert evaluate(str(tmp_path / "out"), str(colours))["n"] == 12


@pytest.mark.parametrize("size", [(32, 32), (24, 56), (56, 24)])
def test_a_picture_of_the_models_size_is_taken_pixel_by_pixel(size: tuple[int, int]) -> None:
    picture = square("green", 1, size)
    preparation = Preparation((3, *size))
    prepared = preparation.evaluation()(picture)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    mean, std = (torch.tensor(x)[:, None, None] for x in (preparation.mean, preparation.std))
    assert torch.equal((prepared * std + mean).mul(255).round(), pixels.float())


def test_pictures_of_other_sizes_are_scored(run: dict[str, Any], tmp_path: Path) -> None:
    for size in ((48, 48), (20, 90), (100, 16)):
        data = colour_tree(tmp_path / f"{size}", 2, size)
        numbers = evaluate(run["out"], str(data))
        assert numbers["top1"] == 1.0 and any("no held-out part" in note for note in numbers["notes"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "resnet18", "patch_size": 4}, "resnet18 takes no --patch-size"),
        ({"in_chans": 2}, "1 channel .* or 3"),
        ({"img_size": "30"}, "30x30 is not a multiple of the patch size 8x8"),
        ({"img_size": "3²"}, "must be a number of pixels"),
        ({"aa": "3b"}, "--aa 3b is not an augmentation"),
        ({"opt": "adm"}, "--opt adm is no optimizer"),
        ({"lr": math.inf}, "--lr is inf"),
        ({"lr": math.nan}, "--lr is nan"),
        ({"scale": (math.nan, 1.0)}, "--scale is nan"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"warmup_epochs": 1.0}, "--warmup-epochs 1 leaves nothing of 1 epochs"),
        ({"logger": ["wandb"]}, "--logger wandb needs the package"),
        ({"task": "multilabel", "smoothing": 0.1}, "one label"),
    ],
)
def test_options_that_do_not_fit_are_told(change: dict[str, Any], words: str, colours: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        fit(colours, tmp_path / "out", **change)
    assert "\n" not in str(caught.value)


def test_a_size_may_be_a_number_in_python() -> None:
    assert parse_size(24) == parse_size("24") == (24, 24)
    assert parse_size("24x56") == parse_size(" 24 X 56 ") == (24, 56)
    assert parse_size("16384") == (16384, 16384)
    for text in ("16385", "224x1000000", "9" * 6000):
        with pytest.raises(UserError, match="a side has at most 16,384 pixels") as caught:
            parse_size(text)
        assert len(str(caught.value)) < 120


def test_grey_input_gets_the_mean_of_the_models_statistics() -> None:
    config = with_defaults(TrainConfig(model="vit_tiny_patch16_224", in_chans=1, img_size="32", data="folder"))
    _, preparation = build_model(config, 3)
    assert preparation.mean == (0.5,) and preparation.std == (0.5,)  # that model's own are 0.5, not ImageNet's


# Held out by the seed


def test_a_tree_is_scored_on_what_training_held_out(tmp_path: Path) -> None:
    data = colour_tree(tmp_path / "tree", 6)
    summary = fit(data, tmp_path / "out", val_fraction=0.3, epochs=2)
    numbers = evaluate(str(tmp_path / "out"), str(data))
    best = history(tmp_path / "out")[summary["best_epoch"] - 1]
    assert numbers["n"] == summary["images"]["val"] == 6
    assert (numbers["top1"], numbers["loss"]) == (summary["score"], float(best["val_loss"]))
    assert any("Scored are the 6 pictures that training held out" in note for note in numbers["notes"])
    for index in range(3):
        square("blue", 99).save(data / "blue" / f"a{index}.png")
    numbers = evaluate(str(tmp_path / "out"), str(data))
    assert numbers["n"] == 21 and any("no held-out part" in note for note in numbers["notes"])


# Several labels a picture


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose left half and right half have a colour each, or are white; labels by what is there."""
    folder = tmp_path_factory.mktemp("multi")
    rows = []
    halves = [*COLOURS, None]
    for index in range(48):
        picture = Image.new("RGB", (32, 32), "white")
        here = [halves[index % 4], halves[index // 4 % 4]]
        for place, colour in enumerate(here):
            if colour is not None:
                picture.paste(square(colour, index, (32, 16)), (16 * place, 0))
        picture.save(folder / f"{index}.png")
        labels = "|".join(sorted({colour for colour in here if colour}))
        rows.append(f"{index}.png,{labels},{'val' if index % 3 == 0 else 'train'}")
    (folder / "data.csv").write_text("path,labels,split\n" + "\n".join(rows) + "\n")
    return folder / "data.csv"


@pytest.fixture(scope="module")
def multilabel(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("multirun") / "out"
    options = {"task": "multilabel", "epochs": 10, "batch_size": 8, "lr": 3e-3, "scale": (0.9, 1.0)}
    summary = fit(table, out, **options)
    assert summary["metric"] == "map" and summary["task"] == "multilabel" and summary["score"] > 0.9
    # The last weights, for those that first ranked everything rightly need not give a single label yet.
    model, contract = open_folder(out)
    save_folder(out / "model", model, contract, torch.load(out / "last.ckpt", weights_only=True)["model"])
    return out


def test_multilabel_agrees_with_its_run_and_its_predictions(table: Path, multilabel: Path) -> None:
    numbers = evaluate(str(multilabel), str(table))
    last = history(multilabel)[-1]
    assert all(numbers[name] == float(last[f"val_{name}"]) for name in ("map", "f1_macro", "f1_micro", "loss"))
    assert numbers["n"] == 16
    assert 0.7 < numbers["f1_macro"] <= 1 and 0.7 < numbers["f1_micro"] <= 1
    assert numbers["per_class_ap"].keys() == set(COLOURS) and numbers["absent"] == []
    with table.open() as file:
        truth = {row["path"]: set(filter(None, row["labels"].split("|"))) for row in csv.DictReader(file)}
    names = [path for index, path in enumerate(truth) if index % 3 == 0]
    rows = jumbo_vit.load(multilabel).predict([table.parent / name for name in names])
    given = {row.path: set(filter(None, row.label.split("|"))) for row in rows}
    hits = sum(len(given[name] & truth[name]) for name in names)
    micro = 2 * hits / sum(len(given[name]) + len(truth[name]) for name in names)
    assert numbers["f1_micro"] == pytest.approx(micro, abs=1e-6)
    assert any("|" in row.label and row.label.count("|") == row.probability.count("|") for row in rows)


def test_thresholds_of_the_folder_hold_for_prediction_and_score(table: Path, multilabel: Path, tmp_path: Path) -> None:
    folder = resolve_folder(multilabel)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["jumbo_vit"]["thresholds"] = [0.0, 1.1, 1.1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = jumbo_vit.load(tmp_path).predict(table.parent)
    assert {row.label for row in rows} == {"blue"}
    numbers = evaluate(str(tmp_path), str(table))
    assert numbers["map"] == evaluate(str(multilabel), str(table))["map"]
    positives = [row for row in csv.DictReader(table.open()) if row["split"] == "val" and "blue" in row["labels"]]
    precision = len(positives) / 16
    assert numbers["f1_macro"] == pytest.approx(2 * precision / (precision + 1) / 3)
    config["jumbo_vit"]["thresholds"] = [0.5]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="1 thresholds for 3 classes"):
        read_contract(tmp_path)


def test_multilabel_data_is_refused_where_it_does_not_belong(table: Path, multilabel: Path, colours: Path) -> None:
    with pytest.raises(UserError, match=r"several|one label"):
        evaluate(str(multilabel), str(colours))
    with pytest.raises(UserError, match="multilabel"):
        train(TrainConfig(**{**QUICK, "data": str(table)}))
    with pytest.raises(UserError, match="mixup"):
        train(TrainConfig(**{**QUICK, "data": str(table), "task": "multilabel", "mixup": 0.2}))


def test_a_saved_config_is_complete(run: dict[str, Any]) -> None:
    options = yaml.safe_load((Path(run["out"]) / "config.yaml").read_text())
    fields = {field.name for field in dataclasses.fields(TrainConfig)} - {"given", "resume"}
    assert options.keys() == fields
