"""Attention maps and token norms: right values, right place, and a model that is as it was."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import jumbo_vit
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import save_folder
from jumbo_vit.measure.overlay import draw, seen_box
from jumbo_vit.predictor import Contract
from jumbo_vit_command import main
from tests import golden
from tests.test_block import randomise

JUMBO, REG16 = "jumbo_vit_test_patch8_32", "vit_test_patch8_reg16_32"


def make(name: str = JUMBO, **options: Any) -> Any:
    model = timm.create_model(name, **options).eval()
    randomise(model)
    return model


def pictures(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (32, 32)), generator=torch.Generator().manual_seed(0))


def by_hand(model: Any, images: Tensor, layer: int) -> Tensor:
    """Softmax weights (B, heads, L, L) of one layer, from the equations."""
    tokens = model._pos_embed(model.patch_embed(images))
    for block in model.blocks[:layer]:
        tokens = block(tokens)
    attn, normed = model.blocks[layer].attn, model.blocks[layer].norm1(tokens)
    query, key, _ = attn.qkv(normed).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)


@pytest.mark.parametrize("size", ["pico", "nano"])
def test_maps_are_those_of_the_authors_code(size: str) -> None:
    model = timm.create_model(f"jumbo_vit_{size}_patch16_224", weight_init="skip")
    model.load_state_dict(golden.golden_weights(size))
    maps = jumbo_vit.attention_maps(model, golden.golden_input(0, 2, 3, 224, 224))
    stored = golden.golden_outputs(size)["attn"]
    np.testing.assert_allclose(maps.numpy(), stored, rtol=0, atol=1e-7)
    assert stored.max() > 5e-3


@pytest.mark.parametrize(("name", "asking"), [(JUMBO, 3), (REG16, 17), ("vit_test_patch8_cls_32", 1)])
@pytest.mark.parametrize("layer", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
def test_maps_are_the_softmax_rows_of_the_global_tokens(
    name: str, asking: int, layer: int, size: tuple[int, int]
) -> None:
    model = make(name, img_size=size)
    rows = by_hand(model, pictures(*size), layer % 3)
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))
    expected = rows[:, :, :asking, model.num_prefix_tokens :].unflatten(-1, model.patch_embed.grid_size)
    maps = jumbo_vit.attention_maps(model, pictures(*size), layer, reduce=False)
    assert maps.shape == (2, 2, asking, size[0] // 8, size[1] // 8)
    torch.testing.assert_close(maps, expected)
    torch.testing.assert_close(jumbo_vit.attention_maps(model, pictures(*size), layer), expected.mean(dim=(1, 2)))


def test_extra_registers_neither_ask_nor_show() -> None:
    model = make(reg_tokens=2)
    expected = by_hand(model, pictures(), 2)[:, :, :3, 5:].unflatten(-1, (4, 4))
    torch.testing.assert_close(jumbo_vit.attention_maps(model, pictures(), reduce=False), expected)


def test_a_patch_that_a_jumbo_token_seeks_lights_up_at_its_place() -> None:
    model = make(img_size=(24, 40), depth=1)
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.weight[0] = 1.0
        attn = model.blocks[0].attn
        attn.qkv.weight.zero_()
        attn.qkv.bias.zero_()
        attn.qkv.bias[:16] = 2.0  # every query of the first head asks for large keys
        attn.qkv.weight[32:48, 0] = 2.0  # and keys are large where patches are bright
    images = torch.zeros(1, 3, 24, 40)
    images[..., 8:16, 32:40] = 1.0
    head = jumbo_vit.attention_maps(model, images, reduce=False)[0, 0].mean(0)
    assert divmod(int(head.argmax()), 5) == (1, 4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_before(fused: bool, training: bool) -> None:
    model = make(patch_drop_rate=0.5, drop_path_rate=0.5, attn_drop_rate=0.5)
    for block in model.blocks:
        block.attn.fused_attn = fused
    expected = model(pictures())
    model.train(training)
    model.blocks[1].mlp.eval()
    modes = [m.training for m in model.modules()]
    maps = jumbo_vit.attention_maps(model, pictures())
    jumbo_vit.token_norms(model, pictures(), bins=3)
    assert [m.training for m in model.modules()] == modes
    assert {block.attn.fused_attn for block in model.blocks} == {fused}
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert torch.equal(model.eval()(pictures()), expected)
    torch.testing.assert_close(maps, by_hand(model, pictures(), 2)[:, :, :3, 3:].mean((1, 2)).unflatten(-1, (4, 4)))
    with pytest.raises(UserError):
        jumbo_vit.attention_maps(model, pictures(), layer=3)
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_compiled_model_gives_the_same_maps() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    compiled(pictures())
    torch.testing.assert_close(
        jumbo_vit.attention_maps(compiled, pictures()), jumbo_vit.attention_maps(model, pictures())
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_taken_as_the_model_is(dtype: torch.dtype) -> None:
    model = make().to(dtype)
    maps = jumbo_vit.attention_maps(model, pictures())
    assert maps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(maps.float(), jumbo_vit.attention_maps(make(), pictures()), rtol=0, atol=0.02)


TIMM: dict[str, tuple[dict[str, Any], int, tuple[int, int]]] = {
    "vit_small_patch16_dinov3": ({"img_size": (32, 48)}, 5, (2, 3)),  # rotary positions
    "vit_small_patch14_reg4_dinov2": ({"img_size": (28, 42)}, 5, (2, 3)),
    "deit3_small_patch16_224": ({"img_size": (32, 48)}, 1, (2, 3)),
    "beit_base_patch16_224": ({"img_size": 32}, 1, (2, 2)),  # a bias for relative positions
    "naflexvit_base_patch16_gap": ({}, 4, (2, 3)),
    "naflexvit_jumbo_pico_patch16": ({}, 6, (2, 3)),
}


@pytest.mark.parametrize("name", TIMM)
def test_other_vits_of_timm(name: str) -> None:
    options, asking, grid = TIMM[name]
    narrow = {"embed_dim": 64, "depth": 2, "num_heads": 2}
    model = timm.create_model(name, **(narrow | options)).eval()
    side = 14 if "patch14" in name else 16
    images = torch.randn(1, 3, grid[0] * side, grid[1] * side)
    expected = model(images)
    maps = jumbo_vit.attention_maps(model, images, reduce=False)
    assert maps.shape == (1, 2, asking, *grid)
    assert maps.sum((-1, -2)).min() > 0.3 and maps.sum((-1, -2)).max() < 1
    assert jumbo_vit.token_norms(model, images).counts.sum(1).tolist() == [grid[0] * grid[1]] * 2
    assert torch.equal(model(images), expected)
    randomise(model)  # fresh weights may look evenly at all tokens, up to rounding; these may not
    shares = jumbo_vit.attention_maps(model, images, reduce=False).sum((-1, -2))
    assert 0 < shares.min() < shares.max() < 1


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("resnet18", {}, "ResNet is no ViT of timm's kind"),
        ("vit_base_patch16_gap_224", {"embed_dim": 16, "num_heads": 2, "depth": 1}, "has no global token"),
        ("cait_xxs24_224", {"depth": 1}, "makes 0 attention calls in a block"),
    ],
)
def test_models_without_such_maps_are_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        jumbo_vit.attention_maps(timm.create_model(name, **options), torch.randn(1, 3, 224, 224))


def test_wrong_layers_and_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"layer is 3, but the model has layers 0 to 2"):
        jumbo_vit.attention_maps(make(), pictures(), 3)
    with pytest.raises(UserError, match=r"batch \(B, C, H, W\), not of shape \(3, 32, 32\)"):
        jumbo_vit.attention_maps(make(), pictures()[0])
    with pytest.raises(UserError, match=r"forward_intermediates"):
        jumbo_vit.token_norms(nn.Linear(2, 2), pictures())


@pytest.mark.parametrize("name", [JUMBO, REG16])
def test_norms_are_those_after_each_block_before_the_final_norm(name: str) -> None:
    model = make(name)
    seen: list[Tensor] = []
    hooks = [b.register_forward_hook(lambda _, __, out: seen.append(out)) for b in model.blocks]
    model(pictures())
    for hook in hooks:
        hook.remove()
    norms = [out[:, model.num_prefix_tokens :].norm(dim=-1).flatten().double().detach().numpy() for out in seen]
    loader = [(pictures()[:1], torch.zeros(1)), (pictures()[1:], torch.zeros(1))]
    for source in (pictures(), loader):
        result = jumbo_vit.token_norms(model, source, bins=7)
        assert result.tokens == 32
        np.testing.assert_allclose(result.maximum, [n.max() for n in norms], rtol=1e-5)
        np.testing.assert_allclose(result.median, [np.median(n) for n in norms], rtol=1e-5)
        np.testing.assert_allclose(result.p999, [np.percentile(n, 99.9) for n in norms], rtol=1e-5)
        np.testing.assert_allclose(result.max_over_median, [n.max() / np.median(n) for n in norms], rtol=1e-5)
        assert result.edges[[0, -1]] == pytest.approx([0, max(n.max() for n in norms)])
        assert result.counts.tolist() == [np.histogram(n, result.edges)[0].tolist() for n in norms]


def test_norms_that_are_not_finite_and_no_pictures_are_refused() -> None:
    model = make()
    with pytest.raises(UserError, match="no pictures came"):
        jumbo_vit.token_norms(model, [])
    with torch.no_grad():
        model.blocks[1].mlp.fc2.bias[0] = torch.nan
    with pytest.raises(UserError, match="after block 1 are not finite"):
        jumbo_vit.token_norms(model, pictures())


BOXES = {
    # (width, height), preparation, left, right, top, bottom
    "whole": ((32, 32), {}, (0, 32, 0, 32)),
    "wide": ((100, 50), {}, (25, 75, 0, 50)),
    "tall": ((50, 100), {}, (0, 50, 25, 75)),
    "tight": ((64, 64), {"crop_pct": 0.5}, (16, 48, 16, 48)),
    "squash": ((100, 50), {"crop_mode": "squash"}, (0, 100, 0, 50)),
    "border": ((100, 50), {"crop_mode": "border"}, (0, 100, -25, 75)),
}


@pytest.mark.parametrize("case", BOXES)
def test_the_seen_part_of_a_picture(case: str) -> None:
    size, options, expected = BOXES[case]
    preparation = Preparation((3, 32, 32), **options)
    assert seen_box(preparation.evaluation(), Image.new("RGB", size)) == pytest.approx(expected)


def test_the_map_lies_over_the_part_that_was_seen() -> None:
    picture = Image.new("RGB", (100, 50))
    maps = np.zeros((1, 2, 2), np.float32)
    maps[0, 0, 1] = 1.0
    drawn = np.asarray(Image.open(io.BytesIO(draw(picture, maps, [""], (25, 75, 0, 50)))).convert("RGB")).astype(int)
    assert drawn.shape == (200, 400, 3)
    assert drawn[:, :99].max() == drawn[:, 301:].max() == 0  # not seen, so left as it is
    bright = drawn.sum(-1) > 300
    rows, columns = np.nonzero(bright)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == pytest.approx((0, 99, 200, 299), abs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that looks at the brightest patch."""
    torch.manual_seed(0)
    model = make(num_classes=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
        model.patch_embed.proj.weight[0] = 1.0
        for block in model.blocks:
            block.norm1.weight.fill_(1.0)
            block.attn.qkv.bias[:32] = 3.0
            block.attn.qkv.weight[32:64, 0] = 1.0
    path: Path = tmp_path_factory.mktemp("model")
    save_folder(path, model, Contract("multiclass", ["a", "b"], Preparation((3, 32, 32))))
    return path


def turned(path: Path, orientation: int) -> Path:
    """A picture with a bright right upper corner as people see it, stored under an orientation tag."""
    upright = np.zeros((60, 60, 3), np.uint8)
    upright[:15, 45:] = 255
    back = {1: 0, 3: 2, 6: 1, 8: 3}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.rot90(upright, back).copy()).save(path, exif=exif)
    return path


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_command_draws_the_picture_as_people_see_it(folder: Path, orientation: int, tmp_path: Path) -> None:
    picture, png = turned(tmp_path / "p.png", orientation), tmp_path / "map.png"
    assert main(["attention", str(folder), str(picture), "--png", str(png)]) == 0
    drawn = np.asarray(Image.open(png).convert("RGB")).astype(int).sum(-1)
    assert drawn.shape == (420, 420)
    quarters = drawn.reshape(4, 105, 4, 105).mean((1, 3))
    assert divmod(int(quarters.argmax()), 4) == (0, 3)


def test_the_command_shows_heads_and_other_layers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, png = turned(tmp_path / "p.png", 1), tmp_path / "map.png"
    assert main(["attention", str(folder), str(picture), "--png", str(png), "--layer", "0", "--heads"]) == 0
    assert Image.open(png).size == (840, 420 + 18)
    said = capsys.readouterr().out
    assert "layer 0" in said
    assert "head 0" in said and "head 1" in said
    assert main(["attention", str(folder), str(picture)]) == 2
    assert "--png is missing" in capsys.readouterr().err
    assert main(["attention", str(folder), str(picture), "--png", str(png), "--layer", "7"]) == 2
    assert "layer is 7, but the model has layers 0 to 2" in capsys.readouterr().err


def test_the_command_takes_grey_models(tmp_path: Path) -> None:
    model = make(in_chans=1, num_classes=2)
    save_folder(tmp_path / "m", model, Contract("multiclass", ["a", "b"], Preparation((1, 32, 32), (0.5,), (0.5,))))
    png = tmp_path / "map.png"
    assert main(["attention", str(tmp_path / "m"), str(turned(tmp_path / "p.png", 1)), "--png", str(png)]) == 0
    assert png.is_file()
