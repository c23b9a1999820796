"""The examples of docs/data.md, run as they stand there."""

import pathlib
import re

import pytest
import tokenizers

from m6jax import configuration
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.data.vocab_training import train, training_options
from m6jax.experiment import Experiment
from m6jax.experiment.model_dir import MACROS

pytestmark = pytest.mark.usefixtures("quick_runs")

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/data.md").read_text("utf-8")
EXAMPLES = [e for e in re.findall(r"```gin\n(.*?)```", PAGE, re.S) if "Pictures" not in e]
(MODULE,) = re.findall(r"```python\n(import functools.*?)```", PAGE, re.S)


def write_tokenizer(text, path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    """The folder that the page calls /my."""
    folder = tmp_path_factory.mktemp("my")
    text = "".join(f"The {i}th ship sailed at noon.\n\n" for i in range(400))
    (folder / "texts").mkdir()
    for name in ("a", "b"):
        (folder / "texts" / f"{name}.txt").write_text(f"{name} {text}")
    (folder / "other.txt").write_text("Another ship came back.\n")
    pairs = [f"How many ships sailed on day {i}?\t{i} ships" for i in range(40)]
    (folder / "train.tsv").write_text("\n".join(pairs[:32]) + "\n")
    (folder / "validation.tsv").write_text("\n".join(pairs[32:]) + "\n")
    (folder / "tasks.py").write_text(MODULE.replace("/my/", f"{folder}/"))
    (folder / "own.model").write_bytes(train(text.split("\n"), training_options(300, 0.995)))
    write_tokenizer(text, folder / "tokenizer.json")
    tf, _ = import_tensorflow()
    with tf.io.TFRecordWriter(str(folder / "records-0")) as writer:
        for line in filter(None, text.splitlines()):
            value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[line.encode()]))
            features = tf.train.Features(feature={"text": value})
            writer.write(tf.train.Example(features=features).SerializeToString())
    return folder


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_is_read_and_packed(number, my, tmp_path):
    """On top of the quick start, with a small vocabulary."""
    example = EXAMPLES[number].replace("/my/", f"{my}/")
    small = "VOCABULARY = 400\n" if "sources" in example else ""  # Chinese needs more
    (tmp_path / "run.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom m6jax import data\n"
        f"include 'configs/quickstart.gin'\n{small}{example}"
    )
    experiment = configuration.load(
        [tmp_path / "run.gin"], [], [ROOT], root=Experiment, macros=MACROS
    ).value
    data = experiment.data
    rows = data.train_rows()
    assert rows.filled(16) > 0.5
    assert rows.take(4)["tokens"].shape == (4, data.length)
    rows.close()
    for name in data.eval_names():
        assert next(data.eval_batches(name, 4))["loss_weights"].any()
