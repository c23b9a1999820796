"""TFRecord files, record by record, and what is in a `tf.train.Example`."""

from collections.abc import Iterator
from typing import Any

from m6jax.data.errors import DataError
from m6jax.data.files import read_file
from m6jax.data.tensorflow_import import import_tensorflow, reading

_GZIP = b"\x1f\x8b\x08"


def read_records(name: str) -> Iterator[bytes]:
    """Yields the records of a file; gzip is seen from its first bytes.

    Raises:
      DataError: a record is damaged; names file and record.
    """
    tf, _ = import_tensorflow()
    zipped = read_file(name, len(_GZIP)) == _GZIP
    dataset = tf.data.TFRecordDataset(name, compression_type="GZIP" if zipped else "")
    records, number = dataset.as_numpy_iterator(), 0
    while True:
        with reading(f"{name}: record {number}"):
            record = next(records, None)
        if record is None:
            return
        yield record
        number += 1


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
