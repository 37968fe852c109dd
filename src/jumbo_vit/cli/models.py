"""`jumbo-vit models`."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Config:
    """List the registered sizes: parameters, operations, and what is known of the authors' weights.

    Args:
        all: List the baselines too, plain ViTs with a class token (cls) and with 16 registers beside it (reg16).
        json: Write the table as JSON to this file.
    """

    all: bool = False
    json: str | None = None


def table(all: bool = False) -> list[dict[str, Any]]:
    """One row a size, with `all` the baselines' too; accuracy in percent as the authors give it, GMACs a picture."""
    from jumbo_vit.measure.cost import JUMBO, cost, macs
    from jumbo_vit.sizes import BASELINE_NAMES, MODEL_NAMES, REGISTERS, SIZES

    rows = []
    names = {name: (key, JUMBO) for name, key in MODEL_NAMES.items()} | (BASELINE_NAMES if all else {})
    for name, (key, kind) in names.items():
        size = SIZES[key]
        counted = cost(size, kind=kind)
        official = kind == JUMBO and size.official_top1 is not None
        rows.append(
            {
                "name": name,
                "width": size.dim,
                "depth": size.depth,
                "heads": size.heads,
                "kind": kind,
                "num_jumbo": size.num_jumbo if kind == JUMBO else None,
                "registers": REGISTERS.get(kind, 0),
                "classes": size.num_classes,
                "parameters": counted.parameters,
                "shared_ffn": counted.shared_ffn,
                "gmacs_128": macs(size, 128, kind=kind) / 1e9,
                "gmacs_224": macs(size, 224, kind=kind) / 1e9,
                "imagenet_top1": size.official_top1 if official else None,
                "weights": "antofuller/jumbo (hub)" if official else None,
                "license": "not stated (code: MIT)" if official else None,
            }
        )
    return rows


def run(config: Config) -> None:
    """Print the table, and write it where asked."""
    rows = table(config.all)
    if config.json:
        from jumbo_vit.files import write_json

        write_json(config.json, rows)
    head = ("name", "D", "depth", "J", "params", "shared FFN", "GMACs 128", "GMACs 224", "top-1", "licence of weights")
    lines = [head]
    for row in rows:
        top1 = f"{row['imagenet_top1']:.2f}" if row["imagenet_top1"] else "-"
        lines.append(
            (
                row["name"],
                str(row["width"]),
                str(row["depth"]),
                str(row["num_jumbo"] or "-"),
                f"{row['parameters'] / 1e6:.2f} M",
                f"{row['shared_ffn'] / 1e6:.2f} M" if row["shared_ffn"] else "-",
                f"{row['gmacs_128']:.2f}",
                f"{row['gmacs_224']:.2f}",
                top1,
                row["license"] or "-",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(
        "\ntop-1: ImageNet-1K at 224 px, as the authors give it for their weights; "
        "GMACs: one picture through the layers with weights."
    )
    more = "" if config.all else "; plain ViTs to compare with: --all"
    print(
        "Also in timm: naflexvit_jumbo_SIZE_patch16 (pictures of any size in a batch, the same weights) and jumboized "
        f"(a ViT of timm given a Jumbo token){more}."
    )
