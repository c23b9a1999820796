"""Text or token ids in TFRecord files of `tf.train.Example`s, one document a record."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from m6jax.data.cache import digest
from m6jax.data.files import Scan, scan
from m6jax.data.preprocessors import Objectives
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.data.sources import (
    check_split,
    expand_splits,
    is_held_out,
    refuse_same_content,
)
from m6jax.data.tensorflow_import import import_tensorflow, reading
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
        found = scan(train, text=False)
        options = ["records", self.field, self.kind, self.hold_out_every, found.fingerprint]
        if held_out is not None:
            refuse_same_content("TFRecords", train, held_out)
            options.append(scan(held_out, text=False).fingerprint)
        return Scan(digest(*options), found.num_bytes)

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the texts of 'train' or 'validation', always in the same order."""
        with reading(f"source {self.name!r}"):
            for record in self.dataset(split).as_numpy_iterator():
                yield record["text"]

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string scalar}` or `{"targets": int64 [n]}`."""
        tf, _ = import_tensorflow()
        train, held_out = self._names()
        names = train if held_out is None or split == TRAIN else held_out
        zipped = all(name.endswith(".gz") for name in names)
        records = tf.data.TFRecordDataset(list(names), compression_type="GZIP" if zipped else "")
        if held_out is None:
            wanted = split == VALIDATION
            records = (
                records.enumerate()
                .filter(lambda i, record: is_held_out(i, self.hold_out_every) == wanted)
                .map(lambda i, record: record)
            )
        if self.kind == "text":
            feature, key = tf.io.FixedLenFeature([], tf.string), "text"
        else:
            feature = tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)
            key = "targets"

        def parse(record: Any) -> dict[str, Any]:
            value = tf.io.parse_single_example(record, {self.field: feature})[self.field]
            return {key: value}

        return records.map(parse)

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        return expand_splits("TFRecords", self.train, self.validation)
