"""Whatever holds the pictures, a folder, a table, shards or a dataset, they train and score to the same digits."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader

from jumbo_vit.data.check import inspect
from jumbo_vit.data.images import read_image
from jumbo_vit.data.pipeline import EvalSet, Preparation
from jumbo_vit.data.sets import open_data
from jumbo_vit.errors import UnreadableImage
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.train import train
from tests.pictures import colour_folder, square
from tests.runs import differences, state_of
from tests.stores import datasets, good, listed, names, offline, opened, options, png, tar, webdataset
from tests.test_resume import run_until

KINDS = ("csv", "jsonl", "tar", "saved", "parquet")


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train/` and `val/` with pictures of all the kinds that a reader can get wrong; not to be changed."""
    root = colour_folder(tmp_path_factory.mktemp("folder") / "data", train=5, val=3)
    exif = Image.Exif()
    exif[0x0112] = 6
    square("red", 2, (20, 50)).save(root / "train" / "red" / "turned.jpg", exif=exif)
    clear = square("green", 3).convert("RGBA")
    clear.putalpha(100)
    clear.save(root / "val" / "green" / "clear.png")
    deep = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 60
    Image.fromarray(deep).save(root / "train" / "blue" / "deep.png")
    square("green", 5).save(root / "train" / "green" / "moving.gif", save_all=True, append_images=[square("red", 6)])
    return root


@pytest.fixture(scope="module")
def forms(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pictures of `folder`, in the same order, in each form."""
    root = tmp_path_factory.mktemp("forms")
    splits = open_data(str(folder), "multiclass", 0, 0.1)
    parts = {"train": listed(splits.train), "val": listed(splits.val)}
    rows = [(split, path, label) for split, part in parts.items() for path, label in part]
    (root / "list.csv").write_text(
        "path,label,split\n" + "".join(f"{path},{label},{split}\n" for split, path, label in rows)
    )
    (root / "list.jsonl").write_text(
        "".join(json.dumps({"path": path, "label": label, "split": split}) + "\n" for split, path, label in rows)
    )
    (root / "shards").mkdir()
    (root / "parquet" / "data").mkdir(parents=True)
    names = datasets.ClassLabel(names=splits.train.classes)
    features = datasets.Features({"image": datasets.Image(), "label": names})
    saved = {}
    for split, part in parts.items():
        with webdataset.ShardWriter(str(root / "shards" / f"{split}-%06d.tar"), maxcount=7, verbose=0) as writer:
            for number, (path, label) in enumerate(part):
                suffix = Path(path).suffix.removeprefix(".")
                writer.write({"__key__": f"{number:06d}", suffix: Path(path).read_bytes(), "cls": label})
        columns = {
            "image": [{"bytes": Path(path).read_bytes(), "path": None} for path, _ in part],
            "label": [label for _, label in part],
        }
        name = "validation" if split == "val" else split
        saved[name] = datasets.Dataset.from_dict(columns, features=features)
        for number in range(2):
            file = root / "parquet" / "data" / f"{name}-{number:05d}-of-00002.parquet"
            saved[name].shard(2, number, contiguous=True).to_parquet(str(file))
    datasets.DatasetDict(saved).save_to_disk(str(root / "saved"))
    return {
        "csv": root / "list.csv",
        "jsonl": root / "list.jsonl",
        "tar": root / "shards",
        "saved": root / "saved",
        "parquet": root / "parquet",
    }


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(options(folder, out))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_trains_and_scores_to_the_same_digits(
    forms: dict[str, Path], folder: Path, straight: Path, tmp_path: Path, kind: str
) -> None:
    train(options(forms[kind], tmp_path / "run"))
    left, right = state_of(straight), state_of(tmp_path / "run")
    assert differences(left["model"], right["model"]) == []
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == (straight / "metrics.csv").read_bytes()
    expected = evaluate(str(straight / "model"), str(folder))
    found = evaluate(str(straight / "model"), str(forms[kind]))
    expected.pop("notes"), found.pop("notes")
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_has_the_same_pixels_facts_and_bytes(forms: dict[str, Path], folder: Path, kind: str) -> None:
    ours, theirs = opened(folder), opened(forms[kind])
    for left, right in ((ours.train, theirs.train), (ours.val, theirs.val)):
        assert left.classes == right.classes
        assert left.labels == right.labels
        for index in range(len(left)):
            assert left.content(index) == right.content(index)
            for chans in (1, 3):
                assert left.read(index, chans).tobytes() == right.read(index, chans).tobytes()
    left, right = inspect(ours, workers=2)[1], inspect(theirs, workers=2)[1]
    for fact in ("classes", "splits", "sizes", "formats", "modes", "unreadable", "imbalance", "warnings"):
        assert left[fact] == right[fact]
    assert [group["sha256"] for group in left["duplicates"]] == [group["sha256"] for group in right["duplicates"]] != []


def test_names_say_where_a_picture_lies(forms: dict[str, Path]) -> None:
    assert names(opened(forms["tar"]).train)[:8:7] == ["train-000000.tar:000000.png", "train-000001.tar:000007.png"]
    assert names(opened(forms["saved"]).val)[1] == "validation:1"
    rows = names(opened(forms["parquet"]).train)
    assert rows[0] == "data/train-00000-of-00002.parquet:0"
    assert rows[-1] == "data/train-00001-of-00002.parquet:8"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_read_the_same(forms: dict[str, Path], folder: Path, method: str) -> None:
    def parts(*data: Path) -> ConcatDataset[Any]:
        return ConcatDataset([EvalSet(opened(one).val, "multiclass", Preparation((3, 32, 32))) for one in data])

    expected = list(DataLoader(parts(folder, folder, folder), batch_size=5))
    both = parts(forms["tar"], forms["parquet"], forms["saved"])
    found = list(DataLoader(both, batch_size=5, num_workers=1, multiprocessing_context=method))
    for left, right in zip(expected, found, strict=True):
        assert all((one == other).all() for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", ["tar", "saved"])
def test_a_killed_run_goes_on(
    forms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    train(options(forms[kind], tmp_path / "straight"))
    run_until(monkeypatch, options(forms[kind], tmp_path / "run"), 2)
    train(TrainConfig(resume=str(tmp_path / "run"), given=frozenset({"resume"})))
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "run")) == []


def test_a_drawn_held_out_part_is_found_again_by_evaluate(tmp_path: Path) -> None:
    shard = tar(tmp_path / "all.tar", good(count=16))
    train(options(shard, tmp_path / "run", epochs=1, val_fraction=0.25))
    found = evaluate(str(tmp_path / "run"), str(shard))
    assert found["n"] == 4
    assert any("that training held out" in note for note in found["notes"])


def test_a_set_with_a_store_crosses_to_another_process(forms: dict[str, Path]) -> None:
    for kind in KINDS:
        images = opened(forms[kind]).val
        again = pickle.loads(pickle.dumps(images.subset([3, 0])))
        assert again.checksum() == images.subset([3, 0]).checksum()
        assert again.read(0).tobytes() == images.read(3).tobytes()


def test_bytes_are_read_by_the_rules_of_files(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png())
    assert read_image(png()).tobytes() == read_image(tmp_path / "x.png").tobytes()
    for content, reason in ((b"", "is empty"), (b"text", "is not a picture"), (png()[:200], "is cut off")):
        with pytest.raises(UnreadableImage) as caught:
            read_image(content, name="a.tar:x.png")
        assert (caught.value.path, caught.value.reason) == ("a.tar:x.png", reason)
