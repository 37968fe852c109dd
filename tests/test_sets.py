"""Folders, tables and the built-in digits as sets of pictures, and the one-line answers to mistakes."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.folds import take_fold
from jumbo_vit.data.images import Skipped
from jumbo_vit.data.sets import (
    ImageSet,
    check_images,
    open_data,
    open_held_out,
    read_table,
    scan_tree,
    stratified_split,
)
from jumbo_vit.errors import UserError


def make(root: Path, *names: str) -> Path:
    """Small pictures at these paths; a name that ends in a slash is an empty folder."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (200, 0, 0)).save(path)
    return root


def many(root: Path, **counts: int) -> Path:
    return make(root, *(f"{name}/{i}.png" for name, count in counts.items() for i in range(count)))


def names(image_set: ImageSet) -> list[str]:
    return [image_set.name(index) for index in range(len(image_set))]


def by_name(image_set: ImageSet) -> dict[str, str]:
    return {
        image_set.name(i): "|".join(image_set.classes[label] for label in labels)
        for i, labels in enumerate(image_set.labels)
    }


def mistake(call: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    text = str(caught.value)
    assert "\n" not in text
    return text


def held_out(data: Path) -> object:
    return open_data(str(data), "multiclass", 0, 0.2)


# Trees


def test_classes_are_sorted_as_strings_whatever_the_file_system_says(tmp_path: Path) -> None:
    found = scan_tree(make(tmp_path, "10/a.png", "2/a.png", "1/b.png", "1/a.png", "B/a.png", "a/a.png"))
    assert found.classes == ["1", "10", "2", "B", "a"]
    assert names(found) == ["1/a.png", "1/b.png", "10/a.png", "2/a.png", "B/a.png", "a/a.png"]
    assert found.class_counts() == [2, 1, 1, 1, 1]
    assert found.labels[0] == (0,)
    assert Path(found.samples[0].path).is_absolute()
    assert found.read(0).mode == "RGB"
    assert found.read(0, 1).mode == "L"
    assert found.notes == []


def test_names_survive(tmp_path: Path) -> None:
    folders = ["red one", "caf\u00e9", "\u732b", "\U0001f408", "e\u0301te\u0301"]
    found = scan_tree(make(tmp_path, *(f"{name}/a, b.png" for name in folders)))
    assert found.classes == sorted(["red one", "caf\u00e9", "\u732b", "\U0001f408", "\u00e9t\u00e9"])
    # The model's names find folders in either spelling, and a picture keeps the spelling of the disk.
    again = scan_tree(tmp_path, ["\u00e9t\u00e9", "cafe\u0301", "red one", "\u732b", "\U0001f408"])
    assert by_name(again)["e\u0301te\u0301/a, b.png"] == "\u00e9t\u00e9"
    assert by_name(again)["caf\u00e9/a, b.png"] == "cafe\u0301"


def test_deeper_folders_belong_to_the_top_and_equal_leaves_are_not_merged(tmp_path: Path) -> None:
    found = scan_tree(make(tmp_path, "colours/red/a.png", "colours/blue/a.png", "shapes/red/a.png"))
    assert by_name(found) == {
        "colours/blue/a.png": "colours",
        "colours/red/a.png": "colours",
        "shapes/red/a.png": "shapes",
    }
    assert found.notes == [
        f"{tmp_path.name}: folders inside a class folder belong to it: colours/blue is class colours."
    ]


def test_what_is_no_sample_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a/x.png", "b/x.png", "empty/", ".hidden/x.png", "loose.png", "text/")
    (tmp_path / "text" / "readme.md").write_text("no picture")
    found = scan_tree(tmp_path)
    assert found.classes == ["a", "b"]
    assert found.skipped == [
        Skipped("text/readme.md", "not a picture format"),
        Skipped("loose.png", "lies beside the class folders, in none of them"),
    ]
    assert found.notes[0].endswith("folders without pictures are no classes: empty, text.")
    assert found.notes[1].endswith("1 pictures lie beside the class folders and are skipped.")


def test_a_linked_class_folder(tmp_path: Path) -> None:
    make(tmp_path, "data/a/x.png", "store/x.png")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "store", target_is_directory=True)
    assert names(scan_tree(tmp_path / "data")) == ["a/x.png", "b/x.png"]


def test_labels_are_by_name(tmp_path: Path) -> None:
    classes = ["green", "red", "blue"]
    found = scan_tree(make(tmp_path, "blue/a.png", "red/a.png", "green/"), classes)
    assert found.classes == classes
    assert by_name(found) == {"blue/a.png": "blue", "red/a.png": "red"}
    assert found.notes[-1].endswith("no pictures of green.")
    make(tmp_path, "blu/a.png")
    text = mistake(scan_tree, tmp_path, classes)
    assert "the folder blu in" in text
    assert "none of the model's classes (did you mean blue?); they are green, red, blue: rename or remove it" in text


def test_mistakes_in_trees(tmp_path: Path) -> None:
    assert mistake(scan_tree, tmp_path / "none") == f"there is no folder {tmp_path / 'none'}: check the path"
    assert f"there are no pictures in {tmp_path}: give a folder" in mistake(scan_tree, tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").touch()
    assert "(1 other files, first a/x.txt: not a picture format)" in mistake(scan_tree, tmp_path)
    make(tmp_path, "a/x.png")
    assert "holds one class only, a: training needs at least two class folders" in mistake(scan_tree, tmp_path)
    assert len(scan_tree(tmp_path, ["a", "b"])) == 1
    flat = make(tmp_path / "flat", "x.png", "y.png")
    assert "holds pictures but no class folders: put each class into a folder" in mistake(scan_tree, flat)
    assert "holds pictures but no class folders" in mistake(scan_tree, flat, ["a"])


def test_two_spellings_of_one_class(tmp_path: Path) -> None:
    make(tmp_path, "e\u0301/a.png", "\u00e9/a.png", "z/a.png")
    if len(list(tmp_path.iterdir())) < 3:
        pytest.skip("this file system holds one spelling only")
    assert "have the same name, \u00e9, spelled in different Unicode forms" in mistake(scan_tree, tmp_path)


def test_a_set_crosses_to_another_process(tmp_path: Path) -> None:
    for whole in (scan_tree(make(tmp_path, "a/x.png", "b/x.png")), digits_splits().val):
        part = pickle.loads(pickle.dumps(whole.subset([1, 0])))
        assert names(part) == [whole.name(1), whole.name(0)]
        assert part.read(0).tobytes() == whole.read(1).tobytes()
        assert type(part) is type(whole)


# Splits


def test_train_beside_a_held_out_folder(tmp_path: Path) -> None:
    make(tmp_path, "Train/a/1.png", "Train/b/1.png", "val/", "Valid/b/2.png", "test/a/3.png", "docs/x.png")
    (tmp_path / "Train" / "a" / "x.txt").touch()
    splits = open_data(str(tmp_path), "multiclass", 0, 0.2)
    assert splits.held_out == "the folder Valid"
    assert names(splits.train) == ["Train/a/1.png", "Train/b/1.png"]
    assert by_name(splits.val) == {"Valid/b/2.png": "b"}
    assert splits.val.classes == ["a", "b"]
    assert splits.train.skipped == [Skipped("Train/a/x.txt", "not a picture format")]
    assert "Beside Train/ these folders are not used: docs." in splits.train.notes
    assert "val: no pictures, so not used as the held-out part." in splits.train.notes
    assert "Valid: no pictures of a." in splits.val.notes


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test", "VAL"])
def test_names_of_held_out_folders(tmp_path: Path, name: str) -> None:
    make(tmp_path, "train/a/1.png", "train/b/1.png", f"{name}/a/2.png")
    assert held_out(tmp_path).held_out == f"the folder {name}"  # type: ignore[attr-defined]
    evaluated = open_held_out(str(tmp_path), "multiclass", ["a", "b"])
    assert names(evaluated) == [f"{name}/a/2.png"]
    assert evaluated.notes[-1] == f"The held-out part is the folder {name}."
    assert names(open_held_out(str(tmp_path / name), "multiclass", ["a", "b"])) == ["a/2.png"]


def test_an_unknown_held_out_class(tmp_path: Path) -> None:
    make(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png")
    assert "the folder c in" in mistake(held_out, tmp_path)


@pytest.mark.parametrize("under", ["", "train/"])
def test_a_tree_alone_is_split_by_seed_and_class(tmp_path: Path, under: str) -> None:
    many(tmp_path / under, a=10, b=3, c=1)
    (tmp_path / under / "a" / "x.txt").touch()
    first = open_data(str(tmp_path), "multiclass", 0, 0.2)
    assert first.held_out == "20% of the pictures, split with seed 0"
    assert first.train.class_counts() == [8, 2, 1]
    assert first.val.class_counts() == [2, 1, 0]
    assert sorted(names(first.train) + names(first.val)) == sorted(names(scan_tree(tmp_path / under, base=tmp_path)))
    assert len(first.train.skipped) + len(first.val.skipped) == 1
    assert "With a single picture, which stays in training: c." in first.train.notes
    assert names(open_data(str(tmp_path), "multiclass", 0, 0.2).val) == names(first.val)
    assert any(names(open_data(str(tmp_path), "multiclass", s, 0.2).val) != names(first.val) for s in (1, 2))


def test_train_may_be_a_class(tmp_path: Path) -> None:
    many(tmp_path, train=3, car=3, test=3)
    assert held_out(tmp_path).train.classes == ["car", "test", "train"]  # type: ignore[attr-defined]
    evaluated = open_held_out(str(tmp_path), "multiclass", ["car", "train", "test"])
    assert len(evaluated) == 9


def test_mistakes_in_data(tmp_path: Path) -> None:
    assert mistake(open_data, "digit", "multiclass", 0, 0.2).startswith(
        "there is no digit (did you mean digits?): give"
    )
    assert "must lie between 0 and 1, not 1.0: change --val-fraction" in mistake(
        open_data, "digits", "multiclass", 0, 1.0
    )
    assert "use multiclass or multilabel" in mistake(open_data, "digits", "multi", 0, 0.2)
    assert "digits have one label a picture" in mistake(open_data, "digits", "multilabel", 0, 0.2)
    assert "for multilabel give a CSV" in mistake(open_data, str(tmp_path), "multilabel", 0, 0.2)
    (tmp_path / "data.zip").touch()
    assert "is a file, but no .csv or .tsv" in mistake(held_out, tmp_path / "data.zip")
    flat = make(tmp_path / "flat", "train/x.png", "val/x.png")
    assert "train holds pictures but no class folders" in mistake(held_out, flat)
    ones = many(tmp_path / "ones", a=1, b=1)
    assert "has one picture a class, so none can be held out" in mistake(held_out, ones)
    alone = many(tmp_path / "alone" / "train", a=2, b=2)
    text = mistake(open_held_out, str(alone.parent), "multiclass", ["a", "b"])
    assert f"has train/ but no held-out folder (val, valid, validation, test): add one, or give {alone}" in text
    empty = make(tmp_path / "void", "train/", "val/a/x.png")
    assert "there are no pictures in" in mistake(held_out, empty)


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_a_split_is_disjoint_complete_and_stratified(counts: list[int], fraction: float, seed: int) -> None:
    labels = [(label,) for label, count in enumerate(counts) for _ in range(count)]
    train, val = stratified_split(labels, len(counts), fraction, seed)
    assert sorted(train + val) == list(range(len(labels)))
    assert (train, val) == stratified_split(labels, len(counts), fraction, seed)
    for label, count in enumerate(counts):
        part = sum(labels[i] == (label,) for i in val)
        assert part == (0 if count == 1 else min(max(int(count * fraction + 0.5), 1), count - 1))


@given(
    labels=st.lists(st.sets(st.integers(0, 4)).map(lambda s: tuple(sorted(s))), min_size=1, max_size=60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_a_split_with_several_labels_is_disjoint_and_complete(labels: list[tuple[int, ...]], seed: int) -> None:
    train, val = stratified_split(labels, 5, 0.2, seed)
    assert sorted(train + val) == list(range(len(labels)))
    assert train


# Tables


def table(folder: Path, text: str, name: str = "data.csv", encoding: str = "utf-8") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


ROWS = [["path", "labels", "split"], ["x/1.png", "a", "train"], ["x/2.png", "b", "train"], ["x/3.png", "b", "val"]]


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_forms_of_a_table(tmp_path: Path, delimiter: str, encoding: str, ending: str) -> None:
    make(tmp_path, "x/1.png", "x/2.png", "x/3.png")
    path = table(tmp_path, ending.join(delimiter.join(row) for row in ROWS) + ending, encoding=encoding)
    sets = read_table(path, "multiclass")
    assert {split: by_name(found) for split, found in sets.items()} == {
        "train": {"x/1.png": "a", "x/2.png": "b"},
        "val": {"x/3.png": "b"},
    }
    splits = open_data(str(path), "multiclass", 0, 0.2)
    assert splits.held_out == "the split val"
    assert names(splits.val) == ["x/3.png"]
    assert names(open_held_out(str(path), "multiclass", ["b"])) == ["x/3.png"]


def test_a_table_without_splits(tmp_path: Path) -> None:
    many(tmp_path, x=10)
    lines = ["Label,PATH,width", *(f"{'ab'[i % 2]},x/{i}.png,4" for i in range(10)), "", "a,x/gone.png,4"]
    path = table(tmp_path, "\n".join(lines))
    splits = open_data(str(path), "multiclass", 0, 0.2)
    assert splits.train.class_counts() == [4, 4]
    assert splits.val.class_counts() == [1, 1]
    assert splits.train.skipped == [Skipped("x/gone.png", "missing")]
    assert len(open_held_out(str(path), "multiclass", ["b", "a"])) == 10


def test_several_labels(tmp_path: Path) -> None:
    many(tmp_path, x=4)
    path = table(tmp_path, 'path,labels\nx/0.png,sea | sky\nx/1.png,\nx/2.png,sky|sky\n"x/3.png","sea"\n')
    found = read_table(path, "multilabel")[""]
    assert found.classes == ["sea", "sky"]
    assert found.labels == [(0, 1), (), (1,), (0,)]
    assert found.class_counts() == [2, 2]
    assert read_table(path, "multilabel", ["sky", "tree", "sea"])[""].labels == [(0, 2), (), (0,), (2,)]


def test_paths_in_tables(tmp_path: Path) -> None:
    odd = 'a, "b"\u00e9.png'
    make(tmp_path, f"in/{odd}", "out.png")
    quoted = '"' + odd.replace('"', '""') + '"'
    text = f"path,labels\n{quoted},a\n../out.png,b\n{tmp_path / 'out.png'},b\n"
    found = read_table(table(tmp_path / "in", text), "multiclass")[""]
    assert names(found) == [odd, "../out.png", "../out.png"]
    assert found.notes == ["data.csv: 1 pictures are listed more than once, first ../out.png."]
    decomposed = text.replace("\u00e9", "e\u0301")
    assert names(read_table(table(tmp_path / "in", decomposed), "multiclass")[""])[0] == odd


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,class\nx,a\n", "needs the columns path and labels, and has file, class: add a header line"),
        ("path\nx\n", "needs the columns path and labels, and has path"),
        ("path,label,labels\n1.png,a,b\n", "has the columns path, label, labels: keep one"),
        ("path,label,path\n1.png,a,2.png\n", "has the columns path, label, path: keep one"),
        ("", "needs the columns path and labels, and has"),
        ("path,labels\n", "lists no pictures: add one line a picture"),
        ("path,labels\n1.png,a\n2.png,a|b\n", "line 3: 2 labels, a, b, where multiclass needs one"),
        ("path,labels\n1.png,a\n2.png,\n", "line 3: no label, where multiclass needs one"),
        ("path,labels\n1.png,a\n2.png\n", "line 3: 1 cells where the header has 2"),
        ("path,labels\n1,2.png,a\n", "line 2: 3 cells where the header has 2"),
        ("path,labels\n ,a\n", "line 2: the path is empty"),
        ('path,labels\n"1.png,a\n', "line 2 is not valid CSV"),
        ("path,labels\n1.png,a\n2.png,a\n", "holds one class only, a"),
        ("path,labels\n1.png,a\n9.png,b\n", "no picture of the class b in"),
        ("path,labels\n8.png,a\n9.png,b\n", "none of the 2 pictures in"),
        ("path,labels,split\n1.png,a,val\n", "has no rows to train on: its splits are val"),
        (
            "path,labels,split\n1.png,a,train\n2.png,b,train\n3.png,bb,val\n",
            "line 4: the label bb is none of the classes",
        ),
        ("path,labels,split\n1.png,a,train\n2.png,b,train\n9.png,b,val\n", "none of the pictures of the split val"),
    ],
)
def test_mistakes_in_tables(tmp_path: Path, text: str, words: str) -> None:
    make(tmp_path, "1.png", "2.png", "3.png")
    assert words in mistake(held_out, table(tmp_path, text))


def test_a_table_in_another_encoding(tmp_path: Path) -> None:
    assert "is not in UTF-8: save it" in mistake(
        held_out, table(tmp_path, "path,labels\n\u00e9,a\n", encoding="latin-1")
    )


def test_splits_that_are_not_used_are_said(tmp_path: Path) -> None:
    many(tmp_path, x=4)
    text = "path,labels,split\nx/0.png,a,train\nx/1.png,b,train\nx/2.png,a,Val\nx/3.png,c,extra\n"
    splits = open_data(str(table(tmp_path, text)), "multiclass", 0, 0.2)
    assert splits.train.classes == ["a", "b"]
    assert "data.csv: rows of these splits are not used: extra." in splits.train.notes


# Checking


def test_unreadable_pictures_are_left_out_by_name(tmp_path: Path) -> None:
    many(tmp_path, a=3, b=2)
    (tmp_path / "a" / "1.png").write_bytes(b"")
    (tmp_path / "b" / "1.png").write_text("text")
    for workers in (1, 4, None):
        checked = check_images(scan_tree(tmp_path), 3, workers=workers, require_all_classes=True)
        assert names(checked) == ["a/0.png", "a/2.png", "b/0.png"]
        assert checked.skipped == [Skipped("a/1.png", "is empty"), Skipped("b/1.png", "is not a picture")]
    (tmp_path / "b" / "0.png").write_bytes(b"")
    assert check_images(scan_tree(tmp_path), progress=False).class_counts() == [2, 0]
    text = mistake(check_images, scan_tree(tmp_path), require_all_classes=True)
    assert text.startswith("no picture of the class b can be read, first a/1.png: is empty")
    for path in tmp_path.glob("a/*.png"):
        path.write_bytes(b"")
    assert "none of the 5 pictures in" in mistake(check_images, scan_tree(tmp_path))


# Digits


def test_digits() -> None:
    splits = digits_splits()
    assert (len(splits.train), len(splits.val)) == (1437, 360)
    assert splits.train.classes == [str(digit) for digit in range(10)]
    assert not {*names(splits.train)} & {*names(splits.val)}
    assert all(34 <= count <= 38 for count in splits.val.class_counts())
    assert "digits/0001" in names(splits.train) + names(splits.val)
    assert splits.val.read(0).mode == "RGB"
    grey = np.asarray(splits.val.read(0, 1))
    assert grey.shape == (8, 8)
    assert grey.max() == 255
    assert names(open_data("digits", "multiclass", 1, 0.5).val) == names(splits.val)


def test_digits_by_the_names_of_a_model() -> None:
    reversed_names = [str(digit) for digit in range(9, -1, -1)]
    ours, theirs = digits_splits().val, open_held_out("digits", "multiclass", reversed_names)
    assert by_name(ours) == by_name(theirs)
    assert theirs.labels != ours.labels
    assert "the digits' class 0 is none of the model's classes, cat, dog" in mistake(
        open_held_out, "digits", "multiclass", ["cat", "dog"]
    )


def test_a_folder_called_digits_is_pointed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, "digits/"))
    assert "write ./digits" in open_data("digits", "multiclass", 0, 0.2).train.notes[0]


def test_looking_at_data_needs_neither_torch_nor_timm() -> None:
    code = (
        "import sys, jumbo_vit_command, jumbo_vit.data.sets, jumbo_vit.data.digits; "
        "print([name for name in ('torch', 'timm', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pictures_that_are_listed_for_both_parts_are_told(tmp_path: Path) -> None:
    files = [f"{i}.png" for i in range(8)]
    make(tmp_path, *files)
    lines = [f"{i}.png,{'ab'[i % 2]},train" for i in range(6)] + [f"{i}.png,{'ab'[i % 2]},val" for i in range(4, 8)]
    splits = open_data(str(table(tmp_path, "path,label,split\n" + "\n".join(lines))), "multiclass", 0, 0.5)
    words = "2 of the 4 held-out pictures are listed for training too, first 4.png: the score is too good."
    assert splits.val.notes == [words]
    twice = "".join(f"{name},{'ab'[int(name[0]) % 2]}\n" for name in files * 2)
    drawn = open_data(str(table(tmp_path, "path,label\n" + twice)), "multiclass", 0, 0.5)
    fold = take_fold(drawn, 2, 1, 0)
    for parts in (drawn, fold):
        shared = {sample.path for sample in parts.train.samples}
        count = sum(sample.path in shared for sample in parts.val.samples)
        assert count
        assert parts.val.notes[0].startswith(f"{count} of the 8 held-out pictures are listed for training too")
        assert not any("for training too" in note for note in parts.train.notes)
    apart = open_data(str(table(tmp_path, "path,label\n" + twice[: len(twice) // 2])), "multiclass", 0, 0.5)
    assert apart.val.notes == []
