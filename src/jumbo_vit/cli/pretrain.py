"""`jumbo-vit pretrain`."""

from jumbo_vit.tasks.pretrain_config import PretrainConfig as Config

GROUPS = {
    "method": ("method",),
    "mae": ("mask_ratio", "mask", "norm_pix_loss", "pos_embed", "decoder_width", "decoder_depth", "decoder_heads"),
    "distill": ("teacher", "patch_weight"),
    "data": ("data", "val_fraction", "split_seed", "check_images", "workers", "worker_start"),
    "model": ("model", "model_args", "img_size", "patch_size", "in_chans", "init_from", "drop_path"),
    "recipe": (
        "epochs",
        "batch_size",
        "grad_accum_steps",
        "opt",
        "opt_betas",
        "lr",
        "min_lr",
        "warmup_epochs",
        "weight_decay",
        "layer_decay",
        "clip_grad",
        "model_ema",
        "model_ema_decay",
        "grad_checkpointing",
        "patience",
        "seed",
    ),
    "augmentation": ("mixup", "cutmix", "aa", "color_jitter", "hflip", "scale", "reprob", "aug_repeats"),
    "run": ("out", "resume", "dry_run", "recovery_interval", "logger"),
    "machine": ("device", "devices", "nodes", "strategy", "precision"),
}


def run(config: Config) -> None:
    """Train; the run itself says how it went and what to try next."""
    from jumbo_vit.memory import keep_freed_memory
    from jumbo_vit.tasks.pretrain import pretrain

    keep_freed_memory()  # this process does nothing but train
    pretrain(config)
