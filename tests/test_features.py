"""Stored features: what the head reads to the bit, computed once, never old, never half."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from jumbo_vit.data.pipeline import EvalSet, Preparation
from jumbo_vit.data.sets import ImageSet, open_data
from jumbo_vit.errors import UserError
from jumbo_vit.tasks import features
from jumbo_vit.tasks.features import Features, Trunk, fingerprint, store_features
from tests.pictures import TEST_MODEL, colour_tree, square

CPU = torch.device("cpu")
PREPARED = Preparation((3, 32, 32))
NAFLEX = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_jumbo": 3, "img_size": 32, "patch_size": 8}


def made(name: str = TEST_MODEL, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = timm.create_model(name, **({"num_classes": 3} | options))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def images(tmp_path: Path) -> ImageSet:
    """150 pictures in three classes."""
    return open_data(str(colour_tree(tmp_path / "data", 56)), "multiclass", 0, 0.1).train


def head_inputs(model: Any, images: ImageSet) -> Tensor:
    """What the head reads, computed in evaluation's batches."""
    pictures = torch.stack([EvalSet(images, "multiclass", PREPARED)[index][0] for index in range(len(images))])
    with torch.no_grad():
        return torch.cat(
            [model.forward_head(model.forward_features(part), pre_logits=True) for part in pictures.split(64)]
        )


def store(model: Any, images: ImageSet, cache: Path, **options: Any) -> Features:
    return store_features(model, images, PREPARED, cache, CPU, **options)


@pytest.mark.parametrize(
    ("name", "options", "head"),
    [
        (TEST_MODEL, {}, ("pieces", "patches")),
        (TEST_MODEL, {"global_pool": "jumbo", "reg_tokens": 2}, ("pieces",)),
        (TEST_MODEL, {"global_pool": "avg", "reg_tokens": 2}, ("patches",)),
        (TEST_MODEL, {"global_pool": "map"}, ("head",)),
        (TEST_MODEL, {"global_pool": "max", "fc_norm": True}, ("head",)),
        ("naflexvit_jumbo_pico_patch16", NAFLEX, ("pieces", "patches")),
        ("vit_test_patch8_reg16_32", {"global_pool": "prefix_avg"}, ("pieces", "patches")),
        ("vit_test_patch8_reg16_32", {}, ("class",)),
        ("vit_test_patch8_cls_32", {}, ("pieces",)),
        ("test_vit", {"img_size": 32}, ("pieces",)),
        ("test_vit", {"img_size": 32, "global_pool": "avg"}, ("head",)),
        ("test_resnet", {}, ("head",)),
        ("test_convnext", {}, ("head",)),
    ],
)
def test_the_heads_input_to_the_bit(
    name: str, options: dict[str, Any], head: tuple[str, ...], images: ImageSet, tmp_path: Path
) -> None:
    model = made(name, **options)
    stored = store(model, images, tmp_path)
    assert stored.trunk.head == head
    assert torch.equal(stored.rows(range(len(images)), *stored.trunk.head), head_inputs(model, images))


def test_pieces_and_patches_leave_registers_out(images: ImageSet, tmp_path: Path) -> None:
    model = made(reg_tokens=2)
    stored = store(model, images, tmp_path)
    with torch.no_grad():
        tokens = model.forward_features(torch.stack([EvalSet(images, "multiclass", PREPARED)[i][0] for i in range(64)]))
    jumbo, _, patches = model.split(tokens)
    assert (stored.trunk.num_global, stored.trunk.dim, stored.trunk.width) == (3, 32, 4 * 32)
    assert torch.equal(stored.rows(range(64), "pieces"), jumbo.flatten(1))
    assert torch.equal(stored.rows(range(64), "patches"), patches.mean(1))
    assert torch.equal(stored.rows(range(64), "class"), jumbo[:, 0])
    assert torch.equal(stored.rows([5, 140, 3, 5], "patches"), stored.rows(range(150), "patches")[[5, 140, 3, 5]])


def test_training_mode_dropout_and_drop_path_do_not_matter_and_stay(images: ImageSet, tmp_path: Path) -> None:
    plain = store(made(), images, tmp_path / "a").rows(range(9), "pieces")
    model = made(drop_path_rate=0.5, drop_rate=0.5).train()
    assert torch.equal(store(model, images, tmp_path / "b").rows(range(9), "pieces"), plain)
    assert model.training and model.blocks.training


def test_computed_once(images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK", 64)
    model = made()
    first = store(model, images, tmp_path)
    assert first.computed == len(images) == 150
    rows = first.rows(range(150), "pieces")
    again = store(model, images, tmp_path)
    assert again.computed == 0 and again.folder == first.folder
    assert torch.equal(again.rows(range(150), "pieces"), rows)


def test_killed_halfway_goes_on_to_the_same_bits(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "CHUNK", 64)
    model = made()
    whole = store(model, images, tmp_path / "whole")
    written = 0

    def dies(folder: Path, number: int, rows: Any) -> None:
        nonlocal written
        if number == 1:
            raise KeyboardInterrupt
        written += 1
        write(folder, number, rows)

    write = features._write_chunk
    with monkeypatch.context() as patch:
        patch.setattr(features, "_write_chunk", dies)
        with pytest.raises(KeyboardInterrupt):
            store(model, images, tmp_path / "half")
    assert written == 1
    resumed = store(model, images, tmp_path / "half")
    assert resumed.computed == 150 - 64
    assert torch.equal(resumed.rows(range(150), "pieces"), whole.rows(range(150), "pieces"))


def test_processes_share_the_work(images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK", 64)
    model = made()
    shares = [store(model, images, tmp_path / "both", share=(rank, 2)) for rank in (0, 1)]
    assert shares[0].computed == 128 - 64 + 22 and shares[1].computed == 0
    alone = store(model, images, tmp_path / "alone")
    assert torch.equal(shares[1].rows(range(64), "pieces"), alone.rows(range(64), "pieces"))


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_chunk_is_made_anew(damage: str, images: ImageSet, tmp_path: Path) -> None:
    model = made()
    stored = store(model, images, tmp_path)
    rows = stored.rows(range(150), "pieces").clone()
    chunk = stored.folder / "000000.npy"
    if damage == "cut":
        chunk.write_bytes(chunk.read_bytes()[:-10])
    elif damage == "gone":
        chunk.unlink()
    else:
        np.save(chunk, np.zeros((3, 3), np.float32))
    again = store(model, images, tmp_path)
    assert again.computed == 150 and torch.equal(again.rows(range(150), "pieces"), rows)


def test_other_numbers_under_the_right_name_are_refused(images: ImageSet, tmp_path: Path) -> None:
    model = made()
    chunk = store(model, images, tmp_path).folder / "000000.npy"
    np.save(chunk, np.load(chunk) + 0.1)
    with pytest.raises(UserError, match=r"are not what the model gives: remove that folder"):
        store(model, images, tmp_path)


def test_the_name_changes_with_all_that_features_depend_on(images: ImageSet, tmp_path: Path) -> None:
    model = made()
    names = [fingerprint(model, images, PREPARED, CPU)]
    names.append(fingerprint(made(global_pool="jumbo"), images, PREPARED, CPU))
    names.append(fingerprint(model, images, Preparation((3, 32, 32), crop_pct=0.9), CPU))
    names.append(fingerprint(model, images.subset(range(149)), PREPARED, CPU))
    names.append(fingerprint(model, images.subset([1, 0, *range(2, 150)]), PREPARED, CPU))
    names.append(fingerprint(model, images, PREPARED, torch.device("cuda")))
    path = images.samples[3].path
    square("red", 999).save(path)
    names.append(fingerprint(model, images, PREPARED, CPU))
    os.utime(path, ns=(1, 1))
    names.append(fingerprint(model, images, PREPARED, CPU))
    model.blocks[1].norm1.bias.data[0] += 1e-6
    names.append(fingerprint(model, images, PREPARED, CPU))
    assert len(set(names)) == len(names)


def test_the_name_does_not_change_with_the_head(images: ImageSet) -> None:
    model = made()
    name = fingerprint(model, images, PREPARED, CPU)
    model.reset_classifier(7)
    model.head.bias.data += 1
    assert fingerprint(model, images, PREPARED, CPU) == name


def test_digits_have_no_files(tmp_path: Path) -> None:
    digits = open_data("digits", "multiclass", 0, 0.1).val
    model = made(img_size=8, patch_size=2, in_chans=1)
    prepared = Preparation((1, 8, 8), (0.5,), (0.5,))
    first = store_features(model, digits, prepared, tmp_path, CPU)
    assert first.computed == len(digits) and store_features(model, digits, prepared, tmp_path, CPU).computed == 0


def test_a_picture_that_is_gone_is_one_line(images: ImageSet, tmp_path: Path) -> None:
    Path(images.samples[149].path).unlink()
    with pytest.raises(UserError, match=r"cannot read the picture .*No such file"):
        store(made(), images, tmp_path)


def test_a_head_without_one_vector_is_refused(images: ImageSet) -> None:
    pictures = torch.randn(2, 3, 32, 32)
    with pytest.raises(UserError, match="does not read one vector a picture"):
        Trunk(made(global_pool="").eval(), pictures)


def test_batch_norm_in_the_trunk_stays_as_it_is(images: ImageSet, tmp_path: Path) -> None:
    model = made("test_resnet").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    store(model, images, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
