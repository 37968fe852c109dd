"""The speed tables in results/speed/: every form of our models against other code, and against other fast networks.

    git clone https://github.com/antofuller/jumbo /somewhere/jumbo      (needs einops)
    pip install vit-pytorch openvino
    OMP_NUM_THREADS=2 python scripts/bench_rivals.py --official JUMBO --timm TIMM --out results/speed

The first part gives ratios over the authors' code with the same weights: eager fp32, all forms of `optimize`, OpenVINO,
vit-pytorch's JumboViT at the same widths, and timm's ViT with 16 registers. The second measures networks that timm has
weights for, each in all its forms, beside ours, and draws published accuracy over measured speed; accuracies are
those of timm's results file (`--timm`, a clone) and of the authors. All arms of a part run in one process, alternating.
A part whose file exists is not run again. The machine must do nothing else.
"""

import argparse
import csv
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import jumbo_vit
from jumbo_vit.files import write_bytes, write_json, write_text
from jumbo_vit.measure.profile import KINDS, shares
from jumbo_vit.measure.roofline import measure_ceilings, products
from jumbo_vit.measure.timing import alternate
from jumbo_vit.measure.versus import commit, machine, official_model, same_weights
from jumbo_vit.sizes import SIZES, baseline_name, model_name

Form = Callable[[Tensor], Any]
OWN_SIZES = ("pico", "nano", "tiny", "small", "base")
BATCHES = (1, 8, 32)
PROFILED = ("ours fp32", "optimize fp32", "optimize bf16", "optimize int8-jumbo")
PIXELS = 224
# timm's names with the tags whose accuracy at 224 px is quoted; FlexiViT's is at 240 px.
RIVALS = (
    "efficientvit_b1.r224_in1k",
    "shvit_s3.in1k",
    "mobilenetv4_conv_medium.e500_r224_in1k",
    "levit_256.fb_dist_in1k",
    "repvit_m1_1.dist_450e_in1k",
    "tiny_vit_21m_224.in1k",
    "flexivit_small.1200ep_in1k",
    "deit3_small_patch16_224.fb_in1k",
)


def in_inference(model: nn.Module) -> Form:
    """A model's forward pass without gradients."""

    def form(images: Tensor) -> Any:
        with torch.inference_mode():
            return model(images)

    return form


def in_bf16(model: nn.Module) -> Form:
    """The same with weights and pictures in bfloat16, in eager mode."""
    half = model.to(torch.bfloat16)

    def form(images: Tensor) -> Any:
        with torch.inference_mode():
            return half(images.to(torch.bfloat16))

    return form


def openvino_form(model: nn.Module, images: Tensor, precision: str) -> Form:
    """The model compiled by OpenVINO for pictures of that shape, computing in "f32" or "bf16"."""
    import openvino

    with torch.no_grad():
        program = torch.export.export(model, (images,))
    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    settings["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
    request = core.compile_model(openvino.convert_model(program), "CPU", settings).create_infer_request()

    def form(pictures: Tensor) -> Any:
        return torch.from_numpy(request.infer([pictures.numpy()])[0])

    return form


def other_jumbo(size: str) -> nn.Module:
    """vit-pytorch's JumboViT with the widths of the paper's size; its two FFN arguments are multipliers of widths."""
    from vit_pytorch.jumbo_vit import JumboViT

    row = SIZES[size]
    model: nn.Module = JumboViT(
        image_size=PIXELS,
        patch_size=row.patch_size,
        num_classes=1000,
        dim=row.dim,
        depth=row.depth,
        heads=row.heads,
        dim_head=row.dim // row.heads,
        mlp_dim=4,
        jumbo_cls_k=row.num_jumbo,
        jumbo_ff_mult=4.001 / (row.num_jumbo * row.dim),
    )
    wide = row.num_jumbo * row.dim
    hidden = model.jumbo_ff[1][1].out_features  # type: ignore[index,union-attr]
    assert hidden == 4 * wide, f"the Jumbo FFN of vit-pytorch has width {hidden}, not {4 * wide}"
    return model.eval()


def own_forms(size: str, clone: Path, images: Tensor) -> tuple[dict[str, Form], dict[str, float]]:
    """The arms of one size by name, the authors' code first, and each arm's relative difference of logits to ours."""
    torch.manual_seed(0)
    theirs = official_model(clone, size, PIXELS).eval()
    ours = timm.create_model(model_name(size)).eval()
    same_weights(ours, theirs)
    registers = timm.create_model(baseline_name(size, "reg16")).eval()
    forms: dict[str, Form] = {
        "official fp32": in_inference(theirs),
        "ours fp32": in_inference(ours),
        "optimize fp32": jumbo_vit.optimize(ours, "fp32"),
        "optimize bf16": jumbo_vit.optimize(ours, "bf16"),
        "optimize int8-jumbo": jumbo_vit.optimize(ours, "int8-jumbo"),
        "openvino fp32": openvino_form(ours, images, "f32"),
        "openvino bf16": openvino_form(ours, images, "bf16"),
    }
    if len(images) == 1:
        forms["optimize fp32, compiled"] = jumbo_vit.optimize(ours, "fp32", compile=True)
    expected = forms["ours fp32"](images)
    apart = {name: float((form(images) - expected).norm() / expected.norm()) for name, form in forms.items()}
    forms["vit-pytorch JumboViT fp32"] = in_inference(other_jumbo(size))
    forms["ViT + 16 registers fp32"] = in_inference(registers)
    forms["ViT + 16 registers, optimize bf16"] = jumbo_vit.optimize(registers, "bf16")
    return forms, apart


def measure_own(size: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One part: ratios over the authors' code for a size at a batch size."""
    images = torch.randn(batch, 3, PIXELS, PIXELS)
    forms, apart = own_forms(size, args.official, images)
    timings = alternate({name: (lambda form=form: form(images)) for name, form in forms.items()}, args.repeats)
    first = timings["official fp32"].median
    needs = products(timm.create_model(model_name(size)).eval(), images)
    limits = {
        kind: measure_ceilings(needs, dtype, torch.device("cpu")).seconds(needs)
        for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    rows = [
        {
            "form": name,
            "median_s": timing.median,
            "p95_s": timing.p95,
            "spread": timing.spread,
            "ratio": first / timing.median,
            "relative_difference": apart.get(name),
            "seconds": timing.seconds,
        }
        for name, timing in timings.items()
    ]
    parts = {name: shares(lambda form=form: form(images), batch) for name, form in forms.items() if name in PROFILED}
    return {"size": size, "batch": batch, "pixels": PIXELS, "roofline_s": limits, "rows": rows, "shares": parts}


def rival_forms(name: str, images: Tensor) -> dict[str, Form]:
    """A rival's forms: eager fp32 with its branches merged where it has any, bfloat16, OpenVINO."""
    from timm.utils.model import reparameterize_model

    def made() -> nn.Module:
        return reparameterize_model(timm.create_model(name.partition(".")[0]).eval())

    forms = {"fp32": in_inference(made()), "bf16": in_bf16(made())}
    for precision in ("f32", "bf16"):
        forms[f"openvino {precision.replace('f32', 'fp32')}"] = openvino_form(made(), images, precision)
    return forms


def measure_rivals(batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One part: all forms of all rivals and of ours at a batch size, alternating; each one's fastest is marked."""
    forms: dict[str, Form] = {}
    accuracy = published(args.timm)
    images = {side: torch.randn(batch, 3, side, side) for side in (PIXELS, 240)}
    for name in RIVALS:
        side = 240 if name.startswith("flexivit") else PIXELS
        for form, call in rival_forms(name, images[side]).items():
            forms[f"{name}|{form}"] = lambda call=call, side=side: call(images[side])
    for size in OWN_SIZES[:4]:
        model = timm.create_model(model_name(size)).eval()
        own = {"fp32": in_inference(model)}
        own |= {f"optimize {kind}": jumbo_vit.optimize(model, kind) for kind in ("fp32", "bf16", "int8-jumbo")}
        if batch == 1:
            own["optimize fp32, compiled"] = jumbo_vit.optimize(model, "fp32", compile=True)
        own["openvino bf16"] = openvino_form(model, images[PIXELS], "bf16")
        for form, call in own.items():
            forms[f"{model_name(size)}|{form}"] = lambda call=call: call(images[PIXELS])
    timings = alternate(forms, args.repeats)
    rows = []
    for key, timing in timings.items():
        name, _, form = key.partition("|")
        same = [other.median for label, other in timings.items() if label.partition("|")[0] == name]
        rows.append(
            {
                "model": name,
                "form": form,
                "top1": accuracy[name],
                "median_s": timing.median,
                "p95_s": timing.p95,
                "images_per_second": batch / timing.median,
                "fastest": timing.median == min(same),
                "seconds": timing.seconds,
            }
        )
    return {"batch": batch, "pixels": PIXELS, "rows": rows}


def published(clone: Path) -> dict[str, float]:
    """ImageNet-1K top-1 in percent by name: timm's own measurements of its weights, and the authors' of theirs."""
    with (clone / "results" / "results-imagenet.csv").open() as file:
        found = {row["model"]: float(row["top1"]) for row in csv.DictReader(file) if row["img_size"] in ("224", "240")}
    rivals = {name: found[name] for name in RIVALS}
    return rivals | {model_name(size): float(SIZES[size].official_top1 or 0) for size in OWN_SIZES}


def draw(parts: list[dict[str, Any]], path: Path) -> None:
    """Published accuracy over measured speed, each network in its fastest form, one panel a batch size."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(parts), 5), layout="constrained")
    for place, part in enumerate(parts, start=1):
        axes = figure.add_subplot(1, len(parts), place)
        for row in (row for row in part["rows"] if row["fastest"]):
            ours = row["model"].startswith("jumbo")
            axes.scatter(row["images_per_second"], row["top1"], color="tab:red" if ours else "tab:gray", zorder=3)
            label = row["model"].partition("_patch")[0].partition(".")[0].removeprefix("jumbo_vit_")
            name = f"Jumbo {label}" if ours else label
            axes.annotate(name, (row["images_per_second"], row["top1"]), (4, 4), textcoords="offset points", fontsize=8)
        axes.set(title=f"batch {part['batch']}", xlabel="pictures a second (2 CPU threads)", xscale="log")
        axes.set_ylabel("published ImageNet-1K top-1, %")
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())


def tables(out: Path) -> str:
    """All parts in `out` as Markdown: ratios of the forms of our sizes, and the rivals' fastest forms."""
    own = [json.loads(file.read_text()) for file in sorted(out.glob("*_b*.json")) if not file.stem.startswith("rivals")]
    own.sort(key=lambda part: (OWN_SIZES.index(part["size"]), part["batch"]))
    forms = list(dict.fromkeys(row["form"] for part in own for row in part["rows"]))
    names = [f"{part['size']} {part['batch']}" for part in own]
    lines = ["Ratios over the authors' code in eager fp32 (its milliseconds in the first row), by size and batch.", ""]
    lines += [f"| form | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for form in forms:
        cells = []
        for part in own:
            row = next((row for row in part["rows"] if row["form"] == form), None)
            if row is None:
                cells.append("-")
                continue
            first = form == "official fp32"
            cells.append(f"{row['median_s'] * 1e3:.0f} ms" if first else f"{row['ratio']:.2f}")
        lines.append(f"| {form} | {' | '.join(cells)} |")
    for kind, form in (("fp32", "optimize fp32"), ("bf16", "optimize bf16")):
        shares = [
            part["roofline_s"][kind] / next(row["median_s"] for row in part["rows"] if row["form"] == form)
            for part in own
        ]
        lines.append(f"| {form}: share of the roofline | {' | '.join(f'{share:.0%}' for share in shares)} |")
    lines += ["", "Where a forward pass spends its time, as the profiler sees it.", ""]
    lines += [f"| size, batch, form | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for part in own:
        for form, found in part.get("shares", {}).items():
            cells = [f"{found[kind]:.0%}" for kind in KINDS]
            lines.append(f"| {part['size']} {part['batch']}, {form} | {' | '.join(cells)} |")
    for file in sorted(out.glob("rivals_b*.json"), key=lambda file: int(file.stem.rpartition("b")[2])):
        part = json.loads(file.read_text())
        lines += ["", f"Batch {part['batch']}: each network in its fastest form here, by published top-1.", ""]
        lines += ["| network | published top-1 | fastest form | pictures a second |", "|---|---|---|---|"]
        best = sorted((row for row in part["rows"] if row["fastest"]), key=lambda row: -row["top1"])
        lines += [
            f"| {row['model']} | {row['top1']:.2f} | {row['form']} | {row['images_per_second']:.1f} |" for row in best
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the parts that are not there yet, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True, help="a clone of antofuller/jumbo")
    parser.add_argument("--timm", type=Path, required=True, help="a clone of huggingface/pytorch-image-models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=OWN_SIZES, default=list(OWN_SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--only", choices=("own", "rivals"))
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    for batch in args.batches:
        if args.only != "rivals":
            parts |= {f"{size}_b{batch}": (lambda s=size, b=batch: measure_own(s, b, args)) for size in args.sizes}
        if args.only != "own":
            parts[f"rivals_b{batch}"] = lambda b=batch: measure_rivals(b, args)
    about = {
        "command": shlex.join(["python", "scripts/bench_rivals.py", *sys.argv[1:]]),
        "commit": commit(Path(__file__).parent),
        "official_commit": commit(args.official),
        "machine": machine(),
        "repeats": args.repeats,
    }
    for name, run in parts.items():
        file = args.out / f"{name}.json"
        if file.exists():
            continue
        start = time.monotonic()
        write_json(file, {**about, "date": time.strftime("%Y-%m-%d"), **run()})
        gc.collect()
        print(f"{name}: {time.monotonic() - start:.0f} s")
        for row in json.loads(file.read_text())["rows"]:
            who = row["form"] if "ratio" in row else f"{row['model']} {row['form']}"
            what = f"{row['ratio']:.2f}x" if "ratio" in row else f"{row['images_per_second']:.1f} pictures a second"
            print(f"  {who:60s} {row['median_s'] * 1e3:9.1f} ms  {what}")
    rivals = sorted(args.out.glob("rivals_b*.json"), key=lambda file: int(file.stem.rpartition("b")[2]))
    if rivals:
        draw([json.loads(file.read_text()) for file in rivals], args.out / "pareto.png")
    write_text(args.out / "TABLES.md", tables(args.out))


if __name__ == "__main__":
    main()
