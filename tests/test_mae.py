"""Masked autoencoding: masks, networks against a plain rewrite, targets, and a run that goes on and divides."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightly.models import utils as lightly
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from jumbo_vit.cli.parser import main
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model
from jumbo_vit.tasks.learner import encoder_weights
from jumbo_vit.tasks.mae import MaskedPixels, nothing_learned, random_order
from jumbo_vit.tasks.masked import (
    KeepPatches,
    Masked,
    MaskedLearner,
    kept_patches,
    patchify,
    pixel_targets,
    statistics,
    take,
    unpatchify,
)
from jumbo_vit.tasks.pretrain import pretrain
from jumbo_vit.tasks.pretrain_config import PretrainConfig
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.train import train
from tests.runs import differences, digit_pictures, small_command, small_config, small_options, state_of
from tests.test_parallel import run_python, seen
from tests.test_pretrain import RESUME, poison, run_until

SMALL = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
FULL: dict[str, Any] = {**SMALL, "model_ema": True, "drop_path": 0.1, "aug_repeats": 2, "norm_pix_loss": True}


def options(out: Path, **changes: Any) -> PretrainConfig:
    return PretrainConfig(**small_options(out=str(out), method="mae", **changes))


def learner_for(
    size: tuple[int, int] = (32, 32),
    ratio: float = 0.75,
    name: str = "jumbo_vit_test_patch8_32",
    learned: bool = False,
    **model: Any,
) -> MaskedLearner:
    torch.manual_seed(0)
    encoder = make_model(name, num_classes=0, img_size=size, **model)
    return MaskedLearner(encoder, Preparation((3, *size)), ratio, 16, 2, 2, learned, 0)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    pretrain(options(out, **FULL))
    return out


# Masks


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.5, 0.75, 0.99]),
    st.sampled_from([1, 3, 6]),
    st.integers(0, 2**31),
)
def test_counts_are_exact_and_every_patch_returns_to_its_place(
    rows: int, columns: int, ratio: float, pieces: int, seed: int
) -> None:
    patches = rows * columns
    kept = kept_patches(patches, ratio)
    # The share in whole numbers, which no rounding touches.
    hundredths = round(100 * ratio)
    assert kept == max(1, patches * (100 - hundredths) // 100)
    tokens = torch.randn(3, pieces + patches, 5)
    order = torch.stack([random_order(patches, seed + each) for each in range(3)])
    keep = KeepPatches(pieces)
    assert keep(tokens) is tokens
    keep.kept = order[:, :kept]
    short = keep(tokens)
    assert short.shape == (3, pieces + kept, 5)
    assert torch.equal(short[:, :pieces], tokens[:, :pieces])  # no global token is ever masked
    for index in range(3):
        places = order[index]
        assert sorted(places.tolist()) == list(range(patches))  # each patch once: kept or masked
        back = torch.full((patches, 5), math.nan)
        back[places[:kept]] = short[index, pieces:]
        back[places[kept:]] = take(tokens[:, pieces:], order[:, kept:])[index]
        assert torch.equal(back, tokens[index, pieces:])


@pytest.mark.parametrize(("grid", "side"), [((4, 4), 8), ((2, 5), 8), ((3, 1), 4)])
@pytest.mark.parametrize("pieces", [1, 3, 6])
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.99])
def test_the_encoder_sees_the_kept_patches_and_all_pieces(
    grid: tuple[int, int], side: int, pieces: int, ratio: float
) -> None:
    size = (grid[0] * side, grid[1] * side)
    learner = learner_for(size, ratio, num_jumbo=pieces, patch_size=side)
    patches = math.prod(grid)
    assert learner.grid == grid and learner.kept == kept_patches(patches, ratio)
    lengths: list[int] = []
    for block in learner.encoder.blocks:
        block.register_forward_hook(lambda _m, given, _o: lengths.append(given[0].shape[1]))
    decoded: list[int] = []
    for block in learner.decoder.blocks:
        block.register_forward_hook(lambda _m, given, _o: decoded.append(given[0].shape[1]))
    foretold = learner(torch.randn(2, 3, *size))
    assert set(lengths) == {pieces + learner.kept} and set(decoded) == {pieces + patches}
    assert foretold.shape == (2, patches - learner.kept, side * side * 3)
    assert learner.keep.kept is None


def test_a_mask_belongs_to_a_picture_and_an_epoch() -> None:
    orders = {tuple(random_order(64, seed).tolist()) for seed in range(50)}
    assert len(orders) == 50 and random_order(64, 7).tolist() == random_order(64, 7).tolist()
    # Over many masks each patch is kept about equally often: 500 of 2,000 times, standard deviation 19.
    counts = torch.zeros(16)
    for seed in range(2000):
        counts[random_order(16, seed)[:4]] += 1
    assert float((counts - 500).abs().max()) < 100


def test_one_mask_a_batch_is_that_of_its_first_picture() -> None:
    learner = learner_for()
    masks: list[Tensor] = []
    learner.keep.register_forward_hook(lambda module, *_: masks.append(module.kept))
    order = torch.stack([random_order(16, seed) for seed in range(4)])
    for one in (True, False):
        MaskedPixels(learner, False, one).step(learner, (torch.randn(4, 3, 32, 32), order), 0)
    assert torch.equal(masks[0], order[:1, :4].expand(4, -1)) and torch.equal(masks[1], order[:, :4])


# Networks


def plain_forward(learner: MaskedLearner, images: Tensor, order: Tensor) -> Tensor:
    """The equations, picture by picture, with every token moved to its place; pixels of all patches (B, N, p*p*C)."""
    encoder, decoder = learner.encoder, learner.decoder
    found = []
    for image, places in zip(images, order.tolist(), strict=True):
        rows, columns = learner.grid
        projection = encoder.patch_embed.proj
        cut = nn.functional.conv2d(image[None], projection.weight, projection.bias, stride=projection.stride)
        patches = cut[0].flatten(1).T + encoder.pos_embed[0]
        prefix = encoder.reg_token[0] if encoder.cls_token is None else encoder.cls_token[0]
        kept = sorted(places[: learner.kept])
        tokens = torch.cat([prefix, patches[kept]])[None]
        for block in encoder.blocks:
            tokens = block(tokens)
        tokens = decoder.embed(encoder.norm(tokens))[0]
        whole = decoder.mask_token[0].expand(rows * columns, -1).clone()
        for position, place in enumerate(kept):
            whole[place] = tokens[len(prefix) + position]
        tokens = torch.cat([tokens[: len(prefix)], whole + decoder.positions[0]])[None]
        for block in decoder.blocks:
            tokens = block(tokens)
        found.append(decoder.predict(decoder.norm(tokens))[0, len(prefix) :])
    return torch.stack(found)


@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
@pytest.mark.parametrize("name", ["jumbo_vit_test_patch8_32", "vit_test_patch8_cls_32"])
@pytest.mark.parametrize("learned", [True, False])
def test_equal_to_a_plain_rewrite(size: tuple[int, int], name: str, learned: bool) -> None:
    learner = learner_for(size, 0.6, name, learned).double().eval()
    patches = math.prod(learner.grid)
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    order = torch.stack([random_order(patches, seed) for seed in range(3)])
    with torch.no_grad():
        given, expected = learner(images, order), plain_forward(learner, images, order)
    torch.testing.assert_close(given, take(expected, learner.masked(order)), atol=1e-10, rtol=1e-10)
    both = Masked(images, order)
    with torch.no_grad():
        assert torch.equal(learner(both), given)
        torch.testing.assert_close(learner(both[:1].to(torch.device("cpu"))), given[:1])


@pytest.mark.parametrize("name", ["jumbo_vit_test_patch8_32", "vit_test_patch8_cls_32", "vit_tiny_patch16_224"])
def test_what_is_foretold_does_not_depend_on_masked_pixels(name: str) -> None:
    torch.manual_seed(0)
    small = {} if "test" in name else {"depth": 1, "embed_dim": 24, "num_heads": 3}
    encoder = make_model(name, num_classes=0, img_size=32, patch_size=8, **small)
    learner = MaskedLearner(encoder, Preparation((3, 32, 32)), 0.75, 16, 2, 2, False, 0)
    images, order = torch.randn(2, 3, 32, 32, requires_grad=True), torch.stack([random_order(16, s) for s in (0, 1)])
    learner(images, order).square().sum().backward()
    assert images.grad is not None
    slopes = patchify(images.grad, (4, 4)).abs().sum(2)
    assert not slopes.gather(1, order[:, 4:]).any() and bool((slopes.gather(1, order[:, :4]) > 0).all())


def test_without_masks_the_encoder_is_what_it_was() -> None:
    torch.manual_seed(0)
    before = make_model("jumbo_vit_test_patch8_32", num_classes=0)
    learner = learner_for(learned=True)
    images = torch.randn(2, 3, 32, 32)
    learner(images)  # leaves nothing behind
    learner.encoder.load_state_dict(before.state_dict())
    with torch.no_grad():
        assert torch.equal(learner.encoder.eval()(images), before.eval()(images))


@pytest.mark.parametrize("grid", [(4, 4), (2, 6), (5, 1)])
def test_fixed_positions_tell_rows_from_columns_and_places_apart(grid: tuple[int, int]) -> None:
    learner = learner_for((grid[0] * 8, grid[1] * 8), ratio=0.5)
    for positions in (learner.encoder.pos_embed, learner.decoder.positions):
        assert not positions.requires_grad
        table = positions[0]
        assert table.shape[0] == math.prod(grid)
        distances = torch.cdist(table, table) + torch.eye(len(table))
        assert float(distances.min()) > 0.1
        # Half of the width holds the row, half the column: sines and cosines of a position, after Vaswani et al.
        quarter = table.shape[1] // 4
        rates = 10000 ** (-torch.arange(quarter) / quarter)
        for place in range(len(table)):
            row, column = divmod(place, grid[1])
            angles = torch.cat([f(at * rates) for at in (row, column) for f in (torch.sin, torch.cos)])
            torch.testing.assert_close(table[place].sort().values, angles.sort().values, atol=1e-5, rtol=0)


def test_fixed_positions_leave_a_class_tokens_entry_at_zero() -> None:
    torch.manual_seed(0)
    encoder = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=0)
    learner = MaskedLearner(encoder, Preparation((3, 32, 32)), 0.5, 16, 1, 2, False, 0)
    assert encoder.pos_embed.shape[1] == 17 and not encoder.pos_embed[0, 0].any() and encoder.pos_embed[0, 1:].any()
    assert learner(torch.randn(2, 3, 32, 32)).shape == (2, 8, 192)


@pytest.mark.parametrize("name", ["vit_base_patch16_clip_224", "deit3_small_patch16_224", "vit_small_patch16_224"])
@pytest.mark.parametrize("pool", ["avg", "map", None])
def test_what_a_step_does_not_reach_has_no_gradient_and_all_else_has(name: str, pool: str | None) -> None:
    kwargs: dict[str, Any] = {} if pool is None else {"global_pool": pool, "class_token": pool != "map"}
    encoder = timm.create_model(name, img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=3, **kwargs)
    learner = MaskedLearner(encoder, Preparation((3, 32, 32)), 0.5, 16, 1, 2, True, 0)
    learner.train()
    learner(torch.randn(2, 3, 32, 32)).sum().backward()
    for parameter_name, parameter in learner.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name
    named = dict(learner.encoder.named_parameters())
    assert all(not named[n].requires_grad for n in learner.untrained)
    assert any("head" in n for n in learner.untrained)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("test_efficientnet", {}, "takes plain ViTs"),
        ("naflexvit_base_patch16_gap", {}, "takes plain ViTs"),
        ("vit_tiny_r_s16_p8_224", {"img_size": 96, "depth": 1}, "whose patches are cut by one convolution"),
        ("vit_tiny_patch16_224", {"img_size": 32, "pos_embed": "none"}, "needs positions that are added"),
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_drop_rate": 0.5}, "masks patches itself"),
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 32}, "masks none of the 1 patches"),
        (
            "vit_tiny_patch16_224",
            {"img_size": 32, "embed_dim": 6, "num_heads": 2},
            "multiple of 4, and the model's is 6",
        ),
    ],
)
def test_models_that_do_not_go_with_it(name: str, kwargs: dict[str, Any], message: str) -> None:
    encoder = timm.create_model(name, num_classes=0, **kwargs)
    with pytest.raises(UserError, match=message):
        MaskedLearner(encoder, Preparation((3, 32, 32)), 0.75, 16, 1, 2, False, 0)


def test_a_decoder_whose_heads_do_not_divide_it() -> None:
    encoder = make_model("jumbo_vit_test_patch8_32", num_classes=0)
    with pytest.raises(UserError, match="the decoder's width 16 is not a multiple of its 3 heads"):
        MaskedLearner(encoder, Preparation((3, 32, 32)), 0.75, 16, 1, 3, False, 0)


# Targets


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 3, 4]))
def test_patches_of_any_grid_make_the_picture_again(rows: int, columns: int, side: int, chans: int) -> None:
    images = torch.randn(2, chans, rows * side, columns * side)
    patches = patchify(images, (rows, columns))
    assert patches.shape == (2, rows * columns, side * side * chans)
    assert torch.equal(unpatchify(patches, (rows, columns), (rows * side, columns * side), chans), images)
    first = images[1, :, -side:, :side]  # the patch of the last row and first column
    assert torch.equal(patches[1, (rows - 1) * columns], first.permute(1, 2, 0).flatten())


def test_patches_and_normalisation_equal_those_of_lightly() -> None:
    images = torch.randn(2, 3, 32, 32)
    patches = lightly.patchify(images, 8)
    assert torch.equal(patchify(images, (4, 4)), patches)
    order = torch.stack([random_order(16, seed) for seed in range(2)])
    goal = pixel_targets(images, (4, 4), order[:, 4:], per_patch=True)
    expected = lightly.normalize_mean_var(lightly.get_at_index(patches, order[:, 4:]))
    torch.testing.assert_close(goal, expected, atol=1e-6, rtol=1e-6)
    mean, deviation = statistics(take(patches, order[:, 4:]))
    torch.testing.assert_close(goal * deviation + mean, take(patches, order[:, 4:]), atol=1e-5, rtol=1e-5)


def test_a_patch_of_one_colour_is_no_division_by_zero() -> None:
    goal = pixel_targets(torch.ones(1, 3, 16, 16), (2, 2), torch.arange(4)[None], per_patch=True)
    assert goal.isfinite().all() and not goal.any()


@pytest.mark.parametrize("per_patch", [True, False])
def test_the_loss_is_that_of_masked_pixels_alone(per_patch: bool) -> None:
    learner = learner_for().eval()
    images, order = torch.randn(3, 3, 32, 32), torch.stack([random_order(16, seed) for seed in range(3)])
    method = MaskedPixels(learner, per_patch, False)
    losses = method.step(learner, (images, order), 0)
    with torch.no_grad():
        foretold = plain_forward(learner, images, order)
    patches = lightly.patchify(images, 8)
    goal = lightly.normalize_mean_var(patches) if per_patch else patches
    for index in range(3):
        expected = [(foretold[index, p] - goal[index, p]).square().mean() for p in order[index, 4:].tolist()]
        torch.testing.assert_close(losses[index], torch.stack(expected).mean(), atol=1e-5, rtol=1e-5)
    # What a visible patch shows is no part of the loss but through what the encoder makes of it.
    score = method.score(learner)
    with torch.no_grad():
        score.update(learner(images, order), Masked(images, order))
    numbers = score.result(lambda x: x, lambda x: x)
    assert numbers["loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-5)
    masked = take(goal, order[:, 4:]).flatten(0, 1).double()
    variance = masked.var(0, unbiased=False).mean()
    assert numbers["masked_error"] == pytest.approx(float(losses.detach().mean() / variance), rel=1e-4)


# Runs


def test_what_a_run_leaves(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, weights = state_of(straight), load_file(straight / "model" / "model.safetensors")
    own = {name for name in content["model"] if name.startswith("encoder.")}
    assert encoder_weights(content["model"]).keys() == weights.keys() and len(own) == len(weights)
    assert {name.split(".")[0] for name in content["model"].keys() - own} == {"decoder"}
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["method"] == "mae" and summary["masks"] == {"grid": [4, 4], "patches": 16, "kept_patches": 4}
    assert summary["score"] == -summary["best_numbers"]["loss"] and summary["best_numbers"]["masked_error"] > 0
    assert any("Of 4x4 patches 12 are masked, an own choice for each picture" in note for note in summary["notes"])
    saved = json.loads((straight / "model" / "config.json").read_text())["jumbo_vit"]
    assert saved["method"] == "mae" and saved["mask_ratio"] == 0.75
    model = timm.create_model(f"local-dir:{straight / 'model'}", pretrained=True)
    assert type(model.patch_drop) is nn.Identity
    with torch.no_grad():
        assert model(torch.zeros(1, 1, 8, 8)).isfinite().all()


def test_the_encoder_starts_a_training_and_nothing_loaded_is_an_error(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_config(tmp_path / "fine", model=None, epochs=1, init_from=str(straight / "model")))
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("from "))
    count = len(load_file(straight / "model" / "model.safetensors"))
    assert f"loaded {count} of {count + 2} tensors; new: head.weight, head.bias" in shown
    other: dict[str, Any] = {"model": "test_efficientnet", "img_size": "32", "patch_size": None}
    with pytest.raises(UserError, match="holds nothing"):
        train(small_config(tmp_path / "none", epochs=1, init_from=str(straight / "model"), **other))


@pytest.mark.parametrize("updates", [5, 9])
def test_a_killed_run_ends_with_the_same_bits(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    out = tmp_path / "run"
    run_until(monkeypatch, options(out, **FULL), updates)
    pretrain(PretrainConfig(resume=str(out), given=RESUME))
    assert differences(state_of(straight), state_of(out)) == []
    for name in ("model/model.safetensors", "metrics.csv"):
        assert (straight / name).read_bytes() == (out / name).read_bytes()


def test_workers_do_not_change_the_run(straight: Path, tmp_path: Path) -> None:
    pretrain(options(tmp_path / "run", **FULL, workers=2))
    assert differences(state_of(straight), state_of(tmp_path / "run")) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(tmp_path: Path, strategy: str) -> None:
    changes: dict[str, Any] = {"method": "mae", **SMALL, "model_ema": True}
    one, two = tmp_path / "one", tmp_path / "two"
    done = run_python(["-m", "tests.recorded_run", str(one), "pretrain", *small_command(one, **changes)])
    assert done.returncode == 0, done.stderr
    changes |= {"devices": 2, "strategy": strategy, "batch_size": 16}
    done = run_python(["-m", "tests.recorded_run", str(two), "pretrain", *small_command(two, **changes)])
    assert done.returncode == 0, done.stderr
    single, first, second = seen(one, 0), seen(two, 0), seen(two, 1)
    assert len(single["losses"]) == 16
    assert first["losses"] == pytest.approx(single["losses"], abs=1e-4)
    assert first == second
    fixed = {"encoder.pos_embed", "decoder.positions"}
    assert {name.rpartition("module.")[2] for name in first["idle"]} == fixed
    before, after = state_of(one)["progress"]["history"], state_of(two)["progress"]["history"]
    for left, right in zip(before, after, strict=True):
        for name in ("val_loss", "val_averaged_loss", "val_masked_error"):
            assert left[name] == pytest.approx(right[name], abs=1e-4)


def test_a_bad_batch_is_skipped_counted_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    out = tmp_path / "run"
    summary = pretrain(options(out, **SMALL, epochs=1))
    assert summary["bad_updates"] == 1
    found = replay(out)
    assert not math.isfinite(found["recorded"]) and found["same"] and found["bad_inputs"] == [3]


def test_decoder_sizes_that_were_open_are_written_down(tmp_path: Path) -> None:
    from jumbo_vit.tasks.build import load_options

    pretrain(options(tmp_path / "run", epochs=1))
    saved = load_options(tmp_path / "run", PretrainConfig)
    assert (saved.decoder_width, saved.decoder_depth, saved.decoder_heads) == (32, 2, 2)
    assert saved.opt_betas == (0.9, 0.95) and saved.pos_embed == "sincos" and saved.scale == (0.2, 1.0)


def eight_pictures(root: Path, copies: int) -> Path:
    """Eight pictures of smooth random colours, to train on and to be scored."""
    for part in ("train", "val"):
        (root / part).mkdir(parents=True)
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC)
        picture.save(root / "val" / f"{number}.png")
        for copy in range(copies):
            picture.save(root / "train" / f"{number}-{copy}.png")
    return root


@pytest.mark.slow
def test_eight_pictures_are_learned_by_heart(tmp_path: Path) -> None:
    """The masked error falls below 0.02 of the pixels' variance."""
    few: dict[str, Any] = {"img_size": "32", "patch_size": 16, "in_chans": 3, "batch_size": 8, "lr": 1e-2}
    few |= {"scale": (1.0, 1.0), "hflip": 0.0, "weight_decay": 0.0, "warmup_epochs": 1.0, "recovery_interval": 0}
    few |= {"decoder_width": 64, "decoder_depth": 2, "decoder_heads": 4, "check_images": False}
    data = eight_pictures(tmp_path / "data", 32)
    summary = pretrain(options(tmp_path / "run", data=str(data), epochs=20, **few))
    assert summary["best_numbers"]["masked_error"] < 0.02
    rows = state_of(tmp_path / "run")["progress"]["history"]
    assert rows[0]["val_masked_error"] > 0.5  # it was not there from the start


def test_positions_to_start_from_are_kept_or_said_to_be_replaced(straight: Path, tmp_path: Path) -> None:
    start: dict[str, Any] = {**SMALL, "init_from": str(straight / "model"), "epochs": 1, "lr": 0.0}
    before = load_file(straight / "model" / "model.safetensors")["pos_embed"]
    kept = pretrain(options(tmp_path / "kept", **start, weight_decay=0.0))
    after = load_file(tmp_path / "kept" / "model" / "model.safetensors")["pos_embed"]
    assert torch.equal(before, after) and not any("positions" in note for note in kept["notes"])
    replaced = pretrain(options(tmp_path / "fixed", **start, pos_embed="sincos"))
    assert any("The positions of --init-from are replaced by fixed ones" in note for note in replaced["notes"])


def test_a_pooling_that_was_never_trained_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pooled: dict[str, Any] = {"model_args": ["global_pool=map"], "epochs": 1}
    summary = pretrain(options(tmp_path / "run", **SMALL, **pooled))
    assert any("tensors have no part in this, such as attn_pool." in note for note in summary["notes"])
    capsys.readouterr()
    train(small_config(tmp_path / "fine", **pooled, init_from=str(tmp_path / "run" / "model")))
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("from "))
    assert "new: " in shown and "attn_pool." in shown.partition("new: ")[2]


def test_what_is_said_of_the_parameters(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = pretrain(options(tmp_path / "run", **SMALL, epochs=1))
    content = state_of(tmp_path / "run")["model"]
    beside = sum(value.numel() for name, value in content.items() if name.startswith("decoder."))
    assert summary["extra_parameters"] == beside
    fixed = content["encoder.pos_embed"].numel() + content["decoder.positions"].numel()
    assert summary["trained_parameters"] == summary["parameters"] + beside - fixed
    first = next(line for line in capsys.readouterr().out.splitlines() if "M parameters" in line)
    assert f"and {beside / 1e6:.2f} M beside the encoder, {summary['trained_parameters']} of them trained" in first


def test_remarks_on_results_that_say_nothing() -> None:
    assert "not a finite number" in nothing_learned({"loss": math.nan, "masked_error": math.nan})
    assert "have no variance" in nothing_learned({"loss": 0.1, "masked_error": math.nan})
    assert "no better than by their mean" in nothing_learned({"loss": 0.1, "masked_error": 1.01})
    assert nothing_learned({"loss": 0.1, "masked_error": 0.5}) == ""


def test_an_encoder_without_a_head_is_not_exported(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(straight / "model"), "--format", "torch", "--out", str(straight / "x.pt2")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "has no classes, no head was trained on it" in lines[0]


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mask-ratio 0", "--mask-ratio is 0.0, but must be above 0 and below 1"),
        ("--mask-ratio 1", "--mask-ratio is 1.0, but must be above 0 and below 1"),
        ("--mask-ratio .nan", "--mask-ratio is nan, but must be above 0 and below 1"),
        ("--decoder-depth 0", "--decoder-depth is 0, but must be at least 1"),
        ("--decoder-width 10 --decoder-heads 1", "multiple of 4"),
        ("--teacher x", "--teacher belongs to --method distill, not to mae"),
        ("--mixup 0.5", "--mixup belongs to --method distill, not to mae"),
        ("--method distill --teacher x --mask-ratio 0.5", "--mask-ratio belongs to --method mae, not to distill"),
        ("--opt-betas 0.9 1", "--opt-betas is 0.9 1.0, but both must be from 0 to below 1"),
        ("--opt sgd --opt-betas 0.9 0.95", "--opt sgd has no --opt-betas"),
        ("--model test_efficientnet --img-size 32", "takes plain ViTs"),
        ("--patch-size 1 --norm-pix-loss", "a patch has but one here"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"pretrain --data {digit_pictures()} --model jumbo_vit_test_patch8_32 --img-size 8 --patch-size 2"
    base += f" --in-chans 1 --epochs 1 --workers 0 --logger none --out {tmp_path / 'run'} "
    if "efficientnet" in words:
        base = base.replace("--patch-size 2", "")
    words = words if "--method" in words else f"--method mae {words}"
    assert main((base + words).split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
