"""`jumbo-vit check`: one folder with everything that goes wrong, looked through."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jumbo_vit.data import check
from jumbo_vit.data.check import contact_sheet, inspect
from jumbo_vit.data.sets import open_data
from jumbo_vit_command import main
from tests.mixed import ODD, SKIPPED, UNREADABLE, mixed_folder
from tests.pictures import TEST_MODEL, colour_folder, colour_tree, square


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad pictures: 3 classes, 17 readable ones for training and 7 held out; not to be changed."""
    return mixed_folder(tmp_path_factory.mktemp("check") / "data")


@pytest.fixture(scope="module")
def report(mixed: Path) -> dict[str, Any]:
    return inspect(open_data(str(mixed), "multiclass", 0, 0.1), workers=2)[1]


def entries(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(entry["path"], entry["reason"]) for entry in found]


def test_classes_and_counts(report: dict[str, Any]) -> None:
    assert report["classes"] == ["blue", ODD, "red"]
    assert report["splits"] == {
        "train": {"pictures": 17, "per_class": {"blue": 3, ODD: 7, "red": 7}},
        "val": {"pictures": 7, "per_class": {"blue": 2, ODD: 3, "red": 2}},
    }
    assert report["imbalance"] == pytest.approx(7 / 3)
    assert any("nothing" in note for note in report["notes"])


def test_unreadable_and_skipped_files_by_name_and_reason(report: dict[str, Any]) -> None:
    assert entries(report["unreadable"]) == UNREADABLE
    assert entries(report["skipped"]) == SKIPPED


def test_formats_modes_and_upright_sizes(report: dict[str, Any]) -> None:
    assert report["formats"] == {"PNG": 21, "JPEG": 2, "GIF": 1}
    assert {"CMYK": 1, "RGBA": 1, "I;16": 1}.items() <= report["modes"].items()
    assert sum(report["modes"].values()) == 24
    assert report["sizes"] == [{"width": 32, "height": 32, "count": 23}, {"width": 20, "height": 50, "count": 1}]
    assert report["width"] == {"min": 20, "median": 32, "max": 32}
    assert report["height"] == {"min": 32, "median": 32, "max": 50}


def test_duplicates_within_and_across_splits(report: dict[str, Any]) -> None:
    found = [
        ([file["path"] for file in group["files"]], group["across_splits"], group["different_labels"])
        for group in report["duplicates"]
    ]
    assert sorted(found) == sorted(
        [
            (["train/red/00.png", "train/red/again.png"], False, False),
            ([f"train/{ODD}/00.png", f"train/{ODD}/same.jpg"], False, False),
            (["train/red/01.png", f"val/{ODD}/other.png"], True, True),
        ]
    )
    assert report["warnings"] == [
        "Pictures both in training and held out: 1; the score will be too good.",
        "Pictures that are there more than once, with different labels: 1.",
    ]


def test_command_prints_and_writes(
    mixed: Path, report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, sheet = tmp_path / "report.json", tmp_path / "sheet.png"
    assert main(["check", str(mixed), "--json", str(table), "--png", str(sheet), "--workers", "2"]) == 0
    assert json.loads(table.read_text(encoding="utf-8")) == {"data": str(mixed), **report}
    assert ODD in table.read_text(encoding="utf-8")
    printed = capsys.readouterr()
    assert printed.err == ""
    for line in (
        "17 pictures for training, 7 held out (the folder val), 3 classes, 5 skipped",
        f"{ODD}         7         3",
        "sizes: 32x32 (23), 20x50 (1)",
        "unreadable train/red/cut.jpg: is cut off",
        f"skipped train/{ODD}/notes.txt: not a picture format",
        "duplicates within train: train/red/00.png, train/red/again.png",
        f"duplicates across the splits, DIFFERENT LABELS: train/red/01.png (red), val/{ODD}/other.png ({ODD})",
    ):
        assert line in printed.out.splitlines()
    picture = np.asarray(Image.open(sheet).convert("RGB"))
    # Rows are blue, green, red; the first picture of each begins below its title.
    row = check._CELL + 2 * check._TEXT
    assert [int(picture[n * row + check._TEXT + 60, 60].argmax()) for n in (0, 1)] == [2, 1]


def test_sheet_of_many_classes_is_cut(tmp_path: Path) -> None:
    for number in range(14):
        folder = tmp_path / "data" / f"class{number:02}"
        folder.mkdir(parents=True)
        for index in range(2):
            square("red", 10 * number + index, (8, 8)).save(folder / f"{index}.png")
    sheet = contact_sheet(open_data(str(tmp_path / "data"), "multiclass", 0, 0.5).train)
    (tmp_path / "sheet.png").write_bytes(sheet)
    high = check.SHEET_CLASSES * (check._CELL + 2 * check._TEXT) + check._TEXT
    assert Image.open(tmp_path / "sheet.png").size == (check.SHEET_PICTURES * (check._CELL + 4), high)


def test_imbalance_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = colour_folder(tmp_path / "data", train=1, val=1)
    for index in range(10):
        square("red", 500 + index).save(data / "train" / "red" / f"more{index}.png")
    assert main(["check", str(data)]) == 0
    assert "warning: The largest class, red, has 11 training pictures, the smallest, blue, 1: 11.0 times as many." in (
        capsys.readouterr().out
    )


def test_table_with_several_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colour_tree(tmp_path / "pictures", 4)
    rows = [f"pictures/{colour}/{i:02}.png,{colour}|warm" for colour in ("red", "blue") for i in range(4)]
    (tmp_path / "data.csv").write_text("\n".join(["path,labels", *rows, "pictures/gone.png,red", rows[0]]))
    assert main(["check", str(tmp_path / "data.csv"), "--task", "multilabel", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert "skipped pictures/gone.png: missing" in printed
    assert "note: data.csv: 1 pictures are listed more than once" in printed


def test_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "digits"]) == 0
    printed = capsys.readouterr().out
    assert "sizes: 8x8 (1797)" in printed
    assert "duplicates" not in printed


def test_what_training_refuses_is_refused_with_its_line(mixed: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "data"
    shutil.copytree(mixed, data)
    for picture in (data / "train" / "blue").iterdir():
        picture.write_bytes(b"")
    words = ["--model", TEST_MODEL, "--epochs", "1", "--workers", "0", "--logger", "none", "--out", f"{tmp_path}/out"]
    assert main(["train", "--data", str(data), *words]) == 2
    expected = capsys.readouterr().err
    assert main(["check", str(data), "--json", f"{tmp_path}/r.json"]) == 2
    assert capsys.readouterr().err == expected
    assert "no picture of the class blue" in expected
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "there is no nowhere"),
        ("digits --val-fraction 1.5", "the held-out fraction must lie between 0 and 1, not 1.5"),
        ("digits --seed -1", "--seed is -1, but must be 0 or more"),
        ("digits --workers 0", "--workers is 0, but must be 1 or more"),
        ("", "DATA is missing"),
    ],
)
def test_mistakes_cost_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words.split()]) == 2
    line = capsys.readouterr().err
    assert message in line and line.count("\n") == 1
