"""Modules of a user's own that register seqio tasks, and what is asked of these."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.tensorflow_import import import_tensorflow, running

INPUTS, TARGETS = "inputs", "targets"


def imported(module: str) -> ModuleType:
    """Returns a module, imported by its name or from a file, once.

    Raises:
      DataError: it is not there, or fails.
    """
    import_tensorflow()  # quietly, before the module does it
    with running(f"SeqioTask.module {module!r}"):
        if not module.endswith(".py"):
            return _by_name(module)
        path = os.path.realpath(os.path.expanduser(module))
        name = f"m6jax_user_{Path(path).stem}_{digest(path)[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[name]
            raise
        return loaded


def _by_name(module: str) -> ModuleType:
    """Imports a module by its name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there; what it imports is not
        raise DataError(
            f"SeqioTask.module: there is no module {module!r} (give the path of its .py file, or"
            " add its folder to PYTHONPATH)"
        ) from error


def check_features(task: Any) -> None:
    """Raises DataError for features that a decoder of text does not take."""
    features = task.output_features
    others = sorted(set(features) - {INPUTS, TARGETS})
    if others or TARGETS not in features:
        raise DataError(
            f"task {task.name!r} has the features {', '.join(features)}; wanted are"
            f" {INPUTS!r} and {TARGETS!r}, or {TARGETS!r} alone"
        )
    for name, feature in features.items():
        if not feature.dtype.is_integer or feature.rank != 1:
            raise DataError(
                f"task {task.name!r}: feature {name!r} is {feature.dtype.name} of rank"
                f" {feature.rank}, wanted is a list of token ids"
            )


def with_vocabulary(task: Any, vocabulary: Any) -> Any:
    """Returns the task with another vocabulary for all features, registered under a new name.

    Registered, because `seqio.Evaluator` takes names.
    """
    _, seqio = import_tensorflow()
    kind = getattr(vocabulary, "fingerprint", type(vocabulary).__name__)
    name = f"m6jax_{task.name}_{kind}"
    features = {
        feature: dataclasses.replace(settings, vocabulary=vocabulary)
        for feature, settings in task.output_features.items()
    }
    replaced = task.replace(name=name, output_features=features)
    seqio.TaskRegistry.remove(name)  # the user may have registered another task of that name
    seqio.TaskRegistry.add_provider(name, replaced)
    return replaced
