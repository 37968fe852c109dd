"""What all tests share: one thread, a folder of colours, and a run on it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.train import train
from tests.pictures import TEST_MODEL, colour_folder

# Small products: a second thread costs more than it brings, and much more where the cores are busy.
torch.set_num_threads(1)

# A deadline measures how busy the machine is, not the property.
# Elsewhere hypothesis explores; in CI it draws the same examples each time, so that a verdict is about the change.
settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--timm CLONE`: also run the scripts that timm keeps in its repository but in no package."""
    parser.addoption("--timm", metavar="CLONE", help="a clone of huggingface/pytorch-image-models")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a clone there is no script to test."""
    return True if collection_path.name == "test_timm_scripts.py" and not config.getoption("--timm") else None


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A test's random weights and pictures are the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train/` and `val/` of three colours; not to be changed."""
    return colour_folder(tmp_path_factory.mktemp("data") / "colours", train=8, val=4)


@pytest.fixture(scope="session")
def run(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of a training on the colours until it is perfect; the folder is not to be changed."""
    out = tmp_path_factory.mktemp("run") / "out"
    options = {"epochs": 5, "batch_size": 8, "workers": 0, "seed": 3}
    return train(TrainConfig(data=str(colours), model=TEST_MODEL, out=str(out), **options))
