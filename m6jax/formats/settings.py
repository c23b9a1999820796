"""What a model is exported as."""

import enum

from m6jax.foundation.validated import ConfigError, PathName, nearest, validated
from m6jax.modeling.config import DTYPES, require_positive


class Format(enum.Enum):
    """What other programs read; see `formats`."""

    SAFETENSORS = "safetensors"
    HUGGING_FACE = "hugging_face"
    STABLEHLO = "stablehlo"


@validated
class Export:
    """Settings of the mode export.

    Attributes:
      format: SAFETENSORS (m6jax's own names), HUGGING_FACE (models of Mixtral's or Llama's shape)
        or STABLEHLO (SAFETENSORS, and the compiled program from tokens to logits).
      directory: where the files go; None: `export/` and the format's name under MODEL_DIR.
      dtype: floating-point type of all tensors; None: each as it is.
      rows: B of the STABLEHLO program's tokens [B, T].
      length: T of them; None: `TextData.length`.
    """

    format: Format = Format.SAFETENSORS
    directory: PathName | None = None
    dtype: str | None = None
    rows: int = 1
    length: int | None = None

    def check(self) -> None:
        """Raises ConfigError for an unknown type, or sizes that cannot be."""
        require_positive(self, "rows", "length")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"Export.dtype: unknown type {self.dtype!r}{nearest(self.dtype, DTYPES)}"
            )
