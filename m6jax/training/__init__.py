"""One training step: the loss, the state, and the update, ordinary or streamed layer by layer."""

from m6jax.training.losses import Loss
from m6jax.training.train_state import TrainState
from m6jax.training.train_step import ClipBy, Update

__all__ = ["ClipBy", "Loss", "TrainState", "Update"]
