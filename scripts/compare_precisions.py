"""Do low precisions answer as fp32 does? Agreement and accuracy of `optimize`'s forms on a folder's held-out pictures.

    python scripts/compare_precisions.py runs/nano/model runs/tiny/model --data FOLDER --out agreement.json

The interval of a drop is that of the mean paired difference (right or wrong, picture by picture), by the normal
approximation, 95 %. The plan and its limits are in results/PLAN.md.
"""

import argparse
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jumbo_vit
from jumbo_vit.data.pipeline import EvalSet, eval_loader
from jumbo_vit.data.sets import open_held_out
from jumbo_vit.files import write_json
from jumbo_vit.measure.versus import commit, machine

LIMITS = {"fp32": 1.0, "bf16": 0.99, "int8-jumbo": 0.98}
LARGEST_DROP = 0.003


def drop_of(right: Tensor, reference: Tensor) -> tuple[float, float]:
    """Loss of accuracy against the reference, and half of its 95 % interval, from rights (N) of 0 or 1."""
    lost = reference.double() - right.double()
    return float(lost.mean()), 1.96 * float(lost.std()) / math.sqrt(len(lost))


def compare(folder: str, data: str) -> dict[str, Any]:
    """Accuracy of each form on the held-out pictures of `data`, and how often it names fp32's class."""
    predictor = jumbo_vit.load(folder, "cpu")
    contract = predictor.contract
    images = open_held_out(data, "multiclass", contract.labels)
    batches = list(eval_loader(EvalSet(images, "multiclass", contract.preparation)))
    targets = torch.cat([target for _, target, _ in batches])
    forms = {name: jumbo_vit.optimize(predictor.model, name) for name in LIMITS}
    with torch.inference_mode():
        expected = torch.cat([predictor(pictures) for pictures, _, _ in batches])
        found = {name: torch.cat([form(pictures) for pictures, _, _ in batches]) for name, form in forms.items()}
        # Few pictures take another path through the Jumbo FFN in 8 bits than many: both have to be near.
        alone = torch.cat(
            [forms["int8-jumbo"](picture[None]) for pictures, _, _ in batches[:4] for picture in pictures]
        )
    reference = expected.argmax(1) == targets
    rows = []
    for name, logits in found.items():
        drop, half = drop_of(logits.argmax(1) == targets, reference)
        agreement = float((logits.argmax(1) == expected.argmax(1)).double().mean())
        rows.append(
            {
                "precision": name,
                "top1": float((logits.argmax(1) == targets).double().mean()),
                "agreement": agreement,
                "agreement_wanted": LIMITS[name],
                "drop": drop,
                "drop_interval": [drop - half, drop + half],
                "relative_difference": float((logits - expected).norm() / expected.norm()),
                "holds": agreement >= LIMITS[name] and drop + half <= LARGEST_DROP,
            }
        )
    many = found["int8-jumbo"][: len(alone)]
    return {
        "model": Path(folder).parent.name,
        "architecture": predictor.model.pretrained_cfg.get("architecture"),
        "pictures": len(targets),
        "top1_fp32": float(reference.double().mean()),
        "int8_one_by_one_agrees_with_batches": float((alone.argmax(1) == many.argmax(1)).double().mean()),
        "rows": rows,
    }


def main() -> None:
    """Compare each folder and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="model folders")
    parser.add_argument("--data", required=True, help="what `jumbo-vit evaluate --data` takes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "scripts/compare_precisions.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "models": [compare(folder, args.data) for folder in args.models],
    }
    write_json(args.out, result)
    for model in result["models"]:
        print(f"{model['model']}: fp32 {model['top1_fp32']:.2%} of {model['pictures']} pictures")
        for row in model["rows"]:
            low, high = row["drop_interval"]
            what = f"agreement {row['agreement']:.2%}, drop {row['drop']:+.2%} ({low:+.2%} to {high:+.2%})"
            print(f"  {row['precision']:11s} {what}, holds: {row['holds']}")


if __name__ == "__main__":
    main()
