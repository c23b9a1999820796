"""A model as one StableHLO program, which runs without m6jax.

>>> import jax, safetensors.numpy
>>> program = jax.export.deserialize(open("model.stablehlo", "rb").read())
>>> weights = safetensors.numpy.load_file("model.safetensors")
>>> logits = program.call(weights, tokens)          # float32[B, T, V]

Tokens int32[B, T] are rows that begin with the start id, one document each; what stands after a
document's end changes nothing before it. Experts serve every choice, as in decoding. The program is
for CPUs, NVIDIA GPUs and TPUs.

Axis letters: B rows, T length, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from m6jax.decoding import decoding_model
from m6jax.formats.weights import Weights, unrolled
from m6jax.layouts import Form
from m6jax.modeling.config import ModelConfig
from m6jax.modeling.transformer import Transformer

FILE = "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "tpu")


def stablehlo(config: ModelConfig, weights: Weights, rows: int, length: int) -> bytes:
    """Returns the serialised program.

    Args:
      config: the model.
      weights: its leaves by name, which the program takes in this shape.
      rows: B.
      length: T.

    Raises:
      ConfigError: the model cannot serve every choice.
    """
    model = decoding_model(Transformer(config))
    layout = config.layout(config.num_layers, Form.UNROLLED)

    def logits(weights: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
        batch = {
            "tokens": tokens,
            "segment_ids": jnp.ones((rows, length), jnp.int32),
            "positions": positions,
        }
        return model.apply(unrolled(weights, config), batch, layout).logits

    arguments: Any = (
        {name: jax.ShapeDtypeStruct(w.shape, w.dtype) for name, w in weights.items()},
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )
    return bytes(jax.export.export(jax.jit(logits), platforms=PLATFORMS)(*arguments).serialize())
