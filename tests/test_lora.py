"""Low-rank bypasses: the two-matrix form against its equations, merging, and training nothing else."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jumbo_vit
from jumbo_vit.block import JumboBlock, jumbo_mlp
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.fast import optimize
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.build import build_model, make_optimizer
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.frozen import trained_part
from jumbo_vit.tasks.loop import Loop
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL
from tests.runs import differences, digit_pictures, small_config, state_of
from tests.test_block import randomise

NAFLEX = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_jumbo": 3, "img_size": 32, "patch_size": 8}


def alive(name: str = TEST_MODEL, **options: Any) -> Any:
    """A model whose every parameter matters."""
    model = timm.create_model(name, **({"num_classes": 5} | options))
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def pictures(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


# The two-matrix form


@pytest.mark.parametrize("share", [True, False])
def test_bypasses_around_two_matrices_equal_their_equations(share: bool) -> None:
    block = JumboBlock(
        8, 2, 3, 2.0, share_jumbo_mlp=share, lora_rank=2, lora_form="matrices", init_values=0.3, dtype=torch.float64
    )
    randomise(block)
    mlp: Any = block.jumbo_mlp
    if share:
        mlp = jumbo_mlp(8, 3, 2.0, dtype=torch.float64)
        randomise(mlp, seed=7)
        block.use_jumbo_mlp(mlp)
    x = torch.randn(2, 24, dtype=torch.float64)
    state = {name: value.double() for name, value in block.state_dict().items()}
    normed = F.layer_norm(x, (24,), state["norm3.weight"], state["norm3.bias"], 1e-5)
    first = mlp.fc1.weight + state["lora_matrices.fc1.up.weight"] @ state["lora_matrices.fc1.down.weight"]
    second = mlp.fc2.weight + state["lora_matrices.fc2.up.weight"] @ state["lora_matrices.fc2.down.weight"]
    hidden = F.gelu(normed @ first.T + mlp.fc1.bias)
    expected = x + state["ls3.gamma"] * (hidden @ second.T + mlp.fc2.bias)
    torch.testing.assert_close(block.jumbo_path(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [TEST_MODEL, "naflexvit_jumbo_pico_patch16"])
def test_new_bypasses_change_nothing(name: str) -> None:
    sizes = NAFLEX if name != TEST_MODEL else {}
    plain = alive(name, **sizes)
    bypassed = timm.create_model(name, num_classes=5, lora_rank=2, lora_form="matrices", **sizes).eval()
    missing = bypassed.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert len(missing) == 4 * len(plain.blocks) and all(".lora_matrices." in key for key in missing)
    torch.testing.assert_close(bypassed(pictures()), plain(pictures()), rtol=0, atol=1e-6)
    bypassed.blocks[0].lora_matrices.fc1.up.weight.data += 1.0
    assert not torch.allclose(bypassed(pictures()), plain(pictures()), atol=1e-3)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tool", ["script", "trace", "export"])
def test_tools_see_the_bypasses(tool: str, share: bool) -> None:
    model = alive(lora_rank=2, lora_form="matrices", share_jumbo_mlp=share)
    images = pictures()
    made: Any
    if tool == "script":
        made = torch.jit.script(model)
    elif tool == "trace":
        made = torch.jit.trace(model, images)
    else:
        made = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(made(images), model(images), rtol=1e-5, atol=1e-5)


def test_optimize_refuses_what_it_would_leave_out() -> None:
    with pytest.raises(UserError, match=r"bypasses around the matrices .*merge_lora.* in block 0"):
        optimize(alive(lora_rank=2, lora_form="matrices"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_rank": 2, "lora_form": "half"}, "lora_form='half' is unknown; use 'whole' or 'matrices'"),
        ({"lora_rank": 2, "lora_form": "matrices", "jumbo_mlp_ratio": 0}, "jumbo_mlp_ratio=0 leaves it out"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        timm.create_model(TEST_MODEL, **options)


def test_another_ffn_has_no_two_matrices_to_go_around() -> None:
    model = alive(lora_rank=2, lora_form="matrices")
    with pytest.raises(UserError, match="FeedForward, not of Linear"):
        model.jumbo_mlp = nn.Linear(96, 96)


# Merging


@pytest.mark.parametrize("name", [TEST_MODEL, "naflexvit_jumbo_pico_patch16"])
@pytest.mark.parametrize("share", [True, False])
def test_merged_is_the_model_without_bypasses(name: str, share: bool, tmp_path: Path) -> None:
    sizes = NAFLEX if name != TEST_MODEL else {}
    model = alive(name, lora_rank=2, lora_form="matrices", share_jumbo_mlp=share, **sizes)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merged: Any = jumbo_vit.merge_lora(model)
    expected = model(pictures())
    torch.testing.assert_close(merged(pictures()), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    fresh = timm.create_model(name, num_classes=5, share_jumbo_mlp=False, **sizes)
    assert list(merged.state_dict()) == list(fresh.state_dict())
    assert merged.jumbo_mlp is None and not any("lora" in key for key in merged.state_dict())
    contract = Contract("multiclass", list("abcde"), Preparation((3, 32, 32)))
    save_folder(tmp_path, merged, contract)
    torch.testing.assert_close(open_folder(tmp_path)[0](pictures()), expected, rtol=1e-5, atol=1e-5)


def test_merged_is_optimized() -> None:
    model = alive(lora_rank=2, lora_form="matrices")
    torch.testing.assert_close(
        optimize(jumbo_vit.merge_lora(model))(pictures()), model(pictures()), rtol=1e-4, atol=1e-4
    )


def test_the_whole_form_is_not_merged_and_the_reason_is_said() -> None:
    with pytest.raises(UserError, match=r"lora_form='whole' cannot be merged: .* activation"):
        jumbo_vit.merge_lora(alive(lora_rank=2))


@pytest.mark.parametrize("name", [TEST_MODEL, "vit_test_patch8_cls_32", "resnet18"])
def test_nothing_to_merge(name: str) -> None:
    with pytest.raises(UserError, match="has no bypasses to merge"):
        jumbo_vit.merge_lora(timm.create_model(name))


# Training bypasses


def lora(out: Path, source: str, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {"model": None, "img_size": None, "patch_size": None, "in_chans": None, "lora_rank": 2}
    return small_config(out, **(options | {"init_from": source} | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run without bypasses; not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(small_config(out, epochs=1, lr=0.003))
    return str(out)


@pytest.mark.parametrize("form", ["whole", "matrices"])
def test_only_bypasses_and_the_head_are_trained(
    form: str, trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"model_args": ["lora_form=matrices"]} if form == "matrices" else {}
    model = {"model": TEST_MODEL, "img_size": "8", "patch_size": 2, "in_chans": 1} if args else {}
    summary = train(lora(tmp_path / "run", trained, lr=0.01, **args, **model))
    before, after = open_folder(trained)[0].state_dict(), open_folder(tmp_path / "run")[0].state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    new = [name for name in after if name not in before]
    assert len(new) == (6 if form == "whole" else 12)
    assert all(".lora" in name and after[name].any() for name in new)
    assert (
        summary["trained_parameters"] == sum(after[name].numel() for name in [*new, *changed]) < summary["parameters"]
    )
    held = {tuple(state["exp_avg"].shape) for state in state_of(tmp_path / "run")["optimizer"]["state"].values()}
    assert held == {tuple(after[name].shape) for name in [*new, *changed]}
    said = capsys.readouterr().out
    assert f"{summary['trained_parameters']} of them trained" in said
    numbers = evaluate(str(tmp_path / "run"), digit_pictures())
    assert numbers["top1"] == summary["score"]


def test_the_start_is_exact_and_the_rate_decides_the_rest(trained: str, tmp_path: Path) -> None:
    train(lora(tmp_path / "run", trained, lr=0.0, min_lr=0.0, epochs=1))
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    started, source = open_folder(tmp_path / "run")[0], open_folder(trained)[0]
    assert torch.equal(started(images), source(images))


def test_weight_decay_is_as_everywhere(trained: str) -> None:
    config = with_defaults(lora(Path("unused"), trained))
    model, _ = build_model(config, 10)
    trained_part(model, config)
    groups = make_optimizer(model, config).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    names = {name: decays.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert names["blocks.0.lora.down.weight"] == names["head.weight"] == config.weight_decay == 0.05
    assert (
        names["head.bias"] == 0.0 and names["blocks.0.norm3.weight"] is None and names["jumbo_mlp.fc1.weight"] is None
    )


def test_killed_and_resumed_is_the_same_run(trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model_ema": True, "epochs": 2, "mixup": 0.2}
    train(lora(tmp_path / "whole", trained, **options))
    update, calls = Loop._update, 0

    def killed(self: Loop, group: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        update(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_update", killed)
        with pytest.raises(KeyboardInterrupt):
            train(lora(tmp_path / "halves", trained, **options))
    train(TrainConfig(resume=str(tmp_path / "halves")))
    assert differences(state_of(tmp_path / "whole"), state_of(tmp_path / "halves")) == []


def test_a_folder_with_bypasses_is_gone_on_with(trained: str, tmp_path: Path) -> None:
    train(lora(tmp_path / "first", trained, epochs=1, lr=0.01))
    train(lora(tmp_path / "second", str(tmp_path / "first"), epochs=1, lr=0.0, min_lr=0.0))
    first, second = (open_folder(tmp_path / name)[0].state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(UserError, match=r"--lora-rank is 3, .* lora_rank=2: give --lora-rank 2"):
        train(lora(tmp_path / "third", str(tmp_path / "first"), lora_rank=3))
    other = {"model": TEST_MODEL, "img_size": "8", "patch_size": 2, "in_chans": 1, "lora_rank": 3}
    with pytest.raises(UserError, match=r"bypasses of another rank or form"):
        train(lora(tmp_path / "fourth", str(tmp_path / "first"), **other))


def test_a_model_without_a_jumbo_ffn_is_refused(tmp_path: Path) -> None:
    size = {"img_size": "8", "patch_size": 2, "in_chans": 1}
    train(small_config(tmp_path / "plain", model="vit_test_patch8_cls_32", epochs=1))
    with pytest.raises(UserError, match=r"^--lora-rank puts bypasses around the Jumbo FFN, and vit_test_\w+ has none"):
        train(lora(tmp_path / "run", str(tmp_path / "plain")))
    with pytest.raises(UserError, match="jumbo_mlp_ratio=0 leaves it out"):
        train(lora(tmp_path / "run", "anything", model=TEST_MODEL, model_args=["jumbo_mlp_ratio=0"], **size))
    with pytest.raises(UserError, match=r"^--lora-rank keeps a trunk as it was trained: say which by --init-from"):
        train(small_config(tmp_path / "run", lora_rank=2))
