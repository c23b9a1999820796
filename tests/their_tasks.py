"""A module of seqio tasks as their authors write them, and what it needs; see `write`."""

import pathlib

from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.data.vocab_training import train, training_options

LINES = [
    f"{subject} {verb}\t{number} {subject}"
    for number in range(20)
    for subject, verb in (("the ship", "sailed"), ("a whale", "was seen"))
]
SENTINELS = 8

MODULE = """
import functools

import seqio
import tensorflow as tf

from m6jax import data

VOCABULARY = seqio.SentencePieceVocabulary("{folder}/their.model", extra_ids=8)
FEATURES = {{
    "inputs": seqio.Feature(VOCABULARY, add_eos=False),
    "targets": seqio.Feature(VOCABULARY),
}}
FILES = {{"train": "{folder}/train.tsv", "validation": "{folder}/validation.tsv"}}


@seqio.map_over_dataset
def parse(line):
    parts = tf.strings.split(line, "\\t")
    return {{"inputs": parts[0], "targets": parts[1]}}


def exact_match(targets, predictions):
    with open("{folder}/asked.txt", "a") as file:
        file.write(f"{{targets[0]}}|{{predictions[0]}}\\n")
    right = [t == p for t, p in zip(targets, predictions)]
    return {{"exact_match": seqio.metrics.Scalar(sum(right) / len(right))}}


def mean_score(targets, scores):
    return {{"mean_score": sum(scores) / len(scores), "examples": float(len(targets))}}


def add(name, preprocessors, features=FEATURES, **options):
    seqio.TaskRegistry.add(
        name,
        source=seqio.TextLineDataSource(FILES),
        preprocessors=[parse, seqio.preprocessors.tokenize, *preprocessors],
        output_features=features,
        **options,
    )


add("who", [seqio.preprocessors.append_eos], metric_fns=[exact_match, mean_score])
add(
    "who_alone",
    [functools.partial(seqio.preprocessors.rekey, key_map={{"targets": "targets"}}),
     seqio.preprocessors.append_eos],
    {{"targets": FEATURES["targets"]}},
)
add("who_denoised", [data.seqio_preprocessor(data.SpanDenoising())])
seqio.MixtureRegistry.add("who_mixed", [("who", 3), ("who_denoised", 1)])
"""


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes the module, its files and its vocabulary; returns the module's path.

    Modules of other tests have registered tasks of these names.
    """
    _, seqio = import_tensorflow()
    for name in ("who", "who_alone", "who_denoised"):
        seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove("who_mixed")
    (folder / "train.tsv").write_text("\n".join(LINES[:32]) + "\n", encoding="utf-8")
    (folder / "validation.tsv").write_text("\n".join(LINES[32:]) + "\n", encoding="utf-8")
    (folder / "their.model").write_bytes(train(LINES, training_options(300, 0.995)))
    path = folder / "their_tasks.py"
    path.write_text(MODULE.format(folder=folder), encoding="utf-8")
    return path
