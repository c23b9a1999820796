import numpy as np
import pytest

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
    monkeypatch.setattr("m6jax.data.corpus.seqio_task", None)
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
