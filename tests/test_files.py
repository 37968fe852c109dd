"""Writing files: whole or not at all, also by several writers at once."""

import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from jumbo_vit.files import is_temporary, write_atomically, write_bytes


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path):
    first_is_open, second_is_done = threading.Event(), threading.Event()
    faults: list[BaseException] = []

    def slow(file: BinaryIO) -> None:
        file.write(b"a" * 10)
        first_is_open.set()
        second_is_done.wait(30)
        file.write(b"a" * 10)

    def first() -> None:
        try:
            write_atomically(tmp_path / "chunk", slow)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_open.wait(30)
    write_bytes(tmp_path / "chunk", b"b" * 20)
    assert (tmp_path / "chunk").read_bytes() == b"b" * 20
    second_is_done.set()
    thread.join(30)
    assert not faults and (tmp_path / "chunk").read_bytes() == b"a" * 20
    assert [entry.name for entry in tmp_path.iterdir()] == ["chunk"]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path):
    old, new, other = (tmp_path / name for name in (".f.1-2.part", ".f.3-4.part", ".g.1-2.part"))
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (0, 0))
    write_bytes(tmp_path / "f", b"whole")
    assert not old.exists() and new.exists() and other.exists()


@pytest.mark.parametrize(
    ("name", "of", "expected"), [(".f.1-2.part", "f", True), ("f", "f", False), (".g.part", "f", False)]
)
def test_temporary_names(name: str, of: str, expected: bool):
    assert is_temporary(name, of) is expected
