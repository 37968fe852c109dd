"""The options that every run of training has, whatever it learns, free of torch so that `--help` answers at once."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class RunOptions:
    """Model, recipe, augmentation, machine.

    Args:
        model: Any name that `jumbo-vit models` or timm lists; default that of the folder in --init-from, else by the
            data.
        model_args: Further arguments of the model as NAME=VALUE, such as num_jumbo=3 share_jumbo_mlp=false; default
            those of the folder in --init-from.
        img_size: Side of the input in pixels, or HEIGHTxWIDTH; default the model's own.
        patch_size: Side of a patch in pixels; default the model's own.
        in_chans: Channels of the input: 3 for colour, 1 for grey.
        init_from: Start from a model folder, an official checkpoint, a weights file, or a timm ViT by name.
        epochs: Passes over the training pictures.
        batch_size: Pictures in one forward pass of one process.
        grad_accum_steps: Forward passes per update; the last update of an epoch takes what is left, rightly scaled.
        opt: Optimizer, by timm's names.
        opt_betas: Its two decay rates of averages; default the optimizer's own.
        lr: Highest learning rate.
        min_lr: Learning rate at the end.
        warmup_epochs: Epochs of linear warm-up, fractions allowed; default a tenth of the run, 5 at the most.
        weight_decay: Weight decay; norms, biases, tokens and positions are exempt.
        layer_decay: Factor of the learning rate from one block to the one below; 1 for none.
        clip_grad: Largest norm of the gradient; 0 for no limit.
        drop_path: Rate of stochastic depth, the same at every depth.
        mixup: Alpha of mixup; 0 for none.
        cutmix: Alpha of cutmix; 0 for none.
        aa: "3a" for 3-Augment, or RandAugment such as rand-m9-mstd0.5-inc1; empty for none.
        color_jitter: Strength of colour changes.
        hflip: Probability of a horizontal flip.
        scale: Smallest and largest share of the picture that a random crop takes.
        reprob: Probability of random erasing.
        aug_repeats: Different augmentations of a picture in one epoch, each a sample; 0 for one. An epoch keeps its
            number of updates and sees so many times fewer pictures.
        model_ema: Keep averaged weights too; the better of both becomes the model. Default on for the digits alone.
        model_ema_decay: Highest decay of the average; it grows with the updates, so that short runs work.
        grad_checkpointing: Compute activations again in the backward pass, for less memory.
        patience: Stop after so many epochs without a better score; 0 never stops early.
        val_fraction: Share of the pictures held out where no held-out folder is there.
        split_seed: Fixes which pictures are held out; default the seed.
        check_images: Decode every picture before the first step, and leave out those that cannot be read.
        seed: Fixes order, augmentation, mixing and weights.
        out: Folder of the run; default runs/NAME, with a number if it is taken.
        dry_run: Build everything, make two small updates on made pictures, say what the whole run would take, and stop.
        resume: Go on with the run in this folder, or from one of its .ckpt files; only --epochs may be changed.
        workers: Processes that load pictures, for each training process; default by the number of cores.
        worker_start: How these processes are started; default the system's way.
        device: Where to compute.
        devices: Processes on this machine, one for each device.
        nodes: Machines.
        strategy: How several processes work together.
        precision: auto is bf16 where it pays on this device, else fp32; scores are always measured in fp32.
        logger: Loggers beside metrics.csv: tensorboard, wandb, mlflow, or none.
        recovery_interval: Updates between two writings of last.ckpt; 0 writes after each epoch and every ten minutes.
    """

    model: str | None = None
    model_args: list[str] | None = None
    img_size: str | None = None
    patch_size: int | None = None
    in_chans: int | None = None
    init_from: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    grad_accum_steps: int = 1
    opt: str = "adamw"
    opt_betas: tuple[float, float] | None = None
    lr: float | None = None
    min_lr: float | None = None
    warmup_epochs: float | None = None
    weight_decay: float | None = None
    layer_decay: float | None = None
    clip_grad: float = 1.0
    drop_path: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    aa: str | None = None
    color_jitter: float | None = None
    hflip: float | None = None
    scale: tuple[float, float] | None = None
    reprob: float | None = None
    aug_repeats: int = 0
    model_ema: bool | None = None
    model_ema_decay: float = 0.9998
    grad_checkpointing: bool = False
    patience: int = 0
    val_fraction: float = 0.1
    split_seed: int | None = None
    check_images: bool = True
    seed: int = 0
    out: str | None = None
    dry_run: bool = False
    resume: str | None = None
    workers: int | None = None
    worker_start: Literal["fork", "spawn", "forkserver"] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: int = 1
    nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    logger: list[Literal["tensorboard", "wandb", "mlflow", "none"]] = field(default_factory=lambda: ["tensorboard"])
    recovery_interval: int = 0
    given: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def held_out_seed(self) -> int:
        """The seed of what is held out."""
        return self.seed if self.split_seed is None else self.split_seed
