"""An object written to gin text and read back is the same object, to the last bit."""

import math
import struct

import fake_experiment as fake
import gin
import pytest

from m6jax import configuration, training
from m6jax.foundation.validated import ConfigError, validated

STAGES = (
    fake.Stage(unit=1, optimizer=fake.Adam(rate=0.1)),
    fake.Stage(unit=4, optimizer=fake.Adafactor(clip=None)),
    fake.Stage(unit=1, optimizer=fake.Adam(rate=0.1)),
    fake.Stage(unit=1, optimizer=fake.Adam(rate=0.1, betas=(0, 1))),
)
EXPERIMENT = fake.Experiment(
    model=fake.Model(layers=4, form=fake.Form.UNROLLED),
    batch_size=8,
    name='two words, "quotes", \'\n\\, 中文',
    stages=STAGES,
    rules={"embed": (), "mlp": ("model", "data"), "a long name to fill the line": ("expert",)},
    mixture={"en": fake.Adam(), "zh": fake.Adam(rate=0.1)},
    activation=fake.double,
)

TEXT = """\
# Every setting of a run, written by m6jax.

from __gin__ import dynamic_registration
import fake_experiment

MODEL_DIR = '/tmp/run'

fake_experiment.Experiment.model = @fake_experiment.Model()
fake_experiment.Experiment.batch_size = 8
fake_experiment.Experiment.microbatches = 1
fake_experiment.Experiment.name = 'run'
fake_experiment.Experiment.stages = (
    @stages_0/fake_experiment.Stage(),
    @stages_1/fake_experiment.Stage()
)
fake_experiment.Experiment.optimizer = @fake_experiment.Adam()
fake_experiment.Experiment.rules = None
fake_experiment.Experiment.mixture = None
fake_experiment.Experiment.loss = 'mean'
fake_experiment.Experiment.activation = None
fake_experiment.Experiment.model_dir = %MODEL_DIR

fake_experiment.Model.layers = 4
fake_experiment.Model.width = 64
fake_experiment.Model.form = 'STACKED'
fake_experiment.Model.dropout = None

fake_experiment.Adam.rate = 0.001
fake_experiment.Adam.betas = (0.9, 0.999)

stages_0/fake_experiment.Stage.unit = 1
stages_0/fake_experiment.Stage.steps = 10
stages_0/fake_experiment.Stage.optimizer = @fake_experiment.Adam()

stages_1/fake_experiment.Stage.unit = 4
stages_1/fake_experiment.Stage.steps = 10
stages_1/fake_experiment.Stage.optimizer = @fake_experiment.Adam()
"""


def reload(write, text, root=fake.Experiment):
    return configuration.load([write(text, header="")], root=root)


def test_text_of_an_experiment(write):
    value = fake.Experiment(
        model=fake.Model(layers=4),
        batch_size=8,
        stages=(fake.Stage(unit=1), fake.Stage(unit=4)),
        model_dir="/tmp/run",
    )
    macros = {"MODEL_DIR": "Experiment.model_dir"}
    assert configuration.to_gin(value, macros) == TEXT
    path = write(TEXT, header="")
    elsewhere = configuration.load(
        [path], ["MODEL_DIR='/tmp/other'"], root=fake.Experiment, macros=macros
    )
    assert elsewhere.value.model_dir == "/tmp/other"
    assert elsewhere.text == TEXT.replace("/tmp/run", "/tmp/other")


def test_round_trip(write):
    text = configuration.to_gin(EXPERIMENT)
    again = reload(write, text)
    assert again.value == EXPERIMENT
    assert again.text == text
    assert max(map(len, text.splitlines())) <= 100


def test_gin_reads_the_text_too(write):
    path = write(configuration.to_gin(EXPERIMENT), header="")
    gin.parse_config_file(path)
    try:
        theirs = gin.get_configurable(fake.Experiment)()
    finally:
        gin.clear_config()
    assert {**vars(theirs), "activation": None} == {**vars(EXPERIMENT), "activation": None}


@pytest.mark.parametrize(
    "number", [0.1, 1 / 3, 1e-300, 5e-324, 1.7976931348623157e308, 0.0, -0.0, -2.5e-7, 1e22, 8]
)
def test_floats_are_exact(write, number):
    again = reload(write, configuration.to_gin(fake.Adam(rate=number)), root=fake.Adam)
    assert struct.pack("d", again.value.rate) == struct.pack("d", number)


def test_infinities(write):
    value = fake.Adam(betas=(math.inf, -math.inf))
    assert reload(write, configuration.to_gin(value), root=fake.Adam).value == value


def test_zeros_of_either_sign_are_two_objects(write):
    value = fake.Experiment(
        model=fake.Model(layers=1),
        batch_size=1,
        mixture={"a": fake.Adam(rate=0.0), "b": fake.Adam(rate=-0.0)},
    )
    again = reload(write, configuration.to_gin(value)).value
    signs = [math.copysign(1, adam.rate) for adam in again.mixture.values()]
    assert signs == [1, -1]


def test_modules_of_one_name_get_aliases(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from m6jax.foundation.validated import validated\n@validated\nclass {}:\n  size: int = 1\n"
    )
    for package, name in (("left_package", "Inner"), ("right_package", "Other")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "config.py").write_text(source.format(name))
    with open(tmp_path / "left_package" / "config.py", "a") as file:
        file.write(
            "from right_package.config import Other\n@validated\nclass Outer:\n"
            "  inner: Inner = Inner()\n  others: list = (Other(),)\n".replace("list", "tuple")
        )
    from left_package import config

    value = config.Outer(inner=config.Inner(size=3))
    text = configuration.to_gin(value)
    assert text.splitlines()[3:5] == [
        "from left_package import config as left_package_config",
        "from right_package import config as right_package_config",
    ]
    assert reload(write, text, root=config.Outer).value == value


def test_an_object_within_one_of_its_own_class(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tree_settings.py").write_text(
        "from m6jax.foundation.validated import validated\n"
        ""
        "@validated\nclass Tree:\n  size: int\n  below: 'Tree | None' = None\n"
        "@validated\nclass Empty:\n  pass\n"
    )
    from tree_settings import Empty, Tree

    value = Tree(size=1, below=Tree(size=2, below=Tree(size=3)))
    text = configuration.to_gin(value)
    assert "below/below/tree_settings.Tree.size = 3" in text
    assert reload(write, text, root=Tree).value == value
    assert reload(write, configuration.to_gin(Empty()), root=Empty).value == Empty()


@pytest.mark.parametrize("function", [lambda x: x, math.sqrt.__call__])
def test_functions_without_a_name_cannot_be_written(function):
    value = fake.Experiment(model=fake.Model(layers=1), batch_size=1, activation=function)
    with pytest.raises(ConfigError, match=r"^Experiment\.activation: .* cannot be written"):
        configuration.to_gin(value)


def test_classes_without_a_module_name_cannot_be_written():
    @validated
    class Local:
        size: int = 1

    with pytest.raises(ConfigError, match=r"^Local: .* cannot be written"):
        configuration.to_gin(Local())


def test_nan_cannot_be_written():
    with pytest.raises(ConfigError, match=r"Adam\.rate: NaN cannot be written"):
        configuration.to_gin(fake.Adam(rate=math.nan))


def test_only_objects_of_settings_classes_are_described():
    with pytest.raises(TypeError, match="3 is not an object of a settings class"):
        configuration.to_gin(3)


def test_macro_for_a_field_that_is_not_there():
    with pytest.raises(ConfigError, match=r"Adam has no field .*'Adam\.dir': 'DIR'"):
        configuration.to_gin(fake.Adam(), {"DIR": "Adam.dir"})


def test_classes_are_written_by_the_name_that_their_package_exports(write):
    update = training.Update(clip_norm=0.5)
    text = configuration.to_gin(update)
    assert "from m6jax import training" in text.splitlines()
    assert "training.Update.clip_norm = 0.5" in text.splitlines()
    assert reload(write, text, root=training.Update).value == update
