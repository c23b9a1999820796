"""The tokens of all documents of a split, in one file that is mapped, not read.

Documents are tokenised once, through the seqio task of their source, and found in the cache by
every later run and every process of the machine. On disk a corpus is `tokens.bin`, all documents
one after another (two bytes a token for vocabularies up to 65,536 ids, else four), and
`offsets.bin`, where each begins. So any document can be had at any time, whatever the size of the
corpus, which is what makes exact resumption cheap: there is no reader to be wound on to its place.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import cast

import numpy as np

from m6jax.data import picture_corpus, text_corpus
from m6jax.data.cache import built, digest
from m6jax.data.files import Scan
from m6jax.data.pictures import Pictures
from m6jax.data.source import PictureSource, Source, TextSource
from m6jax.data.tensorflow_import import reading
from m6jax.data.vocab import Vocabulary

_FORMAT = 4  # to be counted up when the files or what is in them change


@dataclasses.dataclass(frozen=True)
class Album:
    """The pictures of a corpus.

    Attributes:
      patches: uint8 [number of pictures, I, F], mapped from the disk.
      numbers: int64 [number of documents], which picture a document belongs to.
      kinds: int64 [number of documents], by which of the source's `pairs` it was made.
    """

    patches: np.ndarray
    numbers: np.ndarray
    kinds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenised documents.

    Attributes:
      name: of the source.
      tokens: integers [number of tokens], mapped from the disk.
      offsets: int64 [number of documents + 1], mapped too; document i is
        `tokens[offsets[i] : offsets[i + 1]]`, without start or end.
      num_bytes: UTF-8 bytes of the original text with its separators; None if there is no text.
      prompts: int64 [number of documents], how many tokens of each are given, not asked for; None
        if none are.
      album: the pictures that documents belong to; None if there are none.
      skipped: what was left out of the source: a line for each record, the first few of them.
      num_skipped: how many were left out.
      left_out_numbers: which documents of a source of text were left out.
      hashes: uint64 [number of documents], equal where documents are; None if they are not known.
      num_altered: how many documents the vocabulary does not give back as they were.
      num_cut: how many documents lost their end, because they were longer than is allowed.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    num_bytes: int | None
    prompts: np.ndarray | None = None
    album: "Album | None" = None
    skipped: tuple[str, ...] = ()
    num_skipped: int = 0
    left_out_numbers: tuple[int, ...] = ()
    hashes: np.ndarray | None = None
    num_altered: int = 0
    num_cut: int = 0

    def document(self, number: int) -> np.ndarray:
        """Returns the tokens of a document [n], a view: nothing is read before it is used."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def prompt(self, number: int) -> int:
        """Returns how many of a document's first tokens are given, not asked for."""
        return 0 if self.prompts is None else int(self.prompts[number])

    @property
    def left_out(self) -> str | None:
        """A line about records that could not be used as they are; None if there are none."""
        parts = []
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} records left out, such as {self.skipped[0]}")
        if self.num_cut:
            parts.append(f"{self.num_cut:,} examples cut, which were too long")
        if self.num_altered:
            number = len(self.offsets) - 1
            parts.append(
                f"the vocabulary changes text: it gives back {number - self.num_altered:,} of"
                f" {number:,} documents as they were, and bits per byte count all their bytes"
            )
        return f"{self.name}: {'; '.join(parts)}" if parts else None

    @property
    def num_patches(self) -> int:
        """I, patches that stand before each document."""
        return 0 if self.album is None else self.album.patches.shape[1]

    def patches(self, number: int) -> np.ndarray:
        """Returns the patches of a document's picture, uint8 [I, F], a view."""
        assert self.album is not None
        return self.album.patches[self.album.numbers[number]]

    def fingerprint(self) -> str:
        """Returns 32 hexadecimal digits that stand for the documents and their pictures."""
        hasher = hashlib.blake2b(self.offsets.tobytes(), digest_size=16)
        parts = [self.tokens]
        if self.prompts is not None:
            parts.append(self.prompts)
        if self.album is not None:
            parts += [self.album.numbers, self.album.patches.reshape(-1)]
        for part in parts:
            for begin in range(0, len(part), 1 << 20):
                hasher.update(part[begin : begin + (1 << 20)].tobytes())
        return hasher.hexdigest()

    def lengths(self, numbers: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns how many tokens documents have, int64."""
        return self.offsets[1:][numbers] - self.offsets[:-1][numbers]


def open_corpus(
    source: Source,
    scan: Scan,
    split: str,
    vocabulary: Vocabulary,
    pictures: Pictures | None = None,
) -> Corpus:
    """Returns the corpus of a split, making it first if it is not in the cache.

    Raises:
      DataError: the split has no document, a document or picture cannot be read, or a token id is
        outside the vocabulary.
    """
    pictures = Pictures() if pictures is None else pictures
    dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.int32

    def write(directory: Path) -> None:
        if source.has_pictures:
            found = picture_corpus.write(
                cast("PictureSource", source), split, vocabulary, pictures, dtype, directory
            )
        else:
            with reading(f"source {source.name!r}"):
                found = text_corpus.write(
                    cast("TextSource", source), scan, split, vocabulary, dtype, directory
                )
        (directory / "corpus.json").write_text(json.dumps(found))

    key = [_FORMAT, scan.fingerprint, split, vocabulary.fingerprint]
    entry = built(
        "corpora", digest(*key, *([repr(pictures)] if source.has_pictures else [])), write
    )

    corpus = Corpus(
        name=source.name,
        tokens=mapped(entry, "tokens", dtype),
        offsets=mapped(entry, "offsets", np.int64),
        num_bytes=None,
    )
    found = json.loads((entry / "corpus.json").read_text())
    if not source.has_pictures:
        return dataclasses.replace(
            corpus,
            num_bytes=found["num_bytes"],
            skipped=tuple(found["skipped"]),
            left_out_numbers=tuple(found["left_out"]),
            num_skipped=len(found["left_out"]),
            num_altered=found["num_altered"],
            hashes=mapped(entry, "hashes", np.uint64),
        )
    patches = mapped(entry, "patches", np.uint8).reshape(
        -1, pictures.num_patches, pictures.patch_dim
    )
    return dataclasses.replace(
        corpus,
        prompts=mapped(entry, "prompts", np.int64),
        album=Album(patches, mapped(entry, "numbers", np.int64), mapped(entry, "kinds", np.int64)),
        skipped=tuple(found["skipped"]),
        num_skipped=found["num_skipped"],
    )


def mapped(entry: Path, name: str, dtype: type) -> np.ndarray:
    """Returns an array of a corpus on disk, mapped."""
    return np.asarray(np.memmap(entry / f"{name}.bin", dtype, "r"))
