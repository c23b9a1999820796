"""What is wrong is said at once, at its line, with the nearest right name, and nothing is made."""

import fake_experiment as fake
import pytest

from m6jax import configuration
from m6jax.foundation.validated import ConfigError

# Lines 1 and 2 of every file are its imports, so line 3 is the empty first one here.
EXPERIMENT = """
fake.Experiment.model = @fake.Model()
fake.Experiment.batch_size = %BATCH
fake.Model.layers = 4
"""


def test_misspelt_macro(problems):
    assert problems(EXPERIMENT + "BATCHS = 8\n") == [
        "run.gin:7: macro BATCHS = 8 is never used (did you mean 'BATCH'?)",
        "run.gin:5: Experiment.batch_size uses %BATCH, which is not defined (did you mean"
        " 'BATCHS'?); define BATCH = ... (or BATCH = %gin.REQUIRED, to be given on the command"
        " line)",
    ]


def test_macro_misspelt_on_the_command_line(problems):
    assert problems(EXPERIMENT + "BATCH = 8\n", "BACH=16") == [
        "--gin.BACH=16: macro BACH = 16 is never used (did you mean 'BATCH'?)"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "fake.Experimnt.name = 'x'",
            "fake_experiment has no 'Experimnt' (did you mean 'Experiment'?)",
        ),
        (
            "fake.Experiment.bach_size = 8",
            "Experiment has no field 'bach_size' (did you mean 'batch_size'?)",
        ),
        (
            "fakee.Model.width = 8",
            "no import of this file gives 'fakee': import fake_experiment"
            " for fake_experiment.Model",
        ),
        (
            "Model.width = 8",
            "no import of this file gives 'Model': import fake_experiment"
            " for fake_experiment.Model",
        ),
        ("fakee.Foo.width = 8", "no import of this file gives 'fakee' (did you mean 'fake'?)"),
        ("fake.double.x = 8", "'fake.double' is not a settings class: it has nothing to set"),
        ("fake.Model = 8", "'fake' is not a settings class: it has nothing to set"),
        (
            "fake.Experiment.optimizer = @fake.Adm()",
            "@fake.Adm(): fake_experiment has no 'Adm' (did you mean 'Adam'?)",
        ),
        (
            "fake.Experiment.optimizer = @fake.Adam",
            "@fake.Adam: a settings class needs parentheses: @fake.Adam()",
        ),
        (
            "fake.Experiment.activation = @fake.double()",
            "@fake.double(): fake_experiment.double is not a settings class, and gin calls"
            " only those here; where a setting takes a function, give it without parentheses; to"
            " give what a call of it returns, wrap the call in a function of a module of your own",
        ),
        (
            "fake.Experiment.activation = @scope/fake.double",
            "@scope/fake.double: without parentheses only a function without a scope can be given",
        ),
    ],
)
def test_unknown_names(problems, line, message):
    assert problems(EXPERIMENT + f"BATCH = 8\n{line}\n") == [f"run.gin:8: {message}"]


def test_unknown_names_on_the_command_line(problems):
    text = EXPERIMENT + "BATCH = 8\n"
    assert problems(text, "Modell.width=8", "Model.widht=8", "Experiment.optimizer=@Adan()") == [
        "--gin.Modell.width=8: there is no class 'Modell' (did you mean 'Model'?)",
        "--gin.Model.widht=8: Model has no field 'widht' (did you mean 'width'?)",
        "--gin.Experiment.optimizer=@Adan(): @Adan(): there is no class 'Adan' (did you mean"
        " 'Adam'?)",
    ]


def test_a_name_of_two_classes_on_the_command_line(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from m6jax.foundation.validated import validated\n"
        "@validated\nclass Adam:\n  rate: int = 1\n"
    )
    (tmp_path / "two_adams.py").write_text(source)
    first = write(EXPERIMENT + "BATCH = 8\n")
    second = write("import two_adams\ntwo_adams.Adam.rate = 3\n", "second.gin")
    with pytest.raises(ConfigError) as error:
        configuration.load([first, second], ["Adam.rate=2"], root=fake.Experiment)
    assert str(error.value).splitlines()[0] == (
        "--gin.Adam.rate=2: 'Adam' may be fake_experiment.Adam or two_adams.Adam: say which"
    )


def test_settings_that_nothing_uses(problems):
    text = (
        EXPERIMENT
        + """BATCH = 8
fake.Adafactor.clip = None
fake.Experiment.stages = (@first/fake.Stage(), @second/fake.Stage())
fake.Stage.unit = 1
secnd/fake.Stage.steps = 3
OPTIMIZER = @other/fake.Adafactor()
other/fake.Adafactor.rate = %RATE
RATE = 3.0
"""
    )
    assert problems(text) == [
        "run.gin:12: macro OPTIMIZER = @other/Adafactor() is never used (choices: BATCH)",
        "run.gin:14: RATE = 3.0 is never used: only other/Adafactor.rate at run.gin:13 refers to"
        " it, itself never used",
        "run.gin:8: Adafactor.clip = None is never used: only OPTIMIZER at run.gin:12 refers to"
        " it, itself never used",
        "run.gin:13: other/Adafactor.rate = %RATE is never used: only OPTIMIZER at run.gin:12"
        " refers to it, itself never used",
        "run.gin:11: secnd/Stage.steps = 3 is never used: nothing refers to @secnd/Stage() (did"
        " you mean '@second/Stage()'?)",
    ]


def test_settings_of_a_class_that_nothing_makes(problems):
    assert problems(EXPERIMENT + "BATCH = 8\nfake.Adafactor.clip = None\n") == [
        "run.gin:8: Adafactor.clip = None is never used: nothing refers to @Adafactor() (it would"
        " be by Experiment.optimizer = @Adafactor())"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "BATCH = '8'",
            "run.gin:7: Experiment.batch_size: expected int, got '8' (str) (did you"
            " mean 8?) (as %BATCH at run.gin:5)",
        ),
        (
            "BATCH = %SIZE\nSIZE = 8.5",
            "run.gin:8: Experiment.batch_size: expected int, got 8.5"
            " (float) (as %BATCH at run.gin:5)",
        ),
        (
            "BATCH = 8\nfake.Experiment.loss = 'men'",
            "run.gin:8: Experiment.loss: 'men' is not allowed (did you mean 'mean'?)",
        ),
        (
            "BATCH = 8\nfake.Model.form = 'STACKD'",
            "run.gin:8: Model.form: 'STACKD' is not a Form (did you mean 'STACKED'?)",
        ),
        (
            "BATCH = 8\nfake.Experiment.optimizer = @fake.Model()",
            "run.gin:8: Experiment.optimizer: expected Adam | Adafactor, got Model(...)",
        ),
        (
            "BATCH = 8\nfake.Experiment.rules = {'a': (%A,)}\nA = 3",
            "run.gin:8: Experiment.rules:"
            " expected dict[str, tuple[str, ...]] | None, got {'a': (3,)} (dict) (%A from"
            " run.gin:9)",
        ),
    ],
)
def test_wrong_types(problems, text, message):
    assert problems(EXPERIMENT + text + "\n") == [message]


def test_wrong_type_on_the_command_line(problems):
    assert problems(EXPERIMENT + "BATCH = 8\n", "Experiment.microbatches='2'") == [
        "--gin.Experiment.microbatches='2': Experiment.microbatches: expected int, got '2' (str)"
        " (did you mean 2?)"
    ]


def test_required_values(problems):
    text = EXPERIMENT + "BATCH = %gin.REQUIRED\nfake.Experiment.name = %REQUIRED\n"
    assert problems(text) == [
        "run.gin:7: BATCH (used by Experiment.batch_size) must be given: set it in a file or with"
        " --gin.BATCH=VALUE (int)",
        "run.gin:8: Experiment.name must be given: set it in a file or with"
        " --gin.Experiment.name='\"TEXT\"' (str)",
    ]


def test_fields_without_a_default(problems):
    text = "fake.Experiment.stages = (@one/fake.Stage(),)\none/fake.Stage.steps = 3\n"
    assert problems(text) == [
        "Experiment.model has no value: set it in a file or with"
        " --gin.Experiment.model=@Model() (Model)",
        "Experiment.batch_size has no value: set it in a file or with"
        " --gin.Experiment.batch_size=VALUE (int)",
        "one/Stage.unit has no value (needed for Experiment.stages at run.gin:3): set it in a file"
        " or with --gin.one/Stage.unit=VALUE (int)",
    ]


def test_what_a_class_refuses_names_where_its_fields_were_set(problems):
    assert problems(EXPERIMENT + "BATCH = 8\n", "Experiment.microbatches=3") == [
        "Experiment.microbatches: 3 do not divide a batch of 8 [batch_size"
        " from run.gin:7; microbatches from --gin.Experiment.microbatches=3]"
    ]


def test_a_refusal_that_names_no_field_names_all_places(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stubborn_settings.py").write_text(
        "from m6jax.foundation.validated import ConfigError, validated\n"
        "@validated\nclass Stubborn:\n  rate: int\n  size: int\n"
        "  def check(self):\n    raise ConfigError('not like this')\n"
    )
    from stubborn_settings import Stubborn

    path = write("import stubborn_settings as my\nSIZE = 1\nmy.Stubborn.size = %SIZE\n")
    with pytest.raises(ConfigError) as error:
        configuration.load([path], ["Stubborn.rate=2"], root=Stubborn)
    assert (
        str(error.value) == "not like this [size from run.gin:4; rate from --gin.Stubborn.rate=2]"
    )


def test_a_default_that_is_refused(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from m6jax.foundation.validated import validated\n"
        "@validated\nclass Bad:\n  rate: int = 'x'\n"
    )
    (tmp_path / "bad_default.py").write_text(source)
    import bad_default

    with pytest.raises(ConfigError) as error:
        configuration.load([], root=bad_default.Bad)
    assert str(error.value) == "Bad.rate: expected int, got 'x' (str) [all defaults]"


def test_circles(problems):
    text = EXPERIMENT + "BATCH = (%B,)\nB = %BATCH\n"
    assert problems(text) == ["run.gin:8: B = %BATCH leads back to itself"]


def test_an_object_cannot_contain_itself(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "endless_settings.py").write_text(
        "from m6jax.foundation.validated import validated\n"
        ""
        "@validated\nclass Tree:\n  below: 'Tree | None' = None\n"
    )
    from endless_settings import Tree

    path = write("import endless_settings as my\nmy.Tree.below = @my.Tree()\n")
    with pytest.raises(ConfigError) as error:
        configuration.load([path], root=Tree)
    assert str(error.value) == "run.gin:4: Tree.below = @Tree() leads back to itself"


def test_several_problems_are_told_at_once_and_nothing_is_made(problems, monkeypatch):
    monkeypatch.setattr(fake.Experiment, "check", lambda self: pytest.fail("made"))
    text = (
        EXPERIMENT
        + """BATCHS = 8
fake.Experiment.modle = @fake.Adafactor()
fake.Adafactor.clip = 3
fake.Model.width = '8'
fake.Model.dropout = %gin.REQUIRED
"""
    )
    starts = [line.partition(" (")[0] for line in problems(text, "Experiment.naem=3")]
    assert starts == [
        "run.gin:8: Experiment has no field 'modle'",
        "--gin.Experiment.naem=3: Experiment has no field 'naem'",
        "run.gin:7: macro BATCHS = 8 is never used",
        "run.gin:5: Experiment.batch_size uses %BATCH, which is not defined",
        "run.gin:10: Model.width: expected int, got '8'",
        "run.gin:11: Model.dropout must be given: set it in a file or with"
        " --gin.Model.dropout=VALUE",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A = 1\nB = (1,\n", ":"),
        ("A = true", ":3: 'true' is not a value (did you mean 'True'?)"),
        ("A = -inf", ":3: '-inf' is not a value in gin (write 1e999 for infinity)"),
        ("A = text", ":3: 'text' is not a value (a text needs quotes, a macro %, a class @)"),
        ("A = 1 2", ":3: not valid gin: Expected newline."),
        (
            "from m6jax import data, training",
            ":3: one name for each import: 'from m6jax import data' and"
            " 'from m6jax import training', each on a line of its own",
        ),
        ("A", ":3: not valid gin: Couldn't parse statement, expected ':' or '='."),
        (
            "fake.Model:\n  width = 1\n layers = 2",
            ":5: not valid gin: unindent does not match any outer indentation level",
        ),
        ("A = {[1]: 2}", ":3: not valid gin: unhashable type: 'list'"),
    ],
)
def test_syntax_errors(problems, text, message):
    (line,) = problems(text + "\n")
    assert line.startswith(f"run.gin{message}")


def test_an_open_bracket(problems):
    (line,) = problems("A = 1\nB = (1,\n")
    assert line.endswith("(a bracket or quote is opened and not closed)")


def test_syntax_errors_on_the_command_line(problems):
    text = EXPERIMENT + "BATCH = 8\n"
    assert problems(text, "Experiment.name=/tmp/x", "BATCH", "import os", "BATCH=1\nBATCH=2") == [
        "--gin.Experiment.name=/tmp/x: not valid gin: Unable to parse value.; if it is a text,"
        " quote it twice: --gin.Experiment.name='\"/tmp/x\"'",
        "--gin.BATCH: expected --gin.NAME=VALUE",
        "--gin.import os: expected one binding, --gin.NAME=VALUE",
        "--gin.BATCH=1\\nBATCH=2: expected one binding, --gin.NAME=VALUE",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "import fake_experimet",
            "there is no module 'fake_experimet' (did you mean 'fake_experiment'?)",
        ),
        (
            "from m6jax.foundation import validate",
            "there is no module 'm6jax.foundation.validate' (did you mean 'validated'?)",
        ),
        (
            "from fake_experiment import Model",
            "gin imports only modules: import fake_experiment and write fake_experiment.Model",
        ),
        ("import needs_more", "importing needs_more failed: No module named 'not_installed'"),
        (
            "from __gin__ import magic",
            "gin has no '__gin__.magic', only '__gin__.dynamic_registration'",
        ),
    ],
)
def test_imports_that_fail(problems, line, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import not_installed\n")
    name = line.split()[-1]
    text = f"{line}\n{name}.Model.width = 8\nfake.Experiment.optimizer = @{name}.Adam()\n"
    assert problems(text) == [f"run.gin:3: {message}"]


def test_imports_need_dynamic_registration(write):
    path = write("import fake_experiment\nfake_experiment.Model.width = 8\n", header="")
    with pytest.raises(ConfigError) as error:
        configuration.load([path], root=fake.Experiment)
    assert str(error.value) == (
        "run.gin:1: put 'from __gin__ import dynamic_registration' above the first import"
    )


def test_missing_files(write, tmp_path):
    write("", "configs/models/tiny.gin")
    path = write("include 'configs/models/tin.gin'\n")
    with pytest.raises(ConfigError) as error:
        configuration.load([path, "/nowhere/x.gin"], search_paths=["other"], root=fake.Experiment)
    first, second = str(error.value).splitlines()
    assert first.startswith(
        "run.gin:3: include configs/models/tin.gin: no such file (did you mean"
        f" 'configs/models/tiny.gin'?); searched {tmp_path}, {tmp_path}/other, "
    )
    assert second == "/nowhere/x.gin: no such file"


def test_files_that_cannot_be_read(write, tmp_path):
    (tmp_path / "latin.gin").write_bytes(b"A = '\xe9'\n")
    write("include 'run.gin'\n", "loop.gin")
    path = write("include 'latin.gin'\ninclude 'loop.gin'\n")
    with pytest.raises(ConfigError) as error:
        configuration.load([path], root=fake.Experiment)
    first, second = str(error.value).splitlines()
    assert first.startswith("run.gin:3: include latin.gin: cannot be read: 'utf-8' codec")
    assert second == ("loop.gin:3: include run.gin: being read already, it would include itself")
