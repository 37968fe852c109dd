"""What the user points `predict` and `embed` at: files, folders, pictures in memory, or lists of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jumbo_vit.data.images import Skipped, find_images
from jumbo_vit.errors import UserError

Input = str | Path | Image.Image | np.ndarray


@dataclass(frozen=True)
class Entry:
    """One picture to look at: the name that results carry, and where it comes from."""

    name: str
    source: Input


def expand_inputs(inputs: Any) -> tuple[list[Entry], list[Skipped]]:
    """List every picture that `inputs` mean, with a name that is unique among them.

    A folder stands for all pictures below it, named relative to it; a file is named by its file name. Where two names
    are equal, both keep their INPUT in front. Pictures in memory are named `#0`, `#1`, ...

    Returns:
        The pictures, and what was left out of the folders because it is no picture format.

    Raises:
        UserError: A path does not exist, or nothing at all was found.
    """
    single = isinstance(inputs, (str, Path, Image.Image, np.ndarray))
    items: list[Any] = [inputs] if single else list(inputs)
    found: list[tuple[str, str, Input]] = []
    skipped: list[Skipped] = []
    for position, item in enumerate(items):
        if isinstance(item, (str, Path)):
            found += _from_path(Path(item), skipped)
        elif isinstance(item, (Image.Image, np.ndarray)):
            found.append((f"#{position}", f"#{position}", item))
        else:
            raise UserError(f"input {position} is a {type(item).__name__}; give paths, PIL images or NumPy arrays")
    if not found:
        where = ", ".join(str(item) for item in items if isinstance(item, (str, Path))) or "the list given"
        raise UserError(f"no images found in {where}{_left_out(skipped)}")
    return _named(found), skipped


def _from_path(path: Path, skipped: list[Skipped]) -> Iterable[tuple[str, str, Input]]:
    path = path.expanduser()
    if path.is_dir():
        pictures, others = find_images(path)
        skipped += others
        for picture in pictures:
            name = picture.relative_to(path.absolute()).as_posix()
            yield name, (path / name).as_posix(), picture
    elif path.exists():
        yield path.name, path.as_posix(), path
    else:
        raise UserError(f"no such file or folder: {path}")


def _named(found: list[tuple[str, str, Input]]) -> list[Entry]:
    short = Counter(name for name, _, _ in found)
    return [Entry(name if short[name] == 1 else full, source) for name, full, source in found]


def _left_out(skipped: list[Skipped]) -> str:
    return f" ({len(skipped)} other files, such as {skipped[0].path})" if skipped else ""
