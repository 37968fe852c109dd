"""The page of `evaluate --report`: its numbers against the libraries', what it shows, and where it may be written."""

import base64
import io
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.records import ImageSet, Sample
from jumbo_vit.errors import UserError
from jumbo_vit.folder import load, make_model, save_folder
from jumbo_vit.predictor import Contract, Predictor
from jumbo_vit.tasks import report
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.report_numbers import MulticlassOutputs, MultilabelOutputs, interval, probability
from jumbo_vit.tasks.score import MulticlassScore, MultilabelScore
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL, colour_tree, square

NASTY = ["<script>alert('x')</script>", "\"quoted\" & 'so'", "猫 😀", "{{ 7 * 7 }}", "c" * 200]


class Page(HTMLParser):
    """What a page says: `words` of each section by its id, all tags with their attributes, `data` values by key."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, str] = {}
        self.section, self.hidden = "", False
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.section = dict(attrs).get("id") or self.section if tag == "section" else self.section
        self.hidden = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = False

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.words[self.section] = " ".join(f"{self.words.get(self.section, '')} {data}".split())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def data(self) -> dict[str, float]:
        return {str(entry["data-key"]): float(str(entry["value"])) for entry in self.of("data")}

    @property
    def pictures(self) -> list[Image.Image]:
        encoded = [str(entry["src"]).removeprefix("data:image/jpeg;base64,") for entry in self.of("img")]
        return [Image.open(io.BytesIO(base64.b64decode(text))) for text in encoded]


def untrained(folder: Path, labels: list[str], task: str = "multiclass", **contract: Any) -> str:
    """A model folder with random weights."""
    model = make_model(TEST_MODEL, num_classes=len(labels))
    with torch.no_grad():
        model.get_parameter("head.weight").normal_()
    save_folder(folder, model, Contract(task, labels, Preparation((3, 32, 32)), **contract))
    return str(folder)


def table(root: Path, labels: list[str], names: list[str] | None = None) -> str:
    """A CSV with one picture for each text of labels."""
    names = names or [f"{index}.png" for index in range(len(labels))]
    for index, name in enumerate(names):
        square(("red", "green", "blue")[index % 3], index).save(root / name)
    quoted = [[name.replace('"', '""'), text.replace('"', '""')] for name, text in zip(names, labels, strict=True)]
    (root / "data.csv").write_text("path,labels\n" + "".join(f'"{name}","{text}"\n' for name, text in quoted))
    return str(root / "data.csv")


def page_of(model: str, data: str, out: Path) -> tuple[Page, dict[str, Any]]:
    numbers = evaluate(model, data, "cpu", report=str(out))
    return Page(out / "index.html"), numbers


def draw(classes: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator)
    return logits, torch.randint(0, classes, (count,), generator=generator)


def collected(logits: torch.Tensor, targets: torch.Tensor, size: int = 7) -> MulticlassOutputs:
    outputs = MulticlassOutputs([f"c{i}" for i in range(logits.shape[1])])
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        outputs.update(logits[part], targets[part], torch.arange(len(logits))[part])
    return outputs


# Numbers


def test_calibration_error_is_torchmetrics_and_the_bins_give_it() -> None:
    logits, targets = draw(5, 400)
    bins, error = collected(logits, targets).reliability()
    expected = MulticlassCalibrationError(num_classes=5, n_bins=15, norm="l1")(logits.double().softmax(-1), targets)
    assert error == pytest.approx(float(expected), abs=1e-6)  # it counts in float32
    assert len(bins) == 15 and sum(entry.count for entry in bins) == 400
    assert sum(entry.count * abs(entry.right - entry.confidence) for entry in bins) / 400 == pytest.approx(error)


def test_a_probability_of_exactly_one_belongs_to_the_last_bin() -> None:
    bins, error = collected(torch.tensor([[1000.0, 0.0], [1000.0, 0.0]]), torch.tensor([0, 1])).reliability()
    assert bins[-1].count == 2 and bins[-1].right == 0.5 and error == pytest.approx(0.5)


def test_rows_are_scikit_learns_and_absent_classes_have_no_numbers() -> None:
    logits, targets = draw(6, 200)
    targets[targets == 2] = 3
    logits[:, 4] = -99  # never answered
    outputs, score = collected(logits, targets), MulticlassScore([f"c{i}" for i in range(6)])
    score.update(logits, targets)
    numbers = score.result()
    rows = outputs.rows(numbers)
    expected = metrics.classification_report(targets, logits.argmax(1), output_dict=True, zero_division=0.0)
    assert outputs.hits() == round(numbers["top1"] * 200) and outputs.wrong() == 200 - outputs.hits()
    for number, row in enumerate(rows):
        assert row.n == int((targets == number).sum()) and row.given == int((logits.argmax(1) == number).sum())
        assert row.recall == numbers["per_class_accuracy"][row.label]
        if number not in (2, 4):
            stated = [expected[str(number)][key] for key in ("precision", "recall", "f1-score")]
            assert [row.precision, row.recall, row.f1] == pytest.approx(stated)
    assert rows[2].given > 0 and (rows[2].precision, rows[2].recall, rows[2].f1) == (None, None, None)
    assert (rows[4].precision, rows[4].recall, rows[4].f1) == (None, 0.0, 0.0)


def test_confusions_are_scikit_learns_also_when_condensed() -> None:
    logits, targets = draw(6, 300)
    outputs = collected(logits, targets)
    whole = metrics.confusion_matrix(targets, logits.argmax(1))
    counts, _ = outputs.confusion(list(range(6)))
    np.testing.assert_array_equal(counts, whole)
    condensed, right = outputs.confusion([1, 4])
    rest = [0, 2, 3, 5]
    np.testing.assert_array_equal(condensed[:2, :2], whole[np.ix_([1, 4], [1, 4])])
    np.testing.assert_array_equal(condensed[2, :2], whole[np.ix_(rest, [1, 4])].sum(0))
    np.testing.assert_array_equal(condensed[:2, 2], whole[np.ix_([1, 4], rest)].sum(1))
    assert condensed[2, 2] == whole[np.ix_(rest, rest)].sum() and right == whole[rest, rest].sum()
    pairs = outputs.pairs()
    assert all(pair.count == whole[pair.truth, pair.given] and pair.n == whole[pair.truth].sum() for pair in pairs)
    assert sum(pair.count for pair in pairs) == outputs.wrong()
    assert [pair.count for pair in pairs] == sorted((pair.count for pair in pairs), reverse=True)


def test_worst_mistakes_come_first_and_barely_right_answers_too() -> None:
    logits = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.5, 0.0], [4.0, 0.0], [3.0, 0.0]])
    outputs = collected(logits, torch.tensor([1, 1, 0, 0, 1, 1]), size=4)
    wrong, right = outputs.cases(right=False, at_most=3), outputs.cases(right=True, at_most=9)
    assert [case.index for case in wrong] == [4, 0, 5] and [case.index for case in right] == [3, 2]
    assert wrong[0].probability == pytest.approx(1 / (1 + math.exp(-4)))
    assert (wrong[0].truth, wrong[0].given, wrong[0].words) == (("c1",), ("c0",), "truth 1.8 %")


def test_labels_are_scikit_learns_at_their_thresholds() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(90, 3, generator=generator), torch.rand(90, 3, generator=generator).round()
    targets[:, 2] = 0
    labels, thresholds = ["a", "b", "absent"], [0.3, 0.7, 0.5]
    outputs, score = MultilabelOutputs(labels, thresholds), MultilabelScore(labels, thresholds)
    outputs.update(logits, targets, torch.arange(90))
    score.update(logits, targets)
    numbers = score.result()
    rows = outputs.rows(numbers)
    given = logits.double().sigmoid() >= torch.tensor(thresholds)
    for number, row in enumerate(rows[:2]):
        truth, said = targets[:, number].int(), given[:, number].int()
        assert (row.n, row.given, row.threshold) == (truth.sum(), said.sum(), thresholds[number])
        assert row.precision == pytest.approx(metrics.precision_score(truth, said))
        assert row.recall == pytest.approx(metrics.recall_score(truth, said))
        assert row.average_precision == numbers["per_class_ap"][row.label]
    assert np.mean([row.f1 for row in rows[:2] if row.f1 is not None]) == pytest.approx(numbers["f1_macro"])
    assert rows[2].given > 0
    assert [rows[2].precision, rows[2].recall, rows[2].f1, rows[2].average_precision] == [None] * 4
    expected = BinaryCalibrationError(n_bins=15, norm="l1")(logits.double().sigmoid().ravel(), targets.long().ravel())
    assert outputs.reliability()[1] == pytest.approx(float(expected))
    assert outputs.wrong() == int((given != targets.bool()).any(1).sum())


def test_the_surest_wrong_label_ranks_a_picture() -> None:
    outputs = MultilabelOutputs(["a", "b"], None)
    logits = torch.tensor([[2.0, -3.0], [-3.0, 2.5], [1.0, 1.0], [0.1, 5.0]])
    outputs.update(logits, torch.tensor([[0, 1], [0, 0], [1, 1], [1, 1]]), torch.arange(4))
    first, second = outputs.cases(right=False, at_most=9)
    assert (first.index, first.truth, first.given, first.words) == (0, ("b",), ("a",), "b not given")
    assert (second.index, second.truth, second.given, second.words) == (1, (), ("b",), "b given")
    assert first.probability == pytest.approx(1 / (1 + math.exp(-3)))
    assert second.probability == pytest.approx(1 / (1 + math.exp(-2.5)))
    assert [case.index for case in outputs.cases(right=True, at_most=9)] == [3, 2]


def test_wilsons_interval() -> None:
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(1, 1)[1] == 1.0 and interval(0, 1)[0] == 0.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0 %"),
        (1.0, "100.0 %"),
        (0.99999, "> 99.9 %"),
        (1e-9, "< 0.1 %"),
        (0.6471, "64.7 %"),
        (math.nan, "undefined"),
    ],
)
def test_rounding_never_makes_a_class_perfect(value: float, text: str) -> None:
    assert probability(value) == text


# The page


def test_the_page_has_the_numbers_of_the_json(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = colour_tree(tmp_path / "data", 4)
    shutil.copy(data / "red" / "00.png", data / "blue" / "mistaken.png")
    (data / "red" / "text.jpg").write_text("no picture")
    words = ["evaluate", run["out"], "--data", str(data), "--json", str(tmp_path / "n.json"), "--report"]
    assert main([*words, str(tmp_path / "new" / "page")]) == 0
    numbers = json.loads((tmp_path / "n.json").read_text())
    page = Page(tmp_path / "new" / "page" / "index.html")
    assert numbers["report"] == str(tmp_path / "new" / "page" / "index.html")
    assert f"report: {numbers['report']}" in capsys.readouterr().out.splitlines()
    assert page.data == {key: numbers[key] for key in ("top1", "balanced_accuracy", "loss")}
    assert "top5" not in numbers and "top-5" not in page.source
    assert "12 of 13 pictures right" in page.words["score"]
    assert "66.7 % and 98.6 %" in page.words["score"]
    assert "13 scored, 1 skipped" in page.words["score"] and "jumbo-vit 0." in page.words["score"]
    assert "blue taken for red" in page.words["mistakes"] and "blue/mistaken.png" in page.words["mistakes"]
    assert "blue taken for red" in page.words["confusions"]
    assert "red/text.jpg is not a picture" in page.words["pictures"]
    assert all(note in page.words["pictures"] for note in numbers["notes"])
    plain = evaluate(run["out"], str(data))
    assert plain == {key: value for key, value in numbers.items() if key != "report"}


def test_the_page_needs_nothing_else_and_is_the_same_each_time(
    run: dict[str, Any], colours: Path, tmp_path: Path
) -> None:
    page, _ = page_of(run["out"], str(colours), tmp_path / "out")
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#"))
    assert "url(" not in page.source and "@import" not in page.source
    policy = next(entry["content"] for entry in page.of("meta") if entry.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["index.html"]
    first = (tmp_path / "out" / "index.html").read_bytes()
    evaluate(run["out"], str(colours), report=str(tmp_path / "out"))
    assert (tmp_path / "out" / "index.html").read_bytes() == first


def test_without_mistakes(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    page, numbers = page_of(run["out"], str(colours), tmp_path / "out")
    assert numbers["top1"] == 1.0
    assert "There is none: all 12 answers are right" in page.words["mistakes"]
    assert "None: every answer is right" in page.words["confusions"] and "No file was skipped" in page.words["pictures"]
    assert "75.8 % and 100.0 %" in page.words["score"]


def test_a_class_that_is_absent_is_called_so(run: dict[str, Any], tmp_path: Path) -> None:
    data = colour_tree(tmp_path / "data", 3)
    shutil.rmtree(data / "blue")
    shutil.rmtree(data / "green")
    page, _ = page_of(run["out"], str(data), tmp_path / "out")
    assert "blue 0 0 absent absent absent green 0 0 absent absent absent red 3 3 100.0 %" in page.words["classes"]
    assert page.words["confusions"].count("absent") == 2


def test_one_picture(run: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data" / "red").mkdir(parents=True)
    square("red", 0).save(tmp_path / "data" / "red" / "a.png")
    page, _ = page_of(run["out"], str(tmp_path / "data"), tmp_path / "out")
    assert "1 of 1 picture right" in page.words["score"] and len(page.pictures) == 1


def test_names_can_hold_anything(tmp_path: Path) -> None:
    names = [
        f"{i} {text[:100].replace('/', '')}.png" for i, text in enumerate([*NASTY, "<img src=x onerror=alert(1)>"])
    ]
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff<b>"))
    folder.mkdir()
    data = table(folder, [*NASTY, NASTY[0]], [*names[:5], "new\nline \u202e.png"])
    page, numbers = page_of(untrained(tmp_path / "m<i>", NASTY), data, tmp_path / "out")
    assert numbers["n"] == 6
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1 and "img" in tags and not {"b", "i"} & {tag for tag in tags if "<" in tag}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for name in NASTY:
        assert name in page.words["classes"]
    assert "{{ 7 * 7 }}" in page.source and "new\\nline" in page.words["mistakes"]
    assert "\\udcff<b>" in page.words[""]
    assert "<script>alert" not in page.source and "onerror" not in re.sub(r"&lt;.*?&gt;", "", page.source)


def test_many_classes_are_condensed_and_it_says_so(tmp_path: Path) -> None:
    labels = [f"kind {index:03}" for index in range(200)]
    data = table(tmp_path, [labels[index % 150] for index in range(180)])
    page, numbers = page_of(untrained(tmp_path / "model", labels), data, tmp_path / "out")
    assert page.data.keys() == {"top1", "top5", "balanced_accuracy", "loss"}
    assert page.data["top5"] == numbers["top5"]
    assert "Condensed: of 200 classes the 24 that are confused most are shown" in page.words["confusions"]
    cells = [
        entry for entry in page.of("td") if set(str(entry.get("class")).split()) & {"hit", "miss", "none", "others"}
    ]
    assert len(cells) == 25 * 25
    assert page.words["classes"].count("kind ") == 200 and "absent" in page.words["classes"]
    assert len(page.pictures) <= report.WORST + report.BARELY


@pytest.mark.parametrize("classes", [1, 3])
def test_several_labels_a_picture(classes: int, tmp_path: Path) -> None:
    labels = ["a", "b", "rare"][:classes]
    data = table(tmp_path, ["a|b", "b", "", "a"] if classes > 1 else ["a", "", "a", ""])
    model = untrained(tmp_path / "model", labels, "multilabel", thresholds=[0.4, 0.6, 0.5][:classes])
    page, numbers = page_of(model, data, tmp_path / "out")
    assert page.data == {key: numbers[key] for key in ("map", "f1_macro", "f1_micro", "loss")}
    assert "confusions" not in page.words and "average precision" in page.words["classes"]
    assert ("rare 0" in page.words["classes"]) == (classes > 1)
    assert page.words["classes"].count("absent") == (4 if classes > 1 else 0)
    assert len(page.pictures) == 4


def test_pictures_without_any_label(tmp_path: Path) -> None:
    model = untrained(tmp_path / "model", ["a", "b"], "multilabel")
    page, numbers = page_of(model, table(tmp_path, ["", ""]), tmp_path / "out")
    assert math.isnan(numbers["map"]) and math.isnan(page.data["map"])
    assert "undefined" in page.words["score"] and "0.0 %" not in page.words["classes"]


def test_a_model_that_gives_nan(tmp_path: Path) -> None:
    folder = untrained(tmp_path / "model", ["a", "b"])
    model, contract = load(folder).model, load(folder).contract
    with torch.no_grad():
        model.get_parameter("head.bias").fill_(math.nan)
    save_folder(folder, model, contract)
    page, _ = page_of(folder, table(tmp_path, ["a", "b"]), tmp_path / "out")
    assert "For 2 of 2 pictures its output is NaN or infinite" in " ".join(page.words.values())
    assert math.isnan(page.data["top1"]) and page.words.keys() == {"", "score", "pictures"}


# Pictures


def test_thumbnails_are_read_as_the_model_reads_pictures(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    square("red", 0, (100, 300)).save(tmp_path / "turned.jpg", exif=exif)
    clear = np.zeros((50, 50, 4), np.uint8)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    square("blue", 1, (4, 2000)).save(tmp_path / "wide.png")
    (tmp_path / "data.csv").write_text("path,labels\nturned.jpg,a\nclear.png,a\nwide.png,a\n")
    page, _ = page_of(untrained(tmp_path / "model", ["a", "b"]), str(tmp_path / "data.csv"), tmp_path / "out")
    shown = {str(entry["alt"]): picture for entry, picture in zip(page.of("img"), page.pictures, strict=True)}
    assert {name: picture.size for name, picture in shown.items()} == {
        "turned.jpg": (53, 160),
        "clear.png": (50, 50),
        "wide.png": (160, 1),
    }
    assert np.asarray(shown["clear.png"]).min() > 250


def test_a_picture_that_vanished_after_its_scoring(tmp_path: Path) -> None:
    images = ImageSet(["a"], [Sample(str(tmp_path / "gone.png"), (0,))], root=tmp_path)
    outputs = MulticlassOutputs(["a"])
    outputs.update(torch.zeros(1, 1), torch.tensor([0]), torch.tensor([0]))
    contract = Contract("multiclass", ["a"], Preparation((3, 32, 32)))
    predictor = Predictor(make_model(TEST_MODEL, num_classes=1), contract)
    score = MulticlassScore(["a"])
    score.update(torch.zeros(1, 1), torch.tensor([0]))
    numbers = {**score.result(), "skipped": [], "notes": []}
    report.write_report(tmp_path / "index.html", ("m", "d"), predictor, contract, images, outputs, numbers)
    page = Page(tmp_path / "index.html")
    assert "cannot be shown: there is no such file" in page.words["mistakes"] and not page.of("img")


# Where it goes


def test_a_bad_place_is_told_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<!doctype html><title>my own page</title>")
    (tmp_path / "odd" / "index.html").mkdir(parents=True)
    for place, reason in (
        ("file", "is a file"),
        ("file/below", "cannot be written"),
        ("full", r"holds other files, such as mine\.txt"),
        ("site", r"holds other files, such as index\.html"),
        ("odd", r"holds other files, such as index\.html"),
    ):
        with pytest.raises(UserError, match=f"--report .*{place} {reason}.*: give a new or empty folder"):
            evaluate("no model", "no data", report=str(tmp_path / place))
    with pytest.raises(UserError, match="--report is empty"):
        evaluate("no model", "no data", report="")
    assert (tmp_path / "site" / "index.html").read_text().endswith("my own page</title>")


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:  # root may write anywhere, so this is asked as nobody
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=r"locked cannot be written \(Permission denied\)"):
            report.report_file(str(tmp_path / "locked"))
    finally:
        if root:
            os.seteuid(0)


def test_only_our_own_page_is_replaced(tmp_path: Path) -> None:
    model, data = untrained(tmp_path / "model", ["a", "b"]), table(tmp_path, ["a", "b"])
    out = tmp_path / "out"
    page_of(model, data, out)
    (out / "notes.txt").write_text("kept")
    (out / ".index.html.1-2.part").write_text("of an interrupted writing")
    os.utime(out / ".index.html.1-2.part", (0, 0))
    old = (out / "index.html").read_text()
    page, _ = page_of(model, table(tmp_path, ["a", "b", "b"]), out)
    assert page.source != old and (out / "notes.txt").read_text() == "kept"
    assert {entry.name for entry in out.iterdir()} == {"index.html", "notes.txt"}


def test_no_page_where_nothing_could_be_scored(tmp_path: Path) -> None:
    model = untrained(tmp_path / "model", ["a", "b"])
    (tmp_path / "bad.png").write_text("no picture")
    (tmp_path / "data.csv").write_text("path,labels\nbad.png,a\n")
    with pytest.raises(UserError, match="none of the 1 pictures"):
        evaluate(model, str(tmp_path / "data.csv"), report=str(tmp_path / "out"))
    assert not (tmp_path / "out" / "index.html").exists()


def test_the_numbers_may_not_replace_the_page(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    words = ["evaluate", run["out"], "--data", str(colours), "--report", str(tmp_path)]
    assert main([*words, "--json", f"{tmp_path}/../{tmp_path.name}/index.html"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_folders_whose_names_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = (Path(os.fsdecode(bytes(tmp_path) + name)) for name in (b"/data\xff", b"/out\xff"))
    colour_tree(data, 1)
    model = untrained(tmp_path / "model", ["blue", "green", "red"])
    assert main(["evaluate", model, "--data", str(data), "--report", str(out), "--json", f"{tmp_path}/n.json"]) == 0
    numbers = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))
    assert numbers["report"] == f"{tmp_path}/out\\udcff/index.html"
    assert "note: data\\udcff has no held-out part" in capsys.readouterr().out
    assert "data\\udcff has no held-out part" in Page(out / "index.html").words["pictures"]
