"""Sources as seqio tasks, and several of them as a seqio mixture.

A task is named after all that it is made of: `m6jax_en_1f3a...`. So asking twice gives the same
task, and two configurations in one process never meet. Its one feature is `targets`, the tokens of
a document without its end; seqio's own tools can use tasks and mixtures by their names.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from m6jax.data.cache import digest
from m6jax.data.seqio_vocabularies import to_seqio
from m6jax.data.source import DOCUMENTS_AT_ONCE, TRAIN, VALIDATION, Source
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.data.vocab import Vocabulary


def seqio_task(source: Source, fingerprint: str, vocabulary: Vocabulary) -> Any:
    """Returns the `seqio.Task` of a source, registering it if it is new.

    Args:
      source: see `m6jax.data.sources`.
      fingerprint: of the contents of its files.
      vocabulary: turns text into `targets`.
    """
    tf, seqio = import_tensorflow()
    # With the setting too, so that a task never reads files of the same contents that are gone.
    name = f"m6jax_{source.name}_{digest(repr(source), fingerprint, vocabulary.fingerprint)}"
    if name in seqio.TaskRegistry.names():
        return seqio.TaskRegistry.get(name)

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        return source.dataset(split)

    feature = seqio.Feature(
        to_seqio(vocabulary),
        add_eos=False,
        dtype=tf.int32 if source.is_text else tf.int64,  # foreign ids may not fit 32 bits
    )
    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            dataset_fn, splits=(TRAIN, VALIDATION) if source.has_held_out else (TRAIN,)
        ),
        preprocessors=[_tokenizer(vocabulary)] if source.is_text else [],
        output_features={"targets": feature},
    )


def seqio_mixture(tasks: Sequence[Any], rates: Sequence[float]) -> Any:
    """Returns the `seqio.Mixture` of some tasks, registering it if it is new."""
    _, seqio = import_tensorflow()
    name = f"m6jax_mixture_{digest([task.name for task in tasks], list(rates))}"
    if name in seqio.MixtureRegistry.names():
        return seqio.MixtureRegistry.get(name)
    members = [(task.name, rate) for task, rate in zip(tasks, rates, strict=True)]
    return seqio.MixtureRegistry.add(name, members)


def _tokenizer(vocabulary: Vocabulary) -> Callable[[Any], Any]:
    """A seqio preprocessor: `text` to `targets` (int32 [n]) and `targets_pretokenized`.

    It takes many documents at once: one call into Python for each (which is what seqio's own
    `tokenize` would make of our vocabulary) is ten times slower on short lines.
    """
    tf, _ = import_tensorflow()

    def encode(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = [_encoded(vocabulary, text) for text in texts]
        lengths = np.array([len(i) for i in ids], np.int64)
        return np.fromiter(itertools.chain.from_iterable(ids), np.int32, lengths.sum()), lengths

    def encode_batch(batch: dict[str, Any]) -> dict[str, Any]:
        ids, lengths = tf.numpy_function(
            encode, [batch["text"]], (tf.int32, tf.int64), stateful=False
        )
        targets = tf.RaggedTensor.from_row_lengths(
            tf.ensure_shape(ids, [None]), tf.ensure_shape(lengths, [None]), validate=False
        )
        return {"targets": targets, "targets_pretokenized": batch["text"]}

    return lambda dataset: dataset.batch(DOCUMENTS_AT_ONCE).map(encode_batch).unbatch()


def _encoded(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Returns the ids of a text; none, which is no document, if it is not UTF-8."""
    try:
        return vocabulary.encode(text.decode())
    except UnicodeDecodeError:
        return []
