"""A small part of what `scripts/fuzz.py` does, that its watch sees faults, and each fault that it once found."""

import io
import json
import os
import pickle
import shutil
import signal
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from jumbo_vit import load
from jumbo_vit.checkpoints import read_json, read_weights
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
LABELS = ["blue", "green", "red"]


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
        import fuzz  # type: ignore[import-not-found,unused-ignore]
    return fuzz


@pytest.fixture(scope="module")
def sources(script: Any, run: dict[str, Any]) -> Any:
    return sys.modules["fuzz_checkpoints"].Sound.of(Path(run["out"]))


def unfinished(run: dict[str, Any], place: Path) -> Path:
    """A copy of the run that has to read its checkpoint."""
    out = Path(shutil.copytree(run["out"], place / "run"))
    (out / "summary.json").unlink()
    return out


def test_some_damaged_pictures(script: Any, run: dict[str, Any], tmp_path: Path) -> None:
    tally = script.Tally(tmp_path / "kept")
    for case in script.pictures(1, 76):
        script.feed(case, script.read_picture, tmp_path / "one", Path(run["out"]), 60, tally)
    counts = tally.result()
    assert counts["faults"] == [] and not (tmp_path / "kept").exists()
    assert counts["read"] > 20 and counts["refused"] > 20 and counts["files"] == 76


def test_some_damaged_checkpoints(script: Any, sources: Any, run: dict[str, Any], tmp_path: Path) -> None:
    tally = script.Tally(tmp_path / "kept")
    out = unfinished(run, tmp_path)
    for case in script.checkpoints(1, 24, sources, 2**22):
        script.feed(case, script.read_checkpoint, tmp_path / "one", out, 60, tally)
    counts = tally.result()
    assert counts["faults"] == []
    assert counts["read"] >= 8 and counts["refused"] >= 6


def test_the_same_seed_makes_the_same_files(script: Any, sources: Any) -> None:
    for make, more in ((script.pictures, ()), (script.checkpoints, (sources, 2**20))):
        one, two, other = ([case for case in make(seed, 60, *more) if case.kind != "legacy.pth"] for seed in (3, 3, 4))
        assert one == two and one != other


# The watch


def _raises(_: Path) -> str:
    raise KeyError("x")


def _hangs(_: Path) -> str:
    while True:
        time.sleep(0.1)


def _runs_code(path: Path) -> str:
    pickle.loads(path.read_bytes())
    return "opened"


def _takes_memory(_: Path) -> str:
    return str(len(bytearray(os.urandom(1) * (600 * 2**20))))


def _asks_for_memory(_: Path) -> str:
    try:
        return str(len(bytearray(20 * 2**30)))
    except MemoryError as error:
        raise UserError("too much") from error


def _dies(_: Path) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _talks(_: Path) -> str:
    raise UserError("no good")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's memory")
@pytest.mark.parametrize(
    ("read", "word"),
    [
        (_raises, "exception"),
        (_hangs, "hang"),
        (_runs_code, "ran code"),
        (_takes_memory, "memory"),
        (_asks_for_memory, "memory"),
        (_dies, "crash"),
        (_talks, "refused"),
    ],
)
def test_the_watch_sees(read: Any, word: str, script: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(pickle.dumps(sys.modules["fuzz_checkpoints"].Payload()))
    outcome = script.watched(read, path, 1.0 if word == "hang" else 60.0, 400 * 2**20)
    assert outcome.word == word
    assert not (tmp_path / sys.modules["fuzz_checkpoints"].MARKER).exists()


def test_a_fault_is_kept_and_a_half_read_picture_is_one(script: Any, run: dict[str, Any], tmp_path: Path) -> None:
    cases = list(script.pictures(0, 400))
    whole = next(case for case in cases if case.kind == "raw.tif" and case.damage == "none")
    cut = next(case for case in cases if case.kind == "raw.tif" and case.damage == "cut")
    tally = script.Tally(tmp_path / "kept")
    for case, answer in ((whole, "26x20 12345678"), (cut, "26x20 87654321")):
        tally.add(case, script.Outcome("read", answer))
    assert [fault["outcome"] for fault in tally.faults] == ["half read"]
    assert (tmp_path / "kept" / tally.faults[0]["file"]).read_bytes() == cut.data
    tally.add(whole, script.Outcome("refused", "is not a picture"))
    assert tally.counts["raw.tif"]["sound, refused"] == 1


# What it found


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"a": ' + "9" * 5000 + "}", "\ud800"])
def test_a_configuration_that_json_cannot_hold(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="is not readable JSON"):
        read_json(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json is not readable JSON: "):
        load(tmp_path)


@pytest.mark.parametrize("entry", ["data.pkl", "data/0"])
def test_an_archive_that_unpacks_to_more_than_it_holds(entry: str, tmp_path: Path) -> None:
    state = tmp_path / "state.pth"
    torch.save({"head.bias": torch.zeros(4)}, state)
    with zipfile.ZipFile(state) as sound, zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in sound.namelist():
            bomb.writestr(name, sound.read(name) + bytes(2**22 if name.endswith(entry) else 0))
    with pytest.raises(UserError, match=r"its entries unpack to 4\d{6} bytes from \d{4,5}, but torch.save does not"):
        read_weights(tmp_path / "b.pth")


ODD_TENSORS = {
    "sparse": lambda value: value.to_sparse(),
    "without data": lambda value: torch.empty(value.shape, device="meta"),
    "repeated": lambda value: torch.zeros(1).expand(10**6, 10**6),
}


@pytest.mark.parametrize("odd", list(ODD_TENSORS))
def test_tensors_that_are_no_weights(odd: str, tmp_path: Path) -> None:
    state = make_model(TEST_MODEL).state_dict()
    state["head.weight"] = ODD_TENSORS[odd](state["head.weight"])
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"holds tensors that are no weights .*: head\.weight"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_whole_numbers_do_not_become_weights_without_a_word(
    dtype: torch.dtype, run: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(Path(run["out"]) / "model", tmp_path / "model"))
    state = read_weights(folder / "model.safetensors")
    state["blocks.0.attn.qkv.weight"] = state["blocks.0.attn.qkv.weight"].to(dtype)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"other type: blocks\.\*\.attn\.qkv\.weight torch\.\w+ instead of torch\.float32"
    ):
        load(folder)
    torch.save(state, tmp_path / "a.pth")
    report = start_from(make_model(TEST_MODEL, num_classes=3), str(tmp_path / "a.pth"), LABELS)
    assert "blocks.0.attn.qkv.weight" in report.new
    with pytest.raises(UserError, match="other type"):
        make_model(TEST_MODEL, pretrained=True, num_classes=3, pretrained_cfg_overlay={"state_dict": state})


SHAPES: dict[str, Any] = {
    "reg_token": lambda value: value.sum(),
    "patch_embed.proj.weight": lambda value: value.sum(),
    "pos_embed": lambda value: value.reshape(-1),
    "blocks.0.norm1.weight": lambda value: value.sum(),
}


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("flat", [False, True])
def test_a_start_from_weights_of_other_dimensions(name: str, flat: bool, tmp_path: Path) -> None:
    state: dict[str, Tensor] = make_model(TEST_MODEL).state_dict()
    state[name] = state[name].reshape(-1)[:0] if flat else SHAPES[name](state[name])
    torch.save(state, tmp_path / "a.pth")
    model = make_model(TEST_MODEL, num_classes=3)
    # A width or J that cannot be told is an error; a table of positions can start anew.
    if name == "pos_embed":
        assert name in start_from(model, str(tmp_path / "a.pth"), LABELS).new
    else:
        with pytest.raises(UserError, match=r"^--init-from"):
            start_from(model, str(tmp_path / "a.pth"), LABELS)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"architecture": ["a"]}, "names no architecture"),
    ({"num_classes": 10**12}, "names no architecture and number of classes"),
    ({"model_args": {"depth": 10**9}}, r"depth is 1000000000, more than the \d+ tensors"),
    ({"model_args": {"embed_dim": 10**6, "num_heads": 2}}, "other shape"),
    ({"model_args": {"img_size": -8}}, "not a multiple"),
    ({"model_args": {"depth": "x"}}, "cannot be made"),
    ({"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}}, "input_size is"),
    ({"pretrained_cfg": {"input_size": [1, 32, 32], "mean": [0.5], "std": [0.5]}}, "does not take pictures"),
    ({"pretrained_cfg": {"input_size": [3, 64, 64]}}, "does not take pictures"),
    ({"pretrained_cfg": {"mean": [0.5]}}, "3 numbers are expected"),
    ({"pretrained_cfg": {"std": [0, 1, 1]}}, "must be above 0"),
    ({"pretrained_cfg": {"crop_pct": 1e-9}}, "crop_pct is"),
    ({"pretrained_cfg": {"interpolation": "x"}}, "damaged"),
    ({"jumbo_vit": {"labels": "abc"}}, "one text"),
    ({"jumbo_vit": {"split": {"seed": "x", "checksum": 0, "val_fraction": 0.1}}}, "no seed"),
    (
        {"jumbo_vit": {"split": {"seed": 0, "checksum": 0, "val_fraction": 0.1, "folds": 2, "fold": "1"}}},
        "fold is 1 of 2",
    ),
    (
        {"jumbo_vit": {"split": {"seed": 0, "checksum": 0, "val_fraction": 0.1, "folds": 2, "fold": 3}}},
        "fold is 3 of 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda part: str(part)[:40])
def test_a_configuration_of_wrong_values(
    change: dict[str, Any], message: str, run: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(Path(run["out"]) / "model", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load(folder)


STATES: dict[str, Any] = {
    "version": lambda state: state.update(jumbo_vit_run=[]),
    "no identity": lambda state: state.pop("identity"),
    "no fingerprint": lambda state: state.pop("fingerprint"),
    "progress": lambda state: state["progress"].update(epoch="x"),
    "history": lambda state: state["progress"].update(history=None),
    "shape": lambda state: state["model"].update(reg_token=torch.zeros(3)),
    "optimizer": lambda state: state["optimizer"].pop("state"),
    "unreadable": lambda state: state.update(unreadable=[[], 3]),
    "epochs": lambda state: state.update(epochs=None),
}


@pytest.mark.parametrize("change", list(STATES))
def test_a_runs_checkpoint_of_wrong_values(change: str, run: dict[str, Any], tmp_path: Path) -> None:
    out = unfinished(run, tmp_path)
    (out / "previous.ckpt").unlink()
    state = torch.load(io.BytesIO((out / "last.ckpt").read_bytes()), weights_only=True)
    STATES[change](state)
    torch.save(state, out / "last.ckpt")
    with pytest.raises(UserError, match="damaged"):
        train(TrainConfig(resume=str(out), given=frozenset({"resume"})))


def test_a_message_is_one_bearable_line() -> None:
    assert str(UserError("a\n  b \n\nc")) == "a b c"
    long = str(UserError("begin " + "x" * 10**6 + " end"))
    assert len(long) <= 1000 and long.startswith("begin x") and long.endswith("x end")


def test_weights_that_are_not_finite_give_no_answer(run: dict[str, Any], colours: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(run["out"]) / "model", tmp_path / "model"))
    state = read_weights(folder / "model.safetensors")
    state["head.weight"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors")
    rows = load(folder).predict(colours / "val")
    assert {row.error for row in rows} == {"the model's output is not finite"} and not any(row.label for row in rows)
    assert evaluate(str(folder), str(colours))["top1"] != evaluate(str(folder), str(colours))["top1"]
