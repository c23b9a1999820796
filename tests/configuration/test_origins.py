"""An error ends with where the settings were set that it is about, and no others."""

import fake_experiment as fake
import pytest

from m6jax import configuration
from m6jax.foundation.validated import ConfigError


def test_an_error_lists_the_origins_of_what_it_is_about(problems):
    text = """
fake.Experiment.model = @fake.Model()
fake.Experiment.batch_size = 8
fake.Experiment.microbatches = 3
fake.Experiment.name = 'one'
fake.Experiment.loss = 'sum'
fake.Model.layers = 4
"""
    assert problems(text) == [
        "Experiment.microbatches: 3 do not divide a batch of 8"
        " [batch_size from run.gin:5; microbatches from run.gin:6]"
    ]


def test_an_error_of_the_whole_lists_the_origins_of_a_part(write, monkeypatch):
    def check(self):
        raise ConfigError(f"Model.width: {self.model.width} is not enough")

    monkeypatch.setattr(fake.Experiment, "check", check)
    text = (
        "fake.Experiment.model = @fake.Model()\n"
        "fake.Experiment.batch_size = 8\n"
        "fake.Model.layers = 4\n"
        "fake.Model.width = 2\n"
    )
    path = write(text)
    with pytest.raises(ConfigError) as error:
        configuration.load([path], root=fake.Experiment)
    assert str(error.value) == "Model.width: 2 is not enough [Model.width from run.gin:6]"
