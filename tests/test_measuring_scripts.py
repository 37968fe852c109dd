"""The scripts behind results/speed: what they count, compare and write, on the smallest models."""

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from tests.pictures import TEST_MODEL

SCRIPTS = Path(__file__).parents[1] / "scripts"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPrecisions:
    def test_drop_and_its_interval(self):
        right, reference = torch.tensor([1.0, 0, 0, 1]), torch.tensor([1.0, 1, 0, 1])
        drop, half = script("compare_precisions").drop_of(right, reference)
        assert drop == 0.25 and half == pytest.approx(1.96 * 0.5 / 2)

    def test_a_trained_model(self, run: dict[str, Any], colours: Path):
        found = script("compare_precisions").compare(str(Path(run["out"]) / "model"), str(colours))
        assert found["pictures"] == 12 and found["top1_fp32"] == 1.0
        assert [row["precision"] for row in found["rows"]] == ["fp32", "bf16", "int8-jumbo"]
        assert all(row["agreement"] == 1.0 and row["drop"] == 0.0 for row in found["rows"])
        low, high = (row["relative_difference"] for row in found["rows"][:2])
        assert low < 1e-5 < high < 0.05


class TestRivals:
    def test_other_code_gets_the_papers_widths(self):
        model = script("bench_rivals").other_jumbo("pico")
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)

    def test_published_accuracies_come_from_timms_table(self, tmp_path: Path):
        module = script("bench_rivals")
        (tmp_path / "results").mkdir()
        rows = [f"{name},{70 + place},224" for place, name in enumerate(module.RIVALS)]
        text = "\n".join(["model,top1,img_size", f"{module.RIVALS[0]},1.0,288", *rows])
        (tmp_path / "results" / "results-imagenet.csv").write_text(text)
        found = module.published(tmp_path)
        assert found[module.RIVALS[0]] == 70.0 and found["jumbo_vit_tiny_patch16_224"] == 78.366

    def test_tables(self, tmp_path: Path):
        module = script("bench_rivals")
        forms = ("official fp32", "optimize fp32", "optimize bf16")
        kinds = dict.fromkeys(module.KINDS, 0.125)
        for batch, extra in ((1, ["optimize fp32, compiled"]), (8, [])):
            rows = [
                {"form": form, "median_s": 0.04 / (place + 1), "ratio": place + 1.0}
                for place, form in enumerate([*forms, *extra])
            ]
            part = {"size": "tiny", "batch": batch, "roofline_s": {"fp32": 0.01, "bf16": 0.01}, "rows": rows}
            (tmp_path / f"tiny_b{batch}.json").write_text(json.dumps({**part, "shares": {"optimize fp32": kinds}}))
        rival = {"model": "levit", "form": "fp32", "top1": 81.5, "images_per_second": 9.0, "fastest": True}
        (tmp_path / "rivals_b1.json").write_text(json.dumps({"batch": 1, "rows": [rival, {**rival, "fastest": False}]}))
        table = module.tables(tmp_path)
        assert "| official fp32 | 40 ms | 40 ms |" in table
        assert "| optimize fp32, compiled | 4.00 | - |" in table
        assert "| optimize fp32: share of the roofline | 50% | 50% |" in table
        assert table.count("| tiny 1, optimize fp32 | 12% |") == 1 and table.count("| levit |") == 1


class TestTraining:
    def test_arms_alternate_and_keep_what_they_keep(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.syspath_prepend(SCRIPTS)  # its processes import it by name
        module = importlib.import_module("bench_training")
        arms = (
            module.Arm("plain", TEST_MODEL, 32, 4, 10),
            module.Arm("two", TEST_MODEL, 32, 4, 10, fused=True, processes=2),
        )
        rows = module.measure(arms, threads=2, clone=Path("nowhere"), repeats=2, pause=0.0)
        assert [row["name"] for row in rows] == ["plain", "two"]
        assert rows[0]["ratio"] == rows[0]["kept_ratio"] == 1.0
        assert all(len(row["seconds"]) == 2 and sum(row["shares"].values()) == pytest.approx(1.0) for row in rows)
        # Two halves of a batch keep what the whole does, up to what does not grow with it.
        assert rows[1]["kept_ratio"] == pytest.approx(1.0, abs=0.15)


class TestLite0:
    def test_weights_follow_timms_order(self):
        module = script("efficientnet_lite0")
        state = {
            f"theirs.{place}": value for place, value in enumerate(timm.create_model(module.NAME).state_dict().values())
        }
        model = module.converted(state)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))

    def test_another_order_is_refused(self):
        module = script("efficientnet_lite0")
        state = dict(reversed(timm.create_model(module.NAME).state_dict().items()))
        with pytest.raises(SystemExit, match="do not follow"):
            module.converted(state)


class TestPatchDrop:
    @pytest.mark.parametrize(
        ("model", "words"),
        [("resnet18", "resnet18 has no place where patches can be dropped"), ("resnet81", "is none of timm's")],
    )
    def test_a_model_without_patches_is_one_line(
        self,
        model: str,
        words: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ):
        monkeypatch.setattr("sys.argv", ["bench", "--model", model, "--out", str(tmp_path / "out.json")])
        with pytest.raises(SystemExit) as caught:
            script("bench_patch_drop").main()
        assert caught.value.code == 2 and words in capsys.readouterr().err
        assert not (tmp_path / "out.json").exists()


class TestDryRuns:
    def test_a_pattern_that_matches_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr("sys.argv", ["dry", "--only", "nothing*", "--out", str(tmp_path / "out.json")])
        with pytest.raises(SystemExit) as caught:
            script("dry_run_recipes").main()
        assert caught.value.code == 2 and "--only nothing* matches no recipe" in capsys.readouterr().err


class TestGpu:
    def test_it_says_that_there_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit, match="no GPU"):
            script("bench_gpu").measure(argparse.Namespace(official=None, minutes=1.0, out=tmp_path / "gpu.json"))
        assert not (tmp_path / "gpu.json").exists()
