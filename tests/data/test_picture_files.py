"""A user's own pictures with texts: every kind of file gives the same records."""

import json
import pathlib
import re

import numpy as np
import own_pictures
import pytest
from own_pictures import NUMBER, TEXTS, png

from m6jax import configuration
from m6jax.data import (
    FolderPictures,
    JsonPictures,
    ParquetPictures,
    Pictures,
    SentencePiece,
    TarPictures,
    TextData,
    TFDSPictures,
    TFRecordPictures,
)
from m6jax.data.errors import DataError
from m6jax.data.files import read_file
from m6jax.data.picture_records import documents_of
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.foundation.validated import ConfigError

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = [
    example
    for example in re.findall(r"```gin\n(.*?)```", DOCS.read_text("utf-8"), re.S)
    if "Pictures" in example
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("my")
    own_pictures.write_files(folder)
    own_pictures.write_tfds(folder / "tensorflow_datasets")
    return folder


def texts(source, split):
    """The texts of a split, after a look at every picture."""
    found = [document for r in source.records(split) for document in documents_of(r, source.pairs)]
    numbers = [TEXTS.index(document.answer) for document in found]
    pictures = Pictures(grid=(1, 1), patch_size=2)
    for number, record in zip(numbers, source.records(split), strict=True):
        assert (pictures.patches(record.encoded()) == 20 * number).all()
    return numbers


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.split("data.")[2].split("(")[0])
def test_examples_of_the_documentation(example, folder, tmp_path):
    file = tmp_path / "sources.gin"
    lines = ["from __gin__ import dynamic_registration", "from m6jax import data", example]
    file.write_text("\n".join(lines).replace("'/my/", f"'{folder}/"), encoding="utf-8")
    rest = [i for i in range(NUMBER) if i != 9]
    for source in configuration.load([file], root=TextData).value.sources:
        assert (texts(source, TRAIN), texts(source, VALIDATION)) == (rest, [9])
        assert source.scan() == source.scan()


def test_there_are_examples_of_all_sources():
    assert len(EXAMPLES) == 7  # and one of two objectives


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (JsonPictures, "captions.jsonl"),
        (ParquetPictures, "*.parquet"),
        (TarPictures, "*.tar"),
        (FolderPictures, "pictures"),
        (FolderPictures, "pictures/deep/*"),
        (TFRecordPictures, "*.tfrecord"),
    ],
)
def test_tensorflows_file_layer(kind, pattern, folder):
    local = kind(train=f"{folder}/{pattern}", hold_out_every=0)
    remote = kind(train=f"file://{folder}/{pattern}", hold_out_every=0)
    assert texts(remote, TRAIN) == list(range(NUMBER))
    assert remote.scan() == local.scan()
    assert not local.has_held_out


def test_rows_of_a_users_pictures(folder):
    """Packed, resumed and dealt to two processes."""
    data = TextData(
        sources=(FolderPictures(train=f"{folder}/pictures"),),
        vocabulary=SentencePiece(size=280),
        pictures=Pictures(grid=(1, 2), patch_size=2, per_row=2),
        length=32,
        prefetch=0,
    )
    rows = data.train_rows()
    rows.take(4)
    state, straight = rows.state(), rows.take(4)
    halves = [data.train_rows(i, 2) for i in range(2)]
    for half in halves:
        half.restore(state)
    taken = [half.take(4) for half in halves]
    for name, values in straight.items():
        np.testing.assert_array_equal(np.concatenate([t[name] for t in taken]), values)
    assert straight["patch_mask"].sum() > 0
    assert data.eval_names() == ("pictures",)


class TestContents:
    """What a source's files hold is known by its contents, wherever they lie."""

    def test_a_changed_picture_or_text_is_another_content(self, tmp_path):
        own_pictures.write_files(tmp_path)
        sources = [
            FolderPictures(train=f"{tmp_path}/pictures"),
            JsonPictures(train=f"{tmp_path}/captions.jsonl"),
        ]
        before = [source.scan() for source in sources]
        (tmp_path / "pictures/deep/03.png").write_bytes(png(4))
        changed = [source.scan() for source in sources]
        assert [a == b for a, b in zip(before, changed, strict=True)] == [False, False]
        (tmp_path / "pictures/deep/03.txt").write_text("other")
        assert sources[0].scan() != changed[0]
        assert sources[1].scan() == changed[1]

    def test_a_moved_folder_is_the_same(self, tmp_path):
        (tmp_path / "a").mkdir()
        own_pictures.write_files(tmp_path / "a")
        before = JsonPictures(train=f"{tmp_path}/a/captions.jsonl").scan()
        (tmp_path / "a").rename(tmp_path / "b")
        assert JsonPictures(train=f"{tmp_path}/b/captions.jsonl").scan() == before

    def test_settings_that_decide_records_count(self, folder):
        first = JsonPictures(train=f"{folder}/captions.jsonl")
        other = JsonPictures(train=f"{folder}/captions.jsonl", pairs=(("", "a {text}"),))
        assert first.scan() != other.scan()
        named = JsonPictures(train=f"{folder}/captions.jsonl", name="other")
        assert first.scan() == named.scan()


class TestHeldOut:
    def write(self, path, pictures):
        lines = [{"image": f"pictures/deep/{p:02d}.png", "text": TEXTS[p]} for p in pictures]
        path.write_text("\n".join(map(json.dumps, lines)))
        return str(path)

    def test_all_that_is_said_of_a_picture_is_on_one_side(self, folder):
        train = self.write(folder / "several.jsonl", [0, 1, 0, 2, 1, 3, 1])
        source = JsonPictures(train=train, hold_out_every=2)
        assert texts(source, TRAIN) == [0, 0, 2]
        assert texts(source, VALIDATION) == [1, 1, 3, 1]

    def test_bytes_are_known_again_too(self, tmp_path):
        own_pictures.write_parquet(tmp_path / "x.parquet", [png(i // 2 * 2) for i in range(NUMBER)])
        source = ParquetPictures(train=f"{tmp_path}/x.parquet", hold_out_every=2)
        answers = [r.fields["text"] for r in source.records(VALIDATION)]
        assert answers == [TEXTS[i] for i in (2, 3, 6, 7, 10, 11)]

    def test_files_of_their_own(self, folder):
        train = self.write(folder / "one.jsonl", [0, 1])
        held_out = self.write(folder / "two.jsonl", [2])
        source = JsonPictures(train=train, validation=held_out)
        assert (texts(source, TRAIN), texts(source, VALIDATION)) == ([0, 1], [2])
        assert source.scan() != JsonPictures(train=train).scan()

    def test_what_is_trained_on_is_refused(self, folder):
        train = self.write(folder / "one.jsonl", [0, 1])
        again = self.write(folder / "again.jsonl", [0, 1])
        with pytest.raises(DataError, match=r"again.jsonl: JsonPictures.validation holds what"):
            JsonPictures(train=train, validation=again).scan()
        with pytest.raises(DataError, match=r"matches both JsonPictures.train"):
            JsonPictures(train=train, validation=train).scan()


class TestBadRecords:
    """Each is named by file and record; the corpus refuses or counts them."""

    def problems(self, source):
        found = []
        for record in source.records(TRAIN):
            try:
                documents_of(record, source.pairs)
                record.encoded()
            except DataError as error:
                found.append(f"{record.where}: {error}".replace(source.train, "FILE"))
        return found

    def test_json(self, tmp_path):
        path = tmp_path / "x.jsonl"
        lines = [
            "{",
            "[]",
            json.dumps({"text": "a"}),
            json.dumps({"image": 3, "text": "a"}),
            json.dumps({"image": "data:image/png;base64,?", "text": "a"}),
            json.dumps({"image": {"bytes": "?"}, "text": "a"}),
            json.dumps({"image": "gone.png", "text": "a"}),
            json.dumps({"image": "data:image/png;base64,aaaa"}),
        ]
        path.write_text("\n".join(lines))
        found = self.problems(JsonPictures(train=str(path), hold_out_every=0))
        expected = [
            r"FILE, line 1: not JSON: Expecting property name",
            r"FILE, line 2: JSON of kind list, wanted an object of fields",
            r"FILE, line 3: there is no field 'image' with a picture \(choices: text\)",
            r"FILE, line 4: field 'image' holds no picture: wanted a path or the bytes of a file",
            r"FILE, line 5: field 'image' is not base64",
            r"FILE, line 6: field 'image' is not base64",
            r"FILE, line 7: .*gone.png: No such file or directory",
            r"FILE, line 8: there is no field 'text'",
        ]
        assert len(found) == len(expected)
        for line, pattern in zip(found, expected, strict=True):
            assert re.match(pattern, line), line

    def test_tar(self, tmp_path):
        path = tmp_path / "x.tar"
        members = [
            ("1.png", png(1)),
            ("2.txt", b"a"),
            ("3.png", png(1)),
            ("3.txt", b"\xff"),
            ("4.png", png(1)),
            ("4.json", b"1"),
            ("5.png", png(1)),
            ("5.jpg", png(1)),
        ]
        path.write_bytes(own_pictures.tar_bytes(members))
        assert self.problems(TarPictures(train=str(path), hold_out_every=0)) == [
            "FILE, 1: there is no field 'txt'",
            "FILE, 2: 0 pictures, wanted one (there are: txt)",
            "FILE, 3: field 'txt' is not UTF-8 (invalid start byte)",
            "FILE, 4: JSON of kind int, wanted an object of fields",
            "FILE, 5: 2 pictures, wanted one (there are: png, jpg)",
        ]

    def test_folder(self, tmp_path):
        (tmp_path / "a.png").write_bytes(png(0))
        (tmp_path / "b.png").write_bytes(png(0))
        (tmp_path / "b.json").write_text("no")
        found = self.problems(FolderPictures(train=str(tmp_path), hold_out_every=0))
        assert found[0] == "FILE/a.png: there is no text beside it, such as FILE/a.txt"
        assert found[1].startswith("FILE/b.png: not JSON")

    def test_tfrecord(self, tmp_path):
        tf, _ = own_pictures.import_tensorflow()
        path = str(tmp_path / "x.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for record in (b"\xff\xff", own_pictures.example(text=b"a")):
                writer.write(record)
        found = self.problems(TFRecordPictures(train=path, hold_out_every=0))
        assert found[0].startswith("FILE, record 0: not a tf.train.Example")
        assert found[1].startswith("FILE, record 1: there is no field 'image' with a picture")

    def test_are_left_out_and_counted(self, tmp_path):
        lines = [json.dumps({"image": {"bytes": "aaaa"}, "text": "x"})]
        own_pictures.write_files(tmp_path)
        lines += (tmp_path / "captions.jsonl").read_text().splitlines()
        (tmp_path / "captions.jsonl").write_text("\n".join(lines))
        data = TextData(
            sources=(JsonPictures(train=f"{tmp_path}/captions.jsonl"),),
            vocabulary=SentencePiece(size=280),
            pictures=Pictures(grid=(1, 1), patch_size=2, on_bad="skip"),
            length=16,
            prefetch=0,
        )
        (line,) = data.train_rows().skipped
        assert line.startswith("pictures: 1 records left out, such as ")
        assert "captions.jsonl, line 1: not a JPEG, PNG, WebP or GIF picture" in line


class TestDamagedFiles:
    def error(self, source):
        with pytest.raises(DataError) as caught:
            list(source.records(TRAIN))
        return str(caught.value)

    def test_tar(self, folder, tmp_path):
        path = tmp_path / "x.tar"
        path.write_bytes((folder / "squares.tar").read_bytes()[:-40])
        assert "x.tar: cannot be read" in self.error(TarPictures(train=str(path)))

    def test_parquet(self, folder, tmp_path):
        path = tmp_path / "x.parquet"
        path.write_bytes((folder / "squares.parquet").read_bytes()[:-40])
        assert "x.parquet: cannot be read" in self.error(ParquetPictures(train=str(path)))

    def test_tfrecord(self, tmp_path):
        path = tmp_path / "x.tfrecord"
        own_pictures.write_tfrecord(path, compression=None)
        path.write_bytes(path.read_bytes()[:-9])
        message = self.error(TFRecordPictures(train=str(path)))
        assert f"x.tfrecord: record {NUMBER - 1} cannot be read" in message

    def test_a_missing_column(self, folder):
        source = ParquetPictures(train=f"{folder}/squares.parquet", picture="images")
        message = r"squares.parquet: there is no column 'images' (did you mean 'image'?)"
        assert message in self.error(source)

    def test_a_folder_without_pictures(self, tmp_path):
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(DataError, match=r"FolderPictures.train: .* has no picture \(.jpg, "):
            FolderPictures(train=str(tmp_path)).scan()

    def test_a_file_that_is_gone(self, tmp_path):
        with pytest.raises(DataError, match=r"gone: No such file or directory"):
            read_file(f"{tmp_path}/gone")


class TestTensorflowDatasets:
    def source(self, folder, **changes):
        settings = {"data_set": "my_squares", "data_dir": f"{folder}/tensorflow_datasets"}
        return TFDSPictures(**(settings | changes))

    def test_classes_and_parts_of_splits(self, folder):
        source = self.source(
            folder, train="train[:50%]", validation="train[50%:]", pairs=(("", "{label}"),)
        )
        names = [[r.fields["label"] for r in source.records(s)] for s in (TRAIN, VALIDATION)]
        assert sorted(names[0] + names[1]) == ["dark"] * 6 + ["light"] * 6
        assert len(names[0]) == 6
        assert source.scan() != self.source(folder, pairs=(("", "{label}"),)).scan()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"data_set": "no_such_squares"}, "TFDSPictures.data_set 'no_such_squares': "),
            ({"train": "no"}, "TFDSPictures.data_set 'my_squares': .*no"),
            ({"pairs": (("", "{txt}"),)}, r"there is no feature 'txt' \(did you mean 'text'"),
        ],
    )
    def test_what_is_not_there(self, folder, changes, message):
        with pytest.raises(DataError, match=message):
            list(self.source(folder, **changes).records(TRAIN))


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match=r"JsonPictures.pairs: the answer 'a' names no field"):
        JsonPictures(train="x", pairs=(("", "a"),))
    with pytest.raises(ConfigError, match=r"JsonPictures.name: 'a b' may hold only letters"):
        JsonPictures(train="x", name="a b")
