"""TFRecord files, record by record, and what is in a `tf.train.Example`."""

from collections.abc import Iterator
from typing import Any

from m6jax.data.errors import DataError
from m6jax.data.files import compressed_with, is_whole, read_file
from m6jax.data.tensorflow_import import import_tensorflow, reading

_FIRST = 12  # bytes of a plain file: the first record's length, and a checksum of that
_READ = {"gzip": "GZIP", "zlib": "ZLIB"}


def read_records(name: str) -> Iterator[bytes]:
    """Yields the records of a file; how it is compressed is seen from its first bytes.

    Raises:
      DataError: a record is damaged, or the file is compressed in a way that is not read; names
        file and record.
    """
    tf, _ = import_tensorflow()
    compression = _compression(name)
    dataset = tf.data.TFRecordDataset(name, compression_type=compression)
    records, number = dataset.as_numpy_iterator(), 0
    while True:
        with reading(f"{name}: record {number}"):
            record = next(records, None)
        if record is None:
            if compression and not is_whole(name):  # tensorflow takes it for the end
                raise DataError(f"{name}: record {number} cannot be read: the file is cut off")
            return
        yield record
        number += 1


def _compression(name: str) -> str:
    """Returns tensorflow's name of what compresses a file, empty for nothing.

    A plain file may begin with the bytes of any kind; its checksum says that it is one.
    """
    first = read_file(name, _FIRST)
    if int.from_bytes(first[8:], "little") == _masked_checksum(first[:8]):
        return ""
    kind = compressed_with(first)
    if kind is not None and kind not in _READ:
        raise DataError(f"{name}: compressed with {kind}; TFRecords may be with gzip or zlib")
    return _READ[kind] if kind else ""


def _masked_checksum(data: bytes) -> int:
    """Returns the CRC-32C of a few bytes as TFRecords keep it, turned and shifted."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def example_fields(record: bytes) -> dict[str, Any]:
    """Returns the features of a `tf.train.Example` by name: one value, or a list of several.

    Raises:
      DataError: it is no Example.
    """
    tf, _ = import_tensorflow()
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError as error:
        raise DataError(f"not a tf.train.Example ({error})") from error
    fields: dict[str, Any] = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        fields[name] = values[0] if len(values) == 1 else values
    return fields
