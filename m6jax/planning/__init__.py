"""What a run needs, before paying for it: does it fit, how fast could it be, what does it cost.

Two engines give the same value, an `Estimate`: `analytic` from shapes, shardings and memory
kinds, in seconds and for any mesh; `compiled` by compiling the step that trains, ahead of time, for
devices that need not be here.
"""

from m6jax.planning.settings import PlanSettings

__all__ = ["PlanSettings"]
