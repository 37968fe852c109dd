"""`jumbo-vit plan`."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class Config:
    """Which widths D and which J reach a wanted speed on this machine: predicted from measurements, then measured.

    Args:
        images_per_second: The wanted throughput; give this or --latency-ms.
        latency_ms: The wanted time of one batch in milliseconds.
        size: Side of the square pictures in pixels.
        batch_size: Pictures in a batch.
        precision: How the models run; optimized-... is what jumbo_vit.optimize makes of them.
        repeats: Rounds of measurement.
        device: Where to compute.
        json: Write the table as JSON to this file.
    """

    images_per_second: float | None = None
    latency_ms: float | None = None
    size: int = 224
    batch_size: int = 1
    precision: Literal[
        "fp32", "bf16", "fp16", "autocast", "optimized-fp32", "optimized-bf16", "optimized-int8-jumbo"
    ] = "optimized-fp32"
    repeats: int = 7
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    json: str | None = None


def run(config: Config) -> None:
    """Print the table, and write it where asked."""
    import dataclasses

    from jumbo_vit.errors import UserError
    from jumbo_vit.files import write_json
    from jumbo_vit.folder import pick_device
    from jumbo_vit.measure.plan import Workload, plan
    from jumbo_vit.measure.versus import machine

    if (config.images_per_second is None) == (config.latency_ms is None):
        raise UserError("give one of --images-per-second and --latency-ms")
    wanted = config.images_per_second if config.latency_ms is None else config.latency_ms
    assert wanted is not None
    if not 0 < wanted < 1e12:
        raise UserError(f"the wanted speed is {wanted}, but must be a positive number")
    for name, low in (("size", 16), ("batch_size", 1), ("repeats", 3)):
        if getattr(config, name) < low:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}, but must be at least {low}")
    if config.size % 16:
        raise UserError(f"--size is {config.size}, but must be a multiple of the patch, 16")
    limit = config.batch_size / wanted if config.latency_ms is None else wanted / 1e3
    work = Workload(config.size, config.batch_size, config.precision, pick_device(config.device))
    choices, error = plan(limit, work, config.repeats)
    if config.json:
        rows = [dataclasses.asdict(choice) for choice in choices]
        write_json(config.json, {"limit_s": limit, "fit_error": error, "machine": machine(), "choices": rows})
    print(
        f"Depth 12, patch 16, {config.size} px, batch {config.batch_size}, {config.precision} on {work.device}: "
        f"at most {limit * 1e3:.1f} ms a batch. The median error of the cost model where it was fitted: {error:.0%}."
    )
    if not choices:
        raise UserError(
            f"no width from 64 with J=1 is that fast here at {config.size} px: lower the speed, --size, or --precision"
        )
    print("    D    J  parameters  predicted   measured")
    for choice in choices:
        count = "-" if choice.parameters is None else f"{choice.parameters / 1e6:.2f} M"
        took = "-" if choice.measured is None else f"{choice.measured * 1e3:.1f} ms"
        verdict = (
            "" if choice.measured is None else "  fits" if choice.measured <= limit else "  too slow: take a smaller J"
        )
        print(f"{choice.dim:5d}{choice.num_jumbo:5d}{count:>12s}{choice.predicted * 1e3:8.1f} ms{took:>11s}{verdict}")
    print(
        "For each width the largest J up to 12 that is predicted to fit. Make one with timm.create_model("
        "'jumbo_vit_tiny_patch16_224', embed_dim=D, num_heads=D//64 or for D < 192 D//32, num_jumbo=J)."
    )
