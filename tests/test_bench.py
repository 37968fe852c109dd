"""The bench and plan commands: what they count and how they decide; no test here asks how long anything took."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jumbo_vit.errors import UserError
from jumbo_vit.measure import plan as planning
from jumbo_vit.measure.bench import PRECISIONS, peak_memory, prepared, saved_tensors, training_step
from jumbo_vit.measure.cost import attention_macs, macs
from jumbo_vit.measure.plan import Workload, costs, fit, fitting, heads, plan
from jumbo_vit.measure.profile import KINDS, kind_of, shares
from jumbo_vit.measure.roofline import Ceilings, Product, gmacs, measure_ceilings, products
from jumbo_vit.measure.timing import Timing, alternate
from jumbo_vit.sizes import BASELINE_NAMES, MODEL_NAMES, SIZES
from jumbo_vit_command import main

CPU = torch.device("cpu")
TEST_MODEL = "jumbo_vit_test_patch8_32"
WORK = Workload(pixels=32, batch=2, precision="fp32", device=CPU, num_classes=10)


def test_every_step_is_called_as_often_and_the_first_changes():
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    found = alternate(steps, repeats=4, warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(timing.seconds) for name, timing in found.items()} == {"a": 4, "b": 4, "c": 4}


def test_median_and_percentile_of_known_times():
    timing = Timing.of([0.1] * 19 + [2.1])
    assert (timing.median, timing.spread) == (0.1, 0.0)
    assert Timing.of([float(n) for n in range(1, 22)]).p95 == pytest.approx(20.0)


@pytest.mark.parametrize("name", ["jumbo_vit_pico_patch16_224", "vit_pico_patch16_reg16_224", TEST_MODEL])
def test_products_are_those_of_the_closed_form(name: str):
    size, kind = (
        (SIZES[MODEL_NAMES[name]], "jumbo") if name in MODEL_NAMES else (SIZES["pico"], BASELINE_NAMES[name][1])
    )
    images = torch.randn(2, 3, size.img_size, size.img_size)
    found = products(timm.create_model(name).eval(), images)
    assert gmacs(found) * 1e9 == pytest.approx(2 * macs(size, size.img_size, kind=kind))
    attention = sum(product.macs for product in found if not product.weights)
    assert attention == 2 * attention_macs(size, size.img_size, kind=kind)


def test_products_of_a_convolution_with_groups():
    layer = nn.Conv2d(4, 6, 3, groups=2, padding=1)
    (found,) = products(layer, torch.randn(5, 4, 8, 8))
    assert (found.rows, found.inputs, found.outputs, found.batch) == (5 * 64, 2 * 9, 3, 2)
    assert found.stored == layer.weight.numel()


def test_a_roofline_is_the_slower_of_computing_and_reading():
    ceilings = Ceilings(macs=100.0, bytes=10.0, width=2)
    computing, reading = Product(50, 4, 1), Product(1, 5, 5)
    assert ceilings.seconds([computing]) == 2.0
    assert ceilings.seconds([reading]) == 5.0
    assert ceilings.seconds([computing, reading, Product(50, 4, 1, weights=False)]) == 9.0


def test_ceilings_of_this_machine_are_rates():
    found = measure_ceilings([Product(64, 32, 16)], torch.float32, CPU, repeats=2)
    assert found.macs > 0 and found.bytes > 0 and found.width == 4


def test_saved_bytes_of_known_layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    images = torch.randn(10, 8)
    # The input, the output of ReLU (for itself and the next layer), and log-probabilities, targets and total weight.
    expected = 4 * (10 * 8 + 10 * 16 + 10 * 4) + 8 * 10
    assert expected <= saved_tensors(model, images) <= expected + 16
    assert all(parameter.grad is None for parameter in model.parameters())


def test_half_precision_saves_less():
    model, images = timm.create_model(TEST_MODEL), torch.randn(64, 3, 32, 32)
    assert saved_tensors(model, images, autocast=True) < 0.8 * saved_tensors(model, images)


def test_peak_is_what_is_alive_at_once():
    def step() -> object:
        torch.ones(1000).sum()  # gone before the next
        first, second = torch.ones(2000), torch.ones(3000)
        return first.sum() + second.sum()

    step()
    assert 20_000 <= peak_memory(step, CPU) <= 20_600  # type: ignore[operator]


def test_a_training_step_changes_a_copy():
    model = timm.create_model(TEST_MODEL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training_step(model, torch.randn(2, 3, 32, 32), autocast=True)()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_gives_the_models_answers(precision: str):
    model = timm.create_model(TEST_MODEL).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter)
    images = torch.randn(3, 3, 32, 32)
    out = prepared(model, precision)[1](images)
    assert isinstance(out, torch.Tensor) and not out.requires_grad
    assert float((out.float() - model(images)).norm() / model(images).norm()) < 0.05


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("aten::addmm", [[64], [2, 32], [32, 64]], "single-row products"),
        ("aten::addmm", [[64], [34, 32], [32, 64]], "other products"),
        ("mkldnn::_linear_pointwise", [[2, 32], [64, 32], [64]], "single-row products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[2, 2, 17, 16]] * 3, "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [[2, 2, 17, 16]] * 3, "attention"),
        ("aten::native_layer_norm", [[2, 17, 32]], "norms"),
        ("aten::mkldnn_convolution", [[2, 3, 32, 32]], "convolutions"),
        ("aten::gelu_", [[2, 64]], "values"),
        ("aten::add_", [[2, 64], [2, 64]], "values"),
        ("aten::linear", [[2, 32], [64, 32]], "starting"),
        ("aten::as_strided", [[2, 32]], "starting"),
        ("passes", [], "starting"),
    ],
)
def test_kinds_of_work(name: str, shapes: list[list[int]], kind: str):
    assert kind_of(name, shapes, batch=2) == kind


def test_shares_are_the_parts_of_a_pass():
    model, x = nn.Linear(2048, 2048), torch.randn(64, 2048)
    with torch.no_grad():
        wide = shares(lambda: model(x), batch=1, repeats=2)
        single = shares(lambda: model(x), batch=64, repeats=2)
    assert list(wide) == list(KINDS) and sum(wide.values()) == pytest.approx(1.0)
    assert wide["single-row products"] == 0 and wide["other products"] > 0
    assert single["other products"] == 0 and single["single-row products"] > 0
    assert wide["attention"] == wide["norms"] == wide["convolutions"] == 0


def test_an_unknown_precision_is_refused():
    with pytest.raises(UserError, match="did you mean bf16"):
        prepared(timm.create_model(TEST_MODEL), "bf61")


@given(st.lists(st.floats(0, 3), min_size=7, max_size=7).filter(lambda prices: sum(prices) > 0.1))
def test_the_cost_model_finds_the_prices_that_made_the_times(prices: list[float]):
    features = np.stack([costs(dim, j, depth, WORK) for dim, j, depth in planning._SAMPLES])
    true = np.array(prices) / features.max(axis=0)
    seconds = features @ true
    assert np.allclose(features @ fit(features, seconds) / seconds, 1, atol=1e-5)


def test_costs_count_what_the_model_multiplies():
    model = timm.create_model(planning.BASE, embed_dim=64, num_heads=2, num_jumbo=3, img_size=32, num_classes=10)
    found = products(model.eval(), torch.randn(2, 3, 32, 32))
    patch_embedding = 2 * 4 * 3 * 16 * 16 * 64
    mine = costs(64, 3, 12, WORK)
    assert mine[0] + mine[2] == sum(product.macs for product in found if product.weights) - patch_embedding
    assert mine[1] == sum(product.macs for product in found if not product.weights)


@given(limit=st.floats(1e-4, 10), prices=st.lists(st.floats(0, 1e-9), min_size=7, max_size=7))
def test_the_largest_j_that_fits_is_chosen(limit: float, prices: list[float]):
    found = {choice.dim: choice.num_jumbo for choice in fitting(np.array(prices), limit, WORK)}
    for dim in planning.WIDTHS:
        fits = [j for j in range(1, 13) if costs(dim, j, 12, WORK) @ np.array(prices) <= limit]
        assert found.get(dim, 0) == (max(fits) if fits else 0)


def test_every_width_has_heads_that_divide_it():
    assert all(dim % heads(dim) == 0 for dim in planning.WIDTHS)


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes a nanosecond a multiplication of the patches' layers, and nothing for all else."""

    def measure(settings: list[tuple[int, int, int]], work: Workload, repeats: int) -> tuple[list[float], list[int]]:
        return [1e-9 * float(costs(*setting, work)[0]) for setting in settings], [1000] * len(settings)

    monkeypatch.setattr(planning, "measure", measure)


@pytest.mark.usefixtures("known_machine")
def test_a_plan_measures_what_it_predicts():
    limit = 1e-9 * float(costs(192, 12, 12, WORK)[0]) * 1.0001
    choices, error = plan(limit, WORK)
    assert error < 1e-6
    assert {choice.dim: choice.num_jumbo for choice in choices}[192] == 12
    assert all(choice.measured == pytest.approx(choice.predicted) for choice in choices[-6:])
    assert all(choice.measured <= limit for choice in choices[-6:])  # type: ignore[operator]


@pytest.mark.usefixtures("known_machine")
class TestPlanCommand:
    def test_a_table(self, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        file = tmp_path / "plan.json"
        assert main(["plan", "--images-per-second", "50", "--size", "32", "--json", str(file)]) == 0
        assert "fits" in capsys.readouterr().out
        content = json.loads(file.read_text())
        assert content["limit_s"] == 0.02 and content["choices"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "give one of"),
            (["--latency-ms", "3", "--images-per-second", "3"], "give one of"),
            (["--latency-ms", "-3"], "must be a positive number"),
            (["--latency-ms", "1e13"], "must be a positive number"),
            (["--latency-ms", "3", "--size", "30"], "multiple of the patch"),
            (["--latency-ms", "1e-9", "--size", "32"], "no width from 64"),
        ],
    )
    def test_refusals(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
        assert main(["plan", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


class TestBenchCommand:
    def test_a_profile(self, capsys: pytest.CaptureFixture[str]):
        words = ["--size", "32", "--batch-sizes", "1", "--repeats", "3", "--profile"]
        main(["bench", "--models", TEST_MODEL, *words])
        assert f"{TEST_MODEL} fp32 at batch 1: single-row products " in capsys.readouterr().out

    def test_rows_in_every_form(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        files = {kind: tmp_path / f"bench.{kind}" for kind in ("csv", "json", "png")}
        words = ["--models", f"{TEST_MODEL},vit_micro_cls", "--batch-sizes", "1", "3", "--size", "32", "--repeats", "3"]
        words += ["--precision", "fp32", "optimized-int8-jumbo", "--training", "--csv", str(files["csv"])]
        assert main(["bench", *words, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
        assert "not measured: vit_micro_cls in optimized-int8-jumbo" in capsys.readouterr().out
        content: dict[str, Any] = json.loads(files["json"].read_text())
        rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
        assert len(rows) == len(content["rows"]) == 6
        assert {(row["model"], row["batch"]) for row in rows} == {
            (m, b) for m in (TEST_MODEL, "vit_micro_cls") for b in "13"
        }
        first = content["rows"][0]
        assert first["baseline_ratio"] == 1.0
        assert first["images_per_second"] == pytest.approx(1 / first["latency_median"])
        assert first["share_of_limit"] == pytest.approx(first["roofline"] / first["latency_median"])
        assert files["png"].read_bytes().startswith(b"\x89PNG")

    def test_a_model_folder(self, run: dict[str, Any], capsys: pytest.CaptureFixture[str]):
        folder = str(Path(run["out"]) / "model")
        assert main(["bench", "--models", folder, "--batch-sizes", "1", "--size", "32", "--repeats", "3"]) == 0
        assert main(["bench", "--models", folder, "--batch-sizes", "1", "--size", "48", "--repeats", "3"]) == 2
        assert "give --size 32x32" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--models", "jumbo_vit_picco"], "did you mean jumbo_vit_pico"),
            (["--models", ","], "--models is empty"),
            (["--models", TEST_MODEL, "--size", "30"], "multiple of the patch"),
            (["--models", TEST_MODEL, "--batch-sizes", "0"], "at least 1"),
            (["--models", TEST_MODEL, "--repeats", "2"], "at least 3"),
            (["--models", "levit_128s", "--size", "40"], "does not take pictures of 40x40"),
            (["--models", "resnet18", "--size", "32", "--precision", "optimized-bf16"], "nothing could be measured"),
        ],
    )
    def test_refusals(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
        assert main(["bench", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
