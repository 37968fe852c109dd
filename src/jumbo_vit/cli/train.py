"""`jumbo-vit train`."""

from jumbo_vit.tasks.config import TrainConfig as Config

GROUPS = {
    "data": ("data", "task", "val_fraction", "split_seed", "check_images", "workers", "worker_start"),
    "model": ("model", "model_args", "img_size", "patch_size", "in_chans", "init_from", "drop_path"),
    "recipe": (
        "preset",
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
        "balance",
        "model_ema",
        "model_ema_decay",
        "grad_checkpointing",
        "patience",
        "seed",
    ),
    "augmentation": ("smoothing", "mixup", "cutmix", "aa", "color_jitter", "hflip", "scale", "reprob", "aug_repeats"),
    "learning": ("loss", "teacher", "label_weight", "freeze", "lora_rank", "stages"),
    "tokens": ("patch_drop", "img_sizes", "size_schedule", "naflex_loader", "naflex_train_seq_lens"),
    "stream": ("streaming", "val_data", "steps_per_epoch", "shuffle_window", "classes"),
    "repeats": ("folds", "fold", "seeds"),
    "run": ("out", "resume", "dry_run", "recovery_interval", "logger"),
    "machine": ("device", "devices", "nodes", "strategy", "precision"),
}


def run(config: Config) -> None:
    """Train; the run itself says how it went and what to try next."""
    from jumbo_vit.memory import keep_freed_memory
    from jumbo_vit.tasks.train import train

    keep_freed_memory()  # this process does nothing but train; a library would have to ask
    train(config)
