"""Training from examples that can be read only one after another: exact resuming, passes, and what is refused."""

import io
import itertools
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jumbo_vit.cli.parser import main
from jumbo_vit.data.digits import digits_splits
from jumbo_vit.data.examples import Reading
from jumbo_vit.data.pipeline import Augmentation, Preparation
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.stream_files import open_files
from jumbo_vit.data.streams import HOPELESS, Stream, StreamBatches, StreamSet
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.train import train
from tests.pictures import square
from tests.runs import differences, digit_pictures, small_command, small_options, state_of
from tests.stores import datasets, offline, png, tar
from tests.test_resume import FULL, run_until

CLASSES = [str(number) for number in range(10)]
COUNT = 100  # of examples in a pass: five updates of 16 do not end with it


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.mktemp("cache")):
        yield


class Listed:
    """A source with a state: rows, one after another."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.next = rows, 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]


def digit_rows() -> list[dict[str, Any]]:
    images = digits_splits().train
    found = []
    for index in range(COUNT):
        buffer = io.BytesIO()
        images.read(index, 1).save(buffer, "PNG")
        found.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": images.samples[index].labels[0]})
    return found


def library_stream(rows: list[dict[str, Any]]) -> Any:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    return datasets.Dataset.from_list(rows, features=features).to_iterable_dataset(num_shards=3)


SOURCES: dict[str, Callable[[], Any]] = {
    "own": lambda: Listed(digit_rows()),
    "library": lambda: library_stream(digit_rows()),
}


def options(out: Path, **changes: Any) -> TrainConfig:
    """A run whose epochs of five updates, windows of 30 and passes of 100 examples end at different times."""
    usual = {"steps_per_epoch": 5, "batch_size": 16, "shuffle_window": 30, "epochs": 2}
    chosen = small_options(out=str(out), val_data=f"{digit_pictures()}/val", **(usual | changes))
    if "data" not in changes:
        chosen.pop("data")
    return TrainConfig(**chosen)


def resumed(out: Path, **given: Any) -> dict[str, Any]:
    return train(TrainConfig(resume=str(out), given=frozenset({"resume"})), **given)


def refusal(config: TrainConfig, stream: Any = None, classes: Any = CLASSES) -> str:
    with pytest.raises(UserError) as caught:
        train(config, stream=stream, classes=classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "accumulate"), [("own", 2), ("library", 1)])
def test_a_killed_run_ends_with_the_same_bits(
    kind: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options_of(name: str) -> TrainConfig:
        return options(tmp_path / name, **FULL, grad_accum_steps=accumulate)

    straight = train(options_of("straight"), stream=SOURCES[kind](), classes=CLASSES)
    assert straight["stream"]["used"] == 10 * 16 * accumulate
    for updates in (4, 8):
        out = tmp_path / str(updates)
        run_until(monkeypatch, options_of(out.name), updates, stream=SOURCES[kind](), classes=CLASSES)
        assert resumed(out, stream=SOURCES[kind]())["stream"] == straight["stream"]
        assert differences(state_of(tmp_path / "straight"), state_of(out)) == []
        for name in ("model/model.safetensors", "metrics.csv"):
            assert (tmp_path / "straight" / name).read_bytes() == (out / name).read_bytes()


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The digits as tar shards, parquet files and a saved dataset, in folders with a part that is not for training."""
    root = tmp_path_factory.mktemp("forms [1]")
    rows = digit_rows()
    features = library_stream(rows).features
    for name, part in (("train-0", rows[:60]), ("train-1", rows[60:]), ("val-0", rows[:2])):
        members = [(f"{n:03}.png", row["image"]["bytes"]) for n, row in enumerate(part)]
        members += [(f"{n:03}.cls", str(row["label"]).encode()) for n, row in enumerate(part)]
        tar(root / "tar" / f"{name}.tar", sorted(members))
        dataset = datasets.Dataset.from_list(part, features=features)
        (root / "parquet").mkdir(exist_ok=True)
        dataset.to_parquet(str(root / "parquet" / f"{name}.parquet"))
    whole = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict({"train": whole}).save_to_disk(str(root / "saved"), num_shards={"train": 2})
    return {"tar": root / "tar", "parquet": root / "parquet", "saved": root / "saved"}


@pytest.mark.parametrize("kind", ["tar", "parquet", "saved"])
def test_files_are_read_as_a_stream_and_resumed_exactly(
    forms: dict[str, Path], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = CLASSES if kind == "tar" else None  # the others state them
    given = {"data": str(forms[kind]), "streaming": True, "classes": classes}
    straight = train(options(tmp_path / "straight", **given))
    assert straight["stream"] == {"used": 160, "passes": 1, "left_out": 0, "window": 30}
    assert straight["classes"] == CLASSES and "has 2 files" in " ".join(straight["notes"])
    run_until(monkeypatch, options(tmp_path / "run", **given), 4)  # the state stands within a file
    resumed(tmp_path / "run")
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "run")) == []


def test_each_form_gives_the_same_examples(forms: dict[str, Path]) -> None:
    def content(kind: str) -> list[tuple[bytes, int]]:
        stream = Stream(open_files(str(forms[kind]), 0), CLASSES, "multiclass", 0, 7)
        examples = [stream.take() for _ in range(COUNT)]
        assert stream.state_dict()["passes"] == 0
        return sorted((bytes(example.content()), example.labels[0]) for example in examples)

    expected = sorted((row["image"]["bytes"], row["label"]) for row in digit_rows())
    assert all(content(kind) == expected for kind in forms)


def test_a_pass_takes_the_files_in_an_order_of_its_own(forms: dict[str, Path]) -> None:
    stream = Stream(open_files(str(forms["tar"]), 0), CLASSES, "multiclass", 0, 1)
    pictures = [row["image"]["bytes"] for row in digit_rows()]
    begins = [drawn(stream, COUNT)[0] for _ in range(8)]
    assert {*begins} == {pictures[0], pictures[60]}


def test_from_the_command_line(forms: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = small_command(tmp_path / "run", data=str(forms["parquet"]), val_data=f"{digit_pictures()}/val")
    assert main(["train", *words, "--streaming", "--steps-per-epoch", "3"]) == 0
    text = capsys.readouterr().out
    assert "a stream, shuffled in windows of 1000 examples" in text and "read to its end 1 times" in text
    assert f"--data {digit_pictures()}/val" in text
    again = main(["train", *words, "--streaming"])
    assert again == 2 and "needs --steps-per-epoch" in capsys.readouterr().err


def test_names_beside_shards_are_the_classes(tmp_path: Path) -> None:
    tar(tmp_path / "train" / "0.tar", [("1.png", png()), ("1.cls", b"1")])
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert open_files(str(tmp_path), 0).classes == ["cat", "dog"]
    (tmp_path / "train" / "classes.txt").write_text("owl\nemu\n")
    assert open_files(str(tmp_path), 0).classes == ["owl", "emu"]


def test_tables_that_number_their_classes_differently_are_refused(tmp_path: Path) -> None:
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        table = datasets.Dataset.from_list([{"image": {"bytes": png(), "path": None}, "label": n} for n in (0, 1)])
        table = table.cast_column("label", datasets.ClassLabel(names=names)).cast_column("image", datasets.Image())
        table.to_parquet(str(tmp_path / f"train-{number}.parquet"))
    with pytest.raises(UserError, match="equal numbers mean different classes"):
        list(open_files(str(tmp_path), 0))


@pytest.mark.parametrize("value", [2, [2], (2, "0"), ["10", 2]])
def test_a_number_among_names_that_are_numbers_is_doubtful_also_in_a_list(value: object) -> None:
    reading = Reading("image", ["0", "1", "10", "2"], "multilabel")
    with pytest.raises(UserError, match="the label 2 may be a number or a name"):
        reading.example({"image": png(), "labels" if isinstance(value, list | tuple) else "label": value}, "first")


def test_a_url_is_read_like_a_path(forms: dict[str, Path]) -> None:
    for kind, ending in (("tar", ".tar"), ("parquet", ".parquet")):
        copy = forms[kind].parent.parent / f"plain-{kind}"
        shutil.copytree(forms[kind], copy)
        for url in (f"file://{copy}/train-*{ending}", f"file://{copy}/train-{{0..1}}{ending}"):
            source = open_files(url, 0)
            assert len(source.files) == 2 and sum(1 for _ in source) == COUNT


def drawn(stream: Stream, count: int) -> list[bytes]:
    """What so many examples hold, each counted as used."""
    found = []
    for _ in range(count):
        example = stream.take()
        stream.count(example.labels)
        found.append(example.picture)
    return found


@given(count=st.integers(1, 25), window=st.integers(1, 30), taken=st.integers(0, 80), seed=st.integers(0, 3))
def test_any_state_leads_to_the_same_examples(count: int, window: int, taken: int, seed: int) -> None:
    def made() -> Stream:
        return Stream(Listed([{"image": b"%d" % n, "label": "ab"[n % 2]} for n in range(count)]), "ab", *how)

    how: Any = ("multiclass", seed, window)
    straight = made()
    names = drawn(straight, taken)
    state = json.loads(json.dumps(straight.state_dict()))
    rest = drawn(straight, 2 * count)
    again = made()
    again.load_state_dict(state)
    assert drawn(again, 2 * count) == rest
    whole = [*names, *rest]
    for number in range(len(whole) // count):  # every pass has each example once
        assert {*whole[number * count : (number + 1) * count]} == {b"%d" % n for n in range(count)}
    assert again.passes == straight.passes == (len(whole) - 1) // count


def test_the_window_shuffles_and_passes_differ() -> None:
    def order(window: int) -> list[bytes]:
        stream = Stream(Listed([{"image": b"%d" % n, "label": 0} for n in range(20)]), "ab", "multiclass", 0, window)
        return drawn(stream, 40)

    plain = [b"%d" % n for n in range(20)]
    assert order(1) == [*plain, *plain]
    mixed = order(10)
    assert mixed[:20] != plain and mixed[:20] != mixed[20:] and {*mixed[:10]} == {*plain[:10]}


def test_batches_are_those_of_an_epoch_without_a_rest() -> None:
    ours, theirs = StreamBatches(3, 4, 0, accumulate=2), EpochBatches(24, 4, 0, accumulate=2, shuffle=False)
    for start in (0, 1):
        for batches in (ours, theirs):
            batches.epoch, batches.start = 5, start
        assert list(ours) == list(theirs)
        assert [ours.update_size(n) for n in range(ours.updates)] == [8, 8, 8] and len(ours) == len(theirs)


def tensors(rows: list[Any], classes: Any = "ab", task: Any = "multiclass", count: int = 1) -> list[Any]:
    stream = Stream(Listed(rows), classes, task, 0, 1)
    pictures = StreamSet(stream, Preparation((3, 32, 32)), Augmentation())
    return [pictures[draw] for draw in itertools.islice(itertools.chain(*StreamBatches(1, count, 0)), count)]


def test_pictures_come_in_many_types(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png("green", 4))
    picture = square("green", 4)
    kinds = [png("green", 4), picture, np.asarray(picture), tmp_path / "a.png", str(tmp_path / "a.png")]
    kinds += [{"bytes": png("green", 4), "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}]
    found = [tensors([{"image": kind, "label": "b"}])[0] for kind in kinds]
    for image, target, weight in found:
        assert torch.equal(image, found[0][0]) and target.item() == 1 and weight.item() == 1


@pytest.mark.parametrize(
    ("label", "task", "target"),
    [
        ("b", "multiclass", 1),
        (1, "multiclass", 1),
        (np.int64(1), "multiclass", 1),
        (torch.tensor(1), "multiclass", 1),
        (["a", "c"], "multilabel", [1, 0, 1]),
        ([0, 2], "multilabel", [1, 0, 1]),
        (np.array([0, 2]), "multilabel", [1, 0, 1]),
        ([], "multilabel", [0, 0, 0]),
    ],
)
def test_labels_come_in_many_types(label: Any, task: str, target: Any) -> None:
    assert tensors([{"image": png(), "label": label}], "abc", task)[0][1].tolist() == target


@pytest.mark.parametrize(
    ("label", "classes", "message"),
    [
        ("cart", ["car", "bus"], "cart is none of the classes (did you mean car?); they are car, bus"),
        (2, ["1", "2", "3"], "the label 2 may be a number or a name"),
        (["a", "b"], "ab", "2 labels, a, b, where multiclass needs one"),
    ],
)
def test_a_label_that_is_no_class_ends_the_run(label: Any, classes: Any, message: str) -> None:
    with pytest.raises(UserError, match="example 1 of pass 1") as caught:
        tensors([{"image": png(), "label": label}], classes)
    assert message in str(caught.value)


def test_what_cannot_be_used_is_counted_named_and_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = digit_rows()
    rows[3] = {"image": {"bytes": b"no picture", "path": "bad.png"}, "label": 1}
    rows[50] = {"image": rows[50]["image"], "label": None}
    rows[60] = {"label": 1}
    straight = train(options(tmp_path / "straight"), stream=Listed(rows), classes=CLASSES)
    assert straight["stream"] == {"used": 160, "passes": 1, "left_out": 5, "window": 30}
    found = {entry["path"]: entry["reason"] for entry in straight["skipped"]}
    assert found["bad.png"].startswith("is damaged") or found["bad.png"].startswith("is not")
    assert found["example 51 of pass 1"] == "has no label" and "no pictures" in found["example 61 of pass 1"]
    assert sum(straight["class_counts"].values()) == 160
    run_until(monkeypatch, options(tmp_path / "run"), 8, stream=Listed(rows), classes=CLASSES)
    assert resumed(tmp_path / "run", stream=Listed(rows))["skipped"] == straight["skipped"]
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "run")) == []


def test_a_stream_that_gives_nothing_ends_the_run(tmp_path: Path) -> None:
    assert refusal(options(tmp_path / "a"), Listed([])).startswith("the stream gives no example: ")
    bad = {"image": b"", "label": 1}
    text = refusal(options(tmp_path / "b"), Listed([bad] * 7))
    assert text.startswith("none of the 7 examples of pass 1 of the stream can be used, such as example ")

    class Endless(Listed):
        def __iter__(self) -> Iterator[Any]:
            return itertools.repeat(bad)

    assert (
        f"none of the first {HOPELESS} examples of the stream can be used, such as example 1 of pass 1: is empty"
        in refusal(options(tmp_path / "c", shuffle_window=1), Endless([]))
    )

    class Once(Listed):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    text = refusal(options(tmp_path / "d"), Once(digit_rows()))
    assert "no example when it is started again after 1 passes" in text

    class Broken(Listed):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            raise OSError("connection reset")

    assert "broke off after 90 examples or more: connection reset" in refusal(
        options(tmp_path / "e"), Broken(digit_rows())
    )


def test_a_stream_without_an_exact_state_is_refused(tmp_path: Path) -> None:
    rows = digit_rows()
    assert "list has not: give one" in refusal(options(tmp_path / "run"), rows)
    shuffled = library_stream(rows).shuffle(buffer_size=10)
    assert "shuffled by .shuffle()" in refusal(options(tmp_path / "run"), shuffled)
    assert "shuffled by .shuffle()" in refusal(options(tmp_path / "run"), shuffled.skip(2))

    class Odd(Listed):
        def state_dict(self) -> dict[str, Any]:
            return {"next": [np.int64(self.next)]}

    assert "state_dict() holds a int64" in refusal(options(tmp_path / "run"), Odd(rows))
    assert "yields list, where a mapping" in refusal(options(tmp_path / "run"), Listed([[1, 2]]))


def test_going_on_needs_the_stream_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rows = tmp_path / "run", digit_rows()
    run_until(monkeypatch, options(out), 4, stream=Listed(rows), classes=CLASSES)
    with pytest.raises(UserError, match="go on with it by train"):
        resumed(out)
    with pytest.raises(UserError, match="does not come back to the examples"):
        resumed(out, stream=Listed(rows[1:]))
    with pytest.raises(UserError, match="has the classes"):
        resumed(out, stream=Listed(rows), classes=CLASSES[::-1])
    assert resumed(out, stream=Listed(rows), classes=CLASSES)["epochs"] == 2
    assert resumed(out)["epochs"] == 2  # finished, so that nothing is read


def test_other_files_than_before_are_refused(
    forms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shutil.copytree(forms["parquet"], tmp_path / "data")
    run_until(monkeypatch, options(tmp_path / "run", data=str(data), streaming=True), 4)
    (data / "train-1.parquet").rename(data / "train-2.parquet")
    with pytest.raises(UserError, match="are not those that the run began with"):
        resumed(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps_per_epoch": None}, "needs --steps-per-epoch"),
        ({"val_data": None}, "needs --val-data"),
        ({"folds": 3}, "allows no --folds"),
        ({"folds": 3, "fold": 1}, "allows no --folds"),
        ({"seeds": 2}, "allows no --seeds"),
        ({"balance": "weights"}, "allows no --balance"),
        ({"balance": "sampler"}, "allows no --balance"),
        ({"val_fraction": 0.2}, "allows no --val-fraction"),
        ({"split_seed": 3}, "allows no --split-seed"),
        ({"devices": 2}, "read by one process, not 2"),
        ({"shuffle_window": 0}, "--shuffle-window is 0"),
        ({"data": "pets"}, "either a stream or pets"),
    ],
)
def test_options_that_do_not_go_with_a_stream(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = TrainConfig(**small_options(out=str(tmp_path), data="digits", val_data="x", steps_per_epoch=2) | changes)
    assert message in refusal(config, Listed([]))


def test_options_that_need_a_stream(tmp_path: Path) -> None:
    for name, value in (("val_data", "x"), ("steps_per_epoch", 3), ("shuffle_window", 5), ("classes", ["a", "b"])):
        changes = {"out": str(tmp_path), name: value}
        text = refusal(TrainConfig(**small_options(**changes)), classes=None)
        assert f"--{name.replace('_', '-')} is for a run on a stream" in text
    for classes in (None, ["a"], ["a", "a"], "ab"):
        text = refusal(options(tmp_path), Listed([]), classes)
        assert "needs the names of all classes" in text
    stated = library_stream(digit_rows())
    assert "name their classes 0, 1, " in refusal(options(tmp_path), stated, CLASSES[::-1])
    assert "reads files, not the digits" in refusal(options(tmp_path, streaming=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "none", "there is no "),
        (lambda path: path / "a.csv", "of the kind .csv"),
        (lambda path: path, "no tar, parquet or saved files"),
        (lambda path: path / "cut.tar", "cut.tar cannot be read"),
        (lambda path: path / "between.tar", "between.tar is cut off"),
        (lambda path: path / "joined.tar", "joined.tar holds more behind its end"),
        (lambda path: path / "cut.parquet", "cut.parquet cannot be read"),
    ],
)
def test_files_that_are_no_stream(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,label\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    whole = tar(tmp_path / "whole", [("1.png", png()), ("1.cls", b"1"), ("2.png", png()), ("2.cls", b"2")])
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:-10000])
    (tmp_path / "joined.tar").write_bytes(2 * whole.read_bytes())
    with tarfile.open(whole) as archive:
        between = archive.getmembers()[2].offset
    (tmp_path / "between.tar").write_bytes(whole.read_bytes()[:between])
    data = make(tmp_path)
    if data == tmp_path:
        data = tmp_path / "folder"
        data.mkdir()
    config = options(tmp_path / "run", data=str(data), streaming=True)
    assert message in refusal(config)


def test_samples_of_a_shard_that_are_none_are_named(tmp_path: Path) -> None:
    members = [("1.png", png()), ("1.cls", b"0"), ("2.png", png()), ("3.cls", b"0"), ("4.png", png()), ("4.png", png())]
    members += [("4.cls", b"1"), (".hidden.png", png()), ("5.png", png()), ("5.json", b'{"label": "b"}')]
    stream = Stream(open_files(str(tar(tmp_path / "a.tar", members)), 0), "ab", "multiclass", 0, 1)
    assert [stream.take().name for _ in range(2)] == ["a.tar:1", "a.tar:5"]
    assert [name for name, _ in stream.named] == ["a.tar:2", "a.tar:3", "a.tar:4"]


def test_a_damaged_picture_of_the_library_is_left_out() -> None:
    rows = digit_rows()[:4]
    rows[1]["image"] = {"bytes": b"damaged", "path": None}
    pictures = StreamSet(
        Stream(library_stream(rows), CLASSES, "multiclass", 0, 1), Preparation((3, 8, 8)), Augmentation()
    )
    for draw in next(iter(StreamBatches(1, 3, 0))):
        assert pictures[draw][0].shape == (3, 8, 8)
    assert pictures.stream.left_out == 1


def test_a_dataset_that_was_looked_into_begins_at_its_beginning() -> None:
    looked = library_stream(digit_rows()[:9])
    assert len(list(looked)) == 9
    for source in (looked, looked.map(lambda row: {"label": row["label"]}), looked.with_format("numpy")):
        next(iter(source))
        stream = Stream(source, CLASSES, "multiclass", 0, 4)
        drawn(stream, 9)
        assert stream.passes == 0


def test_a_damaged_state_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, options(out), 4, stream=Listed(digit_rows()), classes=CLASSES)
    whole = torch.load(out / "last.ckpt", weights_only=True)
    changes = [("place", "x"), ("counts", [1]), ("named", 3), ("passes", None), ("start", {"nxt": 1}), ("start", 7)]
    for key, value in changes:
        torch.save(whole | {"stream": whole["stream"] | {key: value}}, out / "last.ckpt")
        with pytest.raises(UserError, match=r"is damaged|does not begin where it should"):
            resumed(out, stream=Listed(digit_rows()))
    torch.save(whole | {"stream": None}, out / "last.ckpt")
    with pytest.raises(UserError, match="is damaged"):
        resumed(out, stream=Listed(digit_rows()))


def test_a_picture_of_pillow_is_not_changed() -> None:
    picture = Image.new("RGB", (32, 32), "red")
    rows = [{"image": picture, "label": 0}] * 3
    tensors(rows, count=3)
    assert picture.getcolors() == [(1024, (255, 0, 0))]
