"""Differences of two resolved texts are told by their place, whatever the scopes are called."""

import dataclasses

import fake_experiment as fake
import pytest
import runs

from m6jax.configuration import adjustable, compare, defaults, to_gin
from m6jax.experiment import Experiment
from m6jax.experiment.model_dir import ModelDir
from m6jax.foundation.validated import ConfigError

EXPERIMENT = fake.Experiment(
    model=fake.Model(layers=4),
    batch_size=8,
    stages=(fake.Stage(unit=1), fake.Stage(unit=4)),
    mixture={"en": fake.Adam(), "zh": fake.Adam(rate=3.0)},
    model_dir="/tmp/run",
)


def differences(ignore=(), **changes):
    later = dataclasses.replace(EXPERIMENT, **changes)
    return compare(to_gin(EXPERIMENT), to_gin(later), ignore)


def test_equal_objects_do_not_differ():
    assert differences() == []


def test_a_macro_counts_by_its_value():
    macros = {"MODEL_DIR": "Experiment.model_dir"}
    assert compare(to_gin(EXPERIMENT), to_gin(EXPERIMENT, macros)) == []


def test_differences_name_the_place_and_both_values():
    assert differences(
        model=fake.Model(layers=6, dropout=0.5),
        batch_size=16,
        stages=(fake.Stage(unit=2), fake.Stage(unit=4)),
        mixture={"en": fake.Adam(betas=(0.5, 0.5)), "zh": fake.Adam(rate=3.0)},
        optimizer=fake.Adafactor(),
        rules={"embed": ()},
    ) == [
        "Experiment.model.layers: 4 became 6",
        "Experiment.model.dropout: None became 0.5",
        "Experiment.batch_size: 8 became 16",
        "Experiment.stages[0].unit: 1 became 2",
        "Experiment.optimizer: @Adam() became @Adafactor()",
        "Experiment.rules: None became {'embed': ()}",
        "Experiment.mixture['en'].betas: (0.9, 0.999) became (0.5, 0.5)",
    ]


def test_more_objects_are_one_difference():
    assert differences(stages=(fake.Stage(unit=1),)) == [
        "Experiment.stages: (@Stage(), @Stage()) became (@Stage(),)"
    ]


def test_ignored_fields_and_what_is_below_them():
    changes = {"model": fake.Model(layers=6), "model_dir": "/tmp/other", "batch_size": 2}
    ignore = {"Experiment.model_dir", "Experiment.model"}
    assert differences(ignore, **changes) == ["Experiment.batch_size: 8 became 2"]
    assert differences({"Model.layers"}, model=fake.Model(layers=6)) == []


def test_fields_that_one_text_lacks():
    earlier = "a.Run.size = 1\na.Run.old = @b.Part()\nb.Part.x = %UNKNOWN\n"
    later = "c.Run.size = 1\nc.Run.new = 2\n"
    assert compare(earlier, later) == [
        "Run.old: @Part() became (not set)",
        "Run.new: (not set) became 2",
    ]


OLDER = """
import fake_experiment as then

then.Experiment.model = @then.Model()
then.Experiment.batch_size = 8
then.Experiment.stages = (@a/then.Stage(), @b/then.Stage())
then.Experiment.activation = @then.double
then.Model.layers = 4
a/then.Stage.unit = 1
b/then.Stage.unit = 4
"""  # of a run begun before there were the fields that it lacks


def since_older(**changes):
    later = fake.Experiment(
        model=fake.Model(layers=4),
        batch_size=8,
        stages=(fake.Stage(unit=1), fake.Stage(unit=4)),
        activation=fake.double,
    )
    text = to_gin(dataclasses.replace(later, **changes))
    return compare(OLDER, text, defaults=defaults(fake.Experiment))


def test_a_field_that_an_older_text_lacks_has_its_default():
    assert since_older() == []


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"loss": "sum"}, "loss: 'mean' became 'sum'"),
        ({"optimizer": fake.Adam(rate=1.0)}, "optimizer.rate: 0.001 became 1.0"),
        ({"optimizer": fake.Adafactor()}, "optimizer: @Adam() became @Adafactor()"),
        ({"mixture": {"en": fake.Adam()}}, "mixture: None became {'en': @Adam()}"),
        ({"activation": max}, "activation: @fake_experiment.double became @builtins.max"),
        ({"model": fake.Model(layers=4, form="UNROLLED")}, "model.form: 'STACKED' became 'UNRO"),
        ({"model": fake.Model(layers=4, dropout=0.1)}, "model.dropout: None became 0.1"),
    ],
)
def test_a_field_that_an_older_text_lacks_and_that_is_not_its_default(changes, difference):
    (found,) = since_older(**changes)
    assert found.startswith(f"Experiment.{difference}")


def test_an_older_run_is_resumed(tmp_path):
    now = runs.experiment(runs.write_text(tmp_path), tmp_path)
    directory = ModelDir(str(tmp_path))
    directory.claim(now)
    config = tmp_path / "config.gin"
    newer = {"Stage.measured_batches", "TextData.held_out", "Update.rounding"}
    newer |= {"ModelConfig.gated_mlp"}
    older = [line for line in config.read_text().splitlines() if not newer & _fields(line)]
    assert len(older) == len(config.read_text().splitlines()) - len(newer) - 1  # two stages
    config.write_text("\n".join(older))
    directory.check_same(now)
    changed = dataclasses.replace(now, model=dataclasses.replace(now.model, gated_mlp=True))
    with pytest.raises(ConfigError, match=r"Experiment\.model\.gated_mlp: False became True"):
        directory.check_same(changed)


def _fields(line):
    """Returns `Class.field` of an assignment."""
    return {".".join(line.partition(" = ")[0].split(".")[-2:])}


def test_what_is_no_configuration():
    with pytest.raises(ConfigError, match="the earlier configuration sets nothing"):
        compare("", "a.Run.size = 1\n")
    with pytest.raises(ConfigError, match="the later configuration:1: not valid gin"):
        compare("a.Run.size = 1\n", "a.Run.size\n")


def test_adjustable_fields_may_differ():
    ignore = adjustable(fake.Experiment)
    assert ignore == {"Experiment.model_dir", "Stage.steps"}
    stages = (fake.Stage(unit=1, steps=20), fake.Stage(unit=4))
    assert differences(ignore, model_dir="/tmp/other", stages=stages) == []


def test_what_a_run_may_change_when_it_is_resumed():
    assert adjustable(Experiment) == {
        *(f"Experiment.{name}_every" for name in ("log", "agreement", "eval", "save")),
        *("Experiment.partitioning", "Experiment.steps", "Experiment.keep", "Experiment.sample"),
        *("Experiment.eval_batch_size", "Experiment.model_dir", "Update.microbatches"),
        *("Loss.chunk_length", "TextData.prefetch", "Stage.partitioning", "Stage.offload"),
        *("Stage.allow_other_scale", "TextData.held_out", "Experiment.most_skipped"),
        *("Experiment.trackers", "SeqioTask.module", "SeqioTask.version", "TFDSPictures.data_dir"),
        *("Experiment.keep_best", "Experiment.best_metric"),
        # Up to where the run is, learning rates are compared themselves.
        *("Cosine.total_steps", "WarmupStableDecay.total_steps"),
        # What lies in the files is compared, not where they lie.
        *(
            f"{files}.{split}"
            for files in (
                *("TextFiles", "TFRecords", "FolderPictures", "JsonPictures", "ParquetPictures"),
                *("TFRecordPictures", "TarPictures"),
            )
            for split in ("train", "validation")
        ),
    }
