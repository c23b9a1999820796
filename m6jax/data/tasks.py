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
        _seqio_vocabulary(vocabulary),
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
        ids = [vocabulary.encode(text.decode()) for text in texts]
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


def _seqio_vocabulary(vocabulary: Vocabulary) -> Any:
    """Our vocabulary behind seqio's interface.

    Not `seqio.SentencePieceVocabulary`: its tensorflow operation logs to the screen from C++, and
    its sentinels can be written in text by anyone who knows their names.
    """
    tf, seqio = import_tensorflow()

    def encode(text: bytes | np.ndarray) -> np.ndarray:  # the latter outside of a graph
        return np.array(vocabulary.encode(np.asarray(text, object).item().decode()), np.int32)

    def decode(ids: np.ndarray) -> bytes:
        return vocabulary.decode(ids.tolist()).encode()

    base: Any = seqio.Vocabulary

    class SeqioVocabulary(base):
        fingerprint = vocabulary.fingerprint
        eos_id = vocabulary.eos_id
        unk_id = None
        bos_id = None
        _base_vocab_size = vocabulary.base_size

        def _encode(self, s: str) -> list[int]:
            return vocabulary.encode(s)

        def _decode(self, ids: Sequence[int]) -> str:
            return vocabulary.decode(ids)

        def _encode_tf(self, s: Any) -> Any:
            ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
            return tf.ensure_shape(ids, [None])

        def _decode_tf(self, ids: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(decode, [ids], tf.string, stateful=False), [])

        def __eq__(self, other: object) -> bool:
            return getattr(other, "fingerprint", None) == self.fingerprint

        def __hash__(self) -> int:
            return hash(self.fingerprint)

    return SeqioVocabulary(extra_ids=vocabulary.extra_ids)
