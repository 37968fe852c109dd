"""Feed damaged pictures and checkpoints to everything that reads them.

    python scripts/fuzz.py --out results/fuzz.json

Each file is read in a process of its own, with limits on time and memory. It must give a right result, or the
project's own error of one line. Anything else is a fault: another exception, a hang, a crash, memory out of all
proportion to the file, code that runs. Files at fault are kept in a folder, and the script fails. Then some files go
through the commands as a user types them. A thousand of each take about ten minutes on two cores; POSIX only.
"""

import argparse
import json
import os
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import safetensors
import timm
import torch
from fuzz_checkpoints import MARKER, Sound, checkpoints
from fuzz_commands import MODEL, checkpoints_typed, pictures_typed, place, target_of
from fuzz_pictures import Case, pictures
from PIL import Image

from jumbo_vit import __version__, load
from jumbo_vit.checkpoints import read_weights
from jumbo_vit.data.images import read_image
from jumbo_vit.errors import UnreadableImage, UserError
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.train import train

ADDRESS_SPACE = 6 * 2**30  # that a reader may ask for, beside what the process has
# That it may use. A picture just below Pillow's limit of 89 million pixels takes 1.5 GB on its way to 8 bits.
MEMORY = {"picture": 2 * 2**30, "checkpoint": 400 * 2**20}
GOOD = ("read", "refused")
HOSTILE = {"payload", "payload.ckpt", "zip bomb", "json bomb"}
CHECKPOINTS = HOSTILE | {"model.safetensors", "tensors.safetensors", "config.json", "last.ckpt"}
CHECKPOINTS |= {"flat.pth", "nested.pth", "legacy.pth", "official.pth"}
Reader = Callable[[Path], str]


@dataclass(frozen=True)
class Outcome:
    """What became of a file: `word` is "read", "refused" or a fault's kind; `memory` is what it used, in bytes."""

    word: str
    text: str
    memory: int = 0
    seconds: float = 0.0


def watched(read: Reader, path: Path, seconds: float, memory: int) -> Outcome:
    """`read(path)` in a process of its own, in the folder of `path`."""
    here, there = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(here)
        _work(read, path, there)
    os.close(there)
    message = b""
    while True:
        left = start + seconds - time.monotonic()
        if not select.select([here], [], [], max(0.0, left))[0]:
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(here, 65536)
        if not part:
            break
        message += part
    os.close(here)
    _, status, usage = os.wait4(child, 0)
    took = time.monotonic() - start
    word, text, held = json.loads(message) if message else ("", "", 0)
    used = max(0, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) - held)  # on Linux in KiB
    if (path.parent / MARKER).exists():
        (path.parent / MARKER).unlink()
        return Outcome("ran code", "a payload made its file", used, took)
    if not message:
        word = "hang" if took >= seconds else "crash"
        return Outcome(word, f"ended by signal {os.WTERMSIG(status)} after {took:.1f} s", 0, took)
    if used > memory:
        word, text = "memory", f"used {used >> 20} MiB; {word}: {text}"
    return Outcome(word, text, used, took)


def _pages(column: int) -> int:
    """Bytes of this process's addresses (column 0) or memory (1)."""
    table = Path("/proc/self/statm")
    return int(table.read_text().split()[column]) * resource.getpagesize() if table.exists() else 0


def _work(read: Reader, path: Path, answer: int) -> None:
    """The child's part: never returns."""
    resource.setrlimit(resource.RLIMIT_AS, (_pages(0) + ADDRESS_SPACE, resource.RLIM_INFINITY))
    os.chdir(path.parent)
    silent = os.open("stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    held = _pages(1)
    os.write(answer, json.dumps([*judged(read, path), held]).encode())
    os._exit(0)


def judged(read: Reader, path: Path) -> tuple[str, str]:
    """The outcome's word and text of `read(path)`."""
    try:
        return "read", read(path)
    except UserError as error:
        message = str(error)
        link: BaseException | None = error
        while link is not None:
            # A pickle may ask for any size; what is refused before a byte of it is used costs nothing.
            if (isinstance(link, MemoryError) or "can't allocate memory" in str(link)) and not _asked_by_pickle(link):
                return "memory", message[:300]
            link = link.__cause__ or link.__context__
        if "\n" in message or len(message) > 1000:
            return "long message", message[:300]
        return "refused", message
    except BaseException:
        return "exception", traceback.format_exc()[-1500:]


def _asked_by_pickle(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).name in ("_weights_only_unpickler.py", "pickletools.py")


# Readers


def read_picture(path: Path) -> str:
    """The picture in colour and in grey: right modes, equal sizes, or the same refusal."""
    found = []
    for chans, mode in ((3, "RGB"), (1, "L")):
        try:
            image = read_image(path, chans)
        except UnreadableImage as error:
            found.append(("refused", error.reason))
            if str(path) not in str(error):
                raise AssertionError(f"the message does not name the file: {error}") from error
            continue
        assert image.mode == mode and np.asarray(image).shape[:2] == (image.height, image.width)
        assert image.width > 0 and image.height > 0
        found.append(("read", f"{image.width}x{image.height} {zlib.crc32(image.tobytes()):08x}"))
    plain = [(word, text.split()[0] if word == "read" else text) for word, text in found]
    if plain[0] != plain[1]:
        raise AssertionError(f"colour and grey disagree: {found}")
    if found[0][0] == "refused":
        raise UnreadableImage(path, found[0][1])
    return found[0][1]


def read_checkpoint(path: Path) -> str:
    """What predict, evaluate, `train --init-from` and `--resume` do with this file; refused if all of them refuse."""
    said, taken = [], []
    ways = [_resume, _predict, _start] if path.name == "last.ckpt" else [_predict, _start]
    for way in (*ways, *([_through_timm] if path.suffix in (".pth", ".safetensors") else [])):
        try:
            taken.append(f"{way.__name__.strip('_')}: {way(path)}")
        except UserError as error:
            word, text = judged(partial(_again, error), path)
            if word != "refused":
                raise AssertionError(f"{word}: {text}") from error
            said.append(text)
    if not taken:
        raise UserError(said[0])
    return "; ".join(taken)


def _again(error: UserError, _: Path) -> str:
    raise error


def _predict(path: Path) -> str:
    predictor = load(target_of(path), "cpu")
    row = predictor.predict(Image.new("RGB", (40, 30), (200, 30, 30)))[0]
    if row.error:
        return row.error
    assert row.label in predictor.labels and 0 <= float(row.probability) <= 1, row
    return "labelled"


def _start(path: Path) -> str:
    model = timm.create_model(MODEL, num_classes=3)
    return str(start_from(model, str(target_of(path)), ["blue", "green", "red"]))[:100]


def _through_timm(path: Path) -> str:
    state = read_weights(path)
    timm.create_model(MODEL, pretrained=True, num_classes=3, pretrained_cfg_overlay={"state_dict": state})
    return "loaded"


def _resume(path: Path) -> str:
    return f"score {train(TrainConfig(resume=str(path.parent), given=frozenset({'resume'})))['score']}"


# The two thousand


@dataclass
class Tally:
    """Counts by kind and outcome, and the files at fault, which are kept below `kept`."""

    kept: Path
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    most_memory: int = 0
    most_seconds: float = 0.0
    sound: dict[str, str] = field(default_factory=dict)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count it. Faults are also a sound file that is not read, and a cut picture read with other pixels."""
        word = outcome.word
        if case.damage == "none" and case.kind not in HOSTILE:
            self.sound[case.kind] = outcome.text
            word = word if word == "read" else "sound, refused"
        if case.damage == "cut" and word == "read" and case.kind not in CHECKPOINTS:
            word = "read" if outcome.text == self.sound[case.kind] else "half read"
        self.counts.setdefault(case.kind, Counter())[word] += 1
        self.most_memory = max(self.most_memory, outcome.memory)
        self.most_seconds = max(self.most_seconds, outcome.seconds)
        if word not in GOOD:
            self.kept.mkdir(parents=True, exist_ok=True)
            name = f"{case.number:04}-{case.kind.replace(' ', '-')}{case.suffix}"
            (self.kept / name).write_bytes(case.data)
            fault = {"file": name, "kind": case.kind, "damage": case.damage, "outcome": word, "text": outcome.text}
            self.faults.append(fault)
            print(f"{name} ({case.damage}): {word}: {outcome.text[-400:]}", flush=True)

    def result(self) -> dict[str, Any]:
        """What is written down."""
        total = sum(self.counts.values(), Counter[str]())
        return {
            "files": total.total(),
            **total,
            "most_mebibytes": self.most_memory >> 20,
            "most_seconds": round(self.most_seconds, 1),
            "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.counts.items())},
            "faults": self.faults,
        }


def feed(case: Case, read: Reader, work: Path, run: Path, seconds: float, tally: Tally) -> Outcome:
    """Have one file read, and count what became of it."""
    memory = MEMORY["checkpoint" if case.kind in CHECKPOINTS else "picture"]
    outcome = watched(read, place(case, work, run), seconds, memory)
    tally.add(case, outcome)
    return outcome


def trained(work: Path) -> Path:
    """A run of two short epochs on coloured squares, with everything that a run leaves."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 1)):
        for number, colour in enumerate(("red", "green", "blue")):
            folder = work / "data" / part / colour
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 60, (32, 32, 3)).astype(np.uint8)
                pixels[..., number] += 150
                Image.fromarray(pixels).save(folder / f"{index}.png")
    options: dict[str, Any] = {"epochs": 2, "batch_size": 3, "workers": 0, "logger": ["none"], "device": "cpu"}
    train(TrainConfig(data=str(work / "data"), model=MODEL, out=str(work / "run"), **options))
    (work / "run" / "summary.json").unlink()  # else a finished run only says so, and reads nothing
    return work / "run"


def main() -> None:
    """Make, feed, count; fail where a file is at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds-each", type=float, default=10.0)
    parser.add_argument(
        "--typed", type=int, nargs=2, default=(50, 20), help="pictures and checkpoints for the commands"
    )
    parser.add_argument("--keep", type=Path, help="folder for files at fault; default fuzz-faults-SEED")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a process that was forked cannot use another's threads
    warnings.filterwarnings("ignore")
    start = time.monotonic()
    kept = args.keep or Path(f"fuzz-faults-{args.seed}")
    shutil.rmtree(kept, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        result = campaign(args, Path(folder).resolve(), kept)
    about = {
        "command": shlex.join(["python", "scripts/fuzz.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "commit": commit(Path(__file__).parent),
        "machine": {**machine(), "pillow": PIL.__version__, "safetensors": safetensors.__version__},
        "seconds": round(time.monotonic() - start),
    }
    if args.out:
        args.out.write_text(json.dumps({**about, **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    count = sum(len(result[key]["faults"]) for key in ("pictures", "checkpoints", "commands"))
    if count:
        sys.exit(f"{count} faults; the files are in {kept}")


def campaign(args: argparse.Namespace, work: Path, kept: Path) -> dict[str, Any]:
    """Everything in one folder; the counts and faults of both kinds, and of the commands."""
    run, one = trained(work), work / "one"
    tally = Tally(kept / "pictures")
    every = pictures(args.seed, args.pictures)
    seen = [(case, feed(case, read_picture, one, run, args.seconds_each, tally).word) for case in every]
    faults: list[str] = []
    of_pictures, of_checkpoints = args.typed
    commands: dict[str, Any] = {"faults": faults}
    if of_pictures:
        good = [pair for pair in seen if pair[1] in GOOD][:: max(1, len(seen) // of_pictures)]
        commands["pictures"] = pictures_typed(good[:of_pictures], work, run, faults)
    result = {"pictures": tally.result()}
    step = max(1, args.checkpoints // (of_checkpoints or 1) // 12 * 12) + 1
    some: list[Case] = []
    tally = Tally(kept / "checkpoints")
    for case in checkpoints(args.seed, args.checkpoints, Sound.of(run)):
        feed(case, read_checkpoint, one, run, args.seconds_each, tally)
        if case.number % step == 0 and len(some) < of_checkpoints:
            some.append(case)
    commands["checkpoints"] = checkpoints_typed(some, work, run, faults)
    return {**result, "checkpoints": tally.result(), "commands": commands}


if __name__ == "__main__":
    main()
