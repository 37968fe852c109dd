"""A dry run builds all that the run has, says what it would take, and leaves nothing behind."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import yaml

from jumbo_vit.cli.parser import main
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.dry_data import absent, known, make_folder
from jumbo_vit.tasks.dry_probe import dry_probe
from jumbo_vit.tasks.pretrain import pretrain
from jumbo_vit.tasks.pretrain_config import PretrainConfig
from jumbo_vit.tasks.probe import Plan, probe
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL
from tests.runs import TRAIN, VAL, digit_pictures, small_options
from tests.teachers import teacher_folder

RECIPES = Path(__file__).parents[1] / "recipes"


def dry(**options: Any) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = train(TrainConfig(dry_run=True, **options))["stages"]
    return stages


def dry_pretraining(**options: Any) -> dict[str, Any]:
    report: dict[str, Any] = pretrain(PretrainConfig(dry_run=True, **options))["stages"][0]
    return report


def encoder_parameters(**options: Any) -> int:
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 0}
    return sum(p.numel() for p in timm.create_model(TEST_MODEL, **sizes | options).parameters())


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


class TestStarts:
    """Weights to start from that are not there yet."""

    def test_random_ones_stand_in_with_the_run_s_own_defaults(self, tmp_path: Path) -> None:
        train(TrainConfig(**small_options(out=str(tmp_path / "run"), epochs=1)))
        there, missing = (dry(**small_options(init_from=str(tmp_path / name)))[0] for name in ("run", "later/model"))
        assert (
            f"{tmp_path}/later/model is not there: the trial starts from random weights, but the run needs it."
            in (missing["notes"])
        )
        assert not any("is not there" in note for note in there["notes"])
        assert missing["groups"] == there["groups"] and missing["schedule"] == there["schedule"]

    def test_without_a_model_there_is_nothing_to_try(self) -> None:
        options = small_options(init_from="later/model", model=None)
        for tried in (dry, dry_pretraining):
            with pytest.raises(UserError, match="later/model is not there, and with it the model: name it by --model"):
                tried(**options)

    def test_a_part_is_not_trained_on_random_weights(self) -> None:
        with pytest.raises(UserError, match="--init-from later/model: no such folder"):
            dry(**small_options(init_from="later/model", lora_rank=2))

    def test_a_name_is_looked_up(self) -> None:
        with pytest.raises(UserError, match=r"vit_tinny: no such folder or file, and no model of timm"):
            dry(**small_options(init_from="vit_tinny"))


class TestPretraining:
    def test_everything_is_that_of_the_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = dry_pretraining(**small_options(method="mae", epochs=3, lr=0.01, grad_accum_steps=2))
        encoder, extra = found["encoder_parameters"], found["extra_parameters"]
        assert encoder == encoder_parameters() and found["parameters"] == encoder + extra
        # Fixed positions are not trained: 16 patches of the encoder's width, and of the decoder's.
        assert found["trained_parameters"] == encoder + extra - 2 * 16 * 32
        assert sum(group["parameters"] for group in found["groups"]) == found["trained_parameters"]
        assert found["pictures"] == TRAIN and found["updates_per_epoch"] == 4 and found["updates"] == 12
        assert found["masks"] == {"grid": [4, 4], "patches": 16, "kept_patches": 4}
        memory = found["memory"]
        assert memory["weights"] == 4 * found["parameters"] and memory["gradients"] == 4 * found["trained_parameters"]
        out = capsys.readouterr().out
        assert "Of 4x4 patches 12 are masked" in out and "dry run: nothing was written" in out
        assert list(tmp_path.iterdir()) == []

    def test_it_is_what_a_run_then_makes(self, tmp_path: Path) -> None:
        options = small_options(method="mae", epochs=1)
        found = dry_pretraining(**options)
        summary = pretrain(PretrainConfig(out=str(tmp_path / "run"), **options))
        assert (found["encoder_parameters"], found["extra_parameters"], found["masks"]) == (
            summary["parameters"],
            summary["extra_parameters"],
            summary["masks"],
        )
        assert "dry_run: false" in (tmp_path / "run" / "config.yaml").read_text()

    def test_activations_are_those_of_the_patches_that_the_encoder_sees(self) -> None:
        # With a decoder of next to nothing, what is kept is the encoder's: 3 Jumbo pieces and 16 or 128 patches.
        options = small_options(method="mae", img_size="32", patch_size=2, in_chans=1, decoder_width=4, decoder_depth=1)
        few, most = (
            dry_pretraining(**options, decoder_heads=1, mask_ratio=ratio)["memory"]["activations_per_picture"]
            for ratio in (0.9375, 0.5)
        )
        assert 2.5 * few < most

    def test_a_teacher_is_counted_apart(self, tmp_path: Path) -> None:
        teacher = teacher_folder(tmp_path / "teacher", preparation=Preparation((3, 16, 16)), img_size=16)
        found = dry_pretraining(**small_options(in_chans=3, teacher=teacher))
        count = encoder_parameters(img_size=16, patch_size=8, in_chans=3, num_classes=3)
        assert found["method"] == "distill" and found["teachers"] == {teacher: count}
        # Linear layers from Jumbo vector to Jumbo vector and from patch to patch.
        assert found["extra_parameters"] == 96 * 97 + 32 * 33 and found["memory"]["teachers"] == 4 * count
        assert found["encoder_parameters"] == encoder_parameters(in_chans=3)

    def test_a_teacher_without_weights_is_random_and_that_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = timm.create_model

        def offline(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
            if pretrained:
                raise OSError("no network")
            return real(name, **kwargs)

        monkeypatch.setattr(timm, "create_model", offline)
        found = dry_pretraining(**small_options(in_chans=3, teacher="vit_test_patch8_cls_32"))
        assert any("cannot be had here: random ones stand in" in note for note in found["notes"])
        assert found["memory"]["teachers"] == 4 * found["teachers"]["vit_test_patch8_cls_32"] > 0

    def test_absent_data_are_replaced_and_that_is_said(self) -> None:
        options = {"model": TEST_MODEL, "batch_size": 100, "workers": 0, "logger": ["none"]}
        found = dry_pretraining(data="somewhere/tiny-imagenet-100", **options)
        assert found["pictures"] == 25_000 and found["updates_per_epoch"] == 250
        assert found["notes"][0] == "tiny-imagenet-100 is not there: the trial read a made folder."
        assert not any("folders" in note for note in found["notes"])
        with pytest.raises(UserError, match="pets is not there, and its number of pictures and classes is not known"):
            dry_pretraining(data="pets")

    def test_what_the_run_would_refuse_is_refused(self) -> None:
        with pytest.raises(UserError, match="the decoder's width 32 is not a multiple of its 5 heads"):
            dry_pretraining(**small_options(decoder_width=32, decoder_heads=5))
        with pytest.raises(UserError, match=r"--resume takes everything from the run; .* not --dry-run"):
            pretrain(PretrainConfig(resume="run", dry_run=True, given=frozenset({"resume", "dry_run"})))


class TestProbe:
    def test_it_is_what_a_probe_then_does(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        train(TrainConfig(**small_options(out=str(tmp_path / "run"), epochs=1)))
        plan = Plan(rates=(0.01, 0.3), opts=("sgd", "lars"), epochs=3, batch_size=64)
        before = sorted(tmp_path.rglob("*"))
        found = dry_probe(str(tmp_path / "run"), digit_pictures(), plan)
        assert sorted(tmp_path.rglob("*")) == before
        out = capsys.readouterr().out
        assert "rates 0.01 0.3 for a batch of 256, which are 0.0025 0.075 for 64" in out
        real = probe(str(tmp_path / "run"), digit_pictures(), plan, device="cpu")
        stored = [path for folder in real["features"] for path in Path(folder).glob("*.npy")]
        assert found["stored_bytes"] == sum(np.load(path).nbytes for path in stored)
        assert (
            found["pictures"]
            == real["pictures"]
            == {"train": TRAIN, "tune": found["pictures"]["tune"], "held_out": VAL}
        )
        assert found["heads"] == len(real["heads"]) == 16
        assert {row["features"]: row["width"] for row in found["features"]} == {
            row["features"]: row["width"] for row in real["chosen"]
        }
        fit_on = TRAIN - found["pictures"]["tune"]
        assert found["updates"] == 3 * -(-fit_on // 64) and found["updates_of_the_chosen"] == 3 * 4

    def test_a_recipe_before_there_is_a_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        recipe = yaml.safe_load((RECIPES / "in1k_mae_jumbo_base_probe.yaml").read_text()) | {"model": TEST_MODEL}
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        assert main(["probe", "--config", "tiny.yaml", "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "1,281,167 pictures for training" in out and "1,000 classes" in out and "pieces" in out
        assert f"{TEST_MODEL} is the name of a model: random weights stand in for trained ones." in out
        assert "imagenet-1k is not there: the trial read a made folder." in out
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]

    def test_the_name_of_a_model_is_for_a_dry_run_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["probe", TEST_MODEL, "--data", digit_pictures()]) == 2
        said = capsys.readouterr().err
        assert TEST_MODEL in said and said.count("\n") == 1

    def test_a_model_that_is_not_there(self) -> None:
        with pytest.raises(UserError, match=r"there is no runs/later: give a model folder, .* for a dry run alone"):
            dry_probe("runs/later", "digits", Plan())


@pytest.mark.parametrize("name", ["mae_mini", "in1k_mae_jumbo_base"])
def test_recipes_of_pretraining_with_a_tiny_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"model": TEST_MODEL, "img_size": 32, "patch_size": 8, "decoder_width": 32, "decoder_depth": 1}
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) | small | {"decoder_heads": 2}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["pretrain", "--config", "tiny.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "Of 4x4 patches 12 are masked" in out and "memory of one device, on paper" in out
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
