"""What a run is, as one value, and what each of its stages compiles."""

from m6jax.experiment.experiment import Experiment, Initial, Sample, Stage

__all__ = ["Experiment", "Initial", "Sample", "Stage"]
