"""The project's objectives as preprocessors for anybody's `seqio.Task`.

    seqio.TaskRegistry.add(
        "notes_denoise",
        source=seqio.TextLineDataSource({"train": "/my/notes.txt"}),
        preprocessors=[
            functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
            seqio.preprocessors.tokenize,
            data.seqio_preprocessor(data.SpanDenoising()),
        ],
        output_features=...,
    )

It takes whole documents, tokens in `targets`, and gives `inputs` and `targets`: what an objective
lets a model see in full, and what it asks for, the end included. A document that is longer than
`sequence_length` allows gives several examples.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from m6jax.data.preprocessors import Objectives
from m6jax.data.randomness import fold
from m6jax.data.seqio_vocabularies import from_seqio
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.foundation.validated import ConfigError

_NO_LIMIT = 1 << 20


def seqio_preprocessor(objective: Objectives) -> Callable[..., Any]:
    """Returns a preprocessor for `seqio.Task`: `targets` to `inputs` and `targets`.

    What is random in it is decided by seqio's seeds.

    Args:
      objective: such as `SpanDenoising()`; its sentinels are those of the feature's vocabulary.

    Raises (when a task is read):
      ConfigError: `sequence_length` is too short for the objective, or the vocabulary has not
        enough sentinels.
    """

    def preprocessor(
        dataset: Any, sequence_length: Mapping[str, int] | None, output_features: Mapping[str, Any]
    ) -> Any:
        tf, seqio = import_tensorflow()
        feature = output_features["targets"]
        vocabulary = from_seqio(feature.vocabulary, "feature 'targets'")
        length = sum((sequence_length or {"targets": _NO_LIMIT}).values())
        most = objective.units_at_most(length)
        kind = type(objective).__name__
        if most == 0:
            raise ConfigError(f"sequence_length: {length} is too short for {kind}")
        if sequence_length and objective.num_sentinels(most) > vocabulary.extra_ids:
            raise ConfigError(
                f"{kind} with sequences of {length} needs {objective.num_sentinels(most)}"
                f" sentinels, the vocabulary has extra_ids = {vocabulary.extra_ids}"
            )

        def cut(document: np.ndarray, seed: np.ndarray) -> tuple[np.ndarray, ...]:
            """Returns inputs and targets of all parts, each with the lengths of the parts."""
            units = int(objective.num_units(np.array(len(document))))
            inputs, targets = [], []
            for begin in range(0, units, most):
                end = min(begin + most, units)
                if not objective.sequence_length(np.array(end - begin)):
                    continue
                key = fold(*(int(s) & 0xFFFFFFFF for s in seed), begin)
                example = objective.example(document, begin, end, key, vocabulary)
                given = max(example.prefix - 1, 0)
                inputs.append(example.targets[:given])
                targets.append(example.targets[given:])
            return (*_flat(inputs), *_flat(targets))

        @seqio.map_over_dataset(num_seeds=1)
        def parts(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
            dtypes = (tf.int32, tf.int64, tf.int32, tf.int64)
            flat = tf.numpy_function(cut, [example["targets"], seed], dtypes, stateful=False)
            a, a_lengths, b, b_lengths = (tf.ensure_shape(array, [None]) for array in flat)
            return {
                "inputs": tf.RaggedTensor.from_row_lengths(a, a_lengths, validate=False),
                "targets": tf.RaggedTensor.from_row_lengths(b, b_lengths, validate=False),
            }

        made = parts(dataset).unbatch()
        names = [name for name in ("inputs", "targets") if name in output_features]
        dtypes = {name: output_features[name].dtype for name in names}
        return made.map(lambda e: {name: tf.cast(e[name], dtypes[name]) for name in names})

    return preprocessor


def _flat(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(part) for part in parts], np.int64)
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32), lengths
