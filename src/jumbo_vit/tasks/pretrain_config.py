"""The options of a pre-training run, free of torch so that `--help` answers at once."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults


@dataclass
class PretrainConfig:
    """Train an encoder on pictures without labels.

    Method "mae" hides most patches of a picture from the encoder, and a decoder foretells their pixels. Method
    "distill" makes the encoder's features foretell those of a trained model on the same augmented picture. The run is
    written to the folder named by --out: its best encoder in model/, ready for `train --init-from`, `probe` and
    `embed`; the state to go on from, with the method's further modules, in last.ckpt; the options in config.yaml,
    scores in metrics.csv, curves.png and summary.json.

    Args:
        method: "mae" is a masked autoencoder, "distill" feature distillation from --teacher; default distill with a
            teacher, else mae.
        data: A folder of pictures, flat or nested, whose folder names mean nothing; with train/ in it and a held-out
            folder (val/, valid/, validation/, test/) beside that, these. Tables, shards and "digits" are read as by
            `train`, without their labels.
        model: Any name that `jumbo-vit models` or timm lists; default that of the folder in --init-from, else by the
            data.
        model_args: Further arguments of the model as NAME=VALUE, such as num_jumbo=3 share_jumbo_mlp=false; default
            those of the folder in --init-from.
        img_size: Side of the input in pixels, or HEIGHTxWIDTH; default the model's own.
        patch_size: Side of a patch in pixels; default the model's own.
        in_chans: Channels of the input: 3 for colour, 1 for grey.
        init_from: Start from a model folder, an official checkpoint, a weights file, or a timm ViT by name.
        teacher: Whose features to learn: a name of timm with pretrained weights, a model folder, or a run's folder.
        patch_weight: Weight of the patches' loss beside that of the global vector; 0 for the global vector alone.
        mask_ratio: Share of the patches that is hidden; global tokens are never.
        mask: Whether each picture (sample) or each forward pass (batch, as in the authors' code) has a mask of its own.
        norm_pix_loss: Foretell each patch scaled to mean 0 and variance 1, in place of its plain pixels.
        pos_embed: Positions in encoder and decoder: sincos are fixed, learned are trained. Default sincos, with
            --init-from learned.
        decoder_width: Width of the decoder's tokens; default 512, for encoders below 384 the encoder's width.
        decoder_depth: Blocks of the decoder; default 8, for encoders below 384 two.
        decoder_heads: Attention heads of the decoder; default 16, for encoders below 384 the encoder's.
        epochs: Passes over the training pictures.
        batch_size: Pictures in one forward pass of one process.
        grad_accum_steps: Forward passes per update; the last update of an epoch takes what is left, rightly scaled.
        opt: Optimizer, by timm's names.
        opt_betas: Its two decay rates of averages; default 0.9 0.95 for mae with adamw, else the optimizer's own.
        lr: Highest learning rate.
        min_lr: Learning rate at the end.
        warmup_epochs: Epochs of linear warm-up, fractions allowed; default a tenth of the run, 5 at the most.
        weight_decay: Weight decay; norms, biases, tokens and positions are exempt.
        layer_decay: Factor of the learning rate from one block to the one below; 1 for none.
        clip_grad: Largest norm of the gradient; 0 for no limit.
        drop_path: Rate of stochastic depth, the same at every depth.
        mixup: Alpha of mixup; 0 for none. The teacher sees the mixed picture too; with mae there is none.
        cutmix: Alpha of cutmix; 0 for none; with mae there is none.
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
        patience: Stop after so many epochs without a lower held-out loss; 0 never stops early.
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

    method: Literal["mae", "distill"] | None = None
    data: str = ""
    model: str | None = None
    model_args: list[str] | None = None
    img_size: str | None = None
    patch_size: int | None = None
    in_chans: int | None = None
    init_from: str | None = None
    teacher: str | None = None
    patch_weight: float = 1.0
    mask_ratio: float = 0.75
    mask: Literal["sample", "batch"] = "sample"
    norm_pix_loss: bool = False
    pos_embed: Literal["sincos", "learned"] | None = None
    decoder_width: int | None = None
    decoder_depth: int | None = None
    decoder_heads: int | None = None
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

    def as_train(self) -> TrainConfig:
        """What a run shares with `train`, in its form."""
        return TrainConfig(**{name: getattr(self, name) for name in SHARED})


# The teacher is another thing here: one, and of features.
SHARED = tuple(
    f.name
    for f in dataclasses.fields(TrainConfig)
    if f.name in PretrainConfig.__dataclass_fields__ and f.name != "teacher"
)


# Which options belong to which method; given with the other they would do nothing.
OWN = {
    "distill": ("teacher", "patch_weight", "mixup", "cutmix"),
    "mae": ("mask_ratio", "mask", "norm_pix_loss", "pos_embed", "decoder_width", "decoder_depth", "decoder_heads"),
}


def with_pretrain_defaults(config: PretrainConfig) -> PretrainConfig:
    """Fill what the user left open, from the defaults of `train`; the decoder's are filled once the encoder is known.

    Raises:
        UserError: No data or no teacher, an option of another method, or a number is outside its range.
    """
    if not config.data:
        raise UserError("--data is missing: give a folder of pictures")
    if config.method is None:
        config = dataclasses.replace(config, method="distill" if config.teacher else "mae")
    default = PretrainConfig()
    for method, names in OWN.items():
        # A recipe may say that there is no mixing.
        given = (n for n in names if getattr(config, n) != getattr(default, n) and getattr(config, n) != 0)
        strange = next(given, None)
        if strange and method != config.method:
            raise UserError(f"--{strange.replace('_', '-')} belongs to --method {method}, not to {config.method}")
    if config.method == "distill":
        _check_distill(config)
    else:
        config = _with_mae_defaults(config)
    filled = with_defaults(config.as_train())
    shared: dict[str, Any] = {name: getattr(filled, name) for name in SHARED}
    return dataclasses.replace(config, **shared)


def _check_distill(config: PretrainConfig) -> None:
    if not config.teacher:
        raise UserError(
            "--method distill needs --teacher: a name of timm with pretrained weights, a model folder, or a run's "
            "folder"
        )
    if not 0 <= config.patch_weight < 1e6:  # NaN is in no range
        raise UserError(f"--patch-weight is {config.patch_weight}, but must be 0 or more")


def _with_mae_defaults(config: PretrainConfig) -> PretrainConfig:
    if not 0 < config.mask_ratio < 1:
        raise UserError(f"--mask-ratio is {config.mask_ratio}, but must be above 0 and below 1")
    for name in ("decoder_width", "decoder_depth", "decoder_heads"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but must be at least 1")
    filled: dict[str, Any] = {
        "opt_betas": (0.9, 0.95) if config.opt == "adamw" else None,
        # Digits lose their strokes in small crops.
        "scale": None if config.data == "digits" else (0.2, 1.0),
        "layer_decay": 1.0,
        "pos_embed": "learned" if config.init_from else "sincos",
    }
    return dataclasses.replace(config, **{n: value for n, value in filled.items() if getattr(config, n) is None})
