"""Arguments that no model can be made of are refused when it is made, and loading never guesses in silence."""

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import jumbo_vit
from jumbo_vit.cli.parser import main
from jumbo_vit.errors import UserError
from tests.test_block import randomise

SMALL: dict[str, Any] = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
LIKE: dict[str, Any] = SMALL | {"num_jumbo": 3, "num_classes": 5}
JUMBO, FLEX = "jumbo_vit_test_patch8_32", "naflexvit_jumbo_pico_patch16"


@pytest.mark.parametrize("name", [JUMBO, FLEX])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reg_tokens": -1}, "reg_tokens is -1"),
        ({"jumbo_mlp_ratio": -1.0}, "jumbo_mlp_ratio is -1.0"),
        ({"jumbo_mlp_ratio": 0.001}, "jumbo_mlp_ratio is 0.001"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"num_heads": 3}, "embed_dim=16 is not a multiple of num_heads=3"),
    ],
)
def test_refused_at_once(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        timm.create_model(name, **(SMALL | options))


def test_a_wide_pool_needs_global_tokens() -> None:
    model = timm.create_model("vit_test_patch8_cls_32", **SMALL, class_token=False, global_pool="avg")
    for pool in ("prefix", "prefix_avg"):
        with pytest.raises(UserError, match="needs a global token"):
            model.reset_classifier(5, pool)


@pytest.mark.parametrize("name", [JUMBO, FLEX])
def test_the_blocks_follow_whatever_becomes_the_ffn(name: str) -> None:
    model = timm.create_model(name, **SMALL, num_classes=0).eval()
    randomise(model)
    images = torch.randn(2, 3, 16, 24)
    before = model(images)
    model.add_module("jumbo_mlp", nn.Identity())
    assert not torch.equal(before, model(images))
    model.jumbo_mlp = None
    with pytest.raises(UserError, match="shares its Jumbo FFN"):
        model(images)


def saved(name: str, path: Path, **options: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **(LIKE | options)).eval()
    randomise(model)
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.parametrize("channels", [1, 3, 4, 12, 13, 27])
def test_naflex_loads_its_own_file_exactly(tmp_path: Path, channels: int) -> None:
    path, images = tmp_path / "w.pth", torch.randn(2, channels, 16, 24)
    model = saved(FLEX, path, in_chans=channels)
    overlay = {"file": str(path)}
    again = timm.create_model(FLEX, **LIKE, in_chans=channels, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    assert torch.equal(model(images), again(images))


def loaded(name: str, path: Path, have: int, want: int) -> nn.Module:
    overlay = {"file": str(path), "input_size": (have, 16, 24)}
    model: nn.Module = timm.create_model(name, **LIKE, in_chans=want, pretrained=True, pretrained_cfg_overlay=overlay)
    return model.eval()


@pytest.mark.parametrize(("have", "want"), [(4, 13), (1, 4), (13, 1), (1, 3), (4, 3), (13, 3), (3, 1), (3, 13)])
def test_naflex_converts_channels_as_the_plain_model(tmp_path: Path, have: int, want: int) -> None:
    plain_file, flex_file = tmp_path / "plain.pth", tmp_path / "flex.pth"
    source = saved(JUMBO, plain_file, in_chans=have)
    torch.save(loaded(FLEX, plain_file, have, have).state_dict(), flex_file)
    images = torch.randn(2, want, 16, 24)
    expected = loaded(JUMBO, plain_file, have, want)(images)
    for file in (plain_file, flex_file):
        assert torch.allclose(loaded(FLEX, file, have, want)(images), expected, atol=1e-5)
    if want == 1:  # the same grey in every channel is the same picture
        assert torch.allclose(source(images.expand(-1, have, -1, -1)), expected, atol=1e-4)


@pytest.mark.parametrize("name", [JUMBO, FLEX])
def test_an_ambiguous_grid_is_announced(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "w.pth"
    options = {"img_size": (16, 64)}  # 4x16 positions, as many as 8x8
    model = saved(JUMBO, path, **options)
    overlay: dict[str, Any] = {"file": str(path)}
    with caplog.at_level(logging.WARNING, "jumbo_vit"):
        timm.create_model(name, **(LIKE | options), pretrained=True, pretrained_cfg_overlay=overlay)
    assert "64 positions are read as 8x8, though the model's own grid 4x16 has as many" in caplog.text
    overlay["input_size"] = (3, 16, 64)
    again = timm.create_model(name, **(LIKE | options), pretrained=True, pretrained_cfg_overlay=overlay).eval()
    images = torch.randn(2, 3, 16, 64)
    assert torch.allclose(model(images), again(images), atol=1e-5)


def test_attention_never_writes_over_its_picture(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(next((colours / "val" / "red").iterdir()).read_bytes())
    before = picture.read_bytes()
    assert main(["attention", run["out"], str(picture), "--png", str(picture)]) == 2
    assert picture.read_bytes() == before


@pytest.mark.parametrize("size", [(3000, 1), (2, 5000)])
def test_attention_on_a_long_picture(run: dict[str, Any], tmp_path: Path, size: tuple[int, int]) -> None:
    from PIL import Image

    picture = tmp_path / "long.png"
    Image.new("RGB", size, "red").save(picture)
    assert main(["attention", run["out"], str(picture), "--png", str(tmp_path / "map.png")]) == 0


def test_maps_under_autocast_are_those_of_fp32_weights() -> None:
    model = timm.create_model(JUMBO, **LIKE).eval()
    randomise(model)
    with torch.autocast("cpu", torch.bfloat16):
        maps = jumbo_vit.attention_maps(model, torch.randn(2, 3, 16, 24), reduce=False)
    assert maps.dtype == torch.float32


def test_norms_of_nothing() -> None:
    model = timm.create_model(JUMBO, **LIKE)
    with pytest.raises(UserError, match="no pictures came"):
        jumbo_vit.token_norms(model, torch.zeros(0, 3, 16, 24))


def test_jumboize_before_compiling() -> None:
    model = timm.create_model("vit_test_patch8_reg16_32", **SMALL)
    with pytest.raises(UserError, match="jumboize first, then compile"):
        jumbo_vit.jumboize(torch.compile(model, backend="eager"))
