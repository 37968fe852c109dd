"""Token dropping: exact numbers, an own set for each picture, global tokens untouched, and runs that resume."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.schedules import PatchDrop, rate_at
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL
from tests.runs import differences, small_config, state_of
from tests.test_measuring_scripts import script
from tests.test_resume import run_until

RATES = (0.0, 0.1, 0.5, 0.9, 0.99)
NAFLEX = {"embed_dim": 32, "num_heads": 2, "num_jumbo": 3, "patch_size": 8, "weight_init": "xavier"}
ROPE = {"embed_dim": 32, "num_heads": 2, "patch_size": 8, "rope_type": "axial", "attn_type": "eva"}


def entering(model: Any, images: Tensor, seed: int = 0) -> Tensor:
    """The tokens (B, L, D) that the first block takes in a forward pass in training."""
    seen: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    torch.manual_seed(seed)
    model.train()(images)
    handle.remove()
    return seen[0]


def kept_of(full: Tensor, tokens: Tensor, prefix: int) -> list[list[int]]:
    """For each picture the places of the patches that were kept; every patch of `full` is another vector."""
    places = (full[:, None, prefix:] == tokens[:, prefix:, None]).all(-1)
    assert (places.sum(-1) == 1).all()
    return [sorted(one) for one in places.int().argmax(-1).tolist()]


@pytest.mark.parametrize("size", [(32, 32), (16, 72), (8, 8), (80, 80)])
@pytest.mark.parametrize("num_jumbo", [1, 3, 6])
def test_the_numbers_are_exact_and_the_sets_each_pictures_own(num_jumbo: int, size: tuple[int, int]) -> None:
    model: Any = timm.create_model(TEST_MODEL, num_jumbo=num_jumbo, img_size=size, depth=1, reg_tokens=2)
    images = torch.randn(5, 3, *size)
    patches, prefix = size[0] * size[1] // 64, num_jumbo + 2
    full = entering(model, images)
    assert full.shape[1] == prefix + patches
    for rate in RATES:
        PatchDrop(model, rate, rate, TEST_MODEL)(0, 1)
        tokens = entering(model, images)
        wanted = max(1, math.floor(patches * (1 - Fraction(str(rate)))))
        assert tokens.shape == (5, prefix + wanted, 32)
        assert torch.equal(tokens[:, :prefix], full[:, :prefix])
        kept = kept_of(full, tokens, prefix)
        assert all(len(set(one)) == wanted for one in kept)
        if patches >= 16 and 0 < rate < 0.99:
            assert len({tuple(one) for one in kept}) > 1
            assert kept_of(full, entering(model, images, seed=1), prefix) != kept
        assert torch.equal(tokens, entering(model, images))
        model.patch_drop = nn.Identity()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_test_patch8_cls_32", {}),
        ("vit_test_patch8_reg16_32", {}),
        ("naflexvit_jumbo_tiny_patch16", {**NAFLEX, "img_size": 32}),
        ("jumboized", {"base": "vit_test_patch8_reg16_32"}),
        ("deit_tiny_distilled_patch16_224", {"img_size": 64, "embed_dim": 32, "num_heads": 2}),
        ("eva02_tiny_patch14_224", {"img_size": 56, "embed_dim": 32, "num_heads": 2}),
        ("vit_small_patch16_rope_mixed_224", {"img_size": 64, "embed_dim": 32, "num_heads": 2}),
        ("naflexvit_base_patch16_gap", {**ROPE, "img_size": 32}),
    ],
)
def test_all_models_with_a_place_for_it_drop_patches(name: str, options: dict[str, Any]) -> None:
    model: Any = timm.create_model(name, depth=2, num_classes=5, **options)
    size = options.get("img_size", 32)
    images = torch.randn(3, 3, size, size)
    names = set(model.state_dict())
    with torch.no_grad():
        wanted = model.eval()(images)
    drop = PatchDrop(model, 0.5, 0.0, name)
    prefix = model.num_prefix_tokens
    drop(0, 2)
    assert entering(model, images).shape[1] == prefix + 8
    model.train()(images).sum().backward()
    with torch.no_grad():
        assert torch.equal(model.eval()(images), wanted)
    drop(1, 2)
    assert entering(model, images).shape[1] == prefix + 16
    assert set(model.state_dict()) == names


def test_the_rate_is_linear_in_the_updates_of_the_run() -> None:
    assert [round(rate_at(0.9, 0.1, number, 5), 12) for number in range(5)] == [0.9, 0.7, 0.5, 0.3, 0.1]
    assert rate_at(0.9, 0.1, 0, 1) == 0.9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet18", "img_size": "32", "patch_size": None}, "resnet18 has no place where patches"),
        ({"model": "swin_tiny_patch4_window7_224", "img_size": "56", "patch_size": None}, "no place where patches"),
        ({"model_args": ["patch_drop_rate=0.2"]}, "--patch-drop and patch_drop_rate in --model-args"),
        ({"patch_drop": (0.5, 1.0)}, r"--patch-drop is 0.5 1.0, but takes shares from 0 to 0.99"),
        ({"patch_drop": (math.nan, 0.1)}, r"--patch-drop is nan 0.1"),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(small_config(tmp_path / "run", **{"patch_drop": (0.9, 0.1), **changes}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


OPTIONS: dict[str, Any] = {
    "patch_drop": (0.9, 0.1),
    "model_ema": True,
    "batch_size": 16,
    "grad_accum_steps": 2,
    "grad_checkpointing": True,
    "drop_path": 0.1,
}


def watch(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rates that updates have from here on."""
    rates: list[float] = []
    original = PatchDrop.__call__

    def watched(self: PatchDrop, number: int, total: int) -> None:
        original(self, number, total)
        rates.append(self.layer.prob)

    monkeypatch.setattr(PatchDrop, "__call__", watched)
    return rates


def test_a_killed_run_drops_the_same_patches_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = watch(monkeypatch)
    train(small_config(tmp_path / "straight", **OPTIONS))
    assert rates == pytest.approx([0.9 - 0.8 * number / 15 for number in range(16)])
    run_until(monkeypatch, small_config(tmp_path / "run", **OPTIONS), 11)
    rates.clear()
    train(TrainConfig(resume=str(tmp_path / "run"), given=frozenset({"resume"})))
    assert rates == pytest.approx([0.9 - 0.8 * number / 15 for number in range(9 + 2, 16)])
    straight, broken = state_of(tmp_path / "straight"), state_of(tmp_path / "run")
    assert differences(straight, broken) == []
    assert {name.removeprefix("module.") for name in straight["average"]} - {"n_averaged"} == set(straight["model"])
    train(small_config(tmp_path / "none", **OPTIONS | {"patch_drop": (0.0, 0.0)}))
    assert differences(straight["model"], state_of(tmp_path / "none")["model"])


def test_a_bad_batch_is_replayed_at_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jumbo_vit.tasks import loop as loop_module

    original = loop_module.Loop._update

    def poisoned(self: Any, group: Any) -> None:
        if self.progress.update == 4:
            group[0][0][3] = math.inf  # in all patches, since some are dropped
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", poisoned)
    train(small_config(tmp_path / "run", patch_drop=(0.9, 0.1), epochs=1))
    rates = watch(monkeypatch)
    found = replay(tmp_path / "run")
    assert rates == [pytest.approx(0.9 - 0.8 * 4 / 7)]
    assert found["same"] and found["bad_samples"] == [3]
    assert torch.load(tmp_path / "run" / "bad-batch.pt", weights_only=True)["place"] == (4, 8)


def test_the_script_measures_all_rates() -> None:
    module = script("bench_patch_drop")
    assert module.over_schedule([0.9, 0.7, 0.5, 0.3, 0.1]) == pytest.approx(0.5)
    rows = module.measure(TEST_MODEL, pixels=80, batch=2, repeats=2, autocast=False)
    assert [row["rate"] for row in rows] == [0.0, 0.9, 0.7, 0.5, 0.3, 0.1, "0.9 to 0.1"]
    assert rows[0]["speed"] == rows[0]["kept_ratio"] == 1.0
    kept = [row["kept_ratio"] for row in rows]
    assert kept[1] < kept[2] < kept[3] < kept[4] < kept[5] < 1 and kept[2] < kept[6] < kept[4]
    assert all(len(row["seconds"]) == 2 and row["median_s"] > 0 for row in rows[:-1])
