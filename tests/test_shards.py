"""Tar shards as a list of pictures: what is a sample, what is none, and what is refused."""

import io
import os
import random
import string
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumbo_vit.data.images import Skipped
from jumbo_vit.data.records import check_images
from jumbo_vit.data.sets import open_held_out
from jumbo_vit.data.sources import run_name
from jumbo_vit.errors import UnreadableImage, UserError
from tests.pictures import colour_folder
from tests.stores import good, mistake, names, opened, png, tar, webdataset, whole


def test_labels_of_a_shard(tmp_path: Path) -> None:
    members = [
        ("./a/0001.PNG", png()),
        ("./a/0001.cls", b" 1\n"),
        ("b/0001.json", b'{"label": "one", "caption": "text"}'),
        ("b/0001.png", png()),
        ("2.png", png()),
        ("2.seg.png", png()),
        ("2.txt", "zwei\n".encode("utf-8-sig")),
        ("3.json", b'{"labels": [1]}'),
        ("3.cls", b"zwei"),
        ("3.png", png()),
    ]
    tar(tmp_path / "x.tar", members)
    expected = {"x.tar:a/0001.PNG": "1", "x.tar:b/0001.png": "one", "x.tar:2.png": "zwei", "x.tar:3.png": "zwei"}
    found = read_all(tmp_path)
    assert found == expected
    (tmp_path / "classes.txt").write_text("null\none\nzwei\n")
    assert read_all(tmp_path) == expected | {"x.tar:a/0001.PNG": "one"}


def read_all(data: Path, classes: Iterable[str] = ("1", "one", "zwei")) -> dict[str, str]:
    images = open_held_out(str(data), "multiclass", list(classes))
    return {images.name(i): images.classes[labels[0]] for i, labels in enumerate(images.labels)}


def test_numbers_are_named_by_a_file_beside_the_shards(tmp_path: Path) -> None:
    tar(
        tmp_path / "train-0.tar",
        [(f"{i}.{end}", png() if end == "png" else b"%d" % (i % 4)) for i in range(8) for end in ("png", "cls")],
    )
    (tmp_path / "labels.txt").write_text("cat\ndog\nowl\n")
    splits = opened(tmp_path)
    assert splits.train.classes == ["cat", "dog", "owl"]
    assert splits.train.skipped == [
        Skipped("train-0.tar:3.png", "the label 3 has no name: the names are those of 0 to 2"),
        Skipped("train-0.tar:7.png", "the label 3 has no name: the names are those of 0 to 2"),
    ]
    assert "Labels that are numbers are named by labels.txt: 0 is cat." in splits.train.notes
    (tmp_path / "labels.txt").write_text("cat\ndog\nowl\nyak\nemu")
    assert f"{tmp_path.name}: without a training picture and so no classes: emu." in opened(tmp_path).train.notes
    (tmp_path / "labels.txt").write_text("cat\ncat\n")
    assert "must hold the name of a class in each line, each name once" in mistake(tmp_path)
    (tmp_path / "labels.txt").write_bytes(b"\xff\xfe")
    assert "is not in UTF-8" in mistake(tmp_path)


def test_what_is_no_sample_is_named_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.tar"
    tar(path, good())
    bad: list[tuple[str, bytes]] = [
        ("two.png", png()),
        ("two.jpg", png()),
        ("two.cls", b"a"),
        ("none.png", png()),
        ("lone.cls", b"a"),
        ("minus.png", png()),
        ("minus.cls", b"-1"),
        ("yes.png", png()),
        ("yes.json", b'{"label": true}'),
        ("odd.png", png()),
        ("odd.json", b'{"label": '),
        ("other.png", png()),
        ("other.json", b'{"caption": "x"}'),
        ("blank.png", png()),
        ("blank.txt", b" "),
        ("latin.png", png()),
        ("latin.txt", b"\xe9"),
        ("again.png", png()),
        ("again.cls", b"a"),
        ("again.png", png()),
        ("../out.png", png()),
        ("in/../../out.png", png()),
        ("/root.png", png()),
        ("._mac.png", b"x"),
        ("__MACOSX/0000.png", b"x"),
        ("text.jpg", b"no picture"),
        ("text.cls", b"b"),
    ]
    with tarfile.open(path, "a") as archive:
        for name, content in bad:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0000.png"
        archive.addfile(link)
    images = check_images(open_held_out(str(tmp_path), "multiclass", ["a", "b"]))
    assert names(images) == [f"train.tar:{i:04d}.png" for i in range(4)]
    assert [(entry.path.removeprefix("train.tar:"), entry.reason) for entry in images.skipped] == [
        ("two.png", "has 2 pictures, png, jpg"),
        ("none.png", "has no label"),
        ("lone", "has no picture, only cls"),
        ("minus.png", "the label -1 is below 0, which usually means that there is none"),
        ("yes.png", "a label is text or a whole number, not true"),
        ("odd.png", "its json cannot be read as JSON"),
        ("other.png", "its json needs either label or labels"),
        ("blank.png", "has no label"),
        ("latin.png", "its txt cannot be read as UTF-8"),
        ("again.png", "holds the field png twice"),
        ("train.tar", "its member ../out.png has a path that leads out of the shard"),
        ("train.tar", "its member in/../../out.png has a path that leads out of the shard"),
        ("train.tar", "its member root.png has a path that leads out of the shard"),
        ("train.tar", "its member link.png is no ordinary file (a link, or sparse)"),
        ("text.jpg", "is not a picture"),
    ]
    assert "2 hidden entries of the shards are left out, first train.tar:._mac.png." in images.notes


def test_several_labels_in_shards(tmp_path: Path) -> None:
    tar(
        tmp_path / "x.tar",
        [
            ("0.png", png()),
            ("0.json", b'{"labels": ["a", 1]}'),
            ("1.png", png()),
            ("1.txt", b"a|b"),
            ("2.png", png()),
            ("2.cls", b""),
        ],
    )
    images = open_held_out(str(tmp_path / "x.tar"), "multilabel", ["1", "a", "b"])
    assert images.labels == [(0, 1), (1, 2), ()]
    assert "x.tar:0.png: 2 labels, a, 1, where multiclass needs one" in mistake(tmp_path / "x.tar")


@pytest.mark.parametrize(
    "shape",
    [
        "train/{}.tar|val/{}.tar",
        "train-{}.tar|val-{}.tar",
        "x_train_{}.tar|VALIDATION.{}.tar",
        "data/train-{}.tar|data/test-{}.tar",
        "{}.tar|sub/valid/{}.tar",
    ],
)
def test_the_split_is_that_of_a_folder_or_a_word_of_the_name(tmp_path: Path, shape: str) -> None:
    for part, first in zip(shape.split("|"), (0, 10), strict=True):
        tar(tmp_path / part.format("000000"), good(first))
        tar(tmp_path / part.format("000001"), good(first + 4, 2))
    splits = opened(tmp_path)
    assert [name.partition(":")[2] for name in names(splits.val)] == [f"{i:04d}.png" for i in range(10, 16)]
    assert [name.partition(":")[2] for name in names(splits.train)] == [f"{i:04d}.png" for i in range(6)]


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        tar(tmp_path / f"train-{number:06d}.tar", good(10 * number))
    assert len(whole(opened(tmp_path / "train-{000000..000001}.tar"))) == 8
    assert len(whole(opened(f"{tmp_path}/{{train-000000,train-*}}.tar"))) == 12
    assert len(whole(opened(f"{tmp_path}/**/train-00000[12].tar"))) == 8
    assert "no file is called" in mistake(tmp_path / "train-{000000..000003}.tar")
    assert "no file is called" in mistake(tmp_path / "val-*.tar")
    assert "a brace without its partner" in mistake(tmp_path / "train-{0.tar")
    (tmp_path / "train-x.csv").touch()
    assert "not all .tar or all .parquet" in mistake(tmp_path / "train-*")
    assert run_name(str(tmp_path / "train-{000..002}.tar")) == "train-_000..002"
    assert run_name(str(tmp_path / "train-000000.tar")) == "train-000000"
    monkeypatch.setitem(sys.modules, "braceexpand", None)
    assert "pip install 'jumbo-vit[data]', or use *" in mistake(tmp_path / "train-{000000..000001}.tar")


@pytest.mark.parametrize("odd", ["data[1]", "{x,y} *"])
def test_a_folder_whose_name_looks_like_a_pattern_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    tar(tmp_path / odd / "train-0.tar", good(0))
    for other in ("data1", "x z", "y z"):  # what the name would mean as a pattern
        tar(tmp_path / other / "train-0.tar", good(10))
    expected = {f"train-0.tar:{number:04d}.png" for number in range(4)}
    assert set(whole(opened(tmp_path / odd / "train-*.tar"))) == expected
    monkeypatch.chdir(tmp_path / odd)
    assert set(whole(opened("train-*.tar"))) == expected
    assert set(whole(opened("train-{0,?}.tar"))) == expected


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_compressed_shards_are_refused(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "shards" / f"train-0.tar.{mode}"
    path.parent.mkdir()
    with tarfile.open(path, f"w:{mode}") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    for data in (path, path.parent, f"{path.parent}/train-*"):
        text = mistake(data)
        assert "is compressed, so its pictures cannot be read at random: decompress it to a plain .tar" in text
    path.rename(path.with_name("train-0.tar"))
    assert "is compressed by" in mistake(path.parent)


def test_damaged_shards_keep_what_is_whole(tmp_path: Path) -> None:
    whole_file = tar(tmp_path / "train-0.tar", good()).read_bytes()
    with tarfile.open(tmp_path / "train-0.tar") as archive:
        members = archive.getmembers()
    cuts = {
        "in a picture": (members[4].offset_data + 5, 2),
        "in a header": (members[4].offset + 100, 2),
        "between two members": (members[4].offset, 2),
        "behind the last": (members[-1].offset_data + 512, 4),
    }
    for cut, count in cuts.values():
        (tmp_path / "train-1.tar").write_bytes(whole_file[:cut])
        images = open_held_out(str(tmp_path / "train-1.tar"), "multiclass", ["a", "b"])
        assert len(images) == count
        (entry,) = images.skipped
        assert entry.path == "train-1.tar" and entry.reason.startswith("is cut off")
        assert entry.reason.endswith(f"after {count} samples")
    (tmp_path / "train-1.tar").write_bytes(whole_file[: members[4].offset] + b"\x55" * 4096)
    (tmp_path / "train-2.tar").write_bytes(b"")
    (tmp_path / "train-3.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "train-4.tar").write_bytes(whole_file + whole_file)
    tar(tmp_path / "train-5.tar", [])
    found = opened(tmp_path)
    assert len(whole(found)) == 4 + 2 + 4
    assert found.train.skipped == [
        Skipped("train-1.tar", "is cut off or damaged after 2 samples"),
        Skipped("train-2.tar", "is empty after 0 samples"),
        Skipped("train-3.tar", "is not a tar file after 0 samples"),
        Skipped(
            "train-4.tar", "holds more behind its end (archives joined into one), which is not read, after 4 samples"
        ),
        Skipped("train-5.tar", "holds no samples"),
    ]


def test_a_shard_that_changes_is_refused_and_one_that_goes_is_named(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", good())
    images = opened(path).train
    path.touch()
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match=r"x.tar has changed since it was indexed: start the command again"):
        images.read(0)
    path.unlink()
    with pytest.raises(UnreadableImage, match="its shard cannot be read"):
        images.read(0)


def test_shards_of_nothing_usable(tmp_path: Path) -> None:
    tar(tmp_path / "train-0.tar", [("0.png", png())])
    assert "none of the 1 samples in" in mistake(tmp_path)
    tar(tmp_path / "train-0.tar", good())
    tar(tmp_path / "val-0.tar", [("0.png", png())])
    assert "none of the samples of the split val in" in mistake(tmp_path)
    tar(tmp_path / "val-0.tar", [("0.png", png()), ("0.cls", b"c")])
    assert "val-0.tar:0.png: the label c is none of the classes; they are a, b" in mistake(tmp_path)
    (tmp_path / "train-0.tar").unlink()
    assert "has no rows to train on: its splits are val" in mistake(tmp_path)


def test_a_folder_of_pictures_stays_one(tmp_path: Path) -> None:
    colour_folder(tmp_path, 2, 1)
    tar(tmp_path / "train" / "left.tar", good())
    splits = opened(tmp_path)
    assert len(splits.train) == 6
    assert splits.train.skipped == [Skipped("train/left.tar", "not a picture format")]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_any_order_of_members_gives_the_samples_that_webdataset_reads(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    keys = {"".join(rng.choices(string.ascii_letters + "_-é ", k=5)).strip() or "k" for _ in range(6)}
    samples = {f"{rng.choice(['', 'd/'])}{key}": rng.choice("ab") for key in keys}
    members = []
    for key, label in samples.items():
        fields = [(f"{key}.png", png(seed=len(members))), (f"{key}.cls", label.encode()), (f"{key}.note.txt", b"x")]
        rng.shuffle(fields)
        members += fields
    path = tar(tmp_path_factory.mktemp("any") / "x.tar", members)
    expected = [
        (sample["__key__"], sample["png"], sample["cls"].decode())
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    images = open_held_out(str(path), "multiclass", ["a", "b"])
    found = [
        (images.name(i).removeprefix("x.tar:").removesuffix(".png"), images.content(i), images.classes[labels[0]])
        for i, labels in enumerate(images.labels)
    ]
    assert found == expected


def test_the_nearest_file_of_names_counts_and_differing_ones_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        tar(
            tmp_path / split / "0.tar",
            [(f"{i}.{e}", png() if e == "png" else b"%d" % (i % 2)) for i in range(4) for e in ("png", "cls")],
        )
    (tmp_path / "train" / "classes.txt").write_text("cat\ndog\n")
    assert opened(tmp_path).train.classes == ["cat", "dog"]
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert opened(tmp_path).val.classes == ["cat", "dog"]
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    with pytest.raises(UserError, match="name the classes differently"):
        opened(tmp_path)


def test_a_shard_named_after_two_splits_is_refused(tmp_path: Path) -> None:
    tar(tmp_path / "train-0.tar", [("1.png", png()), ("1.cls", b"0")])
    tar(tmp_path / "test-bench-train-1.tar", [("1.png", png()), ("1.cls", b"0")])
    with pytest.raises(UserError, match="may belong to test or to train"):
        opened(tmp_path)
