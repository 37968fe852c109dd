"""The options on how many tokens an update has: what they ask for, and what does not go together. Free of torch."""

from jumbo_vit.errors import UserError
from jumbo_vit.tasks.config import TrainConfig, parse_size

LONGEST = 16_384
"""Patches that a sequence may have: 2,048 x 2,048 pixels in patches of 16."""


def training_sizes(config: TrainConfig) -> list[tuple[int, int]]:
    """The (height, width) of `--img-sizes`, by their number of pixels; none without it.

    Raises:
        UserError: One is no size, or comes twice.
    """
    sizes = [parse_size(text, "--img-sizes") for text in config.img_sizes or []]
    twice = next((size for size in sizes if sizes.count(size) > 1), None)
    if twice is not None:
        raise UserError(f"--img-sizes names {twice[0]}x{twice[1]} twice: leave one out, each size comes equally often")
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


def check_token_options(config: TrainConfig) -> None:
    """Refuse what the options of this kind do not take, and what does not go together.

    Raises:
        UserError: It is so.
    """
    training_sizes(config)
    if not all(0 <= share <= 0.99 for share in config.patch_drop):
        raise UserError(
            f"--patch-drop is {config.patch_drop[0]} {config.patch_drop[1]}, but takes shares from 0 to 0.99"
        )
    if config.aug_repeats > 1 and config.balance == "sampler":
        raise UserError(
            "--aug-repeats does not go with --balance sampler: a rare class would be a few pictures again and again, "
            "a common one not equally often; use --balance weights"
        )
    lengths = config.naflex_train_seq_lens
    if lengths is not None and (not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths)):
        raise UserError(f"--naflex-train-seq-lens is {lengths}, but takes numbers of patches, each at least 1 and once")
    if lengths is not None and max(lengths) > LONGEST:
        raise UserError(f"--naflex-train-seq-lens is {lengths}, but a sequence has at most {LONGEST:,} patches")
    if lengths is not None and not config.naflex_loader:
        raise UserError("--naflex-train-seq-lens is for --naflex-loader: add it, or leave the lengths out")
    if config.size_schedule != "mixed" and not config.img_sizes and lengths is None:
        raise UserError(f"--size-schedule {config.size_schedule} needs the sizes: add --img-sizes")
    if config.naflex_loader:
        _check_naflex(config)


def _check_naflex(config: TrainConfig) -> None:
    reasons = {
        "img_sizes": (bool(config.img_sizes), "its sizes are --naflex-train-seq-lens"),
        "patch_drop": (any(config.patch_drop), "padding could be all that is kept of a picture"),
        "mixup": (bool(config.mixup), "pictures of different shapes cannot be laid over each other"),
        "cutmix": (bool(config.cutmix), "pictures of different shapes cannot be cut into each other"),
        "teacher": (bool(config.teacher), "a teacher takes whole pictures of one size"),
        "freeze": (config.freeze, "features are computed once, of whole pictures"),
    }
    odd = next((name for name, (given, _) in reasons.items() if given), None)
    if odd is not None:
        flag = f"--{odd.replace('_', '-')}"
        raise UserError(f"--naflex-loader allows no {flag}: {reasons[odd][1]}; leave one of the two out")
