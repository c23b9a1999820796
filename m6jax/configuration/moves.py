"""Where what has moved is found today.

The `config.gin` of an older run names modules and classes as they were called then. It is read
through this table. In a file that a user wrote, an old name is an error that says the new one.
"""

import pathlib

SAVED = "# Every setting of a run, written by m6jax."

# Full name of a module or of a class, then and today. Names that never stood in a gin file are left
# out: those of modules without settings and without functions that a setting takes.
MOVES = {
    "m6jax.adafactor": "m6jax.optimizers.adafactor",
    "m6jax.adam": "m6jax.optimizers.adam",
    "m6jax.delinking": "m6jax.pseudo_to_real.delinking",
    "m6jax.losses": "m6jax.training.losses",
    "m6jax.offload": "m6jax.layouts.offload",
    "m6jax.optax_optimizers": "m6jax.optimizers.optax_wrapper",
    "m6jax.partitioning": "m6jax.foundation.partitioning",
    "m6jax.rounding": "m6jax.optimizers.rounding",
    "m6jax.schedules": "m6jax.optimizers.schedules",
    "m6jax.train": "m6jax.run.train",
    "m6jax.train_step": "m6jax.training.train_step",
    "m6jax.triggers": "m6jax.pseudo_to_real.triggers",
    "m6jax.validated": "m6jax.foundation.validated",
}


def is_saved(text: str, path: pathlib.Path) -> bool:
    """Whether a gin file was written by a run, and not by a user.

    Args:
      text: of the file.
      path: of the file. Files of before there was a first line that says so are known by where they
        lie: `config.gin` beside the run's `checkpoints/`.
    """
    if text.startswith(SAVED):
        return True
    return path.name == "config.gin" and (path.parent / "checkpoints").is_dir()


def current(name: str) -> str:
    """Returns today's full name of a module, or of something in one, given by its full name.

    >>> current("m6jax.losses.Loss")
    'm6jax.training.losses.Loss'
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        moved = MOVES.get(".".join(parts[:end]))
        if moved is not None:
            return ".".join([moved, *parts[end:]])
    return name
