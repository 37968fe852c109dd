"""Tar shards and datasets on disk for tests, made in the test."""

import contextlib
import io
import socket
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jumbo_vit.data.records import ImageSet, Splits
from jumbo_vit.data.sets import open_data
from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from tests.pictures import TEST_MODEL, square

datasets = pytest.importorskip("datasets")
webdataset = pytest.importorskip("webdataset")


Members = Iterable[tuple[str, bytes]]


@contextlib.contextmanager
def offline(cache: Path) -> Iterator[None]:
    """Within, the datasets library keeps its copies in `cache`, and nothing may ask for a host."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setattr(socket, "getaddrinfo", refuse)
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


def listed(images: ImageSet) -> list[tuple[str, str]]:
    return [(path, images.classes[labels[0]]) for path, labels in images.samples]


def names(images: ImageSet) -> list[str]:
    return [images.name(index) for index in range(len(images))]


def options(data: Path, out: Path, **changes: Any) -> TrainConfig:
    chosen = {"epochs": 2, "batch_size": 8, "workers": 0, "logger": ["none"], "recovery_interval": 1}
    return TrainConfig(data=str(data), out=str(out), model=TEST_MODEL, img_size="32", **(chosen | changes))


def png(colour: str = "red", seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    square(colour, seed).save(buffer, "PNG")
    return buffer.getvalue()


def tar(path: Path, members: Members) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def good(first: int = 0, count: int = 4) -> list[tuple[str, bytes]]:
    """Samples of the classes a and b, in turn."""
    found = []
    for number in range(first, first + count):
        found += [(f"{number:04d}.png", png(seed=number)), (f"{number:04d}.cls", b"ab"[number % 2 :][:1])]
    return found


def opened(data: Path | str, task: Any = "multiclass") -> Splits:
    return open_data(str(data), task, 0, 0.25)


def mistake(data: Path | str, task: Any = "multiclass") -> str:
    with pytest.raises(UserError) as caught:
        opened(data, task)
    text = str(caught.value)
    assert "\n" not in text
    return text


def whole(splits: Splits) -> dict[str, str]:
    """All names with their labels, whichever part they went to."""
    return {
        part.name(index): "|".join(part.classes[label] for label in labels)
        for part in (splits.train, splits.val)
        for index, labels in enumerate(part.labels)
    }


def rows(labels: list[Any], image: Any = None, **columns: Any) -> Any:
    pictures = [{"bytes": png(seed=number), "path": None} for number in range(len(labels))]
    return datasets.Dataset.from_dict({"image": image or pictures, "label": labels, **columns})


def saved(dataset: Any, folder: Path) -> Path:
    with contextlib.redirect_stderr(io.StringIO()):
        dataset.save_to_disk(str(folder))
    return folder
