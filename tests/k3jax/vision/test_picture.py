"""Image files to the tower's pixels: modes, transparency, padding, and what is refused (spec model 9.8)."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3jax.config import ConfigError
from k3jax.vision import Limits, MediaConfig, Picture, image_size, picture_of, read_media_config, read_picture
from k3jax.vision.media_config import K3_MEDIA
from tests.k3jax.vision.images import MALFORMED, animation, encoded, noise, png

MODES = (
    "1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F",
    "I;16", "I;16L", "I;16B", "I;16N",
)  # fmt: skip


def solid(mode, color, size=(28, 28)):
    return picture_of(Image.new(mode, size, color)).pixels[0, 0].tolist()


def test_patches_are_cut_row_by_row_channel_first():
    picture = picture_of(noise(56, 28))
    patches = picture.patches()
    assert picture.grid == (1, 2, 4) and picture.tokens == 2 and patches.shape == (8, 3, 14, 14)
    assert patches.dtype == np.float32
    for patch, channel, y, x in [(0, 0, 0, 0), (3, 1, 5, 13), (4, 2, 0, 1), (7, 0, 13, 13)]:
        value = int(picture.pixels[patch // 4 * 14 + y, patch % 4 * 14 + x, channel])
        assert patches[patch, channel, y, x] == pytest.approx((value / 255 - 0.5) / 0.5, abs=1e-6)


def test_padding_is_black_on_the_right_and_below_before_normalisation():
    picture = picture_of(Image.new("RGB", (30, 27), "white"))
    assert picture.size == (30, 27) and picture.pixels.shape == (28, 56, 3)
    assert (picture.pixels[:27, :30] == 255).all()
    assert (picture.pixels[27:] == 0).all() and (picture.pixels[:, 30:] == 0).all()
    assert picture.patches().min() == -1 and picture.patches().max() == 1


def test_transparent_pixels_show_the_board():
    pixels = picture_of(Image.new("RGBA", (28, 28), (9, 9, 9, 0))).pixels
    for (y, x), value in {(0, 0): 255, (7, 7): 255, (0, 8): 180, (8, 0): 180, (8, 8): 255, (23, 27): 180}.items():
        assert pixels[y, x].tolist() == [value] * 3, (y, x)


@settings(deadline=None, max_examples=50)
@given(st.tuples(*[st.integers(0, 255)] * 4))
def test_blending_truncates(rgba):
    *color, alpha = rgba
    pixels = picture_of(Image.new("RGBA", (28, 28), rgba)).pixels
    for at, board in (((0, 0), 255), ((0, 8), 180)):
        for channel in range(3):
            exact, rest = divmod(alpha * color[channel] + (255 - alpha) * board, 255)
            got = int(pixels[at][channel])
            assert got == exact or (rest == 0 and got == exact - 1)  # float32 may fall short of a whole number


def test_alpha_of_every_kind():
    assert solid("RGBA", (100, 1, 200, 128)) == [177, 127, 227]  # e.g. (128 * 100 + 127 * 255) / 255 = 177.2
    assert solid("LA", (100, 128)) == [177] * 3
    assert solid("RGBA", (1, 2, 3, 255)) == [1, 2, 3]
    palette = Image.new("P", (28, 28), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert picture_of(palette).pixels[0, 0].tolist() == [40, 50, 60]
    palette.info["transparency"] = 1
    assert picture_of(palette).pixels[0, 0].tolist() == [255] * 3
    palette.info["transparency"] = 0
    assert picture_of(palette).pixels[0, 0].tolist() == [40, 50, 60]
    palette.info["transparency"] = bytes([255, 128])
    assert picture_of(palette).pixels[0, 0].tolist() == [147, 152, 157]
    both = palette.convert("PA")
    both.putalpha(0)
    assert picture_of(both).pixels[0, 0].tolist() == [255] * 3


def test_a_transparent_colour_without_palette_is_opaque():
    image = Image.new("RGB", (28, 28), (1, 2, 3))
    data = encoded(image, transparency=(1, 2, 3))
    assert Image.open(io.BytesIO(data)).info["transparency"] == (1, 2, 3)
    assert read_picture(data).pixels[0, 0].tolist() == [1, 2, 3]


def test_opaque_modes_by_their_meaning():
    assert solid("L", 77) == [77] * 3
    assert solid("1", 1) == [255] * 3
    assert solid("CMYK", (255, 0, 0, 0)) == [0, 255, 255]
    assert solid("HSV", (0, 255, 255)) == [255, 0, 0]
    assert solid("YCbCr", (90, 128, 128)) == [90] * 3
    assert solid("F", 12.0) == [12] * 3
    assert solid("I", 300) == [255] * 3  # as Pillow clips it


TINY = MediaConfig(in_patch_limit=4, patch_limit_on_one_side=4)


def test_palettes_are_resized_by_nearest_pixel_and_colours_are_blended():
    image = noise(90, 90, "L").point(lambda v: 255 * (v > 127))
    palette = image.convert("P")
    small = picture_of(palette, TINY).pixels[:28, :28]
    assert image_size(90, 90, TINY).resized == (30, 30)
    assert set(np.unique(small)) == {0, 255}
    assert set(np.unique(picture_of(image.convert("1"), TINY).pixels[:28, :28])) == {0, 255}
    assert len(np.unique(picture_of(image, TINY).pixels[:28, :28])) > 20


def test_resizing_keeps_hidden_colours_hidden():
    """Red of alpha 0 beside opaque blue: premultiplied blending lets no red through."""
    pixels = np.zeros((112, 112, 4), np.uint8)
    pixels[:, ::2] = 255, 0, 0, 0
    pixels[:, 1::2] = 0, 0, 255, 255
    small = picture_of(Image.fromarray(pixels), TINY).pixels[:28, :28].astype(int)
    assert (small[..., 0] <= small[..., 1] + 1).all()  # red comes from the gray board alone, like green


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MODES), st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_every_mode_and_size(mode, width, height, squeezed):
    media = MediaConfig(in_patch_limit=64) if squeezed else K3_MEDIA
    picture = picture_of(Image.new(mode, (width, height)), media)
    size = image_size(width, height, media)
    assert picture.size == (width, height) and picture.pixels.shape == (*size.padded[::-1], 3)
    assert picture.grid == size.grid and picture.tokens == size.tokens
    assert picture.pixels.dtype == np.uint8 and len(picture.patches()) == size.grid[1] * size.grid[2]


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
def test_formats(format, tmp_path):
    image = Image.new("RGB", (40, 30), (200, 100, 50))
    options = {"lossless": True} if format == "WEBP" else {}
    path = tmp_path / "image"  # the name says nothing
    path.write_bytes(encoded(image, format, **options))
    picture = read_picture(path)
    assert picture.size == (40, 30)
    assert np.abs(picture.pixels[:30, :40].astype(int) - (200, 100, 50)).max() <= (2 if format == "JPEG" else 0)


def test_exif_rotation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = read_picture(encoded(noise(40, 20), "JPEG", exif=exif))
    assert picture.size == (40, 20) and picture.pixels.shape == (28, 56, 3)


def test_a_photo_with_a_second_picture_is_a_still_image():
    data = encoded(noise(16, 16), "MPO", save_all=True, append_images=[noise(16, 16, seed=1)])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert read_picture(data).size == (16, 16)


def test_digest_tells_pixels_apart_and_nothing_else():
    image = noise(40, 30)
    digest = read_picture(encoded(image)).digest
    assert len(digest) == 32
    assert read_picture(encoded(image, "BMP"), name="another").digest == digest
    changed = image.copy()
    changed.putpixel((39, 29), tuple(255 - v for v in image.getpixel((39, 29))))
    assert picture_of(changed).digest != digest
    black = [picture_of(Image.new("RGB", size)).digest for size in ((28, 56), (56, 28), (56, 56))]
    assert len(set(black)) == 3
    assert picture_of(image, MediaConfig(image_mean=(0.4, 0.5, 0.5))).digest != digest


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_get_one_sentence(data):
    with pytest.raises(ValueError) as error:
        read_picture(data, name="image 3 of the message")
    text = str(error.value)
    assert text.startswith("image 3 of the message ") and "; " in text
    assert "\n" not in text and len(text) < 250 and "BytesIO" not in text


FILES = [encoded(noise(24, 20, mode), format) for format, mode in (
    ("PNG", "RGBA"), ("PNG", "L"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("GIF", "L"), ("BMP", "RGB"),
)]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=400)
@given(st.sampled_from(FILES), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6), st.floats(0, 1))
def test_damaged_files_give_a_picture_or_one_sentence(data, damage, kept):
    damaged = bytearray(data)
    for where, value in damage:
        damaged[int(where**2 * (len(data) - 1))] = value  # mostly in the header
    small = Limits(max_pixels=2**20)
    try:
        picture = read_picture(bytes(damaged[: int(len(data) * kept**0.1)]), limits=small)
    except ValueError as error:
        assert str(error).startswith("the image ") and "\n" not in str(error) and len(str(error)) < 250
    else:
        assert picture.tokens == image_size(*picture.size).tokens


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png(8193, 8192), "8193x8192 pixels, the limit is 67,108,864 pixels"),
        (png(10_000, 10_000), "the limit is 67,108,864 pixels"),
        (png(60_000, 60_000), "limit of 67,108,864 pixels"),
        (png(2**31 - 1, 2**31 - 1), "limit of 67,108,864 pixels"),
        (png(40_000, 1), "the limit of a side is 32,768"),
        (animation("GIF"), "3 frames, the limit is 1"),
        (animation("WEBP"), "3 frames, the limit is 1"),
        (animation("PNG"), "3 frames, the limit is 1"),
    ],
)
def test_limits_hold_before_anything_is_decoded(data, words, monkeypatch):
    def decode(self):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    with pytest.raises(ValueError, match=words):
        read_picture(data)


def test_limits_can_be_set(tmp_path):
    data = encoded(noise(20, 10))
    path = tmp_path / "x.png"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(ValueError, match="larger than the limit of 100 bytes"):
            read_picture(source, limits=Limits(max_bytes=100))
    with pytest.raises(ValueError, match="20x10 pixels, the limit is 199"):
        read_picture(data, limits=Limits(max_pixels=199))
    assert read_picture(data, limits=Limits(max_bytes=len(data), max_pixels=200, max_side=20)).size == (20, 10)
    first = noise(8, 8, seed=0).quantize(256).convert("RGB")
    got = read_picture(animation("PNG"), limits=Limits(max_frames=3))
    assert got.size == first.size and (got.pixels[:8, :8] == np.asarray(noise(8, 8, seed=0))).all()
    Limits().check_count(64)
    with pytest.raises(ValueError, match="65 images were given, the limit is 64"):
        Limits().check_count(65)
    with pytest.raises(ValueError, match="is not a file"):
        read_picture(tmp_path / "absent.png")


def test_media_config_of_a_folder(tmp_path):
    assert read_media_config(tmp_path) == K3_MEDIA
    board = {"pattern": "chessboard", "chessboard_square_size": 4, "chessboard_square_on_top_left": False, "gray": 9}
    media = {"in_patch_limit": 100, "image_mean": [0.1, 0.2, 0.3], "sample_fps": 8.0, "fixed_output_tokens": None}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"media_proc_cfg": media | {"transparent_bg_config": board}}))
    got = read_media_config(tmp_path)
    assert (got.in_patch_limit, got.image_mean, got.patch_size) == (100, (0.1, 0.2, 0.3), 14)
    pixels = picture_of(Image.new("LA", (28, 28)), got).pixels
    assert [pixels[0, x, 0] for x in (0, 3, 4, 8)] == [9, 9, 255, 9]


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is 64"),
        ({"transparent_bg_fill_stage": "before_resize"}, "before_resize"),
        ({"transparent_bg_config": {"pattern": "stripes"}}, "stripes"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"patch_limit_on_one_side": 511}, "511"),
    ],
)
def test_media_config_that_is_not_supported(tmp_path, media, words):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    with pytest.raises(ConfigError, match=words):
        read_media_config(tmp_path)


def test_media_config_that_is_no_json(tmp_path):
    for text in ("{", "[]", '{"media_proc_cfg": 3}'):
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(ConfigError, match="download it again"):
            read_media_config(tmp_path)


def test_pictures_are_compared_by_identity():
    picture = picture_of(noise(8, 8))
    assert isinstance(picture, Picture) and picture == picture and picture != picture_of(noise(8, 8))
