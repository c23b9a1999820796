"""From the state of one run to that of another whose layers lie otherwise.

Two ways lead there, with one core: `recipes` say what every leaf is made of, `values` makes any
part of it from a checkpoint.

    conversion  a checkpoint becomes another checkpoint, a few pieces in memory at a time
    starting    a run begins in the state of a checkpoint, made straight where it rests

>>> print(convert(experiment, Conversion(source="runs/pseudo"), LayoutChange.DELINK))
>>> start = starting.begin(experiment, rows.restore)    # experiment.initial names a checkpoint
"""

from m6jax.converting.settings import Conversion, LayoutChange

__all__ = ["Conversion", "LayoutChange"]
