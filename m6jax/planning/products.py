"""FLOPs of one matrix product of a compiled program: `dot`, `convolution`, and GPUs' library calls.

Compilers for TPUs write every product as a convolution. A product of batches, 'bik,bkj->bij' with
80 of them, becomes one along a dimension of 80 places whose padding or dilation leaves each output
one place of the input; so the places that meet are counted, as the compiler's own cost analysis
does:

    window={size=80 stride=79 lhs_dilate=80}, dim_labels=0bf_0io->0bf     80 pairs, not 80 * 80
"""

import functools
import math
import re

import numpy as np

_DOT_SIDE = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GEMM_SIDE = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
GEMM_TARGETS = ("__cublas$gemm", "__cublas$lt$matmul")

Shape = tuple[int, ...]


def dot_flops(result: Shape, left: Shape, attributes: str) -> float:
    """Returns 2 x result x length of the sums, for `dot` or a call of a GPU's library.

    Args:
      result: shape of the result.
      left: shape of the left argument.
      attributes: text behind the instruction's arguments.
    """
    found = _DOT_SIDE.search(attributes) or _GEMM_SIDE.search(attributes)
    dims = re.findall(r"\d+", found[1]) if found else []
    return 2.0 * math.prod(result) * math.prod(left[int(dim)] for dim in dims)


def convolution_flops(result: Shape, left: Shape, right: Shape, attributes: str) -> float:
    """Returns 2 x the multiplications of a convolution, places outside of the input left out.

    Args:
      result: shape of the result.
      left: shape of the input.
      right: shape of the kernel.
      attributes: text behind the instruction's arguments.

    Raises:
      ValueError: the text does not say which dimension is which.
    """
    labels = _LABELS.search(attributes)
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {attributes[:200]!r}")
    of_left, of_right, of_result = (
        dict(zip(names, shape, strict=True))
        for names, shape in zip(labels.groups(), (left, right, result), strict=True)
    )
    window = _WINDOW.search(attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    places = 1
    for dim in sorted(of_left.keys() - {"b", "f"}):
        i = int(dim)
        low, _ = _at(fields, "pad", i, "0_0").split("_")
        places *= _places_that_meet(
            of_left[dim],
            of_right[dim],
            of_result[dim],
            int(_at(fields, "stride", i, "1")),
            int(low),
            int(_at(fields, "lhs_dilate", i, "1")),
            int(_at(fields, "rhs_dilate", i, "1")),
        )
    groups = _group_count("feature", attributes) * _group_count("batch", attributes)
    return 2.0 * of_left["b"] * of_left["f"] * of_right["o"] * places / groups


def _at(fields: dict[str, str], key: str, index: int, default: str) -> str:
    """Returns what a window says of one of its dimensions: '2' of {'size': '1x2'} for 1."""
    return fields[key].split("x")[index] if key in fields else default


def _group_count(kind: str, attributes: str) -> int:
    found = re.search(rf"{kind}_group_count=(\d+)", attributes)
    return int(found[1]) if found else 1


@functools.cache
def _places_that_meet(
    left: int, kernel: int, result: int, stride: int, low: int, left_dilate: int, dilate: int
) -> int:
    """Returns the number of (place of result, place of kernel) that lie on a place of the input."""
    if kernel == 1 and low == 0 and left_dilate == 1:
        return min(result, (left - 1) // stride + 1)
    ends = np.arange(result) * stride - low
    met = 0
    for k in range(kernel):
        at = ends + k * dilate
        inside = (at >= 0) & (at <= (left - 1) * left_dilate) & (at % left_dilate == 0)
        met += int(inside.sum())
    return met
