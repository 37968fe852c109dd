"""`optimize` against the model it is made from, for every option of the models it takes."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import jumbo_vit
from jumbo_vit.errors import UserError
from jumbo_vit.fast import INT8_UP_TO, Int8, Packed, optimize

TEST_MODEL = "jumbo_vit_test_patch8_32"


def alive(model: nn.Module) -> nn.Module:
    """Every parameter at random: norms, scales, biases, bypasses and heads start at values that hide mistakes."""
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def relative(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@settings(max_examples=25)
@given(
    jumbo=st.sampled_from([1, 3, 6]),
    heads=st.sampled_from([1, 2, 4]),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(1, 6),
    options=st.fixed_dictionaries(
        {},
        optional={
            "jumbo_mlp_ratio": st.sampled_from([0, 1, 4]),
            "share_jumbo_mlp": st.booleans(),
            "init_values": st.just(0.3),
            "reg_tokens": st.integers(1, 3),
            "global_pool": st.sampled_from(["jumbo", "avg", "map", ""]),
            "qkv_bias": st.just(False),
            "num_classes": st.sampled_from([0, 3]),
            "drop_path_rate": st.just(0.5),
            "pos_embed": st.just("none"),
        },
    ),
)
def test_fp32_is_the_model_within_1e_5(jumbo, heads, grid, batch, options: dict[str, Any]):
    model = timm.create_model(
        TEST_MODEL, num_jumbo=jumbo, num_heads=heads, img_size=(8 * grid[0], 8 * grid[1]), **options
    )
    images = torch.randn(batch, 3, 8 * grid[0], 8 * grid[1])
    expected = alive(model)(images)
    out = optimize(model)(images)
    assert out.shape == expected.shape and out.dtype == torch.float32
    # Outputs of these models with random parameters are of the size of ten.
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["vit_micro_cls", "vit_micro_reg16", "vit_test_patch8_reg16_32", "test_vit"])
@pytest.mark.parametrize("batch", [1, 3])
def test_baselines_and_timm_models(name: str, batch: int):
    model = alive(timm.create_model(name))
    images = torch.randn(batch, *model.pretrained_cfg["input_size"])
    assert relative(optimize(model)(images), model(images)) < 1e-5
    assert relative(optimize(model, "bf16")(images), model(images)) < 0.05


def test_lora_and_layer_scale_of_the_jumbo_path():
    model = alive(timm.create_model(TEST_MODEL, lora_rank=2, init_values=0.5))
    images = torch.randn(2, 3, 32, 32)
    assert relative(optimize(model)(images), model(images)) < 1e-5
    assert relative(optimize(model, "bf16")(images), model(images)) < 0.05


@pytest.mark.parametrize("precision", ["bf16", "int8-jumbo"])
@pytest.mark.parametrize("batch", [1, INT8_UP_TO, INT8_UP_TO + 1])
@pytest.mark.parametrize("size", [32, (24, 40), (8, 8)])
def test_low_precision_is_near(precision: str, batch: int, size: Any):
    model = alive(timm.create_model(TEST_MODEL, img_size=size))
    images = torch.randn(batch, *model.pretrained_cfg["input_size"][:1], *model.patch_embed.img_size)
    assert 0 < relative(optimize(model, precision)(images), model(images)) < 0.05  # type: ignore[arg-type]


def test_padding_to_the_kernels_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model = alive(timm.create_model(TEST_MODEL))
    images = torch.randn(2, 3, 32, 32)
    fast = optimize(model, "bf16")
    padded = fast(images)
    monkeypatch.setattr("jumbo_vit.fast.TOKENS_MULTIPLE", 1)
    # The kernels' sums run in another order, which bfloat16 shows in its last digit.
    assert relative(fast(images), padded) < 0.01


def test_a_picture_gets_the_same_answer_in_any_batch():
    model = alive(timm.create_model(TEST_MODEL))
    images = torch.randn(7, 3, 32, 32)
    for precision in ("fp32", "bf16", "int8-jumbo"):
        fast = optimize(model, precision)  # type: ignore[arg-type]
        alone = torch.cat([fast(image[None]) for image in images])
        assert relative(fast(images), alone) < (1e-5 if precision == "fp32" else 0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8-jumbo"])
@pytest.mark.parametrize("options", [{}, {"global_pool": ""}, {"num_classes": 0}])
def test_no_picture_gives_no_answer_of_the_models_shape(precision: Any, options: dict[str, Any]):
    model = alive(timm.create_model(TEST_MODEL, **options))
    images = torch.randn(0, 3, 32, 32)
    assert optimize(model, precision)(images).shape == model(images).shape


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 32, 32), (1, 32, 32), (1, 3, 3, 32, 32), (1, 3, 40, 32)])
def test_pictures_of_another_form_get_the_models_error(compiled: bool, shape: tuple[int, ...]):
    model = alive(timm.create_model(TEST_MODEL))
    with pytest.raises((RuntimeError, ValueError, AssertionError)) as plain:
        model(torch.randn(shape))
    with pytest.raises(plain.type) as found:
        optimize(model, compile=compiled)(torch.randn(shape))
    assert str(found.value).splitlines()[0] == str(plain.value).splitlines()[0]


def test_any_size_of_a_dynamic_model():
    model = alive(timm.create_model(TEST_MODEL, dynamic_img_size=True))
    fast = optimize(model)
    for size in ((32, 32), (16, 48), (40, 8)):
        images = torch.randn(2, 3, *size)
        assert relative(fast(images), model(images)) < 1e-5


def test_the_model_stays_as_it_is():
    model = alive(timm.create_model(TEST_MODEL)).train()
    before = copy.deepcopy(model.state_dict())
    blocks, shared = model.blocks, model.jumbo_mlp
    fast = optimize(model)
    assert model.training and model.blocks is blocks and model.jumbo_mlp is shared
    assert all(block._shared_mlp[0] is shared for block in model.blocks)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    images = torch.randn(2, 3, 32, 32)
    first = fast(images)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(fast(images), first)


def test_the_input_stays_as_it_is_and_nothing_has_a_gradient():
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    before = images.detach().clone()
    out = optimize(timm.create_model(TEST_MODEL), "bf16")(images)
    assert torch.equal(images, before) and not out.requires_grad


def test_what_it_knows_of_the_model():
    model = timm.create_model(TEST_MODEL, num_classes=5)
    fast = jumbo_vit.optimize(model)
    assert (fast.num_classes, fast.num_features, fast.training) == (5, model.num_features, False)
    assert fast.pretrained_cfg["input_size"] == (3, 32, 32)


def test_a_row_of_zeros_is_quantised():
    linear = nn.Linear(32, 16)
    linear.weight.data[3] = 0
    x = torch.randn(2, 32).bfloat16()
    for rows in (x, x.repeat(INT8_UP_TO, 1)):
        out = Int8(linear)(rows)
        assert torch.allclose(out[:2].float(), linear(x.float()), atol=0.05)
        assert torch.allclose(out[:, 3].float(), linear.bias[3].bfloat16().float())


@given(rows=st.integers(1, 40), inputs=st.integers(1, 40), outputs=st.integers(1, 40), bias=st.booleans())
def test_packed_is_the_linear(rows: int, inputs: int, outputs: int, bias: bool):
    linear, scale, other = nn.Linear(inputs, outputs, bias=bias), torch.randn(outputs), torch.randn(rows, outputs)
    x = torch.randn(rows, inputs)
    for plain_at_one in (False, True):
        packed = Packed(linear, torch.float32, scale, plain_at_one)
        expected = linear(x) * scale
        assert torch.allclose(packed(x), expected, atol=1e-5)
        assert torch.allclose(packed.gelu(x, "none"), nn.functional.gelu(expected), atol=1e-5)
        assert torch.allclose(packed.plus(x, other), expected + other, atol=1e-5)


class TestRefused:
    """One line that says what is allowed."""

    @pytest.mark.parametrize(
        ("name", "options", "words"),
        [
            (TEST_MODEL, {"qk_norm": True}, "norms inside attention in block 0"),
            (TEST_MODEL, {"act_layer": "silu"}, "the FFN FeedForward with SiLU"),
            ("vit_base_patch16_rope_224", {"depth": 1}, "not Eva"),
            ("resnet18", {}, "not ResNet"),
            ("naflexvit_jumbo_pico_patch16", {}, "not JumboNaFlexVit"),
        ],
    )
    def test_other_parts(self, name: str, options: dict[str, Any], words: str):
        with pytest.raises(UserError, match=words):
            optimize(timm.create_model(name, **options))

    def test_an_unknown_precision(self):
        with pytest.raises(UserError, match=r"fp32, bf16, int8-jumbo.*did you mean bf16"):
            optimize(timm.create_model(TEST_MODEL), "bf-16")  # type: ignore[arg-type]

    def test_int8_without_a_jumbo_ffn(self):
        with pytest.raises(UserError, match="use bf16"):
            optimize(timm.create_model("vit_micro_cls"), "int8-jumbo")
        with pytest.raises(UserError, match="use bf16"):
            optimize(timm.create_model(TEST_MODEL, jumbo_mlp_ratio=0), "int8-jumbo")

    def test_another_device(self):
        with pytest.raises(UserError, match="on meta"):
            optimize(timm.create_model(TEST_MODEL).to("meta"))

    def test_training_moving_and_copying(self):
        fast = optimize(timm.create_model(TEST_MODEL))
        fast.eval()
        for change in (fast.train, fast.half, lambda: fast.to("meta"), lambda: copy.deepcopy(fast)):
            with pytest.raises(UserError):
                change()
        with pytest.raises(UserError, match="save the model"):
            pickle.dumps(fast)


def test_a_compiled_single_picture_is_the_model_within_1e_5():
    model = alive(timm.create_model(TEST_MODEL))
    fast = optimize(model, compile=True)
    images = torch.randn(2, 3, 32, 32)
    one = fast(images[:1])
    assert relative(one, model(images[:1])) < 1e-5 and not one.requires_grad
    assert torch.equal(fast(images[:1]), one)
    assert relative(fast(images), model(images)) < 1e-5
    assert len(list(fast.parameters())) == len(list(optimize(model).parameters()))


@pytest.mark.parametrize("precision", ["bf16", "int8-jumbo"])
def test_compiling_is_for_fp32(precision: Any):
    with pytest.raises(UserError, match="fp32 only"):
        optimize(timm.create_model(TEST_MODEL), precision, compile=True)


def test_compiling_without_a_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))

    with pytest.raises(UserError, match="install g\\+\\+"):
        optimize(timm.create_model(TEST_MODEL), compile=True)
