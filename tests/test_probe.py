"""`probe`: heads side by side are heads alone, chosen without the held-out part, and the best one becomes a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from jumbo_vit.data.pipeline import EvalSet, Preparation
from jumbo_vit.data.sets import open_data
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks import probe_heads
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.features import store_features
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.probe import Plan, _choose, _with_head, probe
from jumbo_vit.tasks.probe_heads import Bank, Source, Spec, fit, nearest_vote, outputs
from jumbo_vit.tasks.train import train
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL, colour_tree, square
from tests.runs import digit_pictures, small_config

CPU = torch.device("cpu")
PREPARED = Preparation((1, 8, 8), (0.5,), (0.5,))
QUICK = Plan(rates=(0.01, 0.3), epochs=4, batch_size=64)


def made(name: str = TEST_MODEL, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1} if "resnet" not in name else {"in_chans": 1}
    model: Any = timm.create_model(name, **({"num_classes": 10} | sizes | options))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def folder(root: Path, name: str = TEST_MODEL, **options: Any) -> str:
    model = made(name, **options)
    labels = [str(number) for number in range(model.num_classes)]
    save_folder(root / "run" / "model", model, Contract("multiclass", labels, PREPARED))
    return str(root / "run" / "model")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    images = open_data(digit_pictures(), "multiclass", 0, 0.1).train
    found = store_features(made(), images, PREPARED, tmp_path_factory.mktemp("features"), CPU)
    return Source(found, torch.tensor([sample.labels[0] for sample in images.samples]), "jumbo_avg", False, CPU)


def test_kinds_and_widths(source: Source) -> None:
    assert source.widths == {"pieces": 96, "mean": 32, "jumbo_avg": 128, "patches": 32}
    views = source.batch(np.array([3, 7]))
    assert torch.equal(views["jumbo_avg"], torch.cat([views["pieces"], views["patches"]], 1))
    torch.testing.assert_close(views["mean"], views["pieces"].view(2, 3, 32).mean(1))


@pytest.mark.parametrize("opt", ["sgd", "lars"])
def test_heads_side_by_side_are_heads_alone(opt: str, source: Source) -> None:
    places = np.arange(0, 240, 2)
    specs = [Spec(opt, rate) for rate in (0.01, 0.1, 1.0)]
    together = fit(source, places, dict.fromkeys(source.widths, specs), 10, QUICK)
    assert set(together) == set(source.widths)
    for kind in ("pieces", "patches"):
        alone = fit(source, places, {kind: [specs[1]]}, 10, QUICK)
        torch.testing.assert_close(alone[kind].weights[0], together[kind].weights[1], rtol=0, atol=1e-5)
        assert not torch.equal(together[kind].weights[0], together[kind].weights[2])


def test_a_head_is_batch_norm_and_a_linear_layer_trained_by_the_books(source: Source) -> None:
    """Against a plain loop over torch.nn modules and torch.optim.SGD."""
    places = np.arange(240)
    bank = fit(source, places, {"patches": [Spec("sgd", 0.1)]}, 10, QUICK)["patches"]
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(32, affine=False, eps=1e-6), torch.nn.Linear(32, 10))
    start = Bank(32, 10, [Spec("sgd", 0.1)], probe_heads.mix_seed(0, "probe", 32))
    plain[1].load_state_dict({"weight": start.weights[0].detach(), "bias": torch.zeros(10)})
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    factor = probe_heads._schedule(4 * 4)
    for epoch in range(4):
        order = np.random.default_rng(probe_heads.mix_seed(0, "probe order", epoch)).permutation(places)
        for number, part in enumerate(np.array_split(order, 4)):
            optimizer.param_groups[0]["lr"] = 0.1 * 64 / 256 * factor(4 * epoch + number)
            optimizer.zero_grad()
            F.cross_entropy(plain(source.batch(part)["patches"]), source.labels[torch.from_numpy(part)]).backward()
            optimizer.step()
    torch.testing.assert_close(bank.weights[0], plain[1].weight, rtol=0, atol=1e-5)
    x = source.batch(places)["patches"]
    expected = plain.eval()(x)
    torch.testing.assert_close(outputs(source, places, {"patches": bank})["patches"][0], expected, rtol=0, atol=1e-5)
    weight, bias = bank.folded(0)
    torch.testing.assert_close(x @ weight.T + bias, expected, rtol=0, atol=1e-4)


def test_a_diverging_head_harms_no_other(source: Source) -> None:
    specs = [Spec("sgd", 1.3e39), Spec("sgd", 0.1)]
    wild = fit(source, np.arange(240), {"patches": specs}, 10, QUICK)["patches"]
    alone = fit(source, np.arange(240), {"patches": specs[1:]}, 10, QUICK)["patches"]
    assert not wild.weights[0].isfinite().all()
    torch.testing.assert_close(wild.weights[1], alone.weights[0], rtol=0, atol=1e-5)


def test_where_every_head_diverged_it_is_said() -> None:
    row = {"features": "patches", "opt": "sgd", "rate": 9.0, "tune_top1": None, "tune_loss": None}
    good = row | {"tune_top1": 0.5, "tune_loss": 1.0, "rate": 1.0}
    assert _choose([row, good])[0]["rate"] == 1.0
    with pytest.raises(UserError, match=r"every head on the features patches diverged: lower --rates"):
        _choose([row])


def test_neighbours_vote_as_in_the_equations(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_heads, "_ROWS", 7)  # many pieces, the last one smaller
    x = F.normalize(source.batch(np.arange(240))["pieces"]).double()
    expected = []
    for query in x:
        cosine = x @ query
        nearest = torch.argsort(cosine, descending=True)[:5]
        votes = [0.0] * 10
        for place in nearest.tolist():
            votes[int(source.labels[place])] += float(torch.exp(cosine[place] / 0.07))
        expected.append(int(np.argmax(votes)))
    assert nearest_vote(source, source, "pieces", 10, 5).tolist() == expected
    assert nearest_vote(source, source, "pieces", 10, 1).tolist() == source.labels.tolist()


def test_the_held_out_part_chooses_nothing(tmp_path: Path) -> None:
    model = folder(tmp_path)
    first = probe(model, digit_pictures(), QUICK)
    data = tmp_path / "other"
    shutil.copytree(digit_pictures(), data)
    for place, picture in enumerate(sorted((data / "val").rglob("*.png"))):
        picture.rename(data / "val" / str(place % 10) / f"moved-{place}.png")
    second = probe(model, str(data), QUICK)
    assert [row["tune_top1"] for row in first["heads"]] == [row["tune_top1"] for row in second["heads"]]
    assert first["best"]["features"] == second["best"]["features"] and first["best"]["rate"] == second["best"]["rate"]
    assert first["best"]["top1"] > second["best"]["top1"]


def test_rows_and_repetition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path)
    words = ["probe", model, "--data", digit_pictures(), "--rates", "0.01", "0.3", "--opt", "sgd", "lars"]
    words += ["--epochs", "3", "--batch-size", "64", "--json", str(tmp_path / "rows.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "rows.json").read_text())
    assert len(result["heads"]) == 2 * 2 * 4 and len(result["chosen"]) == 4
    assert {row["features"] for row in result["chosen"]} == {"pieces", "mean", "jumbo_avg", "patches"}
    assert result["pictures"] == {"train": 240, "tune": 24, "held_out": 50}
    assert all(0 <= row[name] <= 1 for row in result["chosen"] for name in ("top1", "knn_top1", "tune_top1"))
    said = capsys.readouterr().out
    assert said.count("best on the tuning part") == 1 and "290 computed, 0 stored before" in said
    assert (tmp_path / "features").is_dir()
    assert main(words) == 0
    again = json.loads((tmp_path / "rows.json").read_text())
    assert again["heads"] == result["heads"] and again["chosen"] == result["chosen"]
    assert "0 computed, 290 stored before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        (TEST_MODEL, {"global_pool": "avg"}, {"pieces", "mean", "jumbo_avg", "patches"}),
        ("vit_test_patch8_reg16_32", {"reg_tokens": 2}, {"pieces", "mean", "class", "prefix_avg", "patches"}),
        ("vit_test_patch8_cls_32", {}, {"class", "prefix_avg", "patches"}),
        ("test_resnet", {}, {"head"}),
    ],
)
def test_every_head_becomes_a_model(name: str, options: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    model = folder(tmp_path, name, **options)
    plan = Plan(rates=(0.1,), epochs=2, batch_size=64, neighbours=0)
    result = probe(model, digit_pictures(), plan, save=str(tmp_path / "saved"))
    assert {row["features"] for row in result["chosen"]} == kinds
    assert result["best"]["knn_top1"] is None
    saved, contract = open_folder(tmp_path / "saved")
    assert contract.lineage["probe"]["features"] == result["best"]["features"]
    numbers = evaluate(str(tmp_path / "saved"), digit_pictures())
    assert numbers["top1"] == pytest.approx(result["best"]["top1"], abs=0.03)  # a tie may fall the other way
    before = open_folder(model)[0].state_dict()
    after = saved.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before if not key.startswith(("head.", "fc.")))


@pytest.mark.parametrize("kind", ["pieces", "mean", "jumbo_avg", "patches"])
def test_each_kind_of_head_in_a_model_gives_the_probes_logits(kind: str, source: Source) -> None:
    bank = fit(source, np.arange(240), {kind: [Spec("sgd", 0.1)]}, 10, QUICK)
    expected: Tensor = outputs(source, np.arange(64), bank)[kind][0]
    images = open_data(digit_pictures(), "multiclass", 0, 0.1).train
    pictures = torch.stack([EvalSet(images, "multiclass", PREPARED)[index][0] for index in range(64)])
    model = _with_head(made(), source.features.trunk, kind, *bank[kind].folded(0))
    assert model is not None
    with torch.no_grad():
        torch.testing.assert_close(model(pictures), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rates", "0"], "--rates is 0.0, but must be above 0"),
        (["--batch-size", "1"], "--batch-size is 1, but must be at least 2"),
        (["--tune-fraction", "1"], "--tune-fraction is 1.0, but must be between 0 and 1"),
        (["--knn", "-1"], "--knn is -1, but must be 0 or more"),
        (["--rates", "1e6"], "--rates is 1000000.0, but must be above 0"),
        (["--opt", "adam"], "--opt takes"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder(tmp_path)
    assert main(["probe", model, "--data", digit_pictures(), "--epochs", "9", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_plan_is_checked_in_python_too() -> None:
    with pytest.raises(UserError, match="--epochs is 0"):
        Plan(epochs=0)


def test_features_are_shared_with_a_frozen_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_config(tmp_path / "run", epochs=1))
    probe(str(tmp_path / "run"), digit_pictures(), QUICK)
    words = ["train", "--freeze", "--init-from", str(tmp_path / "run"), "--data", digit_pictures(), "--epochs", "1"]
    assert main([*words, "--out", str(tmp_path / "head"), "--workers", "0", "--logger", "none"]) == 0
    assert "features of 290 pictures: 0 computed, 290 stored before" in capsys.readouterr().out


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree") / "tree"
    colour_tree(root, 12)
    return root


@pytest.fixture(scope="module")
def trained(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("trained") / "run"
    options = {"model": TEST_MODEL, "epochs": 1, "batch_size": 12, "workers": 0, "seed": 5, "val_fraction": 0.25}
    train(TrainConfig(data=str(tree), out=str(out), logger=["none"], **options))
    return str(out)


class TestWhatIsHeldOut:
    """Of a model that drew its held-out part from a tree of classes alone."""

    def held_out(self, model: str, data: Path, tmp_path: Path, **options: Any) -> dict[str, Any]:
        return probe(model, str(data), QUICK, features=str(tmp_path / "features"), device="cpu", **options)

    def test_it_is_that_of_the_training_and_handed_on(self, trained: str, tree: Path, tmp_path: Path) -> None:
        saved = str(tmp_path / "probed")
        found = self.held_out(trained, tree, tmp_path, save=saved)
        assert found["pictures"]["held_out"] == 9 and not any("drawn for this probe" in note for note in found["notes"])
        assert evaluate(trained, str(tree), "cpu")["n"] == evaluate(saved, str(tree), "cpu")["n"] == 9
        again = self.held_out(saved, tree, tmp_path)
        assert again["pictures"] == found["pictures"] and again["features"] == found["features"]

    def test_other_pictures_are_split_anew_and_it_is_said(self, trained: str, tree: Path, tmp_path: Path) -> None:
        grown = tmp_path / "grown"
        shutil.copytree(tree, grown)
        square("red", 99).save(grown / "red" / "more.png")
        found = self.held_out(trained, grown, tmp_path)
        assert any("drawn for this probe, with seed 0" in note for note in found["notes"])

    @pytest.mark.parametrize("options", [{"val_fraction": 0.5}, {"split_seed": 1}])
    def test_what_is_asked_for_is_done(self, trained: str, tree: Path, tmp_path: Path, options: dict[str, Any]) -> None:
        found = self.held_out(trained, tree, tmp_path, **options)
        assert found["pictures"]["held_out"] == (18 if "val_fraction" in options else 3)
        assert any("drawn for this probe" in note for note in found["notes"])

    def test_a_file_is_no_folder(self, trained: str, tree: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"--save .*file is a file"):
            self.held_out(trained, tree, tmp_path, save=str(tmp_path / "file"))
