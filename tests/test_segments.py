"""Pictures and masks on disk become pairs, and nothing is left out without a word."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jumbo_vit.data.mask_labels import LabelOptions
from jumbo_vit.data.masks import UnusableMask
from jumbo_vit.data.pairs import find_pairs
from jumbo_vit.data.survey import open_held_out_segments, open_segments
from jumbo_vit.errors import UserError
from tests.scenes import scene, scene_folder, scene_part


def names(root: Path, found: Any) -> dict[str, list[tuple[str, str]]]:
    """Pairs by split, relative to the folder."""
    return {
        split: [(Path(p).relative_to(root).as_posix(), Path(m).relative_to(root).as_posix()) for p, m in part.pairs]
        for split, part in found.splits.items()
    }


def touch(root: Path, *files: str) -> Path:
    """Empty files; pairing looks at names alone."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def opened(data: Path, **options: Any) -> Any:
    return open_segments(data, LabelOptions(**options), workers=1)


def test_the_plain_form_is_read(tmp_path: Path) -> None:
    splits = opened(scene_folder(tmp_path / "d", train=3, val=2), num_classes=4)
    assert (len(splits.train), len(splits.val), splits.held_out, splits.drawn) == (3, 2, "the split val", False)
    assert splits.train.classes == ["0", "1", "2", "3"] and splits.train.ignore_index == 255
    assert splits.train.skipped == splits.val.skipped == [] and splits.train.notes == splits.val.notes == []
    assert splits.train.name(1) == "train/images/01.png" and splits.train.mask_name(1) == "train/masks/01.png"
    picture, mask = splits.train.read(1)
    wanted, numbers = scene(1)
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(wanted))
    np.testing.assert_array_equal(mask, numbers)


@pytest.mark.parametrize(
    ("files", "pairs"),
    [
        (
            [
                "images/training/a.jpg",
                "annotations/training/a.png",
                "images/validation/b.jpg",
                "annotations/validation/b.png",
            ],
            {
                "training": [("images/training/a.jpg", "annotations/training/a.png")],
                "validation": [("images/validation/b.jpg", "annotations/validation/b.png")],
            },
        ),
        (
            ["leftImg8bit/train/ulm/a_leftImg8bit.png", "gtFine/train/ulm/a_gtFine_labelTrainIds.png"],
            {"train": [("leftImg8bit/train/ulm/a_leftImg8bit.png", "gtFine/train/ulm/a_gtFine_labelTrainIds.png")]},
        ),
        (["JPEGImages/a.jpg", "SegmentationClass/a.png"], {"": [("JPEGImages/a.jpg", "SegmentationClass/a.png")]}),
        (["Images/x/a.jpg", "Masks/x/a.png"], {"": [("Images/x/a.jpg", "Masks/x/a.png")]}),
        (["images/a.b.jpg", "masks/a.b.tif"], {"": [("images/a.b.jpg", "masks/a.b.tif")]}),
        (["Train/images/a.jpg", "Train/masks/a_L.png"], {"Train": [("Train/images/a.jpg", "Train/masks/a_L.png")]}),
        (["images/grün.jpg", "masks/gru\u0308n.png"], {"": [("images/grün.jpg", "masks/gru\u0308n.png")]}),
    ],
    ids=["ade20k", "cityscapes", "voc", "nested", "dots", "ending", "accents"],
)
def test_known_forms_pair(files: list[str], pairs: dict[str, Any], tmp_path: Path) -> None:
    touch(tmp_path, *files)
    assert names(tmp_path, find_pairs(tmp_path)) == pairs


def test_patterns_pair_what_no_form_knows(tmp_path: Path) -> None:
    touch(tmp_path, "rgb/701/a.png", "rgb/702/a.png", "gt/701/a_L.png", "gt/702/a_L.png", "gt/702/a_P.png")
    found = find_pairs(tmp_path, "rgb/{name}.png", "gt/{name}_L.png")
    assert names(tmp_path, found)[""] == [("rgb/701/a.png", "gt/701/a_L.png"), ("rgb/702/a.png", "gt/702/a_L.png")]
    assert found.notes == [f"1 pictures lie elsewhere in {tmp_path.name} and are not used, such as gt/702/a_P.png."]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("x/{name}.png", ""), "go together: give both, or none"),
        (("x/*.png", "y/{name}.png"), "--image-pattern x/*.png needs {name} once"),
        (("{split}/{name}.png", "y/{name}.png"), "{split} stands in one of"),
        (("images/{name}.png", "masks/{name}.jpg"), "no picture in"),
        (("*/{name}.png", "*/{name}.png"), "two pictures have the same name, images/a.png and masks/a.png"),
        (("images/{name}.png", "ima*/{name}.png"), "images/a.png is a picture and a mask by the patterns"),
    ],
)
def test_faulty_patterns_cost_one_line(patterns: tuple[str, str], message: str, tmp_path: Path) -> None:
    touch(tmp_path, "images/a.png", "masks/a.png")
    with pytest.raises(UserError) as caught:
        find_pairs(tmp_path, *patterns)
    assert message in str(caught.value)


def test_missing_partners_and_other_files_are_listed(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", train=4, val=2)
    (data / "train/masks/01.png").unlink()
    (data / "train/images/02.png").unlink()
    (data / "val/masks/00.png").unlink()
    (data / "train/masks/notes.txt").write_text("")
    (data / "SOURCES.txt").write_text("")
    splits = opened(data)
    assert (len(splits.train), len(splits.val)) == (2, 1)
    assert {(s.path, s.reason) for s in splits.train.skipped} == {
        ("train/images/01.png", "has no mask"),
        ("train/masks/02.png", "is a mask without a picture"),
        ("train/masks/notes.txt", "not a picture format"),
    }
    assert [(s.path, s.reason) for s in splits.val.skipped] == [("val/images/00.png", "has no mask")]


@pytest.mark.parametrize("kind", ["images", "masks"])
def test_two_files_for_one_partner_are_refused(kind: str, tmp_path: Path) -> None:
    data = scene_part(tmp_path / "d", 2)
    shutil.copy(data / kind / "00.png", data / kind / "00.bmp")
    with pytest.raises(UserError, match=rf"have the same name, {kind}/00\.bmp and {kind}/00\.png"):
        find_pairs(data)


def test_no_known_form_is_refused_with_the_forms(tmp_path: Path) -> None:
    scene_part(tmp_path / "d" / "images", 1)
    with pytest.raises(UserError, match="no pictures with masks in a form that is known"):
        find_pairs(tmp_path / "d" / "images" / "images")
    with pytest.raises(UserError, match="there is no folder"):
        find_pairs(tmp_path / "gone")


def test_one_tree_is_split_by_seed(tmp_path: Path) -> None:
    data = scene_part(tmp_path / "d", 10)
    one, again, other = (open_segments(data, seed=seed, val_fraction=0.3, workers=1) for seed in (0, 0, 5))
    assert (len(one.train), len(one.val), one.drawn) == (7, 3, True)
    assert one.held_out == "30% of the pictures, split with seed 0"
    assert one.val.samples == again.val.samples != other.val.samples
    assert not {*one.train.samples} & {*one.val.samples}


@pytest.mark.parametrize("held_out", ["valid", "validation", "test", "Val"])
def test_held_out_parts_of_other_names(held_out: str, tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 2, 1)
    (data / "val").rename(data / held_out)
    assert opened(data).held_out == f"the split {held_out}"


def test_further_splits_are_said(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 2, 1)
    scene_part(data / "test", 3, start=500)
    splits = opened(data)
    assert splits.held_out == "the split val" and splits.train.notes[0] == "Splits that are not used: test (3 pairs)."


@pytest.mark.parametrize("turned", [False, True])
def test_size_mismatch_names_file_and_sizes(turned: bool, tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 3, 1)
    path = data / "train/masks/01.png"
    with Image.open(path) as mask:
        (mask.transpose(Image.Transpose.ROTATE_90) if turned else mask.crop((0, 0, 47, 32))).save(path)
    with pytest.raises(UserError) as caught:
        opened(data)
    size = "32x48" if turned else "47x32"
    assert str(caught.value) == (
        f"1 mask cannot be used: train/masks/01.png is {size}, its picture 48x32 (width x height): make them equal"
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_is_that_of_the_upright_picture(orientation: int, tmp_path: Path) -> None:
    from tests.test_pitfalls_pictures import STORED_FROM_UPRIGHT

    data = scene_folder(tmp_path / "d", 2, 1)
    picture, mask = scene(0)
    turn = STORED_FROM_UPRIGHT[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    (picture if turn is None else picture.transpose(turn)).save(data / "train/images/00.png", exif=exif)
    splits = opened(data, num_classes=4)
    upright, found = splits.train.read(0)
    np.testing.assert_array_equal(np.asarray(upright), np.asarray(picture))
    np.testing.assert_array_equal(found, mask)
    said = [note for note in splits.train.notes if "turned upright by their EXIF orientation" in note]
    assert len(said) == (orientation != 1)
    if orientation >= 5:  # a mask that was drawn on the picture as it is stored
        assert turn is not None
        Image.fromarray(mask).transpose(turn).save(data / "train/masks/00.png")
        with pytest.raises(UserError, match="before its EXIF orientation; turn it likewise"):
            opened(data, num_classes=4)


def test_damaged_files_are_skipped_with_their_partner_and_named(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 4, 2)
    (data / "train/images/00.png").write_bytes(b"")
    mask = data / "train/masks/01.png"
    mask.write_bytes(mask.read_bytes()[:-30])
    splits = opened(data)
    assert [splits.train.name(i) for i in range(2)] == ["train/images/02.png", "train/images/03.png"]
    assert [s.path.removeprefix("train/") for s in splits.train.skipped] == ["images/00.png", "masks/01.png"]
    for path in (data / "val/images").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 2 pairs can be read"):
        opened(data)


def test_values_out_of_range_are_refused_before_training(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 3, 2)
    with pytest.raises(UserError) as caught:
        opened(data, num_classes=3)
    text = str(caught.value)
    assert text.startswith("5 masks cannot be used: train/masks/00.png holds the value 3 in")
    assert "and 2 more; classes are 0 to 2, 255 ignored" in text


def test_a_file_that_changed_is_refused_when_it_is_read(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 2, 1)
    train = opened(data).train
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(data / "train/masks/00.png")
    with pytest.raises(UnusableMask, match=r"train/masks/00\.png: it is 5x5, its picture 48x32"):
        train.read(0)


def test_a_mask_without_labelled_pixels_is_legal_but_not_all_of_them(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 2, 1)
    empty = Image.fromarray(np.full((32, 48), 255, np.uint8))
    empty.save(data / "train/masks/00.png")
    train = opened(data).train
    assert len(train) == 2 and (train.read(0)[1] == 255).all()
    empty.save(data / "val/masks/00.png")
    with pytest.raises(UserError, match="no pixel of the val masks is labelled"):
        opened(data)


def binary_folder(root: Path, train: tuple[int, int], val: tuple[int, int]) -> Path:
    """Masks of two values, one pair of values a part."""
    for part, values in (("train", train), ("val", val)):
        scene_part(root / part, 2, start=len(part))
        for path in (root / part / "masks").iterdir():
            Image.fromarray(np.where(np.arange(48) < 20, *values).astype(np.uint8)[None].repeat(32, 0)).save(path)
    return root


def test_binary_masks_learn_both_classes(tmp_path: Path) -> None:
    for values in ((0, 255), (0, 1)):
        splits = opened(binary_folder(tmp_path / str(values), values, values))
        for part in (splits.train, splits.val):
            assert np.unique(part.read(0)[1]).tolist() == [0, 1] and part.labels.values == values


def test_0_and_255_beside_0_and_1_are_not_read_silently(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"val/masks/00\.png holds the value 1 in .* classes are 0 and 255"):
        opened(binary_folder(tmp_path / "a", (0, 255), (0, 1)))
    splits = opened(binary_folder(tmp_path / "b", (0, 1), (0, 255)))
    assert "2 masks hold 255, which is ignored, and never 1, such as val/masks/00.png" in splits.val.notes[0]


@pytest.mark.parametrize("shift", [False, True])
def test_evaluation_reads_by_the_labels_of_training(shift: bool, tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 3, 2)
    splits = opened(data, reduce_zero_label=shift)
    labels = type(splits.train.labels).from_dict(splits.train.labels.to_dict())
    for given in (data, data / "val"):
        found = open_held_out_segments(given, labels, workers=1)
        assert len(found) == 2
        np.testing.assert_array_equal(found.read(0)[1], splits.val.read(0)[1])
    assert np.unique(splits.train.read(0)[1]).tolist() == ([0, 1, 2, 255] if shift else [0, 1, 2, 3, 255])
    shutil.rmtree(data / "val")
    with pytest.raises(UserError, match="has no held-out part"):
        open_held_out_segments(data, labels, workers=1)


def test_checksum_and_subset(tmp_path: Path) -> None:
    data = scene_folder(tmp_path / "d", 3, 1)
    train = opened(data).train
    assert train.checksum() == opened(data).train.checksum() != opened(data, ignore_index=[200, 255]).train.checksum()
    assert train.subset([2, 0]).samples == [train.samples[2], train.samples[0]]
    assert train.subset([2, 0]).checksum() != train.subset([0, 2]).checksum()


def test_too_few_pictures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one picture with a mask for training, so none can be held out"):
        opened(scene_part(tmp_path / "d", 1))
    with pytest.raises(UserError, match="--val-fraction"):
        open_segments(tmp_path / "d", val_fraction=0.0)
    scene_part(tmp_path / "e" / "val", 2)
    with pytest.raises(UserError, match="has no training part with masks, only val: add train"):
        opened(tmp_path / "e")
