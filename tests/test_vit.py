"""The image model: its equations, start, options, sharing and refusals."""

import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jumbo_vit.block import OFFICIAL_NORM
from jumbo_vit.trunk import INITS
from jumbo_vit.vit import JumboVisionTransformer
from tests import oracle
from tests.test_block import randomise, tokens

POOLS = JumboVisionTransformer.pools
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "ffn per block": {"share_jumbo_mlp": False},
    "no jumbo ffn": {"jumbo_mlp_ratio": 0},
    "bypass": {"lora_rank": 2},
    "registers": {"reg_tokens": 2},
    "layer scale": {"init_values": 0.1},
}


def make(**options: Any) -> JumboVisionTransformer:
    """A miniature: D=8, two blocks, J=3, 2x3 patches of 4 px."""
    small: dict[str, Any] = {
        "img_size": (8, 12),
        "patch_size": 4,
        "embed_dim": 8,
        "depth": 2,
        "num_heads": 2,
        "num_jumbo": 3,
        "num_classes": 5,
    }
    return JumboVisionTransformer(**(small | options))


@settings(max_examples=20)
@given(data=st.data())
def test_model_equals_its_equations(data: st.DataObject) -> None:
    heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    patch_size = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    grid = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    ratio = data.draw(st.sampled_from([0, 0.5, 4.0]))
    shape: dict[str, Any] = {
        "num_heads": heads,
        "num_jumbo": data.draw(st.integers(1, 4)),
        "depth": data.draw(st.integers(1, 3)),
        "reg_tokens": data.draw(st.integers(0, 2)),
        "share_jumbo_mlp": data.draw(st.booleans()),
        "jumbo_mlp_ratio": ratio,
        "lora_rank": data.draw(st.integers(0, 2)) if ratio else 0,
    }
    pool = data.draw(st.sampled_from(["jumbo_avg", "jumbo", "avg"]))
    picture_size = (grid[0] * patch_size[0], grid[1] * patch_size[1])
    model = JumboVisionTransformer(
        img_size=picture_size,
        patch_size=patch_size,
        embed_dim=heads * head_dim,
        num_classes=data.draw(st.integers(1, 3)),
        global_pool=pool,
        dtype=torch.float64,
        **shape,
    ).eval()
    randomise(model)
    pictures = tokens(data.draw(st.integers(1, 2)), 3, *picture_size)
    keys, mask = None, None
    if data.draw(st.booleans()):
        length = shape["num_jumbo"] + shape["reg_tokens"] + grid[0] * grid[1]
        row = st.lists(st.booleans(), min_size=length, max_size=length).filter(any)
        keys = np.array([data.draw(row) for _ in pictures])
        mask = torch.tensor(keys)[:, None, None, :]

    expected_tokens, expected_logits = oracle.vit(
        model.state_dict(), pictures.numpy(), patch_size=patch_size, pool=pool, keys=keys, **shape
    )
    with torch.no_grad():
        got_tokens = model.forward_features(pictures, attn_mask=mask)
        got_logits = model(pictures, attn_mask=mask)
    np.testing.assert_allclose(got_tokens.numpy(), expected_tokens, rtol=0, atol=1e-9)
    np.testing.assert_allclose(got_logits.numpy(), expected_logits, rtol=0, atol=1e-9)


def draw_model(data: st.DataObject, **fixed: Any) -> tuple[JumboVisionTransformer, torch.Tensor]:
    """A model of any small J, D, depth, grid and registers in float64, and a batch for it."""
    heads, grid = data.draw(st.integers(1, 3)), (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    options: dict[str, Any] = {
        "img_size": (2 * grid[0], 2 * grid[1]),
        "patch_size": 2,
        "embed_dim": heads * data.draw(st.integers(2, 4)),
        "num_heads": heads,
        "num_jumbo": data.draw(st.integers(1, 4)),
        "depth": data.draw(st.integers(1, 3)),
        "reg_tokens": data.draw(st.integers(0, 2)),
        "share_jumbo_mlp": data.draw(st.booleans()),
        "dtype": torch.float64,
    }
    model = make(**(options | fixed)).eval()
    randomise(model)
    return model, tokens(data.draw(st.integers(1, 2)), 3, 2 * grid[0], 2 * grid[1])


@settings(max_examples=30)
@given(data=st.data())
def test_no_information_from_masked_patches(data: st.DataObject) -> None:
    model, pictures = draw_model(data)
    first, count = model.num_prefix_tokens, model.patch_embed.num_patches
    row = st.lists(st.booleans(), min_size=count, max_size=count)
    seen = torch.tensor([data.draw(row) for _ in pictures])
    mask = torch.cat([torch.ones(len(pictures), first, dtype=torch.bool), seen], dim=1)
    pixels = seen.view(-1, 1, *model.patch_embed.grid_size).repeat_interleave(2, 2).repeat_interleave(2, 3)
    garbage = torch.where(pixels, pictures, 1e3 * tokens(*pictures.shape, seed=2))
    with torch.no_grad():
        before, after = (model.forward_features(x, attn_mask=mask[:, None, None, :]) for x in (pictures, garbage))
    assert torch.equal(before[mask], after[mask])


def test_without_the_mask_they_would_be_seen() -> None:
    model, pictures = make(dtype=torch.float64).eval(), tokens(2, 3, 8, 12)
    randomise(model)
    changed = pictures.clone()
    changed[:, :, :4, 8:] += 10.0  # the third patch
    with torch.no_grad():
        before, after = model.forward_features(pictures), model.forward_features(changed)
    assert ((before - after).abs().amax(-1) > 1e-3).all()


@settings(max_examples=30)
@given(data=st.data())
def test_global_tokens_and_patches_are_never_mixed_up(data: st.DataObject) -> None:
    model, pictures = draw_model(data, share_jumbo_mlp=False, final_norm=False)
    jumbo, first, last = model.num_jumbo, model.num_prefix_tokens, model.blocks[-1]
    with torch.no_grad():
        before = model.forward_features(pictures)
        last.jumbo_mlp.fc2.bias += 1.0
        wide = model.forward_features(pictures) - before
        last.mlp.fc2.bias += 1.0
        both = model.forward_features(pictures) - before
        pooled = model.pool(before)
    # Each FFN moves its own tokens, all of them, and no other.
    torch.testing.assert_close(wide[:, :jumbo], torch.ones_like(wide[:, :jumbo]))
    assert not wide[:, jumbo:].any()
    torch.testing.assert_close(both, torch.ones_like(both))
    # What the head reads: the Jumbo tokens in their order, then the mean of patches alone.
    assert torch.equal(pooled[:, : jumbo * model.embed_dim], before[:, :jumbo].flatten(1))
    torch.testing.assert_close(pooled[:, jumbo * model.embed_dim :], before[:, first:].mean(1))
    # Feature maps hold each patch at its place.
    maps = model.forward_intermediates(pictures, indices=1, intermediates_only=True)[0]
    with torch.no_grad():
        assert torch.equal(maps.flatten(2).mT, model.forward_features(pictures)[:, first:])


@settings(max_examples=20)
@given(data=st.data())
def test_without_positions_patches_may_stand_in_any_order(data: st.DataObject) -> None:
    model, pictures = draw_model(data)
    nn.init.zeros_(model.pos_embed)
    first, count = model.num_prefix_tokens, model.patch_embed.num_patches
    order = data.draw(st.permutations(range(count)))
    with torch.no_grad():
        embedded = model._pos_embed(model.patch_embed(pictures))
        moved = torch.cat([embedded[:, :first], embedded[:, first:][:, order]], dim=1)
        before, after = model.blocks(embedded), model.blocks(moved)
    torch.testing.assert_close(after[:, :first], before[:, :first], rtol=0, atol=1e-9)
    torch.testing.assert_close(after[:, first:], before[:, first:][:, order], rtol=0, atol=1e-9)


def test_in_a_one_block_model_the_shared_ffn_moves_jumbo_tokens_only() -> None:
    model = make(depth=1, dtype=torch.float64, final_norm=False, reg_tokens=2).eval()
    randomise(model)
    pictures = tokens(2, 3, 8, 12)
    with torch.no_grad():
        before = model.forward_features(pictures)
        model.jumbo_mlp.fc2.bias += 1.0
        moved = model.forward_features(pictures) - before
    jumbo, registers, patches = model.split(moved)
    torch.testing.assert_close(jumbo, torch.ones_like(jumbo))
    assert not registers.any()
    assert not patches.any()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_every_parameter_gets_a_gradient(pool: str, option: str) -> None:
    model = make(global_pool=pool, **OPTIONS[option])
    randomise(model)
    out = model(torch.randn(2, 3, 8, 12))
    (out * torch.randn_like(out)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, grad in gradients.items() if grad is None] == []
    # Zero only where the last block works on tokens that the head does not read.
    zero = {name for name, grad in gradients.items() if grad is not None and not grad.any()}
    unread = {
        "jumbo": ("blocks.1.norm2", "blocks.1.mlp", "blocks.1.ls2"),
        "jumbo_avg": (),
        "": (),
    }.get(pool, ("blocks.1.norm3", "blocks.1.jumbo_mlp", "blocks.1.lora", "blocks.1.ls3"))
    assert zero == {name for name in gradients if name.startswith(unread)}


def test_checkpointed_gradients_are_the_plain_ones() -> None:
    model = make(dtype=torch.float64)
    randomise(model)
    pictures, found = tokens(2, 3, 8, 12), []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(pictures).sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(model.parameters()))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("schedule", "expected"), [("constant", [0.3, 0.3, 0.3]), ("linear", [0.0, 0.15, 0.3])])
def test_drop_path_schedules(schedule: Any, expected: list[float]) -> None:
    model = make(depth=3, drop_path_rate=0.3, drop_path_schedule=schedule)
    for block, rate in zip(model.blocks, expected, strict=True):
        for drop in (block.drop_path1, block.drop_path2, block.drop_path3):
            assert getattr(drop, "drop_prob", 0.0) == pytest.approx(rate)


def test_drop_path_defaults_to_none() -> None:
    assert not [m for m in make().modules() if type(m).__name__ == "DropPath"]


def test_a_dropped_branch_is_left_out_in_training_only() -> None:
    model = make(drop_path_rate=0.999999, final_norm=False, dtype=torch.float64)
    randomise(model)
    pictures = tokens(2, 3, 8, 12)
    with torch.no_grad():
        embedded = model._pos_embed(model.patch_embed(pictures))
        torch.manual_seed(0)
        assert torch.equal(model.train().forward_features(pictures), embedded)
        assert not torch.allclose(model.eval().forward_features(pictures), embedded)


@pytest.mark.parametrize("mode", [mode for mode in INITS if mode != "skip"])
@pytest.mark.parametrize("num_classes", [1, 2, 10])
def test_head_starts_at_zero_with_the_prior_as_bias(mode: str, num_classes: int) -> None:
    model = make(weight_init=mode, num_classes=num_classes, lora_rank=2)
    assert not model.head.weight.any()
    torch.testing.assert_close(model.head.bias, torch.full((num_classes,), -math.log(num_classes)))
    assert not any(block.lora.up.weight.any() for block in model.blocks)
    assert all(block.lora.down.weight.any() for block in model.blocks)


@pytest.mark.parametrize(("mode", "std"), [("", 0.02), ("xavier", 0.2), ("jax", 0.02)])
def test_tokens_and_positions_start_at_the_modes_spread(mode: str, std: float) -> None:
    torch.manual_seed(0)
    model = make(img_size=64, embed_dim=64, num_jumbo=16, weight_init=mode)
    for values in (model.reg_token, model.pos_embed):
        assert values.std().item() == pytest.approx(std, rel=0.1)
        assert abs(values.mean().item()) < 0.1 * std


def test_official_start_of_linears_and_norms() -> None:
    torch.manual_seed(0)
    model = make(embed_dim=64, depth=1)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.head]
    assert len(linears) == 6
    for linear in linears:
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not linear.bias.any()
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        assert norm.eps == 1e-5
        assert bool((norm.weight == 1).all())
        assert not norm.bias.any()


def test_xavier_start_of_linears_and_the_patch_projection() -> None:
    torch.manual_seed(0)
    model = make(embed_dim=64, depth=1, weight_init="xavier")
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not model.head]
    for weight in [*weights, model.patch_embed.proj.weight.flatten(1)]:
        bound = math.sqrt(6 / (weight.shape[0] + weight.shape[1]))
        assert 0.98 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_init_weights_starts_again_in_the_models_own_mode() -> None:
    torch.manual_seed(0)
    model = make(img_size=64, embed_dim=64, weight_init="xavier", lora_rank=2)
    randomise(model)
    model.init_weights()
    assert model.pos_embed.std().item() == pytest.approx(0.2, rel=0.1)
    assert not model.head.weight.any()
    assert not model.blocks[1].lora.up.weight.any()
    model.init_weights("moco")
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("num_classes", [0, 1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_few_classes(num_classes: int, pool: str) -> None:
    width = {"jumbo_avg": 32, "jumbo": 24}.get(pool, 8)
    model = make(num_classes=num_classes, global_pool=pool)
    assert (model.num_features, model.head_hidden_size) == (8, width)
    out = model(torch.randn(2, 3, 8, 12))
    assert out.shape == ((2, 9) if pool == "" else (2,)) + (num_classes or width,)
    if num_classes:
        torch.testing.assert_close(out, torch.full_like(out, -math.log(num_classes)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reset_classifier_keeps_type_and_device(dtype: torch.dtype) -> None:
    model = make().to(dtype).eval()
    model.reset_classifier(7)
    assert (model.num_classes, model.head.weight.dtype, model.head.training) == (7, dtype, False)
    assert not model.head.weight.any()
    torch.testing.assert_close(model.head.bias, torch.full((7,), -math.log(7), dtype=dtype))
    assert model(torch.randn(1, 3, 8, 12, dtype=dtype)).shape == (1, 7)
    on_meta = make(device="meta", weight_init="skip")
    on_meta.reset_classifier(7)
    assert on_meta.head.weight.is_meta


def test_reset_classifier_can_change_the_pool() -> None:
    model = make(global_pool="map")
    pictures = torch.randn(2, 3, 8, 12)
    for pool, width in (("map", 8), ("jumbo", 24), ("avg", 8), ("jumbo_avg", 32)):
        model.reset_classifier(4, pool)
        assert (model.global_pool, model.head_hidden_size, model.head.in_features) == (pool, width, width)
        assert model(pictures).shape == (2, 4)
        assert model.forward_head(model.forward_features(pictures), pre_logits=True).shape == (2, width)
    model.reset_classifier(0)
    assert model(pictures).shape == (2, 32)


def test_registers_are_neither_jumbo_nor_patches() -> None:
    model = make(reg_tokens=2)
    jumbo, registers, patches = model.split(torch.arange(11.0).view(1, 11, 1))
    assert jumbo.flatten().tolist() == [0, 1, 2]
    assert registers.flatten().tolist() == [3, 4]
    assert patches.flatten().tolist() == [5, 6, 7, 8, 9, 10]
    assert model.pos_embed.shape[1] == 6


def test_an_activation_may_be_given_by_name() -> None:
    model = make(act_layer="silu")
    assert isinstance(model.jumbo_mlp.act, nn.SiLU)
    assert isinstance(model.blocks[0].mlp.act, nn.SiLU)
    assert model(torch.randn(1, 3, 8, 12)).shape == (1, 5)


def test_norms_keep_the_official_epsilon_under_timms_default() -> None:
    assert make(norm_layer=None).norm.eps == OFFICIAL_NORM(4).eps == 1e-5


def test_parameter_groups_keep_the_shared_ffn_with_the_final_norm() -> None:
    from timm.models import group_parameters

    model = make()
    groups = group_parameters(model, model.group_matcher())
    layer = {name: index for index, names in groups.items() for name in names}
    assert set(layer) == {name for name, _ in model.named_parameters()}
    assert layer["reg_token"] == layer["pos_embed"] == layer["patch_embed.proj.weight"] == 0
    assert layer["blocks.0.norm3.weight"] < layer["blocks.1.norm3.weight"]
    assert layer["jumbo_mlp.fc1.weight"] == layer["norm.weight"] == layer["blocks.1.norm3.weight"]


def test_tokens_and_positions_are_kept_from_weight_decay() -> None:
    assert {"reg_token", "pos_embed"} <= make().no_weight_decay()


def test_feature_maps_hold_patches_only() -> None:
    model = timm.create_model("jumbo_vit_test_patch8_32", features_only=True, out_indices=(0, 1))
    assert [tuple(m.shape) for m in model(torch.randn(2, 3, 32, 32))] == [(2, 32, 4, 4)] * 2
