"""The one way to find pictures in a folder, the same on every file system."""

import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from jumbo_vit.errors import UserError

# Pillow lists these as formats, but only knows their header (the first four) or hands the file to another program,
# PostScript even to an interpreter that runs it.
NOT_DECODED = frozenset({"BUFR", "GRIB", "HDF5", "MPEG", "WMF", "EPS"})

_HIDDEN = frozenset({"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin"})


@dataclass(frozen=True)
class Skipped:
    """A file that was left out: `path` relative to the data's folder, with slashes, and `reason` in a few words."""

    path: str
    reason: str


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name belongs to the system or a program, not to the data."""
    return name.startswith(".") or name.lower() in _HIDDEN


def picture_extensions() -> frozenset[str]:
    """Extensions, in lower case with their dot, of all formats that this Pillow decodes."""
    Image.init()
    known = Image.registered_extensions().items()
    opened = {ext.lower() for ext, name in known if name in Image.OPEN and name not in NOT_DECODED}
    return frozenset(opened | {".mpo"})  # the JPEG reader opens MPO, which Pillow lists for writing only


def order_key(path: str) -> tuple[str, str]:
    """Sorts paths alike on every file system: by the composed form of the name, ties by the name itself."""
    return unicodedata.normalize("NFC", path), path


def find_images(root: str | Path) -> tuple[list[Path], list[Skipped]]:
    """All pictures below `root`, in one total order, and the files that are none.

    A picture is known by its extension, in any case. Hidden entries are left out and not counted. Links to files are
    taken; links to folders are followed, each folder once, and never to a folder that contains the link.
    """
    base = Path(root).expanduser().absolute()
    if not base.exists():
        raise UserError(f"there is no folder {root}: check the path")
    if not base.is_dir():
        raise UserError(f"{root} is a file, where a folder of pictures is expected")
    known = picture_extensions()
    found: list[str] = []
    files, skipped = _walk(base)
    for name in files:
        if Path(name).suffix.lower() not in known:
            skipped.append(Skipped(name, "not a picture format"))
        elif not _is_utf8(name):
            skipped.append(Skipped(name, "its name is not valid UTF-8: rename it"))
        else:
            found.append(name)
    # Every table and report is written in UTF-8, so a name that is not is shown escaped.
    shown = [Skipped(item.path.encode("utf-8", "backslashreplace").decode(), item.reason) for item in skipped]
    return [base / name for name in sorted(found, key=order_key)], sorted(shown, key=lambda item: order_key(item.path))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk(base: Path) -> tuple[list[str], list[Skipped]]:
    """Files below `base` as relative names with slashes; links to folders come last, so that the folder itself wins."""
    files: list[str] = []
    skipped: list[Skipped] = []
    seen: set[Path] = set()
    folders, links = [""], list[str]()
    while folders or links:
        links.sort(key=order_key, reverse=True)
        here = folders.pop() if folders else links.pop()
        target = (base / here).resolve()
        # A link to a folder around itself would bring in the neighbours, such as the validation pictures.
        around = here and (base / here).is_symlink() and (base / here).parent.resolve().is_relative_to(target)
        if target in seen or around:
            skipped.append(Skipped(here, "a link to a folder that is read already or holds the link itself"))
            continue
        seen.add(target)
        try:
            entries = list(os.scandir(base / here))
        except OSError:
            skipped.append(Skipped(here or ".", "no permission to read this folder"))
            continue
        for entry in entries:
            if is_hidden(entry.name):
                continue
            name, kind = f"{here}/{entry.name}".lstrip("/"), _kind(entry)
            if kind == "file":
                files.append(name)
            elif kind == "folder":
                (links if entry.is_symlink() else folders).append(name)
            else:
                skipped.append(Skipped(name, kind))
    return files, skipped


def _kind(entry: os.DirEntry[str]) -> str:
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
    except OSError:  # a link to itself
        pass
    return "a broken link" if entry.is_symlink() else "not a regular file"
