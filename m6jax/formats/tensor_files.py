"""Files in the safetensors format, written and read a tensor at a time.

    8 bytes      length of the header, little-endian
    header       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    tensors      one after the other, row-major, little-endian; offsets count from here

(https://github.com/huggingface/safetensors; its own library wants all tensors of a file in memory,
and its NumPy interface knows no bfloat16.) A model too large for one file is written as several,
and `model.safetensors.index.json` says which tensor is in which.
"""

import json
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from m6jax.formats.weights import Weight, Weights
from m6jax.foundation.validated import ConfigError

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"
_MOST_BYTES = 5 * 10**9  # of a file
_MOST_HEADER = 100 * 10**6  # more is no header, as in the format's own library
_NAMES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}
_OF_DTYPE = {dtype: name for name, dtype in _NAMES.items()}


def write(
    directory: pathlib.Path, weights: Weights, most_bytes: int = _MOST_BYTES
) -> list[pathlib.Path]:
    """Writes tensors into a folder, and returns the paths of the files.

    Args:
      directory: exists.
      weights: by name; each is in memory alone.
      most_bytes: of a file, unless one tensor has more.
    """
    files: list[Weights] = [{}]
    room = most_bytes
    for name, weight in weights.items():
        size = _nbytes(weight)
        if size > room and files[-1]:
            files.append({})
            room = most_bytes
        files[-1][name] = weight
        room -= size
    if len(files) == 1:
        _write_file(directory / FILE, files[0])
        return [directory / FILE]
    stem, end = FILE.split(".")
    names = [f"{stem}-{i:05d}-of-{len(files):05d}.{end}" for i in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        _write_file(directory / name, part)
    places = {tensor: name for name, part in zip(names, files, strict=True) for tensor in part}
    total = sum(map(_nbytes, weights.values()))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [*(directory / name for name in names), directory / INDEX]


def read(directory: pathlib.Path) -> Weights:
    """Returns the tensors of a folder by name; a tensor is read when it is made.

    Raises:
      ConfigError: there are no such files, or one of them is damaged.
    """
    if (directory / INDEX).exists():
        places = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        paths = sorted({directory / name for name in places.values()})
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(
            f"{directory} has no *.safetensors (give the folder that holds config.json and the"
            " weights in this format)"
        )
    return {name: weight for path in paths for name, weight in _read_file(path)}


def _nbytes(weight: Weight) -> int:
    return weight.size * weight.dtype.itemsize


def _write_file(path: pathlib.Path, weights: Weights) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        begin, end = end, end + _nbytes(weight)
        header[name] = {
            "dtype": _OF_DTYPE[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of eight
    scratch = path.with_name(f".{path.name}.part")
    with open(scratch, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for weight in weights.values():
            tensor = np.ascontiguousarray(weight.make())
            assert (tensor.shape, tensor.dtype) == (weight.shape, weight.dtype)
            file.write(tensor.tobytes())
    scratch.replace(path)


def _read_file(path: pathlib.Path) -> Iterator[tuple[str, Weight]]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: Mapping[str, Any] = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        for name, about in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            dtype, shape = _NAMES[about["dtype"]], tuple(about["shape"])
            if end > size or end - begin != int(np.prod(shape)) * dtype.itemsize:
                raise ValueError(f"{name} ends at byte {end} of {size}")
            yield name, _mapped(path, begin, shape, dtype)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(
            f"{path}: not a whole safetensors file of known types: {error} (copy it again)"
        ) from error


def _mapped(path: pathlib.Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Weight:
    def make() -> np.ndarray:
        if 0 in shape:
            return np.zeros(shape, dtype)
        # The bytes of a part come from the disk when they are looked at.
        return np.memmap(path, dtype, "r", offset, shape)

    return Weight(shape, dtype, make)
