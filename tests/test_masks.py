"""Mask files of every kind come out as the numbers that were drawn, or are refused with file and values."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jumbo_vit.data.mask_labels import (
    LabelOptions,
    default_colours,
    read_class_names,
    read_colour_map,
    resolve_labels,
)
from jumbo_vit.data.masks import ColourMap, Labels, UnusableMask, mask_picture, read_mask, read_stored_values
from jumbo_vit.errors import UnreadableImage, UserError

VALUES = np.array([[0, 1, 2, 3], [3, 255, 1, 0], [2, 2, 0, 255]], np.uint8)
MAP = ColourMap(("sky", "road", "car", "tree"), ((0, 0, 0), (128, 64, 128), (0, 0, 142), (7, 7, 7)), ((9, 8, 7),))


def labels(number: int = 4, **changes: Any) -> Labels:
    """Classes 0 to number - 1, and 255 ignored, unless `changes` says otherwise."""
    options: dict[str, Any] = {"num_classes": number} | changes
    return resolve_labels(LabelOptions(**options), None, (), False)[0]


def coloured(alpha: bool = False) -> Image.Image:
    """VALUES as colours of MAP, 255 as its ignored colour."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(MAP.colours)], table[255] = MAP.colours, MAP.ignored[0]
    picture = Image.fromarray(table[VALUES])
    if alpha:
        picture.putalpha(255)
    return picture


def palette(colours: list[tuple[int, int, int]] | None = None) -> Image.Image:
    """VALUES as indices."""
    picture = Image.fromarray(VALUES)
    picture.putpalette([channel for colour in colours or [(9, 99, 199)] * 256 for channel in colour])
    return picture


def grey_alpha(alpha: int = 255) -> Image.Image:
    return Image.merge("LA", (Image.fromarray(VALUES), Image.new("L", (4, 3), alpha)))


# 25 and "mask files of every kind"


@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("grey.png", Image.fromarray(VALUES)),
        ("grey.bmp", Image.fromarray(VALUES)),
        ("grey.tif", Image.fromarray(VALUES)),
        ("grey16.png", Image.fromarray(VALUES.astype(np.uint16))),
        ("grey16.tif", Image.fromarray(VALUES.astype(np.uint16))),
        ("grey32.tif", Image.fromarray(VALUES.astype(np.int32))),
        ("float.tif", Image.fromarray(VALUES.astype(np.float32))),
        ("alpha.png", grey_alpha()),
        ("palette.png", palette()),
        ("palette.bmp", palette()),
        ("equal.png", Image.fromarray(np.stack([VALUES] * 3, -1))),
        ("equal.webp", Image.fromarray(np.stack([VALUES] * 3, -1))),
        ("equal-alpha.png", Image.fromarray(np.stack([VALUES] * 3, -1)).convert("RGBA")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_file_gives_the_numbers_that_were_drawn(name: str, picture: Image.Image, tmp_path: Path) -> None:
    picture.save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
    found = read_mask(tmp_path / name, labels())
    np.testing.assert_array_equal(found, VALUES)
    assert found.dtype == np.uint8


def test_a_palette_gives_the_index_whatever_its_colours_and_its_transparency(tmp_path: Path) -> None:
    palette([(255 - i, i, 0) for i in range(256)]).save(tmp_path / "a.png", transparency=0)
    np.testing.assert_array_equal(read_mask(tmp_path / "a.png", labels()), VALUES)


def test_16_bit_values_are_never_scaled(tmp_path: Path) -> None:
    values = np.array([[0, 299, 255], [256, 65535, 1]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    many = labels(300, ignore_index=[65535])
    found = read_mask(tmp_path / "a.png", many)
    np.testing.assert_array_equal(found, values)  # class 255 is a class, and not what is ignored
    assert many.ignore_index == 65535
    with pytest.raises(UnusableMask, match="holds the values 256, 299, 65535 in 3 pixels, which is no class"):
        read_mask(tmp_path / "a.png", labels())


@pytest.mark.parametrize("stored", [(0, 1), (0, 255)])
def test_a_1_bit_mask_has_classes_0_and_1_beside_files_of_either_kind(stored: tuple[int, int], tmp_path: Path) -> None:
    bits = np.array([[True, False], [False, True]])
    Image.fromarray(bits).save(tmp_path / "bit.png")
    Image.fromarray(np.where(bits, *stored[::-1]).astype(np.uint8)).save(tmp_path / "grey.png")
    own, _ = resolve_labels(LabelOptions(), None, set(stored), True)
    assert own.values == stored
    for name in ("bit.png", "grey.png"):
        np.testing.assert_array_equal(read_mask(tmp_path / name, own), bits.astype(int))


@pytest.mark.parametrize("alpha", [False, True])
def test_colours_are_read_exactly_by_the_map(alpha: bool, tmp_path: Path) -> None:
    own, _ = resolve_labels(LabelOptions(), MAP, (), False)
    coloured(alpha).save(tmp_path / "a.png")
    found = read_mask(tmp_path / "a.png", own)
    np.testing.assert_array_equal(found, VALUES)
    Image.fromarray(VALUES).save(tmp_path / "grey.png")  # numbers stay numbers beside colours
    np.testing.assert_array_equal(read_mask(tmp_path / "grey.png", own), VALUES)
    grey = Image.new("RGB", (2, 2), (7, 7, 7))  # three equal channels are a colour where there is a map
    grey.save(tmp_path / "tree.png")
    assert (read_mask(tmp_path / "tree.png", own) == 3).all()


def test_an_unknown_colour_is_named_with_its_pixels(tmp_path: Path) -> None:
    picture = coloured()
    picture.putpixel((1, 0), (129, 64, 128))
    picture.save(tmp_path / "a.png")
    with pytest.raises(UnusableMask, match=r"a\.png: it holds colours that are not in the colour map: 129,64,128 \(1 "):
        read_stored_values(tmp_path / "a.png", MAP)
    with pytest.raises(UnusableMask, match="is a colour picture: give --colour-map FILE"):
        read_stored_values(tmp_path / "a.png")


def test_a_palette_in_another_order_than_the_map_is_refused(tmp_path: Path) -> None:
    right = [*MAP.colours] + [MAP.ignored[0]] * 252
    palette(right).save(tmp_path / "right.png")
    np.testing.assert_array_equal(read_stored_values(tmp_path / "right.png", MAP).values, VALUES)
    coloured().quantize(5).save(tmp_path / "shrunk.png")
    with pytest.raises(UnusableMask, match="has the colour of class"):
        read_stored_values(tmp_path / "shrunk.png", MAP)


@pytest.mark.parametrize("make", [lambda: grey_alpha(0), lambda: grey_alpha(128), lambda: _half(coloured(True))])
def test_transparent_pixels_are_no_guess(make: Any, tmp_path: Path) -> None:
    make().save(tmp_path / "a.png")
    with pytest.raises(UnusableMask, match="transparent pixels of 12: save it without transparency"):
        read_stored_values(tmp_path / "a.png", MAP)


def _half(picture: Image.Image) -> Image.Image:
    picture.putpixel((0, 0), (0, 0, 0, 0))
    return picture


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.jpg", {}),
        ("a.webp", {}),
        ("a.jp2", {}),
        ("a.tif", {"compression": "jpeg"}),
        ("jpeg.png", {"format": "JPEG"}),
    ],
)
def test_lossy_files_are_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    mode = "L" if name != "a.webp" else "RGB"
    Image.fromarray(VALUES).convert(mode).save(tmp_path / name, **options)
    with pytest.raises(UnusableMask, match="which is lossy and changes the values at borders: make it PNG again"):
        read_stored_values(tmp_path / name)


def test_a_gif_is_refused_for_its_numbers_are_those_of_its_writer(tmp_path: Path) -> None:
    Image.fromarray(VALUES).save(tmp_path / "a.gif")
    with pytest.raises(UnusableMask, match="is a GIF, whose writers number the colours anew"):
        read_stored_values(tmp_path / "a.gif")


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (Image.new("CMYK", (4, 3)), "is a CMYK picture: save it as grey, palette or RGB"),
        (Image.fromarray(VALUES / np.float32(255)), "floats that are no whole numbers"),
        (Image.fromarray(np.full((2, 2), np.nan, np.float32)), "floats that are no whole numbers"),
    ],
)
def test_other_forms_are_refused(picture: Image.Image, message: str, tmp_path: Path) -> None:
    picture.save(tmp_path / "a.tif")
    with pytest.raises(UnusableMask, match=message):
        read_stored_values(tmp_path / "a.tif")


def test_damaged_files_are_unreadable_not_unusable(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 4, (64, 64), np.uint8)).save(buffer, "PNG")
    for name, content in {"cut.png": buffer.getvalue()[:-200], "empty.png": b"", "text.png": b"no picture"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnreadableImage, match=name):
            read_mask(tmp_path / name, labels())


def test_out_of_range_values_are_named_with_the_rule(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 4, 9], [4, 255, 1]], np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(UnusableMask) as caught:
        read_mask(tmp_path / "a.png", labels(), "train/masks/a.png")
    text = str(caught.value)
    assert text.startswith("cannot use the mask train/masks/a.png: it holds the values 4, 9 in 3 pixels")
    assert "classes are 0 to 3, 255 ignored" in text and "--reduce-zero-label" in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.reason) == (text, "train/masks/a.png", caught.value.reason)


def test_negative_values_are_out_of_range(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, -1]], np.int32)).save(tmp_path / "a.tif")
    with pytest.raises(UnusableMask, match="the value -1 in 1 pixels"):
        read_mask(tmp_path / "a.tif", labels())


def test_the_shift_by_one_is_applied_once_and_undone(tmp_path: Path) -> None:
    own = labels(3, reduce_zero_label=True)
    assert own.values == (1, 2, 3) and own.ignored == (0, 255) and own.classes == ("1", "2", "3")
    Image.fromarray(VALUES).save(tmp_path / "a.png")
    found = read_mask(tmp_path / "a.png", own)
    np.testing.assert_array_equal(found, np.where((VALUES == 0) | (VALUES == 255), 255, VALUES.astype(int) - 1))
    np.testing.assert_array_equal(own.stored(found), np.where(VALUES == 255, 0, VALUES))
    Image.fromarray(np.full((2, 2), 4, np.uint8)).save(tmp_path / "b.png")
    with pytest.raises(UnusableMask, match="the value 4"):
        read_mask(tmp_path / "b.png", own)


@given(
    number=st.integers(2, 400),
    shift=st.booleans(),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    seed=st.integers(0, 999),
)
def test_what_goes_in_comes_out_and_goes_back(
    number: int, shift: bool, size: tuple[int, int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = labels(number, reduce_zero_label=shift)
    draw = np.random.default_rng(seed)
    stored = draw.choice(np.array([*own.values, *own.ignored]), size)
    picture = mask_picture(stored.astype(np.uint8 if stored.max() < 256 else np.uint16))
    path = tmp_path_factory.mktemp("mask") / "a.png"
    picture.save(path)
    found = read_mask(path, own)
    assert found.shape == size
    ignored = np.isin(stored, own.ignored)
    np.testing.assert_array_equal(found == own.ignore_index, ignored)
    np.testing.assert_array_equal(found[~ignored], stored[~ignored] - shift)
    np.testing.assert_array_equal(own.stored(found)[~ignored], stored[~ignored])
    assert Labels.from_dict(json.loads(json.dumps(own.to_dict()))) == own


def test_predictions_of_a_binary_model_are_0_and_255_again() -> None:
    own, notes = resolve_labels(LabelOptions(num_classes=2), None, {0, 255}, False)
    assert own.values == (0, 255) and own.ignored == () and "--ignore-index 255" in notes[0]
    back = own.stored(np.array([[0, 1], [1, 1]]))
    assert back.dtype == np.uint8 and back.tolist() == [[0, 255], [255, 255]]
    with pytest.raises(ValueError, match="no number means that"):
        own.stored(np.array([255]))
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        own.stored(np.array([2]))


def test_a_mask_with_its_own_orientation_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(VALUES).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_mask(tmp_path / "a.png", labels()), VALUES)


# What the numbers mean


@pytest.mark.parametrize(
    ("numbers", "options", "values", "ignored"),
    [
        ({0, 1, 2}, {}, (0, 1, 2), (255,)),
        ({0, 1, 2, 255}, {}, (0, 1, 2), (255,)),
        ({0, 255}, {}, (0, 255), ()),
        ({0, 1, 255}, {"num_classes": 2}, (0, 1), (255,)),
        ({0, 1}, {"num_classes": 2}, (0, 1), (255,)),
        ({0, 255}, {"num_classes": 3}, (0, 1, 2), (255,)),
        ({0, 255}, {"num_classes": 2, "ignore_index": [255]}, (0, 1), (255,)),
        ({0, 1, 2, 11}, {"num_classes": 11, "ignore_index": [11]}, tuple(range(11)), (11,)),
        ({0, 1, 2, 11}, {"ignore_index": [11]}, (0, 1, 2), (11,)),
        ({0, 1, 2, 3}, {"reduce_zero_label": True}, (1, 2, 3), (0, 255)),
        ({1, 2, 255}, {"reduce_zero_label": True, "ignore_index": [255, 9]}, (1, 2), (0, 255, 9)),
        (set(), {"num_classes": 256}, tuple(range(256)), ()),
    ],
)
def test_numbers_of_the_classes(
    numbers: set[int], options: dict[str, Any], values: tuple[int, ...], ignored: tuple[int, ...]
) -> None:
    found, notes = resolve_labels(LabelOptions(**options), None, numbers, False)
    assert (found.values, found.ignored) == (values, ignored)
    assert len(found.classes) == len(found.colours) == len(values)
    assert bool(notes) == ("num_classes" not in options)  # what is guessed is said


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        ({0, 255}, {"ignore_index": [255]}, "hold one class only, 0"),
        ({255}, {}, "no pixel of the training masks is labelled"),
        ({0, 128, 254}, {}, "hold the numbers 0, 128, 254, from which the number of classes cannot be told"),
        ({0, 1}, {"num_classes": 1}, "--num-classes 1: segmentation needs at least 2 classes"),
        ({0, 1}, {"num_classes": 3, "ignore_index": [0]}, "--ignore-index 0 is also the number of the class 0"),
        ({0, 1}, {"num_classes": 3, "ignore_index": [-1]}, "--ignore-index -1: a number in a mask lies in 0..65535"),
        ({0, 1}, {"num_classes": 256, "ignore_index": [255]}, "--ignore-index 255 is also the number of the class 255"),
    ],
)
def test_contradictions_cost_one_line(numbers: set[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        resolve_labels(LabelOptions(**options), None, numbers, False)


def test_class_names_and_colours_come_from_files(tmp_path: Path) -> None:
    names, table, mapping = tmp_path / "names.txt", tmp_path / "map.csv", tmp_path / "map.json"
    names.write_text("sky\nroad\n\ncar\n", encoding="utf-8-sig")
    table.write_text("name, r, g, b\nsky,0,0,0\nroad,128,64,128\ncar,0,0,142\nIgnore,9,8,7\nignore,1,1,1\n")
    mapping.write_text('{"sky": [0, 0, 0], "ignore": [9, 8, 7], "road": [128, 64, 128], "car": [0, 0, 142]}')
    assert read_class_names(names) == ["sky", "road", "car"]
    found = read_colour_map(table)
    assert found.names == ("sky", "road", "car") and found.ignored == ((9, 8, 7), (1, 1, 1))
    assert read_colour_map(mapping) == ColourMap(found.names, found.colours, ((9, 8, 7),))
    options = LabelOptions(classes=str(names), colour_map=str(table))
    own, notes = resolve_labels(options, options.read_colour_map(), {0, 1}, False)
    assert own.classes == found.names and own.colours == found.colours and notes == []
    names.write_text("sky\ncar\nroad\n")
    with pytest.raises(UserError, match="differ in names or order"):
        resolve_labels(options, found, {0, 1}, False)
    with pytest.raises(UserError, match=r"--num-classes 4, but .*names\.txt has 3 classes"):
        resolve_labels(LabelOptions(classes=str(names), num_classes=4), None, {0, 1}, False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "sky,0,0\n", "line 1 is not name,r,g,b"),
        ("a.csv", "sky,0,0,0\nroad,0,0,256\n", "line 2 is not name,r,g,b with numbers 0 to 255"),
        ("a.csv", "sky,0,0,0\nroad,0,0,0\n", "line 2: road and sky have the same colour"),
        ("a.csv", "sky,0,0,0\nsky,0,0,1\n", "the class sky comes twice"),
        ("a.csv", "sky,0,0,0\n", "has 1 classes"),
        ("a.csv", "", "has 0 classes"),
        ("a.json", "{", "is no JSON"),
        ("a.json", '["sky"]', "must hold"),
        ("a.json", '{"sky": [0, 0, 0], "sky": [1, 1, 1]}', "the class sky comes twice"),
        ("a.json", '{"sky": [0, 0, 0.5], "b": [1, 1, 1]}', "is not name,r,g,b"),
    ],
)
def test_faulty_colour_maps_cost_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_colour_map(tmp_path / name)


def test_missing_and_faulty_lists(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read_colour_map(tmp_path / "gone.csv")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="as a text in UTF-8"):
        read_class_names(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("sky\nroad\nsky\n")
    with pytest.raises(UserError, match="names the class sky twice"):
        read_class_names(tmp_path / "b.txt")


def test_default_colours_differ() -> None:
    assert len(set(default_colours(151))) == 151 and default_colours(5) == default_colours(151)[:5]
