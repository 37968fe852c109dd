"""Training on pictures of any size and shape, cut into patches: what a batch holds, and runs that learn and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jumbo_vit.data.naflex import collate, sequences
from jumbo_vit.data.pipeline import Augmentation, Preparation, TrainSet
from jumbo_vit.data.records import ImageSet
from jumbo_vit.data.sampler import Draw
from jumbo_vit.data.sets import open_data
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import loop as loop_module
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.measure_folder import evaluate
from jumbo_vit.tasks.replay import replay
from jumbo_vit.tasks.train import train
from tests.pictures import COLOURS, square
from tests.runs import differences, state_of
from tests.test_resume import run_until

SHAPES = [(32, 32), (20, 70), (90, 24), (8, 8), (40, 33), (64, 48)]
WHOLE = Augmentation(hflip=0.0, scale=(1.0, 1.0), ratio=(1.0, 1.0))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Colours in six shapes; not to be changed."""
    root = tmp_path_factory.mktemp("shapes")
    for part, count in (("train", 8), ("val", 4)):
        for number, colour in enumerate(COLOURS):
            folder = root / part / colour
            folder.mkdir(parents=True)
            for index in range(count):
                shape = SHAPES[(index + number) % len(SHAPES)]
                square(colour, 100 * number + index, shape).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def images(data: Path) -> ImageSet:
    return open_data(str(data), "multiclass", 0, 0.1).train


def naflex(data: Path, out: Path, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {
        "data": str(data),
        "out": str(out),
        "model": "naflexvit_jumbo_tiny_patch16",
        "model_args": ["embed_dim=32", "depth=3", "num_heads=2", "num_jumbo=3", "weight_init=xavier"],
        "img_size": "32",
        "patch_size": 8,
        "naflex_loader": True,
        "naflex_train_seq_lens": [9, 16, 30],
        "epochs": 3,
        "batch_size": 8,
        "workers": 0,
        "logger": ["none"],
        "recovery_interval": 2,
    }
    return TrainConfig(**options | changes)


def dataset(images: ImageSet, lengths: list[int], augment: Augmentation, **kwargs: Any) -> TrainSet:
    preparation = Preparation((3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    return TrainSet(
        images, "multiclass", preparation, augment, 0, sequences(augment, preparation, (8, 8), lengths, **kwargs)
    )


def test_a_batch_holds_whole_pictures_and_says_what_is_padding(images: ImageSet) -> None:
    pictures = dataset(images, [16], WHOLE)
    batch, targets, weights = collate([pictures[Draw(0, sample, size=16)] for sample in range(8)])
    assert batch["patches"].shape == (8, 16, 192) and batch["patch_coord"].shape == (8, 16, 2)
    assert targets.tolist() == [labels[0] for labels in images.labels[:8]] and weights.tolist() == [1.0] * 8
    for sample in range(8):
        height, width = images.read(sample).height, images.read(sample).width
        valid, coord = batch["patch_valid"][sample], batch["patch_coord"][sample]
        count = int(valid.sum())
        rows, columns = (int(coord[valid][:, axis].max()) + 1 for axis in (0, 1))
        assert rows * columns == count <= 16 and valid[:count].all()
        places = [(row, column) for row in range(rows) for column in range(columns)]
        assert [tuple(place) for place in coord[:count].tolist()] == places
        assert (rows > columns) == (height > width) or rows == columns  # a picture's shape is kept
        assert not batch["patches"][sample, ~valid].any() and not coord[~valid].any()
    shares = batch["patch_valid"].float().mean(1)
    assert shares.min() >= 0.5 and len(set(shares.tolist())) > 1


def test_a_picture_of_the_length_is_cut_pixel_by_pixel(images: ImageSet) -> None:
    sample = next(index for index in range(len(images)) if images.read(index).size == (32, 32))
    for last in (True, False):
        found = dataset(images, [16], WHOLE, channels_last=last)[Draw(0, sample, size=16)][0]
        plain = TrainSet(images, "multiclass", Preparation((3, 32, 32), (0.5,) * 3, (0.5,) * 3), WHOLE, 0)
        picture = plain[Draw(0, sample)][0].unflatten(1, (4, 8)).unflatten(3, (4, 8))
        order = (1, 3, 2, 4, 0) if last else (1, 3, 0, 2, 4)
        assert torch.equal(found["patches"], picture.permute(order).reshape(16, 192))


@given(height=st.integers(1, 300), width=st.integers(1, 300), length=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_pictures_of_every_shape_become_a_sequence(height: int, width: int, length: int, seed: int) -> None:
    augment, preparation = Augmentation(scale=(0.08, 1.0)), Preparation((3, 32, 32))
    transform, enough = sequences(augment, preparation, (16, 8), [length])[length]
    torch.manual_seed(seed)
    found = transform(square("red", seed, (height, width)))
    count = len(found["patches"])
    assert found["patches"].shape == (count, 16 * 8 * 3) and 1 <= count <= length and found["patches"].isfinite().all()
    assert enough is not None and enough**2 * augment.scale[0] >= length * 16 * 8


def test_a_picture_that_is_too_long_is_told() -> None:
    transform, _ = sequences(Augmentation(), Preparation((3, 32, 32)), (8, 8), [1])[1]
    with pytest.raises(UserError, match=r"^a picture of 1x3000000 pixels cannot be cut into 1 patches"):
        transform(square("red", 0, (1, 3_000_000)))


def test_a_run_on_all_shapes_learns_and_scores_as_ever(data: Path, tmp_path: Path) -> None:
    summary = train(naflex(data, tmp_path / "run", epochs=5, model_ema=True, grad_checkpointing=True))
    assert summary["score"] == 1.0 and summary["images"]["train"] == 24
    numbers = evaluate(str(tmp_path / "run"), str(data))
    assert (numbers["top1"], numbers["loss"]) == (1.0, summary["best_numbers"]["loss"])


def test_a_killed_run_goes_on_with_the_same_sequences(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "grad_accum_steps": 2, "aug_repeats": 2, "drop_path": 0.1, "aa": "3a"}
    lengths: list[set[int]] = []
    original = loop_module.Loop._update

    def watched(self: Any, group: Any) -> None:
        lengths.append({one["patches"].shape[1] for one, _, _ in group})
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", watched)
    train(naflex(data, tmp_path / "straight", **options))
    assert all(len(one) == 1 for one in lengths) and len(lengths) == 9
    assert {9} < set().union(*lengths) <= {9, 16, 30}
    run_until(monkeypatch, naflex(data, tmp_path / "run", **options), 6)
    train(TrainConfig(resume=str(tmp_path / "run"), given=frozenset({"resume"})))
    assert lengths[-4:] == lengths[5:9]
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "run")) == []


def test_lengths_may_rise_and_workers_change_nothing(data: Path, tmp_path: Path) -> None:
    for workers in (0, 1):
        options = {"size_schedule": "progressive", "epochs": 1, "workers": workers}
        train(naflex(data, tmp_path / str(workers), **options))
    assert differences(*(state_of(tmp_path / name)["model"] for name in "01")) == []


def test_a_bad_batch_of_sequences_is_replayed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop_module.Loop._update

    def poisoned(self: Any, group: Any) -> None:
        if self.progress.update == 1:
            group[0][0]["patches"][3, 0] = torch.inf
        original(self, group)

    monkeypatch.setattr(loop_module.Loop, "_update", poisoned)
    summary = train(naflex(data, tmp_path / "run", epochs=1))
    found = replay(tmp_path / "run")
    assert summary["bad_updates"] == 1
    assert found["same"] and found["bad_inputs"] == found["bad_samples"] == [3]


def test_without_lengths_the_patches_of_the_size_are_the_length(data: Path, tmp_path: Path) -> None:
    train(naflex(data, tmp_path / "none", naflex_train_seq_lens=None, epochs=1))
    train(naflex(data, tmp_path / "sixteen", naflex_train_seq_lens=[16], epochs=1))
    assert differences(*(state_of(tmp_path / name)["model"] for name in ("none", "sixteen"))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixup": 0.2}, "--naflex-loader allows no --mixup: "),
        ({"cutmix": 1.0}, "--naflex-loader allows no --cutmix: "),
        ({"teacher": ["resnet18"]}, "--naflex-loader allows no --teacher: "),
        ({"patch_drop": (0.5, 0.1)}, "--naflex-loader allows no --patch-drop: "),
        ({"img_sizes": ["32"]}, "--naflex-loader allows no --img-sizes: its sizes are --naflex-train-seq-lens"),
        ({"streaming": True, "val_data": "digits", "steps_per_epoch": 1}, "a stream allows no --naflex-loader"),
        ({"naflex_train_seq_lens": [0]}, r"--naflex-train-seq-lens is \[0\], but takes numbers of patches"),
        ({"naflex_train_seq_lens": [16, 1_000_000]}, "but a sequence has at most 16,384 patches"),
        ({"naflex_loader": False}, "--naflex-train-seq-lens is for --naflex-loader"),
        ({"model": "jumbo_vit_test_patch8_32", "model_args": None}, "takes no pictures cut into patches"),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], words: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(naflex(data, tmp_path / "run", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
