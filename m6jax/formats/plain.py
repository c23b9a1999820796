"""m6jax's own names: `config.json`, which says all of a model that its tensors do not.

    {"format": "m6jax", "version": 1,
     "model": {"vocab_size": 8000, "norm": "RMS", "moe": {"router": {"class": "TopK", ...}, ...}},
     "start_id": 0, "eos_id": 1, "pad_id": 0, "step": 260, ...}

`docs/read_model.py` computes the logits from it and the tensors with NumPy alone.
"""

import dataclasses
import enum
from typing import Any

from m6jax.modeling.config import ModelConfig

VERSION = 1


def document(config: ModelConfig, about: dict[str, Any]) -> dict[str, Any]:
    """Returns what `config.json` says.

    Args:
      config: the model.
      about: what else is to be known, such as the id with which rows start.
    """
    return {"format": "m6jax", "version": VERSION, "model": _plain(config), **about}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return fields if isinstance(value, ModelConfig) else {"class": type(value).__name__} | fields
