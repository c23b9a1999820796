"""Text or token ids in TFRecord files of `tf.train.Example`s, one document a record."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.files import Scan, scan
from m6jax.data.preprocessors import Objectives
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.data.sources import (
    check_split,
    expand_splits,
    is_held_out,
    refuse_same_content,
    text_dataset,
)
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.data.tfrecord_files import example_fields, read_records
from m6jax.foundation.validated import PathName, adjustable, validated


@validated
class TFRecords:
    """A user's own TFRecord files.

    Attributes:
      train: pattern of the files to train on.
      validation: pattern of the held-out files; without it every `hold_out_every`-th record of the
        training files is held out.
      hold_out_every: see above; 0 holds out nothing.
      field: the feature that holds the document.
      kind: 'text', one UTF-8 string; or 'ids', a list of token ids of the vocabulary, without an
        end-of-document token.
      name: what metrics call this source.
      objective: what is to be predicted; None: `TextData.objective`.
    """

    has_pictures: ClassVar[bool] = False

    # Texts may move: what is in them is checked (`identity`, `TrainRows.restore`).
    train: PathName = adjustable()
    validation: PathName | None = adjustable(default=None)
    hold_out_every: int = 10
    field: str = "text"
    kind: Literal["text", "ids"] = "text"
    name: str = "records"
    objective: Objectives | None = None

    def check(self) -> None:
        """Checks what the fields say together."""
        check_split("TFRecords", self.name, self.hold_out_every)

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""
        return self.validation is not None or self.hold_out_every > 0

    @property
    def is_text(self) -> bool:
        """Whether documents are text and not token ids."""
        return self.kind == "text"

    @property
    def separator(self) -> bytes:
        """What stands for the end of a document where bytes are counted."""
        return b"\n"

    def scan(self) -> Scan:
        """Returns what the files hold, training and held out.

        Raises:
          DataError: a file is missing or empty, or both trained on and held out.
        """
        train, held_out = self._names()
        found = _scan(train)
        options = ["records", self.field, self.kind, self.hold_out_every, found.fingerprint]
        if held_out is not None:
            refuse_same_content("TFRecords", train, held_out)
            options.append(_scan(held_out).fingerprint)
        return Scan(digest(*options), found.num_bytes)

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the texts of 'train' or 'validation', always in the same order.

        A record without text, which cannot be used, is an empty one.

        Raises:
          DataError: a record is damaged, or its field holds no text.
        """
        return (self._value(*found, bytes, b"") for found in self._found(split))

    def where(self, split: str, number: int) -> str:
        """Returns file and record of a document, for a person."""
        name, record, _ = next(itertools.islice(self._found(split), number, None))
        return f"{name}: record {record}"

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string scalar}` or `{"targets": int64 [n]}`."""
        if self.kind == "text":
            return text_dataset(self, split)
        tf, _ = import_tensorflow()

        def documents() -> Iterator[np.ndarray]:
            for found in self._found(split):
                value = self._value(*found, int | list, [])
                yield np.atleast_1d(np.array(value, np.int64))

        spec = tf.TensorSpec([None], tf.int64)
        dataset = tf.data.Dataset.from_generator(documents, output_signature=spec)
        return dataset.map(lambda ids: {"targets": ids})

    def _found(self, split: str) -> Iterator[tuple[str, int, bytes]]:
        """Yields the records of a split, each with its file and its number there."""
        train, held_out = self._names()
        names = train if held_out is None or split == TRAIN else held_out
        wanted = split == VALIDATION
        everything = ((name, *found) for name in names for found in enumerate(read_records(name)))
        for i, found in enumerate(everything):
            if held_out is not None or is_held_out(i, self.hold_out_every) == wanted:
                yield found

    def _value(self, name: str, number: int, record: bytes, kind: Any, missing: Any) -> Any:
        """Returns what a record's field holds; `missing` where it has none."""
        where = f"{name}: record {number}"
        try:
            fields = example_fields(record)
        except DataError as error:
            raise DataError(f"{where} is {error}") from error
        value = fields.get(self.field, missing)
        if value == []:
            return missing
        texts = isinstance(value, list) and any(isinstance(v, bytes | float) for v in value)
        if not isinstance(value, kind) or (texts and kind is not bytes):
            held = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
            raise DataError(
                f"{where}: the field {self.field!r} holds {held}, not the {self.kind} that"
                " TFRecords.kind says"
            )
        return value

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        return expand_splits("TFRecords", self.train, self.validation)


def _scan(names: Sequence[str]) -> Scan:
    """Scans files; of one that ends too early, says with which record."""
    try:
        return scan(names, text=False)
    except DataError:
        for name in names:
            for _ in read_records(name):
                pass
        raise
