"""The one picture reader: each rule against the picture that a careful person would expect."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, features

from jumbo_vit.data.images import BACKGROUND, Skipped, find_images, is_hidden, read_image
from jumbo_vit.errors import UnreadableImage, UserError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def corners() -> Image.Image:
    """12x8 with a different colour in each quarter, so that every turn and flip shows."""
    image = Image.new("RGB", (12, 8), RED)
    image.paste(GREEN, (6, 0, 12, 4))
    image.paste(BLUE, (0, 4, 6, 8))
    image.paste((255, 255, 0), (6, 4, 12, 8))
    return image


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def reason(source: object, in_chans: int = 3) -> str:
    with pytest.raises(UnreadableImage) as caught:
        read_image(source, in_chans)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value.reason


# The tag says how the stored pixels are to be turned; storing is the opposite turn.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("suffix", ["png", "tif", "webp", "jpg"])
@pytest.mark.parametrize("orientation", STORED)
def test_every_orientation_reads_as_the_upright_picture(tmp_path: Path, orientation: int, suffix: str) -> None:
    turn = STORED[orientation]
    stored = corners() if turn is None else corners().transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == "webp" else {"quality": 100, "subsampling": 0} if suffix == "jpg" else {}
    path = tmp_path / f"turned.{suffix}"
    stored.save(path, exif=exif, **options)
    for source in (path, str(path), Image.open(path)):
        image = read_image(source)
        assert image.mode == "RGB"
        assert np.abs(pixels(image) - pixels(corners())).max() <= (3 if suffix == "jpg" else 0)
    assert read_image(path, in_chans=1).size == (12, 8)
    once = read_image(path)
    assert read_image(once).size == once.size  # the tag does not act twice
    assert once.getexif().get(0x0112, 1) == 1


def test_a_given_picture_is_turned_but_not_changed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    corners().save(tmp_path / "a.png", exif=exif)
    given = Image.open(tmp_path / "a.png")
    turned = read_image(given)
    assert turned.size == (8, 12)
    assert given.size == (12, 8)
    assert read_image(turned).size == (8, 12)
    plain = corners()
    assert read_image(plain) is plain


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\x00\x00garbage", b"Exif\x00\x00II*\x00\xff\xff\xff\xff", b"Exif\x00\x00"])
def test_broken_exif_is_tolerated(tmp_path: Path, exif: bytes) -> None:
    corners().save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").size == (12, 8)


def disc(mode: str) -> Image.Image:
    """A black disc; what the transparent pixels hide is red where the mode has colours."""
    mask = Image.new("L", (16, 16), 0)
    ImageDraw.Draw(mask).ellipse((3, 3, 12, 12), fill=255)
    if mode == "P":
        image = Image.new("P", (16, 16), 1)
        image.putpalette([0, 0, 0, *RED])
        image.paste(0, (0, 0), mask)
        return image
    image = Image.new("RGB" if mode == "RGBA" else "L", (16, 16), RED if mode == "RGBA" else 77)
    image.paste(0, (0, 0, 16, 16), mask)
    image.putalpha(mask)
    assert image.mode == mode
    return image


def test_transparency_of_every_kind_gives_the_same_pixels(tmp_path: Path) -> None:
    disc("RGBA").save(tmp_path / "rgba.png")
    disc("RGBA").save(tmp_path / "rgba.webp", lossless=True)
    disc("RGBA").save(tmp_path / "rgba.tif")
    disc("LA").save(tmp_path / "la.png")
    disc("P").save(tmp_path / "p.png", transparency=1)
    disc("P").save(tmp_path / "p.gif", transparency=1)
    disc("P").save(tmp_path / "p-bytes.png", transparency=bytes([255, 0]))
    disc("P").convert("RGB").save(tmp_path / "rgb.png", transparency=RED)
    grey = disc("LA").getchannel("L")
    grey.save(tmp_path / "l.png", transparency=77)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    deep.save(tmp_path / "i16.png", transparency=77 * 257)
    expected = Image.new("RGB", (16, 16), BACKGROUND)
    ImageDraw.Draw(expected).ellipse((3, 3, 12, 12), fill=(0, 0, 0))
    paths = find_images(tmp_path)[0]
    assert len(paths) == 10
    for path in paths:
        assert (pixels(read_image(path)) == pixels(expected)).all(), path.name
        assert (pixels(read_image(path, 1)) == pixels(expected.convert("L"))).all(), path.name
    for mode in ("RGBA", "LA"):
        assert (pixels(read_image(disc(mode))) == pixels(expected)).all()
    assert (pixels(read_image(disc("RGBA").convert("RGBa"))) == pixels(expected)).all()
    assert (pixels(read_image(disc("LA").convert("La"))) == pixels(expected)).all()
    assert (pixels(read_image(np.asarray(disc("RGBA")))) == pixels(expected)).all()


def test_half_transparent_pixels_mix_with_the_background() -> None:
    image = read_image(Image.new("RGBA", (2, 2), (0, 0, 0, 51)))
    assert image.getpixel((0, 0)) == (204, 204, 204)


@pytest.mark.parametrize(("mode", "suffix"), [("CMYK", "jpg"), ("CMYK", "tif"), ("YCbCr", "jpg"), ("P", "png")])
def test_colour_spaces_read_as_their_colour(tmp_path: Path, mode: str, suffix: str) -> None:
    Image.new("RGB", (8, 8), RED).convert(mode).save(tmp_path / f"red.{suffix}")
    assert np.abs(pixels(read_image(tmp_path / f"red.{suffix}")) - RED).max() <= 3


def test_inverted_cmyk_of_adobe(tmp_path: Path) -> None:
    # Photoshop stores ink inverted, marked by an APP14 segment, which Pillow writes as well.
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "red.jpg")
    assert b"Adobe" in (tmp_path / "red.jpg").read_bytes()
    assert np.abs(pixels(read_image(tmp_path / "red.jpg")) - RED).max() <= 3


def test_spaces_that_exist_in_memory_only(tmp_path: Path) -> None:
    assert read_image(Image.new("RGB", (2, 2), RED).convert("HSV")).getpixel((0, 0)) == RED
    assert read_image(Image.new("1", (2, 2), 1)).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(Image.new("1", (2, 2), 1), 1).getpixel((0, 0)) == 255
    lab = Image.new("LAB", (8, 8), (138, 81 + 128, 70 + 128))  # sRGB red: L 54.3 %, a 81, b 70
    lab.save(tmp_path / "lab.tif")
    assert np.abs(pixels(read_image(tmp_path / "lab.tif")) - RED).max() <= 6


@pytest.mark.parametrize("suffix", ["gif", "webp", "tif", "png"])
def test_first_frame_of_several(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"two.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    Image.new("RGB", (8, 8), RED).save(path, save_all=True, append_images=[Image.new("RGB", (8, 8), GREEN)], **options)
    image = read_image(path)
    assert image.getpixel((3, 3)) == RED
    pickle.loads(pickle.dumps(image))  # nothing holds the closed file


def test_mpo_of_phones(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), RED).save(
        tmp_path / "a.mpo", save_all=True, append_images=[Image.new("RGB", (8, 8), BLUE)]
    )
    assert [path.name for path in find_images(tmp_path)[0]] == ["a.mpo"]
    assert np.abs(pixels(read_image(tmp_path / "a.mpo")) - RED).max() <= 3


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bit_grey_keeps_its_range(tmp_path: Path, suffix: str) -> None:
    for name, value in {"dark": 10_000, "bright": 50_000, "full": 65_535, "none": 0}.items():
        Image.fromarray(np.full((8, 8), value, np.uint16)).save(tmp_path / f"{name}.{suffix}")
        expected = round(value / 257)
        assert read_image(tmp_path / f"{name}.{suffix}", 1).getpixel((2, 2)) == expected
        assert read_image(tmp_path / f"{name}.{suffix}").getpixel((2, 2)) == (expected,) * 3
        assert read_image(np.full((8, 8), value, np.uint16), 1).getpixel((2, 2)) == expected


def test_16_bit_big_endian_and_32_bit(tmp_path: Path) -> None:
    Image.frombytes("I;16B", (2, 1), b"\x27\x10\xc3\x50").save(tmp_path / "b.tif")
    assert pixels(read_image(tmp_path / "b.tif", 1)).tolist() == [[39, 195]]
    Image.fromarray(np.array([[0, 65535]], np.int32)).save(tmp_path / "i.tif")
    assert pixels(read_image(tmp_path / "i.tif", 1)).tolist() == [[0, 255]]
    Image.fromarray(np.array([[-1, 70000]], np.int32)).save(tmp_path / "far.tif")
    assert reason(tmp_path / "far.tif") == "has values -1..70000, outside the 16-bit range 0..65535"


def test_float_is_read_in_0_to_1_and_refused_elsewhere(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)).save(tmp_path / "f.tif")
    assert pixels(read_image(tmp_path / "f.tif", 1)).tolist() == [[0, 128, 255]]
    for values, word in {(0.0, 200.0): "0..200", (-0.5, 1.0): "-0.5..1", (0.0, np.nan): "NaN"}.items():
        array = np.array([values], np.float32)
        Image.fromarray(array).save(tmp_path / "bad.tif")
        for source in (tmp_path / "bad.tif", array):
            assert reason(source).startswith("float values must lie in 0..1")
            assert word in reason(source)


def test_arrays() -> None:
    colour = np.asarray(corners())
    assert (pixels(read_image(colour)) == colour).all()
    assert (pixels(read_image(colour / 255.0)) == colour).all()
    assert (pixels(read_image(colour.astype(np.uint16) * 257)) == colour).all()
    assert (pixels(read_image(colour[:, ::-1])) == colour[:, ::-1]).all()
    assert read_image(np.zeros((4, 5), np.uint8)).size == (5, 4)
    assert read_image(np.ones((4, 5, 1), np.uint8), 1).getpixel((0, 0)) == 1
    assert read_image(np.ones((4, 5), bool), 1).getpixel((0, 0)) == 255
    assert "channels last" in reason(np.zeros((3, 8, 8), np.uint8))
    assert "channels last" in reason(np.zeros((0, 8), np.uint8))
    assert "bool, uint8, uint16 or float" in reason(np.zeros((8, 8), np.int64))


def test_grey_is_the_luma_of_the_colours(tmp_path: Path) -> None:
    corners().save(tmp_path / "a.png")
    corners().convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "p.png")
    for name in ("a.png", "p.png"):
        assert (pixels(read_image(tmp_path / name, 1)) == pixels(corners().convert("L"))).all()


def test_other_numbers_of_channels_are_a_mistake() -> None:
    with pytest.raises(UserError, match="1 channel \\(grey\\) or 3 \\(colour\\), not 4: set in_chans to 1 or 3"):
        read_image(corners(), in_chans=4)
    with pytest.raises(UserError, match="a path, a PIL image or a NumPy array, not list"):
        read_image([1, 2])  # type: ignore[arg-type]


def noise(path: Path) -> bytes:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "gif", "tif", "webp", "ppm", "jp2"])
@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_cut_files_are_refused(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"cut.{suffix}"
    whole = noise(path)
    path.write_bytes(whole[: int(len(whole) * kept)])
    assert reason(path).startswith(("is cut off", "is damaged"))
    if suffix in ("jpg", "bmp", "ppm"):
        assert reason(path) == "is cut off"


def test_bad_files_are_named_with_a_plain_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    assert reason(tmp_path / "empty.jpg") == "is empty"
    (tmp_path / "text.jpg").write_text("hello, I am text\n" * 20)
    assert reason(tmp_path / "text.jpg") == "is not a picture"
    (tmp_path / "head.jpg").write_bytes(noise(tmp_path / "whole.jpg")[:10])
    assert reason(tmp_path / "head.jpg") == "is cut off"
    (tmp_path / "head.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\x00" * 40)
    assert reason(tmp_path / "head.png").startswith("is cut off or damaged (begins like PNG")
    (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n")
    assert reason(tmp_path / "script.jpg") == "has the format EPS, which is not decoded here: convert it to PNG"
    assert reason(tmp_path) == "is a folder"
    assert reason(tmp_path / "none.jpg") == "there is no such file"
    with pytest.raises(UnreadableImage, match=r"cannot read the picture .*empty\.jpg: is empty"):
        read_image(tmp_path / "empty.jpg")
    broken = Image.open(io.BytesIO(noise(tmp_path / "whole.jpg")[:3000]))
    assert reason(broken) == "is cut off"


def test_the_content_decides_not_the_extension(tmp_path: Path) -> None:
    corners().save(tmp_path / "png.jpg", format="PNG")
    assert (pixels(read_image(tmp_path / "png.jpg")) == pixels(corners())).all()


def test_pictures_above_the_limit(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    # Two sizes: above the limit Pillow itself only warns, above twice the limit it refuses.
    for side in (10_000, 14_000):
        Image.new("1", (side, side)).save(tmp_path / "large.png")
        text = reason(tmp_path / "large.png")
        assert text.startswith(f"has {side * side} pixels, above the limit of {Image.MAX_IMAGE_PIXELS}")
        assert "raise PIL.Image.MAX_IMAGE_PIXELS" in text
    assert not recwarn.list


def test_a_pipe_is_not_waited_on(tmp_path: Path) -> None:
    os = pytest.importorskip("os")
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes on this system")
    os.mkfifo(tmp_path / "pipe.png")
    assert reason(tmp_path / "pipe.png") == "is not a regular file"
    assert find_images(tmp_path) == ([], [Skipped("pipe.png", "not a regular file")])


# Finding


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path) -> list[str]:
    return [path.relative_to(root.absolute()).as_posix() for path in find_images(root)[0]]


def test_hidden_entries_are_neither_taken_nor_counted(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.png", ".ipynb_checkpoints/a.png", "a/._x.png", "a/.DS_Store", "__MACOSX/a/x.png", "Thumbs.db")
    touch(tmp_path, "a/Desktop.ini")
    assert found(tmp_path) == ["a/x.png"]
    assert find_images(tmp_path)[1] == []
    assert is_hidden(".git")
    assert is_hidden("thumbs.DB")
    assert not is_hidden("a.png")


def test_a_hidden_root_is_read(tmp_path: Path) -> None:
    touch(tmp_path, ".cache/data/x.png")
    assert found(tmp_path / ".cache" / "data") == ["x.png"]


def test_every_extension_in_any_case(tmp_path: Path) -> None:
    names = ["a.JPG", "b.webp", "c.bmp", "d.tif", "e.GIF", "f.jpeg", "g.PNG", "h.jp2", "i.ppm", "j.tga", "k.ico"]
    assert features.check("webp")
    touch(tmp_path, *names, "notes.txt", "data.h5", "noextension", "draw.eps")
    assert found(tmp_path) == names
    assert {(item.path, item.reason) for item in find_images(tmp_path)[1]} == {
        (name, "not a picture format") for name in ("notes.txt", "data.h5", "noextension", "draw.eps")
    }


def test_order_is_total_and_independent_of_the_spelling(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "e\u0301.png",
        "f.png",
        "\u00e9/a.png",
        "z.png",
        "1.png",
        "10.png",
        "2.png",
        "b c.png",
        "\u732b/\U0001f408.png",
    )
    order = [
        "1.png",
        "10.png",
        "2.png",
        "b c.png",
        "f.png",
        "z.png",
        "e\u0301.png",
        "\u00e9/a.png",
        "\u732b/\U0001f408.png",
    ]
    assert found(tmp_path) == order


def test_links(tmp_path: Path) -> None:
    data = tmp_path / "data"
    touch(data, "a/x.png", "b/c/y.png")
    touch(tmp_path, "elsewhere/sub/z.png", "beside/w.png")
    (data / "d").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (data / "a" / "loop").symlink_to(data, target_is_directory=True)
    (data / "b" / "up").symlink_to(tmp_path, target_is_directory=True)
    (data / "e").symlink_to(data / "a", target_is_directory=True)
    (data / "self").symlink_to(data / "self")
    (data / "gone.png").symlink_to(tmp_path / "nothing.png")
    (data / "file.png").symlink_to(tmp_path / "beside" / "w.png")
    assert found(data) == ["a/x.png", "b/c/y.png", "d/sub/z.png", "file.png"]
    again = "a link to a folder that is read already or holds the link itself"
    assert find_images(data)[1] == [
        Skipped("a/loop", again),
        Skipped("b/up", again),
        Skipped("e", again),
        Skipped("gone.png", "a broken link"),
        Skipped("self", "a broken link"),
    ]
    (tmp_path / "root").symlink_to(data, target_is_directory=True)
    assert found(tmp_path / "root") == found(data)


def test_a_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    try:
        (tmp_path / "\udcff.png").touch()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert find_images(tmp_path) == ([], [Skipped("\\udcff.png", "its name is not valid UTF-8: rename it")])


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere: check the path"):
        find_images(tmp_path / "nowhere")
    touch(tmp_path, "a.png")
    with pytest.raises(UserError, match=r"a\.png is a file, where a folder"):
        find_images(tmp_path / "a.png")


@pytest.mark.parametrize("size", [(640, 480), (481, 643), (64, 4000)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("enough", [1, 50, 60, 100, 240, 250, 10_000])
def test_a_smaller_jpeg_keeps_as_many_pixels_as_are_asked(
    size: tuple[int, int], mode: str, enough: int, tmp_path: Path
) -> None:
    path = tmp_path / "picture.jpg"
    ramp = Image.linear_gradient("L").resize(size)
    ramp.convert(mode).save(path, quality=95)
    full, fast = read_image(path), read_image(path, enough=enough)
    factor = next(f for f in (8, 4, 2, 1) if f == 1 or min(size) // f >= enough)
    assert fast.mode == "RGB" and fast.size == tuple(-(-side // factor) for side in size)
    small = full.resize((16, 16), Image.Resampling.BOX)
    apart = np.abs(np.asarray(small, int) - np.asarray(fast.resize((16, 16), Image.Resampling.BOX), int))
    assert apart.max() <= 6 and apart.mean() < 1.5


def test_a_smaller_jpeg_is_upright_and_other_formats_come_whole(tmp_path: Path) -> None:
    picture = Image.new("RGB", (400, 200), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg", enough=60).size == (100, 200)
    picture.save(tmp_path / "whole.png")
    assert read_image(tmp_path / "whole.png", enough=10).size == (400, 200)


def test_a_cut_jpeg_is_refused_at_any_size(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    Image.effect_noise((800, 800), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    for enough in (None, 700, 100):
        with pytest.raises(UnreadableImage, match="cut off"):
            read_image(path, enough=enough)
