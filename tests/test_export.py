"""Exported files: the model's answers from the file alone, what is refused, and what is left behind (nothing)."""

import copy
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import jumbo_vit
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.export import classifier, pt2
from jumbo_vit.export.choose import Measured, choose, measure
from jumbo_vit.export.classifier import Options, export
from jumbo_vit.export.compare import compare, verdict
from jumbo_vit.export.formats import FORMATS, check_installed, check_precision, format_of
from jumbo_vit.export.halves import Half, largest_value
from jumbo_vit.export.pictures import pictures_of
from jumbo_vit.export.run import open_exported
from jumbo_vit.export.write import Form, export_module, operations, trace
from jumbo_vit.predictor import Contract, Predictor
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL, colour_tree, square

Files = Callable[[str], Path]
LABELS = ['größe, "猫"', "a|b\n<&>'  c", "x"]
FORMAT_PARAMS = ["torch", "onnx", "openvino", pytest.param("executorch", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def files(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The colours' model in a format, written once, in a folder of its own; not to be changed."""
    made: dict[str, Path] = {}

    def make(format: str) -> Path:
        pytest.importorskip((*FORMATS[format].to_run, "torch")[0])
        if format not in made:
            out = tmp_path_factory.mktemp(format) / f"colours{FORMATS[format].suffix}"
            export(run["out"], out)
            made[format] = out
        return made[format]

    return make


def small(seed: int = 0, **options: Any) -> nn.Module:
    """A model with every parameter at random: fresh heads and norms hide mistakes."""
    torch.manual_seed(seed)
    model = timm.create_model(TEST_MODEL, **{"num_classes": 3, "depth": 1, **options})
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def predictor(model: nn.Module, task: str = "multiclass", **contract: Any) -> Predictor:
    size = (3, 32, 32)
    return Predictor(copy.deepcopy(model), Contract(task, LABELS, Preparation(size), **contract))


def images(count: int, size: tuple[int, int] = (32, 32)) -> Tensor:
    return torch.randn(count, 3, *size)


# The file alone


@pytest.mark.parametrize("format", FORMAT_PARAMS)
def test_a_file_in_a_fresh_folder_predicts_as_the_model(
    format: str, files: Files, run: dict[str, Any], colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files(format)
    shutil.copytree(source.parent, tmp_path / "alone")
    monkeypatch.chdir(tmp_path / "alone")
    assert len(list(Path().iterdir())) == (2 if format in ("openvino", "executorch") else 1)
    rows = jumbo_vit.load(source.name).predict(colours / "val")
    expected = jumbo_vit.load(run["out"]).predict(colours / "val")
    assert [(row.path, row.label) for row in rows] == [(row.path, row.label) for row in expected] and len(rows) == 12
    for row, other in zip(rows, expected, strict=True):
        assert float(row.probability) == pytest.approx(float(other.probability), abs=2e-5)


@pytest.mark.parametrize("format", FORMAT_PARAMS)
def test_every_batch_size(format: str, files: Files, run: dict[str, Any]) -> None:
    opened, model = jumbo_vit.load(files(format)), jumbo_vit.load(run["out"])
    batch = images(67)
    expected = model(batch)
    for count in (1, 2, 7, 67):
        torch.testing.assert_close(opened(batch[:count]), expected[:count], atol=1e-4, rtol=1e-4)
    assert opened.contract == model.contract


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_evaluate_takes_a_file(format: str, files: Files, run: dict[str, Any], colours: Path) -> None:
    numbers, expected = (evaluate(str(model), str(colours)) for model in (files(format), run["out"]))
    assert numbers["top1"] == expected["top1"] and numbers["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_what_a_file_cannot_do(files: Files, colours: Path) -> None:
    opened = jumbo_vit.load(files("torch"))
    with pytest.raises(UserError, match="for features take the model folder"):
        opened.embed(colours / "val")
    with pytest.raises(UserError, match=r"takes pictures \(B, 3, 32, 32\), not \(1, 3, 16, 32\).*--img-size"):
        opened(images(1, (16, 32)))
    with pytest.raises(UserError, match="no such file"):
        jumbo_vit.load("nothing.onnx")
    with pytest.raises(UserError, match="run on the CPU"):
        jumbo_vit.load(files("torch"), "cuda")
    with pytest.raises(UserError, match="is an exported file already"):
        export(files("torch"), "again.onnx")


@pytest.mark.parametrize("format", ["torch", "onnx", "openvino"])
def test_nothing_of_the_machine_and_no_resizing_is_in_a_file(format: str, files: Files) -> None:
    file = files(format)
    content = file.read_bytes()
    if format == "torch":
        program = torch.export.load(file)
        names = operations(program)
    elif format == "onnx":
        import onnx

        names = {node.op_type for node in onnx.load(file).graph.node}
    else:
        import openvino

        names = {node.get_type_name() for node in openvino.Core().read_model(file).get_ops()}
    assert names and not [
        name for name in names if any(word in name.lower() for word in ("resize", "upsample", "interp"))
    ]
    for trace_of_it in (b"site-packages", str(Path.home()).encode(), b"vision_transformer.py"):
        assert trace_of_it not in content


# The model


def test_train_mode_gives_the_same_answers_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = small(drop_path_rate=0.5, proj_drop_rate=0.5)
    before = copy.deepcopy(model.state_dict())
    batch = images(5)
    outputs = []
    for mode in (False, True):
        path = tmp_path / f"{mode}.pt2"
        export_module(model.train(mode), batch, path)
        assert model.training is mode
        outputs.append(open_exported(path)[0](batch))
    assert torch.equal(*outputs) and torch.equal(outputs[0], model.eval()(batch))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_size_resamples_the_positions_once(tmp_path: Path) -> None:
    model = predictor(small())
    summary = export(model, tmp_path / "m.pt2", Options(size=(24, 48)))
    assert summary["input_size"] == [3, 24, 48]
    opened, resized = jumbo_vit.load(tmp_path / "m.pt2"), copy.deepcopy(model.model)
    resized.set_input_size((24, 48))
    batch = images(3, (24, 48))
    torch.testing.assert_close(opened(batch), resized(batch), atol=1e-5, rtol=1e-5)
    assert opened.prepare(square("red", 1, (80, 70))).shape == (3, 24, 48)
    assert model.model.patch_embed.img_size == (32, 32)


def test_a_model_of_dynamic_size_gets_constant_positions(tmp_path: Path) -> None:
    model = predictor(small(dynamic_img_size=True))
    export(model, tmp_path / "m.pt2", Options(size=(40, 24)))
    program = torch.export.load(tmp_path / "m.pt2")
    assert not [name for name in operations(program) if "upsample" in name]


def test_positions_that_stay_in_the_graph_are_refused(tmp_path: Path) -> None:
    model = timm.create_model("naflexvit_jumbo_pico_patch16", num_classes=3, depth=1)
    with pytest.raises(UserError, match="resamples its positions for each picture"):
        export(predictor(model), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_a_fixed_batch_is_filled_up(tmp_path: Path) -> None:
    model = small().eval()
    export_module(model, images(1), tmp_path / "m.pt2", batch=3)
    opened, _ = open_exported(tmp_path / "m.pt2")
    for count in (1, 3, 7):
        batch = images(count)
        torch.testing.assert_close(opened(batch), model(batch), atol=1e-5, rtol=1e-5)


def test_any_module_of_a_tensor_can_be_exported(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Upsample(scale_factor=2))
    export_module(module, torch.randn(1, 2, 8, 8), tmp_path / "m.pt2", metadata={"colours": ["ä"]})
    opened, metadata = open_exported(tmp_path / "m.pt2")
    batch = torch.randn(3, 2, 8, 8)
    torch.testing.assert_close(opened(batch), module.eval()(batch))
    assert metadata == {"colours": ["ä"]}


def test_a_module_that_cannot_be_traced_is_one_line(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(UserError, match=r"torch\.export cannot trace Branches"):
        export_module(Branches(), images(1), tmp_path / "m.pt2")


# Precisions


@pytest.mark.parametrize(
    ("format", "precision"),
    [
        ("torch", "bf16"),
        ("torch", "fp16"),
        ("torch", "int8"),
        ("onnx", "int8"),
        pytest.param("openvino", "fp16", marks=pytest.mark.slow),
        ("openvino", "int8"),
    ],
)
def test_lower_precision_is_near_and_smaller(format: str, precision: str, tmp_path: Path) -> None:
    check_installed(format, precision)
    # In a wide model the weights, not the graph, are what a file's size comes from.
    model = small(embed_dim=64)
    plain = sum(p.numel() * 4 for p in model.parameters())
    summary = export(predictor(model), tmp_path / f"m{FORMATS[format].suffix}", Options(precision=precision))
    whole = summary["differences"]["all"]
    assert 0 < whole["relative"] < 0.1 and whole["n"] == 16 == summary["pictures"]
    assert set(summary["differences"]) == {"all", "1", "2", "7"}
    weights = tmp_path / ("m.bin" if format == "openvino" else f"m{FORMATS[format].suffix}")
    assert weights.stat().st_size < plain * (0.75 if precision == "int8" else 0.85)


def test_bf16_of_openvino_is_what_it_is_asked_for(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    able = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if not able:
        with pytest.raises(UserError, match="does not compute in bf16"):
            export(predictor(small()), tmp_path / "m.xml", Options(precision="bf16"))
        return
    summary = export(predictor(small()), tmp_path / "m.xml", Options(precision="bf16"))
    # Its fp32 stays below 1e-5: see test_every_batch_size.
    assert summary["computes"] == "bf16" and summary["differences"]["all"]["relative"] > 1e-4
    assert jumbo_vit.load(tmp_path / "m.xml").labels == LABELS  # quotes, angles and a line end inside XML


def test_norms_and_softmax_of_an_fp16_onnx_are_in_fp32(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    summary = export(predictor(small()), tmp_path / "m.onnx", Options(precision="fp16"))
    assert 0 < summary["differences"]["all"]["relative"] < 0.01 and summary["computes"] == "fp32"
    assert any("fp16 is for GPUs" in note and "ran the file in fp32" in note for note in summary["notes"])
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "m.onnx")).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    kinds |= {value.name: value.data_type for value in graph.initializer}
    for node in graph.node:
        if node.op_type in ("LayerNormalization", "Softmax"):
            assert {kinds[name] for name in (*node.input, *node.output) if name in kinds} == {onnx.TensorProto.FLOAT}
        if node.op_type == "MatMul":
            assert kinds[node.output[0]] == onnx.TensorProto.FLOAT16


def test_norms_of_a_half_module_keep_their_weights() -> None:
    model = small().eval()
    half = Half(model, torch.float16)
    weight = model.blocks[0].norm3.weight
    assert torch.equal(half.module.blocks[0].norm3.norm.weight, weight) and not torch.equal(
        weight.half().float(), weight
    )
    assert half.module.blocks[0]._shared_mlp[0] is half.module.jumbo_mlp
    assert half.module.jumbo_mlp.fc1.weight.dtype == torch.float16 and half(images(2)).dtype == torch.float32


def test_what_fp16_cannot_hold_is_named(tmp_path: Path) -> None:
    model = small()
    model.jumbo_mlp.fc1.weight.data *= 1e6
    with pytest.raises(UserError, match=r"fp16 holds no number above 65504, and the output of .*: use bf16 or fp32"):
        export(predictor(model), tmp_path / "m.pt2", Options(precision="fp16"))
    assert not list(tmp_path.iterdir())
    assert export(predictor(model), tmp_path / "m.pt2", Options(precision="bf16"))["precision"] == "bf16"


def test_the_largest_value_may_be_a_weight_or_not_finite() -> None:
    model = small()
    model.norm.bias.data[0] = 7e4
    assert largest_value(model, []) == (7e4, "the weight norm.bias")
    model.blocks[0].mlp.fc2.bias.data[0] = torch.nan
    assert largest_value(model, [images(1)])[0] == torch.inf


# The verdict


def test_differences_are_measured() -> None:
    expected = torch.tensor([[3.0, 0.0, -4.0], [1.0, 2.0, 0.0]])
    found = compare(expected + torch.tensor([[0.0, 0.0, 0.2], [0.0, -1.5, 0.0]]), expected)
    assert (found.n, found.scale, found.agreement, found.finite) == (2, 4.0, 0.5, True)
    assert found.difference == pytest.approx(1.5) and found.relative == pytest.approx((2.29 / 30) ** 0.5)
    assert found.distance("fp32") == pytest.approx(1.5 / 4) and found.distance("int8") == found.relative


def test_multilabel_agreement_counts_decisions_at_the_thresholds() -> None:
    expected = torch.tensor([[2.0, -2.0], [0.1, 0.1]])
    thresholds = torch.tensor([0.5, 0.9])
    assert compare(expected + torch.tensor([[0.0, 0.0], [-0.2, 0.0]]), expected, thresholds).agreement == 0.75


@pytest.mark.parametrize(
    ("change", "precision", "tolerance", "words"),
    [
        (1e-5, "fp32", None, ""),
        (5e-3, "fp32", None, "largest difference over the largest output"),
        (5e-3, "fp32", 1e-2, ""),
        (5e-3, "fp16", None, ""),
        (1e-1, "fp16", None, "relative difference"),
        (1e-1, "bf16", 1e-3, "above 0.001"),
        (float("nan"), "fp16", None, "not finite: fp16 holds no number above 65504"),
        (float("inf"), "int8", 9.0, "not finite"),
    ],
)
def test_a_verdict_follows_the_tolerance(change: float, precision: str, tolerance: float | None, words: str) -> None:
    expected = torch.eye(3).repeat(4, 1) * 2
    outputs = expected.clone()
    outputs[0] += change
    found = verdict(compare(outputs, expected), precision, tolerance)
    assert words in found if words else found == ""


@pytest.mark.parametrize(("n", "other", "passes"), [(16, 1, True), (16, 2, False), (200, 4, True), (200, 5, False)])
def test_one_picture_of_few_may_get_another_answer(n: int, other: int, passes: bool) -> None:
    expected = torch.tensor([[1.0, 0.999]]).repeat(n, 1)
    outputs = expected.clone()
    outputs[:other] = torch.tensor([0.999, 1.0])
    found = compare(outputs, expected)
    assert (verdict(found, "int8") == "") is passes and verdict(found, "int8", 0.5) == ""


def test_past_the_tolerance_nothing_is_left_and_the_old_file_stays(tmp_path: Path) -> None:
    out = tmp_path / "m.pt2"
    out.write_text("old")
    with pytest.raises(UserError, match=r"in bf16 is not the model any more.*above 1e-09 \(--tolerance\)"):
        export(predictor(small()), out, Options(precision="bf16", tolerance=1e-9))
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"] and out.read_text() == "old"


# Auto


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([("fp32", 1.0, 0.0), ("bf16", 0.5, 0.0), ("int8", 0.4, 0.0)], "int8"),
        ([("fp32", 1.0, 0.0), ("bf16", 0.5, 0.0), ("int8", 0.4, 0.02)], "bf16"),
        ([("fp32", 1.0, 0.0), ("bf16", 0.5, 0.02), ("int8", 0.4, 0.02)], "fp32"),
        # Quantised, and slower than a form without: never, though faster than fp32.
        ([("fp32", 1.0, 0.0), ("bf16", 0.5, 0.02), ("int8", 0.6, 0.0)], "fp32"),
        ([("fp32", 1.0, 0.0), ("bf16", 0.97, 0.0)], "fp32"),
        ([("fp32", 1.0, 0.0), ("bf16", 2.0, -0.1), ("int8", 3.0, -0.1)], "fp32"),
        ([("fp32", 1.0, 0.0), ("bf16", 0.5, 0.005), ("int8", 0.49, 0.0)], "bf16"),
    ],
)
def test_the_fastest_form_within_the_drop(rows: list[tuple[str, float, float]], taken: str) -> None:
    best, reasons = choose([Measured(*row) for row in rows], max_drop=0.005)
    assert best is not None and best.precision == taken
    assert set(reasons) == {row[0] for row in rows} - {taken} and all(reasons.values())


def test_a_form_with_a_fault_is_not_taken() -> None:
    forms = [Measured("fp32", 1.0, 0.0), Measured("bf16", 0.0, 0.0, "no bf16 here")]
    best, reasons = choose(forms, 0.005)
    assert best is forms[0] and reasons == {"bf16": "no bf16 here"}
    assert choose(forms[1:], 0.005) == (None, {"bf16": "no bf16 here"})


def test_forms_take_turns_when_they_are_measured() -> None:
    calls: list[str] = []
    assert len(measure([lambda: calls.append("a"), lambda: calls.append("b")], rounds=4)) == 2
    assert calls == ["a", "b"] * 6


def test_auto_writes_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("torch", "int8")
    taken = "int8"
    monkeypatch.setattr(classifier, "measure", lambda calls: [1.0, 0.5, 0.2])
    summary = export(predictor(small()), tmp_path / "m.pt2", Options(precision="auto", max_drop=1.0))
    assert (summary["asked"], summary["precision"]) == ("auto", taken)
    assert open_exported(tmp_path / "m.pt2")[0].form.precision == taken
    assert [row["precision"] for row in summary["forms"] if not row["not_taken"]] == [taken]
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"]


# What travels


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_names_thresholds_and_lineage_travel(format: str, tmp_path: Path) -> None:
    pytest.importorskip((*FORMATS[format].to_run, "torch")[0])
    preparation = Preparation((1, 32, 32), (0.4,), (0.2,), 0.9, "squash", "bicubic")
    lineage = {"source": "ours", "license": "CC-BY-4.0", "teacher": "größer"}
    contract = Contract("multilabel", LABELS, preparation, [0.3, 0.5, 0.7], lineage)
    model = Predictor(small(in_chans=1), contract)
    out = tmp_path / f"m{FORMATS[format].suffix}"
    summary = export(model, out)
    opened = jumbo_vit.load(out)
    assert opened.contract == contract and summary["lineage"] == lineage
    pictures = [square(colour, 3, (50, 40)) for colour in ("red", "green", "blue")]
    assert [row.label for row in opened.predict(pictures)] == [row.label for row in model.predict(pictures)]


def test_pictures_without_labels_are_taken_with_a_note(run: dict[str, Any], tmp_path: Path) -> None:
    square("red", 1).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    found = pictures_of(jumbo_vit.load(run["out"]), str(tmp_path))
    assert found.targets is None and len(found.images) == 1 and found.words.startswith("1 of the 2 pictures")
    assert found.notes[0].startswith("taken without labels: ") and found.notes[1].startswith("b.png left out: ")
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"none of the 1 pictures .* can be read"):
        pictures_of(jumbo_vit.load(run["out"]), str(tmp_path))


def test_of_many_pictures_some_of_every_class_are_taken(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jumbo_vit.export.pictures.MOST", 6)
    found = pictures_of(jumbo_vit.load(run["out"]), str(colour_tree(tmp_path / "data", 7)))
    assert found.words.startswith("6 of the 21 pictures") and found.targets is not None
    assert found.targets.tolist() == [0, 0, 1, 1, 2, 2]


# Damaged and foreign files


@pytest.mark.parametrize("format", ["torch", "onnx", "openvino"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_file_is_one_line(format: str, damage: str, files: Files, tmp_path: Path) -> None:
    shutil.copytree(files(format).parent, tmp_path / "x")
    file = tmp_path / "x" / files(format).name
    data = file.read_bytes()
    file.write_bytes({"cut": data[: len(data) // 2], "garbage": os.urandom(500), "empty": b""}[damage])
    with pytest.raises(UserError) as caught:
        jumbo_vit.load(file)
    assert file.name in str(caught.value) and "\n" not in str(caught.value)


def test_an_onnx_that_we_did_not_write(tmp_path: Path, files: Files) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(files("onnx"))
    texts = {entry.key: entry.value for entry in model.metadata_props}
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UserError, match=r"was not written by jumbo-vit export: it carries no labels"):
        jumbo_vit.load(tmp_path / "m.onnx")
    for change, words in (
        ({"labels": LABELS[:2]}, "holds 2 label names for 3 classes"),
        ({"format": 99}, "is of format 99"),
    ):
        content = json.loads(texts["jumbo_vit"])
        content["jumbo_vit"] |= change
        onnx.helper.set_model_props(model, {"jumbo_vit": json.dumps(content)})
        onnx.save(model, tmp_path / "m.onnx")
        with pytest.raises(UserError, match=words):
            jumbo_vit.load(tmp_path / "m.onnx")


def test_weights_of_another_openvino_model_are_noticed(files: Files, tmp_path: Path) -> None:
    source = files("openvino")
    shutil.copy(source, tmp_path / "m.xml")
    with pytest.raises(UserError, match=r"its weights in m\.bin, which must lie beside it"):
        jumbo_vit.load(tmp_path / "m.xml")
    data = bytearray(source.with_suffix(".bin").read_bytes())
    data[1000] ^= 64
    (tmp_path / "m.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"m\.bin is damaged, or does not belong to m\.xml"):
        jumbo_vit.load(tmp_path / "m.xml")
    text = source.read_text(encoding="utf-8")
    assert text.count("weights_sha256") == 1
    foreign = text.replace("<jumbo_vit>", "<other>").replace("</jumbo_vit>", "</other>")
    for content, words in (
        (text.replace("weights_sha256", "weights_sum"), "is damaged, or not what jumbo-vit export writes"),
        (foreign, "was not written by jumbo-vit export"),
    ):
        (tmp_path / "m.xml").write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            jumbo_vit.load(tmp_path / "m.xml")


def test_a_pte_is_only_run_as_it_was_written(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    (tmp_path / "m.pte").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"m\.pte\.json, which must lie beside it"):
        jumbo_vit.load(tmp_path / "m.pte")
    (tmp_path / "m.pte.json").write_text('{"export": {"weights_sha256": "0"}}')
    with pytest.raises(UserError, match=r"m\.pte is damaged, or does not belong to m\.pte\.json"):
        jumbo_vit.load(tmp_path / "m.pte")
    (tmp_path / "m.pte.json").write_text("{")
    with pytest.raises(UserError, match=r"m\.pte\.json is damaged"):
        jumbo_vit.load(tmp_path / "m.pte")


def rewritten(source: Path, path: Path, change: Callable[[str, bytes], bytes], more: dict[str, bytes]) -> Path:
    """A .pt2 with changed entries."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        stem = old.namelist()[0].split("/")[0]
        for name in old.namelist():
            new.writestr(name, change(name.removeprefix(f"{stem}/"), old.read(name)))
        for name, data in more.items():
            new.writestr(f"{stem}/{name}", data)
    return path


def test_a_pt2_that_wants_to_run_code_is_not_opened(files: Files, tmp_path: Path) -> None:
    source, trap = files("torch"), tmp_path / "trap"
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"

    def graph(edit: Callable[[dict[str, Any]], None]) -> Callable[[str, bytes], bytes]:
        def change(name: str, data: bytes) -> bytes:
            if name != "models/model.json":
                return data
            content = json.loads(data)
            edit(content)
            return json.dumps(content).encode()

        return change

    def expression(content: dict[str, Any]) -> None:
        next(iter(content["graph_module"]["graph"]["sym_int_values"].values()))["as_expr"]["expr_str"] = code

    def guard(content: dict[str, Any]) -> None:
        content["guards_code"] = [code]

    def target(content: dict[str, Any]) -> None:
        content["graph_module"]["graph"]["nodes"][0]["target"] = "torch.hub.load"

    def name(content: dict[str, Any]) -> None:
        content["graph_module"]["graph"]["nodes"][0]["name"] = f"x = {code}"

    def pickled(name: str, data: bytes) -> bytes:
        return data.replace(b'"use_pickle": false', b'"use_pickle": true', 1) if "weights_config" in name else data

    def unchanged(_: str, data: bytes) -> bytes:
        return data

    file = tmp_path / "m.pt2"
    assert jumbo_vit.load(rewritten(source, file, unchanged, {})).labels  # so that what follows is about the change
    for change, more, words in (
        (graph(expression), {}, "its expr_str is"),
        (graph(guard), {}, "Python text"),
        (graph(target), {}, "its target is 'torch.hub.load'"),
        (graph(name), {}, "its name is"),
        (pickled, {}, "hold a pickle"),
        (unchanged, {"data/weights/model.pt": b"x"}, "it holds 'data/weights/model.pt'"),
        (unchanged, {"data/aotinductor/model/a.so": b"x"}, "it holds 'data/aotinductor/model/a.so'"),
    ):
        with pytest.raises(UserError, match="was not opened") as caught:
            jumbo_vit.load(rewritten(source, file, change, more))
        assert words in str(caught.value) and not trap.exists()


def test_a_pt2_of_torch_alone_is_not_opened(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),))
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(UserError, match=r"was not opened.*only files that jumbo-vit export wrote"):
        pt2.load(tmp_path / "m.pt2")


# The command


def test_the_command_says_what_it_did(
    run: dict[str, Any], tmp_path: Path, colours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, numbers = str(tmp_path / "m.pt2"), tmp_path / "n.json"
    words = ["export", run["out"], "--out", out, "--batch", "2", "--data", str(colours), "--json", str(numbers)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "torch, fp32" in shown and "right answers 1.0000, the model 1.0000" in shown and "12 pictures of" in shown
    summary = json.loads(numbers.read_text())
    assert summary["batch"] == 2 and set(summary["differences"]) == {"all", "2"}
    assert main(["predict", out, str(colours / "val" / "red")]) == 0
    assert capsys.readouterr().out.count(",red,") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out m.txt", r"m.txt has the ending of no format.*\.pt2 \(torch\)"),
        ("", "--out is missing"),
        ("--out m.onnx --precision bf16", "onnx has no precision 'bf16' here; use auto, fp32, fp16, int8"),
        ("--out m.pte --precision int8", "executorch has no precision 'int8' here; use auto, fp32"),
        ("--out m.onnx --format openvino", r"m.onnx ends in .onnx, and a file of the format openvino in .xml"),
        ("--out m.pt2 --batch 0", "--batch is '0', but must be dynamic, or a number"),
        ("--out m.pt2 --tolerance 0", "--tolerance is 0.0, but must be above 0"),
        ("--out m.pt2 --max-drop 2", "--max-drop is 2.0"),
        ("--out m.pt2 --img-size 30", "image size 30x30 is not a multiple of the patch size 8x8"),
        ("--out m.pt2 --data nothing", "there is no nothing"),
    ],
)
def test_mistakes(
    words: str, said: str, run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    assert main(["export", run["out"], *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_missing_runtime_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = r"needs onnxruntime.*not installed: pip install 'jumbo-vit\[export\]'"
    with pytest.raises(UserError, match=line):
        check_installed("onnx", "fp32")
    (tmp_path / "m.onnx").touch()
    with pytest.raises(UserError, match=line):
        open_exported(tmp_path / "m.onnx")
    with pytest.raises(UserError, match="torch in int8 needs torchao"):
        check_installed("torch", "int8")
    check_installed("torch", "bf16")


def test_the_table_of_formats() -> None:
    assert {format_of(f"m{row.suffix.upper()}") for row in FORMATS.values()} == set(FORMATS)
    with pytest.raises(UserError, match="did you mean openvino"):
        format_of("m.xml", "openvno")
    for name, row in FORMATS.items():
        assert set(row.automatic) <= set(row.precisions) and row.precisions[0] == "fp32"
        for precision in (*row.precisions, "auto"):
            check_precision(name, precision)


def test_a_dynamic_graph_takes_any_batch_up_to_its_largest() -> None:
    program = trace(small().eval(), images(1), Form("torch", "fp32", None, 9, (3, 32, 32)))
    (bounds,) = program.range_constraints.values()
    assert (int(bounds.lower), int(bounds.upper)) == (1, 9)
