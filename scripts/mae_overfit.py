"""Eight pictures learned by heart by a masked autoencoder: the check that masks, networks and loss fit together.

    python scripts/mae_overfit.py --data PICTURES --work runs/mae-overfit --out results/mae/overfit.json \
        --png docs/mae_overfit.png

Eight pictures are taken evenly from those in the folder, each many times, so that an epoch has many updates; the same
eight, each once, are the held-out part, whose masks stay the same. The run is `jumbo-vit pretrain` with the options
below and without augmentation, the picture `jumbo-vit reconstruct` of its end. It is resumed where it stands.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from jumbo_vit.cli.parser import main as command
from jumbo_vit.data.find import find_images
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json
from jumbo_vit.measure.versus import commit, machine
from jumbo_vit.tasks.state import LAST, read_state

ROOT = Path(__file__).parents[1]
COUNT, COPIES = 8, 64
LIMIT = 0.02  # of the pixels' variance
OPTIONS = (
    "--method mae --model jumbo_vit_micro --img-size 64 --patch-size 8 --mask-ratio 0.75 --batch-size 8 --lr 0.003 "
    "--weight-decay 0 --warmup-epochs 2 --scale 1 1 --hflip 0 --decoder-width 128 --decoder-depth 2 --decoder-heads 4 "
    "--no-check-images --workers 0 --logger none --seed 0"
)


def make_data(source: Path, folder: Path) -> list[str]:
    """`train/` and `val/` with the pictures, unless they are there; the pictures' names.

    Raises:
        UserError: There are fewer than eight pictures.
    """
    paths = sorted(find_images(source)[0])
    if len(paths) < COUNT:
        raise UserError(f"--data {source} has {len(paths)} pictures, but {COUNT} are needed")
    chosen = [paths[index * len(paths) // COUNT] for index in range(COUNT)]
    if not (folder / "val").is_dir():
        (folder / "train").mkdir(parents=True, exist_ok=True)
        for path in chosen:
            for copy in range(COPIES):
                shutil.copy(path, folder / "train" / f"{path.stem}-{copy}{path.suffix}")
        (folder / "partial").mkdir(exist_ok=True)
        for path in chosen:
            shutil.copy(path, folder / "partial")
        (folder / "partial").rename(folder / "val")  # the last step, so that a stopped one is made again
    return [path.relative_to(source).as_posix() for path in chosen]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train, or go on, and give the result."""
    pictures = make_data(args.data, args.work / "data")
    run = args.work / "run"
    words = ["pretrain", "--data", str(args.work / "data"), "--out", str(run), "--epochs", str(args.epochs)]
    words += OPTIONS.split()
    code = command(["pretrain", "--resume", str(run)] if (run / LAST).is_file() else words)
    if code:
        sys.exit(code)
    _, progress = read_state(run / LAST)
    if args.png:
        code = command(["reconstruct", str(run), str(args.work / "data" / "val"), "--png", str(args.png)])
        if code:
            sys.exit(code)
    curve = [{"updates": row["updates"], "masked_error": row["val_masked_error"]} for row in progress.history]
    return {
        "command": f"python scripts/mae_overfit.py --data PICTURES --epochs {args.epochs}",
        "options": OPTIONS,
        "pictures": pictures,
        "updates": progress.updates,
        "masked_error": curve[-1]["masked_error"],
        "limit": LIMIT,
        "below": curve[-1]["masked_error"] < LIMIT,
        "curve": curve,
        "seconds": round(progress.seconds),
        "commit": commit(ROOT),
        "machine": machine(),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/mae-overfit"))
    parser.add_argument("--out", type=Path, default=Path("results/mae/overfit.json"))
    parser.add_argument("--png", type=Path, default=None)
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    try:
        result = measure(args)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, result)
    print(f"masked error {result['masked_error']:.4f} of the pixels' variance after {result['updates']} updates")


if __name__ == "__main__":
    main()
