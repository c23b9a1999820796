"""Pretraining of Mixture-of-Experts transformers that do not fit the accelerators at hand.

    import m6jax
    run = m6jax.train("configs/quickstart.gin", MODEL_DIR="runs/mine")
    run = m6jax.load("runs/mine")

See `m6jax.run.trained` for what a run can do. `import m6jax` alone imports nothing that takes time.
"""

import typing

from m6jax.foundation import platforms

if typing.TYPE_CHECKING:
    from m6jax.run.trained import load, train

__all__ = ["load", "train"]
__version__ = "0.1.0"

platforms.leave_out_absent_tpus()


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'm6jax' has no attribute {name!r}")
    from m6jax.run import trained

    return getattr(trained, name)
