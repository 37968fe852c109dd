"""The NaFlex model: the plain model on whole pictures, blind to padding, and a timm model like any other."""

import copy
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.naflexvit import NaFlexVitCfg, batch_patchify
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.naflex import NAMES, JumboNaFlexVit
from jumbo_vit.naflex_weights import adapt_checkpoint
from jumbo_vit.predictor import Contract
from jumbo_vit.sizes import SIZES

NAME = "naflexvit_jumbo_tiny_patch16"
SMALL: dict[str, Any] = {
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 2,
    "num_jumbo": 3,
    "patch_size": 8,
    "img_size": 32,
    "num_classes": 10,
    "weight_init": "xavier",
}


def build(**kwargs: Any) -> Any:
    """A small model whose head, tokens and norms all matter for the output."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, **{**SMALL, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def patched(pictures: list[Tensor], length: int, fill: float = 0.0, patch: int = 8) -> dict[str, Tensor]:
    """Pictures (C, H, W) as one NaFlex batch of `length` patches; `fill` and far coordinates where it is padded."""
    parts: dict[str, list[Tensor]] = {"patches": [], "patch_coord": [], "patch_valid": []}
    for picture in pictures:
        patches, (height, width) = batch_patchify(picture[None], (patch, patch))
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        coord = torch.stack([rows, columns], -1).flatten(0, 1)
        free = length - height * width
        parts["patches"].append(nn.functional.pad(patches[0], (0, 0, 0, free), value=fill))
        parts["patch_coord"].append(nn.functional.pad(coord, (0, 0, 0, free), value=50 if fill else 0))
        parts["patch_valid"].append(torch.arange(length) < height * width)
    return {name: torch.stack(values) for name, values in parts.items()}


@pytest.mark.parametrize("pool", ["jumbo_avg", "jumbo", "avg", "max", "avgmax", "map", ""])
def test_is_the_plain_model_on_whole_pictures(pool: str) -> None:
    plain = timm.create_model("jumbo_vit_test_patch8_32", depth=3, global_pool=pool).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
    model = build(global_pool=pool)
    assert model.head_hidden_size == plain.head_hidden_size
    model.load_state_dict(adapt_checkpoint(plain.state_dict(), model))
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        wanted = plain(x)
        torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=0)
        if pool:
            torch.testing.assert_close(model(patched(list(x), 16)), wanted, atol=1e-5, rtol=0)
            torch.testing.assert_close(model(patched(list(x), 25, fill=math.nan)), wanted, atol=1e-5, rtol=0)
    assert wanted.std() > 0.1


@settings(max_examples=25)
@given(
    grids=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    extra=st.integers(0, 7),
    fill=st.sampled_from([0.0, 1e4, math.nan, math.inf]),
    pool=st.sampled_from(["jumbo_avg", "jumbo", "avg", "max"]),
    num_jumbo=st.integers(1, 4),
    depth=st.integers(1, 3),
    dim=st.sampled_from([16, 32]),
)
def test_no_information_from_padding(
    grids: list[tuple[int, int]], extra: int, fill: float, pool: str, num_jumbo: int, depth: int, dim: int
) -> None:
    model = build(global_pool=pool, num_jumbo=num_jumbo, depth=depth, embed_dim=dim)
    pictures = [torch.randn(3, 8 * height, 8 * width) for height, width in grids]
    length = max(height * width for height, width in grids) + extra
    with torch.no_grad():
        together = model(patched(pictures, length, fill))
        for picture, logits in zip(pictures, together, strict=True):
            torch.testing.assert_close(model(picture[None])[0], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(32, 32), (16, 48), (48, 32), (8, 8)])
def test_is_the_plain_model_on_pictures_of_other_sizes(size: tuple[int, int]) -> None:
    plain = timm.create_model("jumbo_vit_test_patch8_32", depth=3, img_size=(32, 24), dynamic_img_size=True).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
        model = build(img_size=(32, 24))
        model.load_state_dict(adapt_checkpoint(plain.state_dict(), model))
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def test_plain_positions_of_a_declared_grid(tmp_path: Path) -> None:
    plain = timm.create_model("jumbo_vit_test_patch8_32", depth=3, img_size=(16, 64)).eval()
    torch.save(plain.state_dict(), tmp_path / "w.pth")
    for declared, right in (((16, 64), True), ((64, 16), False)):
        overlay = {"file": str(tmp_path / "w.pth"), "input_size": (3, *declared)}
        model: Any = timm.create_model(
            NAME, pretrained=True, pretrained_cfg_overlay=overlay, **{**SMALL, "img_size": (16, 64)}
        )
        assert torch.equal(model.embeds.pos_embed.flatten(1, 2), plain.pos_embed) is right  # type: ignore[arg-type]
    five = timm.create_model("jumbo_vit_test_patch8_32", depth=3, img_size=(8, 40))
    torch.save(five.state_dict(), tmp_path / "w.pth")
    with pytest.raises(
        UserError, match=r"5 positions do not make a square, nor the grid of the declared size \(64, 16"
    ):
        timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL)


def test_padding_gets_no_gradient() -> None:
    model = build()
    batch = patched([torch.randn(3, 16, 24)], 9, fill=3.0)
    batch["patches"].requires_grad_(True)
    model(batch).square().sum().backward()
    grad = batch["patches"].grad
    assert grad is not None and not grad[0, 6:].any() and grad[0, :6].abs().amax(-1).min() > 0


def test_pool_keeps_jumbo_and_patches_apart() -> None:
    model = build(reg_tokens=2)
    tokens = torch.randn(2, 3 + 2 + 6, 32)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    pooled = model._pool(tokens, patch_valid=valid)
    assert torch.equal(pooled[:, :96], tokens[:, :3].flatten(1))
    torch.testing.assert_close(pooled[0, 96:], tokens[0, 5:].mean(0))
    torch.testing.assert_close(pooled[1, 96:], tokens[1, 5:9].mean(0))
    jumbo, registers, patches = model.split(tokens)
    assert [part.shape[1] for part in (jumbo, registers, patches)] == [3, 2, 6]


def test_first_weights_are_the_papers() -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model(NAME, depth=2)
    assert not model.head.weight.any() and torch.allclose(model.head.bias, torch.tensor(-math.log(1000)))
    for token in (model.embeds.reg_token, model.embeds.pos_embed, model.jumbo_mlp.fc1.weight):
        assert 0.018 < token.std() < 0.022
    assert model.embeds.pos_embed.shape == (1, 14, 14, 192) and model.embeds.reg_token.shape == (1, 6, 192)
    assert model.head_hidden_size == 7 * 192 and model.head.in_features == 7 * 192
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    assert [b.drop_path3.drop_prob for b in timm.create_model(NAME, depth=2, drop_path_rate=0.3).blocks] == [0.3, 0.3]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_registered(name: str) -> None:
    assert timm.is_model(name)
    row = SIZES[NAMES[name]]
    with torch.device("meta"):
        model: Any = JumboNaFlexVit(
            img_size=row.img_size,
            pos_embed_grid_size=None,
            embed_dim=row.dim,
            depth=row.depth,
            num_heads=row.heads,
            num_jumbo=row.num_jumbo,
        )
        plain = timm.create_model(f"jumbo_vit_{NAMES[name]}_patch16_224")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_ablations_and_replaced_ffn() -> None:
    for kwargs in ({"share_jumbo_mlp": False}, {"jumbo_mlp_ratio": 0}, {"lora_rank": 2}, {"drop_path_rate": 0.2}):
        assert build(**kwargs)(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    model = build()
    model.jumbo_mlp = nn.Identity()
    calls: list[int] = []
    model.jumbo_mlp.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(1, 3, 32, 32))
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"global_pool": "token"}, "global_pool='token' needs a class token"),
        ({"global_pool": "jumbo_agv"}, "(did you mean jumbo_avg?)"),
        ({"class_token": True}, "class_token=True does not fit"),
        ({"rope_type": "axial"}, "needs timm's own blocks; give a NaFlexVit with registers a Jumbo token by"),
        ({"drop_path_schedule": "cosine"}, "drop_path_schedule='cosine' is unknown"),
        ({"weight_init": "xaver"}, "weight_init='xaver' is unknown"),
        ({"fc_norm": True}, "fc_norm=True norms one token after pooling"),
        ({"num_jumbo": 0}, "num_jumbo is 0"),
    ],
)
def test_refusals(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        timm.create_model(NAME, **{**SMALL, **kwargs})
    assert text in str(error.value)


def test_size_that_patches_do_not_tile() -> None:
    with pytest.raises(UserError, match="36x32 is not a multiple of the patch size 8x8"):
        build()(torch.randn(1, 3, 36, 32))
    assert build(dynamic_img_pad=True)(torch.randn(1, 3, 36, 32)).shape == (1, 10)
    assert build()(torch.randn(1, 3, 16, 64)).shape == (1, 10)


def test_timms_contract() -> None:
    model, x = build(), torch.randn(2, 3, 32, 48)
    final, maps = model.forward_intermediates(x, indices=[0, 2])
    assert [tuple(m.shape) for m in maps] == [(2, 32, 4, 6)] * 2 and final.shape == (2, 27, 32)
    features = timm.create_model(NAME, **SMALL, features_only=True, out_indices=(0, 1))
    assert [tuple(m.shape) for m in features(x)] == [(2, 32, 4, 6)] * 2
    model.double().reset_classifier(3, "jumbo")
    assert model(x.double()).shape == (2, 3) and model.head.weight.dtype == torch.float64
    model.reset_classifier(0)
    assert model(x.double()).shape == (2, 96) and model.num_classes == 0
    for classes in (0, 1, 2):
        assert build(num_classes=classes)(x).shape == (2, classes or 128)
    assert build(in_chans=13)(torch.randn(1, 13, 32, 32)).shape == (1, 10)
    dropped = build(patch_drop_rate=0.5).train()
    assert dropped(patched(list(x), 30, fill=1.0)).shape == (2, 10)
    assert model.prune_intermediate_layers([1]) == [1] and len(model.blocks) == 2


def test_given_configuration_is_not_changed() -> None:
    cfg = NaFlexVitCfg(embed_dim=32, depth=1, num_heads=2, global_pool="map", reg_tokens=4)
    before = dataclasses.replace(cfg)
    model = JumboNaFlexVit(cfg, num_jumbo=3)
    assert cfg == before and model.num_prefix_tokens == 3


def test_optimizer_groups() -> None:
    model = build()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    names = {id(p): n for n, p in model.named_parameters()}
    seen = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(seen) == len(names) == sum(len(g["params"]) for g in optimizer.param_groups)
    lowest = min(scale for scale, _ in seen.values())
    assert seen["embeds.reg_token"] == seen["embeds.pos_embed"] == (lowest, 0.0)
    assert seen["head.weight"] == (1.0, 0.05)
    assert seen["jumbo_mlp.fc1.weight"] == (seen["norm.weight"][0], 0.05)


def test_copies_and_saves() -> None:
    model, x = build(), torch.randn(1, 3, 32, 32)
    wanted = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), wanted)
        nn.init.zeros_(twin.jumbo_mlp.fc2.weight)
        assert not torch.equal(twin(x), wanted)
    assert torch.equal(model(x), wanted)


def test_exports_with_any_batch() -> None:
    model = build()
    program = torch.export.export(
        model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},)
    )
    x = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-6, rtol=1e-5)


def test_compiles_whole() -> None:
    model = build(pos_embed_use_grid_sample=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for x in (torch.randn(2, 3, 32, 32), patched(list(torch.randn(2, 3, 32, 24)), 20, fill=1.0)):
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


def test_folder(tmp_path: Path) -> None:
    model = build()
    save_folder(tmp_path, model, Contract("multiclass", [str(i) for i in range(10)], Preparation((3, 32, 32))))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(open_folder(tmp_path)[0](x), model(x))
        source = f"local-dir:{tmp_path}"
        assert torch.equal(timm.create_model(source, pretrained=True).eval()(x), model(x))
        other = timm.create_model(source, pretrained=True, in_chans=1, img_size=48, patch_size=16, num_classes=2)
        assert other.eval()(torch.randn(1, 1, 48, 48)).shape == (1, 2)


@pytest.mark.parametrize("wrap", ["", "module.", "_orig_mod.module."])
def test_weights_of_the_plain_model_and_of_the_authors(wrap: str, tmp_path: Path) -> None:
    plain = timm.create_model("jumbo_vit_test_patch8_32", depth=3).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
    state: dict[str, Any] = {wrap + name: value for name, value in plain.state_dict().items()}
    if wrap:  # the authors' names
        state[f"{wrap}jumbo_token"] = state.pop(f"{wrap}reg_token")
        state[f"{wrap}cls_token"] = torch.zeros(1, 1, 32)
    torch.save(state, tmp_path / "w.pth")
    overlay = {"file": str(tmp_path / "w.pth"), "num_classes": 10}
    model = timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=0)
    bigger = timm.create_model(
        NAME, pretrained=True, pretrained_cfg_overlay=overlay, **{**SMALL, "img_size": 64, "patch_size": 16}
    )
    assert bigger.embeds.pos_embed.shape == (1, 4, 4, 32)  # type: ignore[union-attr]
