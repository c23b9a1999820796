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


def test_documents_without_ids(write_records):
    path = write_records([[7, 8, 9], [1]], field="other")
    with pytest.raises(DataError, match="'records': document 0 is empty or lacks the field"):
        ids_data(path).train_rows()


def test_no_vocabulary_from_ids(write_records):
    path = write_records([[7]], field="ids")
    source = TFRecords(train=path, kind="ids", field="ids", name="mine")
    with pytest.raises(DataError, match="'mine' holds token ids, no text to train"):
        TextData(sources=(source,), vocabulary=SentencePiece()).vocab()


@pytest.mark.parametrize(
    ("documents", "field", "message"),
    [
        ([b"a"], "body", "'records' cannot be read: .*text.*required"),
        ([[1, 2]], "text", "'records' cannot be read: .*text"),
    ],
)
def test_wrong_field(write_records, documents, field, message):
    source = TFRecords(train=write_records(documents, field=field))
    with pytest.raises(DataError, match=message):
        list(source.documents(TRAIN))


def test_not_a_record_file(tmp_path):
    (tmp_path / "x").write_text("this is not a file of records, that is for certain")
    with pytest.raises(DataError, match="'records' cannot be read: corrupted record"):
        list(TFRecords(train=str(tmp_path / "x")).documents(TRAIN))


def test_text_that_is_not_utf8(write_records):
    source = TFRecords(train=write_records([b"5 6 7", b"8 \xff"]), hold_out_every=0)
    with pytest.raises(DataError, match="'records': a document is not UTF-8"):
        TextData(sources=(source,)).vocab()
    with pytest.raises(DataError, match=r"'records' cannot be read: .*utf-8"):
        TextData(sources=(source,), vocabulary=TokenIds(size=9)).train_rows()
