"""JSONL as a list of pictures, and the one-line answers to mistakes in it."""

import json
import re
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumbo_vit.data.images import Skipped
from jumbo_vit.data.listing import names_of
from jumbo_vit.data.sets import open_held_out, read_table
from jumbo_vit.data.tables import parse_table
from tests.stores import (
    datasets,
    mistake,
    names,
    opened,
    png,
    whole,
)


def lines(folder: Path, *objects: Any, name: str = "list.jsonl", encoding: str = "utf-8", end: str = "\n") -> Path:
    text = "".join((entry if isinstance(entry, str) else json.dumps(entry)) + end for entry in objects)
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(seed=number))
    return tmp_path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["list.jsonl", "LIST.NDJSON"])
def test_forms_of_a_jsonl(pictures: Path, encoding: str, end: str, name: str) -> None:
    path = lines(
        pictures,
        {"path": "0.png", "label": "a", "split": "Train", "width": 4},
        "",
        {"Path": str(pictures / "1.png"), "Label": 3, "split": None},
        {"path": "./2.png", "labels": ["a"], "split": "val", "meta": {"x": 1, "X": 2}},
        {"path": "gone.png", "label": "a", "split": "train"},
        {"path": "3.png", "label": "a|b", "split": "extra"},
        name=name,
        encoding=encoding,
        end=end,
    )
    splits = opened(path)
    assert splits.train.classes == ["3", "a"]
    assert whole(splits) == {"0.png": "a", "1.png": "3", "2.png": "a"}
    assert splits.train.skipped == [Skipped("gone.png", "missing")]
    assert splits.train.notes == [f"{name}: rows of these splits are not used: extra."]
    assert names(open_held_out(str(path), "multiclass", ["a"])) == ["2.png"]
    assert read_table(path, "multiclass")["extra"].classes == ["3", "a", "a|b"]


def test_several_labels_in_a_jsonl(pictures: Path) -> None:
    path = lines(
        pictures,
        {"path": "0.png", "labels": ["sea", "sky", "sea"]},
        {"path": "1.png", "labels": "sky | sea"},
        {"path": "2.png", "labels": []},
        {"path": "3.png", "label": "sky|sea"},
    )
    assert read_table(path, "multilabel", ["sea", "sky", "sky|sea"])[""].labels == [(0, 1), (0, 1), (), (2,)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"path": "0.png", "label": "a"', "line 2 is not valid JSON (Expecting ',' delimiter, column 31)"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ('{"path": "0.png", "label": ' + "1" * 5000 + "}", "line 2 is not valid JSON"),
        ("[]", "line 2 is no JSON object: write one a line"),
        ("{}", "line 2 needs path and label, and has nothing"),
        ('{"path": "0.png", "class": "a"}', "line 2 needs path and label, and has path, class"),
        ('{"path": "0.png", "label": "a", "label": "b"}', "line 2 has the key label twice"),
        ('{"path": "0.png", "label": "a", "labels": ["a"]}', "line 2 has both label and labels"),
        ('{"path": "", "label": "a"}', "line 2: the path must be a text that is not empty"),
        ('{"path": 3, "label": "a"}', "line 2: the path must be a text"),
        ('{"path": "0.png", "label": "a", "split": 1}', "line 2: the split must be a text, such as train"),
        ('{"path": "0.png", "label": true}', "line 2: a label is text or a whole number, not true"),
        ('{"path": "0.png", "label": null}', "line 2: a label is text or a whole number, not null"),
        ('{"path": "0.png", "labels": ["a", null]}', "line 2: a label is text or a whole number, not null"),
        ('{"path": "0.png", "label": 3.0}', "line 2: a label is text or a whole number, not 3.0"),
        ('{"path": "0.png", "label": {}}', "line 2: a label is text or a whole number, not ()"),
        ('{"path": "0.png", "label": -1}', "line 2: the label -1 is below 0"),
        ('{"path": "0.png", "label": "\\ud800"}', "line 2: a label holds half of a surrogate pair"),
        ('{"path": "\\ud800", "label": "a"}', "line 2 holds half of a surrogate pair"),
        ('{"path": "0.png", "label": " "}', "line 2: no label, where multiclass needs one"),
        ('{"path": "0.png", "labels": "a|b"}', "line 2: 2 labels, a, b, where multiclass needs one"),
    ],
)
def test_mistakes_in_a_jsonl_are_named_by_line(pictures: Path, line: str, words: str) -> None:
    text = mistake(lines(pictures, {"path": "0.png", "label": "a"}, line))
    assert words in text
    assert f"{pictures}/list.jsonl" in text
    assert "correct" in text or "keep one" in text or "write one" in text


def test_a_jsonl_without_lines_or_in_another_encoding(pictures: Path) -> None:
    assert "lists no pictures: add one JSON object a line" in mistake(lines(pictures, "", ""))
    path = lines(pictures, '{"path": "é.png", "label": "a"}', encoding="latin-1")
    assert "is not in UTF-8: save it as JSONL" in mistake(path)


def test_the_examples_in_the_docs_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?m)(?:^    .+\n)+", text)]
    expected = {"train": [("cat",), ("cat", "indoors")], "val": [("dog",)]}
    for start, name in (("path,labels", "list.csv"), ('{"path"', "list.jsonl")):
        (tmp_path / name).write_text(next(block for block in blocks if block.startswith(start)))
        found = parse_table(tmp_path / name, "multilabel")
        if name == "list.jsonl":
            expected["val"] = [("dog", "indoors")]
        assert {split: [row.labels for row in found.of_split(split)] for split in found.splits()} == expected


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).map(
    lambda text: unicodedata.normalize("NFC", text.strip())
)


@given(labels=st.lists(NAMES.filter(bool) | st.integers(0, 10**6), min_size=1, max_size=5))
@settings(max_examples=100)
def test_labels_come_back_from_every_typed_form(labels: list[str | int]) -> None:
    expected = tuple(str(label) for label in labels)
    assert names_of(json.loads(json.dumps(labels)), joined=True) == expected
    if not any("|" in name or name != name.strip() for name in expected):
        assert names_of("|".join(expected), joined=True) == expected
    plain = [str(label) for label in labels]
    table = datasets.Dataset.from_dict({"labels": [plain]}).with_format("arrow")[:]
    assert names_of(table.column("labels").to_pylist()[0], joined=True) == expected
