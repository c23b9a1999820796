import dataclasses

import numpy as np
import pytest

from m6jax.data.config import TextData
from m6jax.data.corpus import open_corpus
from m6jax.data.errors import DataError
from m6jax.data.sources import TRAIN, VALIDATION, Builtin, TextFiles
from m6jax.data.vocab import SentencePiece, TokenIds


def write(tmp_path, text, **options):
    (tmp_path / "text.txt").write_text(text)
    return TextFiles(train=f"{tmp_path}/text.txt", **options)


def test_documents_and_bytes(tmp_path):
    source = write(tmp_path, "5 6\n\n7\n8 9 10\n", hold_out_every=3, document="line")
    vocabulary = TokenIds(size=20).load((), ())
    train = open_corpus(source, source.scan(), TRAIN, vocabulary)
    assert [train.document(i).tolist() for i in range(2)] == [[5, 6], [7]]
    assert train.lengths().tolist() == [2, 1]
    assert train.lengths(np.array([1])).tolist() == [1]
    assert train.num_bytes == len(b"5 6\n7\n")
    held_out = open_corpus(source, source.scan(), VALIDATION, vocabulary)
    assert held_out.document(0).tolist() == [8, 9, 10]


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, np.uint16), (1 + (1 << 16), np.int32)])
def test_two_bytes_a_token_if_they_do(tmp_path, size, dtype):
    source = write(tmp_path, f"{size - 1} 0\n")
    corpus = open_corpus(source, source.scan(), TRAIN, TokenIds(size=size).load((), ()))
    assert corpus.tokens.dtype == dtype
    assert corpus.document(0).tolist() == [size - 1, 0]


def test_tokens_are_those_of_the_vocabulary():
    source = Builtin(name="zh")
    vocabulary = SentencePiece(size=4400).load([source], [source.scan()])
    corpus = open_corpus(source, source.scan(), VALIDATION, vocabulary)
    documents = list(source.documents(VALIDATION))
    assert len(corpus.lengths()) == len(documents)
    for i in (0, 100, 203):
        assert corpus.document(i).tolist() == vocabulary.encode(documents[i].decode())


def test_made_once(tmp_path, monkeypatch):
    source = write(tmp_path, "11 12\n")
    vocabulary = TokenIds(size=20).load((), ())
    first = open_corpus(source, source.scan(), TRAIN, vocabulary)
    monkeypatch.setattr("m6jax.data.text_corpus.seqio_task", None)
    again = open_corpus(source, source.scan(), TRAIN, vocabulary)
    assert again.tokens.tolist() == first.tokens.tolist() == [11, 12]


def test_tokens_outside_the_vocabulary(tmp_path):
    source = write(tmp_path, "5 6\n7 20\n", name="mine")
    with pytest.raises(
        DataError,
        match="'mine': token id 20 in document 1 is outside the vocabulary of 20 ids",
    ):
        open_corpus(source, source.scan(), TRAIN, TokenIds(size=20, extra_ids=9).load((), ()))


def test_no_document(tmp_path):
    vocabulary = TokenIds(size=20).load((), ())
    blank = write(tmp_path, " \n")
    with pytest.raises(DataError, match="'text': there is no training document"):
        open_corpus(blank, blank.scan(), TRAIN, vocabulary)
    few = write(tmp_path, "5\n6\n")
    with pytest.raises(DataError, match="'text': there is no held-out document; set"):
        open_corpus(few, few.scan(), VALIDATION, vocabulary)


def test_what_the_vocabulary_makes_nothing_of_is_left_out_and_named(tmp_path):
    """The bytes of what is left out do not count, here and in the text for gzip."""
    source = write(tmp_path, "5 6\n\n7\n8 9\n7\n10\n", document="line", hold_out_every=0)
    plain = TokenIds(size=20).load((), ())
    vocabulary = dataclasses.replace(
        plain, encode=lambda text: [] if text == "7" else plain.encode(text), fingerprint="no 7"
    )
    corpus = open_corpus(source, source.scan(), TRAIN, vocabulary)
    assert corpus.tokens.tolist() == [5, 6, 8, 9, 10]
    assert corpus.offsets.tolist() == [0, 2, 4, 5]
    assert corpus.left_out_numbers == (1, 3)
    assert corpus.num_bytes == len("5 6\n8 9\n10\n")
    assert corpus.left_out == (
        f"text: 2 records left out, such as {tmp_path}/text.txt, line 3: the vocabulary makes no"
        " token of '7'"
    )
    assert len(set(corpus.hashes.tolist())) == 3


def test_the_held_out_text_is_what_is_scored(tmp_path):
    """A document of the validation file of which a vocabulary makes nothing is in neither."""
    (tmp_path / "valid.txt").write_text("5\n\n\n6 7\n")
    source = dataclasses.replace(write(tmp_path, "5 6\n"), validation=f"{tmp_path}/valid.txt")
    data = TextData(sources=(source,), vocabulary=TokenIds(size=20), length=4)
    assert data.predicted_bytes("text") == len(data.held_out_text("text"))
