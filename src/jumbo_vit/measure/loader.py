"""Whether loading keeps up with training: pictures a second of the loader alone, and of the model alone.

    python -m jumbo_vit.measure.loader --json results/loader.json

The pictures are two real photographs that scikit-learn ships, cut and scaled to a size and saved as JPEG, or those of
`--data`. `draft` says whether JPEG files are decoded at a reduced size where that is enough (`data.images.read_image`,
`enough`); how far the training tensors differ then. The machine must do
nothing else.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

import jumbo_vit.registry  # noqa: F401  (registers the models)
from jumbo_vit.data.pipeline import Augmentation, EvalSet, Preparation, TrainSet, eval_loader, train_loader
from jumbo_vit.data.sampler import EpochBatches
from jumbo_vit.data.sets import ImageSet, scan_tree
from jumbo_vit.errors import UserError
from jumbo_vit.files import write_json
from jumbo_vit.measure.versus import commit, forward_pass, machine, training_step
from jumbo_vit.version import __version__

SIZES = {"web": (500, 375), "phone": (4000, 3000)}
"""Width and height of the pictures that are made: those of ImageNet on average, and of a telephone."""


def make_pictures(root: Path, size: tuple[int, int], count: int) -> Path:
    """`count` JPEG files of quality 90 in two class folders, cuts of two photographs at random places."""
    from sklearn.datasets import load_sample_images

    draw = torch.Generator().manual_seed(0)
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for index in range(count):
        photograph = photographs[index % 2]
        share = 0.6 + 0.4 * float(torch.rand((), generator=draw))
        width, height = round(photograph.width * share), round(photograph.height * share)
        left = int(torch.randint(photograph.width - width + 1, (), generator=draw))
        top = int(torch.randint(photograph.height - height + 1, (), generator=draw))
        picture = photograph.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
        folder = root / ("temple", "flower")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{index:04}.jpg", quality=90)
    return root


def passes(batches: Any, pictures: int, repeats: int) -> list[float]:
    """Pictures a second in each of `repeats` passes; a pass before them, which starts the workers, is not counted."""
    rates = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        for _ in batches:
            pass
        if repeat:
            rates.append(pictures / (time.perf_counter() - start))
    return rates


class _Epochs:
    """A training loader that is set to the first update before each pass."""

    def __init__(self, dataset: TrainSet, batch: int, workers: int) -> None:
        self.batches = EpochBatches(len(dataset), batch, seed=0)
        self.loader = train_loader(dataset, self.batches, workers, None, pin=False)

    def __iter__(self) -> Iterator[Any]:
        self.batches.epoch = self.batches.start = 0
        return iter(self.loader)


def training_set(images: ImageSet, pixels: int, draft: bool) -> TrainSet:
    """The set as `train` reads it by default for a folder of pictures; without `draft`, all pictures in full."""
    dataset = TrainSet(images, "multiclass", Preparation((3, pixels, pixels)), Augmentation(aa="3a"), seed=0)
    if not draft:
        dataset.enough = None
    return dataset


def difference(images: ImageSet, pixels: int, crops: int = 8) -> dict[str, float]:
    """How far the same crops of a picture in full and with draft lie apart, in steps of 1/255, over all values.

    The crops are those that training takes by default: at least `scale[0]` of the area, at random places.
    """
    augment, draw = Augmentation(), torch.Generator().manual_seed(0)
    enough = augment.enough(Preparation((3, pixels, pixels)))
    apart: list[Tensor] = []
    for index in range(len(images)):
        pair = images.read(index), images.read(index, enough=enough)
        for _ in range(crops):
            share, left, top = torch.rand(3, generator=draw).tolist()
            side = math.sqrt(augment.scale[0] + (1 - augment.scale[0]) * share)
            box = (left * (1 - side), top * (1 - side), left * (1 - side) + side, top * (1 - side) + side)
            first, second = (_crop(picture, box, pixels) for picture in pair)
            apart.append((first - second).abs().flatten())
    values = torch.cat(apart)
    return {"mean": float(values.mean()), "p99": float(values.kthvalue(int(0.99 * len(values))).values)}


def _crop(picture: Image.Image, box: tuple[float, float, float, float], pixels: int) -> Tensor:
    """The part of a picture in `box`, given in shares of its sides, as (pixels, pixels, 3) values in 0..255."""
    sides = (picture.width, picture.height) * 2
    places = tuple(share * side for share, side in zip(box, sides, strict=True))
    crop = picture.resize((pixels, pixels), Image.Resampling.BICUBIC, places)  # type: ignore[arg-type]
    return torch.from_numpy(np.array(crop, dtype=np.float32))


def loader_rates(images: ImageSet, pixels: int, batch: int, workers: int, repeats: int) -> dict[str, Any]:
    """Median pictures a second of the training loader, full and draft, and of the evaluation loader."""
    rates = {
        name: passes(_Epochs(training_set(images, pixels, draft), batch, workers), len(images), repeats)
        for name, draft in (("train_full", False), ("train_draft", True))
    }
    evaluation = EvalSet(images, "multiclass", Preparation((3, pixels, pixels)))
    rates["evaluate"] = passes(eval_loader(evaluation, workers), len(images), repeats)
    return {**{name: statistics.median(values) for name, values in rates.items()}, "all": rates}


def model_rates(model: str, pixels: int, batch: int, repeats: int) -> dict[str, float]:
    """Median pictures a second of the model's training step and forward pass, on pictures already in memory."""
    network = timm.create_model(model, img_size=pixels)
    images = torch.randn(batch, 3, pixels, pixels)
    found = {}
    for name, make in (("training_step", training_step), ("forward", forward_pass)):
        step = make(network, images)
        step()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        found[name] = batch / statistics.median(seconds)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, with what they belong to."""
    result: dict[str, Any] = {
        "command": " ".join(["python -m jumbo_vit.measure.loader", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "model": args.model,
        "pixels": args.img_size,
        "batch": args.batch_size,
        "workers": args.workers,
        "model_pictures_a_second": model_rates(args.model, args.img_size, args.batch_size, args.repeats),
        "loader_pictures_a_second": {},
        "draft_difference_in_255ths": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        made = {name: make_pictures(Path(scratch) / name, size, args.pictures) for name, size in SIZES.items()}
        for name, folder in ({args.data: Path(args.data)} if args.data else made).items():
            images = scan_tree(folder)
            rates = loader_rates(images, args.img_size, args.batch_size, args.workers, args.repeats)
            result["loader_pictures_a_second"][name] = rates
            result["draft_difference_in_255ths"][name] = difference(images, args.img_size)
    return result


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m jumbo_vit.measure.loader", description="Loading against training")
    parser.add_argument("--data", help="a folder of class folders; default pictures that are made")
    parser.add_argument("--model", default="jumbo_vit_tiny_patch16_224")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=64, help="how many pictures are made of each size")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    try:
        result = measure(args)
        if args.json:
            write_json(args.json, result)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    model = result["model_pictures_a_second"]
    rates = f"training {model['training_step']:.1f}, forward {model['forward']:.1f} a second"
    print(f"{args.model} at {args.img_size} px: {rates}")
    for name, loading in result["loader_pictures_a_second"].items():
        apart = result["draft_difference_in_255ths"][name]
        print(
            f"{name}: training loader {loading['train_full']:.0f} in full, {loading['train_draft']:.0f} with draft, "
            f"evaluation loader {loading['evaluate']:.0f} a second; draft differs by {apart['mean']:.2f}/255 on "
            f"average, 99 % of the values by less than {apart['p99']:.1f}/255"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
