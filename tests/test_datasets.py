"""Hugging Face datasets on disk as a list of pictures."""

import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumbo_vit.data.images import Skipped
from jumbo_vit.data.records import check_images
from jumbo_vit.data.sets import open_held_out
from tests.stores import datasets, good, mistake, names, offline, opened, png, rows, saved, tar, whole


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.mktemp("cache")):
        yield


def test_a_single_dataset_with_a_format_and_a_choice_of_rows(tmp_path: Path) -> None:
    dataset = rows(["a", "b"] * 4).select(range(7, -1, -1)).with_format("numpy", columns=["label"])
    splits = opened(saved(dataset, tmp_path / "data"))
    assert whole(splits) == {f"row:{i}": "ba"[i % 2] for i in range(8)}
    assert splits.train.classes == ["a", "b"]
    images = open_held_out(str(tmp_path / "data"), "multiclass", ["b", "a"])
    assert images.content(0) == png(seed=7)


def test_labels_of_a_dataset(tmp_path: Path) -> None:
    named = rows([0, 1, -1, None, 1, 0, 1, 0]).cast_column("label", datasets.ClassLabel(names=["x", "y", "z"]))
    splits = opened(saved(named, tmp_path / "named"))
    assert splits.train.classes == ["x", "y"]
    assert splits.train.skipped == [
        Skipped("row:2", "the label -1 is below 0, which usually means that there is none"),
        Skipped("row:3", "has no label"),
    ]
    assert "named: without a training picture and so no classes: z." in splits.train.notes
    numbers = opened(saved(rows([10, 9, 10, 9]), tmp_path / "numbers"))
    assert whole(numbers) == {"row:0": "10", "row:1": "9", "row:2": "10", "row:3": "9"}
    assert "not true" in mistake(saved(rows([True, True]), tmp_path / "bools"))
    assert "not 0.5" in mistake(saved(rows([0.5, 1.5]), tmp_path / "floats"))
    several = rows([["a", "b"], [], ["b"], None]).rename_column("label", "labels")
    images = open_held_out(str(saved(several, tmp_path / "several")), "multilabel", ["a", "b"])
    assert images.labels == [(0, 1), (), (1,)]
    assert images.skipped == [Skipped("row:3", "has no label")]
    assert "row:0: 2 labels, a, b, where multiclass needs one" in mistake(tmp_path / "several")
    feature = datasets.Sequence(datasets.ClassLabel(names=["x", "y"]))
    listed_names = several.select([0]).map(lambda _: {"labels": [1, 0]}, remove_columns=["labels"])
    listed_names = listed_names.cast_column("labels", feature)
    images = open_held_out(str(saved(listed_names, tmp_path / "list")), "multilabel", ["x", "y"])
    assert images.labels == [(0, 1)]


def test_forms_of_the_picture_column(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png())
    plain = rows(["a", "b"], image=[png(seed=1), png(seed=2)])
    (tmp_path / "bytes").mkdir()
    plain.to_parquet(str(tmp_path / "bytes" / "all.parquet"))
    images = open_held_out(str(tmp_path / "bytes"), "multiclass", ["a", "b"])
    assert [images.content(i) for i in range(2)] == [png(seed=1), png(seed=2)]
    paths = rows(["a", "b"] * 2, image=[str(tmp_path / "x.png"), "gone.png", "https://example.org/x.png", None])
    images = check_images(open_held_out(str(saved(paths, tmp_path / "paths")), "multiclass", ["a", "b"]))
    assert names(images) == ["row:0"]
    assert [(entry.path, entry.reason.split(" (")[0]) for entry in images.skipped] == [
        ("row:1", "its file gone.png cannot be read"),
        ("row:2", "its file https://example.org/x.png cannot be read"),
        ("row:3", "is empty"),
    ]
    renamed = rows(["a", "b"] * 2).cast_column("image", datasets.Image(decode=False)).rename_column("image", "img")
    splits = opened(saved(renamed, tmp_path / "renamed"))
    assert "The pictures are those of the column img, the labels those of label." in splits.train.notes


def test_unreadable_rows_are_named(tmp_path: Path) -> None:
    pictures = [{"bytes": content, "path": None} for content in (png(), b"text", b"", None, png()[:200], png())]
    rows(["a", "b"] * 3, image=pictures).to_parquet(str(tmp_path / "train.parquet"))
    images = check_images(open_held_out(str(tmp_path), "multiclass", ["a", "b"]))
    assert names(images) == ["train.parquet:0", "train.parquet:5"]
    assert images.skipped == [
        Skipped("train.parquet:1", "is not a picture"),
        Skipped("train.parquet:2", "is empty"),
        Skipped("train.parquet:3", "is empty"),
        Skipped("train.parquet:4", "is cut off"),
    ]


def test_a_changed_parquet_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a[1]" / "all.parquet"
    path.parent.mkdir()
    rows(["a", "b"] * 2).to_parquet(str(path))
    time = path.stat().st_mtime_ns
    assert set(whole(opened(path.parent)).values()) == {"a", "b"}
    rows(["c", "dd"] * 2).to_parquet(str(path))
    os.utime(path, ns=(time, time))
    assert set(whole(opened(path.parent)).values()) == {"c", "dd"}


def test_parquet_beside_tar_shards_is_a_table_about_them(tmp_path: Path) -> None:
    tar(tmp_path / "00000.tar", good())
    rows(["a"]).to_parquet(str(tmp_path / "00000.parquet"))
    splits = opened(tmp_path)
    assert len(whole(splits)) == 4
    assert f"{tmp_path.name}: 1 parquet files beside the tar files are not used." in splits.train.notes


def test_mistakes_in_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rows(["a", "b"])
    assert "needs a column image, and has picture, label" in mistake(
        saved(
            plain.cast_column(
                "image", {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
            ).rename_column("image", "picture"),
            tmp_path / "1",
        )
    )
    assert "needs a column label or labels, and has image, name" in mistake(
        saved(plain.rename_column("label", "name"), tmp_path / "2")
    )
    assert "both a column label and a column labels" in mistake(
        saved(plain.add_column("labels", ["a", "b"]), tmp_path / "3")
    )
    assert "where encoded pictures are expected" in mistake(saved(rows(["a"], image=[[[1, 2]]]), tmp_path / "4"))
    (tmp_path / "5").mkdir()
    plain.select([]).to_parquet(str(tmp_path / "5" / "train.parquet"))
    assert "holds no pictures" in mistake(tmp_path / "5")
    folder = saved(plain, tmp_path / "6")
    next(folder.glob("*.arrow")).write_bytes(b"cut")
    assert "cannot be opened by the datasets library" in mistake(folder)
    file = next(saved(plain, tmp_path / "9").glob("*.arrow"))
    first, second = (len(png(seed=number)) for number in range(2))
    offsets = struct.pack("<3i", 0, first, first + second)
    assert offsets in file.read_bytes()
    far = struct.pack("<3i", 0, first, 2**31 - 1)  # unchecked, the process would end without a word
    file.write_bytes(file.read_bytes().replace(offsets, far))
    assert "9 is damaged" in mistake(tmp_path / "9")
    (tmp_path / "7").mkdir()
    plain.to_parquet(str(tmp_path / "7" / "train.parquet"))
    content = (tmp_path / "7" / "train.parquet").read_bytes()
    (tmp_path / "7" / "train.parquet").write_bytes(content[:-50])
    assert "train.parquet is no parquet file, or is cut off" in mistake(tmp_path / "7")
    shutil.copytree(folder, tmp_path / "8")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "8 needs the datasets library: pip install 'jumbo-vit[data]'" in mistake(tmp_path / "8")


def test_files_that_number_their_classes_differently_are_refused(tmp_path: Path) -> None:
    for number, feature in enumerate(
        [
            datasets.ClassLabel(names=["cat", "dog"]),
            datasets.ClassLabel(names=["dog", "cat"]),
            datasets.ClassLabel(names=["cat", "dog", "emu"]),
            datasets.Value("int64"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        # Of another split the names are its own.
        for name, kind in (("train-0", datasets.ClassLabel(names=["cat", "dog"])), ("train-1", feature)):
            rows([0, 1]).cast_column("label", kind).to_parquet(str(folder / f"{name}.parquet"))
        rows([0, 1]).cast_column("label", datasets.ClassLabel(names=["dog", "cat"])).to_parquet(
            str(folder / "val.parquet")
        )
    splits = opened(tmp_path / "0")
    assert whole(splits) == {
        "train-0.parquet:0": "cat",
        "train-0.parquet:1": "dog",
        "train-1.parquet:0": "cat",
        "train-1.parquet:1": "dog",
        "val.parquet:0": "dog",
        "val.parquet:1": "cat",
    }
    assert "number their classes differently, 0 is dog in the one and cat in the other" in mistake(tmp_path / "1")
    assert "2 is emu in the one and without a name in the other" in mistake(tmp_path / "2")
    assert "0 is without a name in the one and cat in the other" in mistake(tmp_path / "3")
