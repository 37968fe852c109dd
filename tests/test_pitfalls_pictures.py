"""What goes wrong for people with pictures and folders elsewhere, tried here; each case names its public sources."""

import csv
import io
import json
import math
import random
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jumbo_vit import load
from jumbo_vit.data.images import read_image
from jumbo_vit.folder import make_model
from jumbo_vit.tasks.start import start_from
from jumbo_vit_command import main
from tests.pictures import COLOURS, TEST_MODEL, colour_folder, colour_tree, square

COMMON = ["--model", TEST_MODEL, "--workers", "0", "--logger", "none"]


def trained(data: Path, out: Path, *words: str) -> dict[str, Any]:
    """The summary of `jumbo-vit train`; later words win over the common ones."""
    options = dict(zip(COMMON[::2], COMMON[1::2], strict=True)) | dict(zip(words[::2], words[1::2], strict=True))
    flat = [word for pair in options.items() for word in pair]
    assert main(["train", "--data", str(data), "--out", str(out), *flat]) == 0
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def scored(model: object, data: Path, table: Path) -> dict[str, Any]:
    """The numbers of `jumbo-vit evaluate`."""
    assert main(["evaluate", str(model), "--data", str(data), "--json", str(table)]) == 0
    numbers: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
    return numbers


def labels(model: object, inputs: list[Path], table: Path) -> dict[str, str]:
    """Path to label, by `jumbo-vit predict`."""
    assert main(["predict", str(model), *map(str, inputs), "--csv", str(table)]) == 0
    with table.open(encoding="utf-8", newline="") as file:
        return {row["path"]: row["label"] for row in csv.DictReader(file)}


def refusal(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that refuses."""
    capfd.readouterr()
    assert main(words) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


# 1. Train and validation folders with other classes: ultralytics #13936, #26192; timm #957, #222; mmpretrain #819;
# torchvision #714; ImageNetV2 #10


@pytest.mark.parametrize("lacking", ["blue", "green", "red"])
@pytest.mark.parametrize("empty", [False, True])
def test_train_and_validation_folders_with_other_classes__val_lacks_one(
    lacking: str, empty: bool, run: dict[str, Any], colours: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(colours, tmp_path / "data"))
    shutil.rmtree(data / "val" / lacking)
    if empty:
        (data / "val" / lacking).mkdir()
    numbers = scored(run["out"], data, tmp_path / "n.json")
    assert numbers["top1"] == numbers["balanced_accuracy"] == 1.0 and numbers["n"] == 8
    assert numbers["per_class_accuracy"] == {name: None if name == lacking else 1.0 for name in sorted(COLOURS)}
    assert any(lacking in note for note in numbers["notes"])


def test_train_and_validation_folders_with_other_classes__scored_by_name_during_training(tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=8, val=2)
    shutil.rmtree(data / "val" / "blue")
    summary = trained(data, tmp_path / "out", "--epochs", "5", "--batch-size", "8", "--seed", "3")
    assert summary["score"] == 1.0 and summary["images"]["val"] == 4
    assert any("blue" in note for note in summary["notes"])


@pytest.mark.parametrize("name", ["black", "zebra", "Red"])
def test_train_and_validation_folders_with_other_classes__an_unknown_class_is_named(
    name: str, run: dict[str, Any], colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(colours, tmp_path / "data"))
    (data / "val" / name).mkdir()
    square("red", 1).save(data / "val" / name / "a.png")
    for words in (["evaluate", run["out"]], ["train", *COMMON, "--out", str(tmp_path / "out")], ["check"]):
        given = [*words, str(data)] if words == ["check"] else [*words, "--data", str(data)]
        assert f"the folder {name} in" in refusal(given, capfd)


def test_train_and_validation_folders_with_other_classes__classes_called_1_2_10(tmp_path: Path) -> None:
    names = {"red": "1", "green": "2", "blue": "10"}
    data = tmp_path / "data"
    for part, count in (("train", 8), ("val", 2)):
        colour_tree(data / part, count, names=names)
    summary = trained(data, tmp_path / "out", "--epochs", "5", "--batch-size", "8", "--seed", "3")
    assert summary["classes"] == ["1", "10", "2"] and summary["score"] == 1.0
    found = labels(tmp_path / "out", [data / "val"], tmp_path / "rows.csv")
    assert found == {f"{name}/{index:02}.png": name for name in names.values() for index in range(2)}
    shutil.rmtree(data / "val" / "1")
    (data / "val" / "10" / "00.png").rename(data / "val" / "10" / "99.png")
    assert scored(tmp_path / "out" / "model", data / "val", tmp_path / "n.json")["top1"] == 1.0


# 2. One bad file: torchvision #138; stylegan2-pytorch #7; detectron2 #143; rf-detr #487; memery #10; kraken #299;
# DeepForest #1324; diffusion-models-made-easy #24


def huge_png(side: int) -> bytes:
    """A sound one-bit PNG of one colour, side x side."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress(bytes(side * (1 + (side + 7) // 8)), 1)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_one_bad_file_does_not_stop_a_run_and_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = colour_folder(tmp_path / "data", train=10, val=2)
    red = data / "train" / "red"
    buffer = io.BytesIO()
    square("red", 1, (64, 64)).save(buffer, "JPEG", quality=95)
    bad = {
        "cut.jpg": buffer.getvalue()[: len(buffer.getvalue()) // 2],
        "almost.jpg": buffer.getvalue()[:-40],
        "empty.png": b"",
        "text.jpg": b"<html>no picture</html>",
        "huge.png": huge_png(20000),
    }
    for name, content in bad.items():
        (red / name).write_bytes(content)
    summary = trained(data, tmp_path / "out", "--epochs", "2", "--batch-size", "6", "--workers", "2")
    said = capfd.readouterr()
    named = sorted(f"train/red/{name}" for name in bad)
    assert summary["images"]["train"] == 30 and summary["updates"] == 10
    assert sorted(entry["path"] for entry in summary["skipped"]) == named
    assert "30 pictures for training, 6 held out (the folder val), 3 classes, 5 skipped" in said.out
    assert all(said.out.count(name) == 1 for name in named) and said.err == ""
    assert main(["check", str(data), "--json", str(tmp_path / "c.json")]) == 0
    reasons = {entry["path"]: entry["reason"] for entry in json.loads((tmp_path / "c.json").read_text())["unreadable"]}
    assert sorted(reasons) == named
    assert "400000000 pixels, above the limit" in reasons["train/red/huge.png"]


@pytest.mark.parametrize("part", ["train", "val"])
def test_all_files_of_a_class_are_bad(part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = colour_folder(tmp_path / "data", train=3, val=2)
    for path in (data / part / "red").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    if part == "train":
        line = refusal(["train", "--data", str(data), *COMMON, "--out", str(tmp_path / "out")], capfd)
        assert "no picture of the class red can be read, first train/red/00.png" in line
        assert not (tmp_path / "out").exists()
    else:
        summary = trained(data, tmp_path / "out", "--epochs", "1", "--batch-size", "3")
        assert summary["images"]["val"] == 4 and len(summary["skipped"]) == 2


# 3. 16-bit grey turns white, float turns black: pytorch #20524; torchvision #2218; Pillow #2574, #5991


@pytest.mark.parametrize("suffix", [".png", ".float.tif"])
def test_16_bit_and_float_pictures_are_told_apart(suffix: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for name, level in (("dark", 10_000), ("bright", 50_000)):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                values = (level + draw.integers(-900, 900, (32, 32))).astype(np.uint16)
                scaled = values.astype(np.float32) / 65535 if "float" in suffix else values
                Image.fromarray(scaled).save(folder / f"{index}{suffix}")
    words = ("--epochs", "6", "--batch-size", "8", "--lr", "3e-3")
    assert trained(tmp_path / "data", tmp_path / "out", *words)["score"] == 1.0
    picture = read_image(tmp_path / "data" / "val" / "bright" / f"0{suffix}", 1)
    assert abs(float(np.asarray(picture).mean()) - 50_000 / 257) < 1


# 4. Phone photos are seen sideways: diffusers #3465; detectron2 #262; yolov5 #405; darwin-py #924; tensorflow #49834

STORED_FROM_UPRIGHT = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", list(STORED_FROM_UPRIGHT))
def test_phone_photos_are_seen_upright(orientation: int, suffix: str, run: dict[str, Any], tmp_path: Path) -> None:
    pixels = np.zeros((48, 32, 3), np.uint8)
    pixels[:24], pixels[24:] = COLOURS["red"], COLOURS["blue"]  # red on top
    upright = Image.fromarray(pixels)
    turn = STORED_FROM_UPRIGHT[orientation]
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {".jpg": {"quality": 100, "subsampling": 0}, ".webp": {"lossless": True}}.get(suffix, {})
    stored.save(tmp_path / f"photo{suffix}", exif=exif, **options)
    upright.save(tmp_path / "upright.png")
    predictor = load(run["out"])
    one, two = (predictor.prepare(tmp_path / name) for name in (f"photo{suffix}", "upright.png"))
    assert one.shape == two.shape and float((one - two).abs().max()) < 0.05
    if suffix == ".png":
        rows = predictor.predict([tmp_path / "photo.png", tmp_path / "upright.png"])
        assert rows[0].probability == rows[1].probability
        for name in ("photo", "upright"):
            assert main(["attention", run["out"], f"{tmp_path}/{name}.png", "--png", f"{tmp_path}/{name}-map.png"]) == 0
        maps = [Image.open(tmp_path / f"{name}-map.png") for name in ("photo", "upright")]
        np.testing.assert_array_equal(np.asarray(maps[0]), np.asarray(maps[1]))


# 5. Transparency, palettes, CMYK, frames: Pillow #7288, #8921; taming-transformers #8; nsfwjs #38


def test_hidden_colours_under_transparent_pixels_do_not_show(tmp_path: Path) -> None:
    rows, columns = np.mgrid[0:32, 0:32]
    disc = (rows - 16) ** 2 + (columns - 16) ** 2 < 100
    pixels = np.zeros((32, 32, 4), np.uint8)
    pixels[..., 1] = 200  # green is hidden around a white disc
    pixels[disc] = 255
    rgba = Image.fromarray(pixels)
    rgba.save(tmp_path / "rgba.png")
    rgba.convert("LA").save(tmp_path / "la.png")
    rgba.save(tmp_path / "rgba.webp", lossless=True, exact=True)
    palette = rgba.convert("RGB").quantize(2)
    hidden = int(np.asarray(palette)[0, 0])
    palette.save(tmp_path / "p.png", transparency=hidden)
    palette.save(tmp_path / "p.gif", transparency=hidden)
    found = [read_image(path) for path in sorted(tmp_path.iterdir())]
    assert len(found) == 5 and all(
        image.mode == "RGB" and image.getcolors() == [(1024, (255, 255, 255))] for image in found
    )


def test_cmyk_and_the_first_frame_are_predicted_by_their_colour(run: dict[str, Any], tmp_path: Path) -> None:
    square("red", 1).convert("CMYK").save(tmp_path / "red-cmyk.jpg")
    square("red", 2).convert("CMYK").save(tmp_path / "red-cmyk.tif")
    frames: dict[str, Any] = {"save_all": True, "append_images": [square("green", 3)]}
    for suffix in (".gif", ".webp", ".png", ".tif"):
        square("red", 4).save(tmp_path / f"red-frames{suffix}", **frames)
    square("blue", 5).convert("P").save(tmp_path / "blue-palette.bmp")
    found = labels(run["out"], [tmp_path], tmp_path / "rows.csv")
    assert len(found) == 7
    assert all(label == path.partition("-")[0] for path, label in found.items())


# 6. Files to ignore and files to read: mmpretrain #507; torchvision #109; BiaPy #125; sd-webui-traintrain #26


def test_files_that_are_no_data_are_ignored_and_all_pictures_are_read(
    run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = colour_tree(tmp_path / "data", 3)
    for hidden in (".ipynb_checkpoints", "__MACOSX", "red/.ipynb_checkpoints"):
        (data / hidden).mkdir()
        square("green", 1).save(data / hidden / "a.png")
    (data / "red" / "._cat.jpg").write_bytes(b"\x00\x05\x16\x07")
    for name in ("Thumbs.db", ".DS_Store"):
        (data / name).write_bytes(b"x")
        (data / "red" / name).write_bytes(b"x")
    square("red", 2).save(data / "red" / "x.JPG", "JPEG")
    for suffix in (".webp", ".bmp", ".tif", ".gif", ".ppm", ".jp2"):
        square("red", 3).save(data / "red" / f"x{suffix}")
    (data / "red" / "readme.md").touch()
    assert main(["check", str(data), "--json", str(tmp_path / "c.json"), "--val-fraction", "0.3"]) == 0
    report = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert report["classes"] == ["blue", "green", "red"]
    assert sum(part["pictures"] for part in report["splits"].values()) == 16
    assert [entry["path"] for entry in report["skipped"]] == ["red/readme.md"] and report["unreadable"] == []
    numbers = scored(run["out"], data, tmp_path / "n.json")
    assert numbers["n"] == 16 and [entry["path"] for entry in numbers["skipped"]] == ["red/readme.md"]
    assert len(labels(run["out"], [data], tmp_path / "rows.csv")) == 16
    assert "1 other files left out, such as red/readme.md" in capfd.readouterr().err


def test_equal_names_of_nested_folders_are_not_merged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for kind, colour in (("colours", "red"), ("shapes", "blue")):
        folder = tmp_path / "data" / kind / "red"
        folder.mkdir(parents=True)
        for index in range(3):
            square(colour, index).save(folder / f"{index}.png")
    assert main(["check", str(tmp_path / "data"), "--json", str(tmp_path / "c.json")]) == 0
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["classes"] == ["colours", "shapes"]
    assert any("colours/red is class colours" in note for note in report["notes"])
    capfd.readouterr()


def test_names_of_any_script_and_a_linked_class_reach_the_results(tmp_path: Path) -> None:
    names = {"red": "rouge foncé", "green": "緑 みどり", "blue": "😀 blue"}
    data = tmp_path / "data"
    for part, count in (("train", 8), ("val", 2)):
        colour_tree(data / part, count, names=names)
    (data / "train" / names["red"]).rename(tmp_path / "elsewhere")
    (data / "train" / names["red"]).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    summary = trained(data, tmp_path / "out", "--epochs", "5", "--batch-size", "8", "--seed", "3")
    assert summary["classes"] == sorted(names.values()) and summary["score"] == 1.0
    assert summary["images"]["train"] == 24
    found = labels(tmp_path / "out", [data / "val"], tmp_path / "rows.csv")
    assert found == {f"{name}/{index:02}.png": name for name in names.values() for index in range(2)}
    assert names["green"] in (tmp_path / "rows.csv").read_bytes().decode("utf-8")
    assert set(scored(tmp_path / "out", data, tmp_path / "n.json")["per_class_accuracy"]) == set(names.values())


# 7. Predict on a plain folder: timm #2323, #2734, #1081; terratorch #756; mmsegmentation #1768


def test_predict_on_a_plain_folder_gives_a_row_a_picture_by_path_and_class_name(
    run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flat, nested, table = tmp_path / "flat", tmp_path / "nested", tmp_path / "rows.csv"
    flat.mkdir()
    wanted = {}
    for index, colour in enumerate(("green", "red", "blue", "red")):
        name = ("b, c.png", "new\nline.png", 'a "quote".png', "z.png")[index]
        square(colour, index).save(flat / name)
        wanted[name] = colour
        (nested / colour).mkdir(parents=True, exist_ok=True)
        square(colour, index).save(nested / colour / "same.png")
    assert labels(run["out"], [flat / "z.png"], table) == {"z.png": "red"}
    assert labels(run["out"], [flat], table) == wanted
    assert labels(run["out"], [nested], table) == {f"{colour}/same.png": colour for colour in sorted(COLOURS)}
    both = labels(run["out"], [nested / "red", nested / "blue"], table)
    assert list(both.values()) == ["red", "blue"] and all(path.endswith("/same.png") for path in both)
    (tmp_path / "empty").mkdir()
    assert "no images found in" in refusal(["predict", run["out"], str(tmp_path / "empty")], capfd)


def test_predict_does_not_depend_on_order_batch_or_process(run: dict[str, Any], tmp_path: Path) -> None:
    pictures = []
    for index in range(70):  # more than a batch
        pictures.append(tmp_path / f"{index:02}.png")
        square(list(COLOURS)[index % 3], index).save(pictures[-1])
    mixed = random.Random(0).sample(pictures, len(pictures))
    words = [sys.executable, "-c", "import sys; from jumbo_vit_command import main; sys.exit(main(sys.argv[1:]))"]
    done = subprocess.run([*words, "predict", run["out"], *map(str, mixed)], capture_output=True, text=True, check=True)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["path"] for row in rows] == [path.name for path in mixed]
    here = {row.path: (row.label, float(row.probability)) for row in load(run["out"]).predict(tmp_path)}
    for row in rows:
        label, probability = here[row["path"]]
        assert row["label"] == label and float(row["probability"]) == pytest.approx(probability, abs=2e-6)


# 8. Tiny data sets: tabnet #537; robosat #228; vamb #425; timm #1304; BirdSet #274


@pytest.mark.parametrize(
    ("pictures", "options", "updates"),
    [
        (7, ("--batch-size", "32"), 2),
        (33, ("--batch-size", "32"), 4),
        (5, ("--batch-size", "5", "--mixup", "0.8", "--cutmix", "1.0"), 2),
        (4, ("--batch-size", "1", "--mixup", "0.8", "--cutmix", "1.0"), 8),
    ],
)
def test_tiny_data_sets_take_steps_and_move_the_weights(
    pictures: int, options: tuple[str, ...], updates: int, tmp_path: Path
) -> None:
    data = colour_folder(tmp_path / "data", train=11, val=1)
    kept = sorted((data / "train").rglob("*.png"), key=lambda path: (path.name, path.parent.name))[:pictures]
    for path in {*(data / "train").rglob("*.png")} - {*kept}:
        path.unlink()
    for colour in ("green", "blue"):
        shutil.rmtree(data / "val" / colour)
    summary = trained(data, tmp_path / "out", "--epochs", "2", "--warmup-epochs", "0", *options)
    assert summary["images"]["train"] == pictures and summary["images"]["val"] == 1
    assert summary["updates"] == updates and summary["bad_updates"] == 0
    with (tmp_path / "out" / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 2 and all(math.isfinite(loss) and loss > 0 for loss in losses)
    old, new = (
        torch.load(tmp_path / "out" / name, weights_only=True)["model"] for name in ("previous.ckpt", "last.ckpt")
    )
    assert any(not torch.equal(old[name], value) for name, value in new.items())


# 9. Pictures of one, four and thirteen channels: timm #976, #2234, #2445, #2780; lightning-flash #741


@pytest.mark.parametrize("aa", ["3a", "rand-m9-mstd0.5-inc1"])
def test_grey_pictures_train_with_augmentation_in_one_channel(aa: str, tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 2)):
        for name, level in (("dark", 40), ("bright", 210)):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                values = np.random.default_rng(index).integers(-30, 30, (32, 32)) + level
                Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
    words = ("--in-chans", "1", "--aa", aa, "--color-jitter", "0.3", "--reprob", "0.3", "--epochs", "1")
    trained(tmp_path / "data", tmp_path / "out", *words)
    predictor = load(tmp_path / "out")
    preparation = predictor.contract.preparation
    assert preparation.input_size == (1, 32, 32) and len(preparation.mean) == len(preparation.std) == 1
    # A colour picture is looked at in grey.
    grey = square("red", 1).convert("L")
    assert torch.equal(predictor.prepare(square("red", 1)), predictor.prepare(grey))
    assert predictor.prepare(grey).shape == (1, 32, 32)


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_weights_of_three_channels_serve_others(channels: int, run: dict[str, Any]) -> None:
    whole = load(run["out"]).model
    model = make_model(TEST_MODEL, num_classes=3, in_chans=channels).eval()
    report = start_from(model, run["out"], ["blue", "green", "red"])
    assert report.resized == ["patch_embed.proj.weight"] and not report.new
    kernel: Any = model.get_parameter("patch_embed.proj.weight")
    theirs: Any = whole.get_parameter("patch_embed.proj.weight")
    if channels == 4:  # there is no picture to compare; timm repeats the channels, weaker by 3/4
        torch.testing.assert_close(kernel, theirs.repeat(1, 2, 1, 1)[:, :4] * 0.75)
        return
    # The logits of the grey picture repeated three times, and of three channels that are given twice.
    picture = torch.rand(2, min(3, channels), 32, 32)
    with torch.inference_mode():
        given = picture.repeat(1, 2, 1, 1) if channels == 6 else picture
        torch.testing.assert_close(model(given), whole(picture.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("channels", "equal"), [(13, True), (26, False)])
def test_weights_of_thirteen_channels_serve_13_and_26(channels: int, equal: bool, tmp_path: Path) -> None:
    source = make_model(TEST_MODEL, num_classes=3, in_chans=13).eval()
    torch.save(source.state_dict(), tmp_path / "source.pth")
    model = make_model(TEST_MODEL, num_classes=3, in_chans=channels).eval()
    start_from(model, str(tmp_path / "source.pth"), ["a", "b", "c"])
    kernel, theirs = (m.get_parameter("patch_embed.proj.weight") for m in (model, source))
    assert torch.equal(kernel, theirs) == equal
    if not equal:
        torch.testing.assert_close(kernel, theirs.repeat(1, 2, 1, 1) / 2)


def test_a_number_of_channels_that_pictures_do_not_have_is_refused(
    colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refusal(["train", "--data", str(colours), *COMMON, "--in-chans", "4", "--out", f"{tmp_path}/out"], capfd)
    assert "1 channel" in line and "3" in line
