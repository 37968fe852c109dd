"""What every timm ViT promises, for every name that we register, at a small size. A new model: one line of CASES."""

import copy
import io
import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed, set_scriptable
from timm.models import model_entrypoint
from timm.models._features_fx import FeatureGraphNet
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.task import FeatureDistillationTask, LogitDistillationTask
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from jumbo_vit import naflex
from jumbo_vit.errors import UserError
from jumbo_vit.jumboized import NAME as JUMBOIZED
from jumbo_vit.sizes import BASELINE_NAMES, MODEL_NAMES
from tests.test_block import randomise

SMALL: dict[str, Any] = {
    "img_size": (16, 24),
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 5,
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*MODEL_NAMES, *BASELINE_NAMES)},
    **{name: {} for name in naflex.NAMES},
    JUMBOIZED: {"base": "vit_small_patch14_reg4_dinov2"},
}
# Tools that take seconds a model see each kind once; the names differ in sizes only.
KINDS = (
    "jumbo_vit_test_patch8_32",
    "vit_test_patch8_cls_32",
    "vit_test_patch8_reg16_32",
    "naflexvit_jumbo_pico_patch16",
    JUMBOIZED,
)
# What timm's class behind a kind does not offer, or does in its own way; all else is tested for every name.
NOT_OFFERED: dict[str, dict[str, str]] = {
    "naflex": {
        "fixed size": "takes every size that its patches tile; what they do not tile is refused in test_naflex.py",
        "set_input_size": "has no size to set: positions are resampled for each picture",
        "get_intermediate_layers": "timm's NaFlexVit has forward_intermediates only",
        "torchscript": "timm scripts no NaFlexVit: it takes a tensor or a dict",
    },
    "jumboized": {
        "our head": "the head and its start are the base model's",
        "refusal at construction": "the base model's: timm leaves out what patches do not tile",
        "set_input_size": "the base model's, which makes new Parameters; tested in test_jumboize.py",
        "torchscript": "scripting knows no class made at run time and no *args; torch.export is the way",
    },
}


def kind(name: str) -> str:
    return "naflex" if name in naflex.NAMES else "jumboized" if name == JUMBOIZED else "plain"


def offering(part: str, names: Iterable[str] = CASES) -> pytest.MarkDecorator:
    """The names whose class has this part of the contract."""
    return pytest.mark.parametrize("name", [n for n in names if part not in NOT_OFFERED.get(kind(n), {})])


every_name = pytest.mark.parametrize("name", CASES)
every_kind = pytest.mark.parametrize("name", KINDS)


def make(name: str, **options: Any) -> Any:
    """A small model of that name, with weights that matter, in training mode."""
    model = timm.create_model(name, **(SMALL | CASES[name] | options))
    randomise(model)
    return model


def embed(model: Any) -> Any:
    """The part that cuts a picture into patches."""
    return getattr(model, "patch_embed", None) or model.embeds


def block_outputs(model: Any, images: Tensor) -> list[Tensor]:
    """What each block gives: (B, L, D), the global tokens first."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: seen.append(out)) for block in model.blocks]
    model.forward_features(images)
    for hook in hooks:
        hook.remove()
    return seen


def pictures(batch: int = 2, channels: int = 3, size: tuple[int, int] = (16, 24), **options: Any) -> Tensor:
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(batch), **options)


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model.eval()(images)
    return out


def test_every_registered_name_is_here() -> None:
    registered = {n for n in timm.list_models() if model_entrypoint(n).__module__.startswith("jumbo_vit.")}
    assert registered == set(CASES)
    assert {kind(name) for name in KINDS} == {kind(name) for name in CASES}


@every_name
@pytest.mark.parametrize("num_classes", [0, 1, 2])
def test_number_of_classes(name: str, num_classes: int) -> None:
    model: Any = timm.create_model(name, **(SMALL | CASES[name] | {"num_classes": num_classes}))
    assert model.num_classes == num_classes
    out = run(model, pictures())
    assert out.shape == (2, num_classes or model.head_hidden_size)
    if num_classes and "our head" not in NOT_OFFERED.get(kind(name), {}):
        torch.testing.assert_close(out, torch.full_like(out, -math.log(num_classes)))


@every_name
@pytest.mark.parametrize("in_chans", [1, 4, 13])
def test_number_of_channels(name: str, in_chans: int) -> None:
    assert run(make(name, in_chans=in_chans), pictures(channels=in_chans)).shape == (2, 5)


@offering("fixed size")
def test_other_sizes_are_refused_in_one_line(name: str) -> None:
    model = make(name)
    assert model.patch_embed.grid_size == (4, 6)
    assert model.pos_embed.shape == (1, 24, 16)
    for shape in ((24, 16), (16, 32), (8, 24), (18, 24)):
        with pytest.raises(AssertionError, match=r"^Input (height|width) \(\d+\) doesn't match model \(\d+\)\.$"):
            model(pictures(size=shape))


@offering("refusal at construction")
def test_sizes_that_patches_do_not_tile_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=r"^image size 18x24 is not a multiple of the patch size 4x4"):
        make(name, img_size=(18, 24))


@offering("set_input_size")
def test_dynamic_size_equals_the_size_set_beforehand(name: str) -> None:
    model = make(name, dynamic_img_size=True)
    fixed = make(name)
    with pytest.raises(UserError, match="18x24 is not a multiple"):
        fixed.set_input_size((18, 24))
    fixed.load_state_dict(model.state_dict())
    for shape in ((16, 24), (24, 16), (8, 40)):
        fixed.set_input_size(shape)
        torch.testing.assert_close(run(model, pictures(size=shape)), run(fixed, pictures(size=shape)))
        fixed.set_input_size((16, 24))
        fixed.load_state_dict(model.state_dict())
    with pytest.raises(AssertionError, match=r"^Input height \(18\) should be divisible by patch size \(4\)\.$"):
        model(pictures(size=(18, 24)))


@every_name
def test_padding_to_whole_patches(name: str) -> None:
    always = kind(name) == "naflex"  # takes any size without being told
    model = make(name, dynamic_img_pad=True, **({} if always else {"dynamic_img_size": True}))
    images = pictures(size=(14, 21))
    padded = nn.functional.pad(images, (0, 3, 0, 2))
    assert torch.equal(run(model, images), run(model, padded))
    assert model.forward_intermediates(images, intermediates_only=True)[0].shape == (2, 16, 4, 6)


@every_name
def test_feature_maps_hold_patches_only(name: str) -> None:
    plain = make(name).eval()
    features: Any = timm.create_model(name, features_only=True, **(SMALL | CASES[name])).eval()
    features.model.load_state_dict(plain.state_dict(), strict=False)
    assert features.feature_info.channels() == [16, 16, 16]
    assert features.feature_info.reduction() == [4, 4, 4]
    maps = features(pictures())
    assert [m.shape for m in maps] == [(2, 16, 4, 6)] * 3
    for found, tokens in zip(maps, block_outputs(plain, pictures()), strict=True):
        torch.testing.assert_close(found, tokens[:, plain.num_prefix_tokens :].mT.unflatten(-1, (4, 6)))


@every_name
def test_global_tokens_never_show_among_the_patches(name: str) -> None:
    model = make(name).eval()
    first = model.num_prefix_tokens
    before = model.forward_intermediates(pictures(), norm=True, return_prefix_tokens=True, intermediates_only=True)
    tokens = model.forward_features(pictures())

    def shout(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return torch.cat([out[:, :first] + 1e4 * torch.arange(16.0), out[:, first:]], dim=1)

    model.blocks[-1].register_forward_hook(shout)
    after = model.forward_intermediates(pictures(), norm=True, return_prefix_tokens=True, intermediates_only=True)
    assert torch.equal(before[-1][0], after[-1][0])
    assert not torch.allclose(before[-1][1], after[-1][1])
    assert before[-1][1].shape == (2, first, 16)
    shouted = model.forward_features(pictures())
    pool = getattr(model, "pool", None) or model._pool
    assert torch.equal(pool(tokens, "avg"), pool(shouted, "avg"))
    assert torch.equal(tokens[:, first:], shouted[:, first:])
    if hasattr(model, "split"):
        assert torch.equal(model.split(tokens)[2], model.split(shouted)[2])


@every_name
def test_intermediates_are_what_the_blocks_give(name: str) -> None:
    model = make(name).eval()
    final, maps = model.forward_intermediates(pictures())
    seen = block_outputs(model, pictures())
    assert torch.equal(final, model.forward_features(pictures()))
    patches = [tokens[:, model.num_prefix_tokens :] for tokens in seen]
    assert all(torch.equal(m.flatten(2).mT, p) for m, p in zip(maps, patches, strict=True))
    early = model.forward_intermediates(pictures(), indices=[1], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], maps[1])


@offering("get_intermediate_layers")
@pytest.mark.parametrize("norm", [False, True])
def test_intermediate_layers_by_the_older_way(name: str, norm: bool) -> None:
    model = make(name).eval()
    seen = block_outputs(model, pictures())
    rows = model.get_intermediate_layers(pictures(), n=[0, 2], return_prefix_tokens=True, norm=norm)
    for (spatial, prefix), tokens in zip(rows, (seen[0], seen[2]), strict=True):
        expected = model.norm(tokens) if norm else tokens
        assert torch.equal(torch.cat([prefix, spatial], dim=1), expected)


@every_name
def test_pruning_keeps_the_layers_that_are_left(name: str) -> None:
    model = make(name).eval()
    expected = model.forward_intermediates(pictures(), indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=True, prune_head=True) == [0, 1]
    assert len(model.blocks) == 2
    got = model.forward_intermediates(pictures(), indices=[0, 1], intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert model.num_classes == 0
    assert run(model, pictures()).shape == (2, model.num_prefix_tokens + 24, 16)


@offering("set_input_size")
def test_set_input_size_again_and_again_under_one_optimizer(name: str) -> None:
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    held = dict(model.named_parameters())
    for shape, grid in (((16, 32), (4, 8)), ((24, 16), (6, 4)), ((24, 16), (6, 4)), ((16, 24), (4, 6))):
        before, old_grid = model.pos_embed.detach().clone(), model.patch_embed.grid_size
        model.set_input_size(shape, optimizer=optimizer)
        expected = resample_abs_pos_embed(before, grid, old_grid, num_prefix_tokens=0)
        assert torch.equal(model.pos_embed, expected)
        assert (model.patch_embed.img_size, model.patch_embed.grid_size) == (shape, grid)
        assert all(parameter is held[key] for key, parameter in model.named_parameters())
        model(pictures(size=shape)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(model.pos_embed, expected)
        optimizer.zero_grad()
    model.set_input_size((32, 48), patch_size=8, optimizer=optimizer)
    assert model.patch_embed.grid_size == (4, 6)
    assert all(parameter is held[key] for key, parameter in model.named_parameters())
    model(pictures(size=(32, 48))).square().sum().backward()
    optimizer.step()


@offering("set_input_size")
def test_set_input_size_keeps_frozen_positions_frozen_and_types(name: str) -> None:
    model = make(name).double()
    model.pos_embed.requires_grad_(False)
    model.patch_embed.proj.weight.requires_grad_(False)
    model.set_input_size((40, 24), patch_size=8)
    assert not model.pos_embed.requires_grad
    assert not model.patch_embed.proj.weight.requires_grad
    assert model.pos_embed.dtype == model.patch_embed.proj.weight.dtype == torch.float64
    assert run(model, pictures(size=(40, 24), dtype=torch.float64)).shape == (2, 5)


@every_name
def test_reset_classifier_keeps_type_and_mode(name: str) -> None:
    model = make(name).double().eval()
    model.reset_classifier(7)
    assert (model.num_classes, model.head.out_features, model.head.training) == (7, 7, False)
    assert model.head.weight.dtype == torch.float64
    assert run(model, pictures(dtype=torch.float64)).shape == (2, 7)
    wide = {"naflex": naflex.POOLS[:2], "jumboized": ("token",)}.get(kind(name)) or model.pools[:2]
    for pool in (*wide, "avg"):
        model.reset_classifier(3, pool)
        assert run(model, pictures(dtype=torch.float64)).shape == (2, 3)
    model.reset_classifier(0, "")
    assert run(model, pictures(dtype=torch.float64)).shape == (2, model.num_prefix_tokens + 24, 16)


@every_name
def test_patch_dropout_drops_patches_only_and_in_training_only(name: str) -> None:
    model = make(name, patch_drop_rate=0.5)
    first = model.num_prefix_tokens
    seen: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, args: Any, out: Any) -> None:
        seen.append((args[0], out[0] if isinstance(out, tuple) else out))

    model.patch_drop.register_forward_hook(note)
    model(pictures())
    whole, dropped = seen.pop()
    assert dropped.shape[1] == first + 12
    assert torch.equal(dropped[:, :first], whole[:, :first])
    for kept, rows in zip(dropped[:, first:], whole[:, first:], strict=True):
        assert torch.isin(kept[:, 0], rows[:, 0]).all()
    model.eval()(pictures())
    assert all(torch.equal(*pair) for pair in seen)


@every_name
def test_checkpointed_gradients_are_the_plain_ones(name: str) -> None:
    model = make(name).double()
    found = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(pictures(dtype=torch.float64)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


@every_name
def test_layer_decay_takes_every_parameter_once(name: str) -> None:
    model = make(name)
    names = {id(p): key for key, p in model.named_parameters()}
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    rows = [(names[id(p)], p.ndim, g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]]
    assert sorted(key for key, *_ in rows) == sorted(names.values())
    lowest = min(scale for _, _, scale, _ in rows)
    new = 1.0 if kind(name) == "jumboized" else 0.5  # a new FFN on an old model learns like its head
    for key, ndim, scale, decay in rows:
        token = key.endswith(("pos_embed", "cls_token", "reg_token"))
        assert decay == (0.0 if token or ndim == 1 else 0.05), key
        if token or key.startswith(("patch_embed", "embeds")):
            assert scale == lowest < 0.5**3, key
        if key.startswith("head"):
            assert scale == 1.0
        if key.startswith(("norm", "blocks.2")):
            assert scale == 0.5
        if key.startswith("jumbo_mlp"):
            assert scale == new
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names)


@every_name
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = make(name)
    model(pictures()).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@every_name
@pytest.mark.parametrize("task", [LogitDistillationTask, FeatureDistillationTask])
def test_distillation_by_timm(name: str, task: Any) -> None:
    student, teacher = make(name), make("vit_test_patch8_cls_32", embed_dim=24)
    distil = task(student, teacher, criterion=nn.CrossEntropyLoss(), task_loss_weight=0.5, verbose=False)
    result = distil(pictures(), torch.tensor([0, 3]))
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    assert embed(student).proj.weight.grad.any()
    assert teacher.patch_embed.proj.weight.grad is None


@every_name
def test_copies_pickles_and_averages_are_equal_and_apart(name: str, tmp_path: Path) -> None:
    model = make(name).eval()
    expected = run(model, pictures())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    averaged = ModelEmaV3(model, decay=0.5)
    averaged.update(model)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        averaged.module,
    ]
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    read = make(name)
    read.load_state_dict(load_file(tmp_path / "m.safetensors"))
    copies.append(read)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in copies:
        torch.testing.assert_close(run(other, pictures()), expected)
        assert len(list(other.parameters())) == len(list(model.parameters()))


@every_name
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_shared_what_is_shared(name: str, dtype: torch.dtype) -> None:
    model: Any = timm.create_model(name, **(SMALL | CASES[name]))
    count = len(list(model.parameters()))
    model = model.to(dtype)
    out = run(model, pictures(dtype=dtype))
    assert out.dtype == dtype
    assert bool(torch.isfinite(out).all())
    assert len(list(model.parameters())) == count
    assert {p.dtype for p in model.parameters()} == {dtype}
    if hasattr(model, "jumbo_mlp"):
        assert all(block._shared_mlp[0] is model.jumbo_mlp for block in model.blocks)


@every_kind
def test_compiled_without_a_graph_break(name: str) -> None:
    model = make(name, depth=1).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for batch in (3, 2):  # the last batch of an epoch is smaller
        assert torch.equal(run(compiled, pictures(batch)), run(model, pictures(batch)))
    model.train()
    compiled(pictures()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@every_kind
def test_exported_with_any_batch_size(name: str) -> None:
    model = make(name).eval()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, (pictures(3),), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 7):
        torch.testing.assert_close(exported(pictures(size)), model(pictures(size)))


@every_kind
def test_traced_by_fx(name: str) -> None:
    model = make(name).eval()
    features = timm.create_model(
        name, features_only=True, feature_cls="fx", out_indices=(0, 2), **(SMALL | CASES[name])
    ).eval()
    assert isinstance(features, FeatureGraphNet)
    assert [out.shape for out in features(pictures())] == [(2, model.num_prefix_tokens + 24, 16)] * 2
    traced = torch.fx.GraphModule(model, timm.models._features_fx.create_feature_extractor(model, ["head"]).graph)
    assert torch.equal(traced(pictures())["head"], model(pictures()))


@offering("torchscript", KINDS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"global_pool": "map"}], ids=str)
def test_scripted_by_torchscript_leaving_the_model_alone(name: str, options: dict[str, Any]) -> None:
    with set_scriptable(True):
        model = make(name, **options).eval()
    keys = list(model.state_dict())
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(pictures()), model(pictures()))
    assert list(model.state_dict()) == keys
