"""Pretrained weights through timm: wrapped names, another head, size or channel count; anything else is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from jumbo_vit.errors import UserError
from tests.test_contract import CASES, JUMBOIZED, SMALL, make, pictures, run

NAMES = ("jumbo_vit_test_patch8_32", "vit_test_patch8_reg16_32")
every_kind = pytest.mark.parametrize("name", [*NAMES, "naflexvit_jumbo_pico_patch16", JUMBOIZED])
WRAPPERS = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(model: Any, path: Path, prefix: str = "", **changes: Tensor | None) -> Path:
    state = model.state_dict() | {key.replace("__", "."): value for key, value in changes.items()}
    torch.save({f"{prefix}{key}": value for key, value in state.items() if value is not None}, path)
    return path


def read(name: str, path: Path, source_size: tuple[int, int] = (16, 24), **options: Any) -> Any:
    overlay = {"file": str(path), "input_size": (3, *source_size)}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **(SMALL | CASES[name] | options))


@every_kind
@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrapped_names_load_by_both_ways(name: str, prefix: str, tmp_path: Path) -> None:
    source = make(name)
    path = write(source, tmp_path / "w.pth", prefix)
    expected = run(source, pictures())
    assert torch.equal(run(read(name, path), pictures()), expected)
    by_path = timm.create_model(name, checkpoint_path=str(path), **(SMALL | CASES[name]))
    assert torch.equal(run(by_path, pictures()), expected)


@every_kind
@pytest.mark.parametrize("num_classes", [0, 1, 9])
def test_another_number_of_classes_starts_a_new_head_and_says_so(
    name: str, num_classes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(name)
    path = write(source, tmp_path / "w.pth")
    with caplog.at_level(logging.WARNING, "jumbo_vit"):
        model = read(name, path, num_classes=num_classes)
    said = [record.getMessage() for record in caplog.records if record.name == "jumbo_vit"]
    new = f"head.weight and head.bias start anew: 5 classes in the file, {num_classes} in the model"
    assert said == ([new] if num_classes else [])
    assert all(torch.equal(model.state_dict()[k], v) for k, v in source.state_dict().items() if "head" not in k)
    if num_classes and name != JUMBOIZED:  # whose head starts as the base model's does
        assert not model.head.weight.any()


@every_kind
def test_a_head_of_the_same_number_of_classes_is_kept_whatever_the_registry_says(name: str, tmp_path: Path) -> None:
    source = make(name, num_classes=3)  # the registered name declares 10
    model = read(name, write(source, tmp_path / "w.pth"), num_classes=3)
    assert torch.equal(model.head.weight, source.head.weight)


def test_a_file_without_a_head_and_one_of_another_pool_start_a_new_head(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(name)
    headless = write(source, tmp_path / "h.pth", head__weight=None, head__bias=None)
    model = read(name, headless)
    assert torch.equal(model.blocks[2].norm2.weight, source.blocks[2].norm2.weight)
    assert not model.head.weight.any()
    wide = make(name, global_pool=source.pools[1])
    model = read(name, write(wide, tmp_path / "w.pth"), global_pool="avg")
    assert model.head.weight.shape == (5, 16)
    assert [r.getMessage().split(": ")[1] for r in caplog.records if r.name == "jumbo_vit"] == [
        "the file has none",
        f"it reads {wide.head_hidden_size} features in the file, 16 in the model",
    ]


def test_another_size_of_picture_resamples_positions(name: str, tmp_path: Path) -> None:
    source = make(name)
    path = write(source, tmp_path / "w.pth")
    model = read(name, path, img_size=(24, 32))
    source.set_input_size((24, 32))
    torch.testing.assert_close(run(model, pictures(size=(24, 32))), run(source, pictures(size=(24, 32))))
    with pytest.raises(UserError, match=r"24 positions do not make a square.*\(32, 32\).*input_size=\(3, H, W\)"):
        read(name, path, (32, 32), img_size=(24, 32))


def test_three_channels_to_one_see_a_grey_picture_as_three_equal_channels(name: str, tmp_path: Path) -> None:
    source = make(name)
    path = write(source, tmp_path / "w.pth")
    grey = pictures(channels=1)
    one = read(name, path, in_chans=1)
    torch.testing.assert_close(run(one, grey), run(source, grey.repeat(1, 3, 1, 1)), atol=1e-4, rtol=1e-4)
    assert run(read(name, path, in_chans=4), pictures(channels=4)).shape == (2, 5)


def test_thirteen_channels_stay_or_are_repeated(name: str, tmp_path: Path) -> None:
    source = make(name, in_chans=13)
    path = write(source, tmp_path / "w.pth")
    assert torch.equal(run(read(name, path, in_chans=13), pictures(channels=13)), run(source, pictures(channels=13)))
    twice = read(name, path, in_chans=26)
    both = pictures(channels=13).repeat(1, 2, 1, 1)
    torch.testing.assert_close(run(twice, both), run(source, pictures(channels=13)), atol=1e-4, rtol=1e-4)


@every_kind
@pytest.mark.parametrize("num_classes", [5, 9])
def test_anything_else_missing_or_left_over_is_an_error_with_the_names(
    name: str, num_classes: int, tmp_path: Path
) -> None:
    source = make(name)
    path = write(
        source, tmp_path / "w.pth", blocks__0__norm2__bias=None, extra=torch.ones(1), norm__weight=torch.ones(8)
    )
    with pytest.raises(UserError) as caught:
        read(name, path, num_classes=num_classes)
    assert str(caught.value) == (
        "the checkpoint does not fit the model (missing: blocks.0.norm2.bias; unknown: extra; "
        "other shape: norm.weight (8,) instead of (16,))"
    )


def test_a_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    first, second = NAMES
    with pytest.raises(UserError, match=r"missing: .*norm3\.weight.*unknown: cls_token.*reg_token \(1, 16, 16\)"):
        read(first, write(make(second), tmp_path / "w.pth"), num_classes=9)


@pytest.mark.parametrize("lost", ["head.bias", "head.weight"])
def test_half_a_head_is_missing_or_all_new_and_never_a_fault_of_timm(lost: str, tmp_path: Path) -> None:
    state = timm.create_model("jumbo_vit_test_patch8_32").state_dict()
    del state[lost]
    torch.save(state, tmp_path / "half.pth")
    overlay = {"file": str(tmp_path / "half.pth")}
    if lost == "head.bias":
        with pytest.raises(UserError, match=r"missing: head\.bias"):
            timm.create_model("jumbo_vit_test_patch8_32", pretrained=True, pretrained_cfg_overlay=overlay)
    else:  # without its weight there is no head, and a new one is announced
        timm.create_model("jumbo_vit_test_patch8_32", pretrained=True, pretrained_cfg_overlay=overlay)


@pytest.mark.parametrize("model", ["jumbo_vit_test_patch8_32", "naflexvit_jumbo_pico_patch16"])
@pytest.mark.parametrize("lost", ["pos_embed", "patch_embed.proj.weight"])
@pytest.mark.parametrize("shape", [(), (32,), (1, 16, 32, 1, 1)])
def test_a_tensor_with_other_dimensions_is_named(model: str, lost: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    state = timm.create_model("jumbo_vit_test_patch8_32").state_dict()
    state[lost] = torch.zeros(shape)
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(UserError, match=f"the checkpoint's {lost} has the shape"):
        timm.create_model(model, pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "odd.pth")})
