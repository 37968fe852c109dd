"""One Jumbo FFN for all blocks, kept so through saving, copying, converting and replacing; and what is refused."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from jumbo_vit.block import jumbo_mlp
from jumbo_vit.errors import UserError
from jumbo_vit.vit import JumboVisionTransformer
from tests.test_block import randomise
from tests.test_vit import make

PICTURES = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


def ready() -> JumboVisionTransformer:
    model = make().eval()
    randomise(model)
    return model


def assert_shared(model: JumboVisionTransformer) -> None:
    """Every block calls the model's own FFN: the very module, not an equal one."""
    assert len(model.blocks) == 2
    assert all(block._shared_mlp[0] is model.jumbo_mlp for block in model.blocks)
    before = model(PICTURES.to(model.pos_embed.dtype))
    with torch.no_grad():
        model.jumbo_mlp.fc2.bias[0] += 0.5  # one entry: the final norm would hide an equal shift of all
        after = model(PICTURES.to(model.pos_embed.dtype))
    assert not torch.allclose(before, after)


def test_state_dict_and_parameters_hold_the_ffn_once() -> None:
    model = ready()
    shared = [name for name in model.state_dict() if "jumbo_mlp" in name]
    assert shared == ["jumbo_mlp.fc1.weight", "jumbo_mlp.fc1.bias", "jumbo_mlp.fc2.weight", "jumbo_mlp.fc2.bias"]
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert len(set(addresses)) == len(addresses)
    assert len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False)))
    assert_shared(model)


def test_unshared_ffns_are_each_their_own() -> None:
    model = make(share_jumbo_mlp=False)
    assert model.jumbo_mlp is None
    first, second = (block.jumbo_mlp for block in model.blocks)
    assert first is not second
    assert len([name for name in model.state_dict() if "jumbo_mlp" in name]) == 8


@pytest.mark.parametrize("way", ["save_file", "save_model"])
def test_safetensors_saves_and_loads(way: str, tmp_path: Path) -> None:
    model, other, path = ready(), make().eval(), tmp_path / "model.safetensors"
    if way == "save_file":
        save_file(model.state_dict(), path)
    else:
        save_model(model, str(path))
    other.load_state_dict(load_file(path))
    assert torch.equal(other(PICTURES), model(PICTURES))
    assert_shared(other)


def copies(model: JumboVisionTransformer) -> dict[str, JumboVisionTransformer]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_share_among_themselves_and_not_with_the_original(way: str) -> None:
    model = ready()
    expected = model(PICTURES)
    other = copies(model)[way]
    assert torch.equal(other(PICTURES), expected)
    assert_shared(other)
    with torch.no_grad():
        other.jumbo_mlp.fc1.weight.zero_()
    assert torch.equal(model(PICTURES), expected)
    names = {"jumbo_token" if name == "reg_token" else name: tensor for name, tensor in model.state_dict().items()}
    other.load_state_dict(names)  # the hook for the authors' names came along
    assert torch.equal(other(PICTURES), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_conversion_reaches_the_blocks(dtype: torch.dtype) -> None:
    model = ready().to(dtype)
    assert model.blocks[0]._shared_mlp[0].fc1.weight.dtype == dtype
    assert model(PICTURES.to(dtype)).dtype == dtype
    assert_shared(model.double())


@pytest.mark.parametrize("way", ["setattr", "set_submodule"])
@pytest.mark.parametrize("copied", [False, True])
def test_replacing_the_ffn_reaches_the_blocks(way: str, copied: bool) -> None:
    original = ready()
    expected = original(PICTURES)
    model = copy.deepcopy(original) if copied else original
    fresh = jumbo_mlp(8, 3)
    randomise(fresh, seed=5)
    if way == "setattr":
        model.jumbo_mlp = fresh
    else:
        model.set_submodule("jumbo_mlp", fresh)
    assert model.jumbo_mlp is fresh
    assert not torch.allclose(model(PICTURES), expected)
    assert_shared(model)
    if copied:
        assert torch.equal(original(PICTURES), expected)


def test_replacing_a_linear_inside_the_ffn_reaches_the_blocks() -> None:
    model = ready()
    model.jumbo_mlp.fc2 = nn.Linear(96, 24)
    assert_shared(model)


def test_materialising_from_meta_keeps_the_sharing() -> None:
    model = make(device="meta", weight_init="skip").eval()
    model.to_empty(device="cpu")
    model.load_state_dict(ready().state_dict())
    assert_shared(model)
    assigned = make(device="meta", weight_init="skip").eval()
    assigned.load_state_dict(ready().state_dict(), assign=True)
    assert torch.equal(assigned(PICTURES), ready()(PICTURES))
    assert_shared(assigned)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"img_size": (20, 33), "patch_size": 4},
            "image size 20x33 is not a multiple of the patch size 4x4: 33 must be a multiple of 4, such as 32 or 36",
        ),
        (
            {"img_size": 100, "patch_size": 16},
            "image size 100x100 is not a multiple of the patch size 16x16: "
            "100 must be a multiple of 16, such as 96 or 112",
        ),
        (
            {"img_size": 3, "patch_size": 4},
            "image size 3x3 is not a multiple of the patch size 4x4: 3 must be a multiple of 4, such as 4",
        ),
        ({"embed_dim": 8, "num_heads": 3}, "embed_dim=8 is not a multiple of num_heads=3"),
        (
            {"global_pool": "token"},
            "global_pool='token' needs a class token; a Jumbo model has global_pool='jumbo' instead",
        ),
        (
            {"global_pool": "jumbo_agv"},
            "global_pool='jumbo_agv' is unknown; use one of 'jumbo_avg', 'jumbo', 'avg', 'max', 'avgmax', 'map', '' "
            "(did you mean jumbo_avg?)",
        ),
        (
            {"weight_init": "xaver"},
            "weight_init='xaver' is unknown; use one of '', 'xavier', 'jax', 'jax_nlhb', 'moco', 'reset', 'skip' "
            "(did you mean xavier?)",
        ),
        (
            {"class_token": True},
            "class_token=True does not fit: the Jumbo token takes its place (reg_tokens adds registers)",
        ),
        ({"no_embed_class": False}, "no_embed_class=False does not fit: the Jumbo token has no position"),
        ({"drop_path_schedule": "cosine"}, "drop_path_schedule='cosine' is unknown; use 'constant' or 'linear'"),
        ({"num_jumbo": 0}, "num_jumbo is 0, but a Jumbo block needs at least 1"),
        (
            {"lora_rank": 4, "jumbo_mlp_ratio": 0},
            "lora_rank=4 goes around the Jumbo FFN, but jumbo_mlp_ratio=0 leaves it out",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_say_what_came_and_what_fits(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        make(**options)
    assert str(caught.value) == text


def test_changing_the_input_size_refuses_what_the_patches_do_not_tile() -> None:
    model = make()
    with pytest.raises(UserError, match=r"20x22 is not a multiple of the patch size 4x4: 22 .* such as 20 or 24"):
        model.set_input_size(img_size=(20, 22))
    model.set_input_size(img_size=(20, 24))
    assert model(torch.randn(1, 3, 20, 24)).shape == (1, 5)


@pytest.mark.parametrize("pool", ["token", "cls", "map"])
def test_reset_classifier_refuses_pools_and_stays_usable(pool: str) -> None:
    model = ready()
    expected = model(PICTURES)
    text = {"token": "needs a class token", "cls": "is unknown; use one of", "map": "only made at construction"}[pool]
    with pytest.raises(UserError, match=text):
        model.reset_classifier(4, pool)
    assert torch.equal(model(PICTURES), expected)


@pytest.mark.parametrize("shape", [(12, 8), (8, 16), (4, 12)])
def test_a_picture_of_another_size_or_turned_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match=r"Input (height|width) \(\d+\) doesn't match model \((8|12)\)"):
        make()(torch.randn(1, 3, *shape))
