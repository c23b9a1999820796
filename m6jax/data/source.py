"""What every source of documents offers, of text alone or with pictures."""

from collections.abc import Iterator
from typing import Any, Protocol

from m6jax.data.files import Scan
from m6jax.data.picture_records import Pairs, Record

TRAIN, VALIDATION = "train", "validation"
DOCUMENTS_AT_ONCE = 256


class Source(Protocol):
    """What the rest of the package asks of a source."""

    @property
    def name(self) -> str:
        """What metrics call it."""

    @property
    def is_text(self) -> bool:
        """Whether documents are text and not token ids."""

    @property
    def has_pictures(self) -> bool:
        """Whether documents belong to pictures; then it is a `PictureSource`."""

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""

    @property
    def separator(self) -> bytes:
        """What stands between documents in the original text."""

    def scan(self) -> Scan:
        """Returns what the files hold, after checking them."""

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the documents of 'train' or 'validation' as UTF-8, always in the same order."""

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string}`, or `{"targets": ids}`."""


class TextSource(Source, Protocol):
    """What is asked besides of a source of text, or of token ids, alone."""

    def where(self, split: str, number: int) -> str:
        """Returns where a document of a split lies, for a person."""


class PictureSource(Source, Protocol):
    """What is asked besides of a source whose documents belong to pictures."""

    @property
    def pairs(self) -> Pairs:
        """What is asked of a picture: prompts and answers, see `picture_records`."""

    def records(self, split: str) -> Iterator[Record]:
        """Yields the records of 'train' or 'validation', always in the same order."""


def no_documents(source: Source, split: str) -> str:
    """Returns the message about a split without any document."""
    if split == TRAIN:
        return f"source {source.name!r}: there is no training document"
    return (
        f"source {source.name!r}: there is no held-out document; set its `validation`, a smaller "
        "`hold_out_every`, or hold_out_every = 0 to go without"
    )
