"""`jumbo-vit bench`."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Config:
    """Measure models side by side: latency, throughput, memory, training step, and their share of the machine's limit.

    Args:
        models: Names of ours or timm's, or model folders, separated by spaces or commas; ratios are to the first.
        batch_sizes: Pictures in a batch.
        size: Side of the square pictures in pixels, or HEIGHTxWIDTH.
        precision: How they run, several allowed; bf16 and fp16 hold everything in that type, autocast computes products
            in bfloat16, optimized-... is what jumbo_vit.optimize makes of a model (-compiled: with compile=True).
        training: Measure a training step too, and the bytes it keeps (precisions fp32 and autocast).
        profile: Say where the time of a forward pass goes, by kind of work (CPU only).
        repeats: Rounds; in each every model runs once.
        threads: Threads on a CPU; default PyTorch's own choice.
        device: Where to compute.
        csv: Write the rows to this file.
        json: Write rows, ceilings, versions and machine to this file.
        plot: Draw throughput over batch size to this PNG file.
    """

    models: list[str] = field(default_factory=lambda: ["jumbo_vit_tiny_patch16_224", "vit_tiny_patch16_reg16_224"])
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    size: str = "224"
    precision: list[
        Literal["fp32", "bf16", "fp16", "autocast"]
        | Literal["optimized-fp32", "optimized-fp32-compiled", "optimized-bf16", "optimized-int8-jumbo"]
    ] = field(default_factory=lambda: ["fp32"])
    training: bool = False
    profile: bool = False
    repeats: int = 15
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    csv: str | None = None
    json: str | None = None
    plot: str | None = None


def run(config: Config) -> None:
    """Measure, print the table, and write it where asked."""
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler, which counts memory, reports its start otherwise
    import torch

    from jumbo_vit.errors import UserError
    from jumbo_vit.folder import pick_device
    from jumbo_vit.measure.bench import compare
    from jumbo_vit.tasks.config import parse_size

    for name, low in (("repeats", 3), ("threads", 1)):
        value = getattr(config, name)
        if value is not None and value < low:
            raise UserError(f"--{name} is {value}, but must be at least {low}")
    if not config.batch_sizes or min(config.batch_sizes) < 1:
        raise UserError(f"--batch-sizes is {config.batch_sizes}, but each must be at least 1")
    if config.threads:
        torch.set_num_threads(config.threads)
    height, width = parse_size(config.size)
    device = pick_device(config.device)
    models = _models(config.models, (height, width), device)
    batches = list(dict.fromkeys(config.batch_sizes))
    precisions: list[str] = list(config.precision)
    size = (3, height, width)
    rows, left_out, ceilings = compare(
        models, precisions, batches, size, device, config.repeats, config.training, config.profile
    )
    if not rows:
        raise UserError("nothing could be measured: " + "; ".join(left_out))
    _write(config, rows, left_out, ceilings, device)
    for line in _table(rows):
        print(line)
    for row in rows:
        if row.shares:
            parts = ", ".join(f"{kind} {share:.0%}" for kind, share in row.shares.items())
            print(f"{row.model} {row.precision} at batch {row.batch}: {parts}")
    for sentence in left_out:
        print(f"not measured: {sentence}")
    for batch, limits in ceilings.items():
        for precision, limit in limits.items():
            rate = f"{limit['macs'] / 1e9:.0f} GMAC/s, weights read at {limit['bytes'] / 1e9:.1f} GB/s"
            print(f"this machine at batch {batch}, {precision}: {rate}")


def _models(words: list[str], size: tuple[int, int], device: Any) -> dict[str, Any]:
    """The models by the names the user gave, each made for pictures of that size."""
    from pathlib import Path

    from jumbo_vit.errors import UserError
    from jumbo_vit.folder import load, make_model

    names = [name for word in words for name in word.split(",") if name]
    if not names:
        raise UserError("--models is empty: give names that `jumbo-vit models` or timm lists, or model folders")
    made: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        if Path(name).is_dir():
            predictor = load(name, str(device))
            wanted = predictor.contract.preparation.input_size[1:]
            if tuple(wanted) != size:
                raise UserError(
                    f"{name} takes pictures of {wanted[0]}x{wanted[1]}: give --size {wanted[0]}x{wanted[1]}"
                )
            made[name] = predictor.model
            continue
        made[name] = _sized(make_model, name, size).to(device)
    return made


def _sized(make: Any, name: str, size: tuple[int, int]) -> Any:
    """A model by name for pictures of that size; convolutional ones take any as they are."""
    import torch

    from jumbo_vit.errors import UserError

    model = make(name).eval()
    if hasattr(model, "set_input_size") and tuple(model.pretrained_cfg["input_size"][1:]) != size:
        model.set_input_size(img_size=size)
    try:
        with torch.inference_mode():
            model(torch.zeros(1, model.pretrained_cfg["input_size"][0], *size))
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"{name} does not take pictures of {size[0]}x{size[1]}: {error}") from error
    return model


def _write(config: Config, rows: list[Any], left_out: list[str], ceilings: Any, device: Any) -> None:
    import csv
    import dataclasses
    import io
    import shlex
    import sys
    import time

    from jumbo_vit.files import write_json, write_text
    from jumbo_vit.measure.versus import machine
    from jumbo_vit.version import __version__

    dicts = [dataclasses.asdict(row) for row in rows]
    if config.csv:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(dicts[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(dicts)
        write_text(config.csv, buffer.getvalue())
    if config.json:
        about = {
            "command": shlex.join(["jumbo-vit", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "version": __version__,
            "machine": machine(),
            "device": str(device),
            "repeats": config.repeats,
        }
        write_json(config.json, {**about, "ceilings": ceilings, "left_out": left_out, "rows": dicts})
    if config.plot:
        _draw(config.plot, rows)


def _table(rows: list[Any]) -> list[str]:
    head = ("model", "precision", "batch", "params", "GMACs", "median", "p95", "img/s", "ratio", "memory", "of limit")
    train = any(row.train_step_median is not None for row in rows)
    lines: list[tuple[str, ...]] = [head + (("train step", "kept") if train else ())]
    for row in rows:
        cells: tuple[str, ...] = (
            row.model,
            row.precision,
            str(row.batch),
            f"{row.parameters / 1e6:.2f} M",
            f"{row.gmacs:.2f}",
            f"{row.latency_median * 1e3:.1f} ms",
            f"{row.latency_p95 * 1e3:.1f} ms",
            f"{row.images_per_second:.1f}",
            f"{row.baseline_ratio:.2f}x",
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.1f} MiB",
            f"{row.share_of_limit:.0%}",
        )
        if train:
            step, kept = row.train_step_median, row.saved_tensors
            cells += (
                "-" if step is None else f"{step * 1e3:.1f} ms ({row.train_step_ratio:.2f}x)",
                "-" if kept is None else f"{kept / 2**20:.1f} MiB",
            )
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _draw(path: str, rows: list[Any]) -> None:
    import io

    from matplotlib.figure import Figure

    from jumbo_vit.files import write_bytes

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, precision in dict.fromkeys((row.model, row.precision) for row in rows):
        own = sorted(
            (row.batch, row.images_per_second) for row in rows if (row.model, row.precision) == (name, precision)
        )
        axes.plot([batch for batch, _ in own], [speed for _, speed in own], marker="o", label=f"{name} {precision}")
    axes.set(xlabel="batch size", ylabel="pictures a second", xscale="log", yscale="log")
    batches = sorted({row.batch for row in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_bytes(path, buffer.getvalue())
