"""Records of a picture and its texts, and the documents that are made of them.

A source's `pairs` say what is asked of a picture: each is a prompt and an answer, with fields of
the record in braces. With `pairs = (("English: ", "{en}"), ("{question}", "{answers}"))` the record

    {"en": "a cat", "question": "What is it?", "answers": ["cat", "kitten"]}

gives three documents: `English: ` -> `a cat`, `What is it?` -> `cat`, `What is it?` -> `kitten`. A
field that is a list gives a document for each of its values, in an answer only; one that is None
gives none.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from m6jax.data.errors import DataError
from m6jax.data.files import read_file
from m6jax.foundation.validated import ConfigError, nearest

Pairs = tuple[tuple[str, str], ...]


class Record(NamedTuple):
    """A picture with its texts.

    Attributes:
      where: which it is, in messages.
      picture: a file's bytes, or its name; it is read when it is needed.
      fields: texts by name.
      problem: why the record cannot be used; None if it can.
    """

    where: str
    picture: bytes | str
    fields: Mapping[str, Any]
    problem: str | None = None

    def encoded(self) -> bytes:
        """Returns the bytes of the picture's file; raises DataError where it cannot be read."""
        return self.picture if isinstance(self.picture, bytes) else read_file(self.picture)


class Document(NamedTuple):
    """What is given and what is asked for, and by which of the pairs."""

    prompt: str
    answer: str
    kind: int


def check_pairs(kind: str, pairs: Pairs) -> None:
    """Raises ConfigError for pairs that name no field, or that are not well formed."""
    if not pairs:
        raise ConfigError(f"{kind}.pairs: there must be at least one prompt with its answer")
    for template in (t for pair in pairs for t in pair):
        try:
            fields_of(template)
        except ValueError as error:
            raise ConfigError(f"{kind}.pairs: {template!r}: {error}") from error
    for _, answer in pairs:
        if not fields_of(answer):
            raise ConfigError(
                f"{kind}.pairs: the answer {answer!r} names no field, such as {{text}}"
            )


def fields_of(template: str) -> list[str]:
    """Returns the names in braces."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def fields_in(pairs: Pairs) -> tuple[str, ...]:
    """Returns the names of all fields that pairs ask for, each once."""
    return tuple(dict.fromkeys(name for pair in pairs for t in pair for name in fields_of(t)))


def label(pairs: Pairs, kind: int) -> str:
    """Returns what metrics call a pair: the fields of its answer."""
    return "_".join(fields_of(pairs[kind][1]))


def documents_of(record: Record, pairs: Pairs) -> list[Document]:
    """Returns the documents of a record.

    Raises:
      DataError: the record has a problem, a field is missing or holds no text, or every answer is
        empty.
    """
    if record.problem is not None:
        raise DataError(record.problem)
    documents = []
    for kind, (prompt, answer) in enumerate(pairs):
        given = list(_filled(prompt, record.fields))
        if len(given) != 1:
            raise DataError(f"the prompt {prompt!r} has {len(given)} values, wanted one")
        answers = dict.fromkeys(text for text in _filled(answer, record.fields) if text.strip())
        documents += [Document(given[0], text, kind) for text in answers]
    if not documents:
        raise DataError("every answer is empty")
    return documents


def _filled(template: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the template with every value of its fields; of several lists, value by value."""
    names = fields_of(template)
    if not names:
        yield template.format()
        return
    for values in zip(*(_texts(fields, name) for name in names), strict=False):
        yield template.format(**dict(zip(names, values, strict=True)))


def _texts(fields: Mapping[str, Any], name: str) -> Sequence[str]:
    if name not in fields:
        raise DataError(f"there is no field {name!r}{nearest(name, fields)}")
    value = fields[name]
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [_text(v, name) for v in values]


def _text(value: Any, name: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8-sig").strip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"field {name!r} is not UTF-8 ({error.reason})") from error
    if not isinstance(value, str | int | float):
        raise DataError(f"field {name!r} holds {type(value).__name__}, wanted text")
    return str(value)
