"""`train --freeze`: a head on stored features is the head that would come of training without a store."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jumbo_vit.data.pipeline import EvalSet
from jumbo_vit.data.sets import open_data
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder
from jumbo_vit.tasks import features
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.features import Features, store_features
from jumbo_vit.tasks.frozen import HeadOnly
from jumbo_vit.tasks.loop import Loop
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.train import train
from jumbo_vit_command import main
from tests.runs import differences, digit_pictures, small_config, state_of

FROZEN: dict[str, Any] = {
    "model": None,
    "img_size": None,
    "patch_size": None,
    "in_chans": None,
    "freeze": True,
    "epochs": 3,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose trunk is then frozen; not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(small_config(out, epochs=1, lr=0.003))
    return str(out)


def frozen(out: Path, trained: str, **changes: Any) -> TrainConfig:
    return small_config(out, **(FROZEN | {"init_from": trained} | changes))


def weights(out: Path) -> dict[str, Tensor]:
    return open_folder(out)[0].state_dict()


def test_only_the_head_changes_and_evaluate_agrees(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(frozen(tmp_path / "run", trained, lr=0.01))
    before, after = weights(Path(trained)), weights(tmp_path / "run")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
    numbers = evaluate(str(tmp_path / "run"), digit_pictures())
    best = summary["best_numbers"]
    assert {name: numbers[name] for name in best} == best and summary["score"] == numbers["top1"]
    assert summary["updates"] == 24
    assert summary["trained_parameters"] == 10 * 4 * 32 + 10 < summary["parameters"]
    said = capsys.readouterr().out
    assert "features of 290 pictures: 290 computed, 0 stored before" in said and "1290 of them trained" in said


def test_a_second_run_computes_nothing(trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(frozen(tmp_path / "a", trained))
    second = train(frozen(tmp_path / "b", trained))
    assert "features of 290 pictures: 0 computed, 290 stored before" in capsys.readouterr().out
    assert first["best_numbers"] == second["best_numbers"]
    assert differences(state_of(tmp_path / "a"), state_of(tmp_path / "b")) == []
    assert len(list((tmp_path / "features").iterdir())) == 2


@pytest.mark.parametrize(
    "changes", [{}, {"model_ema": True}, {"grad_accum_steps": 2, "balance": "sampler", "opt": "lamb"}]
)
def test_stored_is_as_without_a_store(
    changes: dict[str, Any], trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = train(frozen(tmp_path / "stored" / "run", trained, **changes))
    called = 0

    def from_the_picture(self: Features, indices: Any, *parts: str) -> Tensor:
        nonlocal called
        called += 1
        images = sets[len(self)]
        pictures = torch.stack([images[int(index)][0] for index in indices])
        model = self.trunk.model
        mode = model.training
        model.eval()
        with torch.no_grad():
            out: Tensor = model.forward_head(model.forward_features(pictures), pre_logits=True)
        model.train(mode)
        return out

    sets: dict[int, EvalSet] = {}

    class Watched(EvalSet):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sets[len(self)] = self

    monkeypatch.setattr(features, "EvalSet", Watched)
    monkeypatch.setattr(Features, "rows", from_the_picture)
    direct = train(frozen(tmp_path / "direct" / "run", trained, **changes))
    assert called > 20
    left, right = (state_of(tmp_path / name / "run") for name in ("stored", "direct"))
    for name, value in left["model"].items():
        torch.testing.assert_close(value, right["model"][name], rtol=0, atol=1e-5)
    assert stored["score"] == pytest.approx(direct["score"], abs=0.03)


def test_stored_logits_are_the_models(trained: str, tmp_path: Path) -> None:
    model, contract = open_folder(trained)
    images = open_data(digit_pictures(), "multiclass", 0, 0.1).val
    stored = store_features(model, images, contract.preparation, tmp_path, torch.device("cpu"))
    pictures = torch.stack([EvalSet(images, "multiclass", contract.preparation)[i][0] for i in range(50)])
    with torch.no_grad():
        logits = HeadOnly(model)(stored.rows(range(50), *stored.trunk.head))
        torch.testing.assert_close(logits, model(pictures), rtol=0, atol=1e-5)


def test_killed_and_resumed_is_the_same_run(trained: str, tmp_path: Path) -> None:
    train(frozen(tmp_path / "whole", trained, epochs=4))
    update, calls = Loop._update, 0

    def killed(self: Loop, group: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 14:
            raise KeyboardInterrupt
        update(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_update", killed)
        with pytest.raises(KeyboardInterrupt):
            train(frozen(tmp_path / "halves", trained, epochs=4))
    train(TrainConfig(resume=str(tmp_path / "halves")))
    assert differences(state_of(tmp_path / "whole"), state_of(tmp_path / "halves")) == []


def test_seeds_share_the_features(trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(frozen(tmp_path / "run", trained, seeds=2, epochs=1))
    said = capsys.readouterr().out
    assert "290 computed" in said and "0 computed, 290 stored before" in said
    assert (tmp_path / "run" / "seed-1" / "model" / "config.json").is_file()


def test_batch_norm_in_the_trunk_stays(tmp_path: Path) -> None:
    train(small_config(tmp_path / "run", model="test_resnet", img_size="32", patch_size=None, epochs=1))
    train(frozen(tmp_path / "head", str(tmp_path / "run"), epochs=2))
    before, after = weights(tmp_path / "run"), weights(tmp_path / "head")
    assert {name for name in before if not torch.equal(before[name], after[name])} <= {"fc.weight", "fc.bias"}


def test_a_bad_batch_is_replayed(trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Features.rows
    spoilt = 0

    def once(self: Features, indices: Any, *parts: str) -> Tensor:
        nonlocal spoilt
        found = rows(self, indices, *parts)
        if len(indices) == 32 and not spoilt:
            spoilt = 1
            found[3] = float("nan")
        return found

    monkeypatch.setattr(Features, "rows", once)
    train(frozen(tmp_path / "run", trained, epochs=1))
    found = replay(tmp_path / "run")
    assert found["same"] and found["bad_samples"] == [3] and found["bad_inputs"] == [3]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"init_from": None}, r"^--freeze keeps a trunk as it was trained: say which by --init-from"),
    ({"hflip": 0.5}, r"takes no --hflip, leave it out"),
    ({"mixup": 0.8}, r"takes no --mixup"),
    ({"aa": "3a"}, r"takes no --aa,"),
    ({"scale": (0.5, 1.0)}, r"takes no --scale"),
    ({"drop_path": 0.1}, r"takes no --drop-path"),
    ({"aug_repeats": 3}, r"takes no --aug-repeats"),
    ({"patch_drop": (0.5, 0.1)}, r"takes no --patch-drop"),
    ({"grad_checkpointing": True}, r"takes no --grad-checkpointing"),
    ({"strategy": "fsdp2"}, r"leave out --strategy fsdp2"),
    ({"lora_rank": 2}, r"give one of the two"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refused_in_one_line(changes: dict[str, Any], words: str, trained: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(frozen(tmp_path / "run", trained, **changes))
    assert not (tmp_path / "run").exists()


def test_neutral_values_and_a_runs_own_options_are_taken(trained: str, tmp_path: Path) -> None:
    train(frozen(tmp_path / "a", trained, mixup=0.0, hflip=0.0, scale=(1.0, 1.0), aa="", epochs=1))
    words = ["train", "--config", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b")]
    assert main(words) == 0
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["score"] > 0


def test_a_trunk_that_would_stay_random_is_refused(trained: str, tmp_path: Path) -> None:
    options = {"model": "jumbo_vit_test_patch8_32", "img_size": "8", "patch_size": 2, "in_chans": 1}
    with pytest.raises(
        UserError, match=r"^--freeze keeps the trunk as it is, but \d+ of its tensors .* first attn_pool"
    ):
        train(frozen(tmp_path / "run", trained, **options, model_args=["global_pool=map"]))
    with pytest.raises(UserError, match=r"^--freeze keeps the trunk as it is, but \d+ of its tensors .* random"):
        train(frozen(tmp_path / "run", trained, **options, model_args=["depth=4"]))
