"""What every source of a user's own pictures shares; a kind of file adds how records are read.

A kind of file is a class with `read`, which yields the records of one file; the rest is here: which
files there are, what is held out, what they hold. `picture_formats` has the kinds.
"""

import abc
import base64
import binascii
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.files import Scan, expand, scan, scan_together
from m6jax.data.matching import PictureObjectives
from m6jax.data.picture_records import Pairs, Record, check_pairs
from m6jax.data.picture_sources import PicturesWithTexts
from m6jax.data.preprocessors import Answering
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.data.sources import check_split, expand_splits, is_held_out, refuse_same_content
from m6jax.foundation.validated import PathName, adjustable, nearest, validated

Names = tuple[str, ...]


@validated
class PictureFiles(PicturesWithTexts):
    """A user's own pictures with texts.

    Attributes:
      train: pattern of the files to train on.
      validation: pattern of the held-out files; without it every `hold_out_every`-th picture of the
        training files is held out, with all that is said of it.
      hold_out_every: see above; 0 holds out nothing.
      pairs: what is asked of a picture: prompts and answers, with fields of the record in braces.
      name: what metrics call this source.
      objective: what is to be predicted.
    """

    # Files may move: what is in them is checked (`identity`, `TrainRows.restore`).
    train: PathName = adjustable()
    validation: PathName | None = adjustable(default=None)
    hold_out_every: int = 10
    pairs: Pairs = (("", "{text}"),)
    name: str = "pictures"
    objective: PictureObjectives = Answering()

    def check(self) -> None:
        """Checks what the fields say together."""
        kind = type(self).__name__
        check_split(kind, self.name, self.hold_out_every)
        check_pairs(kind, self.pairs)

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""
        return self.validation is not None or self.hold_out_every > 0

    @abc.abstractmethod
    def read(self, name: str) -> Iterator[Record]:
        """Yields the records of a file, always in the same order."""

    def expand(self, pattern: str, where: str) -> Names:
        """Returns the names that a pattern stands for; raises DataError if there are none."""
        return expand(pattern, where)

    def beside(self, name: str) -> Iterator[str]:
        """Yields the names of other files that a file's records are made of."""
        yield from ()

    def content(self, names: Names) -> str:
        """Returns what stands for the content of files, and of those beside them."""
        others = [other for name in names for other in self.beside(name)]
        return digest(scan(names, text=False).fingerprint, scan_together(others).fingerprint)

    def scan(self) -> Scan:
        """Returns what the files hold, training and held out.

        Raises:
          DataError: a file is missing or empty, or both trained on and held out.
        """
        train, held_out = self._names()
        settings = dataclasses.replace(
            self,
            train="",
            validation=None if held_out is None else "",
            name="pictures",
            objective=Answering(),
        )
        contents = [self.content(train)]
        if held_out is not None:
            refuse_same_content(type(self).__name__, train, held_out, self.content)
            contents.append(self.content(held_out))
        return Scan(digest(repr(settings), contents), 0)

    def records(self, split: str) -> Iterator[Record]:
        """Yields the records of 'train' or 'validation', always in the same order."""
        train, held_out = self._names()
        if held_out is not None or not self.hold_out_every:
            chosen = train if split == TRAIN else held_out or ()
            yield from (record for name in chosen for record in self.read(name))
            return
        numbers: dict[bytes | str, int] = {}  # of pictures, of which several records may be
        for name in train:
            for record in self.read(name):
                number = numbers.setdefault(_identity(record.picture), len(numbers))
                if is_held_out(number, self.hold_out_every) == (split == VALIDATION):
                    yield record

    def _names(self) -> tuple[Names, Names | None]:
        return expand_splits(type(self).__name__, self.train, self.validation, self.expand)


def record_of(
    where: str, fields: Mapping[str, Any], picture: str, folder: str | None = None
) -> Record:
    """Returns the record of some fields, one of which is the picture.

    Args:
      where: which record it is.
      fields: all of them.
      picture: name of the field that holds the picture: the bytes of its file, its name, a `data:`
        URL, or a dict of `bytes` or `path` (as Hugging Face's data sets have it).
      folder: against which names are resolved.
    """
    try:
        if fields.get(picture) is None:
            raise DataError(f"there is no field {picture!r} with a picture{nearest('', fields)}")
        return Record(where, _picture(fields[picture], picture, folder or ""), fields)
    except DataError as error:
        return Record(where, b"", fields, str(error))


def _picture(value: Any, field: str, folder: str) -> bytes | str:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.startswith("data:"):
        return _from_base64(value.partition(",")[2], field)
    if isinstance(value, str) and value:
        return value if "://" in value else os.path.join(folder, os.path.expanduser(value))
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), str):
            return _from_base64(value["bytes"], field)
        found = value.get("bytes") or value.get("path")
        if isinstance(found, bytes | str) and found:
            return _picture(found, field, folder)
    raise DataError(f"field {field!r} holds no picture: wanted a path or the bytes of a file")


def _from_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DataError(f"field {field!r} is not base64 ({error})") from error


def _identity(picture: bytes | str) -> bytes | str:
    """Returns what is the same for the same picture, in little memory."""
    if isinstance(picture, str):
        return picture
    return hashlib.blake2b(picture, digest_size=16).digest()


def sample_fields(members: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """Returns the fields of a picture's files of text: `txt` for `x.txt`, `zh_txt` for `x.zh.txt`.

    The entries of `x.json` are fields themselves.

    Args:
      members: what follows the first dot of each file's name, and its bytes.

    Raises:
      DataError: a JSON file holds no object.
    """
    fields: dict[str, Any] = {}
    for extension, content in members:
        if extension == "json":
            fields |= json_object(content)
        else:
            fields[extension.replace(".", "_")] = content
    return fields


def json_object(content: bytes) -> dict[str, Any]:
    """Returns a JSON object; raises DataError for anything else."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"JSON of kind {type(value).__name__}, wanted an object of fields")
    return value
