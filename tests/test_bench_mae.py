"""The measuring of masked autoencoding: what it times, counts and writes, on the smallest models."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pictures import TEST_MODEL

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("bench_mae")
    monkeypatch.setattr(
        module, "ARMS", (module.Arm(TEST_MODEL, 32, 8, 4), module.Arm("vit_test_patch8_reg16_32", 32, 8, 4))
    )
    return module


def parts(script: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    learner, objective = script.learner_for(script.ARMS[0])
    torch.nn.init.normal_(learner.encoder.pos_embed)
    order = torch.stack([torch.randperm(16) for _ in range(4)])
    return learner, objective, torch.randn(4, 3, 32, 32), order


def test_the_encoder_sees_what_the_rows_say(script: Any) -> None:
    learner, objective, images, order = parts(script)
    seen: list[int] = []
    learner.encoder.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    for loss in script.losses_of(learner, objective, images, order).values():
        loss().backward()
    prefix = learner.keep.prefix
    assert seen == [prefix + 4, prefix + 16] * 2 and learner.keep.kept is None


def test_the_whole_step_with_all_patches_differs_in_the_encoder_alone(script: Any) -> None:
    learner, objective, images, order = parts(script)
    given: list[torch.Tensor] = []
    learner.decoder.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    losses = script.losses_of(learner, objective, images, order)
    with torch.no_grad():
        assert losses["whole", "masked"]() != losses["whole", "all"]()
        masked, whole = given
        tokens = learner.encoder.forward_features(images)
    prefix = learner.keep.prefix
    assert masked.shape == whole.shape and torch.equal(whole[:, :prefix], tokens[:, :prefix])
    for picture in range(4):
        for place, patch in enumerate(order[picture, :4].tolist()):
            torch.testing.assert_close(whole[picture, prefix + place], tokens[picture, prefix + patch])


def test_only_the_whole_step_changes_weights(script: Any) -> None:
    learner, objective, images, order = parts(script)
    losses = script.losses_of(learner, objective, images, order)
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    script.step_of(learner, losses["encoder", "all"], update=False)()
    assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())
    script.step_of(learner, losses["whole", "masked"], update=True)()
    changed = {name for name, value in learner.state_dict().items() if not torch.equal(value, before[name])}
    assert {"decoder.predict.weight", "encoder.blocks.0.mlp.fc1.weight"} <= changed


def test_kept_bytes_fall_with_the_patches(script: Any) -> None:
    learner, objective, images, order = parts(script)
    kept = {
        key: script.kept_bytes(learner, loss)
        for key, loss in script.losses_of(learner, objective, images, order).items()
    }
    # 3 global tokens and 4 patches against 3 and 16, but the Jumbo FFN's share does not fall.
    assert 7 / 19 < kept["encoder", "masked"] / kept["encoder", "all"] < 0.8
    assert kept["whole", "masked"] < kept["whole", "all"]
    extra = {name: kept["whole", name] - kept["encoder", name] for name in ("masked", "all")}
    assert extra["masked"] == pytest.approx(extra["all"], rel=0.1)  # the decoder is the same


def test_what_is_written_and_printed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, threads = tmp_path / "mae.json", torch.get_num_threads()
    words = ["bench_mae", "--models", TEST_MODEL, "--batch", "2", "--pairs", "2", "--threads", str(threads)]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(out)])
    script.main()
    content = json.loads(out.read_text())
    assert [(row["model"], row["step"]) for row in content["rows"]] == [(TEST_MODEL, "encoder"), (TEST_MODEL, "whole")]
    for row in content["rows"]:
        assert (row["patches"], row["kept_patches"], row["global_tokens"], row["batch_size"]) == (16, 4, 3, 2)
        assert all(len(row[seen]["seconds"]) == 2 for seen in ("masked", "all"))
        assert row["time_ratio"] == pytest.approx(row["masked"]["median_s"] / row["all"]["median_s"])
        assert row["memory_ratio"] == row["masked"]["kept_bytes"] / row["all"]["kept_bytes"]
    assert content["machine"]["threads"] == threads and "no peak" in content["kept_bytes"]
    printed = capsys.readouterr().out
    assert printed.count(TEST_MODEL) == 2 and "tensors saved for the backward pass" in printed


def test_the_real_arms_come_in_pairs_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    arms = importlib.import_module("bench_mae").ARMS
    assert len(arms) == 6
    for jumbo, registers in zip(arms[::2], arms[1::2], strict=True):
        assert jumbo.model.startswith("jumbo_vit_") and registers.model.startswith("vit_")
        assert (jumbo.pixels, jumbo.patch, jumbo.batch) == (registers.pixels, registers.patch, registers.batch)
