"""Teachers: what they see of a student's pictures, in which order they answer, and what they give without classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision.transforms.v2.functional as tvf
from torch import nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model, save_folder
from jumbo_vit.predictor import Contract
from jumbo_vit.teachers import open_teacher
from tests.pictures import TEST_MODEL
from tests.teachers import OWN, teacher_folder

STUDENT = Preparation((3, 24, 24), mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.3))


def batch(channels: int = 3, size: tuple[int, int] = (24, 24), count: int = 2) -> torch.Tensor:
    """Pictures in 0..1."""
    return torch.rand(count, channels, *size, generator=torch.Generator().manual_seed(5))


def normalised(pixels: torch.Tensor, preparation: Preparation) -> torch.Tensor:
    return torch.stack([tvf.normalize(p, list(preparation.mean), list(preparation.std)) for p in pixels])


# What it sees


@pytest.mark.parametrize("size", [(24, 24), (32, 32), (48, 20)])
def test_it_sees_the_same_crop_in_its_own_size_and_normalisation(tmp_path: Path, size: tuple[int, int]) -> None:
    teacher = open_teacher(teacher_folder(tmp_path), "cpu")
    pixels = batch(size=size)
    own_size = tvf.resize(pixels, [32, 32], interpolation=tvf.InterpolationMode.BICUBIC, antialias=True)
    expected = normalised(own_size, OWN)
    torch.testing.assert_close(teacher.view(normalised(pixels, STUDENT), STUDENT), expected, rtol=0, atol=1e-5)


def test_what_is_normalised_alike_is_given_bit_by_bit(tmp_path: Path) -> None:
    teacher = open_teacher(teacher_folder(tmp_path), "cpu")
    images = normalised(batch(size=(32, 32)), OWN)
    assert torch.equal(teacher.view(images, OWN), images)


def test_a_grey_student_and_a_teacher_of_colours(tmp_path: Path) -> None:
    teacher = open_teacher(teacher_folder(tmp_path), "cpu", ["a", "b", "c"])
    grey = Preparation((1, 24, 24), mean=(0.5,), std=(0.5,))
    pixels = batch(1)
    both = (normalised(pixels, grey), grey), (normalised(pixels.expand(-1, 3, -1, -1), STUDENT), STUDENT)
    first, second = (teacher.logits(*given) for given in both)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_a_teacher_of_grey_and_a_student_of_colours(tmp_path: Path) -> None:
    grey = Preparation((1, 32, 32), mean=(0.5,), std=(0.5,))
    teacher = open_teacher(teacher_folder(tmp_path, preparation=grey), "cpu", ["a", "b", "c"])
    with pytest.raises(UserError, match=r"takes pictures of 1 channel\(s\), the data have 3: set --in-chans 1"):
        teacher.logits(batch(), STUDENT)


def test_it_is_frozen(tmp_path: Path) -> None:
    teacher = open_teacher(teacher_folder(tmp_path), "cpu", ["a", "b", "c"])
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert not any(module.training for module in teacher.model.modules())
    images = batch().requires_grad_(True)
    assert not teacher.logits(images, STUDENT).requires_grad
    assert not any(part.requires_grad for part in teacher.features(images, STUDENT))


def test_the_precision_is_its_own(tmp_path: Path) -> None:
    teacher = open_teacher(teacher_folder(tmp_path), "cpu", ["a", "b", "c"])
    plain = teacher.logits(batch(), STUDENT)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(teacher.logits(batch(), STUDENT), plain)
    teacher.low = torch.bfloat16
    low = teacher.logits(batch(), STUDENT)
    assert low.dtype == torch.float32 and not torch.equal(low, plain)
    torch.testing.assert_close(low, plain, rtol=0.1, atol=0.3)


def test_the_checksum_is_of_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        open_teacher(teacher_folder(tmp_path / str(number), seed=seed), "cpu") for number, seed in enumerate((0, 0, 1))
    )
    assert first.checksum() == again.checksum() != other.checksum()


# The order of its answers


def test_the_answers_are_in_the_order_of_the_students_classes(tmp_path: Path) -> None:
    folder = teacher_folder(tmp_path, labels=["c", "a", "spare", "b"])
    teacher = open_teacher(folder, "cpu", ["a", "b", "c"])
    with torch.no_grad():
        own = teacher.model(teacher.view(batch(), STUDENT))
    assert torch.equal(teacher.logits(batch(), STUDENT), own[:, [1, 3, 0]])
    assert any("has 4 classes; only its outputs for the 3" in note for note in teacher.notes)


def test_classes_that_it_does_not_know_are_named(tmp_path: Path) -> None:
    folder = teacher_folder(tmp_path)
    with pytest.raises(UserError, match=r"does not know 2 of the 3 classes: ant, bee; its own are a, b, c"):
        open_teacher(folder, "cpu", ["a", "ant", "bee"])


def without_names(folder: str) -> str:
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    del config["label_names"], config["jumbo_vit"]["labels"]
    path.write_text(json.dumps(config))
    return folder


def test_a_teacher_without_names_is_taken_in_the_same_order_and_says_so(tmp_path: Path) -> None:
    folder = without_names(teacher_folder(tmp_path))
    teacher = open_teacher(folder, "cpu", ["x", "y", "z"])
    with torch.no_grad():
        assert torch.equal(teacher.logits(batch(), STUDENT), teacher.model(teacher.view(batch(), STUDENT)))
    assert any("does not name its 3 classes: they are taken to be" in note for note in teacher.notes)
    with pytest.raises(UserError, match="has 3 classes without names, the data have 2"):
        open_teacher(folder, "cpu", ["x", "y"])


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    original = timm.create_model

    def create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        assert pretrained
        return original(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", create)


@pytest.mark.usefixtures("no_download")
def test_a_model_of_timm_names_imagenets_synsets() -> None:
    teacher = open_teacher("test_efficientnet", "cpu", ["n01443537", "n01440764"])
    assert teacher.order is not None and teacher.order.tolist() == [1, 0]
    assert teacher.lineage["name"] == "test_efficientnet" and "license" in teacher.lineage


@pytest.mark.usefixtures("no_download")
def test_a_model_of_timm_with_other_classes() -> None:
    names = [f"class {number}" for number in range(1000)]
    assert any("in the same order" in note for note in open_teacher("test_efficientnet", "cpu", names).notes)
    with pytest.raises(UserError, match="has 1000 classes without names, the data have 3: fine-tune it on these"):
        open_teacher("test_efficientnet", "cpu", ["a", "b", "c"])


def test_a_teacher_of_several_labels_teaches_features_alone(tmp_path: Path) -> None:
    folder = teacher_folder(tmp_path, task="multilabel")
    assert open_teacher(folder, "cpu").shapes() == (96, 32, (4, 4))
    with pytest.raises(UserError, match="trained with --task multilabel"):
        open_teacher(folder, "cpu", ["a", "b", "c"])


# No teacher


def test_a_teacher_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--teacher resnet181: no such folder, and no model of timm .*resnet18"):
        open_teacher("resnet181", "cpu")
    with pytest.raises(UserError, match="is no model folder"):
        open_teacher(str(tmp_path), "cpu")

    def offline(*_: Any, **__: Any) -> nn.Module:
        raise OSError("no connection\nand more lines")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(UserError, match=r"--teacher resnet18: its pretrained weights cannot be had \(no connection\)$"):
        open_teacher("resnet18", "cpu")


# Features


def test_features_of_a_model_with_a_class_token(tmp_path: Path) -> None:
    preparation = Preparation((3, 32, 64))
    teacher = open_teacher(teacher_folder(tmp_path, "test_vit", preparation=preparation, img_size=(32, 64)), "cpu")
    vector, patches = teacher.features(batch(size=(32, 64)), preparation)
    tokens = teacher.model.forward_features(batch(size=(32, 64)))  # type: ignore[operator]
    assert torch.equal(vector, tokens[:, 0])
    assert patches.shape == (2, 64, 2, 4) and teacher.shapes() == (64, 64, (2, 4))
    for row in range(2):
        for column in range(4):
            assert torch.equal(patches[:, :, row, column], tokens[:, 1 + 4 * row + column])


def test_features_of_a_jumbo_model(tmp_path: Path) -> None:
    teacher = open_teacher(teacher_folder(tmp_path, TEST_MODEL, preparation=OWN), "cpu")
    model: Any = teacher.model
    images = batch(size=(32, 32))
    vector, patches = teacher.features(images, OWN)
    jumbo, _, own = model.split(model.forward_features(images))
    assert torch.equal(vector, jumbo.flatten(1)) and vector.shape == (2, model.num_jumbo * model.embed_dim)
    assert torch.equal(patches.flatten(2), own.transpose(1, 2))


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet", "test_convnext"])
def test_features_of_a_convolutional_model(tmp_path: Path, name: str) -> None:
    preparation = Preparation((3, 64, 96))
    teacher = open_teacher(teacher_folder(tmp_path, name, preparation=preparation), "cpu")
    vector, patches = teacher.features(batch(size=(64, 96)), preparation)
    last = teacher.model.forward_features(batch(size=(64, 96)))  # type: ignore[operator]
    assert torch.equal(patches, last) and patches.shape[-2:] == (2, 3)
    torch.testing.assert_close(vector, last.flatten(2).mean(2))


def test_features_with_channels_last_and_of_a_model_without_a_class_token(tmp_path: Path) -> None:
    tall = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2), "window_size": 2, "img_size": 64}
    teacher = open_teacher(
        teacher_folder(tmp_path / "swin", "swin_tiny_patch4_window7_224", preparation=Preparation((3, 64, 64)), **tall),
        "cpu",
    )
    vector, patches = teacher.features(batch(size=(64, 64)), Preparation((3, 64, 64)))
    last = teacher.model.forward_features(batch(size=(64, 64)))  # type: ignore[operator]
    assert torch.equal(patches, last.permute(0, 3, 1, 2)) and vector.shape == (2, 48)
    args = {"class_token": False, "global_pool": "avg", "img_size": 32}
    teacher = open_teacher(teacher_folder(tmp_path / "vit", "test_vit", preparation=OWN, **args), "cpu")
    model: Any = teacher.model
    images = batch(size=(32, 32))
    pooled = model.forward_head(model.forward_features(images), pre_logits=True)
    assert torch.equal(teacher.features(images, OWN).vector, pooled)


def test_tokens_that_make_no_grid(tmp_path: Path) -> None:
    teacher = open_teacher(teacher_folder(tmp_path), "cpu")
    teacher.model.forward_features = lambda images: torch.zeros(len(images), 9 + 3, 32)  # type: ignore[assignment]
    teacher.model.num_prefix_tokens = 1  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"the 11 patch tokens of the teacher .* make no grid"):
        teacher.features(batch(), STUDENT)
    teacher.model.forward_features = lambda images: [images]  # type: ignore[assignment]
    with pytest.raises(UserError, match="gives neither patch tokens nor a map"):
        teacher.features(batch(), STUDENT)


def test_a_folder_made_by_hand_needs_no_lineage(tmp_path: Path) -> None:
    save_folder(tmp_path, make_model(TEST_MODEL, num_classes=2), Contract("multiclass", ["a", "b"], OWN))
    assert open_teacher(str(tmp_path), "cpu", ["a", "b"]).lineage == {"name": str(tmp_path)}
