"""`jumbo-vit reconstruct`: what is shown of a masked autoencoder, from whose weights, and what is refused."""

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

from jumbo_vit.cli.parser import main
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import reconstruct as module
from jumbo_vit.tasks.masked import MaskedLearner, pixel_targets
from jumbo_vit.tasks.masked_run import Trained, open_trained
from jumbo_vit.tasks.pretrain import pretrain
from jumbo_vit.tasks.pretrain_config import PretrainConfig
from jumbo_vit.tasks.reconstruct import reconstruct, sheet
from tests.pictures import TEST_MODEL
from tests.runs import digit_pictures, small_options

STD = {1: (0.25,), 3: (0.2, 0.3, 0.4)}
MEAN = {1: (0.4,), 3: (0.5, 0.4, 0.3)}
CASES = [
    pytest.param(size, chans, per_patch, id=f"{size[0]}x{size[1]}-{chans}-{'patch' if per_patch else 'plain'}")
    for size in ((32, 32), (16, 40))
    for chans in (1, 3)
    for per_patch in (False, True)
]


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights; not to be changed."""
    out = tmp_path_factory.mktemp("mae") / "run"
    pretrain(PretrainConfig(**small_options(method="mae", out=str(out), epochs=2, lr=1e-3, model_ema=True)))
    return out


@pytest.fixture
def own_run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of that run, which may be spoilt."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def noise(size: tuple[int, int], chans: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (*size, chans), dtype=np.uint8)
    return Image.fromarray(values if chans == 3 else values[..., 0])


def values_of(picture: Image.Image) -> Tensor:
    """(C, H, W) in 0..1."""
    array = torch.from_numpy(np.array(picture)).float() / 255
    return array.permute(2, 0, 1) if array.ndim == 3 else array[None]


def made(size: tuple[int, int], chans: int, per_patch: bool) -> Trained:
    encoder = timm.create_model(TEST_MODEL, img_size=size, in_chans=chans, num_classes=0)
    preparation = Preparation((chans, *size), MEAN[chans], STD[chans])
    learner = MaskedLearner(encoder, preparation, 0.75, 16, 1, 2, learned=False, seed=0)
    return Trained(learner.eval(), preparation, per_patch, {}, [])


def answered_by(monkeypatch: pytest.MonkeyPatch, trained: Trained, answer: Any) -> None:
    """Let `answer(images, places)` stand for encoder and decoder."""
    learner = trained.learner
    monkeypatch.setattr(learner, "forward", lambda images, order: answer(images, learner.masked(order)))
    monkeypatch.setattr(module, "open_trained", lambda *_: trained)


def hidden(size: tuple[int, int], shown: Any) -> Tensor:
    """Where the masked panel is grey, (gh, gw); a patch is 8x8 and noise is never grey all over."""
    cut = (shown.masked == 0.5).reshape(len(shown.masked), size[0] // 8, 8, size[1] // 8, 8)
    return cut.all(0).all(1).all(2)


# Pixels


@pytest.mark.parametrize(("size", "chans", "per_patch"), CASES)
def test_a_decoder_that_knows_the_targets_gives_the_picture_back(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], chans: int, per_patch: bool
) -> None:
    trained = made(size, chans, per_patch)
    grid = trained.learner.grid
    answered_by(monkeypatch, trained, lambda images, places: pixel_targets(images, grid, places, per_patch))
    pictures = [noise(size, chans, seed) for seed in range(3)]
    found = reconstruct("run", pictures)
    assert [shown.path for shown in found.pictures] == ["#0", "#1", "#2"]
    assert (found.patches, found.kept) == (math.prod(size) // 64, math.prod(size) // 64 // 4)
    for picture, shown in zip(pictures, found.pictures, strict=True):
        whole = values_of(picture)
        torch.testing.assert_close(shown.original, whole, atol=1e-6, rtol=0)
        torch.testing.assert_close(shown.reconstructed, whole, atol=1e-6, rtol=0)
        places = hidden(size, shown)
        assert int(places.sum()) == found.patches - found.kept
        seen = ~places.repeat_interleave(8, 0).repeat_interleave(8, 1)
        assert torch.equal(shown.masked[:, seen], shown.original[:, seen])
        assert shown.masked_error < 1e-10 and shown.mse < 1e-10


@pytest.mark.parametrize(("size", "chans", "per_patch"), CASES)
def test_a_decoder_that_says_zero_shows_means_and_its_error_is_that_of_the_panels(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], chans: int, per_patch: bool
) -> None:
    trained = made(size, chans, per_patch)
    answered_by(monkeypatch, trained, lambda images, places: torch.zeros(*places.shape, 64 * chans))
    found = reconstruct("run", noise(size, chans)).pictures[0]
    places = hidden(size, found)
    seen = ~places.repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert torch.equal(found.reconstructed[:, seen], found.original[:, seen])
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN[chans], STD[chans]))
    prepared = (found.original - mean) / std
    for row, column in places.nonzero().tolist():
        window = (slice(None), slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8))
        # Of a patch all channels are normalised together.
        level = prepared[window].mean() * std + mean if per_patch else mean
        torch.testing.assert_close(found.reconstructed[window], level.clamp(0, 1).expand(-1, 8, 8), atol=1e-5, rtol=0)
    # Nothing is cut off at 0 or 1 here, so that the error can be taken from the panels.
    foretold = found.reconstructed[:, ~seen]
    assert foretold.min() > 0 and foretold.max() < 1
    true, foretold = (((panel - mean) / std)[:, ~seen].double() for panel in (found.original, found.reconstructed))
    squares = (true - foretold).square()
    assert found.mse == pytest.approx(float(squares.mean()), rel=1e-4)
    spread = (true - true.mean(1, keepdim=True)).square()
    assert found.masked_error == pytest.approx(float(squares.sum() / spread.sum()), rel=1e-4)


def test_values_beyond_the_range_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = made((32, 32), 1, False)
    answered_by(monkeypatch, trained, lambda images, places: torch.full((*places.shape, 64), 1e4))
    shown = reconstruct("run", noise((32, 32), 1)).pictures[0]
    assert shown.reconstructed.max() == 1 and shown.mse > 1e7
    places = hidden((32, 32), shown).repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert (shown.reconstructed[:, places] == 1).all()


def test_a_picture_of_one_colour_has_no_share_of_its_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = made((32, 32), 3, False)
    answered_by(monkeypatch, trained, lambda images, places: torch.zeros(*places.shape, 192))
    shown = reconstruct("run", Image.new("RGB", (32, 32), (200, 30, 30))).pictures[0]
    assert math.isnan(shown.masked_error) and shown.mse > 0


def test_what_is_not_finite_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = made((32, 32), 1, False)

    def answer(images: Tensor, places: Tensor) -> Tensor:
        foretold = torch.zeros(*places.shape, 64)
        foretold[:1] = math.nan
        return foretold

    answered_by(monkeypatch, trained, answer)
    found = reconstruct("run", [noise((32, 32), 1, seed) for seed in range(2)])
    assert [shown.path for shown in found.pictures] == ["#1"]
    assert [(item.path, item.reason) for item in found.unreadable] == [("#0", "the decoder's output is not finite")]
    with pytest.raises(UserError, match=r"none of the 1 pictures could be reconstructed, such as #0: the decoder's"):
        reconstruct("run", noise((32, 32), 1))


def test_masks_follow_seed_and_position(trained_run: Path) -> None:
    pictures = [noise((8, 8), 1, 1), noise((8, 8), 1, 1), noise((8, 8), 1, 1)]
    first, again, other = (reconstruct(trained_run, pictures, seed=seed).pictures for seed in (0, 0, 1))
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left.masked, right.masked) and torch.equal(left.reconstructed, right.reconstructed)
    assert not torch.equal(first[0].masked, other[0].masked)
    assert not torch.equal(first[0].masked, first[1].masked)
    fewer = reconstruct(trained_run, [noise((8, 8), 1, 2), pictures[1]]).pictures
    assert torch.equal(fewer[1].masked, first[1].masked)


@pytest.mark.parametrize(("ratio", "kept"), [(None, 4), (0.5, 8), (0.01, 15), (0.99, 1)])
def test_the_share_that_is_masked(trained_run: Path, ratio: float | None, kept: int) -> None:
    found = reconstruct(trained_run, noise((8, 8), 1), ratio)
    assert (found.patches, found.kept) == (16, kept)
    assert int((found.pictures[0].masked == 0.5).sum()) == 4 * (16 - kept)


# Weights


def test_the_weights_are_those_of_the_checkpoint(trained_run: Path) -> None:
    content = torch.load(trained_run / "last.ckpt", weights_only=True)
    plain, averaged = open_trained(trained_run), open_trained(trained_run / "last.ckpt", averaged=True)
    for name, value in plain.learner.state_dict().items():
        assert torch.equal(value, content["model"][name])
        assert torch.equal(averaged.learner.state_dict()[name], content["average"][f"module.{name}"])
    assert not torch.equal(plain.learner.decoder.predict.bias, averaged.learner.decoder.predict.bias)
    assert plain.origin["weights"] == "plain" and averaged.origin["weights"] == "averaged"
    assert (plain.origin["epoch"], plain.origin["updates"]) == (2, 16)
    assert plain.notes == ["The run kept averaged weights too: --averaged shows what these do."]
    assert averaged.notes == [] and not plain.learner.training
    mean, std = plain.preparation.mean, plain.preparation.std
    assert len(mean) == len(std) == 1 and plain.preparation.input_size == (1, 8, 8)


def test_a_run_says_how_to_look_at_it_and_its_targets_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pretrain(PretrainConfig(**small_options(method="mae", out="a run", epochs=1, norm_pix_loss=True)))
    line = next(line for line in capsys.readouterr().out.splitlines() if "jumbo-vit reconstruct" in line)
    words = shlex.split(line)
    assert words == ["jumbo-vit", "reconstruct", "a run", "PICTURE.png", "--png", "masked.png"]
    words[3] = str(next(Path(digit_pictures()).rglob("*.png")))
    assert main(words[1:]) == 0 and (tmp_path / "masked.png").is_file()
    out = tmp_path / "a run"
    assert open_trained(out).per_patch
    text = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(text.replace("norm_pix_loss: true", "norm_pix_loss: false"))
    with pytest.raises(UserError, match=r"are of different runs, they differ in norm_pix_loss$"):
        open_trained(out)


def test_the_state_before_the_last(own_run: Path) -> None:
    (own_run / "last.ckpt").unlink()
    trained = open_trained(own_run)
    assert trained.origin["checkpoint"] == str(own_run / "previous.ckpt")
    assert "last.ckpt is missing, so" in trained.notes[0]
    assert (trained.origin["epoch"], trained.origin["updates"]) != (2, 16)


@pytest.mark.parametrize(
    ("progress", "name", "line"),
    [
        ({}, "last.ckpt", "plain weights after 2 epochs, the run's last, the best so far"),
        ({"best_weights": "averaged"}, "last.ckpt", "the run's last; the best are the averaged ones of epoch 2"),
        ({"best_epoch": 1}, "last.ckpt", "the run's last; the best are the plain ones of epoch 1"),
        (
            {"update": 3},
            "last.ckpt",
            "2 epochs and 3 updates of the next, the run's last; the best are the plain ones of epoch 2",
        ),
        ({"best_epoch": 0}, "previous.ckpt", "after 2 epochs, of a state that is not the run's last"),
    ],
)
def test_the_output_says_which_weights(
    own_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: dict[str, Any], name: str, line: str
) -> None:
    content = torch.load(own_run / "last.ckpt", weights_only=True)
    content["progress"] |= {"best_epoch": 2, "best_weights": "plain"} | progress
    torch.save(content, own_run / name)
    noise((8, 8), 1).save(tmp_path / "a.png")
    assert main(["reconstruct", f"{own_run}/{name}", f"{tmp_path}/a.png", "--png", f"{tmp_path}/b.png"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{own_run}/{name}: plain weights") and first.endswith(line)


# The sheet and the command


@pytest.mark.parametrize(("size", "chans", "zoom"), [((8, 8), 1, 20), ((16, 40), 3, 4), ((240, 200), 3, 1)])
def test_the_sheet(size: tuple[int, int], chans: int, zoom: int) -> None:
    panels = [values_of(noise(size, chans, seed)) for seed in range(6)]
    rows = [module.Reconstruction("a", *panels[:3], 0.0, 0.0), module.Reconstruction("b", *panels[3:], 0.0, 0.0)]
    page = sheet(rows)
    high, wide = size[0] * zoom, size[1] * zoom
    assert page.mode == "RGB" and page.size == (3 * (wide + 8) + 8, 22 + 2 * (high + 8))
    drawn = torch.from_numpy(np.array(page))
    for index, panel in enumerate(panels):
        left, top = 8 + index % 3 * (wide + 8), 22 + index // 3 * (high + 8)
        part = drawn[top : top + high, left : left + wide]
        sharp = panel.mul(255).round().byte().repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
        assert torch.equal(part, sharp.expand(3, -1, -1).permute(1, 2, 0))
    # Titles stand above the panels, and nowhere else is there anything but white.
    assert all((drawn[:22, 8 + i * (wide + 8) :][:, :wide] < 128).any() for i in range(3))
    assert (drawn[22 + high : 30 + high] == 255).all()


def test_narrow_panels_leave_room_for_their_titles() -> None:
    panel = torch.zeros(1, 240, 16)
    page = np.array(sheet([module.Reconstruction("a", panel, panel, panel, 0.0, 0.0)]))
    columns = np.flatnonzero((page[22:262, :, 0] == 0).all(0))
    assert len(columns) == 48 and page.shape[1] > 3 * 80
    gaps = np.flatnonzero(np.diff(columns) > 1)
    assert len(gaps) == 2


def test_a_sheet_that_nothing_opens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    panel = torch.zeros(1, 8, 8)
    with pytest.raises(UserError, match=r"a sheet of 1 pictures would be \d+x\d+ pixels: lower --max-images"):
        sheet([module.Reconstruction("a", panel, panel, panel, 0.0, 0.0)])


def test_the_command(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for seed in range(4):
        noise((8, 8), 3, seed).save(tmp_path / "in" / f"{seed}.png")
    Image.new("L", (8, 8), 77).save(tmp_path / "in" / "flat\nline.png")
    (tmp_path / "in" / "0.txt").touch()
    (tmp_path / "in" / "00.png").write_bytes(b"no picture")
    png, numbers = tmp_path / "new" / "p.png", tmp_path / "new" / "n.json"
    words = ["reconstruct", str(trained_run), f"{tmp_path}/in", "--png", str(png), "--json", str(numbers)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{trained_run}/last.ckpt: plain weights after 2 epochs, the run's last")
    assert "4 of 16 patches are seen, 12 are masked" in lines
    content = json.loads(numbers.read_text())
    assert [row["path"] for row in content["pictures"]] == ["0.png", "1.png", "2.png", "3.png", "flat\nline.png"]
    for row in content["pictures"][:4]:
        error = f"{row['path']}: masked error {row['masked_error']:.4f} of the variance "
        assert f"{error}(mean squared error {row['mse']:.4f})" in lines
    assert content["pictures"][4]["masked_error"] is None
    assert any(line.startswith(r"flat\nline.png: masked pixels all the same") for line in lines)
    assert content["unreadable"] == [{"path": "00.png", "reason": "is not a picture"}]
    assert [item["path"] for item in content["skipped"]] == ["0.txt"]
    assert (content["mask_ratio"], content["patches"], content["kept_patches"], content["seed"]) == (0.75, 16, 4, 0)
    assert lines[-2:] == [
        "skipped 00.png: is not a picture",
        f"5 pictures in {png}, 1 skipped, 1 other files left out, such as 0.txt",
    ]
    with Image.open(png) as page:
        assert page.size == (3 * 168 + 8, 22 + 5 * 168) and page.format == "PNG"
    before = png.read_bytes()
    assert main(words) == 0 and png.read_bytes() == before
    assert main([*words, "--seed", "1"]) == 0 and png.read_bytes() != before
    capsys.readouterr()
    assert main([*words, "--max-images", "2", "--averaged", "--mask-ratio", "0.5"]) == 0
    said = capsys.readouterr().out
    assert ": averaged weights after 2 epochs" in said and "8 of 16 patches are seen, 8 are masked" in said
    assert "2 pictures in" in said and "1 skipped, 3 more pictures left out (--max-images 2)" in said
    with Image.open(png) as page:
        assert page.size == (3 * 168 + 8, 22 + 2 * 168)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["reconstruct", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("jumbo-vit: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{run} {picture}", "--png is missing"),
        ("{run} {picture} --png {empty}", "is a folder: give the PNG file to write"),
        ("{run} {picture} --png a.jpg", "--png a.jpg does not end in .png"),
        ("{run} {picture} --png {picture}", "is one of the pictures, which would be lost"),
        ("{run} {empty} {picture} --png b.png --json {picture}", "--json picture.png is one of the pictures"),
        ("{run} {picture} --png b.png --json {empty}", "is a folder: give the JSON file to write"),
        ("{run} {picture} --png b.png --json ./b.png", "--json and --png are the same file"),
        ("{run} nowhere.png --png b.png", "no such file or folder: nowhere.png"),
        ("{run} {empty} --png b.png", "no images found in empty"),
        ("{run} {bad} --png b.png", "none of the 1 pictures could be reconstructed, such as bad.png: is not a picture"),
        ("{run} {picture} --png b.png --mask-ratio 0", "--mask-ratio is 0.0, but must be above 0 and below 1"),
        ("{run} {picture} --png b.png --mask-ratio 1", "--mask-ratio is 1.0, but must be above 0 and below 1"),
        ("{run} {picture} --png b.png --mask-ratio nan", "--mask-ratio takes a number"),
        ("{run} {picture} --png b.png --mask-ratio 1e-12", "masks none of the 16 patches"),
        ("{run} {picture} --png b.png --max-images 0", "--max-images is 0, but must be at least 1"),
        ("gone {picture} --png b.png", "no such run: gone; give the folder of a run of jumbo-vit pretrain"),
        ("{empty} {picture} --png b.png", "empty is no run's folder, it holds no config.yaml"),
        ("{run}/model {picture} --png b.png", "is encoder-only, it has no decoder to reconstruct with: give the run's"),
        ("{run}/model/model.safetensors {picture} --png b.png", "a file of weights is encoder-only"),
        ("{train} {picture} --png b.png", "is a run of train, which has no decoder to reconstruct with"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    words: str,
    message: str,
    trained_run: Path,
    run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    noise((8, 8), 1).save("picture.png")
    Path("bad.png").write_bytes(b"no picture")
    places = {"run": trained_run, "train": run["out"], "picture": "picture.png", "empty": "empty", "bad": "bad.png"}
    before = Path("picture.png").read_bytes()
    assert message in refused(words.format(**places).split(), capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "picture.png", "bad.png"}
    assert Path("picture.png").read_bytes() == before


def test_the_folder_of_an_encoder_names_its_run(trained_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"encoder-only, .* give the run's folder, here {trained_run}$"):
        open_trained(trained_run / "model")
    shutil.copytree(trained_run / "model", tmp_path / "model")
    with pytest.raises(UserError, match=r"encoder-only, .* give the run's folder$"):
        open_trained(tmp_path / "model")


def test_runs_without_a_decoder(own_run: Path) -> None:
    text = (own_run / "config.yaml").read_text()
    (own_run / "config.yaml").write_text(text.replace("method: mae", "method: distill"))
    with pytest.raises(UserError, match="is a run of --method distill, which has no decoder for pixels"):
        open_trained(own_run)
    (own_run / "config.yaml").write_text("\n".join(text.splitlines()[:20]))
    with pytest.raises(UserError, match=r"config.yaml is cut off or of another version"):
        open_trained(own_run)
    (own_run / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config.yaml cannot be read as a run's options"):
        open_trained(own_run)
    (own_run / "config.yaml").write_text(text)
    (own_run / "last.ckpt").unlink()
    (own_run / "previous.ckpt").unlink()
    with pytest.raises(UserError, match=r"holds no last.ckpt any more, and .* is encoder-only"):
        open_trained(own_run)
    shutil.rmtree(own_run / "model")
    with pytest.raises(UserError, match="stopped before its first checkpoint"):
        open_trained(own_run)


def test_damaged_checkpoints(own_run: Path, trained_run: Path) -> None:
    last = own_run / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        UserError, match=r"last.ckpt is cut off or no checkpoint of a run; try .*previous.ckpt, another"
    ):
        open_trained(own_run)
    content = torch.load(trained_run / "last.ckpt", weights_only=True)
    weights = dict(content["model"])
    del weights["decoder.mask_token"]
    torch.save(content | {"model": weights}, last)
    with pytest.raises(UserError, match="is damaged, it does not fit the run"):
        open_trained(own_run)
    torch.save(content | {"average": None}, last)
    assert open_trained(own_run).notes == []
    with pytest.raises(UserError, match="kept no averaged weights: leave --averaged out"):
        open_trained(own_run, averaged=True)


def test_a_file_of_another_run_is_refused(trained_run: Path, own_run: Path) -> None:
    text = (own_run / "config.yaml").read_text()
    (own_run / "config.yaml").write_text(text.replace("decoder_depth: 2", "decoder_depth: 3"))
    with pytest.raises(UserError, match=r"they differ in decoder_depth$"):
        open_trained(own_run)
    shutil.copy(trained_run / "last.ckpt", own_run.parent / "last.ckpt")
    with pytest.raises(UserError, match=r"is no run's folder, it holds no config.yaml"):
        open_trained(own_run.parent / "last.ckpt")
