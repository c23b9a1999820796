"""What processes refuse when they do not see or have the same, with the others' answers given."""

import pytest
import runs

from m6jax import processes
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.foundation.validated import ConfigError
from m6jax.processes import Group
from m6jax.run import same_everywhere
from m6jax.run.position import newest_step


class Three(Group):
    """A group whose other two processes answer what `others` makes of the own answer."""

    def __init__(self, others):
        super().__init__()
        self.count = 3
        self._others = others

    def gather(self, value):
        return [value, *self._others(value)]


class Steps:
    def __init__(self, *steps):
        self._steps = list(steps)

    def steps(self):
        return self._steps

    def latest(self):
        return self._steps[-1] if self._steps else None


@pytest.mark.parametrize(
    ("steps", "message"),
    [(Steps(3, 6), "process 0 sees checkpoint 6"), (Steps(), "process 0 sees no checkpoint")],
)
def test_directories_that_are_not_shared(steps, message):
    def last_sees_not(value):
        return [value, False if value is True else value]

    with pytest.raises(ConfigError, match=f"{message} in runs/a and process 2 sees something else"):
        newest_step(Three(last_sees_not), steps, "runs/a")
    assert newest_step(Group(), steps, "runs/a") == steps.latest()


def test_versions_that_differ_are_named_with_their_processes(text, tmp_path):
    def last_is_older(value):
        if isinstance(value, dict):
            return [value, value | {"version of jax": "0.1"}]
        return [value, f"not {value}"]

    with pytest.raises(ConfigError, match=r"version of jax: .* in processes 0, 1; 0\.1 in process"):
        same_everywhere.check_settings(Three(last_is_older), runs.experiment(text, tmp_path))


def test_several_processes_do_not_convert(text, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "current", lambda: Three(lambda value: [value, value]))
    with pytest.raises(ConfigError, match=r"--mode=delink: .* 3 would write the same files"):
        convert(runs.experiment(text, tmp_path), Conversion(source="runs/a"), LayoutChange.DELINK)
