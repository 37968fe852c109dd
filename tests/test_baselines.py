"""The baselines: what they share with Jumbo, what they have of their own, and what all sizes cost."""

import math
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
import timm
import torch
from torch import nn

from jumbo_vit.baselines import BaselineVisionTransformer
from jumbo_vit.errors import UserError
from jumbo_vit.measure.cost import attention_macs, cost, macs
from jumbo_vit.sizes import BASELINE_NAMES, MODEL_NAMES, REGISTERS, SIZES, baseline_name, model_name
from tests.test_block import randomise

# Millions of parameters at 1,000 classes and 224 px; for Jumbo also GMACs of one picture at 128 and 224 px.
REGISTERS_M = {"pico": 1.53, "nano": 2.63, "tiny": 5.72, "small": 22.06, "base": 86.58, "large": 304.34}
JUMBO_M = {"pico": 4.78, "nano": 8.14, "tiny": 17.52, "small": 66.89, "base": 131.41}
JUMBO_GMACS = {
    "pico": ("0.13", "0.31"),
    "nano": ("0.22", "0.54"),
    "tiny": ("0.49", "1.21"),
    "small": ("1.93", "4.77"),
    "base": ("6.07", "17.36"),
}


def on_meta(name: str, **options: Any) -> Any:
    return timm.create_model(name, device="meta", weight_init="skip", **options)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def rounded(value: float, digits: str) -> Decimal:
    return Decimal(value).quantize(Decimal(digits), ROUND_HALF_UP)


@pytest.mark.parametrize("name", [*MODEL_NAMES, *BASELINE_NAMES])
def test_closed_form_counts_are_the_models(name: str) -> None:
    size, kind = BASELINE_NAMES.get(name, (MODEL_NAMES.get(name, ""), "jumbo"))
    row, model = SIZES[size], on_meta(name)
    assert cost(row, kind=kind).parameters == parameters(model)
    assert cost(row, 5, 1, kind).parameters == parameters(on_meta(name, num_classes=5, in_chans=1))
    shared = parameters(model.jumbo_mlp) if kind == "jumbo" else 0
    assert cost(row, kind=kind).shared_ffn == shared


@pytest.mark.parametrize("kind", ["jumbo", *REGISTERS])
def test_closed_form_macs_are_those_of_a_pass(kind: str) -> None:
    row = SIZES["test"]
    name = model_name("test") if kind == "jumbo" else baseline_name("test", kind)
    model, counted = timm.create_model(name).eval(), []
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(lambda m, _, out: counted.append(m.weight[0].numel() * out[0].numel()))
    model(torch.randn(1, 3, 32, 32))
    assert sum(counted) == macs(row, 32, kind=kind)
    tokens = 16 + model.num_prefix_tokens
    assert attention_macs(row, 32, kind) == row.depth * 2 * tokens**2 * row.dim


@pytest.mark.parametrize("size", JUMBO_M)
def test_jumbo_costs_what_the_papers_table_says(size: str) -> None:
    row = SIZES[size]
    assert rounded(cost(row).parameters / 1e6, "0.01") == Decimal(str(JUMBO_M[size]))
    for pixels, expected in zip((128, 224), JUMBO_GMACS[size], strict=True):
        # The table was rounded from three digits: pico has 0.1248, so 0.125, so 0.13.
        three = float(rounded(macs(row, pixels) / 1e9, "0.001"))
        assert rounded(Decimal(str(three)), "0.01") == Decimal(expected)


@pytest.mark.parametrize("size", REGISTERS_M)
def test_registers_cost_what_the_papers_table_says(size: str) -> None:
    assert rounded(cost(SIZES[size], kind="reg16").parameters / 1e6, "0.01") == Decimal(str(REGISTERS_M[size]))
    if size == "small":
        assert rounded(cost(SIZES[size], 10_450, kind="reg16").parameters / 1e6, "0.01") == Decimal("25.69")


def test_large_has_the_paper_sizes() -> None:
    model = on_meta("jumbo_vit_large_patch16_224")
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads, model.num_jumbo) == (1024, 24, 16, 3)
    assert round(parameters(model) / 1e6) == 383


@pytest.mark.parametrize(("kind", "first"), [("cls", 1), ("reg16", 17)])
def test_global_tokens_stand_in_front_and_have_no_position(kind: str, first: int) -> None:
    model = timm.create_model(f"vit_test_patch8_{kind}_32")
    assert (model.num_prefix_tokens, model.num_global, model.pos_embed.shape[1]) == (first, first, 16)
    tokens = torch.arange(first + 16.0).view(1, -1, 1)
    prefix, registers, patches = model.split(tokens)
    assert prefix.flatten().tolist() == list(range(first))
    assert registers.shape[1] == 0
    assert patches.flatten().tolist() == list(range(first, first + 16))


def test_pools_read_what_they_say() -> None:
    model = timm.create_model("vit_test_patch8_reg16_32").eval()
    tokens = torch.randn(2, 33, 32)
    prefix, patches = tokens[:, :17].flatten(1), tokens[:, 17:]
    expected = {
        "prefix_avg": torch.cat([prefix, patches.mean(1)], dim=1),
        "prefix": prefix,
        "token": tokens[:, 0],
        "avg": patches.mean(1),
        "max": patches.amax(1),
        "avgmax": 0.5 * (patches.mean(1) + patches.amax(1)),
        "": tokens,
    }
    for pool, value in expected.items():
        assert torch.equal(model.pool(tokens, pool), value), pool
        width = value.shape[-1]
        model.reset_classifier(3, pool)
        assert (model.head_hidden_size, model.head.in_features, model.num_features) == (width, width, 32)


@pytest.mark.parametrize(("size", "std"), [("tiny", 0.02), ("micro", 0.2)])
def test_all_arms_start_alike(size: str, std: float) -> None:
    torch.manual_seed(0)
    arms = [name for name, key in {**MODEL_NAMES, **BASELINE_NAMES}.items() if key == size or key[0] == size]
    assert len(arms) == 3
    for name in arms:
        model = timm.create_model(name, depth=2)
        for values in (model.reg_token, model.pos_embed):
            if values is not None:
                assert values.std().item() == pytest.approx(std, rel=0.1)
        if model.cls_token is not None:
            assert model.cls_token.std().item() == pytest.approx(std, rel=0.4)
        assert not model.head.weight.any()
        torch.testing.assert_close(model.head.bias, torch.full_like(model.head.bias, -math.log(model.num_classes)))
        linear = model.blocks[0].attn.qkv.weight
        spread = math.sqrt(2 / sum(linear.shape)) if size == "micro" else 0.02
        assert linear.std().item() == pytest.approx(spread, rel=0.05)
        assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
        assert (model.norm.normalized_shape, type(model.fc_norm)) == ((model.embed_dim,), nn.Identity)


@pytest.mark.parametrize(("schedule", "expected"), [("constant", [0.3] * 3), ("linear", [0.0, 0.15, 0.3])])
def test_drop_path_schedules(schedule: str, expected: list[float]) -> None:
    model = timm.create_model("vit_test_patch8_cls_32", drop_path_rate=0.3, drop_path_schedule=schedule)
    for block, rate in zip(model.blocks, expected, strict=True):
        for drop in (block.drop_path1, block.drop_path2):
            assert getattr(drop, "drop_prob", 0.0) == pytest.approx(rate)


def test_a_baseline_is_timms_vit_under_the_same_weights() -> None:
    ours = timm.create_model("vit_test_patch8_reg16_32").eval()
    randomise(ours)
    theirs = timm.models.VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=2,
        num_classes=10,
        reg_tokens=16,
        no_embed_class=True,
        norm_layer=lambda dim, **kwargs: nn.LayerNorm(dim, eps=1e-5, **kwargs),
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    pictures = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(pictures), theirs(pictures))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_pool": "jumbo_avg"}, r"global_pool='jumbo_avg' is unknown; use one of 'prefix_avg'"),
        ({"global_pool": "token", "class_token": False}, "'token' needs a class token; .* without one has 'prefix'"),
        ({"global_pool": "prefix", "class_token": False}, "global_pool='prefix' needs a global token"),
        ({"no_embed_class": False}, "no_embed_class=False does not fit: a global token has no position"),
        ({"global_pool": "prefix", "fc_norm": True}, "fc_norm=True norms one token after pooling"),
        ({"img_size": 30}, "30x30 is not a multiple"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        BaselineVisionTransformer(**({"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_heads": 2} | options))


def test_jumbo_refuses_a_norm_that_does_not_fit_its_head() -> None:
    with pytest.raises(UserError, match="fc_norm=True norms one token"):
        timm.create_model("jumbo_vit_test_patch8_32", fc_norm=True)
    model = timm.create_model("jumbo_vit_test_patch8_32", fc_norm=True, global_pool="avg")
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(UserError, match="fc_norm=True norms one token"):
        model.reset_classifier(3, "jumbo")
