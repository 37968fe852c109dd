"""The options of a pre-training run, free of torch so that `--help` answers at once."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.run_options import RunOptions


@dataclass
class PretrainConfig(RunOptions):
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
        opt_betas: Its two decay rates of averages; default 0.9 0.95 for mae with adamw, else the optimizer's own.
        mixup: Alpha of mixup; 0 for none. The teacher sees the mixed picture too; with mae there is none.
        cutmix: Alpha of cutmix; 0 for none; with mae there is none.
        patience: Stop after so many epochs without a lower held-out loss; 0 never stops early.
    """

    method: Literal["mae", "distill"] | None = None
    data: str = ""
    teacher: str | None = None
    patch_weight: float = 1.0
    mask_ratio: float = 0.75
    mask: Literal["sample", "batch"] = "sample"
    norm_pix_loss: bool = False
    pos_embed: Literal["sincos", "learned"] | None = None
    decoder_width: int | None = None
    decoder_depth: int | None = None
    decoder_heads: int | None = None

    def as_train(self) -> TrainConfig:
        """What a run shares with `train`, in its form."""
        return TrainConfig(**{name: getattr(self, name) for name in SHARED})


SHARED = ("data", *(f.name for f in dataclasses.fields(RunOptions)))


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
        "opt_betas": (0.9, 0.95) if config.opt.lower() == "adamw" else None,
        # Digits lose their strokes in small crops.
        "scale": None if config.data == "digits" else (0.2, 1.0),
        "layer_decay": 1.0,
        "pos_embed": "learned" if config.init_from else "sincos",
    }
    return dataclasses.replace(config, **{n: value for n, value in filled.items() if getattr(config, n) is None})
