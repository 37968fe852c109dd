"""Weight files: every usual wrapping is read, everything else is refused in one line, and no file runs code."""

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from jumbo_vit.checkpoints import LoadReport, load_exactly, plain_names, read_json, read_weights
from jumbo_vit.errors import UserError

WEIGHTS = {"head.weight": torch.arange(6.0).view(2, 3), "head.bias": torch.tensor([1.0, -1.0])}
WRAPPERS = ["", "module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.", "model._orig_mod.module."]


def wrapped(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in WEIGHTS.items()}


def assert_weights(got: dict[str, Tensor]) -> None:
    assert got.keys() == WEIGHTS.keys()
    assert all(torch.equal(got[name], WEIGHTS[name]) for name in WEIGHTS)


def refusal(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(UserError) as caught:
        read_weights(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))
    return text


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_safetensors_with_every_wrapper(prefix: str, tmp_path: Path) -> None:
    save_file(wrapped(prefix), tmp_path / "w.safetensors")
    assert_weights(read_weights(tmp_path / "w.safetensors"))


@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("nested", [None, "state_dict", "model", "state_dict_ema", "model_ema"])
@pytest.mark.parametrize("suffix", [".pth", ".ckpt", ".bin"])
def test_pickled_files_with_every_wrapper_and_nesting(
    suffix: str, nested: str | None, prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"w{suffix}"
    extra = {"epoch": 3, "optimizer": {"state": {}}}
    torch.save(wrapped(prefix) if nested is None else {nested: wrapped(prefix), **extra}, path)
    assert_weights(read_weights(str(path)))


def test_the_averaged_weights_are_taken_before_the_last_ones(tmp_path: Path) -> None:
    last = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    torch.save({"state_dict": last, "state_dict_ema": WEIGHTS}, tmp_path / "w.pth")
    assert_weights(read_weights(tmp_path / "w.pth"))


def test_the_old_pickle_format_is_read(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert_weights(read_weights(tmp_path / "w.pth"))


def test_entries_that_are_no_named_tensors_are_left_out(tmp_path: Path) -> None:
    torch.save({**WEIGHTS, "epoch": 7, 0: torch.ones(2)}, tmp_path / "w.pth")
    assert_weights(read_weights(tmp_path / "w.pth"))


def test_a_prefix_on_some_names_only_is_the_models_own() -> None:
    assert list(plain_names({"model.head": 1, "norm": 2})) == ["model.head", "norm"]


@given(st.lists(st.sampled_from(["module.", "_orig_mod.", "model."]), max_size=5), st.integers(1, 4))
def test_wrappers_fall_off_in_any_order_and_number(wrappers: list[str], count: int) -> None:
    names = [f"blocks.{i}.norm3.weight" for i in range(count)]
    assert list(plain_names({"".join(wrappers) + name: 0 for name in names})) == names


def test_the_authors_names_become_ours_behind_wrappers(tmp_path: Path) -> None:
    official = {"jumbo_token": torch.ones(1, 3, 2), "cls_token": torch.ones(1, 1, 2), "norm.bias": torch.ones(2)}
    torch.save({f"_orig_mod.module.{name}": tensor for name, tensor in official.items()}, tmp_path / "w.pth")
    got = read_weights(tmp_path / "w.pth")
    assert got.keys() == {"reg_token", "norm.bias"}
    assert torch.equal(got["reg_token"], official["jumbo_token"])


def test_a_class_token_without_a_jumbo_token_stays() -> None:
    assert plain_names({"cls_token": 1, "norm.bias": 2}) == {"cls_token": 1, "norm.bias": 2}


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.pth") == f"no such checkpoint: {tmp_path / 'none.pth'}"
    assert refusal(tmp_path) == f"no such checkpoint: {tmp_path}"


BROKEN = {
    "empty": b"",
    "text": b"hello world\nthis is a text file\n",
    "text that starts like an import": b"checkpoint\nnotes\n",
    "web page": b"<!DOCTYPE html>\n<html><body>404</body></html>\n",
    "large-file pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 12\n",
    "json": b'{"epoch": 3}',
    "digits": b"000000000",
    "zeros": bytes(300),
    "broken zip": b"PK\x03\x04" + b"x" * 60,
    "bare pickle": pickle.dumps(3, protocol=2),
    "cut pickle": b"\x80\x02",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".ckpt"])
def test_files_that_are_no_checkpoints(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    kind = "safetensors file" if suffix == ".safetensors" else "checkpoint"
    text = refusal(path)
    assert text.startswith(f"{path} is not a readable {kind}, or is cut off: ")
    assert "weights_only" not in text


@pytest.mark.parametrize("form", ["safetensors", "zip", "old pickle"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_file_is_refused(form: str, tmp_path: Path, data: st.DataObject) -> None:
    whole = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(WEIGHTS, whole)
    else:
        torch.save(WEIGHTS, whole, _use_new_zipfile_serialization=form == "zip")
    content = whole.read_bytes()
    cut = whole.with_name(f"cut{whole.suffix}")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    text = refusal(cut)
    # The oldest format, cut inside a class's name, cannot be told from one that names an unknown class.
    assert "is cut off" in text or (form == "old pickle" and "wants to run code" in text)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.sampled_from([b"", b"\x80\x02", b"PK\x03\x04"]), noise=st.binary(max_size=80))
def test_noise_is_refused(suffix: str, tmp_path: Path, start: bytes, noise: bytes) -> None:
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(start + noise)
    text = refusal(path)
    pickled = (start + noise).startswith(b"\x80") or start == b"PK\x03\x04"
    assert "is not a readable" in text or (pickled and "wants to run code" in text)
    assert "weights_only" not in text or "if you trust its source" in text  # no bare advice to open it without care


class MakesMarker:
    """Unpickled without care, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["zip", "old pickle", "bare pickle"])
def test_a_file_that_runs_code_is_not_opened(form: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "w.pth"
    content = {**WEIGHTS, "extra": MakesMarker(marker)}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(MakesMarker(marker), protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    assert refusal(path).startswith(f"{path} wants to run code when it is read, so it was not opened; if you trust")
    assert not marker.exists()
    if form != "bare pickle":
        torch.load(path, weights_only=False)
        assert marker.exists()  # the trap is real


@pytest.mark.parametrize(
    "extra", [argparse.Namespace(lr=0.1), nn.Linear(1, 1), Path("runs")], ids=["namespace", "module", "path"]
)
def test_old_training_files_with_objects_are_refused(extra: object, tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "args": extra}, tmp_path / "w.pth")
    assert "wants to run code" in refusal(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (torch.ones(2), "holds a Tensor, not a dict of weights (a state dict)"),
        ([1, 2], "holds a list, not a dict of weights (a state dict)"),
        ({}, "holds no weights: its entries are none"),
        ({"lr": 0.1, "epoch": 2}, "holds no weights: its entries are epoch, lr"),
        ({"state_dict": {"step": 1}}, "holds no weights: its entries are step"),
        ({1: torch.ones(1)}, "holds no weights: its entries are 1"),
    ],
)
def test_readable_files_without_weights(content: object, text: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    assert refusal(tmp_path / "w.pth") == f"{tmp_path / 'w.pth'} {text}"


def test_the_report_counts_and_names() -> None:
    report = LoadReport(
        loaded=["norm.weight", "norm.bias"],
        resized=["pos_embed"],
        new=["head.weight"],
        unused=[f"blocks.{i}.ls1.gamma" for i in range(12)] + ["cls_token"],
    )
    assert str(report) == (
        "loaded 3 of 4 tensors; resized: pos_embed; new: head.weight; not used: blocks.*.ls1.gamma (12), cls_token"
    )
    assert str(LoadReport(loaded=["a"])) == "loaded 1 of 1 tensors"
    assert str(LoadReport()) == "loaded 0 of 0 tensors"


def test_the_report_stays_short() -> None:
    report = str(LoadReport(new=[f"part{i}.weight" for i in range(11)]))
    assert report == f"loaded 0 of 11 tensors; new: {', '.join(f'part{i}.weight' for i in range(8))}, and 3 more"


def test_load_exactly_loads() -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 2)})
    load_exactly(model, WEIGHTS, "w.pth")
    assert_weights(model.state_dict())


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"head.bias": None}, "missing: head.bias"),
        ({"neck.bias": torch.ones(1)}, "unknown: neck.bias"),
        ({"head.weight": torch.ones(2, 4)}, "other shape: head.weight (2, 4) instead of (2, 3)"),
        (
            {"head.bias": torch.ones(3), "head.weight": None, "neck.bias": torch.ones(1)},
            "missing: head.weight; unknown: neck.bias; other shape: head.bias (3,) instead of (2,)",
        ),
        (
            {f"neck{i}.bias": torch.ones(1) for i in range(6)},
            "unknown: neck0.bias, neck1.bias, neck2.bias, neck3.bias, and 2 more",
        ),
    ],
)
def test_load_exactly_names_what_does_not_fit_and_loads_nothing(change: dict[str, Tensor | None], faults: str) -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 2)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor for name, tensor in (WEIGHTS | change).items() if tensor is not None}
    with pytest.raises(UserError) as caught:
        load_exactly(model, state, "w.pth")
    assert str(caught.value) == f"w.pth does not fit the model ({faults})"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"^no such file: .*config\.json$"):
        read_json(path)
    path.write_text('{"num_classes": 3}')
    assert read_json(path) == {"num_classes": 3}
    for content, text in ((b'{"num_cl', "is not readable JSON: "), (b"\xff\xfe\x00", "is not readable JSON: ")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=text):
            read_json(path)
    path.write_text("[1]")
    with pytest.raises(UserError, match=r"holds a list, where a JSON object is expected$"):
        read_json(path)
