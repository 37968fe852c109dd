"""`jumbo-vit segment check`: what it counts, what it says, and when it ends with 2."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jumbo_vit_command import main
from tests.scenes import SCENE_CLASSES, SCENE_COLOURS, scene_folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return scene_folder(tmp_path / "d", train=4, val=2)


def checked(data: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """The report of the command, which ends with `code`."""
    table = data.parent / "report.json"
    assert main(["segment", "check", str(data), "--workers", "1", "--json", str(table), *words]) == code
    report: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
    return report


def test_counts_of_pixels_and_pictures(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "names.txt").write_text("\n".join(SCENE_CLASSES))
    report = checked(data, "--classes", f"{data}/names.txt")
    masks = [np.asarray(Image.open(path)) for path in sorted((data / "train/masks").iterdir())]
    part = report["splits"]["train"]
    for label, row in enumerate(part["per_class"]):
        assert row["class"] == SCENE_CLASSES[label]
        assert row["pixels"] == sum(int((mask == label).sum()) for mask in masks)
        assert row["pictures"] == sum(bool((mask == label).any()) for mask in masks)
    assert part["ignored"] == 4 * 48 and part["ignored_share"] == pytest.approx(1 / 32)
    assert sum(row["share"] for row in part["per_class"]) == pytest.approx(1)
    assert part["sizes"] == {"48x32": 4} and report["warnings"] == report["notes"] == report["faults"] == []
    printed = capsys.readouterr().out
    assert "4 pictures for training, 2 held out (the split val), 4 classes, 0 skipped; classes are 0 to 3" in printed
    assert "training: 3.1% of the pixels ignored; sizes 48x32 (4)" in printed


def test_faults_are_listed_one_a_line_and_end_with_2(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(np.full((32, 48), 9, np.uint8)).save(data / "train/masks/00.png")
    Image.fromarray(np.zeros((32, 47), np.uint8)).save(data / "val/masks/01.png")
    Image.fromarray(np.zeros((32, 48, 3), np.uint8) + np.uint8([1, 2, 3])).save(data / "train/masks/01.png")
    (data / "train/masks/02.png").write_bytes(b"")
    (data / "train/masks/03.png").rename(data / "train/masks/other.png")
    shutil.copy(data / "val/masks/00.png", data / "train/masks/03.png")
    report = checked(data, "--num-classes", "4", code=2)
    assert [entry["path"] for entry in report["faults"]] == [
        "train/masks/01.png", "train/masks/00.png", "val/masks/01.png",
    ]  # fmt: skip
    assert report["splits"]["train"]["unknown_values"] == [{"value": 9, "pixels": 32 * 48, "masks": 1}]
    assert {entry["path"] for entry in report["skipped"]} == {"train/masks/02.png", "train/masks/other.png"}
    said = capsys.readouterr()
    assert "fault train/masks/00.png: holds the value 9 in 1536 pixels, which is no class\n" in said.out
    assert "fault val/masks/01.png: is 47x32, its picture 48x32 (width x height): make them equal\n" in said.out
    assert "fault train/masks/01.png: is a colour picture: give --colour-map" in said.out
    assert "skipped train/masks/02.png: is empty\n" in said.out
    assert said.err.startswith("jumbo-vit: error: 3 masks cannot be used: ") and said.err.count("\n") == 1


def test_many_faults_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(scene_folder(tmp_path / "d", train=22, val=2, size=(6, 9)), "--num-classes", "2", code=2)
    assert len(report["faults"]) == 24
    said = capsys.readouterr()
    assert said.out.count("\nfault ") == 20 and "and 4 more faults, all with --json FILE\n" in said.out
    assert said.err.count("\n") == 1


def test_absent_classes_empty_masks_and_overlap_are_warned_of(data: Path) -> None:
    shutil.copy(data / "train/images/01.png", data / "val/images/00.png")
    Image.fromarray(np.full((32, 48), 255, np.uint8)).save(data / "train/masks/02.png")
    for path in (data / "val/masks").iterdir():
        mask = np.array(Image.open(path))
        Image.fromarray(np.where(mask == 2, 0, mask).astype(np.uint8)).save(path)
    report = checked(data, "--num-classes", "5")
    assert report["warnings"] == [
        "Without a training pixel: 4; such a class cannot be learned.",
        "1 training masks have no labelled pixel, such as train/masks/02.png; they teach nothing.",
        "Without a held-out pixel: 2, 4; such a class has no part in the mean IoU.",
        "Pictures both in training and held out: 1, such as train/images/01.png and val/images/00.png; the score will "
        "be too good.",
    ]
    assert report["splits"]["train"]["all_ignored"] == ["train/masks/02.png"]
    assert report["duplicates"] == [{"train": ["train/images/01.png"], "val": ["val/images/00.png"]}]


def test_one_class_alone_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (data / "train/masks").iterdir():
        Image.fromarray(np.zeros((32, 48), np.uint8)).save(path)
    checked(data, "--num-classes", "4", code=2)
    assert "the training masks hold one class only, 0: training needs two" in capsys.readouterr().err


def test_colour_masks_by_a_map(data: Path) -> None:
    for path in data.glob("*/masks/*.png"):
        mask = np.asarray(Image.open(path))
        colours = np.where((mask == 255)[..., None], 7, SCENE_COLOURS[np.where(mask == 255, 0, mask)])
        Image.fromarray(colours.astype(np.uint8)).save(path)
    rows = [f"{name},{r},{g},{b}" for name, (r, g, b) in zip(SCENE_CLASSES, SCENE_COLOURS, strict=True)]
    (data / "map.csv").write_text("\n".join([*rows, "ignore,7,7,7"]))
    report = checked(data, "--colour-map", f"{data}/map.csv")
    assert report["labels"]["classes"] == SCENE_CLASSES and report["labels"]["ignored_colours"] == [[7, 7, 7]]
    assert report["splits"]["train"]["ignored"] == 4 * 48
    (data / "map.csv").write_text("\n".join(rows))
    faults = checked(data, "--colour-map", f"{data}/map.csv", code=2)["faults"]
    assert len(faults) == 6 and "7,7,7 (48 pixels)" in faults[0]["reason"]


def test_the_shift_and_another_ignored_number(data: Path) -> None:
    report = checked(data, "--reduce-zero-label", "--ignore-index", "255", "3")
    assert report["labels"]["values"] == [1, 2] and report["labels"]["ignored"] == [0, 255, 3]
    assert "2 classes by the highest number in the training masks, 2" in report["notes"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gone", "there is no folder gone"),
        ("DATA --seed -1", "--seed is -1, but must be 0 or more"),
        ("DATA --workers 0", "--workers is 0, but must be 1 or more"),
        ("DATA --val-fraction 2", "the held-out fraction must lie between 0 and 1, not 2.0"),
        ("DATA --classes gone.txt", "there is no file gone.txt"),
        ("DATA --num-clases 3", "did you mean --num-classes?"),
        ("DATA --mask-pattern {name}.png", "--image-pattern and --mask-pattern go together"),
        ("", "DATA is missing; usage: jumbo-vit segment check DATA [options]"),
    ],
)
def test_mistakes_cost_one_line(words: str, message: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word.replace("DATA", str(data)) for word in words.split()]
    assert main(["segment", "check", *given]) == 2
    line = capsys.readouterr().err
    assert message in line and line.count("\n") == 1


def test_segment_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["segment"], ["segment", "--help"]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert (
            "segment check" in printed and "evaluate" not in printed.partition("commands:")[2].partition("segment")[0]
        )
    assert main(["segment", "chek"]) == 2
    assert "unknown command segment chek (did you mean segment check?)" in capsys.readouterr().err
