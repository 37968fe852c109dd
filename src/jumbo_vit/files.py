"""Writing files so that a reader never sees half of one, and a full disk costs one line and nothing else."""

import contextlib
import glob
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from jumbo_vit.errors import UserError

_LEFT_OVER_SECONDS = 86400.0


def write_atomically(path: str | Path, write: Callable[[BinaryIO], None]) -> None:
    """Write through `write(file)` to a temporary name beside `path`, flush to disk, then rename.

    Raises:
        UserError: The disk is full or the folder cannot be written; the file that stood there before is untouched.
    """
    path = Path(path)
    # Of this process and thread alone: several may write the same file, each the same content.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(path)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch's zip writer reports a full disk as a RuntimeError around the failed write.
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise UserError(
            f"cannot write {path}: {reason}; what stood there before is untouched, make room or choose another folder"
        ) from error
    finally:
        _remove(temporary)


def is_temporary(name: str, of: str) -> bool:
    """Whether a file's name is one under which `write_atomically` writes the file called `of`."""
    return name.startswith(f".{of}.") and name.endswith(".part")


def _remove_left_over(path: Path) -> None:
    """Remove what killed processes left behind while they wrote `path`: nothing writes one file for a day."""
    for entry in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):  # another process may be removing it too
            if time.time() - entry.stat().st_mtime > _LEFT_OVER_SECONDS:
                entry.unlink()


def _disk_reason(error: BaseException) -> str | None:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        link = link.__cause__ or link.__context__
    text = str(error)
    return "the disk is full or not writable" if "PytorchStreamWriter" in text or "inline_container" in text else None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # on a read-only disk nothing was written, and nothing can be removed


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write bytes atomically."""

    def write(file: BinaryIO) -> None:
        file.write(data)

    write_atomically(path, write)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically, with `\\n` line ends on every system."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON atomically, indented, with non-ASCII characters as they are, and null for NaN and infinity.

    A file name that is no UTF-8 keeps its odd bytes as `\\udcXX`, which is how JSON readers give it back.
    """
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def _finite(content: Any) -> Any:
    # JSON has no NaN; most readers refuse Python's.
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
