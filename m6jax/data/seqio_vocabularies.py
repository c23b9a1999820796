"""Vocabularies as seqio knows them, and back.

`to_seqio` puts ours behind seqio's interface, `from_seqio` takes over one of seqio's: a
`SentencePieceVocabulary` with its model, a `PassThroughVocabulary` as ids without text, any other
by its own `encode` and `decode`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.data.vocab import TokenIds, Vocabulary, from_sentencepiece

_PROBES = ("The quick brown fox jumps over 13 lazy dogs.", "床前明月光", "a")


def to_seqio(vocabulary: Vocabulary) -> Any:
    """Returns a `seqio.Vocabulary` that encodes and decodes as ours does.

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
        ours = vocabulary
        fingerprint = vocabulary.fingerprint
        eos_id = vocabulary.eos_id
        pad_id = vocabulary.pad_id
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


def from_seqio(vocabulary: Any, where: str) -> Vocabulary:
    """Returns ours for a `seqio.Vocabulary`.

    Args:
      vocabulary: of a feature.
      where: the feature, for messages.

    Raises:
      DataError: it has no end of a document, its sentinels count upwards, or its model cannot be
        read.
    """
    tf, seqio = import_tensorflow()
    ours = getattr(vocabulary, "ours", None)
    if isinstance(ours, Vocabulary):
        return ours
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        try:
            return from_sentencepiece(_model(vocabulary, where), vocabulary.extra_ids, where)
        except (tf.errors.OpError, OSError) as error:
            path = vocabulary.sentencepiece_model_file
            raise DataError(f"{where}: {path} cannot be read ({error})") from error
    if vocabulary.eos_id is None:
        raise DataError(
            f"{where}: {type(vocabulary).__name__} has no id for the end of a text (give it one, as"
            " in seqio.PassThroughVocabulary(size=100, eos_id=1))"
        )
    base_size = vocabulary.vocab_size - vocabulary.extra_ids
    if isinstance(vocabulary, seqio.PassThroughVocabulary):
        return TokenIds(size=base_size, eos_id=vocabulary.eos_id).load(())
    named = (type(vocabulary).__module__, type(vocabulary).__qualname__)
    probes = [list(map(int, vocabulary.encode(text))) for text in _PROBES]
    sizes = (base_size, vocabulary.extra_ids, vocabulary.eos_id, vocabulary.pad_id)
    return Vocabulary(
        base_size=base_size,
        extra_ids=vocabulary.extra_ids,
        eos_id=vocabulary.eos_id,
        pad_id=vocabulary.pad_id,
        fingerprint=digest("seqio", named, sizes, probes),
        encode=lambda text: list(map(int, vocabulary.encode(text))),
        decode_pieces=vocabulary.decode,
    )


def _model(vocabulary: Any, where: str) -> bytes:
    """Returns the model of a `SentencePieceVocabulary` without the sentinels that seqio adds."""
    from sentencepiece import sentencepiece_model_pb2

    tf, _ = import_tensorflow()
    with tf.io.gfile.GFile(vocabulary.sentencepiece_model_file, "rb") as file:
        model = file.read()
    # seqio has no public names for these two.
    if vocabulary.extra_ids and not vocabulary._reverse_extra_ids:
        raise DataError(
            f"{where}: sentinels that count upwards (reverse_extra_ids=False) are not supported"
        )
    if not vocabulary._normalizer_spec_overrides:
        return bytes(model)
    messages: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    proto = messages.ModelProto.FromString(vocabulary.sp_model)
    if vocabulary.extra_ids:
        del proto.pieces[-vocabulary.extra_ids :]
    return bytes(proto.SerializeToString(deterministic=True))
