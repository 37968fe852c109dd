"""Jumboized models on disk: folders, timm's name for them, the command, and training that goes on from one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import jumbo_vit
from jumbo_vit.cli.parser import main
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.jumboized import jumboize
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from tests.test_jumboize import FAMILIES, NAMES, SMALL, build, move, pictures


def save(folder: Path, model: nn.Module, side: int) -> None:
    cfg: Any = model.pretrained_cfg
    preparation = dataclasses.replace(Preparation.from_cfg(cfg), input_size=(3, side, side))
    save_folder(folder, model, Contract("multiclass", list("abcdefg"), preparation))


@pytest.mark.parametrize("name", [*FAMILIES, "vit_pe_core_tiny_patch16_384", "vit_small_patch16_rope_mixed_224"])
def test_folder_opens_here_and_in_timm(name: str, tmp_path: Path) -> None:
    keep = name != "deit3_small_patch16_224"
    model, x = jumboize(build(name), keep_mlp=keep), pictures(name)
    move(model, x)
    save(tmp_path, model, NAMES[name][0])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "jumboized"
    assert config["model_args"]["base"].split(".")[0] == name
    assert config["model_args"]["num_jumbo"] == NAMES[name][1] and config["model_args"]["keep_mlp"] is keep
    cfg = timm.create_model(name, **SMALL).pretrained_cfg
    assert {key: tuple(config["pretrained_cfg"][key]) for key in ("mean", "std")} == {
        key: tuple(cfg[key]) for key in ("mean", "std")
    }
    assert len(load_file(tmp_path / "model.safetensors")) == len(model.state_dict())
    with torch.no_grad():
        wanted = model(x)
        opened, _ = open_folder(tmp_path)
        assert torch.equal(opened(x), wanted)
        outside = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert torch.equal(outside(x), wanted)
        assert torch.equal(jumbo_vit.load(tmp_path, "cpu")(x), wanted)
    save(tmp_path / "again", opened, NAMES[name][0])
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_args"] == config["model_args"]


def test_folder_takes_another_head_size_and_form(tmp_path: Path) -> None:
    name = "deit3_small_patch16_224"
    model = jumboize(build(name))
    save(tmp_path, model, NAMES[name][0])
    source = f"local-dir:{tmp_path}"
    other = timm.create_model(source, pretrained=True, num_classes=3, img_size=96, in_chans=1).eval()
    assert other(torch.randn(1, 1, 96, 96)).shape == (1, 3)
    assert torch.equal(other.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight)
    maps = timm.create_model(source, pretrained=True, features_only=True, out_indices=(0, 1)).eval()
    assert [tuple(m.shape) for m in maps(pictures(name))] == [(2, 48, 4, 4)] * 2


def test_by_name() -> None:
    kwargs: dict[str, Any] = {"base": "vit_wee_patch16_reg1_gap_256", "img_size": 64, **SMALL}
    model = timm.create_model("jumboized", **kwargs)
    assert model.num_jumbo == 1 and model.pretrained_cfg["architecture"] == "jumboized"
    assert not any(model.pretrained_cfg.get(key) for key in ("hf_hub_id", "url", "file"))
    for wrong, text in (
        ({}, "jumboized needs the name of the model"),
        ({"base": "vit_we_patch16"}, "is no model of timm"),
        ({"base": "jumboized"}, "is no model of timm"),
    ):
        with pytest.raises(UserError, match=text):
            timm.create_model("jumboized", **wrong)


def test_command_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = build("vit_small_patch16_dinov3", in_chans=1, img_size=32, num_classes=10)
    save_folder(
        tmp_path / "base", base, Contract("multiclass", list("0123456789"), Preparation((1, 32, 32), (0.5,), (0.5,)))
    )
    out = tmp_path / "out"
    assert main(["jumboize", str(tmp_path / "base"), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "5 of its 5 class and register tokens are the Jumbo token now, J=5, width 5x48" in text
    assert "largest difference of outputs on a random batch: 0\n" in text and "keep the FFN of each block" in text
    model, contract = open_folder(out)
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), base(x))
    assert contract.labels == list("0123456789") and contract.preparation.mean == (0.5,)
    assert contract.lineage["jumboized_from"] == str(tmp_path / "base")
    assert main(["jumboize", str(out), "--out", str(tmp_path / "twice")]) == 2
    assert "has a Jumbo token already" in capsys.readouterr().err
    assert main(["jumboize", str(tmp_path / "base"), "--out", str(out)]) == 2
    assert "holds a model already" in capsys.readouterr().err


def test_command_on_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out")
    words = ["jumboize", "test_vit3", "--no-pretrained", "--no-keep-mlp", "--num-jumbo", "1", "--out", out]
    assert main(words) == 0
    assert "instead of the FFN of each block" in capsys.readouterr().out
    _, contract = open_folder(out)
    assert contract.labels[0].startswith("tench") and contract.lineage["source"] == "random weights, test_vit3"

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no connection\nmore")

    monkeypatch.setattr(timm, "create_model", offline)
    assert main(["jumboize", "test_vit3", "--out", str(tmp_path / "b")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the trained weights of test_vit3 cannot be had (no connection)" in err
    assert main(["jumboize", "no/such/folder", "--out", str(tmp_path / "b")]) == 2
    assert "no such model folder: no/such/folder" in capsys.readouterr().err
    assert main(["jumboize", "test_vit3"]) == 2
    assert "--out is missing" in capsys.readouterr().err


def test_training_goes_on_from_a_jumboized_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = build("deit3_small_patch16_224", in_chans=1, img_size=8, patch_size=4, num_classes=10, depth=1)
    model = jumboize(base)
    start = tmp_path / "start"
    save_folder(start, model, Contract("multiclass", list("0123456789"), Preparation((1, 8, 8), (0.5,), (0.5,))))
    filled = with_defaults(TrainConfig(init_from=str(start)))
    assert filled.model == "jumboized" and filled.img_size == "8x8" and filled.patch_size == 4
    assert 'base="deit3_small_patch16_224.fb_in1k"' in (filled.model_args or [])
    run = tmp_path / "run"
    words = ["train", "--init-from", str(start), "--epochs", "1", "--batch-size", "512", "--logger", "none"]
    assert main([*words, "--out", str(run), "--workers", "0"]) == 0
    assert f"loaded {len(model.state_dict())} of {len(model.state_dict())} tensors" in capsys.readouterr().out
    trained, _ = open_folder(run)
    assert not torch.equal(trained.jumbo_mlp.fc2.weight, model.jumbo_mlp.fc2.weight)  # type: ignore[union-attr]
    # The run's own file says all that a resumed run needs.
    (start / "config.json").unlink()
    assert main(["train", "--resume", str(run), "--epochs", "2"]) == 0


def test_model_args_reach_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model", "jumbo_vit_test_patch8_32", "--model-args", "num_jumbo=2", "lora_rank=1", "depth=1"]
    run = tmp_path / "run"
    rest = ["--epochs", "1", "--batch-size", "512", "--img-size", "8", "--logger", "none", "--workers", "0"]
    assert main([*words, *rest, "--out", str(run)]) == 0
    model, _ = open_folder(run)
    assert model.num_jumbo == 2 and len(model.blocks) == 1  # type: ignore[arg-type]
    assert main(["train", "--model-args", "num_jumbo", "--out", str(tmp_path / "b")]) == 2
    assert "--model-args takes NAME=VALUE, such as num_jumbo=3, not 'num_jumbo'" in capsys.readouterr().err
