"""Gin files to objects, and back.

A run is described by gin files, which set the fields of `@validated` classes:

    from __gin__ import dynamic_registration
    from m6jax import experiment
    from m6jax import modeling

    include 'configs/models/tiny.gin'

    BATCH = 8
    MODEL_DIR = %gin.REQUIRED

    experiment.Experiment.model = @modeling.ModelConfig()
    experiment.Experiment.batch_size = %BATCH
    experiment.Experiment.model_dir = %MODEL_DIR

>>> loaded = load(["run.gin"], ["MODEL_DIR='/tmp/run'"], root=Experiment)
>>> loaded.value.batch_size
8

The language and its parser are gin's. What the statements mean (scopes, macros, includes, which
binding wins) is gin's too, but worked out here: gin itself forgets where a binding stood, finds a
misspelt name only when it is used, if ever, and keeps everything in tables of the whole process.
So `load` can say at which line everything wrong stands, all in one go, and leaves nothing behind.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from m6jax.configuration.building import build, check_use
from m6jax.configuration.listing import reference
from m6jax.configuration.names import adjustable, defaults
from m6jax.configuration.reading import PathLike, Problems, read
from m6jax.configuration.resolved import compare, differences, to_gin

__all__ = [
    "Loaded",
    "adjustable",
    "compare",
    "defaults",
    "differences",
    "load",
    "reference",
    "to_gin",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """What gin files describe.

    Attributes:
      value: the object.
      text: gin file that alone repeats it, see `to_gin`.
    """

    value: T
    text: str


def load(
    files: Sequence[PathLike],
    bindings: Sequence[str] = (),
    search_paths: Sequence[PathLike] = (),
    *,
    root: type[T],
    roots: Sequence[type] = (),
    macros: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """Makes the object that `files` describe, with `bindings` of a command line on top.

    Args:
      files: gin files; of two that bind one name the later wins, which is logged.
      bindings: each `NAME=VALUE`, as in `--gin.NAME=VALUE`; NAME a macro or `Class.field`.
      search_paths: directories for relative paths, after the including file's and the current one.
      root: class of the object.
      roots: classes that other modes make from the same files: what only they use is no error.
      macros: what stays a macro in the text, see `to_gin`.

    Raises:
      ConfigError: with a line for each thing wrong: a file that is missing or not gin, an unknown
        module, class or field, a macro or binding that nothing uses, a value of a wrong type or
        missing, or what a class's own `check` refuses.
    """
    problems = Problems()
    modes = list(dict.fromkeys([root, *roots]))
    settings = read(files, bindings, search_paths, modes, problems)
    check_use(settings, modes, problems)
    value = build(root, settings, problems)
    return Loaded(value, to_gin(value, macros))
