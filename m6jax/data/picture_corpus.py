"""A corpus of pictures with texts, on disk: decoded once, at the size that the model takes.

Beside the tokens lie, for each document, the number of its picture (several documents may be of
one), the length of its prompt and its kind, and the patches of all pictures as bytes. So a training
row is made without decoding anything, and what cannot be decoded is known before training begins.
"""

from pathlib import Path
from typing import Any

import numpy as np

from m6jax.data.errors import DataError
from m6jax.data.picture_records import documents_of
from m6jax.data.pictures import Pictures
from m6jax.data.source import PictureSource, no_documents
from m6jax.data.vocab import Vocabulary

_NAMED = 5  # of the records that were left out, how many are named


def write(
    source: PictureSource,
    split: str,
    vocabulary: Vocabulary,
    pictures: Pictures,
    dtype: type,
    directory: Path,
) -> dict[str, Any]:
    """Writes the arrays of a corpus; returns how many records were left out, and why.

    Raises:
      DataError: there is no document, or a record cannot be used and `Pictures.on_bad` is 'error'.
    """
    offsets, prompts, numbers, kinds, bad = [0], [], [], [], []
    num_pictures = 0
    with (
        open(directory / "tokens.bin", "wb") as tokens,
        open(directory / "patches.bin", "wb") as out,
    ):
        for record in source.records(split):
            try:
                documents = documents_of(record, source.pairs)
                patches = pictures.patches(record.encoded())
            except DataError as error:
                message = f"{record.where}: {error}"
                if pictures.on_bad == "error":
                    raise DataError(
                        f"{message} (Pictures.on_bad = 'skip' leaves it out)"
                    ) from error
                bad.append(message)
                continue
            out.write(patches.tobytes())
            for document in documents:
                prompt = vocabulary.encode(document.prompt)
                ids = prompt + vocabulary.encode(document.answer)
                tokens.write(np.array(ids, dtype).tobytes())
                offsets.append(offsets[-1] + len(ids))
                prompts.append(len(prompt))
                numbers.append(num_pictures)
                kinds.append(document.kind)
            num_pictures += 1
    if not num_pictures:
        first = f"; {len(bad)} were left out, the first: {bad[0]}" if bad else ""
        raise DataError(no_documents(source, split) + first)
    arrays = {"offsets": offsets, "prompts": prompts, "numbers": numbers, "kinds": kinds}
    for name, values in arrays.items():
        np.array(values, np.int64).tofile(directory / f"{name}.bin")
    return {"num_skipped": len(bad), "skipped": bad[:_NAMED]}
