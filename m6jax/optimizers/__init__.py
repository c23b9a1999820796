"""From gradients to new weights: directions that are separable by layer, rates and rounding.

An `Optimizer` is a setting that builds an optax transformation for a tree of logical axes. Its
update of one layer is its update of the whole tree, cut to that layer, so that the streamed step
(`m6jax.training.streaming`) can apply it layer by layer.
"""

from m6jax.optimizers.optax_wrapper import Optax
from m6jax.optimizers.optimizer import Adafactor, AdamW, Optimizer
from m6jax.optimizers.rounding import Rounding
from m6jax.optimizers.schedules import Constant, Cosine, InverseSquareRoot, WarmupStableDecay

__all__ = [
    "Adafactor",
    "AdamW",
    "Constant",
    "Cosine",
    "InverseSquareRoot",
    "Optax",
    "Optimizer",
    "Rounding",
    "WarmupStableDecay",
]
