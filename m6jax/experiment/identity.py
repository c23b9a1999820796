"""What a run is besides its configuration: its vocabulary and its held-out text.

Weights mean nothing without the vocabulary that they were trained with, and numbers of a run can be
compared only on the same text. So the run's directory keeps both, and every mode checks them:

    vocabulary.model   the vocabulary itself; no mode takes another one
    identity.json      {"vocabulary": fingerprint, "held_out": {name of a set: fingerprint}}

Both are written before the first checkpoint, and are copied with a checkpoint to another run.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from m6jax.data.config import SentencePiece, TextData, TokenIds, Vocabulary
from m6jax.experiment.experiment import Experiment
from m6jax.foundation.validated import ConfigError
from m6jax.foundation.whole_files import write_whole
from m6jax.modeling.config import ModelConfig


class Identity:
    """The identity of a run, in its directory.

    Attributes:
      model: path of the vocabulary.
      record: path of the fingerprints.
    """

    def __init__(self, model_dir: str):
        self._directory = epath.Path(model_dir)
        self.model = self._directory / "vocabulary.model"
        self.record = self._directory / "identity.json"

    def known(self) -> dict[str, Any]:
        """Returns what `identity.json` says, empty if there is none."""
        if not self.record.exists():
            return {}
        return dict(json.loads(self.record.read_text()))

    def data(self, experiment: Experiment) -> TextData:
        """Returns the data of a run with the vocabulary that the run has, wherever it comes from.

        That is the one in its directory, else that of the run in whose state it begins, else the
        one that the configuration describes.

        Raises:
          ConfigError: the configuration describes another vocabulary.
        """
        if self.record.exists():
            return self._pinned(experiment.data)
        if experiment.initial is not None:
            origin = Identity(experiment.initial.model_dir)
            if origin.record.exists():
                return origin._pinned(experiment.data)
        return experiment.data

    def require(self) -> None:
        """Raises ConfigError where nothing says with which vocabulary the weights were trained."""
        if not self.record.exists():
            raise ConfigError(
                f"MODEL_DIR: {self._directory} does not hold the vocabulary of its weights (copy"
                f" {self.model.name} and {self.record.name} from the directory of the run that"
                " they come from, or go on training)"
            )

    def check_held_out(self, data: TextData) -> None:
        """Makes sure that the held-out text is that with which the run began.

        Raises:
          ConfigError: it is not; the sets that differ are named.
        """
        _refuse_other(self.known().get("held_out", {}), data, self._directory)

    def claim(self, data: TextData) -> None:
        """Writes the vocabulary and the fingerprints, those of sets that are new to the run too."""
        known = self.known().get("held_out", {})
        _refuse_other(known, data, self._directory)
        vocabulary = data.vocab()
        own = {source.name for source in data.sources}
        held_out = {n: data.held_out_fingerprint(n) for n in data.eval_names() if n in own}
        self._write(
            vocabulary.model,
            {"vocabulary": vocabulary.fingerprint, "held_out": held_out | known},
        )

    def check_vocabulary(self, data: TextData) -> None:
        """Raises ConfigError if `data` describes another vocabulary than this run's."""
        if self.record.exists():
            self._pinned(data)

    def copy_to(self, other: "Identity", restart: bool) -> None:
        """Gives this run's identity to another run, which gets its weights.

        Args:
          other: that run's.
          restart: it begins its data anew, which may then be other data.
        """
        record = self.known()
        if record:
            model = self.model.read_bytes() if self.model.exists() else None
            other._write(model, record | ({"held_out": {}} if restart else {}))

    def _pinned(self, data: TextData) -> TextData:
        """Returns `data` with the vocabulary of this directory."""
        setting = data.vocabulary
        if not isinstance(setting, TokenIds) and self.model.exists():
            own = setting.model_if_there()
            if own is not None and own != self.model.read_bytes():
                kind, path = type(setting).__name__, getattr(setting, "path", None)
                raise ConfigError(
                    f"{kind}.path: {path} is another vocabulary than {self.model}, with which the"
                    " weights were trained (leave the setting as it was in the run)"
                )
            data = dataclasses.replace(data, vocabulary=setting.pinned(str(self.model)))
        vocabulary, expected = data.vocab(), self.known()["vocabulary"]
        size = vocabulary.base_size
        if isinstance(setting, SentencePiece) and setting.path is None:
            size = setting.size
        if vocabulary.fingerprint == expected and vocabulary.base_size == size:
            return data
        raise ConfigError(
            f"TextData.vocabulary: {setting} is not the vocabulary of the run in"
            f" {self._directory} ({vocabulary.base_size} pieces, fingerprint {expected}), with"
            " which its weights were trained (give the vocabulary's settings of that run)"
        )

    def _write(self, model: bytes | None, record: Mapping[str, Any]) -> None:
        """Writes what is not there yet."""
        self._directory.mkdir(parents=True, exist_ok=True)
        contents = {self.record: json.dumps(record, indent=1, sort_keys=True).encode()}
        if model is not None:
            contents = {self.model: model} | contents
        for path, content in contents.items():
            if path.exists() and path.read_bytes() == content:
                continue
            write_whole(path, content)


def vocabulary_for(model: ModelConfig, data: TextData) -> tuple[Vocabulary, ModelConfig]:
    """Returns the vocabulary of `data`, and the model that predicts no id beyond it.

    Raises:
      ConfigError: the model has not so many ids, or says itself that it predicts others.
    """
    vocabulary = data.vocab()
    if vocabulary.size > model.vocab_size:
        raise ConfigError(
            f"ModelConfig.vocab_size: {model.vocab_size} is less than the {vocabulary.size} tokens"
            " of the vocabulary"
        )
    if model.num_ids not in (None, vocabulary.size):
        raise ConfigError(
            f"ModelConfig.num_ids: {model.num_ids} are not the {vocabulary.size} tokens of the"
            " vocabulary (leave it None)"
        )
    if vocabulary.size == model.vocab_size:
        return vocabulary, model
    return vocabulary, dataclasses.replace(model, num_ids=vocabulary.size)


def _refuse_other(known: Mapping[str, str], data: TextData, directory: epath.Path) -> None:
    other = [
        n for n in data.eval_names() if n in known and known[n] != data.held_out_fingerprint(n)
    ]
    if other:
        raise ConfigError(
            f"TextData.sources: the held-out documents of {', '.join(other)} are not those with"
            f" which the run in {directory} began (give back the files as they were; to evaluate on"
            " other text name it in TextData.held_out)"
        )
