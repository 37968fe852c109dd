"""A dry run builds all that the run has, says what it would take, and leaves nothing behind."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import timm
import yaml

from jumbo_vit.cli.parser import main
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.dry_data import absent, known, make_folder
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL
from tests.runs import TRAIN, small_options

RECIPES = Path(__file__).parents[1] / "recipes"


def dry(**options: Any) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = train(TrainConfig(dry_run=True, **options))["stages"]
    return stages


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_with_data_everything_is_that_of_the_run(tmp_path: Path) -> None:
    (found,) = dry(**small_options(epochs=3, lr=0.01, layer_decay=0.5, grad_accum_steps=2, model_ema=True))
    assert found["pictures"] == TRAIN and found["pictures_per_update"] == 64
    assert found["updates_per_epoch"] == 4 and found["updates"] == 12
    model = timm.create_model(TEST_MODEL, img_size=8, patch_size=2, in_chans=1)
    count = sum(p.numel() for p in model.parameters())
    assert found["parameters"] == found["trained_parameters"] == count
    assert sum(group["parameters"] for group in found["groups"]) == count
    assert max(group["lr"] for group in found["groups"]) == 0.01
    assert min(group["lr"] for group in found["groups"]) < 0.005
    memory = found["memory"]
    assert memory["weights"] == memory["gradients"] == memory["averaged_weights"] == 4 * count
    assert 8 * count <= memory["optimizer"] < 8 * count + 1000 and memory["ddp_buckets"] == 0
    parts = [value for name, value in memory.items() if name not in ("total", "activations_per_picture")]
    assert memory["total"] == sum(parts)
    assert list(tmp_path.iterdir()) == []


def test_activations_grow_with_the_batch_and_not_with_the_rest() -> None:
    few, many = (dry(**small_options(batch_size=size))[0]["memory"] for size in (2, 32))
    assert many["activations"] - few["activations"] == 30 * few["activations_per_picture"]
    assert many["total"] - few["total"] == many["activations"] - few["activations"]


def test_several_devices_need_no_several_devices() -> None:
    ddp, sharded = (dry(**small_options(devices=4, nodes=2, strategy=name))[0] for name in ("ddp", "fsdp2"))
    assert ddp["pictures_per_update"] == 32 * 8
    assert ddp["memory"]["ddp_buckets"] == ddp["memory"]["gradients"] > 0
    assert sharded["memory"]["weights"] == ddp["memory"]["weights"] // 8 and sharded["memory"]["ddp_buckets"] == 0


def test_the_schedule_is_that_of_the_whole_run() -> None:
    (found,) = dry(**small_options(epochs=10, lr=0.1, min_lr=0.001, warmup_epochs=1, patch_drop=(0.8, 0.2)))
    rows = found["schedule"]
    assert [row["update"] for row in rows] == [0, 8, 20, 40, 60, 79]
    assert rows[0]["lr"] == pytest.approx(0.001) and rows[1]["lr"] == pytest.approx(0.1)
    assert 0.001 <= rows[-1]["lr"] < 0.0012
    assert rows[0]["patch_drop"] == 0.8 and rows[-1]["patch_drop"] == pytest.approx(0.2)


def test_each_stage_starts_from_the_one_before(tmp_path: Path) -> None:
    options = small_options(stages=[{"img_size": 8, "epochs": 4}, {"img_size": 12, "lr": 1e-4}])
    options |= {"epochs": None, "img_size": None}
    first, second = dry(**options)
    assert first["input_size"] == [1, 8, 8] and second["input_size"] == [1, 12, 12]
    assert (first["epochs"], second["epochs"]) == (4, 100)
    assert any(note.startswith("from stage-1/model: ") and "pos_embed" in note for note in second["notes"])
    assert list(tmp_path.iterdir()) == []


def test_absent_data_are_replaced_and_that_is_said() -> None:
    (found,) = dry(data="somewhere/cifar10", model=TEST_MODEL, batch_size=100)
    assert found["pictures"] == 50_000 and found["updates_per_epoch"] == 500 and found["classes"] == 10
    assert "cifar10 is not there: the trial read a made folder with as many classes." in found["notes"]
    with pytest.raises(UserError, match="pets is not there, and its number of pictures and classes is not known"):
        dry(data="pets")
    assert absent("nowhere") and not absent("digits") and not absent("shards/*.tar")
    assert known("/data/ImageNet_1k").train == 1_281_167


def test_a_made_folder_names_1000_classes_as_imagenet_does(tmp_path: Path) -> None:
    make_folder(tmp_path, 1000, 3)
    assert (tmp_path / "train" / "n01440764" / "made.jpg").is_file()
    assert len(list((tmp_path / "val").iterdir())) == 1000


def test_a_teacher_without_weights_is_random_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = timm.create_model

    def offline(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
        if pretrained:
            asked.append(name)
            raise OSError("no network")
        return real(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    stages = [{"img_size": 8, "epochs": 2}, {"img_size": 12, "epochs": 2}]
    options = small_options(stages=stages, teacher=["vit_test_patch8_cls_32"], in_chans=1, smoothing=0.0)
    found = dry(**options | {"epochs": None, "img_size": None})
    for stage in found:
        assert stage["teachers"] == {"vit_test_patch8_cls_32": stage["memory"]["teachers"] // 4}
        assert any("cannot be had here: random ones stand in" in note for note in stage["notes"])
    assert asked == ["vit_test_patch8_cls_32"]  # the second stage does not ask again


def test_what_the_run_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown model"):
        dry(**small_options(model="jumbo_vit_tinny"))
    with pytest.raises(UserError, match="not a multiple"):
        dry(**small_options(img_size="9"))
    with pytest.raises(UserError, match="reads no stream"):
        dry(**small_options(streaming=True, val_data="x", steps_per_epoch=3))


def test_several_runs_are_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    dry(**small_options(seeds=3))
    assert "several runs; this is what one of them takes" in capsys.readouterr().out


def test_a_fold_has_its_own_number_of_pictures() -> None:
    (one,) = dry(**small_options(folds=4))
    (same,) = dry(**small_options(folds=4, fold=1))
    assert one["pictures"] == same["pictures"] == TRAIN * 3 // 4 and one["updates"] == same["updates"] == 2 * 6
    (found,) = dry(data="cifar10", model=TEST_MODEL, folds=5)
    assert found["pictures"] == 40_000


def test_stages_are_checked_as_for_the_run() -> None:
    with pytest.raises(UserError, match="reads no stream"):
        dry(**small_options(stages=[{"epochs": 1}, {"streaming": True, "val_data": "x", "steps_per_epoch": 3}]))
    with pytest.raises(UserError, match="stage 2 has another model than stage 1"):
        dry(**small_options(stages=[{"epochs": 1}, {"model_args": "share_jumbo_mlp=false"}]))


def test_sequences_are_measured_at_their_longest() -> None:
    options: dict[str, Any] = {"data": "cifar10", "model": "naflexvit_jumbo_tiny_patch16", "naflex_loader": True}
    options |= {"batch_size": 2, "model_args": ["depth=1"]}
    each = {
        name: dry(**options, naflex_train_seq_lens=lengths)[0]["memory"]["activations_per_picture"]
        for name, lengths in (("short", [64]), ("long", [64, 256]), ("usual", None))
    }
    assert 3 * each["short"] < each["long"] and each["short"] < each["usual"] < each["long"]


@pytest.mark.parametrize("name", ["two_stages_mini", "token_dropping_mini", "in1k_jumbo_small_no_teacher"])
def test_recipes_with_a_tiny_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) | {"model": TEST_MODEL, "patch_size": 8}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    before = set(Path(tempfile.gettempdir()).glob("jumbo-vit-dry-run-*"))
    assert main(["train", "--config", "tiny.yaml", "--dry-run"]) == 0
    assert set(Path(tempfile.gettempdir()).glob("jumbo-vit-dry-run-*")) <= before
    out = capsys.readouterr().out
    assert ("stage 2 of 2" in out) == ("stages" in recipe) and "memory of one device, on paper" in out
    assert ("dropped" in out) == ("patch_drop" in recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
