"""The model: pure functions of parameters, with no sight of devices, optimizers or files."""

from m6jax.modeling.config import Activation, LayerKind, ModelConfig, MoEConfig, Positions, Remat
from m6jax.modeling.m6 import M6
from m6jax.modeling.routers import ExpertChoice, TokenHash, TopK

__all__ = [
    "M6",
    "Activation",
    "ExpertChoice",
    "LayerKind",
    "MoEConfig",
    "ModelConfig",
    "Positions",
    "Remat",
    "TokenHash",
    "TopK",
]
