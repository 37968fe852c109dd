"""A disk that fills or cannot be written costs one line, and nothing that stood there."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jumbo_vit.errors import UserError
from jumbo_vit.files import write_atomically, write_bytes, write_json
from jumbo_vit.tasks.state import Progress, read_state, write_state
from jumbo_vit.tasks.train import train
from tests.runs import small_config

needs_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting a small disk needs root on Linux"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@needs_root
def test_a_full_disk_keeps_what_was_there(small_disk: Path) -> None:
    target = small_disk / "file"
    write_bytes(target, b"first")
    with pytest.raises(UserError, match=r"cannot write .*file: No space left on device; what stood there before"):
        write_bytes(target, b"x" * 4_000_000)
    assert target.read_bytes() == b"first"
    assert names(small_disk) == ["file"]


@needs_root
def test_a_full_disk_keeps_both_checkpoints(small_disk: Path) -> None:
    rest: dict[str, Any] = {"average": None, "optimizer": {}, "precision": {}, "fingerprint": "", "epochs": 9}
    rest |= {"identity": {}, "update_size": 1, "unreadable": None}
    small = {"model": {"weight": torch.zeros(1000)}, **rest}
    write_state(small_disk, small, Progress(epoch=1))
    write_state(small_disk, small, Progress(epoch=2))
    with pytest.raises(UserError, match=r"No space left|disk is full"):
        write_state(small_disk, {"model": {"weight": torch.zeros(1_000_000)}, **rest}, Progress(epoch=3))
    assert read_state(small_disk / "last.ckpt")[1].epoch == 2
    assert read_state(small_disk / "previous.ckpt")[1].epoch == 1
    assert names(small_disk) == ["last.ckpt", "previous.ckpt"]


@needs_root
def test_a_run_on_a_disk_that_fills(small_disk: Path) -> None:
    out = small_disk / "run"
    (small_disk / "ballast").write_bytes(b"x" * 500_000)
    with pytest.raises(UserError, match="cannot write"):
        train(small_config(out, epochs=40, model_ema=True))
    for name in ("last.ckpt", "previous.ckpt"):
        if (out / name).exists():
            read_state(out / name)


@needs_root
def test_a_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"cannot write .*Read-only file system"):
        train(small_config(small_disk / "run"))


@settings(max_examples=25)
@given(first=st.binary(max_size=50), second=st.binary(max_size=50), cut=st.integers(0, 50))
def test_a_failed_write_leaves_the_old_file(
    tmp_path_factory: pytest.TempPathFactory, first: bytes, second: bytes, cut: int
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    write_bytes(path, first)

    def failing(file: object) -> None:
        file.write(second[:cut])  # type: ignore[attr-defined]
        raise OSError(5, "Input/output error")

    with pytest.raises(UserError, match="Input/output error"):
        write_atomically(path, failing)
    assert path.read_bytes() == first
    assert names(path.parent) == ["file"]


@given(st.recursive(st.text() | st.just(os.fsdecode(b"caf\xe9.png")), st.lists, max_leaves=5))
def test_json_gives_back_every_text_also_names_that_are_no_utf8(content: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        write_json(path, content)
        assert json.loads(path.read_text(encoding="utf-8")) == content
