"""`jumbo-vit train`."""

from jumbo_vit.tasks.config import TrainConfig as Config

GROUPS = {
    "data": ("data", "task", "val_fraction", "check_images", "workers", "worker_start"),
    "model": ("model", "img_size", "patch_size", "in_chans", "init_from", "drop_path"),
    "recipe": (
        "preset",
        "epochs",
        "batch_size",
        "grad_accum_steps",
        "opt",
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
    "augmentation": ("smoothing", "mixup", "cutmix", "aa", "color_jitter", "hflip", "scale", "reprob"),
    "run": ("out", "resume", "recovery_interval", "logger"),
    "machine": ("device", "devices", "nodes", "strategy", "precision"),
}


def run(config: Config) -> None:
    """Train, then say how it went and what to try next."""
    from jumbo_vit.tasks.train import train

    summary = train(config)
    if summary.get("out"):
        print_end(summary)


def print_end(summary: dict[str, object]) -> None:
    """The last lines of a run."""
    out, data = summary["out"], summary["data"]
    example = "PICTURE.png" if data == "digits" else f"{data}"
    print(f"\nbest {summary['metric']} {summary['score']:.4f} at epoch {summary['best_epoch']}, in {out}/model")
    print("try next:")
    print(f"  jumbo-vit evaluate {out}/model --data {data}")
    print(f"  jumbo-vit predict {out}/model {example}")
