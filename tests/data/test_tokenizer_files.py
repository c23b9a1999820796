"""A tokenizer.json of the tokenizers library as a vocabulary."""

import json
import sys

import pytest
import tokenizers

from m6jax.data.config import TextData, TextFiles, TokenizerFile
from m6jax.data.errors import DataError
from m6jax.foundation.validated import ConfigError

TEXTS = [
    "the ship sailed at noon",
    "春眠不觉晓，处处闻啼鸟",
    "  two  spaces\n",
    "<|endoftext|> é😀",
]


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """Byte-level pairs as in GPT-2, which lose nothing."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def lower(tmp_path):
    """Words in lower case, which is not what was written."""
    vocab = {"[UNK]": 0, "[SEP]": 1, "[CLS]": 2, "[PAD]": 3, "the": 4, "ship": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[SEP]", "[CLS]", "[PAD]"])
    tokenizer.save(str(tmp_path / "lower.json"))
    return str(tmp_path / "lower.json")


def test_text_comes_back_and_special_tokens_are_no_text(bytewise):
    vocabulary = TokenizerFile(path=bytewise, extra_ids=2).load(())
    library = tokenizers.Tokenizer.from_file(bytewise)
    assert vocabulary.encode(TEXTS[0]) == library.encode(TEXTS[0]).ids
    for text in TEXTS:
        assert vocabulary.decode(vocabulary.encode(text)) == text
    end = library.token_to_id("<|endoftext|>")
    assert (vocabulary.eos_id, vocabulary.start_id, vocabulary.pad_id) == (end, end, end)
    assert end not in vocabulary.encode(TEXTS[3])
    assert vocabulary.base_size == library.get_vocab_size()
    assert vocabulary.decode([*vocabulary.encode("a"), vocabulary.sentinel(0), end]) == (
        "a<extra_id_0>"
    )


def test_special_ids_of_its_own(lower):
    vocabulary = TokenizerFile(path=lower).load(())
    assert (vocabulary.eos_id, vocabulary.start_id, vocabulary.pad_id) == (1, 2, 3)
    other = TokenizerFile(path=lower, end="[PAD]").load(())
    assert other.eos_id == 3
    assert other.fingerprint != vocabulary.fingerprint


def test_what_it_changes_is_said_and_counted(lower, bytewise, tmp_path):
    (tmp_path / "text.txt").write_text("the ship\nThe ship\nthe\n")
    source = TextFiles(train=f"{tmp_path}/text.txt", hold_out_every=0, document="line")
    data = TextData(sources=(source,), vocabulary=TokenizerFile(path=lower), length=4, prefetch=0)
    assert data.train_rows().skipped == (
        "text: the vocabulary changes text: it gives back 2 of 3 documents as they were, and bits"
        " per byte count all their bytes",
    )
    exact = TextData(sources=(source,), vocabulary=TokenizerFile(path=bytewise), length=4)
    assert exact.train_rows().skipped == ()


def test_files_that_cannot_be_used(lower, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"/none\.json: No such file"):
        TokenizerFile(path=f"{tmp_path}/none.json").load(())
    for name, content in (("junk", "junk"), ("other", json.dumps({"a": 1}))):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=rf"/{name} is not a tokenizer\.json \("):
            TokenizerFile(path=f"{tmp_path}/{name}").load(())
    with pytest.raises(DataError, match=r"has no token '\[SEPP\]' \(did you mean '\[SEP\]'\?\)"):
        TokenizerFile(path=lower, end="[SEPP]").load(())
    changed = json.loads((tmp_path / "lower.json").read_text().replace("[SEP]", "[END]"))
    (tmp_path / "endless.json").write_text(json.dumps(changed))
    with pytest.raises(DataError, match=r"has none of the tokens </s>, .*; name the one that ends"):
        TokenizerFile(path=f"{tmp_path}/endless.json").load(())
    with pytest.raises(ConfigError, match=r"TokenizerFile\.extra_ids: -1 is negative"):
        TokenizerFile(path=lower, extra_ids=-1)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'm6jax\[tokenizers\]'"):
        TokenizerFile(path=lower).load(())


def test_a_run_keeps_the_file(bytewise, tmp_path):
    setting = TokenizerFile(path=bytewise)
    vocabulary = setting.load(())
    (tmp_path / "kept").write_bytes(vocabulary.model)
    assert setting.model_if_there() == vocabulary.model
    assert setting.pinned(str(tmp_path / "kept")).load(()).fingerprint == vocabulary.fingerprint
    assert TokenizerFile(path="/no/such").model_if_there() is None
