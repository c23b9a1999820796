"""Tasks of a user's own module, as seqio's documentation would write them."""

import dataclasses

import numpy as np
import pytest
import their_tasks

from m6jax.data.config import (
    SentencePiece,
    SeqioTask,
    SpanDenoising,
    TaskVocabulary,
    TextData,
    TextFiles,
    TokenIds,
)
from m6jax.data.errors import DataError
from m6jax.data.seqio_preprocessors import seqio_preprocessor
from m6jax.data.seqio_vocabularies import from_seqio, to_seqio
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.foundation.validated import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return their_tasks.write(tmp_path_factory.mktemp("tasks")).parent


@pytest.fixture
def their(folder):
    """Makes data of their tasks with their vocabulary."""

    def make(name, source=None, **options):
        module = str(folder / "their_tasks.py")
        settings = {
            "sources": (SeqioTask(name=name, module=module, **(source or {})),),
            "vocabulary": TaskVocabulary(extra_ids=their_tasks.SENTINELS),
            "length": 32,
            "prefetch": 0,
        }
        return TextData(**(settings | options))

    return make


@pytest.fixture
def module(tmp_path):
    """Writes a module and returns its path."""

    def write(code, name="other_tasks.py"):
        (tmp_path / name).write_text("import seqio\nimport tensorflow as tf\n" + code)
        return str(tmp_path / name)

    return write


def texts(data, batch):
    """What rows are asked for: the targets that carry loss, as text."""
    vocabulary = data.vocab()
    rows = zip(batch["targets"], batch["loss_weights"] > 0, strict=True)
    return [vocabulary.decode(row[asked].tolist()) for row, asked in rows]


def test_inputs_are_given_and_targets_predicted(their):
    data = their("who", packing=False)
    batch = data.train_rows().take(32)
    assert sorted(texts(data, batch)) == sorted(x.split("\t")[1] for x in their_tasks.LINES[:32])
    provider = data.sources[0].provider()
    made = next(provider.get_dataset(None, "validation", shuffle=False).as_numpy_iterator())
    given, asked = made["inputs"].tolist(), made["targets"].tolist()
    row = next(data.eval_batches("who", 1))
    n = len(given) + len(asked)
    assert row["tokens"][0, :n].tolist() == [0, *given, *asked[:-1]]
    assert row["targets"][0, :n].tolist() == [*given, *asked]
    assert asked[-1] == data.vocab().eos_id
    assert row["bidirectional"][0].tolist() == [1] * (1 + len(given)) + [0] * (31 - len(given))
    assert row["loss_weights"][0].sum() == len(asked)
    assert (row["loss_weights"][0, len(given) : n] == 1).all()


def test_targets_alone_are_all_predicted(their):
    data = their("who_alone", packing=False)
    row = next(data.eval_batches("who_alone", 1))
    assert row["bidirectional"].sum() == 0
    assert row["loss_weights"].sum() == (row["segment_ids"] > 0).sum()
    assert data.vocab().decode(row["targets"][0].tolist()) == "16 the ship"


def test_order_is_that_of_every_source(their):
    """Dealt to two processes, and gone on with by one where two stopped."""
    data = their("who_mixed")
    whole = data.train_rows()
    halves = [data.train_rows(i, 2) for i in range(2)]
    for _ in range(3):
        first, other = (half.take(4) for half in halves)
        together = whole.take(4)
        for feature, rows in together.items():
            np.testing.assert_array_equal(rows, np.concatenate([first[feature], other[feature]]))
    alone = their("who_mixed").train_rows()  # all examples are made again, random ones alike
    alone.restore(halves[1].state())
    np.testing.assert_array_equal(alone.take(4)["tokens"], whole.take(4)["tokens"])
    with pytest.raises(ConfigError, match="other training data"):
        alone.restore(dataclasses.replace(data, length=30).train_rows().state())


def test_a_mixture_has_its_own_rates(their):
    """3:1 of 1,024 draws is 768, give or take 4 standard deviations of 14."""
    data = their("who_mixed", packing=False)
    rows = data.train_rows()
    rows.take(1024)
    first, second = rows.state()["place"]["start"]["drawn"]
    assert first + second == 1024
    assert abs(first - 768) < 56
    both = dataclasses.replace(data, packing=True)
    held_out = sum((b["segment_ids"].max(1)).sum() for b in both.eval_batches("who_mixed", 4))
    assert held_out == 16  # eight examples of each task


def test_a_task_beside_text(their, tmp_path):
    (tmp_path / "text.txt").write_text("the ship sailed\n" * 20)
    sources = (*their("who").sources, TextFiles(train=str(tmp_path / "text.txt")))
    data = their("who", sources=sources, rates=(1, 3))
    assert data.eval_names() == ("who", "text")
    assert data.train_rows().take(2)["tokens"].shape == (2, 32)
    assert data.predicted_bytes("who") is None


def test_the_runs_vocabulary_in_the_place_of_theirs(their):
    source = {"vocabulary": "run"}
    data = their("who", source, vocabulary=SentencePiece(size=290), packing=False)
    assert data.vocab().base_size == 290
    assert set(texts(data, data.train_rows().take(32))) == {
        line.split("\t")[1] for line in their_tasks.LINES[:32]
    }


def test_another_vocabulary_is_refused(their):
    data = their("who", vocabulary=TokenIds(size=500))
    with pytest.raises(DataError, match=r"own vocabulary of 'who' \(308 ids\) .* \(500 ids\); "):
        data.train_rows()
    with pytest.raises(DataError, match=r"TaskVocabulary\.extra_ids: 2, but .* 'who' has 8"):
        their("who", vocabulary=TaskVocabulary(extra_ids=2)).vocab()
    with pytest.raises(DataError, match="no source is a SeqioTask with a vocabulary of its own"):
        their("who", {"vocabulary": "run"}).vocab()
    with pytest.raises(ConfigError, match=r"TaskVocabulary\.extra_ids: -1 is negative"):
        TaskVocabulary(extra_ids=-1)


def test_a_model_file_of_theirs_is_their_vocabulary(their, folder):
    file = SentencePiece(path=str(folder / "their.model"), extra_ids=their_tasks.SENTINELS)
    assert their("who", vocabulary=file).train_rows().take(1)["tokens"].any()


def test_random_preprocessors_choose_anew_in_each_pass(their):
    def asked(passes):
        data = their("who_denoised", {"passes": passes}, packing=False)
        return set(texts(data, data.train_rows().take(32 * passes)))

    assert len(asked(3)) > len(asked(1))


def test_examples_longer_than_allowed_are_cut_and_counted(their):
    rows = their("who", {"inputs_length": 30, "targets_length": 2}, packing=False).train_rows()
    assert rows.skipped == ("who: 32 examples cut, which were too long",)
    assert rows.take(4)["loss_weights"].sum(1).tolist() == [2] * 4
    with pytest.raises(ConfigError, match="30 tokens of inputs and 3 of targets are longer than"):
        their("who", {"inputs_length": 30, "targets_length": 3}).train_rows()
    with pytest.raises(ConfigError, match=r"SeqioTask\.passes: 0 is not positive"):
        SeqioTask(name="who", module="x", passes=0)


COUNTED = """
def numbers(split, shuffle_files, seed=None):
    with open("{log}", "a") as file:
        file.write(split + " ")
    values = [[5, 6, 7], [], [8, {last}]]
    return tf.data.Dataset.from_generator(
        lambda: ({{"targets": v}} for v in values),
        output_signature={{"targets": tf.TensorSpec([None], tf.int32)}},
    )

seqio.TaskRegistry.add(
    "{name}",
    source=seqio.FunctionDataSource(numbers, splits=("train",)),
    output_features={{"targets": seqio.Feature(seqio.PassThroughVocabulary({size}, eos_id=1))}},
)
"""


def counted(module, tmp_path, name, version=None, last=9):
    log = tmp_path / "log"
    path = module(COUNTED.format(log=log, name=name, last=last, size=20), f"{name}.py")

    def rows():
        source = SeqioTask(name=name, module=path, validation=None, version=version)
        data = TextData(sources=(source,), vocabulary=TokenIds(size=20), length=4, prefetch=0)
        return data.train_rows()

    return rows, lambda: log.read_text().split()


def test_examples_are_made_for_every_run_unless_they_have_a_version(module, tmp_path):
    rows, calls = counted(module, tmp_path, "anew")
    state = rows().state()
    assert rows().state() == state
    made = len(calls())
    rows, calls = counted(module, tmp_path, "kept", version="1")
    rows()
    once = len(calls()) - made
    rows()
    assert len(calls()) == made + once
    assert once == made // 2
    assert rows().skipped == (
        "kept: 1 records left out, such as task 'kept', example 1: no targets",
    )


def test_ids_outside_the_vocabulary(module, tmp_path):
    rows, _ = counted(module, tmp_path, "outside", last=20)
    with pytest.raises(DataError, match=r"'outside': token id 20 in example 2 is outside .* of 20"):
        rows()


def test_what_is_not_there_is_named(their, module, tmp_path):
    with pytest.raises(DataError, match=r"registers no 'whoo' \(did you mean 'who'\?\)"):
        their("whoo").train_rows()
    no_split = r"SeqioTask\.validation: 'who' has no split 'test', it has train, validation \(None"
    with pytest.raises(DataError, match=no_split):
        next(their("who", {"validation": "test"}).eval_batches("who", 4))
    with pytest.raises(DataError, match=r"there is no module 'no\.such' \(give the path"):
        SeqioTask(name="who", module="no.such").provider()
    with pytest.raises(DataError, match=r"ZeroDivisionError: division by zero \(.*broken\.py:3\)"):
        SeqioTask(name="who", module=module("1 / 0\n", "broken.py")).provider()
    with pytest.raises(DataError, match=r"FileNotFoundError: .*/none.py"):
        SeqioTask(name="who", module=str(tmp_path / "none.py")).provider()
    with pytest.raises(DataError, match="failed: ModuleNotFoundError: No module named 'nothing'"):
        SeqioTask(name="who", module=module("import nothing\n", "needs.py")).provider()


FEATURES = """
def add(name, **features):
    empty = lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensors({"targets": [5]})
    source = seqio.FunctionDataSource(empty, splits=("train",))
    seqio.TaskRegistry.add(name, source=source, output_features=features)

ids = seqio.PassThroughVocabulary(20, eos_id=1)
add("other_features", targets=seqio.Feature(ids), weights=seqio.Feature(ids))
add("floats", targets=seqio.Feature(ids, dtype=tf.float32))
add("two", inputs=seqio.Feature(seqio.ByteVocabulary()), targets=seqio.Feature(ids))
add("endless", targets=seqio.Feature(seqio.PassThroughVocabulary(20)))
add("upwards", targets=seqio.Feature(
    seqio.SentencePieceVocabulary("{model}", extra_ids=2, reverse_extra_ids=False)))
add("nowhere", targets=seqio.Feature(seqio.SentencePieceVocabulary("/no/such.model")))
add("no_text", targets=seqio.Feature(ids))
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other_features", "'other_features' has the features targets, weights; wanted are"),
        ("floats", "feature 'targets' is float32 of rank 1, wanted is a list of token ids"),
        ("two", "feature 'inputs' of task 'two' .* different vocabularies; a decoder has one"),
        ("endless", "PassThroughVocabulary has no id for the end of a text"),
        ("upwards", r"sentinels that count upwards \(reverse_extra_ids=False\)"),
        ("nowhere", "/no/such.model cannot be read"),
    ],
)
def test_features_and_vocabularies_that_cannot_be(module, folder, name, message):
    path = module(FEATURES.replace("{model}", str(folder / "their.model")), "features.py")
    source = SeqioTask(name=name, module=path, validation=None)
    import_tensorflow()[1].TaskRegistry.reset()  # the module is written anew for each test
    with pytest.raises(DataError, match=message):
        TextData(sources=(source,), vocabulary=TaskVocabulary(), length=8).vocab()


def test_no_vocabulary_from_a_task_without_text(module, folder):
    path = module(FEATURES.replace("{model}", str(folder / "their.model")), "no_text.py")
    import_tensorflow()[1].TaskRegistry.reset()
    source = SeqioTask(name="no_text", module=path, vocabulary="run", validation=None)
    with pytest.raises(DataError, match="'no_text': its examples have no field inputs_pretoken"):
        TextData(sources=(source,), length=8).vocab()


def test_vocabularies_of_seqio(folder):
    _, seqio = import_tensorflow()
    theirs = seqio.SentencePieceVocabulary(str(folder / "their.model"), extra_ids=8)
    ours = from_seqio(theirs, "here")
    assert ours.encode("the ship") == theirs.encode("the ship")
    assert (ours.size, ours.sentinel(0)) == (theirs.vocab_size, theirs.vocab_size - 1)
    setting = SentencePiece(path=str(folder / "their.model"), extra_ids=8)
    assert ours.fingerprint == setting.load(()).fingerprint
    assert from_seqio(to_seqio(ours), "here") is ours
    ids = from_seqio(seqio.PassThroughVocabulary(20, eos_id=1), "here")
    assert ids.fingerprint == TokenIds(size=20).load(()).fingerprint
    some = from_seqio(seqio.ByteVocabulary(extra_ids=4), "here")
    assert (some.base_size, some.extra_ids, some.eos_id) == (259, 4, 1)
    assert some.decode([*some.encode("whale, 鲸"), 1, 5]) == "whale, 鲸"
    assert some.fingerprint == from_seqio(seqio.ByteVocabulary(4), "there").fingerprint
    assert some.fingerprint != from_seqio(seqio.ByteVocabulary(5), "here").fingerprint


def denoised(documents, lengths, extra_ids=8, objective=None):
    tf, seqio = import_tensorflow()
    vocabulary = to_seqio(TokenIds(size=100, extra_ids=extra_ids).load(()))
    features = {name: seqio.Feature(vocabulary) for name in ("inputs", "targets")}
    dataset = tf.data.Dataset.from_generator(
        lambda: ({"targets": d} for d in documents),
        output_signature={"targets": tf.TensorSpec([None], tf.int32)},
    )
    with seqio.map_seed_manager(3):
        made = seqio_preprocessor(objective or SpanDenoising())(dataset, lengths, features)
    return [(e["inputs"].tolist(), e["targets"].tolist()) for e in made.as_numpy_iterator()]


def test_our_objectives_as_preprocessors():
    documents = [list(range(10, 30)), [7], [40, 41, 42]]
    made = denoised(documents, None)
    assert len(made) == 2  # of one token nothing can be made
    for document, (given, asked) in zip([documents[0], documents[2]], made, strict=True):
        spans, last = {}, None
        assert asked[-1] == 1
        for token in asked[:-1]:
            if token >= 100:
                last = spans[token] = []
            else:
                last.append(token)
        back = [t for token in given for t in spans.get(token, [token])]
        assert back == document
        assert list(spans) == [107 - i for i in range(len(spans))]
    assert denoised(documents, None) == made
    parts = denoised(documents[:1], {"inputs": 8, "targets": 8})
    assert len(parts) == 2
    assert all(len(given) + len(asked) <= 16 for given, asked in parts)


def test_sequences_too_short_for_an_objective():
    with pytest.raises(ConfigError, match="sequence_length: 2 is too short for SpanDenoising"):
        denoised([[5, 6]], {"targets": 2})
    with pytest.raises(ConfigError, match=r"sequences of 64 needs \d sentinels, .* extra_ids = 1"):
        denoised([[5, 6]], {"targets": 64}, extra_ids=1)
