"""`jumbo-vit teach`."""

from dataclasses import dataclass
from typing import Literal

GROUPS = {
    "what": ("teacher", "data", "views", "out"),
    "student": ("model", "model_args", "img_size", "patch_size", "in_chans"),
    "augmentation": ("aa", "color_jitter", "hflip", "scale", "reprob", "seed"),
    "machine": ("batch_size", "check_images", "workers", "worker_start", "device", "precision"),
}


@dataclass
class Config:
    """Store what teachers say of fixed views of every training picture, so that slow teachers are paid for once.

    A view is the picture as augmentation makes it in one epoch; `jumbo-vit train --teacher OUT` with the same options
    makes the same views again, one after the other from epoch to epoch, and reads what was said. Killed, the same
    command goes on where it stood; with more --views it adds some.

    Args:
        teacher: Models whose outputs are stored: names of timm, or model folders.
        data: A folder, a table, tar shards, a dataset on disk, or "digits", as for `train`; pictures that `train` would
            hold out of one tree are taught too, so that any split of it can be trained on.
        views: Views of each picture.
        out: The folder to write, or to go on with.
        model: The model that will be trained; default as for `train`. Only size, mean and std of its pictures count.
        model_args: Its further arguments as NAME=VALUE.
        img_size: Side of the input in pixels, or HEIGHTxWIDTH; default the model's own.
        patch_size: Side of a patch in pixels; default the model's own.
        in_chans: Channels of the input: 3 for colour, 1 for grey.
        aa: "3a" for 3-Augment, or RandAugment such as rand-m9-mstd0.5-inc1; empty for none.
        color_jitter: Strength of colour changes.
        hflip: Probability of a horizontal flip.
        scale: Smallest and largest share of the picture that a random crop takes.
        reprob: Probability of random erasing.
        seed: Fixes the views.
        batch_size: Pictures in one forward pass.
        check_images: Decode every picture first, and leave out those that cannot be read.
        workers: Processes that load pictures; default by the number of cores.
        worker_start: How these processes are started; default the system's way.
        device: Where to compute.
        precision: auto is bf16 on a GPU that has it, else fp32.
    """

    teacher: list[str] | None = None
    data: str = ""
    views: int = 1
    out: str = ""
    model: str | None = None
    model_args: list[str] | None = None
    img_size: str | None = None
    patch_size: int | None = None
    in_chans: int | None = None
    aa: str | None = None
    color_jitter: float | None = None
    hflip: float | None = None
    scale: tuple[float, float] | None = None
    reprob: float | None = None
    seed: int = 0
    batch_size: int = 64
    check_images: bool = True
    workers: int | None = None
    worker_start: Literal["fork", "spawn", "forkserver"] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"


def run(config: Config) -> None:
    """Write the folder; say what was stored, and how to train on it."""
    import dataclasses

    from jumbo_vit.errors import UserError
    from jumbo_vit.tasks.config import TrainConfig
    from jumbo_vit.tasks.teach import teach

    for name, what in (("teacher", "models, by name or folder"), ("data", "pictures"), ("out", "the folder to write")):
        if not getattr(config, name):
            raise UserError(f"--{name} is missing: give {what}")
    shared = {f.name for f in dataclasses.fields(TrainConfig)} & {f.name for f in dataclasses.fields(config)}
    options = TrainConfig(**{name: getattr(config, name) for name in shared - {"teacher"}})
    teach(options, config.teacher or [], config.views)
