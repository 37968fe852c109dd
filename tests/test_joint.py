"""Picture and mask stay together through every transform, and no mask value is invented."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from jumbo_vit.data.joint import (
    JointAugmentation,
    JointTrain,
    SegmentEvalSet,
    SegmentTrainSet,
    joint_evaluation,
    largest_share,
    prepare_picture,
)
from jumbo_vit.data.mask_labels import LabelOptions
from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.data.sampler import Draw
from jumbo_vit.data.survey import open_segments
from jumbo_vit.errors import UserError
from jumbo_vit.seeds import seed_everything
from tests.scenes import scene, scene_folder

PLAIN: dict[str, Any] = {"scale": (1.0, 1.0), "hflip": 0.0, "photometric": False, "category_cap": 1.0}


def preparation(height: int, width: int, chans: int = 3) -> Preparation:
    """Pixels in -1..1, where 0 is the mean."""
    return Preparation((chans, height, width), mean=(0.5,) * chans, std=(0.5,) * chans)


def coded(size: tuple[int, int], seed: int) -> tuple[Image.Image, np.ndarray]:
    """A mask of {0, 2, 255} in large blocks and a picture whose colour says what the mask is there."""
    draw = np.random.default_rng(seed)
    small = draw.choice(np.array([0, 2, 255], np.uint8), (-(-size[0] // 8), -(-size[1] // 8)))
    mask = np.kron(small, np.ones((8, 8), np.uint8))[: size[0], : size[1]]
    return Image.fromarray(np.stack([mask] * 3, -1)), mask


def drawn(seed: int, picture: Image.Image, mask: Any, size: tuple[int, int], **options: Any) -> Any:
    seed_everything(seed)
    return JointTrain(preparation(*size), JointAugmentation(**options), 255)(picture, mask)


# 26. Masks resized with smoothing invent classes


@settings(max_examples=40)
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    crop=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    scale=st.sampled_from([(0.5, 2.0), (1.0, 1.0), (0.1, 0.3)]),
    rotate=st.sampled_from([0.0, 30.0, 180.0]),
    short_side=st.sampled_from([None, 20]),
    seed=st.integers(0, 10_000),
)
def test_no_value_is_invented_and_sizes_agree(
    size: tuple[int, int], crop: tuple[int, int], scale: Any, rotate: float, short_side: int | None, seed: int
) -> None:
    picture, mask = coded(size, seed)
    image, target = drawn(seed, picture, mask, crop, scale=scale, rotate=rotate, short_side=short_side)
    assert image.shape == (3, *crop) and target.shape == crop
    assert image.dtype == torch.float32 and target.dtype == torch.int64 and type(image) is type(target) is torch.Tensor
    assert {*target.unique().tolist()} <= {*np.unique(mask).tolist(), 255}
    assert bool(torch.isfinite(image).all())


@settings(max_examples=25)
@given(flip=st.booleans(), seed=st.integers(0, 10_000), size=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_crop_and_flip_hit_both_alike(flip: bool, seed: int, size: tuple[int, int]) -> None:
    picture, mask = coded(size, seed)
    image, target = drawn(seed, picture, mask, (24, 24), **(PLAIN | {"hflip": float(flip)}))
    inside = image.abs() > 0  # 0 is the padding, for no pixel of the picture is the mean
    assert inside.sum() == 3 * min(24, size[0]) * min(24, size[1])
    assert bool((((image[0] + 1) * 127.5).round().long() == target)[inside[0]].all())
    assert bool((target[~inside[0]] == 255).all())


def test_a_flip_is_a_flip_and_happens_at_its_rate() -> None:
    picture, mask = scene(0)
    straight, truth = drawn(0, picture, mask, (32, 48), **PLAIN)
    turned, target = drawn(0, picture, mask, (32, 48), **(PLAIN | {"hflip": 1.0}))
    torch.testing.assert_close(turned, straight.flip(-1))
    torch.testing.assert_close(target, truth.flip(-1))
    rate = sum(
        torch.equal(drawn(seed, picture, mask, (32, 48), **(PLAIN | {"hflip": 0.5}))[0], turned) for seed in range(40)
    )
    assert 10 <= rate <= 30


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_a_resized_mask_lies_where_its_picture_lies(factor: float) -> None:
    mask = np.zeros((48, 48), np.uint8)
    mask[10:30, 14:38] = 1
    picture = Image.fromarray(np.stack([mask * 255] * 3, -1))
    side = round(48 * factor)
    image, target = drawn(0, picture, mask, (side, side), **(PLAIN | {"scale": (factor, factor)}))
    # Smoothing rounds the four corners; half a pixel beside each other they would differ along two whole edges.
    assert int(((image[0] > 0) != (target == 1)).sum()) <= 4


def test_corners_of_a_rotation_are_unlabelled_and_of_the_mean_colour() -> None:
    picture, mask = Image.new("RGB", (40, 40), "white"), np.zeros((40, 40), np.uint8)
    seed = next(s for s in range(50) if (drawn(s, picture, mask, (40, 40), **PLAIN, rotate=45.0)[1] == 255).sum() > 200)
    image, target = drawn(seed, picture, mask, (40, 40), **PLAIN, rotate=45.0)
    assert set(target.unique().tolist()) == {0, 255} and target[0, 0] == 255
    assert abs(float(image[0, 0, 0])) < 0.01 and float(image[0, 20, 20]) == 1.0


# Crops


def test_a_crop_with_one_class_is_drawn_again() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 32:] = 1
    picture = Image.fromarray(np.zeros((64, 64, 3), np.uint8))

    def shares(cap: float) -> list[float]:
        options = PLAIN | {"category_cap": cap}
        return [largest_share(drawn(s, picture, mask, (32, 32), **options)[1].numpy(), 255) for s in range(40)]

    capped, free = shares(0.75), shares(1.0)
    assert sum(share > 0.75 for share in free) > 10
    assert max(capped) <= 0.75
    tried = PLAIN | {"category_cap": 0.75, "tries": 1}  # the first crop is the last
    assert [largest_share(drawn(s, picture, mask, (32, 32), **tried)[1].numpy(), 255) for s in range(40)] == free


def test_ignored_pixels_have_no_part_in_the_share_and_may_be_all() -> None:
    mask = np.array([[0, 0, 0, 1], [255, 255, 255, 255]], np.uint8)
    assert largest_share(mask, 255) == 0.75 and largest_share(mask[1:], 255) == 1.0
    picture, empty = scene(1)[0], np.full((32, 48), 255, np.uint8)
    image, target = drawn(0, picture, empty, (16, 16))
    assert bool((target == 255).all()) and bool(torch.isfinite(image).all())


# 28. Pictures smaller than the window


@pytest.mark.parametrize("size", [(50, 70), (64, 64), (300, 200), (1, 500), (500, 1), (1, 1)])
def test_any_size_is_trained_on_and_evaluated_at_its_own_size(size: tuple[int, int]) -> None:
    picture, mask = scene(3, size)
    image, target = drawn(3, picture, mask, (64, 64))
    assert image.shape == (3, 64, 64) and target.shape == (64, 64)
    prep = preparation(64, 64)
    image, target = joint_evaluation(picture, mask, prep)
    assert image.shape == (3, *size) and target.shape == size
    np.testing.assert_array_equal(target.numpy(), mask)
    torch.testing.assert_close(image, prepare_picture(picture, prep))
    wanted = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(image, wanted)


def test_colours_change_the_picture_alone_and_grey_has_one_channel() -> None:
    picture, mask = scene(0)
    plain, truth = drawn(0, picture, mask, (32, 48), **PLAIN)
    changed = [drawn(seed, picture, mask, (32, 48), **(PLAIN | {"photometric": True})) for seed in range(6)]
    assert all(torch.equal(target, truth) for _, target in changed)
    assert any(float((image - plain).abs().mean()) > 0.01 for image, _ in changed)
    seed_everything(0)
    grey = JointTrain(preparation(20, 20, 1), JointAugmentation(), 255)
    image, target = grey(picture.convert("L"), mask)
    assert image.shape == (1, 20, 20) and target.shape == (20, 20)


def test_more_than_255_classes_keep_their_numbers() -> None:
    picture = scene(0)[0]
    mask = (np.arange(32 * 48, dtype=np.int32).reshape(32, 48) % 700).astype(np.int32)
    mask[0] = 65535
    seed_everything(0)
    target = JointTrain(preparation(64, 64), JointAugmentation(), 65535)(picture, mask)[1]
    assert {*target.unique().tolist()} <= {*range(700), 65535} and bool((target[target != 65535] > 255).any())


def test_unequal_sizes_are_our_own_fault() -> None:
    with pytest.raises(ValueError, match="a picture of"):
        joint_evaluation(scene(0)[0], np.zeros((5, 5), np.uint8), preparation(8, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": (2.0, 0.5)},
        {"scale": (0.0, 1.0)},
        {"category_cap": 0.0},
        {"category_cap": 1.5},
        {"tries": 0},
        {"short_side": 0},
        {"hflip": 2.0},
        {"rotate": 200.0},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        JointAugmentation(**options)


# Sets: the same draw gives the same crop, in any process, whatever was drawn before


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[SegmentTrainSet, SegmentEvalSet]:
    data = scene_folder(Path(tmp_path_factory.mktemp("scenes")), train=4, val=2)
    splits = open_segments(data, LabelOptions(num_classes=4), workers=1)
    prep = preparation(16, 16)
    return SegmentTrainSet(splits.train, prep, JointAugmentation(), 7), SegmentEvalSet(splits.val, prep)


def test_a_draw_is_a_function_of_seed_epoch_and_picture(sets: Any) -> None:
    train = sets[0]
    first = train[Draw(1, 2)]
    train[Draw(0, 0)]
    torch.rand(5)
    for one, two in zip(first, train[Draw(1, 2)], strict=True):
        assert torch.equal(one, two)
    for other in (Draw(2, 2), Draw(1, 2, again=1)):
        assert not torch.equal(first[0], train[other][0])
    assert float(first[2]) == 1.0 and float(train[Draw(1, 2, real=False)][2]) == 0.0


def test_workers_draw_the_same(sets: Any) -> None:
    draws = [Draw(0, 0), Draw(0, 1), Draw(0, 2), Draw(0, 3)]
    alone = torch.utils.data.default_collate([sets[0][draw] for draw in draws])
    (batch,) = DataLoader(sets[0], batch_sampler=[draws], num_workers=1)
    for one, two in zip(alone, batch, strict=True):
        assert torch.equal(one, two)
    assert batch[0].shape == (4, 3, 16, 16) and batch[1].shape == (4, 16, 16)


def test_evaluation_has_no_chance(sets: Any) -> None:
    image, target, index = sets[1][1]
    assert index == 1 and image.shape == (3, 32, 48)
    np.testing.assert_array_equal(target.numpy(), scene(9001)[1])
    assert torch.equal(image, sets[1][1][0]) and len(sets[1]) == 2 and len(sets[0]) == 4
