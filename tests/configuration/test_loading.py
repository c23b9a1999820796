"""From gin files to objects: what wins, where files are found, and that nothing is left behind."""

import fake_experiment as fake
import gin
import pytest

from m6jax import configuration
from m6jax.foundation.validated import ConfigError

EXPERIMENT = """
fake.Experiment.model = @fake.Model()
fake.Experiment.batch_size = 8
fake.Model.layers = 4
"""

EVERYTHING = """
BATCH = 8
MODEL = @fake.Model()
fake.Experiment:
  model = %MODEL
  batch_size = %BATCH
  name = ("two "
          "parts")
  stages = (@first/fake.Stage(), @second/last/fake.Stage(), @fake.Stage())
  rules = {'embed': [], 'mlp': ('model', 'data')}
  mixture = {'en': @fake.Adam(), 'zh': @second/fake.Adam()}
  loss = 'sum'
  activation = @fake.double
fake.Model.layers = 4
fake.Model.form = 'UNROLLED'
MODEL/fake.Model.width = %deep/WIDTH
deep/WIDTH = 32
fake.Stage.unit = 1
fake.Stage.steps = %BATCH
fake.Stage.optimizer = @fake.Adam()
first/fake.Stage.steps = -3
second/fake.Stage.unit = 2
second/last/fake.Stage.steps = 30
fake.Adam.rate = 1e-2
second/fake.Adam.rate = 3
"""


def test_a_file_describes_an_object(load):
    assert load(EXPERIMENT) == fake.Experiment(model=fake.Model(layers=4), batch_size=8)


def test_values_scopes_and_macros_mean_what_they_mean_to_gin(write):
    path = write(EVERYTHING)
    ours = configuration.load([path], root=fake.Experiment).value
    gin.parse_config_file(path)
    try:
        theirs = gin.get_configurable(fake.Experiment)()
    finally:
        gin.clear_config()
    # gin gives a wrapper of its own in place of the plain function
    assert ours.activation is fake.double
    assert theirs.activation(4.0) == 8.0
    assert {**vars(ours), "activation": None} == {**vars(theirs), "activation": None}
    second = ours.stages[1]  # its optimizer, too, is made in scope second/last
    assert (second.unit, second.steps, second.optimizer.rate) == (2, 30, 3.0)
    assert (ours.model.width, ours.stages[0].steps) == (32, -3)


def test_later_file_wins_and_both_places_are_logged(write, caplog):
    first = write("BATCH = 8\n" + EXPERIMENT.replace("= 8", "= %BATCH"), "first.gin")
    second = write("BATCH = 16\nfake.Model.layers = 4\n", "second.gin")
    loaded = configuration.load([first, second], root=fake.Experiment)
    assert loaded.value.batch_size == 16
    assert caplog.messages == ["second.gin:3: BATCH = 16 replaces 8 of first.gin:3"]
    assert caplog.records[0].levelname == "WARNING"


def test_including_file_and_command_line_override_in_silence(write, caplog):
    write(EXPERIMENT, "deep/base.gin")
    write("include 'base.gin'\nfake.Model.width = 32\n", "deep/model.gin")
    run = write("include 'deep/model.gin'\nfake.Model.layers = 6\nfake.Model.width = 16\n")
    value = configuration.load([run], ["Model.width=128"], root=fake.Experiment).value
    assert (value.model.layers, value.model.width) == (6, 128)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A = 1\nA = 2\n", "run.gin:4: A = 2 replaces 1 of run.gin:3"),
        ("A = 1\ninclude 'two.gin'\n", "two.gin:3: A = 2 replaces 1 of run.gin:3"),
        ("include 'two.gin'\ninclude 'three.gin'", "three.gin:3: A = 3 replaces 2 of two.gin:3"),
    ],
)
def test_other_changes_of_mind_are_logged(write, caplog, text, message):
    write("A = 2\n", "two.gin")
    write("A = 3\n", "three.gin")
    path = write(text + EXPERIMENT.replace("8", "%A"))
    configuration.load([path], root=fake.Experiment)
    assert caplog.messages == [message]


def test_what_must_be_given_may_be_given_by_another_file(write, caplog):
    first = write(EXPERIMENT + "fake.Experiment.name = %gin.REQUIRED\n", "first.gin")
    second = write("fake.Experiment.name = 'given'\n", "second.gin")
    assert configuration.load([first, second], root=fake.Experiment).value.name == "given"
    assert caplog.messages == []


def test_files_are_found_beside_the_including_file_and_in_search_paths(write, tmp_path):
    write("fake.Model.layers = 1\n", "configs/models/tiny.gin")
    write("fake.Model.layers = 2\n", "configs/runs/tiny.gin")
    text = EXPERIMENT.replace("fake.Model.layers = 4", "include '{}'")
    write(text.format("tiny.gin"), "configs/runs/beside.gin")
    write(text.format("models/tiny.gin"), "configs/runs/below.gin")

    def layers(path, *search_paths):
        loaded = configuration.load([path], search_paths=search_paths, root=fake.Experiment)
        return loaded.value.model.layers

    assert layers("configs/runs/beside.gin") == 2
    assert layers("runs/below.gin", tmp_path / "configs") == 1
    assert layers(tmp_path / "configs/runs/beside.gin") == 2


def test_a_byte_order_mark_is_no_text_and_a_tilde_is_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = EXPERIMENT.replace("fake.Model.layers = 4", "include '~/tiny.gin'")
    header = "\ufefffrom __gin__ import dynamic_registration\nimport fake_experiment as fake\n"
    write("fake.Model.layers = 3\n", "tiny.gin", header)
    write("fake.Model.layers = 5\n", "there/other.gin")
    write(text, "deep/run.gin")
    other = EXPERIMENT.replace("fake.Model.layers = 4", "include 'other.gin'")
    write(other, "deep/other_run.gin")

    def layers(path, *search_paths):
        loaded = configuration.load([path], search_paths=search_paths, root=fake.Experiment)
        return loaded.value.model.layers

    assert layers("~/deep/run.gin") == 3
    assert layers("deep/other_run.gin", "~/there") == 5


def test_command_line_knows_names_of_the_files_and_ends_of_class_names(load):
    text = EXPERIMENT + "fake.Experiment.stages = (@one/fake.Stage(),)\n"
    value = load(
        text,
        "fake.Experiment.batch_size = 2",
        "fake_experiment.Experiment.name='x'",
        "Experiment.optimizer=@Adafactor()",
        "Adafactor.clip=None",
        "one/Stage.unit=3",
    )
    assert (value.batch_size, value.name) == (2, "x")
    assert value.optimizer == fake.Adafactor(clip=None)
    assert value.stages == (fake.Stage(unit=3),)


def test_command_line_may_replace_a_class_whose_settings_the_file_has(load):
    text = EXPERIMENT + "fake.Experiment.optimizer = @fake.Adam()\nfake.Adam.rate = %RATE\nRATE = 1"
    assert load(text).optimizer == fake.Adam(rate=1.0)
    assert load(text, "Experiment.optimizer=@Adafactor()").optimizer == fake.Adafactor()


def test_what_only_another_mode_needs_is_no_error(write):
    path = write(EXPERIMENT + "fake.Inference.adam = @fake.Adam()\nfake.Adam.rate = 2.0\n")
    modes = [fake.Experiment, fake.Inference]
    assert configuration.load([path], root=fake.Experiment, roots=modes).value.batch_size == 8
    with pytest.raises(ConfigError, match=r"Adam\.rate = 2\.0 is never used"):
        configuration.load([path], root=fake.Experiment)


def test_loads_do_not_leak_into_each_other(write, load, problems, monkeypatch, tmp_path):
    assert load(EXPERIMENT + "fake.Model.width = 32\n").model.width == 32
    assert problems(EXPERIMENT + "MISSPELT = 1\n")
    assert load(EXPERIMENT).model.width == 64
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "other_settings.py").write_text(
        "from m6jax.foundation.validated import validated\n"
        "@validated\nclass Experiment:\n  batch_size: int\n"
    )
    import other_settings

    path = write("import other_settings as fake\nfake.Experiment.batch_size = 3\n")
    value = configuration.load([path], root=other_settings.Experiment).value
    assert value == other_settings.Experiment(batch_size=3)
    assert gin.config_str() == ""
    assert not gin.config_is_locked()
