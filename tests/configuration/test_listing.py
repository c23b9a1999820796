"""What may be set is listed from the classes and their docstrings."""

import pytest

from m6jax import main
from m6jax.configuration import reference
from m6jax.configuration.listing import settings_of
from m6jax.configuration.names import classes_within
from m6jax.converting import Conversion
from m6jax.experiment import Experiment
from m6jax.formats import Export
from m6jax.foundation.validated import ConfigError
from m6jax.planning import PlanSettings

ROOTS = (Experiment, PlanSettings, Conversion, Export)


def test_every_setting_has_a_meaning():
    classes = classes_within(ROOTS)
    assert [s.name for cls in classes for s in settings_of(cls) if not s.meaning] == []


def test_one_class(capsys):
    assert main.main(["--mode=settings", "Experiment"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "experiment.Experiment (from m6jax import experiment): A run."
    at = lines.index("  Experiment.keep: int = 3")
    assert lines[at + 1] == (
        "      newest checkpoints that are kept. May change when a run is resumed."
    )
    assert "  Experiment.steps: int (must be given)" in lines


def test_all_classes_one_setting_and_a_search():
    lines = reference(ROOTS).splitlines()
    assert len(lines) == len(classes_within(ROOTS))
    assert any(line.startswith("training.Update (from m6jax import training)") for line in lines)
    assert reference(ROOTS, "Sample.method").startswith(
        "  Sample.method: Greedy | Sampling | Beam = @Sampling() with temperature=0.8\n"
    )
    found = reference(ROOTS, word="held-out")
    assert "  Experiment.eval_every: int" in found
    assert "Experiment.seed" not in found


def test_what_is_not_there():
    with pytest.raises(ConfigError, match=r"no setting 'Adafacto' \(did you mean 'Adafactor'"):
        reference(ROOTS, "Adafacto")
    with pytest.raises(ConfigError, match="no setting has 'zzz' in its name or meaning"):
        reference(ROOTS, word="zzz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --gin_file"),
        (["--gin_file=x", "Update"], "Update: only --mode=settings takes it"),
        (["--gin_file=x", "--find=y"], "--find: only --mode=settings takes it"),
        (["--mode=settings", "Update", "--find=y"], "give NAME or --find WORD, not both"),
    ],
)
def test_flags_that_do_not_go_together(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
