"""How fast training rows come: the built-in mixture, packed, length 128, batch 32.

    python benchmarks/input_pipeline.py

prints one line of JSON. `tokens_per_second` counts all places of the rows, made one batch after
another without a background thread; `fraction_filled` is the part of them that is not padding;
`open_seconds` is what comes before the first row when vocabulary and tokens are in the cache.
"""

import json
import time

from m6jax.data.config import TextData

BATCH, LENGTH, SECONDS = 32, 128, 3.0


def main() -> None:
    """Measures for about three seconds and prints the result."""
    data = TextData(length=LENGTH, prefetch=0)
    data.train_rows()  # fills the cache
    begin = time.perf_counter()
    rows = data.train_rows()
    open_seconds = time.perf_counter() - begin
    for _ in range(20):
        rows.take(BATCH)
    batches = filled = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < SECONDS:
        filled += int((rows.take(BATCH)["segment_ids"] > 0).sum())
        batches += 1
    places = batches * BATCH * LENGTH
    result = {
        "tokens_per_second": round(places / elapsed),
        "fraction_filled": round(filled / places, 4),
        "open_seconds": round(open_seconds, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
