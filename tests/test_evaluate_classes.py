"""Evaluation where data name classes in another way than the model, have a part of them, or several right answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.data import ImageNetInfo

from jumbo_vit.cli.parser import main
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.records import ImageSet, Sample
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model, save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.evaluate_classes import RealScore, SubsetScore, names_for, real_answers
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.score import MulticlassScore
from tests.pictures import COLOURS, TEST_MODEL, colour_tree, square

WNIDS = ImageNetInfo("imagenet-1k").label_names()


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 1,000 classes whose answer is always class 2; its labels are WordNet numbers."""
    model: Any = make_model(TEST_MODEL, num_classes=1000)
    with torch.no_grad():
        model.head.bias[2] += 5.0
        model.head.bias[10] += 4.0
    folder = tmp_path_factory.mktemp("imagenet") / "model"
    save_folder(folder, model, Contract("multiclass", WNIDS, Preparation((3, 32, 32))))
    return folder


def numbered(root: Path, names: list[str]) -> Path:
    for seed, name in enumerate(names):
        (root / name).mkdir(parents=True)
        square("red", seed).save(root / name / f"ILSVRC2012_val_{seed + 1:08}.JPEG", "JPEG")
    return root


# Numbers as names


def test_folders_of_numbers_are_the_classes_in_the_order_of_numbers(imagenet: Path, tmp_path: Path) -> None:
    """As strings 10 comes before 2: it must not become the second class."""
    data = numbered(tmp_path / "v2", ["0", "1", "2", "10"])
    found = evaluate(str(imagenet), str(data), classes_by="index")
    right = {name for name, value in found["per_class_accuracy"].items() if value}
    assert found["top1"] == 0.25 and right == {WNIDS[2]}
    assert f"0 is {WNIDS[0]}, and 999 is {WNIDS[999]}" in " ".join(found["notes"])


def test_without_the_word_numbers_are_refused_with_a_hint(imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the folder 0 .* none of the model's classes.*--classes-by index"):
        evaluate(str(imagenet), str(numbered(tmp_path, ["0", "1"])))


def test_a_number_that_is_no_class_is_refused(imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder 1000"):
        evaluate(str(imagenet), str(numbered(tmp_path, ["0", "1000"])), classes_by="index")


def test_classes_that_are_numbers_themselves_are_not_counted_anew() -> None:
    with pytest.raises(UserError, match="class 0 is called 1; leave it out"):
        names_for("index", ["1", "10", "2"])
    assert names_for("index", ["0", "1", "2"]) == ["0", "1", "2"]
    assert names_for("index", ["cat", "dog"]) == ["0", "1"]


# WordNet numbers


def test_wordnet_numbers_for_a_model_that_has_words(imagenet: Path, tmp_path: Path) -> None:
    info = ImageNetInfo("imagenet-1k")
    words = [info.index_to_description(number) for number in range(1000)]
    seen: dict[str, int] = {}
    for number, word in enumerate(words):  # a label must be unique
        seen[word] = seen.get(word, 0) + 1
        words[number] = word if seen[word] == 1 else f"{word} ({seen[word]})"
    assert len(set(words)) == 1000
    assert names_for("wnid", words) == WNIDS
    with pytest.raises(UserError, match="in their order; this one's 3 classes begin with a"):
        names_for("wnid", ["a", "b", "c"])
    with pytest.raises(UserError, match="in their order"):
        names_for("wnid", [WNIDS[1], WNIDS[0], *WNIDS[2:]])
    with pytest.raises(UserError, match=r"wnidd is not known \(did you mean wnid\?\)"):
        names_for("wnidd", words)


def test_wordnet_numbers_of_a_model_that_has_them(imagenet: Path, tmp_path: Path) -> None:
    data = numbered(tmp_path / "val", [WNIDS[2], WNIDS[5]])
    assert evaluate(str(imagenet), str(data))["top1"] == 0.5
    assert evaluate(str(imagenet), str(data), classes_by="wnid")["top1"] == 0.5


# A part of the classes


def test_a_subset_answers_only_what_is_there(imagenet: Path, tmp_path: Path) -> None:
    """The likeliest class is absent: without --subset all is wrong, with it the next best is right."""
    data = numbered(tmp_path / "r", [WNIDS[10], WNIDS[5]])
    whole, part = (evaluate(str(imagenet), str(data), subset=word) for word in (False, True))
    assert whole["top1"] == 0.0 and part["top1"] == 0.5
    assert list(part["per_class_accuracy"]) == [WNIDS[5], WNIDS[10]]
    assert part["loss"] < whole["loss"] and "top5" not in part
    assert "Answered were the 2 classes of the data only, of 1000." in part["notes"]


def test_a_subset_of_all_classes_is_the_usual_score() -> None:
    logits, targets = torch.randn(20, 7), torch.arange(20) % 7
    usual, same = MulticlassScore(list("abcdefg")), SubsetScore("abcdefg", range(7))
    for score in (usual, same):
        score.update(logits, targets)
    assert usual.result() == same.result()


# Several right answers


def images_named(*names: str) -> ImageSet:
    return ImageSet(WNIDS, [Sample(f"/{name}", (0,)) for name in names], root=Path("/"))


def test_real_labels_are_found_by_the_number_of_the_picture(imagenet: Path, tmp_path: Path) -> None:
    data = numbered(tmp_path / "val", [WNIDS[0], WNIDS[1], WNIDS[2]])
    (tmp_path / "real.json").write_text(json.dumps([[2, 7], [], [10]]))
    found = evaluate(str(imagenet), str(data), real=str(tmp_path / "real.json"))
    assert found["top1"] == pytest.approx(1 / 3)
    assert (found["real_top1"], found["real_top5"]) == (0.5, 1.0)
    assert (found["real_n"], found["real_left_out"]) == (2, 1)


def test_the_list_that_timm_has() -> None:
    images = images_named("ILSVRC2012_val_00000002.JPEG", "n01/ILSVRC2012_val_00050000_n01751748.JPEG")
    assert real_answers("imagenet", images, WNIDS) == [frozenset({970, 795}), frozenset({355})]


def test_right_answers_by_name(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"red/a.png": ["red", "blue"], "b.png": []}))
    labels = list(COLOURS)
    assert real_answers(str(path), images_named("red/a.png", "green/b.png"), labels) == [frozenset({0, 2}), frozenset()]
    with pytest.raises(UserError, match=r"no list of classes for c\.png"):
        real_answers(str(path), images_named("c.png"), labels)
    path.write_text(json.dumps({"a.png": ["rde"]}))
    with pytest.raises(UserError, match=r"a\.png has the class rde, .* \(did you mean red\?\)"):
        real_answers(str(path), images_named("a.png"), labels)


@pytest.mark.parametrize("entry", [[["red"]], [{"red": 1}], [3], [None], ["red", [1]]])
def test_right_answers_that_are_no_names_are_refused(entry: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"a.png": entry}))
    with pytest.raises(UserError, match=r"a\.png has .* in its list, which is no class's name") as caught:
        real_answers(str(path), images_named("a.png"), list(COLOURS))
    assert "\n" not in str(caught.value)


def test_a_picture_without_its_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("[[1], [2]]")
    for name in ("dog.jpg", "ILSVRC2012_val_00000003.JPEG"):
        with pytest.raises(UserError, match="is none of these"):
            real_answers(str(tmp_path / "real.json"), images_named(name), WNIDS)
    with pytest.raises(UserError, match="in their order"):
        real_answers(str(tmp_path / "real.json"), images_named("ILSVRC2012_val_00000001.JPEG"), ["cat", "dog"])


@pytest.mark.parametrize("text", ["3", "[1, 2]", "[[1000]]", '[["a"]]', "nothing"])
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=r"real\.json (holds neither|cannot be read)"):
        real_answers(str(tmp_path / "real.json"), images_named("ILSVRC2012_val_00000001.JPEG"), WNIDS)


def test_a_model_whose_logits_are_not_finite_has_no_accuracy() -> None:
    score = RealScore([frozenset({0})])
    score.update(torch.tensor([[float("nan"), 1.0]]), torch.zeros(1), torch.tensor([0]))
    assert score.result()["real_top1"] != score.result()["real_top1"]


# Another size, and the command


def test_another_size(run: dict[str, Any], colours: Path) -> None:
    assert evaluate(run["out"], str(colours), img_size="64")["top1"] == 1.0
    with pytest.raises(UserError, match="30x30 is not a multiple"):
        evaluate(run["out"], str(colours), img_size="30")


def test_the_page_says_the_size_that_was_used(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    evaluate(run["out"], str(colours), report=str(tmp_path / "page"), img_size="64x48")
    text = (tmp_path / "page" / "index.html").read_text()
    assert "3 x 64 x 48" in text and "3 x 32 x 32" not in text


def test_the_command(run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = colour_tree(tmp_path / "some", 2, names={"red": "2", "green": "1", "blue": "0"})
    words = ["evaluate", run["out"], "--data", str(data), "--json", str(tmp_path / "n.json")]
    assert main([*words, "--classes-by", "index", "--subset"]) == 0
    assert json.loads((tmp_path / "n.json").read_text())["top1"] == 1.0
    assert "Classes were found by index: 0 is blue, and 2 is red." in capsys.readouterr().out
    for extra, message in (
        (["--subset", "--report", str(tmp_path / "page")], "--subset does not go with --report"),
        (["--real", "imagenet", "--subset"], "ask them one after the other"),
        (["--classes-by", "wnid"], "in their order"),
    ):
        assert main([*words, *extra]) == 2
        assert message in capsys.readouterr().err
