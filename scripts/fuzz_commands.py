"""The files of `fuzz.py` given to the commands as a user types them."""

import csv
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz_checkpoints import MARKER
from fuzz_pictures import Case

MODEL = "jumbo_vit_test_patch8_32"
COMMAND = "import sys; from jumbo_vit_command import main; sys.exit(main(sys.argv[1:]))"


def place(case: Case, folder: Path, run: Path) -> Path:
    """Write a case where its reader expects it, with the sound files that belong beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = {"model.safetensors": "model.safetensors", "config.json": "config.json", "json bomb": "config.json"}
    name = "last.ckpt" if case.suffix == ".ckpt" else names.get(case.kind, f"file{case.suffix}")
    if name in ("model.safetensors", "config.json"):
        for source in (run / "model").iterdir():
            shutil.copy(source, folder)
    elif name == "last.ckpt":
        shutil.copy(run / "config.yaml", folder)
    path = folder / name
    path.write_bytes(case.data)
    return path


def target_of(path: Path) -> Path:
    """What a user names to have this file read: the folder of a folder's file, else the file."""
    return path.parent if path.name in ("model.safetensors", "config.json") else path


def typed(words: list[str], folder: Path, seconds: float = 300) -> tuple[int, str, str]:
    """A command's exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    return done.returncode, done.stdout, done.stderr


def pictures_typed(done: list[tuple[Case, str]], work: Path, run: Path, faults: list[str]) -> dict[str, Any]:
    """`check` and `predict` on one folder of damaged pictures agree with what the reader said of each."""
    data = work / "typed"
    shutil.copytree(run.parent / "data" / "train", data)
    expected = set()
    for case, word in done:
        name = f"red/{case.number:04}{case.suffix}"
        (data / name).write_bytes(case.data)
        if word == "refused":
            expected.add(name)
    code, _, err = typed(["check", str(data), "--json", str(work / "check.json")], work)
    found = {"check": code}
    table = json.loads((work / "check.json").read_text()) if code == 0 else {"unreadable": []}
    refused = {row["path"] for row in table["unreadable"]}
    if code != 0 or "Traceback" in err or refused != expected:
        faults.append(f"check: exit code {code}, differs in {sorted(refused ^ expected)[:5]}, {err[-500:]}")
    code, _, err = typed(["predict", str(run), str(data), "--csv", str(work / "rows.csv")], work)
    found["predict"] = code
    with (work / "rows.csv").open(encoding="utf-8", newline="") as file:
        refused = {row["path"] for row in csv.DictReader(file) if row["error"]}
    if code != 0 or "Traceback" in err or refused != expected:
        faults.append(f"predict: exit code {code}, differs in {sorted(refused ^ expected)[:5]}, {err[-500:]}")
    return {"files": len(done), "refused": len(expected), "exit_codes": found, "stderr_lines": err.count("\n")}


def checkpoints_typed(done: list[Case], work: Path, run: Path, faults: list[str]) -> dict[str, Any]:
    """predict, evaluate, train --init-from and train --resume: done, or one line and exit code 2."""
    codes: Counter[str] = Counter()
    data = str(run.parent / "data")
    for case in done:
        path = place(case, work / "one", run)
        target = str(target_of(path))
        common = ["--data", data, "--model", MODEL, "--epochs", "1", "--workers", "0", "--logger", "none"]
        ways = {
            "predict": ["predict", target, f"{data}/val"],
            "evaluate": ["evaluate", target, "--data", data],
            "init-from": ["train", *common, "--init-from", target, "--out", str(work / "one" / "out")],
            "resume": ["train", "--resume", str(path.parent)],
        }
        name = "resume" if path.name == "last.ckpt" else list(ways)[case.number % 3]
        code, _, err = typed(ways[name], work)
        codes[f"{name}: {code}"] += 1
        lines = [line for line in err.splitlines() if line.startswith("jumbo-vit: error: ")]
        one_line = code == 0 or (code == 2 and len(lines) == 1 and "Traceback" not in err)
        if not one_line or (work / MARKER).exists():
            faults.append(f"{name} of {case.number} ({case.kind}, {case.damage}): exit code {code}: {err[-500:]}")
    return {"files": len(done), "exit_codes": dict(sorted(codes.items()))}
