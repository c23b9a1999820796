"""How fast training rows come: the built-in mixture, packed, length 128, batch 32.

    python benchmarks/input_pipeline.py

prints lines of JSON. `tokens_per_second` counts all places of the rows, made one batch after
another without a background thread; `fraction_filled` is the part of them that is not padding;
`open_seconds` is what comes before the first row when vocabulary and tokens are in the cache.

    greedy, best_fit   our rows, with either packing
    seqio              the same documents, tokenized already and in memory, shuffled, packed and
                       batched by seqio (LMFeatureConverter)
    pictures           emoji a second on one core: decoded and cut into patches, and in rows
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from m6jax.data.config import BuiltinPictures, Pictures, SentencePiece, TextData
from m6jax.data.source import TRAIN
from m6jax.data.tensorflow_import import import_tensorflow

BATCH, LENGTH, SECONDS = 32, 128, 3.0


def measure(take: Callable[[], np.ndarray]) -> dict[str, float]:
    """Takes batches of segment ids for about three seconds."""
    for _ in range(20):
        take()
    batches = filled = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < SECONDS:
        filled += int((take() > 0).sum())
        batches += 1
    places = batches * BATCH * LENGTH
    return {
        "tokens_per_second": round(places / elapsed),
        "fraction_filled": round(filled / places, 4),
    }


def ours(look_ahead: int) -> dict[str, float]:
    """Measures our rows."""
    data = TextData(length=LENGTH, prefetch=0, look_ahead=look_ahead)
    data.train_rows()  # fills the cache
    begin = time.perf_counter()
    rows = data.train_rows()
    opened = {"open_seconds": round(time.perf_counter() - begin, 3)}
    return measure(lambda: rows.take(BATCH)["segment_ids"]) | opened


def by_seqio() -> dict[str, float]:
    """Measures seqio on the tokens of our corpora, cut as ours are."""
    tf, seqio = import_tensorflow()
    corpora = [e.corpus for e in TextData(length=LENGTH, prefetch=0).train_rows().examples]
    cuts = [
        corpus.document(i)[begin : begin + LENGTH].astype(np.int32)
        for corpus in corpora
        for i in range(len(corpus.lengths()))
        for begin in range(0, corpus.lengths(np.array([i]))[0], LENGTH)
    ]
    ragged = tf.ragged.constant(cuts, dtype=tf.int32)

    def dataset(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        return tf.data.Dataset.from_tensor_slices({"targets": ragged})

    vocabulary = seqio.PassThroughVocabulary(8000, eos_id=1)
    task = seqio.TaskRegistry.add(
        "m6jax_input_pipeline",
        source=seqio.FunctionDataSource(dataset, splits=(TRAIN,)),
        output_features={"targets": seqio.Feature(vocabulary, add_eos=False)},
    )
    rows = seqio.get_dataset(
        task.name,
        {"targets": LENGTH},
        seqio.LMFeatureConverter(pack=True),
        shuffle=True,
        num_epochs=None,
        seed=0,
    )
    batches: Iterator[Any] = rows.batch(BATCH, drop_remainder=True).prefetch(2).as_numpy_iterator()
    return measure(lambda: next(batches)["decoder_segment_ids"])


def pictures() -> dict[str, float]:
    """Measures pictures: decoding on this core, and rows of what is decoded."""
    source, setting = BuiltinPictures(name="emoji"), Pictures()
    records = list(source.records(TRAIN))
    begin = time.perf_counter()
    for record in records:
        setting.patches(record.encoded())
    decoded = len(records) / (time.perf_counter() - begin)
    vocabulary = SentencePiece(size=1500)
    data = TextData(sources=(source,), vocabulary=vocabulary, length=LENGTH, prefetch=0)
    rows = data.train_rows()
    seen, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < SECONDS:
        batch = rows.take(BATCH)
        seen += int(batch["patch_mask"].sum()) // setting.num_patches
    return {"decoded_per_second": round(decoded), "in_rows_per_second": round(seen / elapsed)}


def main() -> None:
    """Measures each for about three seconds and prints the results."""
    for name, run in {
        "greedy": lambda: ours(0),
        "best_fit": lambda: ours(256),
        "seqio": by_seqio,
        "pictures": pictures,
    }.items():
        print(json.dumps({"pipeline": name} | run()), flush=True)


if __name__ == "__main__":
    main()
