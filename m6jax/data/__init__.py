"""Text, and pictures with text: from files to packed rows, the same on any number of processes.

    documents -> vocabulary -> tokens on disk -> examples -> one seeded order -> packed rows
    sources.py   vocab.py      corpus.py         examples.py  order.py          pipeline.py

Tasks of a user's own (`seqio_sources.py`) make their tokens themselves; `task_corpus.py` keeps
them.

Pictures are decoded (`pictures.py`) and their texts chosen (`picture_records.py`) while tokens are
made; `picture_corpus.py` keeps both on disk.

`config.TextData` is the door: making one reads nothing, its methods do. tensorflow is imported only
while tokens are being made, or to read files that have a URL: a second run finds the tokens in the
cache.
"""

from m6jax.data.config import TextData
from m6jax.data.matching import Matching
from m6jax.data.picture_formats import (
    FolderPictures,
    JsonPictures,
    ParquetPictures,
    TarPictures,
    TFDSPictures,
    TFRecordPictures,
)
from m6jax.data.picture_sources import BuiltinPictures
from m6jax.data.pictures import Pictures
from m6jax.data.preprocessors import (
    Answering,
    LanguageModelling,
    PrefixLM,
    SpanDenoising,
    TaskTargets,
    TextDenoising,
)
from m6jax.data.records import TFRecords
from m6jax.data.seqio_preprocessors import seqio_preprocessor
from m6jax.data.seqio_sources import SeqioTask, TaskVocabulary
from m6jax.data.sources import Builtin, HeldOutFiles, TextFiles
from m6jax.data.tokenizer_files import TokenizerFile
from m6jax.data.vocab import SentencePiece, TokenIds

__all__ = [
    "Answering",
    "Builtin",
    "BuiltinPictures",
    "FolderPictures",
    "HeldOutFiles",
    "JsonPictures",
    "LanguageModelling",
    "Matching",
    "ParquetPictures",
    "Pictures",
    "PrefixLM",
    "SentencePiece",
    "SeqioTask",
    "SpanDenoising",
    "TFDSPictures",
    "TFRecordPictures",
    "TFRecords",
    "TarPictures",
    "TaskTargets",
    "TaskVocabulary",
    "TextData",
    "TextDenoising",
    "TextFiles",
    "TokenIds",
    "TokenizerFile",
    "seqio_preprocessor",
]
