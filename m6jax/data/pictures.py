"""Pictures: from the bytes of a file to the patches that a model takes.

    JPEG, PNG, WebP, GIF  ->  upright RGB  ->  one size  ->  patches, row by row

Pillow decodes. With `grid = (2, 3)` and `patch_size = 4` every picture becomes 8 x 12 pixels:

    1 2 3
    4 5 6          6 patches of 4 x 4 x 3 = 48 features, in this order

Transparent pixels become white, and so does the border of a picture that is padded. Of 16 bits a
channel the upper 8 are kept. Colour profiles are not applied.

Axis letters: I patches of a picture, F features of a patch.
"""

import io
import warnings
from typing import Any, Literal

import numpy as np

from m6jax.data.errors import DataError
from m6jax.foundation.validated import ConfigError, validated

CHANNELS = 3
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# Above twice its warning limit Pillow itself refuses a picture, whatever the setting.
PILLOW_REFUSES = 178_956_970

_WHITE = (255, 255, 255)
# A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, which is much faster. Twice the pixels that
# are wanted are left to the better filter.
_SPARE = 2


@validated
class Pictures:
    """How pictures become patches; the same for all sources of a run.

    Attributes:
      grid: rows and columns of patches.
      patch_size: pixels of a patch, across and down.
      fit: 'pad', the whole picture is seen, with a white border where its shape is another; or
        'crop', its middle is seen, without a border.
      most_pixels: a picture with more is not decoded: a small file can be a picture that fills
        memory.
      per_row: pictures that a row has room for; every batch has that much room for patches.
      on_bad: what becomes of a picture that cannot be decoded: 'error', or 'skip', which leaves it
        out and counts it.
    """

    grid: tuple[int, int] = (4, 4)
    patch_size: int = 12
    fit: Literal["pad", "crop"] = "pad"
    most_pixels: int = 50_000_000
    per_row: int = 4
    on_bad: Literal["error", "skip"] = "error"

    def check(self) -> None:
        """Checks the ranges."""
        if min(*self.grid, self.patch_size, self.per_row) < 1:
            raise ConfigError(
                f"Pictures: grid {self.grid}, patch_size {self.patch_size} and per_row"
                f" {self.per_row} must be positive"
            )
        if not 1 <= self.most_pixels <= PILLOW_REFUSES:
            raise ConfigError(
                f"Pictures.most_pixels: {self.most_pixels} is not in 1 ... {PILLOW_REFUSES}"
            )

    @property
    def num_patches(self) -> int:
        """I, patches of a picture."""
        return self.grid[0] * self.grid[1]

    @property
    def patch_dim(self) -> int:
        """F, features of a patch."""
        return self.patch_size**2 * CHANNELS

    def patches(self, encoded: bytes) -> np.ndarray:
        """Returns the patches of an encoded picture.

        Args:
          encoded: a JPEG, PNG, WebP or GIF file.

        Returns:
          uint8 [I, F]; the features of a patch are its pixels row by row, red, green and blue.

        Raises:
          DataError: it is none of these, damaged, or larger than `most_pixels`.
        """
        rows, columns = self.grid
        size = (columns * self.patch_size, rows * self.patch_size)
        return self._cut(
            np.asarray(_fitted(_decoded(encoded, size, self.most_pixels), size, self.fit))
        )

    def pixels(self, patches: np.ndarray) -> np.ndarray:
        """Returns the picture of `patches` (see there): uint8 [height, width, 3]."""
        (rows, columns), side = self.grid, self.patch_size
        cut = patches.reshape(rows, columns, side, side, CHANNELS)
        return cut.swapaxes(1, 2).reshape(rows * side, columns * side, CHANNELS)

    def _cut(self, pixels: np.ndarray) -> np.ndarray:
        (rows, columns), side = self.grid, self.patch_size
        cut = pixels.reshape(rows, side, columns, side, CHANNELS)
        return cut.swapaxes(1, 2).reshape(self.num_patches, self.patch_dim)


def to_features(patches: np.ndarray) -> np.ndarray:
    """Returns bytes as what a model is given: float32 in [-1, 1], white is 1."""
    return patches.astype(np.float32) / 127.5 - 1


def _decoded(encoded: bytes, size: tuple[int, int], most_pixels: int) -> Any:
    """Returns an upright RGB picture, at least as large as `size` if the file is."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures; `most_pixels` says what is too large.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                _check_pixels(image.size, most_pixels)
                image.draft(None, (max(size) * _SPARE,) * 2)
                return _on_white(ImageOps.exif_transpose(image))
    except DataError:
        raise
    except Image.UnidentifiedImageError as error:
        raise DataError("not a JPEG, PNG, WebP or GIF picture") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"more than Pictures.most_pixels = {most_pixels:,} pixels") from error
    except MemoryError:
        raise
    except Exception as error:  # what damaged bytes raise inside of Pillow is of many kinds
        raise DataError(f"damaged: {error}") from error


def _check_pixels(size: tuple[int, int], most_pixels: int) -> None:
    width, height = size
    if width * height > most_pixels:
        raise DataError(
            f"{width:,} x {height:,} pixels are more than Pictures.most_pixels = {most_pixels:,}"
        )


def _on_white(image: Any) -> Any:
    """Returns RGB of any mode: transparent pixels white, 16 bits a pixel as 8."""
    from PIL import Image

    if image.mode.startswith("I"):  # grey of 16 bits, which `convert` would cut off at 255
        levels = np.asarray(image).astype(np.int64)
        if "transparency" in image.info:
            levels = np.where(levels == image.info["transparency"], 0xFFFF, levels)
        return Image.fromarray((levels >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (*_WHITE, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")


def _fitted(image: Any, size: tuple[int, int], fit: str) -> Any:
    """Returns the picture at exactly `size` (width, height)."""
    from PIL import Image, ImageOps

    if fit == "crop":
        return ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    scale = min(size[0] / image.width, size[1] / image.height)
    width, height = (max(1, round(scale * side)) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    if resized.size == size:
        return resized
    canvas = Image.new("RGB", size, _WHITE)
    canvas.paste(resized, ((size[0] - width) // 2, (size[1] - height) // 2))
    return canvas
