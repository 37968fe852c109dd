"""What the user means after `--data` when it is no plain folder of pictures: a table, shards, or a dataset on disk."""

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jumbo_vit.data.arrow import SAVED, list_parquet, list_saved
from jumbo_vit.data.find import find_images, order_key
from jumbo_vit.data.folders import subfolders
from jumbo_vit.data.listing import HELD_OUT_NAMES, TRAIN_NAMES, Listing, Task
from jumbo_vit.data.shards import list_shards
from jumbo_vit.data.tables import CSV_SUFFIXES, JSON_SUFFIXES, parse_table
from jumbo_vit.errors import UserError, nearest

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_SHARDS = (".tar", ".parquet")
_SPLITS = (*(name for name in TRAIN_NAMES if name), *HELD_OUT_NAMES)


def find_listing(data: str, task: Task) -> Listing | None:
    """The pictures that `data` lists, or None if it is a folder of pictures.

    It lists them if it is a table, a tar or parquet file or a pattern of such files (`*`, `?`, `{000..009}`), a folder
    of `save_to_disk`, or a folder that holds shards and no pictures.

    Raises:
        UserError: There is no such file or folder, or nothing here reads it.
    """
    path = Path(data).expanduser().absolute()
    if path.is_dir():
        listing = _of_folder(data, path, task)
    elif path.exists():
        listing = _of_file(data, path, task)
    elif re.search(r"[*?{\[]", data):
        listing = _of_files(data, _root(path), _expanded(data, path), task)
    else:
        raise UserError(
            f"there is no {data}{nearest(data, ['digits'])}: give a folder of class folders, a CSV of path and labels, "
            "or digits"
        )
    if listing is not None and not listing.rows:
        raise UserError(f"{data} holds no pictures")
    return listing


def training_files(data: str) -> list[Path]:
    """The files of `data` that hold its training part: of a dataset of `save_to_disk`, or tar or parquet files.

    Raises:
        UserError: There is no such file or folder, or none of its files is for training.
    """
    path = Path(data).expanduser().absolute()
    if path.is_dir() and (path / SAVED[0]).is_file():
        inside = next((path / name for name in subfolders(path) if name.lower() in TRAIN_NAMES), path)
        files = sorted(inside.glob("*.arrow"))
    elif path.is_dir() and all((path / name).is_file() for name in SAVED[1:]):
        files = sorted(path.glob("*.arrow"))
    elif path.is_dir():
        names = [item.path for item in find_images(path)[1] if item.path.lower().endswith(_SHARDS)]
        names = [name for name in names if not name.lower().endswith(".parquet")] or names
        files = [path / name for name in names if _split(Path(name)) in TRAIN_NAMES]
    elif path.exists():
        files = [path]
    elif re.search(r"[*?{\[]", data):
        found = sorted({*_expanded(data, path)}, key=lambda p: order_key(str(p)))
        files = [file for file in found if _split(file.relative_to(_root(path))) in TRAIN_NAMES]
    else:
        raise UserError(f"there is no {data}: for --streaming give a folder, files or a pattern of them, or a URL")
    if not files:
        raise UserError(f"{data} holds no tar, parquet or saved files that are for training")
    return files


def run_name(data: str) -> str:
    """A name for what comes of `data`: its last part without the ending of a list, and without signs of a pattern."""
    path = Path(data).resolve()
    listed = path.suffix.lower() in (".csv", *JSON_SUFFIXES, *_SHARDS) and not path.is_dir()
    name = path.stem if listed else path.name
    return name if path.exists() else re.sub(r"[^\w.-]+", "_", name).strip("_-.") or "shards"


def _of_file(data: str, path: Path, task: Task) -> Listing:
    if path.suffix.lower() in (*CSV_SUFFIXES, *JSON_SUFFIXES):
        return parse_table(data, task)
    return _of_files(data, path.parent, [path], task)


def _of_folder(data: str, path: Path, task: Task) -> Listing | None:
    if (path / SAVED[0]).is_file() or all((path / name).is_file() for name in SAVED[1:]):
        return list_saved(data, path, task)
    folders = [path, *(path / name for name in subfolders(path) if name.lower() in (*_SPLITS, "data"))]
    if not any(name.lower().endswith((*_SHARDS, *_COMPRESSED)) for folder in folders for name in _names_in(folder)):
        return None
    pictures, others = find_images(path)
    if pictures:
        return None
    names = [item.path for item in others if item.path.lower().endswith((*_SHARDS, *_COMPRESSED))]
    # Tools that write tar shards put tables about them beside them, in parquet.
    shards = [name for name in names if not name.lower().endswith(".parquet")] or names
    listing = _of_files(data, path, [path / name for name in shards], task)
    if len(shards) < len(names):
        listing.notes.append(
            f"{path.name}: {len(names) - len(shards)} parquet files beside the tar files are not used."
        )
    return listing


def _names_in(folder: Path) -> list[str]:
    try:
        return [file.name for file in folder.iterdir()]
    except OSError:  # the search for pictures says why
        return []


def _of_files(data: str, root: Path, files: Iterable[Path], task: Task) -> Listing:
    """Shards, all of one kind."""
    shards = [(path, _split(path.relative_to(root))) for path in sorted(set(files), key=lambda p: order_key(str(p)))]
    for path, _ in shards:
        if path.name.lower().endswith(_COMPRESSED):
            raise UserError(
                f"{path} is compressed, so its pictures cannot be read at random: decompress it to a plain .tar "
                "(pictures hardly shrink), or unpack it into a folder"
            )
    kinds = {path.suffix.lower() for path, _ in shards}
    if kinds == {".tar"}:
        return list_shards(data, root, shards, task)
    if kinds == {".parquet"}:
        return list_parquet(data, root, shards, task)
    if len(shards) > 1:
        raise UserError(f"{data} means files that are not all .tar or all .parquet: give shards of one kind")
    raise UserError(
        f"{data} is a file, but no .csv or .tsv, .jsonl or .ndjson, .tar or .parquet: give a folder of class folders "
        "(unpacked) or a CSV"
    )


def _split(name: Path) -> str:
    """The split of a shard: that of a folder it lies in, else the one that is a word of its file name, else "".

    Raises:
        UserError: The file name holds two of these words.
    """
    for folder in name.parent.parts:
        if folder.lower() in _SPLITS:
            return folder.lower()
    words = dict.fromkeys(word for word in re.split(r"[-_.]", name.stem.lower()) if word in _SPLITS)
    if len(words) > 1:
        raise UserError(
            f"{name} may belong to {' or to '.join(words)}: name it after one, or put it into a folder train/"
        )
    return next(iter(words), "")


def _root(pattern: Path) -> Path:
    """The folder that all files of the pattern lie in, as far as it is written out.

    A folder that is there is meant as it is called, even if its name looks like a pattern.
    """
    return next(parent for parent in pattern.parents if parent.is_dir() or not re.search(r"[*?{\[]", str(parent)))


def _expanded(data: str, pattern: Path) -> Sequence[Path]:
    root = _root(pattern)
    texts = [str(pattern.relative_to(root))]
    if "{" in texts[0]:
        try:
            from braceexpand import braceexpand
        except ModuleNotFoundError as error:
            raise UserError(
                f"{data} needs a library for its braces: pip install 'jumbo-vit[data]', or use *"
            ) from error
        try:
            texts = list(braceexpand(texts[0]))
        except ValueError as error:
            raise UserError(f"{data} has a brace without its partner: write {{000..009}}") from error
    found: list[Path] = []
    for text in texts:
        # Unlike Path.glob it takes a pattern of any form.
        matches = glob.glob(text, root_dir=root, recursive=True)  # noqa: PTH207
        if not matches:
            raise UserError(f"no file is called {root / text}, which {data} means: correct the pattern or add the file")
        found += [root / name for name in matches]
    return found
