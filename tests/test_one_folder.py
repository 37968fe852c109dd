"""check, train, evaluate and predict on one folder with everything that goes wrong: they agree on every file."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from jumbo_vit_command import main
from tests.mixed import ODD, SKIPPED, UNREADABLE, mixed_folder
from tests.pictures import TEST_MODEL


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `data`, and what the four commands wrote of it: `*.json`, `rows.csv`, `out`."""
    place = tmp_path_factory.mktemp("one-folder")
    data, out = str(mixed_folder(place / "data")), str(place / "out")
    train = ["--model", TEST_MODEL, "--epochs", "1", "--batch-size", "8", "--workers", "0", "--logger", "none"]
    assert main(["check", data, "--json", f"{place}/check.json"]) == 0
    assert main(["train", "--data", data, "--out", out, *train]) == 0
    assert main(["evaluate", out, "--data", data, "--json", f"{place}/held-out.json"]) == 0
    assert main(["evaluate", out, "--data", f"{data}/train", "--json", f"{place}/training.json"]) == 0
    assert main(["predict", out, data, "--csv", f"{place}/rows.csv", "--json", f"{place}/predict.json"]) == 0
    return place


def content(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def named(rows: list[dict[str, Any]], below: str = "") -> list[tuple[str, str]]:
    """Path and reason of each, sorted; paths from the folder `below`."""
    return sorted((below + row["path"], row["reason"]) for row in rows)


def test_the_four_commands_leave_out_the_same_files_for_the_same_reasons(place: Path) -> None:
    every = sorted(UNREADABLE + SKIPPED)
    checked, predicted = content(place / "check.json"), content(place / "predict.json")
    assert named(checked["unreadable"]) == named(predicted["unreadable"]) == sorted(UNREADABLE)
    assert named(checked["skipped"]) == named(predicted["skipped"]) == SKIPPED
    assert named(content(place / "out" / "summary.json")["skipped"]) == every
    held_out = named(content(place / "held-out.json")["skipped"])
    assert held_out == [entry for entry in every if entry[0].startswith("val/")]
    assert sorted(named(content(place / "training.json")["skipped"], "train/") + held_out) == every


def test_the_four_commands_use_the_same_number_of_pictures(place: Path) -> None:
    splits = content(place / "check.json")["splits"]
    images = content(place / "out" / "summary.json")["images"]
    assert splits["train"]["pictures"] == images["train"] == content(place / "training.json")["n"] == 17
    assert splits["val"]["pictures"] == images["val"] == content(place / "held-out.json")["n"] == 7
    assert content(place / "predict.json")["labelled"] == 24


def test_predict_gives_a_row_to_every_picture_and_none_to_hidden_files(place: Path) -> None:
    with (place / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    data = place / "data"
    shown = [path for path in data.rglob("*") if path.is_file() and ".hidden" not in path.parts]
    names = {path.relative_to(data).as_posix() for path in shown}
    assert {row["path"] for row in rows} == names - {path for path, _ in SKIPPED} and len(rows) == 28
    assert sorted((row["path"], row["error"]) for row in rows if row["error"]) == sorted(UNREADABLE)
    assert all(row["label"] in ("blue", ODD, "red") for row in rows if not row["error"])


def test_the_empty_class_is_said_and_is_no_class(place: Path) -> None:
    checked, summary = content(place / "check.json"), content(place / "out" / "summary.json")
    assert checked["classes"] == summary["classes"] == ["blue", ODD, "red"]
    for notes in (checked["notes"], summary["notes"], content(place / "training.json")["notes"]):
        assert any("nothing" in note for note in notes)
