import re
import subprocess
import sys

import pytest

from m6jax.data.corpus import open_corpus
from m6jax.data.errors import DataError
from m6jax.data.sources import Builtin, TextFiles
from m6jax.data.vocab import SentencePiece, TokenIds
from m6jax.data.vocab_training import train, training_lines, training_options
from m6jax.foundation.validated import ConfigError

HARD = [
    "  two  spaces ",
    "tab\tline\n\nend\r\n",
    "ｆｕｌｌ ﬁ ½",
    "爱😀é",
    "\x00",
    "</s><pad><extra_id_0>",
]


def load(vocabulary, *sources):
    return vocabulary.load(sources, [source.scan() for source in sources])


@pytest.fixture(scope="module")
def english():
    return load(SentencePiece(size=400, extra_ids=2, character_coverage=0.98), Builtin(name="en"))


def test_special_ids(english):
    assert (english.pad_id, english.eos_id, english.start_id) == (0, 1, 0)
    assert (english.base_size, english.size) == (400, 402)
    assert (english.sentinel(0), english.sentinel(1)) == (401, 400)
    with pytest.raises(ConfigError, match="sentinel 2: the vocabulary has 2 extra_ids"):
        english.sentinel(2)


@pytest.mark.parametrize("text", HARD)
def test_no_byte_is_lost(english, text):
    ids = english.encode(text)
    assert english.decode(ids) == text
    assert all(2 < i < 400 for i in ids)


def test_held_out_text_comes_back(english):
    for document in Builtin(name="en").documents("validation"):
        assert english.decode(english.encode(document.decode())).encode() == document


def test_decoding_ends_at_the_end_and_shows_sentinels(english):
    a, b = english.encode("a b"), english.encode("later")
    assert english.decode([*a, 401, *b, 0, 1, *b]) == "a b<extra_id_0>later"
    for wrong in (402, -1):
        with pytest.raises(DataError, match=rf"token id {wrong} is outside .* of 402 ids"):
            english.decode([wrong])


def test_training_is_repeatable_and_cached(monkeypatch):
    source = Builtin(name="en")
    lines = list(training_lines([source], [source.scan()], 20_000))
    options = training_options(320, 0.98)
    assert train(lines, options) == train(lines, options)
    setting = SentencePiece(size=320, character_coverage=0.98)
    first = load(setting, source)
    monkeypatch.setattr("m6jax.data.vocab.train", None)
    assert load(setting, source).fingerprint == first.fingerprint


def test_only_training_documents_are_seen(tmp_path):
    """Every tenth document is held out; only they have an `x`."""
    lines = ["abc abc abd"] * 9 + ["xx xx xx"]
    (tmp_path / "text.txt").write_text("\n".join(lines * 20))
    source = TextFiles(train=f"{tmp_path}/text.txt")
    seen = "".join(training_lines([source], [source.scan()], 10**9))
    assert seen == "abc abc abd" * 180
    vocabulary = load(SentencePiece(size=270), source)
    byte_of_x = 3 + ord("x")  # a byte piece, for `x` is no character of the training text
    assert vocabulary.encode("x") == [byte_of_x]
    assert vocabulary.encode("a") != [3 + ord("a")]


def test_training_text_is_taken_evenly(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"a{i:07}" for i in range(1000)))  # 9 bytes a line
    (tmp_path / "b.txt").write_text("\n".join(f"b{i:07}" for i in range(100)))
    a = TextFiles(train=f"{tmp_path}/a.txt", hold_out_every=0, name="a")
    b = TextFiles(train=f"{tmp_path}/b.txt", hold_out_every=0, name="b")
    lines = list(training_lines([a, b], [a.scan(), b.scan()], 1800))
    assert [int(x[1:]) for x in lines if x[0] == "a"] == list(range(9, 1000, 10))
    assert sum(x[0] == "b" for x in lines) == 100


def test_long_lines_are_cut(tmp_path):
    (tmp_path / "text.txt").write_text("y" * 9000 + "\n" + "爱" * 2500, encoding="utf-8")
    source = TextFiles(train=f"{tmp_path}/text.txt")
    lines = list(training_lines([source], [source.scan()], 10**9))
    assert [len(line) for line in lines] == [4000, 4000, 1000, 1000, 1000, 500]


def test_users_own_model(english, tmp_path):
    path = tmp_path / "my.model"
    path.write_bytes(english.model)
    own = SentencePiece(path=str(path)).load((), ())
    assert own.size == 400
    assert own.encode("whale") == english.encode("whale")
    assert own.fingerprint != english.fingerprint  # other sentinels, other targets


def test_models_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match=r"SentencePiece\.path '.*missing'"):
        SentencePiece(path=str(tmp_path / "missing")).load((), ())
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"junk': not a SentencePiece model"):
        SentencePiece(path=str(tmp_path / "junk")).load((), ())
    endless = train(["abc"] * 9, training_options(262, 1.0) | {"eos_id": -1})
    (tmp_path / "endless").write_bytes(endless)
    with pytest.raises(DataError, match="no end-of-sentence piece"):
        SentencePiece(path=str(tmp_path / "endless")).load((), ())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (8000, r"SentencePiece\.size: 8000, but the training text gives at most \d+ pieces"),
        (260, r"SentencePiece\.size: 260, but the characters of the training text need 26\d"),
    ],
)
def test_sizes_that_the_text_cannot_give(tmp_path, size, message):
    (tmp_path / "text.txt").write_text("hello world\n" * 3)
    with pytest.raises(DataError, match=message):
        load(SentencePiece(size=size), TextFiles(train=f"{tmp_path}/text.txt"))


def test_no_training_text(tmp_path):
    (tmp_path / "text.txt").write_text("\n \n")
    with pytest.raises(DataError, match="no training document"):
        load(SentencePiece(), TextFiles(train=f"{tmp_path}/text.txt"))


def test_other_errors_of_training_are_passed_on():
    with pytest.raises(DataError, match=r"SentencePiece cannot be trained: .*coverage"):
        train(["abc"], training_options(300, 0.5))


def test_training_is_silent():
    code = (
        "from m6jax.data.vocab_training import *\n"
        "from m6jax.data.vocab import SentencePiece\n"
        "open('m', 'wb').write(train(['hello world'] * 9, training_options(270, 1.0)))\n"
        "print(SentencePiece(path='m').load((), ()).encode('hello'))"
    )
    code = f"import os, tempfile; os.chdir(tempfile.mkdtemp())\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert re.fullmatch(r"\[[\d, ]+\]\n", done.stdout)


@pytest.mark.parametrize(
    "options",
    [{"size": 0}, {"extra_ids": -1}, {"training_bytes": 9}, {"character_coverage": 1.5}],
)
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SentencePiece(**options)


def test_token_ids():
    vocabulary = TokenIds(size=10, extra_ids=2).load((), ())
    assert vocabulary.encode("3 4\n5") == [3, 4, 5]
    assert vocabulary.decode([3, 11, 4, 1, 9]) == "3 <extra_id_0>4 "
    assert vocabulary.size == 12
    with pytest.raises(DataError, match="TokenIds: 'a 3' is not numbers"):
        vocabulary.encode("a 3")
    with pytest.raises(ConfigError, match="TokenIds: eos_id 10 must be in 1"):
        TokenIds(size=10, eos_id=10)


def test_a_model_that_normalises_is_known_and_what_it_loses_counted(english, tmp_path):
    """With the library's defaults spaces are joined, and U+3000 alone is nothing."""
    lines = [f"the {i} ships sailed" for i in range(200)]
    options = {"vocab_size": 40, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    (tmp_path / "own.model").write_bytes(train(lines, options))
    own = SentencePiece(path=str(tmp_path / "own.model"))
    assert english.restores_all
    assert not own.load(()).restores_all
    records = ["the 3 ships", "the  3 ships", "\u3000"]
    (tmp_path / "text.txt").write_text("\n".join(records[:2]) + "\n", encoding="utf-8")
    source = TextFiles(train=f"{tmp_path}/text.txt", hold_out_every=0)
    corpus = open_corpus(source, source.scan(), "train", own.load(()))
    assert corpus.num_altered == 1
    assert "gives back 1 of 2 documents" in corpus.left_out
    assert own.load(()).encode(records[2]) == []
