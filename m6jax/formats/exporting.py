"""A model written as a folder of one of the formats."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from m6jax.data.vocab import Vocabulary
from m6jax.formats import hugging_face, plain, program, tensor_files
from m6jax.formats.settings import Export, Format
from m6jax.formats.weights import Weights, delinked, floating
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout
from m6jax.modeling.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      directory: where.
      files: their names.
      parameters: numbers in all tensors.
    """

    directory: pathlib.Path
    files: tuple[str, ...]
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.directory}: {', '.join(self.files)}; {self.parameters:,} parameters, every"
            " layer's own"
        )


def check(config: ModelConfig, settings: Export) -> None:
    """Raises ConfigError for a model that the format does not know."""
    if settings.format is Format.HUGGING_FACE:
        hugging_face.refuse(config)
    if settings.format is Format.STABLEHLO and config.patch_dim is not None:
        raise ConfigError(
            "Export.format: STABLEHLO maps token ids alone, and ModelConfig.patch_dim"
            " says that this model sees pictures too (SAFETENSORS takes every model)"
        )


def export(
    params: Tree,
    config: ModelConfig,
    layout: Layout,
    vocabulary: Vocabulary,
    settings: Export,
    directory: pathlib.Path,
    about: dict[str, Any],
) -> Exported:
    """Writes a model into a folder.

    Args:
      params: parameters that are evaluated, with router biases (`TrainState.served`).
      config: the model.
      layout: how its stack lies.
      vocabulary: of its tokens.
      settings: the format; `length` is given.
      directory: the folder, new or empty.
      about: what else `config.json` says of the model, such as its step.

    Raises:
      ConfigError: the format does not know this model, or the folder holds files or cannot be made.
    """
    check(config, settings)
    about = about | {
        "start_id": vocabulary.start_id,
        "eos_id": vocabulary.eos_id,
        "pad_id": vocabulary.pad_id,
    }
    weights = delinked(params, config, layout)
    if settings.format is Format.HUGGING_FACE:
        weights = hugging_face.written_weights(weights, config)
    if settings.dtype is not None:
        weights = {
            name: weight.astype(settings.dtype) if floating(weight.dtype) else weight
            for name, weight in weights.items()
        }
    _make(directory)
    for name, content in _documents(config, vocabulary, settings, weights, about):
        (directory / name).write_bytes(content)
    tensor_files.write(directory, weights)
    return Exported(
        directory=directory,
        files=tuple(sorted(path.name for path in directory.iterdir())),
        parameters=sum(weight.size for weight in weights.values()),
    )


def _documents(
    config: ModelConfig,
    vocabulary: Vocabulary,
    settings: Export,
    weights: Weights,
    about: dict[str, Any],
) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the content of all files but the tensors."""
    if settings.format is Format.HUGGING_FACE:
        dtype = hugging_face.type_of(weights)
        yield "config.json", _json(hugging_face.document(config, dtype, about))
        if vocabulary.model is not None:
            yield hugging_face.TOKENIZER, vocabulary.model
            yield "tokenizer_config.json", _json(hugging_face.tokenizer(vocabulary, config))
        return
    if settings.format is Format.STABLEHLO:
        assert settings.length is not None  # see `export`
        yield program.FILE, program.stablehlo(config, weights, settings.rows, settings.length)
    yield "config.json", _json(plain.document(config, about))
    if vocabulary.model is not None:
        yield "vocabulary.model", vocabulary.model


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _make(directory: pathlib.Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise ConfigError(
            f"Export.directory: {directory} cannot be made ({error.strerror}); choose another"
        ) from error
    if there:
        raise ConfigError(
            f"Export.directory: {directory} holds {there[0]} already (choose another folder, or"
            " remove it)"
        )
