"""`jumbo-vit replay`."""

from dataclasses import dataclass

POSITIONALS = ("run",)


@dataclass
class Config:
    """Compute again the batch whose loss or gradient was not finite, from DIR/bad-batch.pt.

    Args:
        run: The run's folder.
    """

    run: str = ""


def run(config: Config) -> None:
    """Print both values and where the numbers first go wrong."""
    from pathlib import Path

    from jumbo_vit.tasks.replay import replay

    found = replay(Path(config.run))
    print(f"epoch {found['epoch']}, update {found['update']}, {found['samples']} samples")
    agreement = "DIFFERENT: the run was on another device or version"
    if found["same"] or found["close"]:
        agreement = "the same" if found["same"] else "the same up to rounding"
    print(f"loss recorded {found['recorded']}, replayed {found['replayed']}: {agreement}")
    print(f"norm of the gradient {found['gradient_norm']}")
    print(f"samples with a loss that is not finite: {found['bad_samples'] or 'none'}")
    print(f"samples with input values that are not finite: {found['bad_inputs'] or 'none'}")
    print(f"weights that were not finite before the update: {', '.join(found['bad_weights']) or 'none'}")
