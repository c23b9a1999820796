"""The data of a run as one setting.

    data = TextData(sources=(Builtin(name='en'), TextFiles(train='/my/*.txt')), length=512)
    batch = data.train_rows().take(32)["tokens"]     # int32 [32, 512]

Making a `TextData` reads nothing and imports no tensorflow; its methods do what they must.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m6jax.data.cache import digest
from m6jax.data.corpus import Corpus, open_corpus
from m6jax.data.errors import DataError
from m6jax.data.examples import Examples
from m6jax.data.feature_converters import RowShape
from m6jax.data.files import Scan
from m6jax.data.matching import PictureObjectives
from m6jax.data.order import Order
from m6jax.data.picture_formats import AnyPictureFiles
from m6jax.data.picture_sources import BuiltinPictures
from m6jax.data.pictures import Pictures
from m6jax.data.pipeline import TrainRows, evaluation_batches
from m6jax.data.preprocessors import (
    Answering,
    LanguageModelling,
    Objectives,
    PrefixLM,
    SpanDenoising,
    TaskTargets,
)
from m6jax.data.records import TFRecords
from m6jax.data.seqio_sources import SeqioTask, TaskVocabulary
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.data.sources import Builtin, HeldOutFiles, TextFiles
from m6jax.data.task_corpus import joined, open_tasks
from m6jax.data.tasks import seqio_mixture, seqio_task
from m6jax.data.tokenizer_files import TokenizerFile
from m6jax.data.vocab import SentencePiece, TokenIds, Vocabulary
from m6jax.foundation.validated import ConfigError, adjustable, nearest, validated

ALL_SETS = "all"  # held-out sets together, in metrics

__all__ = [
    "Answering",
    "Builtin",
    "BuiltinPictures",
    "DataError",
    "HeldOutFiles",
    "LanguageModelling",
    "Pictures",
    "PrefixLM",
    "SentencePiece",
    "SeqioTask",
    "SpanDenoising",
    "TFRecords",
    "TaskTargets",
    "TaskVocabulary",
    "TextData",
    "TextFiles",
    "TokenIds",
    "TokenizerFile",
    "Vocabulary",
]

TrainingSource = Builtin | TextFiles | TFRecords | BuiltinPictures | AnyPictureFiles | SeqioTask
AnySource = TrainingSource | HeldOutFiles

Parts = Sequence[tuple[Examples, float]]  # of a source, each with its rate


@validated
class TextData:
    """What to train and evaluate on, and in which form.

    Attributes:
      sources: where text comes from; their names must differ.
      rates: how often to draw an example from each source, in proportion; without them every
        example of every source is as likely.
      vocabulary: turns text into tokens.
      held_out: further sets to evaluate on; neither the vocabulary nor training sees them, and they
        may change whenever a run is evaluated.
      objective: what is to be predicted of sources of text that have no objective of their own.
      pictures: how pictures become patches, for sources that have some.
      length: T, tokens of a row.
      packing: whether a row holds as many examples as fit, or one.
      look_ahead: with packing, how many examples a row is chosen from; 0: each goes into the first
        row that has room; 256 leaves few positions empty, and examples near each other in the order
        meet in one row.
      seed: decides the order of training examples and all that is random in them.
      virtual_shards: streams that the order is cut into and packed in; part of what a run is, as
        the seed is, and unrelated to the number of processes.
      prefetch: batches to make ahead in the background.
    """

    sources: tuple[TrainingSource, ...] = (
        Builtin(name="en"),
        Builtin(name="zh"),
    )
    rates: tuple[float, ...] | None = None
    vocabulary: SentencePiece | TokenizerFile | TokenIds | TaskVocabulary = SentencePiece()
    held_out: tuple[HeldOutFiles, ...] = adjustable(default=())
    objective: Objectives = LanguageModelling()
    pictures: Pictures = Pictures()
    length: int = 128
    packing: bool = True
    look_ahead: int = 0
    seed: int = 0
    virtual_shards: int = 8
    prefetch: int = adjustable(default=2)

    def check(self) -> None:
        """Checks what the fields say together."""
        if not self.sources:
            raise ConfigError("TextData.sources: there must be at least one")
        names = [source.name for source in (*self.sources, *self.held_out)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"TextData.sources and held_out: {names.count(twice[0])} are named {twice[0]!r};"
                " give each its own `name`"
            )
        if ALL_SETS in names and len(names) > 1:
            raise ConfigError(
                f"TextData.sources and held_out: {ALL_SETS!r} is what all of them together are"
                " called in metrics (give another `name`)"
            )
        if self.rates is not None:
            self._check_rates(self.rates)
        if min(self.length, self.virtual_shards) < 1 or self.prefetch < 0:
            raise ConfigError(
                "TextData: length and virtual_shards must be positive and prefetch not negative, "
                f"got {self.length}, {self.virtual_shards}, {self.prefetch}"
            )
        if self.look_ahead < 0 or (self.look_ahead and not self.packing):
            raise ConfigError(
                f"TextData.look_ahead: {self.look_ahead} must not be negative, and needs packing"
            )
        self._check_objective()

    def vocab(self) -> Vocabulary:
        """Returns the vocabulary, training it if it is not in the cache."""
        return self.vocabulary.load(self.sources)

    def train_rows(self, process_index: int = 0, process_count: int = 1) -> TrainRows:
        """Returns the stream of training rows from its beginning.

        Raises:
          DataError: files are missing, empty or not UTF-8, there is no document, a token is outside
            the vocabulary, or all is shorter than one row.
        """
        scans = self._scans()
        vocabulary = self.vocabulary.load(self.sources, scans)
        by_source = [
            [
                (self._examples(source, corpus, vocabulary), rate)
                for corpus, rate in self._corpora(source, scan, TRAIN, vocabulary)
            ]
            for source, scan in zip(self.sources, scans, strict=True)
        ]
        examples = [e for parts in by_source for e, _ in parts]
        num_tokens = sum(e.num_units for e in examples)
        if num_tokens < self.length:
            raise DataError(
                f"the training text of {', '.join(s.name for s in self.sources)} has {num_tokens} "
                f"tokens, less than one row of TextData.length = {self.length}"
            )
        rates = _rates(self.rates, by_source)
        order = Order(
            examples,
            rates,
            room=self._shape(vocabulary).room,
            packing=self.packing,
            look_ahead=self.look_ahead,
            seed=self.seed,
            shards=self.virtual_shards,
        )
        return TrainRows(
            order,
            examples,
            shape=self._shape(vocabulary),
            fingerprint=self._fingerprint(scans, vocabulary, by_source),
            process_index=process_index,
            process_count=process_count,
            prefetch=self.prefetch,
        )

    @property
    def has_pictures(self) -> bool:
        """Whether a source has pictures, so that batches have patches."""
        return any(source.has_pictures for source in self.sources)

    @property
    def patches_per_row(self) -> int:
        """I, slots for patches in a row; 0 without pictures."""
        return self.pictures.per_row * self.pictures.num_patches if self.has_pictures else 0

    def eval_names(self) -> tuple[str, ...]:
        """Returns the names of the sources that have held-out documents, and of the other sets."""
        sets = (*self.sources, *self.held_out)
        return tuple(source.name for source in sets if source.has_held_out)

    def eval_batches(
        self, name: str, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> Iterator[dict[str, np.ndarray]]:
        """Returns the batches of all held-out documents of a source, each once and in order.

        Args:
          name: of the source.
          batch_size: rows of a batch over all processes; rounded up to a multiple of their number.
          process_index: of this process.
          process_count: over how many processes a batch is dealt.

        Returns:
          Dicts of features, each with batch_size / process_count rows; padding rows fill the last.

        Raises:
          DataError: there is no held-out document.
          ConfigError: no such source or process, or a batch of no rows.
        """
        corpus, vocabulary = self._held_out(name)
        return evaluation_batches(
            self._examples(self._source(name), corpus, vocabulary),
            batch_size,
            shape=self._shape(vocabulary),
            packing=self.packing,
            process_index=process_index,
            process_count=process_count,
        )

    def predicted_bytes(self, name: str) -> int | None:
        """Returns the UTF-8 bytes of the held-out text of a source if all of them are predicted.

        Separators are included: the end of a document, which a model is scored on, stands for the
        separator after it. So bits per byte are (sum of the losses in nats) / ln 2 / bytes.

        Returns:
          The number of bytes; None if the source holds token ids, or if the objective predicts
          only a part of the text, so that nothing can be said of bits per byte.
        """
        if not self._objective(self._source(name)).predicts_all:
            return None
        return self.held_out_corpus(name).num_bytes

    def held_out_corpus(self, name: str) -> Corpus:
        """Returns the held-out documents of a source, as tokens."""
        return self._held_out(name)[0]

    def held_out_fingerprint(self, name: str) -> str:
        """Returns what stands for the held-out documents of a source, as tokens."""
        return self.held_out_corpus(name).fingerprint()

    def held_out_text(self, name: str) -> bytes:
        """Returns the held-out text of a source, to see what another compressor makes of it."""
        source = self._source(name)
        if not source.is_text:
            raise DataError(f"source {name!r} holds token ids, no text")
        unusable = set(self.held_out_corpus(name).left_out_numbers)
        texts = enumerate(source.documents(VALIDATION))
        return b"".join(text + source.separator for i, text in texts if i not in unusable)

    def guesses(self) -> list[str]:
        """Returns a line for each source whose documents are guessed, and how to change it."""
        return [
            f"{source.name}: every {source.documents_are} is a document, as it seems"
            f" (to change it: --gin.{type(source).__name__}.document=\"'line'\", 'paragraph' or"
            " 'file')"
            for source in (*self.sources, *self.held_out)
            if isinstance(source, TextFiles | HeldOutFiles) and source.document is None
        ]

    def mixture(self) -> Any:
        """Returns the sources as a registered `seqio.Mixture`, for seqio's own tools.

        Its tasks give whole documents of tokens (`targets`), without the end.
        """
        scans = self._scans()
        vocabulary = self.vocabulary.load(self.sources, scans)
        tasks = [
            source.provider()
            if isinstance(source, SeqioTask)
            else seqio_task(source, scan.fingerprint, vocabulary)
            for source, scan in zip(self.sources, scans, strict=True)
        ]
        return seqio_mixture(tasks, self.rates or (1.0,) * len(tasks))

    def _check_rates(self, rates: tuple[float, ...]) -> None:
        if len(rates) != len(self.sources):
            names = ", ".join(source.name for source in self.sources)
            raise ConfigError(
                f"TextData.rates: {len(rates)} rates for {len(self.sources)} sources ({names})"
            )
        if not all(rate > 0 and math.isfinite(rate) for rate in rates):
            raise ConfigError(f"TextData.rates: {rates} must be positive")

    def _check_objective(self) -> None:
        for source in (*self.sources, *self.held_out):
            objective = self._objective(source)
            kind = type(objective).__name__
            patches = self.pictures.num_patches if source.has_pictures else 0
            most = objective.units_at_most(self.length - patches) if self.length > patches else 0
            if most == 0:
                beside = f" beside {patches} patches of a picture" if patches else ""
                raise ConfigError(f"TextData.length: {self.length} is too short for {kind}{beside}")
            needed = objective.num_sentinels(most)
            if needed > self.vocabulary.extra_ids:
                raise ConfigError(
                    f"{kind} with TextData.length = {self.length} needs {needed} sentinels, the "
                    f"vocabulary has extra_ids = {self.vocabulary.extra_ids}"
                )

    def _objective(self, source: AnySource) -> PictureObjectives:
        return source.objective or self.objective

    def _shape(self, vocabulary: Vocabulary) -> RowShape:
        shape = RowShape(self.length, vocabulary.pad_id)
        if not self.has_pictures:
            return shape
        return dataclasses.replace(
            shape,
            pictures=self.pictures.per_row,
            slots=self.patches_per_row,
            patch_dim=self.pictures.patch_dim,
        )

    def _scans(self) -> list[Scan]:
        return [source.scan() for source in self.sources]

    def _examples(self, source: AnySource, corpus: Corpus, vocabulary: Vocabulary) -> Examples:
        objective = self._objective(source)
        examples = Examples(corpus, objective, self.length, vocabulary)
        if not examples.usable:
            raise DataError(
                f"source {corpus.name!r}: no document is long enough for {type(objective).__name__}"
            )
        return examples

    def _source(self, name: str) -> AnySource:
        by_name = {source.name: source for source in (*self.sources, *self.held_out)}
        if name not in by_name:
            raise ConfigError(f"no source is named {name!r}{nearest(name, by_name)}")
        return by_name[name]

    def _held_out(self, name: str) -> tuple[Corpus, Vocabulary]:
        source = self._source(name)
        if not source.has_held_out:
            raise DataError(f"source {name!r} holds out nothing (hold_out_every = 0)")
        vocabulary = self.vocabulary.load(self.sources)
        corpora = [c for c, _ in self._corpora(source, source.scan(), VALIDATION, vocabulary)]
        return corpora[0] if len(corpora) == 1 else joined(name, corpora), vocabulary

    def _corpora(
        self, source: AnySource, scan: Scan, split: str, vocabulary: Vocabulary
    ) -> list[tuple[Corpus, float]]:
        """Returns what a source consists of, each part with its rate among them."""
        if isinstance(source, SeqioTask):
            return open_tasks(source, split, vocabulary, self.length)
        return [(open_corpus(source, scan, split, vocabulary, self.pictures), 1.0)]

    def _fingerprint(
        self, scans: Sequence[Scan], vocabulary: Vocabulary, by_source: Sequence[Parts]
    ) -> str:
        def contents(source: AnySource, scan: Scan, parts: Parts) -> Any:
            if isinstance(source, SeqioTask):  # what it is made of is not known
                return [(examples.fingerprint(), rate) for examples, rate in parts]
            return scan.fingerprint

        return digest(
            list(map(contents, self.sources, scans, by_source)),
            vocabulary.fingerprint,
            self.rates,
            [repr(self._objective(source)) for source in self.sources],
            repr(self.pictures) if self.has_pictures else None,
            self.length,
            self.packing,
            self.seed,
            self.virtual_shards,
            *([self.look_ahead] if self.look_ahead else []),  # as it was before there was one
        )


def _rates(given: tuple[float, ...] | None, by_source: Sequence[Parts]) -> list[float]:
    """Returns the rate of every part of every source.

    Without `given`, every example of every source is as likely.
    """
    totals = given or [float(sum(e.count for e, _ in parts)) for parts in by_source]
    return [
        total * rate / sum(rate for _, rate in parts)
        for total, parts in zip(totals, by_source, strict=True)
        for _, rate in parts
    ]
