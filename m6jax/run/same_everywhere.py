"""What must be the same in all processes, compared before the model is compiled.

Processes that differ in a learning rate or in their text train together without an error, each
with its own mistake. So all give what they have, and where it differs all end with one message:

    the processes do not agree, so that they cannot train together:
      Experiment.schedule.peak: 0.01 in process 0; 0.5 in process 1
"""

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from m6jax import __version__, configuration
from m6jax.data.config import TextData
from m6jax.experiment import Experiment
from m6jax.foundation.validated import ConfigError
from m6jax.processes import Group

_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
_SETTINGS = "settings"


def check_settings(group: Group, experiment: Experiment) -> None:
    """Raises ConfigError where processes have other settings, or other versions of the code."""
    facts = {f"version of {name}": metadata.version(name) for name in _LIBRARIES}
    facts["version of m6jax"] = f"{__version__}, source {_source_fingerprint()}"
    _check(group, facts | {_SETTINGS: configuration.to_gin(experiment)})


def check_data(group: Group, data: TextData, rows: str | None = None) -> None:
    """Raises ConfigError where processes have another vocabulary or other text.

    Args:
      group: the processes.
      data: with the run's own vocabulary.
      rows: fingerprint of the training rows, where there are any.
    """
    facts = {f"held-out documents of {n}": data.held_out_fingerprint(n) for n in data.eval_names()}
    if rows is not None:
        facts["training rows"] = rows
    _check(group, facts | {"vocabulary": data.vocab().fingerprint})


def check_planned(group: Group, planned: Experiment) -> None:
    """Raises ConfigError where budgets of memory became other plans in other processes."""
    _check(group, {_SETTINGS: configuration.to_gin(planned)})


def _check(group: Group, facts: Mapping[str, str]) -> None:
    if group.count == 1:
        return
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    if len(set(group.gather(digest))) == 1:
        return
    lines = "\n  ".join(_differences(group.gather(dict(facts))))
    raise ConfigError(f"the processes do not agree, so that they cannot work together:\n  {lines}")


def _differences(facts: list[dict[str, str]]) -> list[str]:
    """Returns a line for each thing that differs, with who has what."""
    found = {}
    for name in [name for name in facts[0] if name != _SETTINGS]:
        found[name] = [own.get(name, "missing") for own in facts]
    for i, own in enumerate(facts if _SETTINGS in facts[0] else []):
        different = configuration.differences(facts[0][_SETTINGS], own[_SETTINGS])
        for path, (first, other) in different.items():
            found.setdefault(path, [first] * len(facts))[i] = other
    return [
        f"{name}: "
        + "; ".join(f"{value} in {_who(value, values)}" for value in dict.fromkeys(values))
        for name, values in found.items()
        if len(set(values)) > 1
    ]


def _who(value: str, values: list[str]) -> str:
    numbers = [str(i) for i, other in enumerate(values) if other == value]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _source_fingerprint() -> str:
    """Returns what stands for the code itself: a version does not change with each edit."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
