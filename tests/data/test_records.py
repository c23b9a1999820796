import lzma
import pathlib

import pytest

from m6jax.data.config import TextData, TFRecords
from m6jax.data.errors import DataError
from m6jax.data.sources import TRAIN, VALIDATION
from m6jax.data.tensorflow_import import import_tensorflow
from m6jax.data.vocab import SentencePiece, TokenIds


@pytest.fixture
def write_records(tmp_path):
    """Writes `records.tfrecord`, one `tf.train.Example` a document, and returns its name."""
    tf, _ = import_tensorflow()

    def write(documents, field="text", name="records.tfrecord", compression=None):
        path = str(tmp_path / name)
        with tf.io.TFRecordWriter(path, compression) as writer:
            for document in documents:
                feature = (
                    tf.train.Feature(bytes_list=tf.train.BytesList(value=[document]))
                    if isinstance(document, bytes)
                    else tf.train.Feature(int64_list=tf.train.Int64List(value=document))
                )
                features = tf.train.Features(feature={field: feature})
                writer.write(tf.train.Example(features=features).SerializeToString())
        return path

    return write


@pytest.mark.parametrize(("name", "compression"), [("r.tfrecord", None), ("r.gz", "GZIP")])
def test_texts_and_held_out_records(write_records, name, compression):
    documents = [f"text {i}".encode() for i in range(12)]
    source = TFRecords(train=write_records(documents, name=name, compression=compression))
    assert list(source.documents(VALIDATION)) == [b"text 9"]
    assert list(source.documents(TRAIN)) == documents[:9] + documents[10:]
    whole = TFRecords(train=source.train, hold_out_every=0)
    assert list(whole.documents(TRAIN)) == documents
    assert whole.scan().fingerprint != source.scan().fingerprint


def test_held_out_files(write_records):
    source = TFRecords(
        train=write_records([b"a"], name="train"), validation=write_records([b"b"], name="valid")
    )
    assert list(source.documents(TRAIN)) == [b"a"]
    assert list(source.documents(VALIDATION)) == [b"b"]
    assert source.has_held_out


def ids_data(path, **options):
    source = TFRecords(train=path, field="ids", kind="ids", hold_out_every=0, **options)
    return TextData(
        sources=(source,), vocabulary=TokenIds(size=50), length=4, prefetch=0, packing=False
    )


def test_ids_are_tokens(write_records):
    data = ids_data(write_records([[7, 8, 49]], field="ids"))
    batch = data.train_rows().take(1)
    assert batch["tokens"].tolist() == [[0, 7, 8, 49]]
    assert batch["targets"].tolist() == [[7, 8, 49, 1]]


@pytest.mark.parametrize("wrong", [50, -1, 7 + (1 << 32)])
def test_ids_outside_the_vocabulary(write_records, wrong):
    path = write_records([[7, 8, 9], [10, 11, wrong]], field="ids")
    with pytest.raises(
        DataError, match=rf"'records': token id {wrong} in document 1 is outside .* of 50 ids"
    ):
        ids_data(path).train_rows()


def test_ids_have_no_bytes(write_records):
    data = TextData(
        sources=(TFRecords(train=write_records([[7]] * 10, field="ids"), field="ids", kind="ids"),),
        vocabulary=TokenIds(size=50),
    )
    assert data.predicted_bytes("records") is None
    with pytest.raises(DataError, match=r"'records' holds token ids, no text$"):
        data.held_out_text("records")


def test_records_without_the_field_are_counted(write_records):
    """An empty record is left out and named; where none has the field, the run does not begin."""
    rows = ids_data(write_records([[7, 8, 9], [], [10], []], field="ids")).train_rows()
    assert len(rows.skipped) == 1
    assert rows.skipped[0].startswith("records: 2 records left out, such as ")
    assert rows.skipped[0].endswith("records.tfrecord: record 1: it is empty or lacks the field")
    path = write_records([[7, 8, 9], [1]], field="other")
    with pytest.raises(DataError, match=r"no training document; 2 were left out, the first: .* 0:"):
        ids_data(path).train_rows()


def test_no_vocabulary_from_ids(write_records):
    path = write_records([[7]], field="ids")
    source = TFRecords(train=path, kind="ids", field="ids", name="mine")
    with pytest.raises(DataError, match="'mine' holds token ids, no text to train"):
        TextData(sources=(source,), vocabulary=SentencePiece()).vocab()


@pytest.mark.parametrize(
    ("documents", "kind", "message"),
    [
        ([b"a", [1, 2]], "text", "record 1: the field 'text' holds 2 values, not the text that"),
        ([b"a", [1]], "text", "record 1: the field 'text' holds int, not the text"),
        ([[3, 4], b"a"], "ids", "record 1: the field 'text' holds bytes, not the ids"),
    ],
)
def test_wrong_kind(write_records, documents, kind, message):
    source = TFRecords(train=write_records(documents), kind=kind, hold_out_every=0)
    with pytest.raises(DataError, match=message):
        TextData(sources=(source,), vocabulary=TokenIds(size=50)).train_rows()


def test_not_a_record_file(tmp_path):
    (tmp_path / "x").write_text("this is not a file of records, that is for certain")
    with pytest.raises(DataError, match="/x: record 0 cannot be read: corrupted record"):
        list(TFRecords(train=str(tmp_path / "x")).documents(TRAIN))
    tf, _ = import_tensorflow()
    with tf.io.TFRecordWriter(str(tmp_path / "y")) as writer:
        writer.write(b"no Example")
    with pytest.raises(DataError, match=r"/y: record 0 is not a tf\.train\.Example"):
        list(TFRecords(train=str(tmp_path / "y"), hold_out_every=0).documents(TRAIN))


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_truncated_and_damaged_files(write_records, compression):
    """The record is named: the first that cannot be read."""
    path = write_records([b"x" * 50 + bytes([i]) for i in range(5)], compression=compression)
    whole = pathlib.Path(path).read_bytes()
    source = TFRecords(train=path, hold_out_every=0)
    pathlib.Path(path).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"records\.tfrecord: record \d cannot be read: "):
        list(source.documents(TRAIN))
    if compression == "GZIP":
        with pytest.raises(DataError, match=r"records\.tfrecord: record \d cannot be read: "):
            source.scan()
    if compression is None:
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 1
        pathlib.Path(path).write_bytes(damaged)
        with pytest.raises(DataError, match="record 2 cannot be read: corrupted record at"):
            list(source.documents(TRAIN))


def test_files_of_different_compression_together(write_records, tmp_path):
    """Whatever they are called; a plain file whose first bytes look like zlib's stays plain."""
    write_records([b"one"], name="a.gz", compression=None)
    write_records([b"two"], name="b", compression="GZIP")
    write_records([b"three"], name="c.tfrecord", compression="ZLIB")
    long = b"y" * (0x9C78 - 26)
    write_records([long], name="d")
    assert (tmp_path / "d").read_bytes()[:2] == b"\x78\x9c"
    source = TFRecords(train=f"{tmp_path}/*", hold_out_every=0)
    assert list(source.documents(TRAIN)) == [b"one", b"two", b"three", long]
    (tmp_path / "e").write_bytes(lzma.compress(b"something"))
    with pytest.raises(DataError, match="/e: compressed with xz; TFRecords may be with gzip"):
        list(source.documents(TRAIN))


def test_text_that_is_not_utf8_is_counted(write_records):
    source = TFRecords(train=write_records([b"5 6 7", b"8 \xff", b"4"]), hold_out_every=0)
    rows = TextData(
        sources=(source,), vocabulary=TokenIds(size=9), length=4, prefetch=0
    ).train_rows()
    assert rows.skipped[0].endswith("record 1: not UTF-8 (invalid start byte at byte 2)")
    assert {*rows.take(4)["targets"].ravel().tolist()} <= {0, 1, 4, 5, 6, 7}
