"""What the command line does besides training: evaluate, infer, report."""

from m6jax import report as reports
from m6jax.experiment import Experiment
from m6jax.model_dir import ModelDir
from m6jax.train import open_trainer
from m6jax.validated import ConfigError


def evaluate(experiment: Experiment) -> int:
    """Evaluates the newest checkpoint; prints a line for each held-out set."""
    with open_trainer(experiment, writes=False) as trainer:
        trainer.evaluate(trainer.restore_newest())
    return 0


def infer(experiment: Experiment) -> int:
    """Prints what the newest checkpoint makes of the prompts of Experiment.sample."""
    if experiment.sample is None or not experiment.sample.prompts:
        raise ConfigError("Sample.prompts: there is nothing to continue (give a tuple of texts)")
    with open_trainer(experiment, writes=False) as trainer:
        trainer.generate(trainer.restore_newest())
    return 0


def report(experiment: Experiment) -> int:
    """Draws the plots again; prints their paths."""
    for path in reports.write_report(ModelDir(experiment.model_dir).path):
        print(path)
    return 0
