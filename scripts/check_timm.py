"""Run timm's own tests, training script and validation script on our models.

    git clone https://github.com/huggingface/pytorch-image-models /somewhere/timm
    python scripts/check_timm.py --timm /somewhere/timm --out results/timm.json

Tests and scripts come from the clone, the library is the installed timm. Three lines of timm's tests are replaced in a
temporary copy (see `CHANGES`); weights of the hub are replaced by random ones under the authors' names, so nothing is
downloaded. All names take an hour or two on two cores; `--names 'jumbo_vit_test*' 'vit_test*'`
takes a minute. The script fails if a test of our names fails or is skipped, or if a run does not reach 100 %.
"""

import argparse
import csv
import fnmatch
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.models._builder
import torch
from PIL import Image

from jumbo_vit import __version__, naflex
from jumbo_vit.jumboized import NAME as JUMBOIZED
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.sizes import BASELINE_NAMES, MODEL_NAMES, model_name

NAMES = [*MODEL_NAMES, *BASELINE_NAMES, *naflex.NAMES]
TEST_MODEL = "jumbo_vit_test_patch8_32"
LEFT_OUT = {JUMBOIZED: "timm's tests give no arguments, and this name needs `base`"}
# What is replaced in timm's tests/test_models.py, each exactly once after the marker, and why.
CHANGES = (
    (
        "our modules have forward_intermediates",
        "FEAT_INTER_FILTERS = [",
        "FEAT_INTER_FILTERS = [",
        "FEAT_INTER_FILTERS = ['registry', 'naflex',",
    ),
    (
        "our names, as all ViTs, have tokens for features",
        "NON_STD_FILTERS = [",
        "NON_STD_FILTERS = [",
        "NON_STD_FILTERS = ['jumbo_vit*',",
    ),
    (
        "without classes the model gives what its head would read, which is wider than a token",
        "model = create_model(model_name, pretrained=False, num_classes=0).eval()",
        "    assert outputs.shape[feat_dim] == model.num_features\n",
        "    assert outputs.shape[feat_dim] == model.head_hidden_size\n",
    ),
)
COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (200, 30, 200), (30, 200, 200)]
# A script of timm's with our names registered, and with the installed timm rather than the clone's.
RUNNER = "import runpy, sys, jumbo_vit; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def adapted(text: str) -> str:
    """timm's tests with `CHANGES` made.

    Raises:
        SystemExit: The clone's text is another than this script knows.
    """
    for reason, marker, old, new in CHANGES:
        before, found, after = text.partition(marker)
        if text.count(marker) != 1 or old not in found + after:
            sys.exit(f"this clone's tests/test_models.py does not hold what is to be changed ({reason}): {old.strip()}")
        text = before + (found + after).replace(old, new, 1)
    return text


def hub_weights(_: str, filename: str = "", **__: Any) -> dict[str, torch.Tensor]:
    """In place of timm's download: random weights of that size, under the authors' names."""
    size = filename.removeprefix("jumbo_").removesuffix(".pth")
    state = timm.create_model(model_name(size)).state_dict()
    state["jumbo_token"] = state.pop("reg_token")
    state["cls_token"] = torch.zeros_like(state["jumbo_token"][:, :1])
    return state


class OurNames:
    """A pytest plugin: keeps the tests of some names, and counts their outcomes."""

    def __init__(self, names: list[str]) -> None:
        self.names = set(names)
        self.counts: dict[str, Counter[str]] = {}
        self.not_passed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests whose `model_name` is one of the names, with or without a tag."""
        items[:] = [item for item in items if self._model(item).split(".")[0] in self.names]

    @staticmethod
    def _model(item: pytest.Item) -> str:
        call = getattr(item, "callspec", None)
        return str(call.params.get("model_name", "")) if call else ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: at its call, or where it failed or was skipped before."""
        if report.when != "call" and report.outcome == "passed":
            return
        test = report.nodeid.rpartition("::")[2]
        self.counts.setdefault(test.partition("[")[0], Counter())[report.outcome] += 1
        if report.outcome != "passed":
            self.not_passed.append(f"{test}: {report.outcome}")


def run_tests(clone: Path, work: Path, names: list[str]) -> dict[str, Any]:
    """timm's tests/test_models.py on our names, in this process."""
    copy = work / "test_models.py"
    copy.write_text(adapted((clone / "tests" / "test_models.py").read_text()))
    (work / "pytest.ini").write_text("[pytest]\n")
    ours = OurNames(names)
    hub, timm.models._builder.load_state_dict_from_hf = timm.models._builder.load_state_dict_from_hf, hub_weights
    # Without this, timm leaves out tests for the sake of its own machines.
    os.environ.pop("GITHUB_ACTIONS", None)
    start = time.monotonic()
    try:
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "-c", str(work / "pytest.ini")]
        pytest.main([*options, str(copy)], plugins=[ours])
    finally:
        timm.models._builder.load_state_dict_from_hf = hub
    total = sum(ours.counts.values(), Counter())
    return {
        "names": sorted(names),
        "left_out": LEFT_OUT,
        "changes": [reason for reason, *_ in CHANGES],
        **{outcome: total[outcome] for outcome in ("passed", "failed", "skipped")},
        "not_passed": ours.not_passed,
        "by_test": {test: dict(counts) for test, counts in sorted(ours.counts.items())},
        "seconds": round(time.monotonic() - start),
    }


def colour_folder(root: Path) -> Path:
    """`train/`, `validation/` and `wrong/` with noisy pictures of six colours; in `wrong/` a quarter lies elsewhere."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 16), ("validation", 8), ("wrong", 8)):
        for number, colour in enumerate(COLOURS):
            for index in range(count):
                moved = split == "wrong" and index % 4 == 0
                folder = root / split / str((number + moved) % len(COLOURS))
                folder.mkdir(parents=True, exist_ok=True)
                noise = draw.integers(-25, 26, (40, 48, 3))
                pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}-{index:02}.png")
    return root


def run_script(clone: Path, words: str, work: Path) -> str:
    """One of timm's scripts on the CPU; its standard output and log."""
    script, *options = words.split()
    command = [sys.executable, "-P", "-c", RUNNER, str(clone / script), *options]
    done = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(words.split())} failed\n{done.stdout[-4000:]}")
    return done.stdout


def run_scripts(clone: Path, work: Path) -> dict[str, Any]:
    """timm's train.py on colours, and its validate.py on the best of the checkpoints."""
    colour_folder(work / "colours")
    common = f"colours --model {TEST_MODEL} --num-classes 6 --batch-size 12 --workers 0 --device cpu --no-prefetcher"
    train = f"train.py {common} --opt adamw --lr 1e-3 --epochs 4 --warmup-epochs 0 --output out --experiment ours"
    run_script(clone, train, work)
    with (work / "out" / "ours" / "summary.csv").open() as file:
        best = max(csv.DictReader(file), key=lambda row: float(row["eval_top1"]))
    validate = f"validate.py {common} --checkpoint out/ours/model_best.pth.tar --results-format json"
    found = {}
    for split in ("validation", "wrong"):
        run_script(clone, f"{validate} --split {split} --results-file {split}.json", work)
        content = json.loads((work / f"{split}.json").read_text())
        found[split] = (content[0] if isinstance(content, list) else content)["top1"]
    return {
        "train": train,
        "validate": validate,
        "train_py_top1": float(best["eval_top1"]),
        "validate_py_top1": found["validation"],
        "validate_py_top1_with_a_quarter_of_the_labels_wrong": found["wrong"],
        "as_expected": [float(best["eval_top1"]), found["validation"], found["wrong"]] == [100.0, 100.0, 75.0],
    }


def main() -> None:
    """Run what is asked for, write the counts, fail where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", type=Path, required=True, help="a clone of huggingface/pytorch-image-models")
    parser.add_argument("--names", nargs="+", default=["*"], help="patterns of our names for the tests")
    parser.add_argument("--only", choices=("tests", "scripts"), help="leave the other part out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    clone = args.timm.resolve()
    names = [name for name in NAMES if any(fnmatch.fnmatch(name, pattern) for pattern in args.names)]
    if not (clone / "tests" / "test_models.py").is_file():
        sys.exit(f"{clone} is no clone of timm: it has no tests/test_models.py")
    if not names:
        sys.exit(f"no name of ours is like {' '.join(args.names)}; there are {', '.join(NAMES)}")
    result: dict[str, Any] = {
        "command": "python scripts/check_timm.py --timm CLONE"
        + (f" --names {shlex.join(args.names)}" if args.names != ["*"] else "")
        + (f" --only {args.only}" if args.only else ""),
        "date": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "commit": commit(Path(__file__).parent),
        "timm_commit": commit(clone),
        "timm_installed": timm.__version__,
        "machine": machine(),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        if args.only != "tests":
            result["scripts"] = run_scripts(clone, work)
            print(json.dumps(result["scripts"], indent=1))
        if args.only != "scripts":
            result["tests"] = run_tests(clone, work, names)
            print(json.dumps({key: result["tests"][key] for key in ("passed", "failed", "skipped", "not_passed")}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    tests, scripts = result.get("tests"), result.get("scripts")
    if tests and (tests["failed"] or tests["skipped"] or not tests["passed"]):
        sys.exit("a test of our names failed or was skipped")
    if scripts and not scripts["as_expected"]:
        sys.exit("timm's scripts do not reach 100 %, or do not agree")


if __name__ == "__main__":
    main()
