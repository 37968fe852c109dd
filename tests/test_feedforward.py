"""Our feed-forward network against timm's Mlp: the same bits, and nobody sees the hidden layer overwritten."""

import copy

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import Mlp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jumbo_vit.feedforward import FeedForward


def twins(width: int = 8, **kwargs: object) -> tuple[FeedForward, Mlp]:
    """Ours and timm's with the same weights, in evaluation mode."""
    ours = FeedForward(width, 4 * width, **kwargs)  # type: ignore[arg-type]
    theirs = Mlp(width, 4 * width, **kwargs)  # type: ignore[arg-type]
    theirs.load_state_dict(ours.state_dict())
    return ours.eval(), theirs.eval()


def overwrites(module: FeedForward, x: Tensor) -> bool:
    """Whether the input of fc2 lies where fc1 wrote, seen by a wrapped fc1 weightless of hooks."""
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def noting(*args: Tensor) -> Tensor:
        out = linear(*args)
        seen.extend([args[0].data_ptr(), out.data_ptr()])
        return out

    torch.nn.functional.linear = noting  # type: ignore[assignment]
    try:
        module(x)
    finally:
        torch.nn.functional.linear = linear
    return seen[1] == seen[2]


@given(
    width=st.integers(1, 9),
    shape=st.lists(st.integers(0, 4), max_size=3),
    act=st.sampled_from([nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, timm.layers.GELU]),
    bias=st.booleans(),
    norm=st.booleans(),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_equals_timm_to_the_bit_with_and_without_gradients(width, shape, act, bias, norm, kind):
    ours, theirs = twins(width, act_layer=act, bias=bias, norm_layer=nn.LayerNorm if norm else None, dtype=kind)
    x = torch.randn(*shape, width, dtype=kind)
    before = x.clone()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(ours(x), theirs(x))
    assert torch.equal(x, before)


def test_gradients_equal_timm_to_the_bit():
    ours, theirs = twins()
    x = torch.randn(3, 8)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, theirs.get_parameter(name).grad)


def test_the_hidden_layer_is_overwritten_only_without_gradients():
    ours, _ = twins()
    x = torch.randn(5, 8)
    assert not overwrites(ours, x)
    with torch.no_grad():
        assert overwrites(ours, x)
    with torch.inference_mode():
        assert overwrites(ours.train(), x)


def test_a_hook_on_fc1_keeps_what_fc1_gave():
    ours, _ = twins()
    kept: list[Tensor] = []
    ours.fc1.register_forward_hook(lambda module, inputs, output: kept.append(output))
    x = torch.randn(5, 8)
    with torch.no_grad():
        ours(x)
        assert torch.equal(kept[0], nn.functional.linear(x, ours.fc1.weight, ours.fc1.bias))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_the_activation_keeps_its_input(kind):
    ours, _ = twins()
    kept: list[Tensor] = []
    getattr(ours.act, kind)(lambda module, inputs, *output: kept.append(inputs[0]))
    x = torch.randn(5, 8)
    with torch.no_grad():
        ours(x)
        assert torch.equal(kept[0], nn.functional.linear(x, ours.fc1.weight, ours.fc1.bias))


def test_a_global_hook_keeps_every_output():
    ours, _ = twins()
    kept: list[Tensor] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: kept.append(output) if module is ours.fc1 else None
    )
    x = torch.randn(5, 8)
    try:
        with torch.no_grad():
            ours(x)
    finally:
        handle.remove()
    assert torch.equal(kept[0], nn.functional.linear(x, ours.fc1.weight, ours.fc1.bias))


def test_an_exchanged_fc1_that_hands_back_its_input_leaves_it_alone():
    ours, _ = twins(8, norm_layer=None)
    ours.fc1, ours.fc2 = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    x = torch.randn(5, 8)
    before = x.clone()
    with torch.no_grad():
        assert torch.equal(ours(x), nn.functional.gelu(before))
    assert torch.equal(x, before)


@pytest.mark.parametrize("layer", ["fc1", "act"])
def test_a_forward_put_on_a_layer_is_called_and_keeps_its_tensors(layer):
    # As offloading and quantising tools do, without a hook and without another class.
    ours, theirs = twins()
    kept: list[Tensor] = []
    for module in (ours, theirs):
        target = module.get_submodule(layer)
        target.forward = lambda x, old=target.forward: kept.append(old(x).relu()) or kept[-1]
    x = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    assert len(kept) == 2 and torch.equal(*kept)


class FunctionMode(TorchFunctionMode):
    """Keeps what every function gave."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


class DispatchMode(TorchDispatchMode):
    """Keeps what every operator gave."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
def test_a_mode_keeps_every_result(mode):
    ours, theirs = twins()
    x = torch.randn(5, 8)
    with torch.no_grad():
        with mode() as first:
            ours(x)
        with mode() as second:
            theirs(x)
    for mine, other in zip(first.kept, second.kept, strict=True):
        assert not isinstance(mine, Tensor) or torch.equal(mine, other)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_nested_tensors(layout):
    ours, theirs = twins()
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
    with torch.no_grad():
        for mine, other in zip(ours(nested).unbind(), theirs(nested).unbind(), strict=True):
            assert torch.equal(mine, other)


def test_functional_transforms_without_gradients(capfd):
    ours, theirs = twins()
    x, direction = torch.randn(5, 8), torch.randn(5, 8)
    with torch.no_grad():
        assert torch.allclose(torch.func.vmap(ours)(x), theirs(x), atol=1e-6)
        for mine, other in zip(*(torch.func.jvp(m, (x,), (direction,)) for m in (ours, theirs)), strict=True):
            assert torch.equal(mine, other)
        for transform in (torch.func.jacfwd, torch.func.jacrev):
            assert torch.allclose(transform(ours)(x[0]), transform(theirs)(x[0]), atol=1e-6)
    assert "batching rule" not in capfd.readouterr().err  # vmap would loop over a GELU in place


def test_traced_without_gradients_it_still_trains():
    ours, theirs = twins()
    x = torch.randn(5, 8)
    with torch.no_grad():
        traced = {
            "fx": torch.fx.symbolic_trace(copy.deepcopy(ours)),
            "jit.trace": torch.jit.trace(copy.deepcopy(ours), x),
            "jit.script": torch.jit.script(copy.deepcopy(ours)),
            "export": torch.export.export(copy.deepcopy(ours), (x,)).module(),
        }
    theirs(x).square().sum().backward()
    for how, module in traced.items():
        module(x).square().sum().backward()
        assert torch.allclose(dict(module.named_parameters())["fc1.weight"].grad, theirs.fc1.weight.grad), how


def test_it_is_the_feed_forward_of_every_arm():
    for name in ("jumbo_vit_test_patch8_32", "vit_micro_cls", "vit_micro_reg16", "jumbo_vit_micro"):
        model = timm.create_model(name)
        mlps = [module for module in model.modules() if isinstance(module, Mlp)]
        assert mlps, name
        assert all(type(module) is FeedForward for module in mlps), name
