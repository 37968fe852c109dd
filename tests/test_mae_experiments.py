"""Masked pre-training in small: what is run and kept, going on after a stop, and what the tables say."""

import contextlib
import importlib
import json
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy import stats

import jumbo_vit
from jumbo_vit.errors import UserError
from jumbo_vit_command import main
from tests.pictures import TEST_MODEL

SCRIPTS = Path(__file__).parents[1] / "scripts"
MODELS = ["vit_test_patch8_cls_32", "vit_test_patch8_reg16_32", TEST_MODEL]
CLS, REGISTERS, JUMBO = "vit_micro_cls", "vit_micro_reg16", "jumbo_vit_micro"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("mae_experiments")
    monkeypatch.setattr(module, "SIZES", (32, 8))
    return module


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("mae_tables")


def options(script: Any, place: Path, data: Path | str = "pictures", **changes: Any) -> Namespace:
    shared = {"batch_size": 8, "epochs": 1, "workers": 0, "logger": "none", "precision": "fp32"}
    (place / "zoo.yaml").write_text(yaml.safe_dump({**shared, "lr": 0.002}))
    mae = {"method": "mae", "decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2, "scale": [0.8, 1.0]}
    (place / "mae.yaml").write_text(yaml.safe_dump({**shared, **mae}))
    words = ["--tiny", str(data), "--seeds", "1", "--tiny-epochs", "1"]
    words += ["--recipe", str(place / "zoo.yaml"), "--mae-recipe", str(place / "mae.yaml")]
    for name in ("zoo", "work", "out"):
        words += [f"--{name}", str(place / name)]
    args: Namespace = script.read_options([*words, "--models", *MODELS])
    return Namespace(**vars(args) | changes)


class Here:
    """Commands in this process, with a fault at one of them; probes with one rate and epoch."""

    def __init__(self, stop_at: str = "", code: int = 143) -> None:
        self.calls: list[list[str]] = []
        self.stop_at, self.code = stop_at, code

    def __call__(self, words: list[str], log: Path) -> int:
        self.calls.append(words)
        if self.stop_at in words:
            log.write_text("first\nwhat was wrong\n")
            return self.code
        with log.open("a") as file, contextlib.redirect_stdout(file):
            return main([*words, "--rates", "0.1", "--epochs", "1"] if words[0] == "probe" else words)


def test_from_first_weights_to_the_tables_and_on_after_a_stop(script: Any, tmp_path: Path, colours: Path) -> None:
    args = options(script, tmp_path, colours)
    stopping = Here(stop_at=f"{tmp_path}/work/{MODELS[1]}/seed-0/fine-tune")
    assert script.experiment(args, stopping) == [f"{MODELS[1]}, seed 0: fine-tune was stopped, start again to go on"]
    words = [call[0] for call in stopping.calls]
    assert words == ["probe", "pretrain", "probe", "train"] * 3
    write_scratch(args, TEST_MODEL, top1=0.25)
    again = Here()
    missing = script.experiment(args, again)
    assert [call[0] for call in again.calls] == ["train"]  # what is finished is not run again
    assert missing == [f"{model}, seed 0: scratch is missing" for model in MODELS[:2]]
    for model in MODELS:
        check_kept(args, model)
    content = json.loads((args.out / "mae.json").read_text())
    kinds = {model: [r["features"] for r in content["features"] if r["model"] == model] for model in MODELS}
    assert {"class", "patches"} <= {*kinds[MODELS[0]]} and "pieces" not in kinds[MODELS[0]]
    assert all({"pieces", "mean", "patches"} <= {*kinds[model]} for model in MODELS[1:])
    assert {row["scored"] for row in content["questions"]} == {1}
    fine = content["fine_tuning"][2]
    assert fine["gain"]["mean"] == pytest.approx(fine["fine_tuned"]["mean"] - 0.25)
    readme = (args.out / "README.md").read_text()
    assert "scratch is missing" in readme and str(tmp_path / "work") not in readme
    assert (args.out / "mae.png").read_bytes().startswith(b"\x89PNG")


def write_scratch(args: Namespace, model: str, top1: float) -> None:
    """A row as the zoo writes it, of the same pictures and updates as the fine-tuning."""
    row = json.loads((args.out / model / "seed-0" / "fine-tune" / "run.json").read_text())
    row["options"] = {name: value for name, value in row["options"].items() if name not in ("preset", "layer_decay")}
    folder = args.zoo / "tiny-imagenet-100" / model / "seed-0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**row, "top1": 0.5, "top1_before_rounding": top1}))


def check_kept(args: Namespace, model: str) -> None:
    kept, work = args.out / model / "seed-0", args.work / model / "seed-0"
    rows = {name: json.loads((kept / name / "run.json").read_text()) for name in ("pretrain", "fine-tune")}
    probes = {name: json.loads((kept / f"{name}.json").read_text()) for name in ("untrained", "probe")}
    assert probes["probe"]["of"] == rows["pretrain"]["encoder"] == rows["fine-tune"]["start"]
    assert probes["untrained"]["of"] != probes["probe"]["of"]
    assert rows["pretrain"]["updates"] == rows["fine-tune"]["updates"] == 3
    assert rows["fine-tune"]["loaded"].startswith("loaded ")
    log = (kept / "fine-tune" / "metrics.csv").read_text().splitlines()
    assert float(log[1].split(",")[log[0].split(",").index("val_top1")]) == pytest.approx(rows["fine-tune"]["top1"])
    half = load_file(kept / "pretrain" / "model.safetensors")
    whole = load_file(work / "pretrain" / "model" / "model.safetensors")
    assert all(torch.equal(half[name], value.half()) for name, value in whole.items())
    assert jumbo_vit.load(kept / "pretrain").contract.lineage["stored_as"] == "float16"
    assert not list(work.glob("*-features"))
    everything = json.dumps([rows, probes])
    assert str(args.work) not in everything and args.tiny not in everything


def test_pretraining_begins_with_the_first_weights_and_goes_on(script: Any, tmp_path: Path, colours: Path) -> None:
    args = options(script, tmp_path, colours)
    (chain,) = (chain for chain in script.chains_of(args) if chain.fine.model == TEST_MODEL)
    script.make_untrained(chain)
    words = script.words_of(chain.pretrain)
    words[0] = "pretrain"
    assert main([*words, "--lr", "0", "--min-lr", "0", "--weight-decay", "0"]) == 0
    first = load_file(chain.untrained / "model.safetensors")
    begun = load_file(chain.encoder / "model.safetensors")
    assert first.keys() == begun.keys() and all(torch.equal(first[name], begun[name]) for name in first)
    again = Here()  # the run is gone on with, and what is finished kept
    assert script.train(chain, chain.pretrain, "pretrain", again) == ""
    assert again.calls == [["pretrain", "--resume", str(chain.pretrain.work)]]
    assert script.finished_row(chain.pretrain)["epochs"] == 1
    assert script.train(chain, chain.pretrain, "pretrain", again) == "" and len(again.calls) == 1


def test_nothing_but_the_start_sets_fine_tuning_apart(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = script.read_options(["--tiny", "pictures", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")])
    args.mae_recipe = options(script, tmp_path).mae_recipe
    chains = script.chains_of(args)
    names = [(chain.fine.seed, chain.fine.model) for chain in chains]
    assert names == [(seed, model) for seed in range(3) for model in script.MODELS]
    for chain in chains:
        script.check(chain)
        assert chain.fine.options == {**chain.scratch, "preset": "scratch", "layer_decay": 1.0}
        same = ("model", "img_size", "patch_size", "seed")
        assert all(chain.fine.options[name] == chain.pretrain.options[name] for name in same)
    monkeypatch.setattr(script, "START", {})
    with pytest.raises(UserError, match="would differ from training from scratch in layer_decay, preset"):
        script.check(script.chains_of(args)[0])


def test_other_options_are_refused(script: Any, tmp_path: Path) -> None:
    args = options(script, tmp_path)
    chain = script.chains_of(args)[0]
    script.words_of(chain.pretrain)
    script.check(chain)
    args.mae_recipe.write_text(args.mae_recipe.read_text().replace("epochs: 1", "epochs: 2"))
    with pytest.raises(UserError, match="trained with epochs 1, and would now be with 2"):
        script.check(script.chains_of(args)[0])


@pytest.mark.parametrize(
    ("code", "words"),
    [(2, "failed (what was wrong)"), (-15, "was stopped, start again to go on"), (130, "was stopped, start again")],
)
def test_how_a_command_ended_is_said(script: Any, tmp_path: Path, code: int, words: str) -> None:
    chain = script.chains_of(options(script, tmp_path))[0]
    script.make_untrained(chain)
    ending = Here(stop_at=str(chain.untrained), code=code)
    assert script.run(chain, ending).startswith(f"{MODELS[0]}, seed 0: untrained {words}") and len(ending.calls) == 1


def test_an_encoder_that_is_gone(script: Any, tmp_path: Path) -> None:
    chain = script.chains_of(options(script, tmp_path))[0]
    chain.pretrain.kept.mkdir(parents=True)
    (chain.kept / "untrained.json").write_text("{}")
    (chain.pretrain.kept / "run.json").write_text(json.dumps({"options": chain.pretrain.options}))
    assert script.run(chain, Here()) == (
        f"{chain.name}: {chain.encoder} is gone: remove {chain.pretrain.kept} to pre-train again"
    )


def test_without_data_the_tables_alone_are_written(script: Any, tmp_path: Path) -> None:
    args = options(script, tmp_path, tiny=None)
    assert len(script.experiment(args, None)) == 15  # five steps of three models
    assert "| 0 | no pair of runs |" in (args.out / "README.md").read_text()


KINDS = {
    CLS: {"class": 64, "patches": 64},
    REGISTERS: {"pieces": 1088, "mean": 64, "class": 64, "patches": 64},
    JUMBO: {"pieces": 384, "mean": 64, "patches": 64},
}


def made_row(**more: Any) -> dict[str, Any]:
    return {"commit": "c", "machine": {"cpu": "x"}, **more}


def score(model: str, kind: str, seed: int, step: str) -> float:
    """A made accuracy, whose differences between models depend on the seed a little."""
    place = [*KINDS].index(model) + [*KINDS[model]].index(kind) / 10
    return 0.2 + 0.1 * (step != "untrained") + 0.03 * place + 0.01 * seed + 0.002 * place * seed**2


def made(tables: Any, model: str, seed: int, without: str = "") -> Any:
    rows: dict[str, Any] = {}
    for step in ("untrained", "probe"):
        chosen = [
            {"features": kind, "width": width, "top1": (top1 := score(model, kind, seed, step)), "knn_top1": top1 / 2}
            for kind, width in KINDS[model].items()
        ]
        rows[step] = made_row(chosen=chosen)
    numbers = {"masked_error": 0.5, "best_epoch": 11, "epochs": 12, "seconds": 480.4, "skipped_updates": 0}
    rows["pretrain"] = made_row(updates=4692, **numbers)
    place = [*KINDS].index(model)
    rows["fine-tune"] = made_row(top1=0.4 + 0.1 * place + 0.001 * seed, updates=4170)
    rows["scratch"] = made_row(top1_before_rounding=0.39 + 0.1 * place - 0.001 * seed**2)
    rows |= {name: None for name in [without] if name}
    faults = [f"{model}, seed {seed}: {without} is missing"] if without else []
    return tables.Found(model, seed, rows, faults)


def plain(differences: list[float]) -> tuple[float, float, float]:
    """Mean and interval of the mean, written out."""
    mean, count = sum(differences) / len(differences), len(differences)
    reach = stats.t.ppf(0.975, count - 1) * statistics.stdev(differences) / count**0.5
    return mean, mean - reach, mean + reach


def test_the_tables_compare_what_they_say(tables: Any) -> None:
    found = [made(tables, model, seed) for seed in range(3) for model in KINDS]
    content = tables.summarise("command", found, list(KINDS))
    assert content["missing"] == []
    expected = {
        ("the paper's: pieces against class token", CLS, "class", "pieces"),
        ("equal kind: all global tokens, concatenated", REGISTERS, "pieces", "pieces"),
        ("equal width: mean of the pieces against class token", CLS, "class", "mean"),
        ("equal width: mean of all global tokens", REGISTERS, "mean", "mean"),
        ("equal width: mean of the patches", CLS, "patches", "patches"),
        ("equal width: mean of the patches", REGISTERS, "patches", "patches"),
    }
    for measure, share in (("linear", 1.0), ("k-NN", 0.5)):
        rows = [row for row in content["questions"] if row["measure"] == measure]
        assert {(r["question"], *r["first"], r["other"][1]) for r in rows} == expected
        for row in rows:
            assert row["other"][0] == JUMBO
            sides = [[share * score(*row[side], seed, "probe") for seed in range(3)] for side in ("first", "other")]
            mean, low, high = plain([b - a for a, b in zip(*sides, strict=True)])
            assert [row["mean"], *row["interval"]] == pytest.approx([mean, low, high])
            assert row["verdict"] == ("higher" if low > 0 else "lower" if high < 0 else "not resolved")
    whole = [row for row in content["questions"] if row["measure"] == "fine-tuned"]
    assert [(row["first"][0], round(row["mean"], 9)) for row in whole] == [(CLS, 0.2), (REGISTERS, 0.1)]
    for row in content["fine_tuning"]:
        mean, low, high = plain([0.01, 0.012, 0.016])
        assert [row["gain"]["mean"], *row["gain"]["interval"]] == pytest.approx([mean, low, high])
    (row,) = (r for r in content["features"] if (r["model"], r["features"]) == (JUMBO, "pieces"))
    assert row["width"] == 384 and row["linear"]["gain"]["mean"] == pytest.approx(0.1)
    assert row["k-NN"]["first_weights"]["mean"] == pytest.approx(
        sum(score(JUMBO, "pieces", seed, "untrained") for seed in range(3)) / 6
    )
    text = tables.markdown(content)
    assert f"| `{REGISTERS}`, pieces (1088) | `{JUMBO}`, pieces (384) |" in text
    assert f"| `{JUMBO}` | 0.5000 / 0.5000 / 0.5000 | 11 / 11 / 11 | 12 / 12 / 12 |" in text
    assert "Not finished" not in text


def test_what_is_missing_is_said_and_has_no_part(tables: Any, tmp_path: Path) -> None:
    found = [
        made(tables, model, seed, "probe" if (model, seed) == (CLS, 1) else "") for seed in range(3) for model in KINDS
    ]
    content = tables.summarise("command", found, list(KINDS))
    counts = {row["question"]: row["scored"] for row in content["questions"] if row["first"][0] == CLS}
    assert counts["the paper's: pieces against class token"] == 2 and counts["all weights"] == 3
    text = tables.markdown(content)
    assert f"**Not finished.** What is missing has no part in the figures:\n\n- {CLS}, seed 1: probe is missing" in text
    tables.draw(content, tmp_path / "mae.png")
    assert (tmp_path / "mae.png").stat().st_size > 1000


def test_rows_that_do_not_belong_together_are_left_out(tables: Any, tmp_path: Path) -> None:
    same = {"updates": 8, "images": {"train": 5}}
    rows: dict[str, dict[str, Any]] = {
        "untrained.json": {},
        "probe.json": {"of": "another"},
        "pretrain/run.json": {"encoder": "this"},
        "fine-tune/run.json": {"start": "this", **same},
        "scratch.json": {"options": {"epochs": 6}, **same},
    }
    for name, row in rows.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(row))
    read = tables.read("m", 0, tmp_path, tmp_path / "scratch.json", {"epochs": 6})
    assert read.faults == ["m, seed 0: probe is of another pre-training, and is left out"]
    assert read.rows["probe"] is None and read.rows["scratch"] is not None
    (tmp_path / "scratch.json").write_text(json.dumps({"options": {"epochs": 3}, "updates": 4, "images": {"train": 5}}))
    read = tables.read("m", 0, tmp_path, tmp_path / "scratch.json", {"epochs": 6})
    assert read.rows["scratch"] is None
    assert read.faults[1] == "m, seed 0: the run from scratch has other options and updates, and is left out"
