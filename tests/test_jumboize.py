"""`jumboize`: outputs stay exactly what they were, and all that timm offers for the model goes on working."""

import copy
import io
import pickle
from typing import Any

import pytest
import timm
import torch
from timm.models.naflexvit import batch_patchify
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.jumboized import jumboize

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 7}
# Name, side of the picture, number of class and register tokens.
NAMES = {
    "vit_small_patch16_dinov3": (64, 5),  # rotary positions, LayerScale
    "vit_small_plus_patch16_dinov3": (64, 5),  # SwiGLU
    "vit_small_patch14_reg4_dinov2": (56, 5),
    "deit3_small_patch16_224": (64, 1),
    "deit_tiny_distilled_patch16_224": (64, 2),  # two heads
    "vit_base_patch32_clip_224": (64, 1),  # a norm in front
    "eva02_tiny_patch14_224": (56, 1),
    "vit_pe_core_tiny_patch16_384": (64, 1),  # attention pooling
    "vit_small_patch16_rope_mixed_224": (64, 1),  # rotary positions of each layer
    "beit_base_patch16_224": (64, 1),  # relative positions
    "vit_little_patch16_reg4_gap_256": (64, 4),
    "vit_wee_patch16_reg1_gap_256": (64, 1),
    "vit_base_patch16_xp_224": (64, 1),  # attention and FFN in parallel
    "vit_relpos_base_patch16_clsgap_224": (64, 1),
    "naflexvit_base_patch16_radio_v3": (64, 8),
    "naflexvit_so150m2_patch16_reg1_gap": (64, 1),
}
# One of each family for the slower checks.
FAMILIES = (
    "vit_small_patch16_dinov3",
    "vit_small_patch14_reg4_dinov2",
    "deit3_small_patch16_224",
    "vit_base_patch32_clip_224",
    "beit_base_patch16_224",
    "naflexvit_base_patch16_radio_v3",
)


def build(name: str, **kwargs: Any) -> Any:
    """A small random model of timm's whose every part matters for the output: no zero heads, no tiny LayerScale."""
    size = {} if name.startswith("naflex") else {"img_size": NAMES[name][0]}
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **size, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def pictures(name: str, count: int = 2) -> Tensor:
    return torch.randn(count, 3, *(NAMES[name][0],) * 2, generator=torch.Generator().manual_seed(1))


def move(model: Any, x: Tensor, rate: float = 0.1, steps: int = 2) -> None:
    """Gradient steps of the shared FFN alone, so that the Jumbo path is no longer zero."""
    optimizer = torch.optim.SGD(model.jumbo_mlp.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_difference_is_zero_and_a_step_moves_the_ffn(name: str) -> None:
    model, x = build(name), pictures(name)
    with torch.no_grad():
        before = model(x)
        assert before.std() > 1e-3
        old = set(model.state_dict())
        assert jumboize(model) is model
        assert model.num_jumbo == NAMES[name][1] == model.num_prefix_tokens
        assert torch.equal(model(x), before)
    assert old < set(model.state_dict()), "old names stay"
    new = set(model.state_dict()) - old
    ffn = {f"jumbo_mlp.{part}" for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
    assert new == ffn | {f"blocks.{i}.norm3.{part}" for i in range(2) for part in ("weight", "bias")}
    first, last = model.jumbo_mlp.fc1.weight.clone(), model.jumbo_mlp.fc2.weight.clone()
    move(model, x)
    assert not torch.equal(model.jumbo_mlp.fc2.weight, last), "the first step moves the last layer"
    assert not torch.equal(model.jumbo_mlp.fc1.weight, first), "the second step moves all of it"
    with torch.no_grad():
        assert not torch.equal(model(x), before)


@pytest.mark.parametrize("name", NAMES)
def test_exported_difference_is_zero(name: str) -> None:
    model, x, more = build(name), pictures(name), pictures(name, 5)
    shape = ({0: torch.export.Dim("batch", min=2, max=8)},)
    with torch.no_grad():
        before = [model(batch) for batch in (x, more)]
        program = torch.export.export(jumboize(model), (x,), dynamic_shapes=shape)
        exported = program.module()
        assert all(torch.equal(exported(batch), old) for batch, old in zip((x, more), before, strict=True))
    assert len({name for name in program.state_dict if "jumbo_mlp" in name}) == 4, "exported once"


def test_naflex_batches_with_padding_stay_exact() -> None:
    model = build("naflexvit_base_patch16_radio_v3")
    patches, (height, width) = batch_patchify(pictures("naflexvit_base_patch16_radio_v3"), (16, 16))
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    coord = torch.stack([rows, columns], -1).flatten(0, 1).expand(2, -1, -1)
    valid = torch.ones(2, height * width, dtype=torch.bool)
    valid[1, 8:] = False
    batch = {"patches": patches, "patch_coord": coord, "patch_valid": valid}
    with torch.no_grad():
        before = model(batch)
        assert torch.equal(jumboize(model)(batch), before)


def test_exact_while_training_with_drop_path() -> None:
    model = build("deit3_small_patch16_224", drop_path_rate=0.5).train()
    x = pictures("deit3_small_patch16_224")
    torch.manual_seed(3)
    before = model(x)
    jumboize(model)
    torch.manual_seed(3)
    assert torch.equal(model(x), before)
    assert model.jumbo_mlp.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_follows_the_type(dtype: torch.dtype) -> None:
    model, x = build("vit_small_patch14_reg4_dinov2").to(dtype), pictures("vit_small_patch14_reg4_dinov2").to(dtype)
    with torch.no_grad():
        before = model(x)
        assert torch.equal(jumboize(model)(x), before)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_fewer_tokens_are_the_first_ones() -> None:
    name = "vit_small_patch16_dinov3"
    model, x = build(name), pictures(name)
    with torch.no_grad():
        before = model(x)
        assert torch.equal(jumboize(model, num_jumbo=1)(x), before)
    assert model.jumbo_mlp.fc1.in_features == 48 and model.blocks[0].norm3.weight.shape == (48,)
    seen: list[Tensor] = []
    model.jumbo_mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens: list[Tensor] = []
    model.blocks[0].norm3.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    with torch.no_grad():
        _, [features] = model.forward_intermediates(x, indices=[0], return_prefix_tokens=True)
    assert len(seen) == 2
    assert torch.equal(tokens[0], features[1][:, 0]), "the class token"


def test_without_the_old_ffn_it_is_the_papers_block() -> None:
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    base = timm.create_model(
        "vit_tiny_patch16_224",
        **kwargs,
        class_token=False,
        reg_tokens=3,
        no_embed_class=True,
        global_pool="",
        num_classes=0,
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = base(x)
    model: Any = jumboize(base, keep_mlp=False)
    paper = timm.create_model("jumbo_vit_test_patch8_32", num_classes=0, global_pool="").eval()
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        norm.eps = 1e-5
    nn.init.normal_(model.jumbo_mlp.fc2.weight, std=0.2)
    paper.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), paper(x), atol=1e-6, rtol=0)
        assert not torch.allclose(model(x), before, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "kwargs", "options", "text"),
    [
        ("vit_base_patch16_siglip_224", {"depth": 1}, {}, "has no class or register token that could become"),
        ("naflexvit_base_patch16_siglip", {"depth": 1}, {}, "has no class or register token"),
        ("swin_tiny_patch4_window7_224", {}, {}, "is no plain pre-norm ViT of timm (no list of blocks)"),
        ("resnet18", {}, {}, "is no plain pre-norm ViT of timm"),
        ("hiera_tiny_224", {}, {}, "is no plain pre-norm ViT of timm (HieraBlock)"),
        ("samvit_base_patch16", {"depth": 1}, {}, "is no plain pre-norm ViT of timm (Block)"),
        ("cait_xxs24_224", {"depth": 1}, {}, "is no plain pre-norm ViT of timm (LayerScaleBlock)"),
        ("vit_relpos_base_patch16_rpn_224", {"depth": 1}, {}, "has post-norm blocks"),
        ("eva_giant_patch14_224", {"use_post_norm": True, "embed_dim": 32, "num_heads": 2}, {}, "has post-norm blocks"),
        ("jumbo_vit_test_patch8_32", {}, {}, "jumbo_vit_test_patch8_32 has a Jumbo token already"),
        (
            "deit3_small_patch16_224",
            {"depth": 1},
            {"num_jumbo": 2},
            "num_jumbo is 2, but deit3_small_patch16_224 has 1",
        ),
        ("deit3_small_patch16_224", {"depth": 1}, {"num_jumbo": 0}, "take 1 to 1; more would be new tokens"),
        ("vit_base_patch16_xp_224", {"depth": 1}, {"keep_mlp": False}, "the FFN of a ParallelScalingBlock cannot be"),
    ],
)
def test_refusals(name: str, kwargs: dict[str, Any], options: dict[str, Any], text: str) -> None:
    model = timm.create_model(name, **kwargs)
    names = set(model.state_dict())
    with pytest.raises(UserError) as error:
        jumboize(model, **options)
    assert text in str(error.value) and "\n" not in str(error.value)
    assert set(model.state_dict()) == names, "a refused model is left as it was"


def test_twice_is_refused() -> None:
    with pytest.raises(UserError, match="has a Jumbo token already"):
        jumboize(jumboize(build("deit3_small_patch16_224")))


def test_ffn_is_registered_once_and_a_new_one_reaches_the_blocks() -> None:
    model = jumboize(build("vit_small_patch16_dinov3"))
    assert sum(name.endswith("jumbo_mlp") for name, _ in model.named_modules(remove_duplicate=False)) == 1
    model.jumbo_mlp = nn.Identity()
    x = pictures("vit_small_patch16_dinov3")
    calls: list[int] = []
    model.jumbo_mlp.register_forward_hook(lambda *_: calls.append(1))
    model(x)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "keep_mlp"), [*((name, True) for name in FAMILIES), ("vit_small_patch16_dinov3", False)]
)
def test_copies_and_pickles_share_and_stand_alone(name: str, keep_mlp: bool) -> None:
    model, x = jumboize(build(name), keep_mlp=keep_mlp), pictures(name)
    move(model, x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    with torch.no_grad():
        before = model(x)
        for twin in twins:
            assert type(twin) is type(model)
            assert torch.equal(twin(x), before)
        nn.init.zeros_(model.jumbo_mlp.fc2.weight)
        for twin in twins:
            assert torch.equal(twin(x), before), "the old model's FFN is not the copy's"
            nn.init.zeros_(twin.jumbo_mlp.fc2.weight)
            assert not torch.equal(twin(x), before), "the copy's FFN is its blocks'"


@pytest.mark.parametrize("name", FAMILIES)
def test_timms_methods_go_on_working(name: str) -> None:
    plain, model, x = build(name), jumboize(build(name)), pictures(name)
    args = {"output_fmt": "NLC"} if name.startswith("naflex") else {}
    with torch.no_grad():
        for mine, theirs in zip(
            model.forward_intermediates(x, intermediates_only=True, **args),
            plain.forward_intermediates(x, intermediates_only=True, **args),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
        for m in (model, plain):
            torch.manual_seed(1)
            m.reset_classifier(3)
        assert model.get_classifier() is model.head and torch.equal(model(x), plain(x))
        if hasattr(plain, "set_input_size"):
            size = tuple(side * 2 for side in x.shape[-2:])
            model.set_input_size(img_size=size)
            plain.set_input_size(img_size=size)
            bigger = nn.functional.interpolate(x, size=size)
            assert torch.equal(model(bigger), plain(bigger))
            x = bigger
    model.train()
    model.set_grad_checkpointing(True)
    model(x).square().mean().backward()
    wanted = model.jumbo_mlp.fc2.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing(False)
    model(x).square().mean().backward()
    torch.testing.assert_close(wanted, model.jumbo_mlp.fc2.weight.grad)
    assert wanted.abs().max() > 0
    model.prune_intermediate_layers([0])
    assert len(model.blocks) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_optimizer_groups(name: str) -> None:
    model = jumboize(build(name))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    seen = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(seen) == len(names) == sum(len(g["params"]) for g in optimizer.param_groups)
    top = max(scale for scale, _ in seen.values())
    assert seen["jumbo_mlp.fc1.weight"] == (top, 0.05) == (1.0, 0.05)
    assert seen["jumbo_mlp.fc1.bias"] == (1.0, 0.0)
    for i in range(2):
        scale = seen[f"blocks.{i}.attn.proj.weight"][0]
        assert seen[f"blocks.{i}.norm3.weight"] == seen[f"blocks.{i}.norm3.bias"] == (scale, 0.0)
    tokens = [n for n in seen if n.endswith(("cls_token", "reg_token", "pos_embed"))]
    assert all(seen[n] == (min(s for s, _ in seen.values()), 0.0) for n in tokens)


def test_fresh_weights_start_at_zero_again() -> None:
    model = jumboize(build("vit_small_patch14_reg4_dinov2"))
    nn.init.ones_(model.jumbo_mlp.fc2.weight)
    model.init_weights()
    assert not model.jumbo_mlp.fc2.weight.any() and model.jumbo_mlp.fc1.weight.std() > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_compiles_whole(name: str) -> None:
    model, x = jumboize(build(name)), pictures(name)
    move(model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
