"""The authors' code and checkpoints: stored outputs are met, published files load by every way timm offers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import jumbo_vit  # noqa: F401  (registers the models)
from jumbo_vit.checkpoints import load_exactly, read_weights
from jumbo_vit.vit import JumboVisionTransformer
from tests import golden

STORED = ("pico", "nano")
PARAMETERS = {"pico": 4.78, "nano": 8.14, "tiny": 17.52, "small": 66.89, "base": 131.41}
SHARED_FFN = {"pico": 2.66, "nano": 4.72, "tiny": 10.62, "small": 42.48, "base": 42.48}


def name_of(size: str) -> str:
    return f"jumbo_vit_{size}_patch16_224"


def create(size: str, **options: Any) -> JumboVisionTransformer:
    model: JumboVisionTransformer = timm.create_model(name_of(size), **options)
    return model.eval()


def filled(size: str, weights: dict[str, Tensor]) -> JumboVisionTransformer:
    """The model with each parameter copied by hand from the authors' names."""
    model = create(size, weight_init="skip")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights["jumbo_token" if name == "reg_token" else name])
    return model


def logits(model: JumboVisionTransformer, *shape: int, seed: int = 0) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(golden.golden_input(seed, *shape))
    return out


@pytest.fixture(scope="module")
def official_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pico in the published form: a plain .pth under the authors' names, unused class token included."""
    path = tmp_path_factory.mktemp("official") / "jumbo_pico.pth"
    torch.save(golden.golden_weights("pico"), path)
    return path


@pytest.mark.parametrize("size", STORED)
def test_stored_outputs_are_met_at_every_size_of_picture(size: str) -> None:
    stored = golden.golden_outputs(size)
    model = create(size, weight_init="skip")
    model.load_state_dict(golden.golden_weights(size))
    with torch.inference_mode():
        tokens = model.forward_features(golden.golden_input(0, 2, 3, 224, 224))
        got = {"logits": model.forward_head(tokens)}
    jumbo, registers, patches = model.split(tokens)
    assert registers.shape[1] == 0
    got |= {"jumbo_tokens": jumbo, "patch_mean": patches.mean(1)}
    for height, width in ((128, 128), (160, 256)):
        resized = create(size, weight_init="skip")
        resized.load_state_dict(model.state_dict())
        resized.set_input_size(img_size=(height, width))
        got[f"logits_{height}x{width}"] = logits(resized, 1, 3, height, width, seed=1)
    for what, value in got.items():
        np.testing.assert_allclose(value.numpy(), stored[what], rtol=0, atol=1e-4, err_msg=what)
    assert np.ptp(stored["logits"]) > 1  # the bound is far below what the outputs span


def test_other_sizes_of_picture_by_dynamic_size_and_by_loading(official_file: Path) -> None:
    stored = golden.golden_outputs("pico")["logits_160x256"]
    overlay = {"file": str(official_file)}
    for options in ({"dynamic_img_size": True}, {"img_size": (160, 256)}):
        model = create("pico", pretrained=True, pretrained_cfg_overlay=overlay, **options)
        got = logits(model, 1, 3, 160, 256, seed=1)
        np.testing.assert_allclose(got.numpy(), stored, rtol=0, atol=1e-4, err_msg=str(options))


@pytest.mark.parametrize("size", golden.OFFICIAL_SIZES)
def test_a_published_file_loads_by_every_way_with_equal_logits(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Linears start as NaN: quick for the large sizes, and whatever a way of loading leaves out shows in the logits.
    monkeypatch.setattr(nn.Linear, "reset_parameters", _fill_with_nan)
    weights = golden.golden_weights(size) if size in STORED else golden.random_weights(size)
    path = tmp_path / f"jumbo_{size}.pth"
    torch.save(weights, path)
    model = filled(size, weights)
    expected = logits(model, 1, 3, 224, 224)
    assert expected.std() > 0

    _fill_with_nan(model)
    outcome = model.load_state_dict(weights)
    assert (outcome.missing_keys, outcome.unexpected_keys) == ([], [])
    assert torch.equal(logits(model, 1, 3, 224, 224), expected)
    del model, weights
    overlay = {"file": str(path)}
    for way in ({"pretrained": True, "pretrained_cfg_overlay": overlay}, {"checkpoint_path": str(path)}):
        got = logits(create(size, weight_init="skip", **way), 1, 3, 224, 224)
        assert torch.equal(got, expected), way
    path.unlink()


def _fill_with_nan(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)


def test_loading_leaves_the_given_dict_alone() -> None:
    weights = golden.golden_weights("pico")
    names = list(weights)
    create("pico", weight_init="skip").load_state_dict(weights)
    assert list(weights) == names


def test_a_published_file_loads_into_a_model_inside_another_module(official_file: Path) -> None:
    weights = torch.load(official_file, weights_only=True)
    outer = torch.nn.ModuleDict({"net": create("pico", weight_init="skip")})
    outer.load_state_dict({f"net.{name}": tensor for name, tensor in weights.items()})
    assert torch.equal(outer["net"].reg_token, weights["jumbo_token"])


def test_a_wrong_official_name_is_still_refused(official_file: Path) -> None:
    weights = torch.load(official_file, weights_only=True)
    weights["blocks.0.norm9.weight"] = weights.pop("blocks.0.norm3.weight")
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*blocks\.0\.norm3\.weight.*Unexpected.*norm9"):
        create("pico", weight_init="skip").load_state_dict(weights)


def test_a_published_file_keeps_its_body_under_another_number_of_classes(official_file: Path) -> None:
    overlay = {"file": str(official_file)}
    model = create("pico", num_classes=5, pretrained=True, pretrained_cfg_overlay=overlay)
    weights = golden.golden_weights("pico")
    assert torch.equal(model.jumbo_mlp.fc1.weight, weights["jumbo_mlp.fc1.weight"])
    assert torch.equal(model.reg_token, weights["jumbo_token"])
    assert not model.head.weight.any()
    assert model.head.weight.shape == (5, 7 * 96)


def test_a_published_file_loads_exactly_once_read(official_file: Path) -> None:
    model = create("pico", weight_init="skip")
    load_exactly(model, read_weights(official_file), official_file)
    expected = logits(filled("pico", golden.golden_weights("pico")), 1, 3, 224, 224)
    assert torch.equal(logits(model, 1, 3, 224, 224), expected)


@pytest.mark.parametrize("size", golden.OFFICIAL_SIZES)
def test_names_shapes_and_counts_are_the_published_ones(size: str) -> None:
    model = create(size, device="meta", weight_init="skip")
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    official = golden.official_shapes(size)
    official["reg_token"] = official.pop("jumbo_token")
    del official["cls_token"]
    assert shapes == official
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == PARAMETERS[size]
    assert round(sum(p.numel() for p in model.jumbo_mlp.parameters()) / 1e6, 2) == SHARED_FFN[size]
