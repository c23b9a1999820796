"""Checkpoints: the whole state of a run, written while training goes on, read onto any mesh.

A step is a directory with the arrays by name and three small JSON documents that can be read
without them:

    checkpoints/120/state/                    every leaf of the state, under its name
                    data_state/metadata       where the data iterator stands
                    description/metadata      what the run is: layout, stage, configuration
                    metrics/metadata          what `keep_best` compares

>>> with Checkpoints(model_dir / "checkpoints", keep=3) as checkpoints:
...   checkpoints.save(120, state, data_state, {"stage": "pseudo"})    # returns at once
...   checkpoints.restore(120, abstract)    # shapes, types and shardings as `abstract` has them

`checkpoints` is what the rest of m6jax uses, `steps` the directories, `arrays` what is in them,
`pieces` how to go through it without holding it.
orbax is imported in this package only.
"""

from m6jax.checkpointing.arrays import piece_bytes
from m6jax.checkpointing.checkpoints import Checkpoints
from m6jax.checkpointing.pieces import Index, PieceReader, SavedLeaf, Streamed, assemble
from m6jax.checkpointing.stack_joining import WholeReader
from m6jax.checkpointing.steps import CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Index",
    "PieceReader",
    "SavedLeaf",
    "Streamed",
    "WholeReader",
    "assemble",
    "piece_bytes",
]
