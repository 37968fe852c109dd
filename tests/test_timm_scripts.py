"""timm's own train.py and validate.py on a small folder: `pytest tests/test_timm_scripts.py --timm CLONE`.

timm's packages do not hold these scripts, so without a clone there is nothing to collect here.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.test_check_timm import script  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def found(script: Any, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:  # noqa: F811
    """What the scripts of the clone say of the test model on six colours."""
    clone = pytestconfig.getoption("--timm")
    assert clone, "give --timm CLONE"
    result: dict[str, Any] = script.run_scripts(Path(clone).resolve(), tmp_path_factory.mktemp("timm"))
    return result


def test_train_py_learns_the_colours(found: dict[str, Any]) -> None:
    assert found["train_py_top1"] == 100.0


def test_validate_py_agrees_and_sees_wrong_labels(found: dict[str, Any]) -> None:
    assert found["validate_py_top1"] == 100.0
    assert found["validate_py_top1_with_a_quarter_of_the_labels_wrong"] == 75.0
