"""Masked pre-training in small (results/PLAN.md): pre-train, probe, fine-tune, against the same models from scratch.

    python scripts/train_zoo.py --cifar CIFAR10 --tiny TINY_IMAGENET_100 --out results/zoo      (training from scratch)
    python scripts/mae_experiments.py --tiny TINY_IMAGENET_100 --zoo results/zoo --out results/mae --jobs 2

For each model and seed, one after the other: a probe of the first weights, which is the floor; `jumbo-vit pretrain`; a
probe of its encoder; `jumbo-vit train --init-from` with the very options of the zoo's run from scratch. Each is a
process with one thread; runs are gone on with where they stand, and what is finished is not run again. Seeds are the
outermost order. Without --tiny nothing is run, and the tables are written from what is there.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from mae_tables import draw, markdown, read, summarise
from train_zoo import (
    PLAN,
    ROOT,
    ROW,
    Data,
    Processes,
    Task,
    at_least_one,
    check_work,
    finished_row,
    locked,
    read_recipe,
    tasks_of,
    words_of,
)

from jumbo_vit.cli.parser import Command
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json, write_text
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.build import build_model
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.methods import open_method
from jumbo_vit.tasks.pretrain_config import with_pretrain_defaults
from jumbo_vit.tasks.state import LAST, read_state

Start = Callable[[list[str], Path], int]

MODELS = ("vit_micro_cls", "vit_micro_reg16", "jumbo_vit_micro")
DATA = "tiny-imagenet-100"
SIZES = (64, 8)
SHARED = ("model", "img_size", "patch_size", "seed", "precision", "workers", "logger")
"""Options of the run from scratch that pre-training takes too."""

START = {"preset": "scratch", "layer_decay": 1.0}
"""What keeps `--init-from` from choosing other options than training from scratch has."""

STOPPED = {number for signal_ in (signal.SIGTERM, signal.SIGINT) for number in (128 + signal_, -signal_)}
"""How a command ends that was asked to stop, by its own doing or, as a probe, by the system's."""

KEPT_SEED = 0  # whose encoders are kept


@dataclass(frozen=True)
class Chain:
    """All that is made of one model with one seed.

    Args:
        pretrain: The pre-training.
        fine: The fine-tuning.
        scratch: The options of the zoo's run.
        zoo: The folder of the zoo's run.
        work: Where runs are while they go on.
        kept: What is kept.
    """

    pretrain: Task
    fine: Task
    scratch: dict[str, Any]
    zoo: Path
    work: Path
    kept: Path

    @property
    def name(self) -> str:
        return f"{self.fine.model}, seed {self.fine.seed}"

    @property
    def encoder(self) -> Path:
        return self.pretrain.work / "model"

    @property
    def untrained(self) -> Path:
        return self.work / "untrained"


def chains_of(args: argparse.Namespace) -> list[Chain]:
    """What the options ask for, seeds outermost.

    Raises:
        UserError: A recipe cannot be read, or what stands there was made with other options.
    """
    folder = str(Path(args.tiny).absolute()) if args.tiny else ""
    data = Data(DATA, folder, *SIZES, args.tiny_epochs)
    recipe, masked = read_recipe(args.recipe), read_recipe(args.mae_recipe)
    found = []
    for scratch in tasks_of([data], list(args.models), list(range(args.seeds)), recipe, args.work, args.zoo):
        place = Path(scratch.model, f"seed-{scratch.seed}")
        work, kept = args.work / place, args.out / place
        own = {name: scratch.options[name] for name in SHARED if name in scratch.options}
        steps = (("pretrain", {**masked, **own}), ("fine-tune", {**scratch.options, **START}))
        pretrain, fine = (
            Task(data, scratch.model, scratch.seed, options, work / name, kept / name) for name, options in steps
        )
        found.append(Chain(pretrain, fine, scratch.options, scratch.kept, work, kept))
    return found


def check(chain: Chain) -> None:
    """Nothing but the start may set the fine-tuning apart from the run from scratch, in resolved options.

    Raises:
        UserError: Something else does, or what was begun or finished has other options or data.
    """
    resolved = []
    for name, options, more in (("scratch", chain.scratch, {}), ("fine-tune", chain.fine.options, {"init_from": "x"})):
        path = chain.work / f"{name}.yaml"
        write_text(path, yaml.safe_dump({**options, **more}))
        resolved.append(with_defaults(Command("train").parse(["--config", str(path), "--data", "x"])))
    names = [field.name for field in dataclasses.fields(resolved[0]) if field.name != "given"]
    other = {name for name in names if getattr(resolved[0], name) != getattr(resolved[1], name)} - {"init_from"}
    if other:
        raise UserError(f"fine-tuning would differ from training from scratch in {', '.join(sorted(other))}")
    for task in (chain.pretrain, chain.fine):
        if finished_row(task) is None:
            check_work(task)


def make_untrained(chain: Chain) -> None:
    """Write the encoder as the pre-training begins with it, unless it is there or no longer needed."""
    if (chain.untrained / "config.json").is_file() or (chain.kept / "untrained.json").is_file():
        return
    path = chain.work / "pretrain.yaml"
    write_text(path, yaml.safe_dump(chain.pretrain.options))
    options = with_pretrain_defaults(Command("pretrain").parse(["--config", str(path), "--data", "x"]))
    encoder, preparation = build_model(options.as_train(), 0)
    # The method fixes the encoder's positions.
    open_method(options).ready(encoder, preparation, torch.device("cpu"), "fp32")
    lineage = {"source": "first weights", "seed": options.seed}
    save_folder(chain.untrained, encoder, Contract("multiclass", [], preparation, lineage=lineage))


def checksum(folder: Path) -> str:
    """Of a model folder's weights."""
    with (folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def call(chain: Chain, step: str, words: list[str], start: Start) -> str:
    """Run a command; "" or, in words, why it has no result."""
    log = chain.work / f"{step}.log"
    print(f"{chain.name}: {step} begins, log in {log}", flush=True)
    code = start(words, log)
    if code in STOPPED:
        return f"{chain.name}: {step} was stopped, start again to go on"
    if code:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
        return f"{chain.name}: {step} failed ({last[:300]})"
    return ""


def probe(chain: Chain, step: str, folder: Path, start: Start) -> str:
    """Probe a model, unless that is done; features are kept no longer than that takes."""
    kept, made, features = chain.kept / f"{step}.json", chain.work / f"{step}.json", chain.work / f"{step}-features"
    if kept.is_file():
        return ""
    source = {"of": checksum(folder), "seed": chain.fine.seed, "commit": commit(ROOT), "machine": machine()}
    words = ["probe", str(folder), "--data", chain.fine.data.folder, "--seed", str(chain.fine.seed)]
    if fault := call(chain, step, [*words, "--features", str(features), "--json", str(made)], start):
        return fault
    found = json.loads(made.read_text(encoding="utf-8"))
    # Folders of this machine say nothing elsewhere.
    content = {key: value for key, value in found.items() if key not in ("model", "data", "features", "skipped")}
    write_json(kept, {**source, **content, "skipped": len(found["skipped"])})
    shutil.rmtree(features)
    return ""


def train(chain: Chain, task: Task, step: str, start: Start) -> str:
    """Make or go on with a pre-training or a fine-tuning, unless it is finished."""
    if finished_row(task) is not None:
        return ""
    words = words_of(task)
    if step == "pretrain":
        words[0] = step
    elif "--resume" not in words:
        words += ["--init-from", str(chain.encoder)]
    if fault := call(chain, step, words, start):
        return fault
    keep(chain, task, step)
    return ""


def keep(chain: Chain, task: Task, step: str) -> None:
    """What stays of a finished run: its curve and the row of its numbers, of a pre-training the encoder in fp16."""
    _, progress = read_state(task.work / LAST)
    plan = json.loads((task.work / PLAN).read_text(encoding="utf-8"))
    summary = json.loads((task.work / "summary.json").read_text(encoding="utf-8"))
    task.kept.mkdir(parents=True, exist_ok=True)
    for file in ("metrics.csv", "curves.png"):
        shutil.copy(task.work / file, task.kept)
    if step == "pretrain":
        own = {name: summary["best_numbers"][name] for name in ("loss", "masked_error")}
        own |= {"encoder": checksum(chain.encoder), "masks": summary["masks"]}
        own |= {name: summary[name] for name in ("parameters", "extra_parameters", "notes")}
        if task.seed == KEPT_SEED:
            keep_encoder(chain)
    else:
        last = progress.history[-1]
        log = (chain.work / f"{step}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        begin = f"from {chain.encoder}: "
        own = {"top1": last["val_top1"], "loss": last["val_loss"], "train_loss": last["train_loss"]}
        own |= {"best_top1": progress.best_score, "trained_parameters": summary["trained_parameters"]}
        own |= {"start": checksum(chain.encoder)}
        own |= {"loaded": next((line[len(begin) :] for line in log if line.startswith(begin)), None)}
    row = {
        "model": task.model,
        "seed": task.seed,
        **own,
        "best_epoch": progress.best_epoch,
        "epochs": progress.epoch,
        "updates": progress.updates,
        "skipped_updates": progress.bad + progress.rescaled,
        "images": summary["images"],
        "skipped": len(summary["skipped"]),
        "seconds": round(progress.seconds, 1),
        "options": task.options,
        "commit": plan["commit"],
        "machine": machine(),
        "versions": summary["versions"],
    }
    write_json(task.kept / ROW, row)


def keep_encoder(chain: Chain) -> None:
    """The encoder in fp16."""
    model, contract = open_folder(chain.encoder)
    half = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    contract = dataclasses.replace(contract, lineage={**contract.lineage, "stored_as": "float16"})
    save_folder(chain.pretrain.kept, model, contract, half)


def run(chain: Chain, start: Start) -> str:
    """Make what is not there yet; "" or, in words, where it ended and why."""
    try:
        if fault := probe(chain, "untrained", chain.untrained, start):
            return fault
        if fault := train(chain, chain.pretrain, "pretrain", start):
            return fault
        ended = (chain.kept / "probe.json").is_file() and finished_row(chain.fine) is not None
        if not ended and not (chain.encoder / "config.json").is_file():
            return f"{chain.name}: {chain.encoder} is gone: remove {chain.pretrain.kept} to pre-train again"
        return probe(chain, "probe", chain.encoder, start) or train(chain, chain.fine, "fine-tune", start)
    except UserError as error:
        return f"{chain.name}: failed ({error})"


def write(chains: list[Chain], args: argparse.Namespace) -> list[str]:
    """mae.json, README.md and mae.png from what there is; what is missing, in words."""
    words = ["python", "scripts/mae_experiments.py", "--tiny", "TINY_IMAGENET_100", "--zoo", str(args.zoo)]
    words += ["--out", str(args.out), "--seeds", str(args.seeds), "--tiny-epochs", str(args.tiny_epochs)]
    words += ["--models", *args.models]
    found = [read(c.fine.model, c.fine.seed, c.kept, c.zoo / ROW, c.scratch) for c in chains]
    content = summarise(" ".join(words), found, list(args.models))
    write_json(args.out / "mae.json", content)
    draw(content, args.out / "mae.png")
    write_text(args.out / "README.md", markdown(content))
    return list(content["missing"])


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tiny", help="100 classes of Tiny-ImageNet as a folder of pictures; left out, only the tables"
    )
    parser.add_argument("--zoo", type=Path, default=Path("results/zoo"), help="the runs from scratch")
    parser.add_argument("--work", type=Path, default=Path("runs/mae"), help="where the runs are while they go on")
    parser.add_argument("--out", type=Path, default=Path("results/mae"))
    parser.add_argument("--models", nargs=3, metavar=("CLASS_TOKEN", "REGISTERS", "JUMBO"), default=list(MODELS))
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("--tiny-epochs", type=at_least_one, default=6, help="of fine-tuning, as from scratch")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/zoo_mini.yaml", help="of the zoo")
    parser.add_argument("--mae-recipe", type=Path, default=ROOT / "recipes/mae_mini.yaml")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="runs at a time, each with one thread")
    return parser.parse_args(words)


def experiment(args: argparse.Namespace, start: Start) -> list[str]:
    """Make what is not there yet, write the tables, and give what went wrong or is missing.

    Raises:
        UserError: What stands there was made with other options.
    """
    chains = chains_of(args)
    if not args.tiny:
        return write(chains, args)
    for chain in chains:
        check(chain)
        make_untrained(chain)  # here and not in the threads: first weights come from torch's one generator
    faults = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(run, chain, start) for chain in chains]):
            if fault := done.result():
                faults.append(fault)
                print(fault, file=sys.stderr, flush=True)
    missing = write(chains, args)
    return faults or missing


def main() -> None:
    """Read the options, run, write."""
    args = read_options()
    torch.set_num_threads(1)
    with locked(args.work) as lock:
        start = Processes(lock)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, start.on_signal)
        faults = experiment(args, start)
    if start.stop:
        sys.exit(128 + start.stop)
    if faults:
        sys.exit(f"not finished: {'; '.join(faults)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"mae_experiments: error: {error}", file=sys.stderr)
        sys.exit(2)
