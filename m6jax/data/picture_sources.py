"""Where pictures with texts come from: what comes with the package.

A source is a setting; making one reads nothing. Pictures are held out, not documents: all that is
said of a picture is on one side.
"""

import abc
import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.files import Scan
from m6jax.data.matching import PictureObjectives
from m6jax.data.picture_records import Pairs, Record, documents_of
from m6jax.data.preprocessors import Answering
from m6jax.data.source import VALIDATION
from m6jax.data.sources import is_held_out, text_dataset
from m6jax.foundation.validated import validated

_BUILTIN = Path(__file__).parent / "builtin"
_CELL = 48  # pixels of an emoji in its sheet
_CELLS_ACROSS = 32
CLASSES = (
    *("T-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


class PicturesWithTexts(abc.ABC):
    """What sources of pictures share: their texts are documents too, for the vocabulary."""

    has_pictures: ClassVar[bool] = True

    name: str
    pairs: Pairs

    @property
    def is_text(self) -> bool:
        """Whether documents are text and not token ids."""
        return True

    @property
    def separator(self) -> bytes:
        """What stands between documents in the original text."""
        return b"\n"

    @property
    @abc.abstractmethod
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""

    @abc.abstractmethod
    def scan(self) -> Scan:
        """Returns what the files hold, after checking them."""

    @abc.abstractmethod
    def records(self, split: str) -> Iterator[Record]:
        """Yields the records of 'train' or 'validation', always in the same order."""

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the prompts and answers as UTF-8, always in the same order."""
        for record in self.records(split):
            try:
                documents = documents_of(record, self.pairs)
            except DataError:
                continue  # the corpus refuses it, or counts it
            for document in documents:
                yield (document.prompt + document.answer).encode()

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string scalar}`, without the pictures."""
        return text_dataset(self, split)


@validated
class BuiltinPictures(PicturesWithTexts):
    """Pictures that come with the package; no network, no files.

    Attributes:
      name: 'emoji', 512 drawings with their English and Chinese names, every tenth held out; or
        'fashion', 600 grey pictures of products with their class, every fifth of each class held
        out. The latter are from the test half of Fashion-MNIST: no result on them is a test score.
      objective: what is to be predicted.
    """

    name: Literal["emoji", "fashion"] = "emoji"
    objective: PictureObjectives = Answering()

    @property
    def pairs(self) -> Pairs:  # type: ignore[override]
        """What is asked of a picture; the prompt says in which language."""
        if self.name == "emoji":
            return ("English: ", "{en}"), ("中文：", "{zh}")
        return (("class: ", "{class}"),)

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""
        return True

    def scan(self) -> Scan:
        """Returns what the files hold."""
        files = {"emoji": ("emoji.png", "emoji.jsonl.gz"), "fashion": ("fashion600.npz",)}
        contents = [(_BUILTIN / name).read_bytes() for name in files[self.name]]
        hashes = [hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents]
        return Scan(digest("builtin pictures", self.name, self.pairs, hashes), 0)

    def records(self, split: str) -> Iterator[Record]:
        """Yields the records of 'train' or 'validation', always in the same order."""
        read = _emoji if self.name == "emoji" else _fashion
        return (record for record, held_out in read() if held_out == (split == VALIDATION))


def _emoji() -> Iterator[tuple[Record, bool]]:
    from PIL import Image

    with (
        gzip.open(_BUILTIN / "emoji.jsonl.gz") as lines,
        Image.open(_BUILTIN / "emoji.png") as sheet,
    ):
        for i, line in enumerate(lines):
            x, y = i % _CELLS_ACROSS * _CELL, i // _CELLS_ACROSS * _CELL
            picture = sheet.crop((x, y, x + _CELL, y + _CELL))
            fields = json.loads(line)
            yield Record(f"emoji {fields['id']}", _png(picture), fields), is_held_out(i, 10)


def _fashion() -> Iterator[tuple[Record, bool]]:
    from PIL import Image

    seen = np.zeros(len(CLASSES), np.int64)
    with np.load(_BUILTIN / "fashion600.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    for i, (pixels, number) in enumerate(zip(images, labels, strict=True)):
        record = Record(f"fashion {i}", _png(Image.fromarray(pixels)), {"class": CLASSES[number]})
        yield record, bool(is_held_out(int(seen[number]), 5))
        seen[number] += 1


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
