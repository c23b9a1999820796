"""Kinds of files that hold pictures with texts.

One line of configuration adds a source:

    JsonPictures.train = '/my/*.jsonl'          {"image": "cats/1.jpg", "text": "a cat"}
    ParquetPictures.train = '/my/*.parquet'     the same as columns, or with the picture's bytes
    TarPictures.train = '/my/*.tar'             1.jpg, 1.txt, 2.jpg, 2.txt, ... (WebDataset)
    FolderPictures.train = '/my/pictures'       the same, not packed
    TFRecordPictures.train = '/my/*.tfrecord'   tf.train.Examples with `image` and `text`
    TFDSPictures.data_set = 'my_data_set'        what tensorflow_datasets has under this name
"""

import itertools
import os
import tarfile
from collections.abc import Iterator
from typing import Any

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.files import exists, expand, open_file, read_file, scan, scan_together, walk
from m6jax.data.picture_files import Names, PictureFiles, json_object, record_of, sample_fields
from m6jax.data.picture_records import Pairs, Record, fields_in
from m6jax.data.tensorflow_import import import_tensorflow, reading
from m6jax.data.tfrecord_files import example_fields, read_records
from m6jax.foundation.validated import PathName, adjustable, nearest, validated

_PICTURES = ("jpg", "jpeg", "png", "webp", "gif")
_ROWS_AT_ONCE = 64


@validated
class JsonPictures(PictureFiles):
    """JSON lines: an object a line, with the path of a picture (or its bytes) and texts.

    Attributes:
      picture: the field that holds the picture: a path, against the folder of the file; a `data:`
        URL; or an object whose `bytes` is base64.
    """

    picture: str = "image"

    def read(self, name: str) -> Iterator[Record]:
        """Yields a record for every line that is not blank."""
        folder = os.path.dirname(name)
        with open_file(name) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{name}, line {number}"
                try:
                    fields = json_object(line)
                except DataError as error:
                    yield Record(where, b"", {}, str(error))
                else:
                    yield record_of(where, fields, self.picture, folder)

    def beside(self, name: str) -> Iterator[str]:
        """Yields the names of the pictures."""
        return (r.picture for r in self.read(name) if isinstance(r.picture, str))


@validated
class ParquetPictures(PictureFiles):
    """Parquet files: columns of pictures and texts; only those that are asked for are read.

    Attributes:
      picture: the column that holds the picture: the bytes of its file, a path against the folder
        of the file, or a struct of `bytes` and `path`, as Hugging Face's data sets have it.
    """

    picture: str = "image"

    def read(self, name: str) -> Iterator[Record]:
        """Yields a record for every row."""
        import pyarrow
        from pyarrow import parquet

        columns = [*dict.fromkeys((self.picture, *fields_in(self.pairs)))]
        file = pyarrow.BufferReader(read_file(name)) if "://" in name else name
        try:
            with parquet.ParquetFile(file, memory_map=True) as table:
                there = table.schema_arrow.names
                for column in columns:
                    if column not in there:
                        known = nearest(column, there)
                        raise DataError(f"{name}: there is no column {column!r}{known}")
                batches = table.iter_batches(_ROWS_AT_ONCE, columns=columns)
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows):
                    where = f"{name}, row {number}"
                    yield record_of(where, row, self.picture, os.path.dirname(name))
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{name}: cannot be read: {error}") from error

    def beside(self, name: str) -> Iterator[str]:
        """Yields the names of the pictures that are not in the file itself."""
        return (r.picture for r in self.read(name) if isinstance(r.picture, str))


@validated
class TarPictures(PictureFiles):
    """Tar files as WebDataset has them: files that follow each other and share a name are a record.

    `7.jpg`, `7.txt` is a picture and its field `txt`; of `7.zh.txt` the field is `zh_txt`; what is
    in `7.json` are fields themselves.
    """

    pairs: Pairs = (("", "{txt}"),)

    def read(self, name: str) -> Iterator[Record]:
        """Yields a record for every name; compressed tar files too."""
        try:
            with open_file(name) as file, tarfile.open(fileobj=file, mode="r|") as tar:
                # Read at once: a stream cannot go back.
                files = ((m.name, _content(tar, m)) for m in tar if _is_visible_file(m))
                for key, group in itertools.groupby(files, lambda item: _split(item[0])[0]):
                    members = [(_split(member)[1], content) for member, content in group]
                    yield _sample(f"{name}, {key}", members)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise DataError(f"{name}: cannot be read: {error}") from error


def _is_visible_file(member: tarfile.TarInfo) -> bool:
    return member.isfile() and not os.path.basename(member.name).startswith(".")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # it is a file
    return file.read()


def _split(name: str) -> tuple[str, str]:
    """Returns a name up to the first dot after its folder, and what follows in small letters."""
    folder, _, last = name.rpartition("/")
    begin, _, extension = last.partition(".")
    return os.path.join(folder, begin), extension.lower()


def _sample(where: str, members: list[tuple[str, bytes]]) -> Record:
    pictures = [content for extension, content in members if extension in _PICTURES]
    texts = [member for member in members if member[0] not in _PICTURES]
    try:
        if len(pictures) != 1:
            there = ", ".join(extension for extension, _ in members)
            raise DataError(f"{len(pictures)} pictures, wanted one (there are: {there})")
        return Record(where, pictures[0], sample_fields(texts))
    except DataError as error:
        return Record(where, b"", {}, str(error))


@validated
class FolderPictures(PictureFiles):
    """A folder of pictures, at any depth, each with its texts beside it.

    Beside `7.png`, `7.txt` is the field `txt`, `7.zh.txt` the field `zh_txt`, and what is in
    `7.json` are fields themselves. `train` and `validation` are folders, or patterns of pictures.
    """

    pairs: Pairs = (("", "{txt}"),)

    def expand(self, pattern: str, where: str) -> Names:
        """Returns the names of the pictures."""
        names = walk(pattern) or expand(pattern, where)
        pictures = tuple(name for name in names if _extension(name) in _PICTURES)
        if not pictures:
            raise DataError(f"{where}: {pattern!r} has no picture (.{', .'.join(_PICTURES)})")
        return pictures

    def read(self, name: str) -> Iterator[Record]:
        """Yields the record of one picture."""
        begin = len(os.path.splitext(name)[0]) + 1
        try:
            members = [(text[begin:], read_file(text)) for text in self.beside(name)]
            if not members:
                raise DataError(f"there is no text beside it, such as {self._texts(name)[0]}")
            yield Record(name, name, sample_fields(members))
        except DataError as error:
            yield Record(name, name, {}, str(error))

    def beside(self, name: str) -> Iterator[str]:
        """Yields the names of the files that a picture's texts are in."""
        return (text for text in self._texts(name) if exists(text))

    def content(self, names: Names) -> str:
        """Returns what stands for the pictures and their texts."""
        together = [n for name in names for n in (name, *self._texts(name))]
        return scan_together(together).fingerprint

    def _texts(self, name: str) -> list[str]:
        """Returns the names that a picture's texts may have."""
        begin = os.path.splitext(name)[0]
        extensions = [field.replace("_", ".") for field in fields_in(self.pairs)]
        return [f"{begin}.{extension}" for extension in (*extensions, "json")]


@validated
class TFRecordPictures(PictureFiles):
    """TFRecord files of `tf.train.Example`s: the bytes of a picture's file, and texts.

    Attributes:
      picture: the feature that holds the picture.
    """

    picture: str = "image"

    def read(self, name: str) -> Iterator[Record]:
        """Yields a record for every record of the file."""
        for number, record in enumerate(read_records(name)):
            where = f"{name}, record {number}"
            try:
                fields = example_fields(record)
            except DataError as error:
                yield Record(where, b"", {}, str(error))
            else:
                yield record_of(where, fields, self.picture)


@validated
class TFDSPictures(PictureFiles):
    """A data set of tensorflow_datasets, which downloads it where it is not there yet.

    Attributes:
      data_set: its name, with configuration and version where there are several.
      data_dir: where prepared data sets lie; None: where tensorflow_datasets puts them.
      picture: the feature that holds the picture. Classes are fields by their names.
      train: the split to train on, such as 'train' or 'train[:90%]'.
      validation: the held-out split; without it every `hold_out_every`-th picture of the training
        split is held out.
    """

    data_set: str
    data_dir: PathName | None = adjustable(default=None)
    picture: str = "image"
    train: str = "train"
    validation: str | None = None

    def expand(self, pattern: str, where: str) -> Names:
        """Returns the split as it is."""
        return (pattern,)

    def read(self, name: str) -> Iterator[Record]:
        """Yields the records of a split."""
        import tensorflow_datasets as tfds

        builder = self._builder()
        features, asked = builder.info.features, fields_in(self.pairs)
        for field in (self.picture, *asked):
            if field not in features:
                raise DataError(
                    f"TFDSPictures.data_set {self.data_set!r}: there is no feature {field!r}"
                    f"{nearest(field, features)}"
                )
        with reading(f"TFDSPictures.data_set {self.data_set!r}, split {name!r}"):
            examples = builder.as_dataset(
                split=name,
                shuffle_files=False,
                decoders={self.picture: tfds.decode.SkipDecoding()},
            )
            for number, example in enumerate(examples.as_numpy_iterator()):
                fields = {f: _readable(features[f], example[f]) for f in asked}
                fields[self.picture] = example[self.picture]
                yield record_of(f"{self.data_set} {name}, record {number}", fields, self.picture)

    def content(self, names: Names) -> str:
        """Returns what stands for the content of the splits."""
        splits = self._builder().info.splits
        files = {i.filename for name in names for i in splits[name].file_instructions}
        return digest(names, scan(sorted(files), text=False).fingerprint)

    def _builder(self) -> Any:
        import_tensorflow()
        import tensorflow_datasets as tfds

        try:
            builder = tfds.builder(self.data_set, data_dir=self.data_dir)
            builder.download_and_prepare()
            for split in (self.train, self.validation or self.train):
                builder.info.splits[split]
        except Exception as error:  # of many kinds: no such name, no network, no such split
            first_line = str(error).strip().partition("\n")[0]
            raise DataError(f"TFDSPictures.data_set {self.data_set!r}: {first_line}") from error
        return builder


def _readable(feature: Any, value: Any) -> Any:
    """Returns the value of a feature as a field: a class by its name."""
    if hasattr(feature, "int2str"):
        return feature.int2str(int(value)) if value.ndim == 0 else list(map(feature.int2str, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _extension(name: str) -> str:
    return os.path.splitext(name)[1][1:].lower()


AnyPictureFiles = (  # as settings name them
    JsonPictures | ParquetPictures | TarPictures | FolderPictures | TFRecordPictures | TFDSPictures
)
