"""The comparison with the authors' code, on a stand-in for it."""

import json
import sys
from pathlib import Path

import pytest

from jumbo_vit.measure import versus

# What the script needs of the authors' code: `get_config`, and a class that has their names of weights.
CONFIGS = 'def get_config(size): return {"img_size": 224, "num_classes": 5, "embed_dim": 8, "J": 2}'
MODEL = """
import timm, torch
class Jumbo(torch.nn.Module):
    def __init__(self, device, J, img_size, num_classes, embed_dim, drop_path_rate):
        super().__init__()
        assert (device, J, drop_path_rate) == ("cpu", 2, 0.0)
        self.inner = timm.create_model("jumbo_vit_pico_patch16_224", img_size=img_size, device=device)
    def state_dict(self):
        return {"cls_token": torch.zeros(1)}
    def load_state_dict(self, state):
        assert "jumbo_token" in state and "reg_token" not in state
        self.inner.load_state_dict(state)
    def forward(self, x):
        return self.inner(x)
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("configs", "models", "models.jumbo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "configs.py").write_text(CONFIGS)
    (tmp_path / "models" / "jumbo.py").write_text(MODEL)
    return tmp_path


def test_both_are_timed_with_the_same_weights(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = clone / "out.json"
    small = ["--size", "pico", "--pixels", "32", "--batch", "2", "--pairs", "3", "--json", str(path)]
    assert versus.main(["--official", str(clone), *small]) == 0
    said, result = capsys.readouterr().out, json.loads(path.read_text())
    assert "forward: ours" in said and "training_step: ours" in said and "ratio" in said
    assert result["largest_difference"] == 0.0
    for name in ("forward", "training_step"):
        row = result[name]
        assert len(row["ours"]) == len(row["theirs"]) == 3
        assert row["ours_median_s"] == sorted(row["ours"])[1]
        assert row["ratio"] == row["theirs_median_s"] / row["ours_median_s"]
    assert {"cpu", "torch", "threads"} <= result["machine"].keys()
    assert {"commit", "command", "date", "official_commit"} <= result.keys()


def test_pairs_alternate_who_comes_first() -> None:
    calls: list[str] = []
    versus.time_pairs(lambda: calls.append("o"), lambda: calls.append("t"), pairs=3, warm_up=1)
    assert "".join(calls) == "ot" + "ot" + "to" + "ot"


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert versus.main(["--official", str(tmp_path)]) == 2
    assert "is no clone of antofuller/jumbo" in capsys.readouterr().err
