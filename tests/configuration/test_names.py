"""A class has the name that its package exports; old names are for files of runs only."""

import importlib
import pkgutil

import pytest

import m6jax
from m6jax import configuration, decoding, experiment, training
from m6jax.configuration import moves
from m6jax.configuration.names import CommandLineNames, full_name
from m6jax.foundation.validated import ConfigError, is_validated

GIN = "from __gin__ import dynamic_registration\n"
OLD = GIN + "from m6jax import losses\n\nlosses.Loss.z_loss = 0.25\n"
PACKAGES = [info.name for info in pkgutil.iter_modules(m6jax.__path__) if info.ispkg]


def load(path, *bindings, root=training.Loss):
    return configuration.load([path], bindings, root=root).value


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_classes_are_found_by_their_exported_names(package):
    names = CommandLineNames([], [training.Loss], [])
    module = importlib.import_module(f"m6jax.{package}")
    for name in getattr(module, "__all__", ()):
        target = getattr(module, name)
        assert names.find(f"m6jax.{package}.{name}") is target
        assert names.find(f"{package}.{name}") is target
        if is_validated(target):
            assert full_name(target).rpartition(".")[2] == name
            assert names.find(full_name(target)) is target


@pytest.mark.parametrize("name", ["m6jax.decoding.Greedy", "decoding.Greedy"])
def test_an_exported_class_on_the_command_line(write, name):
    path = write("from m6jax import experiment\n", header=GIN)
    sample = load(path, f"Sample.method=@{name}()", root=experiment.Sample)
    assert sample.method == decoding.Greedy()


def test_an_exported_class_by_its_full_name_in_a_file(write):
    text = (
        "import m6jax.decoding\nimport m6jax.experiment\n"
        "m6jax.experiment.Sample.method = @m6jax.decoding.Greedy()\n"
    )
    sample = load(write(text, header=GIN), root=experiment.Sample)
    assert sample.method == decoding.Greedy()


def test_old_names_in_files_of_runs(write, tmp_path):
    assert load(write(f"{moves.SAVED}\n{OLD}", header="")).z_loss == 0.25
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert load(write(OLD, "run/config.gin", header="")).z_loss == 0.25


@pytest.mark.parametrize("name", ["run.gin", "config.gin"])
def test_old_names_in_a_users_file(write, name):
    with pytest.raises(ConfigError) as error:
        load(write(OLD, name, header=""))
    assert str(error.value) == (
        f"{name}:2: m6jax.losses has moved: import m6jax.training and write training.Loss"
    )


def test_an_old_module_that_no_package_exports(write):
    with pytest.raises(ConfigError, match=r"validated has moved: import m6jax\.foundation\.val"):
        load(write("import m6jax.validated as v\n", header=GIN))


def test_old_names_on_the_command_line(write):
    with pytest.raises(ConfigError, match=r"m6jax\.losses\.Loss is now called m6jax\.training\.L"):
        load(write("", header=GIN), "m6jax.losses.Loss.z_loss=0.5")


def test_old_names_of_classes(write, monkeypatch):
    monkeypatch.setitem(moves.MOVES, "m6jax.training.OldLoss", "m6jax.training.losses.Loss")
    text = GIN + "from m6jax import training\ntraining.OldLoss.z_loss = 0.25\n"
    assert load(write(f"{moves.SAVED}\n{text}", header="")).z_loss == 0.25
    with pytest.raises(ConfigError, match=r"OldLoss is now called m6jax\.training\.Loss"):
        load(write(text, header=""))
    later = configuration.to_gin(training.Loss(z_loss=0.5))
    assert "Loss.z_loss: 0.25 became 0.5" in configuration.compare(text, later)


def test_the_table_leads_to_what_is_there():
    for old, new in moves.MOVES.items():
        assert moves.current(old) == new
        assert pkgutil.resolve_name(new)
