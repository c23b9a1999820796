"""Where text comes from: the built-in books and poems, or a user's own files.

A source is a setting; making one reads nothing. Training and held-out text are kept apart by whole
documents. One line of configuration adds a source, for every other field has a default:

    TextFiles.train = '/my/*.txt'
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from m6jax.data.cache import digest
from m6jax.data.documents import DocumentKind, guess_document, numbered_documents, read_documents
from m6jax.data.errors import DataError
from m6jax.data.files import Scan, expand, scan
from m6jax.data.preprocessors import Objectives
from m6jax.data.source import DOCUMENTS_AT_ONCE, TRAIN, VALIDATION, Source
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.foundation.validated import ConfigError, PathName, adjustable, validated

_BUILTIN = Path(__file__).parent / "builtin"
_CHAPTER = re.compile(rb"chapter \d+", re.IGNORECASE)


@validated
class Builtin:
    """Text that comes with the package; no network, no files.

    Attributes:
      name: 'en', two novels, a document is a chapter, held out is the last tenth of the paragraphs
        of each book; or 'zh', 2,034 classical Chinese texts and poems, every tenth held out.
      objective: what is to be predicted; None: `TextData.objective`.
    """

    has_pictures: ClassVar[bool] = False

    name: Literal["en", "zh"] = "en"
    objective: Objectives | None = None

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""
        return True

    @property
    def is_text(self) -> bool:
        """Whether documents are text and not token ids."""
        return True

    @property
    def separator(self) -> bytes:
        """What stands between documents in the original text."""
        return b"\n" if self.name == "en" else b"\n\n"

    def scan(self) -> Scan:
        """Returns what the file holds."""
        found = scan([str(self._file())], text=True)
        return Scan(digest("builtin", self.name, found.fingerprint), found.num_bytes)

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the documents of 'train' or 'validation' as UTF-8, always in the same order."""
        if self.name == "en":
            yield from _chapters(self._file(), split)
            return
        for i, document in enumerate(read_documents(str(self._file()), "paragraph")):
            if (i % 10 == 0) == (split == VALIDATION):
                yield document

    def where(self, split: str, number: int) -> str:
        """Returns which document this is, for a person."""
        return f"{self._file().name}, document {number} of {split}"

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string scalar}`."""
        return text_dataset(self, split)

    def _file(self) -> Path:
        return _BUILTIN / f"{self.name}.txt.gz"


@validated
class TextFiles:
    """A user's own UTF-8 text files, `.gz` included.

    Attributes:
      train: pattern of the files to train on, such as '/my/**/*.txt'.
      validation: pattern of the held-out files; without it every `hold_out_every`-th document of
        the training files is held out.
      hold_out_every: see above; 0 holds out nothing.
      document: what a document is: a 'line', a 'paragraph' (lines between blank lines) or a 'file';
        None: what it seems to be (`documents.guess_document`), which is said when a run begins.
      name: what metrics call this source.
      objective: what is to be predicted; None: `TextData.objective`.
    """

    has_pictures: ClassVar[bool] = False

    # Texts may move: what is in them is checked (`identity`, `TrainRows.restore`).
    train: PathName = adjustable()
    validation: PathName | None = adjustable(default=None)
    hold_out_every: int = 10
    document: DocumentKind | None = None
    name: str = "text"
    objective: Objectives | None = None

    def check(self) -> None:
        """Checks what the fields say together."""
        check_split("TextFiles", self.name, self.hold_out_every)

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source."""
        return self.validation is not None or self.hold_out_every > 0

    @property
    def is_text(self) -> bool:
        """Whether documents are text and not token ids."""
        return True

    @property
    def separator(self) -> bytes:
        """What stands between documents in the original text."""
        return b"\n" if self.documents_are == "line" else b"\n\n"

    @property
    def documents_are(self) -> DocumentKind:
        """What a document is, guessed from the training files if it is not set."""
        return self.document or guess_document(expand(self.train, "TextFiles.train"))

    def scan(self) -> Scan:
        """Returns what the files hold, training and held out.

        Raises:
          DataError: a file is missing, empty, not UTF-8, or both trained on and held out.
        """
        train, held_out = self._names()
        found = scan(train, text=True)
        options = ["any line end", self.documents_are, self.hold_out_every, found.fingerprint]
        if held_out is not None:
            refuse_same_content("TextFiles", train, held_out)
            options.append(scan(held_out, text=True).fingerprint)
        return Scan(digest(*options), found.num_bytes)

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the documents of 'train' or 'validation' as UTF-8, always in the same order."""
        return (text for _, _, text in self._found(split))

    def where(self, split: str, number: int) -> str:
        """Returns file and line of a document, for a person."""
        return _nth(self._found(split), number)

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string scalar}`."""
        return text_dataset(self, split)

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        return expand_splits("TextFiles", self.train, self.validation)

    def _found(self, split: str) -> "Iterator[Found]":
        train, held_out = self._names()
        if held_out is not None:
            yield from _read(train if split == TRAIN else held_out, self.documents_are)
            return
        for i, found in enumerate(_read(train, self.documents_are)):
            if is_held_out(i, self.hold_out_every) == (split == VALIDATION):
                yield found


@validated
class HeldOutFiles:
    """Text files to evaluate on, of which training and vocabulary see nothing.

    Attributes:
      files: pattern of the files.
      document: see `TextFiles`.
      name: what metrics call this set.
      objective: what is to be predicted; None: `TextData.objective`.
    """

    has_pictures: ClassVar[bool] = False

    files: PathName
    document: DocumentKind | None = None
    name: str = "held_out"
    objective: Objectives | None = None

    def check(self) -> None:
        """Checks the name."""
        check_split("HeldOutFiles", self.name, 0)

    @property
    def has_held_out(self) -> bool:
        """Whether `validation` is a split of this source; it is the only one."""
        return True

    @property
    def is_text(self) -> bool:
        """Whether documents are text and not token ids."""
        return True

    @property
    def separator(self) -> bytes:
        """What stands between documents in the original text."""
        return b"\n" if self.documents_are == "line" else b"\n\n"

    @property
    def documents_are(self) -> DocumentKind:
        """What a document is, guessed from the files if it is not set."""
        return self.document or guess_document(expand(self.files, "HeldOutFiles.files"))

    def scan(self) -> Scan:
        """Returns what the files hold; raises DataError as `TextFiles.scan`."""
        found = scan(expand(self.files, "HeldOutFiles.files"), text=True)
        return Scan(digest("held out", self.documents_are, found.fingerprint), found.num_bytes)

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the documents as UTF-8, always in the same order; of 'train' none."""
        return (text for _, _, text in self._found(split))

    def where(self, split: str, number: int) -> str:
        """Returns file and line of a document, for a person."""
        return _nth(self._found(split), number)

    def _found(self, split: str) -> "Iterator[Found]":
        if split == VALIDATION:
            yield from _read(expand(self.files, "HeldOutFiles.files"), self.documents_are)

    def dataset(self, split: str) -> Any:
        """Returns a `tf.data.Dataset` of `{"text": string scalar}`."""
        return text_dataset(self, split)


Found = tuple[str, int, bytes]  # a document: name of the file, line, text


def _read(names: Sequence[str], kind: DocumentKind) -> Iterator[Found]:
    return ((name, line, text) for name in names for line, text in numbered_documents(name, kind))


def _nth(found: Iterator[Found], number: int) -> str:
    name, line, _ = next(itertools.islice(found, number, None))
    return f"{name}, line {line}"


def check_split(kind: str, name: str, hold_out_every: int) -> None:
    """Checks the fields that every source of files has."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ConfigError(f"{kind}.name: {name!r} may hold only letters, digits and _")
    if hold_out_every < 0 or hold_out_every == 1:
        raise ConfigError(
            f"{kind}.hold_out_every: {hold_out_every} leaves nothing to train on; 0 holds out "
            "nothing, 10 every tenth document"
        )


def expand_splits(
    kind: str,
    train: str,
    validation: str | None,
    expand: Callable[[str, str], tuple[str, ...]] = expand,
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Returns the names of the training files and, with a pattern for them, the held-out files.

    Args:
      kind: of source, for messages.
      train: a pattern.
      validation: another, or None.
      expand: makes names of a pattern and the setting that it comes from.
    """
    names = expand(train, f"{kind}.train")
    if validation is None:
        return names, None
    held_out = expand(validation, f"{kind}.validation")
    real = {os.path.realpath(name) for name in names}
    both = [name for name in held_out if os.path.realpath(name) in real]
    if both:
        raise DataError(f"{both[0]}: matches both {kind}.train {train!r} and .validation")
    return names, held_out


def refuse_same_content(
    kind: str,
    names: Sequence[str],
    held_out: Sequence[str],
    content: Callable[[tuple[str, ...]], str] = lambda names: scan(names, text=False).fingerprint,
) -> None:
    """Raises DataError for a held-out file that holds what a training file does, to the byte."""
    by_content = {content((name,)): name for name in names}
    for name in held_out:
        same = by_content.get(content((name,)))
        if same is not None:
            raise DataError(
                f"{name}: {kind}.validation holds what {same} of {kind}.train holds; a run would be"
                " evaluated on the text that it was trained on"
            )


def is_held_out(index: Any, every: int) -> Any:
    """Whether the document of this number (an int or a tensor) is held out: the last of `every`.

    The last, so that a corpus of fewer documents still has something to train on.
    """
    return index % every == every - 1 if every else index < 0


def _chapters(file: Path, split: str) -> Iterator[bytes]:
    for book in read_documents(str(file), "paragraph"):  # a book is a block of lines here
        paragraphs = book.split(b"\n")
        cut = len(paragraphs) - len(paragraphs) // 10
        chapter: list[bytes] = []
        for paragraph in paragraphs[:cut] if split == TRAIN else paragraphs[cut:]:
            if chapter and _CHAPTER.match(paragraph):
                yield b"\n".join(chapter)
                chapter = []
            chapter.append(paragraph)
        yield b"\n".join(chapter)


def text_dataset(source: Source, split: str) -> Any:
    """Returns a source's documents as a `tf.data.Dataset` of `{"text": string scalar}`."""
    tf, _ = import_tensorflow()

    def batches() -> Iterator[np.ndarray]:
        documents = source.documents(split)
        while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            yield np.array(batch, object)

    # One call into Python for many documents: one for each costs more than tokenising it.
    spec = tf.TensorSpec([None], tf.string)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return dataset.unbatch().map(lambda text: {"text": text})
