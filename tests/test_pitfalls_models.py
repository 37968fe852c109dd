"""Faults of models and checkpoints that users of other tools reported in public, each tried here as they met it.

One group of tests a case, under its name and the threads that tell of it. Other suites pin most of this in more
detail. Each further task (reconstruction, segmentation, series, text, retrieval) adds its own.
"""

import argparse
import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import is_model
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import jumbo_vit
from jumbo_vit import naflex
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import open_folder, save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.tasks.build import make_optimizer
from jumbo_vit.tasks.classify import Classification, Mixing
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.replay import FILE, replay
from jumbo_vit.tasks.start import start_from
from jumbo_vit.tasks.train import train
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL, colour_folder, colour_tree
from tests.test_contract import JUMBOIZED, KINDS, kind, make, pictures, run
from tests.test_parallel import run_python

JUMBO, REGISTERS, NAFLEX = "jumbo_vit_test_patch8_32", "vit_test_patch8_reg16_32", "naflexvit_jumbo_pico_patch16"
every_kind = pytest.mark.parametrize("name", KINDS)
QUICK: dict[str, Any] = {"model": TEST_MODEL, "epochs": 1, "batch_size": 8, "workers": 0, "logger": ["none"]}
HUGE_RATE: dict[str, Any] = {"lr": 1e30, "clip_grad": 0.0, "opt": "sgd", "warmup_epochs": 0.0}


def with_jumbo(name: str, num_jumbo: int) -> dict[str, Any]:
    """J for the kinds that have Jumbo tokens; a jumboized model has as many as its base has prefix tokens, here 5."""
    most = {JUMBO: num_jumbo, NAFLEX: num_jumbo, JUMBOIZED: min(num_jumbo, 5)}.get(name)
    return {} if most is None else {"num_jumbo": most}


# Non-square input and sizes that are no multiple of the patch.
# dinov2 506, terratorch 172, mae 151 and 108, Union14M 12, timm 1863, dinov2 336


@every_kind
def test_non_square_input_and_odd_sizes__64x32_takes_its_own_size_only(name: str) -> None:
    model = make(name, img_size=(64, 32), patch_size=16).eval()
    assert run(model, pictures(size=(64, 32))).shape == (2, 5)
    free = kind(name) == "naflex"  # any whole number of patches, by the right positions (below)
    for size in ((70, 64), (70, 32), (64, 40), (8, 32), *(() if free else ((32, 64), (32, 32), (80, 32)))):
        with pytest.raises((AssertionError, UserError), match=r"\d"):
            model(pictures(size=size))


@every_kind
def test_non_square_input_and_odd_sizes__a_turned_picture_gets_turned_positions(name: str) -> None:
    options = {} if kind(name) == "naflex" else {"dynamic_img_size": True}
    model = make(name, img_size=(64, 32), patch_size=16, **options).eval()
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    position = getattr(model, "pos_embed", None)
    position = model.embeds.pos_embed if position is None else position
    # Of equal patches the tokens differ by their positions alone.
    run(model, torch.zeros(1, 3, 32, 64))
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_() if hasattr(model, "patch_embed") else None
        flat = position if position.ndim == 3 else position.flatten(1, 2)
        wanted = resample_abs_pos_embed(flat, [2, 4], [4, 2], num_prefix_tokens=0, antialias=True)
    found = seen[0][0, model.num_prefix_tokens :]
    torch.testing.assert_close(found - found[:1], wanted[0] - wanted[0, :1], atol=1e-5, rtol=1e-4)


@every_kind
@pytest.mark.parametrize("upright", [True, False])
def test_non_square_input_and_odd_sizes__every_multiple_of_16_up_to_2048(name: str, upright: bool) -> None:
    options = {} if kind(name) == "naflex" else {"dynamic_img_size": True}
    model = make(name, img_size=(32, 32), patch_size=16, depth=1, **options).eval()
    for count in range(2, 129):
        size = (16 * count, 32) if upright else (32, 16 * count)
        with torch.inference_mode():
            (features,) = model.forward_intermediates(pictures(1, size=size), indices=1, intermediates_only=True)
        assert features.shape == (1, 16, size[0] // 16, size[1] // 16)


@every_kind
def test_non_square_input_and_odd_sizes__sizes_that_the_patch_does_not_tile_are_refused(name: str) -> None:
    if kind(name) == "jumboized":
        return  # timm's own constructor, which leaves out the rest of the picture; the model then refuses it (above)
    for size in ((70, 64), (64, 70), (8, 64), 70):
        with pytest.raises(UserError, match=r"is not a multiple of the patch size 16x16: (70|8) must be"):
            make(name, img_size=size, patch_size=16)


# Extra prefix tokens leak into "patch" features.
# transformers 37817, dinov2 331 and 90, lightly 1597, timm 2676


@every_kind
@pytest.mark.parametrize("num_jumbo", [3, 6])
def test_prefix_tokens_in_patch_features__maps_of_64x96_are_4x6_at_every_depth(name: str, num_jumbo: int) -> None:
    model = make(name, img_size=(64, 96), patch_size=16, **with_jumbo(name, num_jumbo)).eval()
    images = pictures(size=(64, 96))
    first = model.num_prefix_tokens
    both = {n: model.forward_intermediates(images, norm=n, return_prefix_tokens=True)[1] for n in (True, False)}
    for normed, plain in zip(both[True], both[False], strict=True):
        assert [tuple(part.shape) for part in plain] == [(2, 16, 4, 6), (2, first, 16)]
        tokens = torch.cat([plain[1], plain[0].flatten(2).mT], dim=1)
        after = torch.cat([normed[1], normed[0].flatten(2).mT], dim=1)
        assert torch.equal(model.norm(tokens), after)


@every_kind
@pytest.mark.parametrize("num_jumbo", [3, 6])
def test_prefix_tokens_in_patch_features__a_huge_global_token_never_shows(name: str, num_jumbo: int) -> None:
    model = make(name, global_pool="avg", **with_jumbo(name, num_jumbo)).eval()
    first = model.num_prefix_tokens
    calm, maps = run(model, pictures()), model.forward_intermediates(pictures(), norm=True)[1]

    def shout(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return torch.cat([torch.full_like(out[:, :first], 1e9), out[:, first:]], dim=1)

    model.blocks[-1].register_forward_hook(shout)
    assert torch.equal(run(model, pictures()), calm)
    assert torch.equal(model.forward_intermediates(pictures(), norm=True)[1][-1], maps[-1])


@every_kind
def test_prefix_tokens_in_patch_features__half_the_patches_are_dropped_and_no_prefix_token(name: str) -> None:
    model = make(name, patch_drop_rate=0.5, **with_jumbo(name, 3))
    lengths: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    whole = make(name, **with_jumbo(name, 3))
    whole.load_state_dict(model.state_dict())
    model(pictures())
    assert torch.equal(run(model, pictures()), run(whole, pictures()))
    assert lengths == [model.num_prefix_tokens + 12, model.num_prefix_tokens + 24]


@pytest.mark.parametrize("name", [JUMBO, "vit_test_patch8_cls_32", REGISTERS, NAFLEX, JUMBOIZED])
def test_prefix_tokens_in_patch_features__without_positions_the_tokens_are_still_there(name: str) -> None:
    model = make(name, pos_embed="none")
    assert not [key for key, _ in model.named_parameters() if "pos_embed" in key]
    tokens = model.forward_features(pictures())
    assert tokens.shape[1] == model.num_prefix_tokens + 24
    model(pictures()).square().sum().backward()
    learned = [p.grad for key, p in model.named_parameters() if key.endswith(("cls_token", "reg_token"))]
    assert learned and all(grad is not None and bool(grad.any()) for grad in learned)
    (features,) = model.eval().forward_intermediates(pictures(), indices=1, intermediates_only=True)
    assert features.shape == (2, 16, 4, 6)


# A new token type forgotten in weight-decay and layer-decay groups.
# timm 2712, dinov2 283, deit 48 and 60


def groups_of(model: nn.Module, **options: Any) -> dict[str, tuple[float, float]]:
    """Rate over the highest, and weight decay, of each parameter, as `jumbo-vit train` sets them."""
    config = TrainConfig(lr=1.0, weight_decay=0.05, **({"layer_decay": 0.5} | options))
    optimizer = make_optimizer(model, config)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    rows = [
        (names[id(p)], (g["lr"] * g.get("lr_scale", 1.0), g["weight_decay"]))
        for g in optimizer.param_groups
        for p in g["params"]
    ]
    assert sorted(key for key, _ in rows) == sorted(names.values())
    return dict(rows)


VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "an FFN a block": {"share_jumbo_mlp": False},
    "bypass": {"lora_rank": 2},
    "registers": {"reg_tokens": 4},
    "layer scale": {"init_values": 0.1},
}


@pytest.mark.parametrize("name", [JUMBO, NAFLEX])
@pytest.mark.parametrize("variant", VARIANTS)
def test_new_tokens_in_parameter_groups__jumbo_of_every_variant(name: str, variant: str) -> None:
    rows = groups_of(make(name, **VARIANTS[variant]))
    lowest = min(rate for rate, _ in rows.values())
    for key, (rate, decay) in rows.items():
        if key.endswith(("reg_token", "pos_embed")):
            assert (rate, decay) == (lowest, 0.0), key
        if "norm" in key or key.endswith((".bias", ".gamma")):
            assert decay == 0.0, key
        elif key.endswith(".weight"):
            assert decay == 0.05, key
        if key.startswith("head"):
            assert rate == 1.0
        if key.startswith("jumbo_mlp"):
            assert rate == rows["norm.weight"][0]
        if key.startswith("blocks."):  # the block's own parts are all of one depth
            assert rate == rows[f"{'.'.join(key.split('.')[:2])}.norm1.weight"][0], key
    assert lowest == 0.5**4 and len({rate for rate, _ in rows.values()}) == 5


@every_kind
def test_new_tokens_in_parameter_groups__without_layer_decay_too(name: str) -> None:
    rows = groups_of(make(name), layer_decay=1.0)
    assert {rate for rate, _ in rows.values()} == {1.0}
    kept = {key for key, (_, decay) in rows.items() if not decay}
    assert {key for key in rows if key.endswith(("cls_token", "reg_token", "pos_embed", "bias"))} <= kept
    assert not {key for key in kept if key.endswith("weight") and "norm" not in key}


@every_kind
def test_new_tokens_in_parameter_groups__frozen_parameters_are_in_none(name: str) -> None:
    model = make(name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith("head"))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


# 0, 1, 2 or 3 classes.
# timm 807, T2T-ViT 3, SlowFast 316, mmpretrain 667, timm 2421 and 2743


@every_kind
@pytest.mark.parametrize("num_classes", [0, 1, 2, 3])
def test_zero_one_two_or_three_classes__are_made(name: str, num_classes: int) -> None:
    model = make(name, num_classes=num_classes)
    assert run(model, pictures()).shape == (2, num_classes or model.head_hidden_size)
    assert model.num_classes == num_classes and model.pretrained_cfg["num_classes"] is not None


def test_zero_one_two_or_three_classes__two_classes_train_with_mixup(tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=6, val=2)
    for part in ("train", "val"):
        shutil.rmtree(data / part / "blue")
    summary = train(
        TrainConfig(**{**QUICK, "epochs": 6}, data=str(data), out=str(tmp_path / "out"), mixup=0.2, lr=3e-3)
    )
    assert summary["classes"] == ["green", "red"] and summary["score"] == 1.0
    numbers = evaluate(str(tmp_path / "out"), str(data))
    assert "top5" not in numbers and numbers["top1"] == numbers["balanced_accuracy"] == 1.0
    rows = jumbo_vit.load(tmp_path / "out").predict(data / "val", topk=2)
    assert all(len(row.top) == 2 for row in rows)


def test_zero_one_two_or_three_classes__one_folder_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = colour_folder(tmp_path / "data", train=2, val=1)
    for part in ("train", "val"):
        for colour in ("red", "blue"):
            shutil.rmtree(data / part / colour)
    assert main(["train", "--model", TEST_MODEL, "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "one class only, green" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_zero_one_two_or_three_classes__one_label_trains_as_multilabel(tmp_path: Path) -> None:
    colour_tree(tmp_path, 6)
    names = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.png"))
    lines = ["path,labels,split"]
    for number, name in enumerate(names):
        lines.append(f"{name},{'red' if name.parts[0] == 'red' else ''},{('train', 'val')[number % 2]}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    options = {**QUICK, "epochs": 6, "task": "multilabel", "lr": 3e-3}
    summary = train(TrainConfig(**options, data=str(tmp_path / "table.csv"), out=str(tmp_path / "out")))
    assert summary["classes"] == ["red"] and summary["score"] == 1.0
    assert evaluate(str(tmp_path / "out"), str(tmp_path / "table.csv"))["per_class_ap"] == {"red": 1.0}


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zero_one_two_or_three_classes__a_reset_head_keeps_type_and_device(name: str, dtype: torch.dtype) -> None:
    for device in ("cpu", "meta"):
        model = make(name).to(device, dtype)
        for num_classes in (7, 0, 3):
            model.reset_classifier(num_classes)
            assert model.num_classes == num_classes
            assert {(p.dtype, p.device.type) for p in model.parameters()} == {(dtype, device)}


@pytest.mark.parametrize("name", [TEST_MODEL, REGISTERS])
def test_zero_one_two_or_three_classes__a_reset_head_is_written_and_read(name: str, tmp_path: Path) -> None:
    model: Any = timm.create_model(name)
    model.reset_classifier(3)
    save_folder(tmp_path, model, Contract("multiclass", ["a", "b", "c"], Preparation((3, 32, 32))))
    opened, contract = open_folder(tmp_path)
    assert opened.num_classes == 3 and contract.labels == ["a", "b", "c"]
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert theirs.num_classes == 3
    assert torch.equal(run(opened, pictures(size=(32, 32))), run(theirs, pictures(size=(32, 32))))


# Checkpoints with "module." or "_orig_mod." keys, or another head, load nothing.
# timm 2003 and 1566, open_clip 639, nanoGPT 325, train-llm-from-scratch 36, timm 2332 and 948, dino 30, AdaptFormer 11

WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: model.state_dict(),
    "compiled": lambda model: torch.compile(model).state_dict(),  # type: ignore[attr-defined]
    "parallel": lambda model: nn.DataParallel(model).state_dict(),
    "parallel of compiled": lambda model: nn.DataParallel(torch.compile(model)).state_dict(),  # type: ignore[arg-type]
    "compiled parallel": lambda model: torch.compile(nn.DataParallel(model)).state_dict(),  # type: ignore[attr-defined]
    "average by torch": lambda model: AveragedModel(model).state_dict(),
    "average by timm": lambda model: ModelEmaV3(model).state_dict(),
    "timm's checkpoint": lambda model: {"epoch": 3, "arch": "x", "state_dict": model.state_dict()},
    "timm's checkpoint, average": lambda model: {
        "state_dict": {key: torch.zeros_like(value) for key, value in model.state_dict().items()},
        "state_dict_ema": ModelEmaV3(model).state_dict(),
    },
    "average of compiled": lambda model: AveragedModel(torch.compile(model)).state_dict(),  # type: ignore[arg-type]
}


def write(content: Any, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file({key: value.contiguous().clone() for key, value in content.items()}, path)
    else:
        torch.save(content, path)
    return path


def flat(content: Any) -> bool:
    return all(isinstance(value, Tensor) for value in content.values())


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("name", [JUMBO, REGISTERS])
def test_checkpoints_of_wrapped_models__give_the_same_logits_in_every_way(
    name: str, wrapper: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = timm.create_model(name, num_classes=3)
    nn.init.normal_(model.head.weight)
    content, batch = WRAPPED[wrapper](model), pictures(size=(32, 32))
    wanted = run(model, batch)
    contract = Contract("multiclass", list("abc"), Preparation((3, 32, 32)))
    for suffix in (".pth", ".safetensors") if flat(content) else (".pth",):
        folder = tmp_path / suffix
        save_folder(folder, timm.create_model(name, num_classes=3), contract)
        (folder / "model.safetensors").unlink()
        path = write(content, folder / {".pth": "pytorch_model.bin"}.get(suffix, "model.safetensors"))
        assert torch.equal(jumbo_vit.load(folder)(batch), wanted)
        other = write(content, tmp_path / f"w{suffix}")
        tuned: Any = timm.create_model(name, num_classes=7)
        report = start_from(tuned, str(other), list("abcdefg"))
        trunk = {key: value for key, value in model.state_dict().items() if not key.startswith("head")}
        assert all(torch.equal(tuned.state_dict()[key], value) for key, value in trunk.items())
        assert report.new == ["head.weight", "head.bias"] and len(report.loaded) == len(trunk)
        overlay = {"file": str(path), "input_size": (3, 32, 32)}
        read = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3)
        assert torch.equal(run(read, batch), wanted)
        caplog.clear()
        fresh: Any = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=7)
        assert "head.weight and head.bias start anew" in caplog.text
        assert all(torch.equal(fresh.state_dict()[key], value) for key, value in trunk.items())


def test_checkpoints_of_wrapped_models__the_averaged_run_starts_another(colours: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(TrainConfig(**QUICK, data=str(colours), out=str(out), model_ema=True))
    average = torch.load(out / "last.ckpt", weights_only=True)["average"]
    path = write({"state_dict_ema": average}, tmp_path / "average.pth")
    model, contract = open_folder(out)
    start_from(model, str(path), contract.labels)
    wanted = {key.removeprefix("module."): value for key, value in average.items()}
    trunk = {key: value for key, value in model.state_dict().items() if not key.startswith("head")}
    assert all(torch.equal(wanted[key], value) for key, value in trunk.items())


@pytest.mark.parametrize("other", [REGISTERS, "resnet18", "jumbo_vit_pico_patch16_224"])
def test_checkpoints_of_wrapped_models__another_architecture_is_refused_with_its_names(
    other: str, run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_model(other)
    foreign = timm.create_model(other, num_classes=3).state_dict()
    folder = shutil.copytree(Path(run["out"]) / "model", tmp_path / "model")
    write(foreign, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"does not fit the model \((missing|unknown|other shape): \w+"):
        jumbo_vit.load(folder)
    path = write(foreign, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"missing: .*unknown: |(unknown|other shape): \w+"):
        timm.create_model(
            TEST_MODEL, pretrained=True, pretrained_cfg_overlay={"file": str(path), "input_size": (3, 32, 32)}
        )


# Shared weights and safetensors.
# safetensors 98, 202 and 493, transformers 22437


def test_shared_weights__a_run_is_as_large_as_its_unique_parameters(run: dict[str, Any]) -> None:
    model, _ = open_folder(run["out"])
    unique = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
    assert run["parameters"] == unique == sum(value.numel() for value in model.state_dict().values())
    size = (Path(run["out"]) / "model" / "model.safetensors").stat().st_size
    assert 4 * unique < size < 4 * unique + 10_000


def _opened(model: Any, path: Path) -> Any:
    save_folder(path, model, Contract("multiclass", list("abcde"), Preparation((3, 16, 24))))
    return open_folder(path)[0]


def _assigned(model: Any) -> Any:
    twin = copy.deepcopy(model).to("meta")
    twin.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    return twin


def _read_into(model: Any) -> Any:
    twin = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    twin.load_state_dict(model.state_dict())
    return twin


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "opened": _opened,
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "average by timm": lambda model, path: ModelEmaV3(model).module,
    "average by torch": lambda model, path: AveragedModel(model).module,
    "torch.save": lambda model, path: torch.load(write(model, path / "m.pt"), weights_only=False),
    "half and back": lambda model, path: copy.deepcopy(model).half().float(),
    "assigned": lambda model, path: _assigned(model),
    "read into": lambda model, path: _read_into(model),
}


@pytest.mark.parametrize("name", [JUMBO, NAFLEX, JUMBOIZED])
@pytest.mark.parametrize("way", COPIES)
def test_shared_weights__one_change_reaches_all_blocks_after_any_copy(name: str, way: str, tmp_path: Path) -> None:
    if way == "opened" and name == JUMBOIZED:
        return  # its folder names a base that would be fetched; tested in test_jumboize_disk.py
    model = make(name).eval()
    twin = COPIES[way](model, tmp_path).eval()
    torch.testing.assert_close(run(twin, pictures()), run(model, pictures()), atol=2e-2, rtol=2e-2)
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in model.parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        twin.jumbo_mlp.fc2.bias += 1.0
    calls: list[int] = []
    twin.jumbo_mlp.register_forward_hook(lambda *_: calls.append(1))
    run(twin, pictures())
    assert len(calls) == len(twin.blocks) == 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# A checkpoint that runs code, or that the safe loader refuses.
# terratorch 371, pytorch 86812, e3nn 519


class Marker:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


def test_checkpoints_that_run_code__are_opened_by_no_command(
    run: dict[str, Any], colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker, out = tmp_path / "marker", shutil.copytree(run["out"], tmp_path / "run")
    content = torch.load(out / "last.ckpt", weights_only=True)
    evil = write({**content, "extra": Marker(marker)}, tmp_path / "evil.pth")
    weights = write({**content["model"], "extra": Marker(marker)}, tmp_path / "weights.pth")
    shutil.copy(evil, out / "last.ckpt")
    (out / "previous.ckpt").unlink(missing_ok=True)
    shutil.copy(evil, out / FILE)
    (out / "model" / "model.safetensors").unlink()
    shutil.copy(weights, out / "model" / "pytorch_model.bin")
    start = ["train", "--model", TEST_MODEL, "--data", str(colours), "--workers", "0", "--logger", "none"]
    commands = [
        ["train", "--resume", str(out), "--epochs", "9"],
        ["train", "--resume", str(out / "last.ckpt"), "--epochs", "9"],
        [*start, "--init-from", str(evil), "--out", str(tmp_path / "a")],
        [*start, "--init-from", str(weights), "--out", str(tmp_path / "b")],
        [*start, "--init-from", str(out), "--out", str(tmp_path / "c")],
        [*start, "--model-args", f"num_jumbo=!!python/object/apply:os.system ['touch {marker}']"],
        ["evaluate", str(out), "--data", str(colours)],
        ["predict", str(weights), str(colours)],
        ["embed", str(out), str(colours), "--out", str(tmp_path / "f.npz")],
        ["replay", str(out)],
    ]
    for words in commands:
        assert main(words) == 2, words
        assert capfd.readouterr().err.count("\n") == 1, words
        assert not marker.exists(), words
    by_name = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(weights)}}
    for way in ({"checkpoint_path": str(weights)}, by_name):
        with pytest.raises(Exception, match=r"[Ww]eights.only|run code"):
            timm.create_model(TEST_MODEL, num_classes=3, **way)
        assert not marker.exists()


def test_checkpoints_that_run_code__options_of_a_run_neither(run: dict[str, Any], tmp_path: Path) -> None:
    out, marker = shutil.copytree(run["out"], tmp_path / "run"), tmp_path / "marker"
    config = out / "config.yaml"
    config.write_text(config.read_text() + f"extra: !!python/object/apply:os.system ['touch {marker}']\n")
    for words in (["--resume", str(out), "--epochs", "9"], ["--config", str(config)]):
        assert main(["train", *words]) == 2
        assert not marker.exists()


def test_checkpoints_that_run_code__our_own_files_open_safely(
    run: dict[str, Any], colours: Path, tmp_path: Path
) -> None:
    out = Path(run["out"])
    for path in (out / "last.ckpt", out / "previous.ckpt"):
        assert torch.load(path, weights_only=True)["progress"]["epoch"] > 0
    assert yaml.safe_load((out / "config.yaml").read_text())["model"] == TEST_MODEL
    with pytest.raises(UserError, match="not finite"):
        train(TrainConfig(**{**QUICK, "epochs": 3}, data=str(colours), out=str(tmp_path / "bad"), **HUGE_RATE))
    assert torch.load(tmp_path / "bad" / FILE, weights_only=True)["batches"]
    assert replay(tmp_path / "bad")["same"]


@pytest.mark.parametrize("extra", [argparse.Namespace(lr=0.1), Path("data")])
def test_checkpoints_that_run_code__old_files_say_how_to_convert_them(extra: Any, tmp_path: Path) -> None:
    model: Any = timm.create_model(TEST_MODEL, num_classes=3)
    path = write({"model": model.state_dict(), "args": extra}, tmp_path / "old.pth")
    with pytest.raises(UserError, match=r"convert it yourself: load it with .*weights_only=False.*save the plain"):
        start_from(model, str(path), list("abc"))
    content = torch.load(path, weights_only=False)  # as the message says
    torch.save(content["model"], path)
    start_from(model, str(path), list("abc"))


# Distributed run stops: parameters without gradient.
# lightly 1775, timm 1214, rf-detr 1093


def pools_of(name: str) -> tuple[str, ...]:
    if kind(name) == "naflex":
        return naflex.POOLS
    return ("token", "avg", "max", "avgmax", "map") if kind(name) == "jumboized" else type(make(name)).pools


@pytest.mark.parametrize(("name", "pool"), [(name, pool) for name in KINDS for pool in pools_of(name) if pool])
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_parameters_without_gradient__none_after_one_step_of_any_pool(name: str, pool: str, task: str) -> None:
    model = make(name, global_pool=pool)
    mixing = Mixing(mixup=0.2, cutmix=0.5, smoothing=0.1) if task == "multiclass" else Mixing()
    targets = torch.tensor([0, 3]) if task == "multiclass" else torch.tensor([[1.0, 0, 0, 1, 0], [0.0] * 5])
    Classification(task, 5, mixing).step(model, (pictures(), targets), seed=1).sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", [REGISTERS])
def test_parameters_without_gradient__two_processes_agree_on_weights_and_scores(name: str, tmp_path: Path) -> None:
    data = colour_folder(tmp_path / "data", train=5, val=3)  # 9 held out, which two do not divide
    out = tmp_path / "out"
    words = ["--data", str(data), "--model", name, "--epochs", "1", "--batch-size", "4", "--workers", "0"]
    words += ["--logger", "none", "--devices", "2", "--out", str(out)]
    done = run_python(["-m", "tests.recorded_run", str(out), *words])
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second and len(first["losses"]) == 2 and first["idle"] == []
    numbers = evaluate(str(out), str(data))
    row = torch.load(out / "last.ckpt", weights_only=True)["progress"]["history"][0]
    assert numbers["n"] == 9 and numbers["top1"] == row["val_top1"]
    assert numbers["loss"] == pytest.approx(row["val_loss"], abs=1e-6)
