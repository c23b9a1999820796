import subprocess
import sys

import numpy as np
import pytest

from m6jax.data.config import TextData, TextFiles, TokenIds
from m6jax.data.sources import TRAIN
from m6jax.data.tasks import seqio_mixture, seqio_task
from m6jax.data.tensorflow_import import import_tensorflow


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.txt").write_text("5 6\n7\n8 9 10\n")
    return TextFiles(train=f"{tmp_path}/text.txt", hold_out_every=3)


@pytest.fixture
def vocabulary():
    return TokenIds(size=20, extra_ids=1).load((), ())


def targets(provider, split=TRAIN):
    dataset = provider.get_dataset(None, split, shuffle=False).take(40)  # a mixture has no end
    return [e["targets"].tolist() for e in dataset.as_numpy_iterator()]


def test_task_gives_whole_documents(source, vocabulary):
    task = seqio_task(source, source.scan().fingerprint, vocabulary)
    assert targets(task) == [[5, 6], [7]]
    assert targets(task, "validation") == [[8, 9, 10]]
    example = next(task.get_dataset(None, TRAIN, shuffle=False).as_numpy_iterator())
    assert example["targets_pretokenized"] == b"5 6"


def test_registering_twice_gives_one_task(source, vocabulary):
    _, seqio = import_tensorflow()
    task = seqio_task(source, "here", vocabulary)
    assert seqio_task(source, "here", vocabulary) is task
    assert seqio.get_mixture_or_task(task.name) is task
    other = seqio_task(source, "here", TokenIds(size=30).load((), ()))
    assert seqio_task(source, "there", vocabulary).name != task.name != other.name


def test_mixture_has_the_rates(source, tmp_path):
    (tmp_path / "other.txt").write_text("11\n12\n13\n")
    other = TextFiles(train=f"{tmp_path}/other.txt", hold_out_every=0, name="other")
    data = TextData(sources=(source, other), rates=(3, 1), vocabulary=TokenIds(size=20), length=4)
    mixture = data.mixture()
    rates = {task.name.split("_")[1]: mixture.get_rate(task) for task in mixture.tasks}
    assert rates == {"text": 3.0, "other": 1.0}
    assert data.mixture() is mixture
    assert {t for e in targets(mixture) for t in e} == {5, 6, 7, 11, 12, 13}
    assert seqio_mixture(mixture.tasks, (1.0, 1.0)) is not mixture


def test_seqio_sees_our_vocabulary(source, vocabulary):
    tf, _ = import_tensorflow()
    feature = seqio_task(source, "vocab", vocabulary).output_features["targets"]
    seen = feature.vocabulary
    assert seen.vocab_size == 21
    assert seen.encode("5 6") == [5, 6]
    assert seen.decode([5, 6, 1, 7]) == "5 6 "
    assert seen.encode_tf(tf.constant("5 6")).numpy().tolist() == [5, 6]
    assert seen.decode_tf(tf.constant(np.array([5, 6, 1, 7]))).numpy() == b"5 6 "
    again = seqio_task(source, "vocab 2", vocabulary).output_features["targets"].vocabulary
    assert seen == again
    assert hash(seen) == hash(again)
    assert seen != TokenIds(size=30).load((), ())


def test_import_is_silent_and_takes_no_accelerator():
    code = (
        "import os; os.environ.pop('TF_CPP_MIN_LOG_LEVEL', None)\n"
        "from m6jax.data.tensorflow_import import import_tensorflow, _without_absl_lines\n"
        "tf, seqio = import_tensorflow()\n"
        "assert not tf.config.get_visible_devices('GPU'), 'GPU'\n"
        "tf.constant(1) + 1\n"
        "with _without_absl_lines():\n"
        "    os.write(2, b'I0000 00:00:1763 x.cc:3] noise\\nfor the user\\n')\n"
        "print('done')"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "for the user\n")
