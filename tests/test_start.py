"""--init-from: what is copied, resized, folded, new and left over, and that the report says so truly."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from jumbo_vit.checkpoints import LoadReport, read_weights
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model, save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.train import train
from tests.golden import random_weights
from tests.pictures import TEST_MODEL, colour_folder, colour_tree

LABELS = ["a", "b", "c"]
SMALL_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 32, "patch_size": 8}


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    return model.eval()


def jumbo(**options: Any) -> Any:
    return randomised(make_model(TEST_MODEL, **{"num_classes": 3, **options}), seed=1)


def folder_of(model: Any, path: Path, labels: list[str] | None = None) -> Path:
    size = model.patch_embed.img_size
    chans = model.patch_embed.proj.in_channels
    preparation = Preparation((chans, *size), (0.5,) * chans, (0.25,) * chans)
    save_folder(path, model, Contract("multiclass", labels or LABELS, preparation))
    return path


def file_of(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def started(model: nn.Module, source: Path, labels: list[str] | None = None) -> LoadReport:
    """The report, checked against what happened to every tensor."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = start_from(model, str(source), labels or LABELS)
    after = model.state_dict()
    weights = source / "model.safetensors" if source.is_dir() else source
    given = read_weights(weights)
    taken = [*report.loaded, *report.resized, *report.folded]
    assert sorted([*taken, *report.new]) == sorted(after)
    unused = [entry.split(" ")[0] for entry in report.unused]
    scales = [name for name in given if name.endswith(".gamma") and name not in after]
    assert sorted([*taken, *unused, *scales]) == sorted(given)
    for name in report.loaded:
        assert torch.equal(after[name], given[name])
    for name in report.resized:
        assert after[name].shape == before[name].shape != given[name].shape
    for name in report.folded:
        assert after[name].shape == given[name].shape and not torch.equal(after[name], given[name])
    for name in report.new:
        assert torch.equal(after[name], before[name])
    assert str(report).startswith(f"loaded {len(taken)} of {len(after)} tensors")
    return report


def same_logits(left: nn.Module, right: nn.Module, *shape: int) -> bool:
    batch = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return torch.equal(left.eval()(batch), right.eval()(batch))


# From a model folder


def test_the_same_classes_keep_their_head(tmp_path: Path) -> None:
    source, model = jumbo(), make_model(TEST_MODEL, num_classes=3)
    report = started(model, folder_of(source, tmp_path))
    assert not (report.resized or report.new or report.unused or report.folded)
    assert same_logits(source, model, 3, 32, 32)


@pytest.mark.parametrize("labels", [["a", "b", "d"], ["a", "b", "c", "d"]])
def test_other_classes_get_a_new_head(labels: list[str], tmp_path: Path) -> None:
    model = make_model(TEST_MODEL, num_classes=len(labels))
    report = started(model, folder_of(jumbo(), tmp_path), labels)
    assert report.new == report.unused == ["head.weight", "head.bias"]
    assert "new: head.weight, head.bias; not used: head.weight, head.bias" in str(report)


def test_another_size_resizes_the_positions(tmp_path: Path) -> None:
    source, model = jumbo(img_size=(32, 16)), make_model(TEST_MODEL, num_classes=3, img_size=(24, 48))
    report = started(model, folder_of(source, tmp_path))
    assert report.resized == ["pos_embed"] and not report.new
    wanted = resample_abs_pos_embed(source.pos_embed, [3, 6], [4, 2], num_prefix_tokens=0, antialias=True)
    assert torch.equal(model.state_dict()["pos_embed"], wanted)


@pytest.mark.parametrize("as_folder", [True, False])
def test_naflex_positions_are_resampled_too(as_folder: bool, tmp_path: Path) -> None:
    options = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_jumbo": 3, "patch_size": 8, "num_classes": 3}
    name = "naflexvit_jumbo_tiny_patch16"
    source: Any = randomised(make_model(name, img_size=(32, 16), **options))
    model: Any = make_model(name, img_size=(24, 48), **options)
    if as_folder:
        preparation = Preparation((3, 32, 16), (0.5,) * 3, (0.25,) * 3)
        save_folder(tmp_path, source, Contract("multiclass", LABELS, preparation))
    report = started(model, tmp_path if as_folder else file_of(source, tmp_path / "weights.pth"))
    assert report.resized == ["embeds.pos_embed"] and "resized: embeds.pos_embed" in str(report)
    assert "embeds.pos_embed" not in " ".join([*report.new, *report.unused])
    wanted = nn.functional.interpolate(
        source.embeds.pos_embed.permute(0, 3, 1, 2), (3, 6), mode="bicubic", antialias=True
    )
    assert torch.allclose(model.embeds.pos_embed, wanted.permute(0, 2, 3, 1))
    picture = torch.randn(1, 3, 24, 48)
    if as_folder:
        with torch.inference_mode():
            assert torch.allclose(model.eval()(picture), source(picture), atol=1e-5)


def test_another_patch_resizes_the_projection(tmp_path: Path) -> None:
    model = make_model(TEST_MODEL, num_classes=3, patch_size=4, img_size=16)
    assert started(model, folder_of(jumbo(), tmp_path)).resized == ["patch_embed.proj.weight"]


@pytest.mark.parametrize(("theirs", "mine"), [(1, 3), (3, 1), (1, 6), (4, 3)])
def test_channels_are_converted(theirs: int, mine: int, tmp_path: Path) -> None:
    source, model = jumbo(in_chans=theirs), make_model(TEST_MODEL, num_classes=3, in_chans=mine)
    report = started(model, folder_of(source, tmp_path))
    assert report.resized == ["patch_embed.proj.weight"]
    grey = torch.randn(2, 1, 32, 32)
    with torch.inference_mode():
        wanted, got = source(grey.expand(-1, theirs, -1, -1)), model(grey.expand(-1, mine, -1, -1))
    if 1 in (theirs, mine):
        torch.testing.assert_close(got, wanted)
    assert got.isfinite().all()


def test_a_resnet_starts_from_a_resnet(tmp_path: Path) -> None:
    source = randomised(timm.create_model("resnet10t", num_classes=3))
    save_folder(tmp_path, source, Contract("multiclass", LABELS, Preparation((3, 32, 32))))
    model = make_model("resnet10t", num_classes=3, in_chans=1)
    report = started(model, tmp_path, ["x", "y", "z"])
    assert report.new == report.unused == ["fc.weight", "fc.bias"] and report.resized == ["conv1.0.weight"]


def test_other_statistics_are_said(tmp_path: Path) -> None:
    report = started(make_model(TEST_MODEL, num_classes=3), folder_of(jumbo(), tmp_path))
    assert "normalised with mean (0.5, 0.5, 0.5)" in str(report) and "(0.485, 0.456, 0.406)" in str(report)


# From files


def test_a_file_of_the_authors(tmp_path: Path) -> None:
    torch.save(random_weights("pico"), tmp_path / "jumbo_pico.pth")
    model = make_model("jumbo_vit_pico_patch16_224", num_classes=3, img_size=64)
    report = started(model, tmp_path / "jumbo_pico.pth")
    assert report.resized == ["pos_embed"] and report.new == ["head.weight", "head.bias"]
    assert set(report.unused) == {"head.weight", "head.bias"}
    assert "pos_embed" in str(report) and len(str(report)) < 200


def test_a_plain_vit(tmp_path: Path) -> None:
    source: Any = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL_VIT))
    model = make_model(TEST_MODEL, num_classes=3)
    report = started(model, file_of(source, tmp_path / "vit.pth"))
    state = model.state_dict()
    # The class token's position goes, the patches' stay as they are.
    assert report.resized == ["pos_embed"] and torch.equal(state["pos_embed"], source.pos_embed[:, 1:])
    assert set(report.unused) == {"cls_token", "head.weight", "head.bias"}
    assert {"reg_token", "jumbo_mlp.fc1.weight", "blocks.0.norm3.weight", "head.weight"} <= set(report.new)
    assert not any(name.startswith("blocks.") and ".norm3." not in name for name in report.new)


def test_registers_of_another_number_are_not_used(tmp_path: Path) -> None:
    source = randomised(timm.create_model("vit_tiny_patch16_224", reg_tokens=4, no_embed_class=True, **SMALL_VIT))
    report = started(make_model(TEST_MODEL, num_classes=3), file_of(source, tmp_path / "vit.pth"))
    assert "reg_token (1, 4, 32)" in report.unused and "reg_token" in report.new and "pos_embed" in report.loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_scale_is_folded_in(dtype: torch.dtype, tmp_path: Path) -> None:
    source = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=3, init_values=0.3, **SMALL_VIT))
    save = {name: value.to(dtype) for name, value in source.state_dict().items()}
    torch.save(save, tmp_path / "vit.pth")
    into_jumbo = started(make_model(TEST_MODEL, num_classes=3), tmp_path / "vit.pth")
    assert len(into_jumbo.folded) == 3 * 2 * 2
    assert "LayerScale folded into: blocks.*.attn.proj.weight (3)" in str(into_jumbo)
    # Into a model that differs in nothing else, the function stays the same.
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL_VIT)
    started(plain, tmp_path / "vit.pth")
    source.load_state_dict(save)
    batch = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = source.forward_features(batch)  # type: ignore[operator]
        got = plain.eval().forward_features(batch)
    torch.testing.assert_close(got, wanted, atol=1e-5 if dtype == torch.float32 else 5e-3, rtol=1e-3)


def test_wrapped_and_nested_files(tmp_path: Path) -> None:
    source = jumbo()
    state: dict[str, Tensor] = {f"module.{name}": value for name, value in source.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "last.pth")
    model = make_model(TEST_MODEL, num_classes=3)
    report = start_from(model, str(tmp_path / "last.pth"), LABELS)
    assert report.new == ["head.weight", "head.bias"]  # a bare file does not say what its classes are


# What is refused


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = make_model(TEST_MODEL, num_classes=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small = SMALL_VIT | {"num_classes": 3}
    sources = {
        "width 64, the model 32": timm.create_model("vit_tiny_patch16_224", **{**small, "embed_dim": 64}),
        "J=2, the model J=3: they must be equal": jumbo(num_jumbo=2),
        "holds nothing of this model's blocks": timm.create_model("resnet10t", num_classes=3),
        "fits only": timm.create_model("vit_tiny_patch16_224", **{**small, "depth": 1}),
    }
    for words, source in sources.items():
        with pytest.raises(UserError, match=words) as caught:
            start_from(model, str(file_of(source, tmp_path / "source.pth")), LABELS)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_name_of_timm_without_weights_is_refused() -> None:
    model = make_model(TEST_MODEL, num_classes=3)
    with pytest.raises(UserError, match="no such folder or file, and no model of timm"):
        start_from(model, "vit_tony_patch16_224", LABELS)
    with pytest.raises(UserError, match="its pretrained weights cannot be had"):
        start_from(model, TEST_MODEL, LABELS)


# Through the command


def test_going_on_from_a_run_needs_its_folder_only(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    base = {"data": str(colours), "workers": 0, "logger": ["none"], "epochs": 1, "init_from": run["out"]}
    config = with_defaults(TrainConfig(**base))
    assert (config.model, config.img_size, config.in_chans, config.preset) == (TEST_MODEL, "32x32", 3, "finetune")
    # Without a rate the weights stay, so the score is the old run's.
    summary = train(TrainConfig(**base, lr=0.0, out=str(tmp_path / "same")))
    assert summary["score"] == run["score"]
    assert with_defaults(TrainConfig(**{**base, "img_size": "64", "in_chans": 1})).img_size == "64"
    assert with_defaults(TrainConfig(**{**base, "model": "resnet18"})).img_size is None
    assert with_defaults(TrainConfig(**{**base, "init_from": str(tmp_path / "nothing")})).model is not None


def test_the_report_is_printed(run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = colour_folder(tmp_path / "data", train=3, val=1)
    for part in ("train", "val"):
        (data / part / "red").rename(data / part / "rot")
    options = {"data": str(data), "init_from": run["out"], "epochs": 1, "workers": 0, "logger": ["none"]}
    train(TrainConfig(**options, img_size="48", out=str(tmp_path / "out")))
    shown = capsys.readouterr().out
    count = len(jumbo().state_dict())
    words = f"loaded {count - 2} of {count} tensors; resized: pos_embed; new: head.weight, head.bias"
    assert f"from {run['out']}: {words}" in shown


def test_a_model_may_start_from_one_with_other_data_beside_it(tmp_path: Path) -> None:
    """A weights file in a folder of pictures is a file; a folder of pictures is no model."""
    data = colour_tree(tmp_path / "tree", 1)
    with pytest.raises(UserError, match="is no model folder"):
        start_from(make_model(TEST_MODEL, num_classes=3), str(data), LABELS)
