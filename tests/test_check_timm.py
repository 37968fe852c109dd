"""The script that runs timm's tests: what it changes in them, and that it knows nothing else."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "scripts" / "check_timm.py"
CLONE = """FEAT_INTER_FILTERS = ['a']
NON_STD_FILTERS = ['b']
    assert outputs.shape[feat_dim] == model.num_features
    model = create_model(model_name, pretrained=False, num_classes=0).eval()
    assert outputs.shape[feat_dim] == model.num_features
"""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_timm", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_three_lines_change(script: Any) -> None:
    pairs = zip(CLONE.splitlines(), script.adapted(CLONE).splitlines(), strict=True)
    assert [new.strip() for old, new in pairs if old != new] == [
        "FEAT_INTER_FILTERS = ['registry', 'naflex','a']",
        "NON_STD_FILTERS = ['jumbo_vit*','b']",
        "assert outputs.shape[feat_dim] == model.head_hidden_size",
    ]


@pytest.mark.parametrize("line", range(5))
def test_another_text_is_refused(script: Any, line: int) -> None:
    lines = CLONE.splitlines(keepends=True)
    del lines[line]
    if line == 2:  # the earlier check of the same words is not the one that changes
        assert "head_hidden_size" in script.adapted("".join(lines))
    else:
        with pytest.raises(SystemExit, match="does not hold what is to be changed"):
            script.adapted("".join(lines))
