"""Examples of anybody's `seqio.Task` or `seqio.Mixture`, registered in a module of theirs.

    SeqioTask.name = 'wmt_ende'
    SeqioTask.module = 'my.tasks'      # or '/my/tasks.py'

A task with the features `inputs` and `targets` is trained as a prefix language model: the inputs
see themselves in full, the targets are predicted. With `targets` alone every token is predicted.
The task makes its examples by its own preprocessors, in its own order and with its own seeds;
`corpus` keeps them, and from there on order, packing and resumption are those of every source.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.files import Scan
from m6jax.data.preprocessors import Objectives, TaskTargets
from m6jax.data.seqio_modules import INPUTS, TARGETS, check_features, imported, with_vocabulary
from m6jax.data.seqio_vocabularies import from_seqio, to_seqio
from m6jax.data.source import TRAIN, Source
from m6jax.data.tensorflow_import import import_tensorflow, running
from m6jax.data.vocab import SentencePiece, Vocabulary
from m6jax.foundation.validated import ConfigError, adjustable, nearest, validated


@dataclasses.dataclass(frozen=True)
class TaskPart:
    """One task of a source.

    Attributes:
      task: the `seqio.Task`, registered; its features have the run's vocabulary.
      name: as its author called it.
      rate: how often its examples are drawn among those of the source, in proportion.
    """

    task: Any
    name: str
    rate: float

    @property
    def has_inputs(self) -> bool:
        """Whether something is given, and not only predicted."""
        return INPUTS in self.task.output_features


@validated
class SeqioTask:
    """A `seqio.Task` or `seqio.Mixture` of a user's own.

    Attributes:
      name: under which it is registered, and what metrics call it.
      module: what registers it when it is imported: `my.tasks`, or a path that ends in `.py`.
      train: name of the split to train on.
      validation: name of the split that is held out; None: none is.
      vocabulary: 'own', the features' own vocabulary, which must be the run's too (see
        `TaskVocabulary`); or 'run', the run's vocabulary in the place of it.
      inputs_length: tokens of inputs, at most; None: half a row. What is longer is cut.
      targets_length: tokens of targets, at most; None: what inputs leave of a row. Targets without
        inputs go on in further rows instead, unless this is set.
      passes: how often the training examples are made; in each pass random preprocessors choose
        anew, and all passes together are an epoch.
      seed: of random preprocessors.
      use_cached: read what `seqio_cache_tasks` has written, where the task allows it.
      version: a name under which the examples stay in the cache until you give another; None: they
        are made whenever a run starts, since nobody knows what the task's code reads.
      objective: what is to be predicted.
    """

    has_pictures: ClassVar[bool] = False

    name: str
    module: str = adjustable()
    train: str = TRAIN
    validation: str | None = "validation"
    vocabulary: Literal["own", "run"] = "own"
    inputs_length: int | None = None
    targets_length: int | None = None
    passes: int = 1
    seed: int = 0
    use_cached: bool = False
    version: str | None = adjustable(default=None)
    objective: Objectives = TaskTargets()

    def check(self) -> None:
        """Checks the numbers."""
        for field in ("inputs_length", "targets_length", "passes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"SeqioTask.{field}: {value} is not positive")

    @property
    def has_held_out(self) -> bool:
        """Whether there is a split that is held out."""
        return self.validation is not None

    @property
    def is_text(self) -> bool:
        """Whether a vocabulary can be trained from it: where the run's takes the place of its own.

        What is text and what is not in a task with a vocabulary of its own is not known.
        """
        return self.vocabulary == "run"

    @property
    def separator(self) -> bytes:
        """What stands between documents of the text."""
        return b"\n"

    def scan(self) -> Scan:
        """Returns what stands for the source; for one with text, a hash of the training text."""
        if not self.is_text:
            return Scan(digest("seqio task", self.name), 0)
        found = self.kept.get(TRAIN)
        if found is None:
            hasher, num_bytes = hashlib.blake2b(digest_size=16), 0
            for text in self.documents(TRAIN):
                hasher.update(text + b"\0")
                num_bytes += len(text)
            found = self.kept[TRAIN] = Scan(digest(self.name, hasher.hexdigest()), num_bytes)
        return found

    def documents(self, split: str) -> Iterator[bytes]:
        """Yields the text of inputs and of targets, of examples that have any, in their order.

        It is what `seqio.preprocessors.tokenize` was given.

        Raises:
          DataError: no preprocessor of the task makes tokens of text.
        """
        _, seqio = import_tensorflow()
        names = [f"{feature}_pretokenized" for feature in (INPUTS, TARGETS)]
        for part in self._parts(seqio.ByteVocabulary()):
            examples = self.examples(part, split, {})
            if not set(names) & set(examples.element_spec):
                raise DataError(
                    f"task {part.name!r}: its examples have no field {' or '.join(names)}, which"
                    " seqio.preprocessors.tokenize makes; no vocabulary can be trained from it (set"
                    " SentencePiece.path, or TextData.vocabulary = @data.TaskVocabulary())"
                )
            with running(f"task {part.name!r}"):
                for example in examples.as_numpy_iterator():
                    yield from (example[name] for name in names if name in example)

    def dataset(self, split: str) -> Any:
        """Returns the examples of a task as its author sees them; of a mixture, mixed."""
        provider = self.provider()
        return provider.get_dataset(None, self.split(split), shuffle=False)

    def provider(self) -> Any:
        """Returns the registered `seqio.Task` or `seqio.Mixture`.

        Raises:
          DataError: the module cannot be imported, or nothing has that name.
        """
        _, seqio = import_tensorflow()
        imported(self.module)
        for registry in (seqio.MixtureRegistry, seqio.TaskRegistry):
            if self.name in registry.names():
                return registry.get(self.name)
        names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
        raise DataError(
            f"SeqioTask.name: SeqioTask.module {self.module!r} registers no {self.name!r}"
            f"{nearest(self.name, [name for name in names if not name.startswith('m6jax_')])}"
        )

    def parts(self, vocabulary: Vocabulary) -> list[TaskPart]:
        """Returns the tasks with the run's vocabulary.

        Raises:
          DataError: a task has other features, or another vocabulary than the run.
        """
        if self.vocabulary == "run":
            return self._parts(to_seqio(vocabulary))
        parts = self._parts(None)
        own = self.own_vocabulary()
        if own.fingerprint != vocabulary.fingerprint:
            raise DataError(
                f"SeqioTask.vocabulary: the own vocabulary of {self.name!r} ({own.size:,} ids) is"
                f" not that of the run ({vocabulary.size:,} ids); TextData.vocabulary ="
                " @data.TaskVocabulary() takes it for the run, SeqioTask.vocabulary = 'run' takes"
                " the run's for the task"
            )
        return parts

    def own_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary of the task's features.

        Raises:
          DataError: inputs and targets have different ones.
        """
        features = [
            (f"feature {name!r} of task {part.name!r}", feature.vocabulary)
            for part in self._parts(None)
            for name, feature in part.task.output_features.items()
        ]
        (first, vocabulary), *others = [(where, from_seqio(v, where)) for where, v in features]
        for where, other in others:
            if other.fingerprint != vocabulary.fingerprint:
                raise DataError(
                    f"{first} and {where} have different vocabularies; a decoder has one"
                )
        return vocabulary

    def split(self, split: str) -> str:
        """Returns the task's name of a split."""
        return self.train if split == TRAIN else self.validation or ""

    def examples(self, part: TaskPart, split: str, lengths: Mapping[str, int]) -> Any:
        """Returns the examples of a task, not cut, as a `tf.data.Dataset`."""
        with running(f"task {part.name!r}"):
            return part.task.get_dataset(
                lengths or None,
                self.split(split),
                use_cached=self.use_cached,
                shuffle=False,
                seed=self.seed,
                num_epochs=self.passes if split == TRAIN else 1,
                trim_output_features=False,
                try_in_mem_cache=False,
            )

    def lengths(self, part: TaskPart, length: int) -> dict[str, int]:
        """Returns the `sequence_length` that a task is given, for rows of `length` tokens.

        Raises:
          ConfigError: they are together longer than a row.
        """
        given = self.inputs_length or max(length // 2, 1) if part.has_inputs else 0
        asked = self.targets_length or length - given
        if given + asked > length or asked < 1:
            raise ConfigError(
                f"SeqioTask.inputs_length: {given} tokens of inputs and {asked} of targets are"
                f" longer than a row, TextData.length = {length}"
            )
        return ({INPUTS: given} if part.has_inputs else {}) | {TARGETS: asked}

    def in_split(self, parts: Sequence[TaskPart], split: str) -> list[TaskPart]:
        """Returns the tasks that have a split.

        Raises:
          DataError: none has.
        """
        name = self.split(split)
        found = [part for part in parts if name in part.task.splits]
        if not found:
            there = sorted({name for part in parts for name in part.task.splits})
            field = "train" if split == TRAIN else "validation"
            way_out = "" if split == TRAIN else " (None: nothing is held out)"
            raise DataError(
                f"SeqioTask.{field}: {self.name!r} has no split {name!r}, it has"
                f" {', '.join(there)}{way_out}"
            )
        return found

    @functools.cached_property
    def kept(self) -> dict[Any, Any]:
        """What was made for this setting, for as long as the setting is in use."""
        return {}

    def _parts(self, vocabulary: Any) -> list[TaskPart]:
        """Returns the tasks, with another vocabulary (a `seqio.Vocabulary`) or their own."""
        _, seqio = import_tensorflow()
        provider = self.provider()
        tasks = seqio.get_subtasks(provider)
        rates = [1.0] if tasks == [provider] else [float(provider.get_rate(t)) for t in tasks]
        for task in tasks:
            check_features(task)
        return [
            TaskPart(task if vocabulary is None else with_vocabulary(task, vocabulary), name, rate)
            for task, name, rate in zip(tasks, [task.name for task in tasks], rates, strict=True)
        ]


@validated
class TaskVocabulary:
    """The vocabulary that the run's seqio tasks have of their own.

    Attributes:
      extra_ids: how many of its ids are sentinels, the last ones.
    """

    extra_ids: int = 0

    def check(self) -> None:
        """Checks the range."""
        if self.extra_ids < 0:
            raise ConfigError(f"TaskVocabulary.extra_ids: {self.extra_ids} is negative")

    def model_if_there(self) -> bytes | None:
        """Returns None: whether the tasks still have it shows when they are read."""
        return None

    def pinned(self, path: str) -> SentencePiece:
        """Returns the setting of the same vocabulary, read from a model file."""
        return SentencePiece(path=path, extra_ids=self.extra_ids)

    def load(self, sources: Sequence[Source], scans: Sequence[Scan] | None = None) -> Vocabulary:
        """Returns the vocabulary of the first task among the sources; `parts` checks the others.

        Raises:
          DataError: there is none, or it has another number of sentinels.
        """
        tasks = [s for s in sources if isinstance(s, SeqioTask) and s.vocabulary == "own"]
        if not tasks:
            raise DataError(
                "TextData.vocabulary: TaskVocabulary is that of a task, but no source is a"
                " SeqioTask with a vocabulary of its own"
            )
        vocabulary = tasks[0].own_vocabulary()
        if vocabulary.extra_ids != self.extra_ids:
            raise DataError(
                f"TaskVocabulary.extra_ids: {self.extra_ids}, but the vocabulary of"
                f" {tasks[0].name!r} has {vocabulary.extra_ids}"
            )
        return vocabulary
