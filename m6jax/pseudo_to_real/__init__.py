"""From shared layers to separate ones: when sharing ends, and what becomes of the state.

`triggers` say when a stage ends, `gradient_agreement` measures what one of them waits for,
`delinking` turns a state into the next stage's, `second_moments` seeds an optimizer's state from
gradients, and `upcycling` makes a sparse model of a dense one.
"""

from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep, GradientAgreement, LossSlope

__all__ = ["AtStep", "GradientAgreement", "LossSlope", "Policy"]
