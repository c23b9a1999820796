"""Twelve squares with their colours, as files of every kind that a source reads."""

import gzip
import io
import json
import tarfile

import numpy as np
from PIL import Image

from m6jax.data.tensorflow_import import import_tensorflow

NUMBER = 12
TEXTS = [f"square {i}" for i in range(NUMBER)]


def png(number):
    """A square of one grey."""
    file = io.BytesIO()
    Image.new("RGB", (6, 6), (20 * number,) * 3).save(file, "PNG")
    return file.getvalue()


def write_files(folder):
    """Writes `captions.jsonl`, `squares.parquet`, ..., all of the same pictures and texts."""
    (folder / "pictures" / "deep").mkdir(parents=True)
    for i in range(NUMBER):
        stem = folder / "pictures" / f"deep/{i:02d}"
        stem.with_suffix(".png").write_bytes(png(i))
        stem.with_suffix(".txt").write_text(TEXTS[i] + "\n", encoding="utf-8-sig")
    write_json(folder / "captions.jsonl")
    write_parquet(folder / "squares.parquet")
    write_tar(folder / "squares.tar")
    write_tfrecord(folder / "squares.tfrecord")


def write_json(path):
    records = [{"image": f"pictures/deep/{i:02d}.png", "text": TEXTS[i]} for i in range(NUMBER)]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")


def write_parquet(path, pictures=None):
    import pyarrow
    from pyarrow import parquet

    if pictures is None:
        pictures = [{"bytes": png(i), "path": None} for i in range(NUMBER)]
    table = pyarrow.table({"image": pictures, "text": TEXTS, "other": [0] * NUMBER})
    parquet.write_table(table, path, row_group_size=5)


def tar_bytes(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_tar(path):
    members = []
    for i in range(NUMBER):
        members += [(f"a/{i:02d}.PNG", png(i)), (f"a/{i:02d}.txt", TEXTS[i].encode())]
    path.write_bytes(gzip.compress(tar_bytes([("a/._0.txt", b"hidden"), *members])))


def example(**features):
    tf, _ = import_tensorflow()
    made = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        for name, value in features.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


def write_tfrecord(path, compression="GZIP"):
    tf, _ = import_tensorflow()
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for i in range(NUMBER):
            writer.write(example(image=png(i), text=TEXTS[i].encode()))


def write_tfds(data_dir):
    import_tensorflow()
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(6, 6, 3)),
            "text": tfds.features.Text(),
            "label": tfds.features.ClassLabel(names=["dark", "light"]),
        }
    )

    class MySquares(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(NUMBER):
                pixels = np.full((6, 6, 3), 20 * i, np.uint8)
                yield i, {"image": pixels, "text": TEXTS[i], "label": int(i > 5)}

    MySquares(data_dir=str(data_dir)).download_and_prepare()
