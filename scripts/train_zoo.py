"""Train the micro models of the zoo, all with the options of one recipe, and keep them in fp16 with their scores.

    python scripts/train_zoo.py --cifar CIFAR10 --tiny TINY_IMAGENET_100 --jobs 2 --out results/zoo

A run is `jumbo-vit train` in a process of its own with one thread. Seeds are the outermost order, so that at any moment
all kinds of model are about equally far. Started again, the script skips what is finished and goes on with what is not,
after a kill too. What is kept of a run are the weights of its last epoch, chosen by nothing, and the score is that of
these weights in fp16 on the held-out part. Intervals are those of the mean over seeds, t distribution, 95 %.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from zoo_table import summarise, table

from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json, write_text
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.state import LAST, PREVIOUS, read_state

ROOT = Path(__file__).parents[1]
MODELS = ("jumbo_vit_micro", "vit_micro_cls", "vit_micro_reg16")
COMMAND = (sys.executable, "-m", "jumbo_vit_command")
PLAN, ROW = "plan.json", "run.json"


@dataclass(frozen=True)
class Data:
    """Pictures to train on: the name of their folder in the zoo, where they are, and what a run on them is given."""

    name: str
    folder: str
    img_size: int
    patch_size: int
    epochs: int


@dataclass(frozen=True)
class Task:
    """One run: what it is of, the recipe's options with those of the run, and where it works and what it leaves."""

    data: Data
    model: str
    seed: int
    options: dict[str, Any]
    work: Path
    kept: Path

    @property
    def name(self) -> str:
        return f"{self.data.name}/{self.model}/seed-{self.seed}"


def tasks_of(
    sets: list[Data], models: list[str], seeds: list[int], recipe: dict[str, Any], work: Path, out: Path
) -> list[Task]:
    """All runs: seed by seed, in each the data, in each the models."""
    found = []
    for seed in seeds:
        for data in sets:
            for model in models:
                own = {"model": model, "img_size": str(data.img_size), "patch_size": data.patch_size, "seed": seed}
                place = Path(data.name, model, f"seed-{seed}")
                options = {**recipe, **own, "epochs": data.epochs}
                found.append(Task(data, model, seed, options, work / place, out / place))
    return found


def finished_row(task: Task) -> dict[str, Any] | None:
    """What was written of a finished run, or None. Raises `UserError` if it was made with other options."""
    path = task.kept / ROW
    if not path.is_file():
        return None
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    _check_same(task, row["options"], task.kept)
    return row


def _check_same(task: Task, options: dict[str, Any], where: Path) -> None:
    names = sorted({*options, *task.options})
    other = [name for name in names if options.get(name) != task.options.get(name)]
    if other:
        was, now = options.get(other[0]), task.options.get(other[0])
        raise UserError(
            f"{where} was trained with {other[0]} {was}, and would now be with {now}: all runs of a zoo need the same "
            "options, so give the old ones, or another --work and --out"
        )


def _check_data(task: Task, plan: dict[str, Any]) -> None:
    """A run goes on with the data it began with, whatever is given now; plans of old have them in the run's config."""
    config = task.work / "config.yaml"
    kept = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    was = plan.get("data") or kept.get("data")
    if was is not None and Path(was).resolve() != Path(task.data.folder).resolve():
        raise UserError(
            f"{task.work} was begun with the data in {was}, and would now be with those in {task.data.folder}: give "
            "the old folder, or another --work"
        )


def check_work(task: Task) -> bool:
    """Whether the run has begun and is to be gone on with.

    Raises:
        UserError: A run with other options, or on other data, stands there.
    """
    plan = task.work / PLAN
    begun = any((task.work / name).is_file() for name in (LAST, PREVIOUS))
    if plan.is_file():
        written = json.loads(plan.read_text(encoding="utf-8"))
        _check_same(task, written["options"], task.work)
        _check_data(task, written)
    elif begun:
        raise UserError(f"{task.work} holds a run that this script did not start; give another --work")
    return begun


def words_of(task: Task) -> list[str]:
    """The words of the run's command, from the start or from where it stands."""
    if check_work(task):
        return ["train", "--resume", str(task.work)]
    write_json(task.work / PLAN, {"options": task.options, "data": task.data.folder, "commit": commit(ROOT)})
    config = task.work / "recipe.yaml"
    write_text(config, yaml.safe_dump(task.options, sort_keys=False))
    return ["train", "--config", str(config), "--data", task.data.folder, "--out", str(task.work)]


class Processes:
    """The commands under way, which a signal to this script reaches too: each writes its state, and nothing new starts.

    Args:
        lock: A file that every command keeps open, so that the lock on it outlives this script as long as they do.
    """

    def __init__(self, lock: int) -> None:
        self.lock, self.stop = lock, 0
        self.running: set[subprocess.Popen[bytes]] = set()

    def __call__(self, words: list[str], log: Path) -> int:
        """Run a command with one thread, its output into `log`, and give its exit code."""
        if self.stop:
            return 128 + self.stop
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with log.open("ab") as file:
            child = subprocess.Popen(
                [*COMMAND, *words],
                stdout=file,
                stderr=file,
                env=os.environ | one,
                pass_fds=(self.lock,),
                start_new_session=True,
            )
        self.running.add(child)
        if self.stop:  # it came between the look above and the start
            child.terminate()
        try:
            return child.wait()
        finally:
            self.running.discard(child)

    def on_signal(self, number: int, _: Any) -> None:
        self.stop = number
        for child in list(self.running):
            child.terminate()


@contextmanager
def locked(work: Path) -> Iterator[int]:
    """Alone in `work`: two runs in one folder would spoil each other.

    Raises:
        UserError: Another zoo, or a run of one that was killed, is at work there.
    """
    import fcntl

    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"a zoo is being trained in {work} (perhaps by runs that a killed script left): wait for its end, or "
                "stop these `jumbo-vit train` processes"
            ) from error
        yield file.fileno()


def keep(task: Task) -> dict[str, Any]:
    """Write what stays of a finished run: the last weights in fp16, its curve, and the row of its numbers."""
    content, progress = read_state(task.work / LAST)
    model, contract = open_folder(task.work)
    last = progress.history[-1]
    lineage = {**contract.lineage, "weights": "plain", "epoch": progress.epoch, "score": last["val_top1"]}
    lineage |= {"stored_as": "float16", "best_epoch": progress.best_epoch, "best_score": progress.best_score}
    half = {name: value.half() if value.is_floating_point() else value for name, value in content["model"].items()}
    save_folder(task.kept, model, dataclasses.replace(contract, lineage=lineage), half)
    shutil.copy(task.work / "metrics.csv", task.kept)
    numbers = evaluate(str(task.kept), task.data.folder, "cpu")  # opens what was written
    plan = json.loads((task.work / PLAN).read_text(encoding="utf-8"))
    summary = json.loads((task.work / "summary.json").read_text(encoding="utf-8"))
    row = {
        "data": task.data.name,
        "model": task.model,
        "seed": task.seed,
        "top1": numbers["top1"],
        "top5": numbers.get("top5"),
        "loss": numbers["loss"],
        "top1_before_rounding": last["val_top1"],
        "best_top1": progress.best_score,
        "best_epoch": progress.best_epoch,
        "train_loss": last["train_loss"],
        "parameters": sum(value.numel() for value in half.values()),
        "epochs": progress.epoch,
        "updates": progress.updates,
        "skipped_updates": progress.bad + progress.rescaled,
        "images": summary["images"],
        "skipped": len(summary["skipped"]),
        "seconds": round(progress.seconds, 1),
        "options": task.options,
        "commit": plan["commit"],
        "machine": machine(),
    }
    write_json(task.kept / ROW, row)
    return row


def run_one(task: Task, start: Callable[[list[str], Path], int]) -> dict[str, Any] | str:
    """Train one, or go on with it, and give its row; or, in words, why there is none."""
    try:
        words, log = words_of(task), task.work / "log.txt"
        print(f"{task.name}: begins, log in {log}", flush=True)
        code = start(words, log)
        if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            return f"{task.name}: stopped, start again to go on"
        if code:
            last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
            return f"{task.name}: failed ({last[:300]})"
        row = keep(task)
    except UserError as error:
        return f"{task.name}: failed ({error})"
    print(f"{task.name}: top-1 {row['top1']:.4f} after {row['updates']} updates, {row['seconds']:.0f} s", flush=True)
    return row


@dataclass(frozen=True)
class Zoo:
    """What is to be there in the end, and the command that makes it, with the folders of data by their names alone."""

    command: str
    tasks: list[Task]
    sets: list[str]
    models: list[str]
    out: Path

    def write(self, rows: dict[str, dict[str, Any]]) -> None:
        """zoo.json and README.md from the rows there are, by the runs' names."""
        found = [rows[task.name] for task in self.tasks if task.name in rows]
        content = summarise(self.command, found, self.sets, self.models, len(self.tasks))
        write_json(self.out / "zoo.json", content)
        write_text(self.out / "README.md", table(content))


def train_zoo(zoo: Zoo, jobs: int, start: Callable[[list[str], Path], int]) -> list[str]:
    """Make all runs that are not finished, `jobs` at a time; in words, why runs have no result. The table is kept up.

    Raises:
        UserError: A run that is there has other options.
    """
    known = {task.name: finished_row(task) for task in zoo.tasks}
    rows = {name: row for name, row in known.items() if row is not None}
    todo = [task for task in zoo.tasks if task.name not in rows]
    for task in todo:
        check_work(task)
    print(f"{len(zoo.tasks)} runs, {len(rows)} of them finished before", flush=True)
    faults = []
    with ThreadPoolExecutor(jobs) as pool:
        for found in as_completed([pool.submit(run_one, task, start) for task in todo]):
            result = found.result()
            if isinstance(result, str):
                faults.append(result)
                print(result, file=sys.stderr, flush=True)
            else:
                rows["{data}/{model}/seed-{seed}".format(**result)] = result
                zoo.write(rows)
    if rows:
        zoo.write(rows)
    return faults


def at_least_one(text: str) -> int:
    """A number for argparse, which says what is wrong with it."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return number


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's options.

    Raises:
        UserError: It is no mapping in YAML.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--recipe {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"--recipe {path} holds no options as NAME: VALUE")
    return recipe


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", help="CIFAR-10 as a folder of pictures; left out, no run on it")
    parser.add_argument("--tiny", help="100 classes of Tiny-ImageNet as a folder of pictures")
    parser.add_argument("--cifar-epochs", type=at_least_one, default=3)
    parser.add_argument("--tiny-epochs", type=at_least_one, default=6)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="the others are compared to the first")
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/zoo_mini.yaml")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--work", type=Path, default=Path("runs/zoo"), help="where the runs are while they go on")
    parser.add_argument("--out", type=Path, default=Path("results/zoo"))
    args = parser.parse_args()
    if not (args.cifar or args.tiny):
        parser.error("give --cifar, --tiny or both")
    if not args.recipe.is_file():
        parser.error(f"--recipe {args.recipe} is no file")
    return args


def zoo_of(args: argparse.Namespace) -> Zoo:
    """What the options ask for."""
    sets, words = [], ["python", "scripts/train_zoo.py"]
    if args.cifar:
        sets.append(Data("cifar10", str(Path(args.cifar).absolute()), 32, 4, args.cifar_epochs))
        words += ["--cifar", "CIFAR10", "--cifar-epochs", str(args.cifar_epochs)]
    if args.tiny:
        sets.append(Data("tiny-imagenet-100", str(Path(args.tiny).absolute()), 64, 8, args.tiny_epochs))
        words += ["--tiny", "TINY_IMAGENET_100", "--tiny-epochs", str(args.tiny_epochs)]
    words += ["--seeds", str(args.seeds), "--models", *args.models]
    inside = args.recipe.resolve().is_relative_to(ROOT.resolve())
    recipe = args.recipe.resolve().relative_to(ROOT.resolve()) if inside else args.recipe
    words += ["--recipe", str(recipe), "--out", str(args.out)]
    tasks = tasks_of(sets, args.models, list(range(args.seeds)), read_recipe(args.recipe), args.work, args.out)
    return Zoo(" ".join(words), tasks, [data.name for data in sets], args.models, args.out)


def main() -> None:
    """Read the options, train, write."""
    args = read_options()
    torch.set_num_threads(1)
    zoo = zoo_of(args)
    with locked(args.work) as lock:
        start = Processes(lock)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, start.on_signal)
        faults = train_zoo(zoo, args.jobs, start)
    if start.stop:
        sys.exit(128 + start.stop)
    if faults:
        sys.exit(f"{len(faults)} of {len(zoo.tasks)} runs have no result: see above")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"train_zoo: error: {error}", file=sys.stderr)
        sys.exit(2)
