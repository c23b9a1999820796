"""Pictures of every kind that a file can hold, made here, against what they show."""

import io

import numpy as np
import pytest
from PIL import Image

from m6jax.data.errors import DataError
from m6jax.data.pictures import Pictures, to_features
from m6jax.foundation.validated import ConfigError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
PLAIN = Pictures(grid=(2, 2), patch_size=4)


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, settings=PLAIN) -> np.ndarray:
    return settings.pixels(settings.patches(data))


def quarters(mode="RGB", side=8) -> Image.Image:
    """Red and green above, blue and white below."""
    pixels = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
    return Image.fromarray(pixels.repeat(side // 2, 0).repeat(side // 2, 1)).convert(mode)


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("GIF", {}, 0),
        ("JPEG", {"quality": 100, "subsampling": 0}, 4),
    ],
)
def test_kinds_of_files(kind, options, tolerance):
    found = decoded(encoded(quarters(), kind, **options)).astype(int)
    assert np.abs(found - np.asarray(quarters())).max() <= tolerance


def test_patches_are_in_order_of_reading():
    patches = PLAIN.patches(encoded(quarters()))
    assert patches.shape == (4, 48) == (PLAIN.num_patches, PLAIN.patch_dim)
    assert patches.dtype == np.uint8
    for patch, colour in zip(patches, (RED, GREEN, BLUE, WHITE), strict=True):
        np.testing.assert_array_equal(patch.reshape(4, 4, 3), np.full((4, 4, 3), colour))


def test_a_grid_with_more_columns_than_rows():
    settings = Pictures(grid=(1, 3), patch_size=2)
    image = Image.new("RGB", (6, 2), RED)
    image.putpixel((5, 1), BLUE)
    patches = settings.patches(encoded(image))
    assert patches.shape == (3, 12)
    assert patches[2].reshape(2, 2, 3)[1, 1].tolist() == list(BLUE)
    np.testing.assert_array_equal(settings.pixels(patches), np.asarray(image))


def test_features_are_in_minus_one_to_one():
    features = to_features(np.array([0, 51, 255], np.uint8))
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, [-1, -0.6, 1], rtol=1e-6)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    options = {}
    if mode == "P":  # one entry of the palette is transparent
        image = Image.new("P", (8, 8), 1)
        image.putpalette([0, 0, 0, 255, 0, 0])
        image.paste(0, (0, 0, 4, 8))
        options = {"transparency": 1}
    elif mode == "LA":
        image = image.convert("LA")
    found = decoded(encoded(image, **options))
    assert (found[:, :4] == 0).all()
    assert (found[:, 4:] == 255).all()


def test_half_transparent_is_mixed_with_white():
    found = decoded(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 51))))
    assert set(found.ravel().tolist()) == {204}


def test_a_colour_that_stands_for_transparent():
    found = decoded(encoded(quarters(), transparency=RED))
    assert (found[:4, :4] == 255).all()
    assert found[0, 7].tolist() == list(GREEN)


def test_grey_and_one_bit():
    assert set(decoded(encoded(Image.new("L", (8, 8), 77))).ravel().tolist()) == {77}
    assert set(decoded(encoded(Image.new("1", (8, 8), 1))).ravel().tolist()) == {255}


def test_sixteen_bits():
    levels = np.array([[0x1234, 0xFFFF], [0x0000, 0x8000]], np.uint16).repeat(4, 0).repeat(4, 1)
    data = encoded(Image.fromarray(levels))
    assert Image.open(io.BytesIO(data)).mode.startswith("I")
    assert decoded(data)[::4, ::4, 0].tolist() == [[0x12, 0xFF], [0, 0x80]]
    data = encoded(Image.fromarray(levels), transparency=0x1234)
    assert decoded(data)[::4, ::4, 0].tolist() == [[0xFF, 0xFF], [0, 0x80]]


def test_cmyk():
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(decoded(encoded(red, "JPEG")).astype(int) - RED).max() <= 4


def test_the_camera_was_turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    turned = decoded(encoded(quarters(), exif=exif))
    np.testing.assert_array_equal(turned, np.asarray(quarters().rotate(-90)))


def test_the_first_of_moving_pictures():
    others = [Image.new("RGB", (8, 8), BLUE)]
    data = encoded(Image.new("RGB", (8, 8), RED), "GIF", save_all=True, append_images=others)
    assert (decoded(data) == RED).all()


def test_wide_pictures_are_padded_or_cropped():
    wide = Image.new("RGB", (16, 8), RED)
    wide.paste(BLUE, (4, 0, 12, 8))
    padded = decoded(encoded(wide))
    assert (padded[:2] == 255).all() and (padded[-2:] == 255).all()  # noqa: PT018
    assert padded[4, 0].tolist()[2] < 30
    assert padded[4, 4].tolist()[0] < 30
    cropped = decoded(encoded(wide), Pictures(grid=(2, 2), patch_size=4, fit="crop"))
    assert (cropped == BLUE).all()


@pytest.mark.parametrize("fit", ["pad", "crop"])
def test_a_line_is_a_picture_too(fit):
    line = encoded(Image.new("RGB", (300, 1), RED))
    found = decoded(line, Pictures(grid=(2, 2), patch_size=4, fit=fit))
    assert (found == RED).all(axis=-1).any(axis=0).all()


def test_large_jpegs_are_decoded_at_a_part_of_their_size():
    large = encoded(quarters(side=256), "JPEG", quality=95)
    assert np.abs(decoded(large).astype(int) - np.asarray(quarters())).max() < 40


def test_small_pictures_are_enlarged():
    assert (decoded(encoded(Image.new("RGB", (2, 2), GREEN))) == GREEN).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a JPEG, PNG, WebP or GIF picture"),
        (b"<svg/>", "not a JPEG, PNG, WebP or GIF picture"),
        (encoded(quarters(), "BMP"), "not a JPEG, PNG, WebP or GIF picture"),
        (encoded(quarters(side=64), "JPEG")[:400], "damaged: "),
        (encoded(quarters(side=64))[:60], "damaged: "),
    ],
)
def test_what_is_no_picture(data, message):
    with pytest.raises(DataError, match=message):
        PLAIN.patches(data)


def test_too_many_pixels_are_not_decoded(monkeypatch):
    settings = Pictures(most_pixels=63)
    with pytest.raises(DataError, match=r"8 x 8 pixels are more than Pictures.most_pixels = 63"):
        settings.patches(encoded(quarters()))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DataError, match=r"more than Pictures.most_pixels = 50,000,000 pixels"):
        PLAIN.patches(encoded(quarters()))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)  # Pillow would only warn
    assert decoded(encoded(quarters())).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (0, 4)}, r"grid \(0, 4\), patch_size 12 and per_row 4 must be positive"),
        ({"patch_size": 0}, "patch_size 0 and per_row 4 must be positive"),
        ({"per_row": 0}, "per_row 0 must be positive"),
        ({"most_pixels": 0}, r"Pictures.most_pixels: 0 is not in 1 \.\.\. 178956970"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        Pictures(**options)
