"""The study of Pseudo-to-Real: its runs as values, reading results, tables, pictures, resuming."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest
import runs

from m6jax.pseudo_to_real.triggers import AtStep, GradientAgreement, LossSlope
from m6jax.run import train

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import fetch  # noqa: E402
from pseudo_to_real_study import (  # noqa: E402
    depths,
    page,
    plots,
    results,
    running,
    step_times,
    tables,
)
from pseudo_to_real_study.results import RESIDENT, STREAMED, Found, Result  # noqa: E402
from pseudo_to_real_study.variants import Study, Variant, planned  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_runs")

TINY = Study(
    steps=8,
    rows=8,
    group_rows=1,
    length=8,
    vocabulary=340,
    depth=2,
    embed=8,
    mlp=8,
    experts=4,
    evaluations=2,
)
SCRATCH, SHARED = Variant(unit=None), Variant(unit=1, switch=50)


def result(variant: Variant, loss: list[float], switched: int = 0) -> Result:
    steps = np.arange(2, 2 * len(loss) + 1, 2)
    return Result(variant, TINY, steps, np.array(loss), switched, 2.5, 0.1)


@pytest.fixture
def found() -> Found:
    """From scratch to 3.0 in 8 steps; shared, switched at 4, to 2.8, and through 3.0 at step 7."""
    of_runs = [result(SCRATCH, [5, 4, 3.5, 3.0]), result(SHARED, [4.5, 3.6, 3.2, 2.8], 4)]
    median = {"unit1": 0.1, "unit2": 0.2, "unit4": 0.3, "real": 0.2, "real-streamed": 0.4}
    stage = {"parameters": 4e6, "gradients": 4e6, "optimizer": 8e6, "temporary": 6e6}
    depth = {s: stage | {"step_seconds": 0.05} for s in ("pseudo", "real")}
    plan = {"compute": 1.0, "interconnect": 0.5, "host_link": 0.0, "host_traffic_bytes": 2e9}
    stages = {"pseudo": plan | {"step_seconds": 1.0}, "real": plan | {"step_seconds": 5.0}}
    return Found(
        runs={run.variant.name: run for run in of_runs},
        step_times={"median": median},
        depths={"depths": [depth | {"depth": 4, "delink_seconds": 0.012}]},
        paper={"topologies": {"v6e:16x16": stages}},
    )


def test_planned_runs_are_experiments_with_names_of_their_own(tmp_path):
    variants = planned()
    assert len({variant.name for variant in variants}) == len(variants) == 31
    for variant in variants:
        made = variant.experiment(Study(), tmp_path, tmp_path / variant.name)
        assert made.steps == 320 * variant.budget // 100
        assert len(made.stages) == (1 if variant.unit is None else 2)


def test_a_variant_is_its_settings(tmp_path):
    def stage(**changes):
        return Variant(**changes).experiment(Study(), tmp_path, tmp_path).stages[0]

    assert stage(switch=60).until == AtStep(step=192)
    assert isinstance(stage(switch=80, trigger="slope").until, LossSlope)
    assert isinstance(stage(switch=80, trigger="agreement").until, GradientAgreement)
    assert stage(unit=2).unit == 2
    assert [part.pattern for part in stage(own="norms-router").parts] == ["norm|router"]
    same = [Variant(seed=2), Variant(unit=None, seed=2)]
    first, second = (v.experiment(Study(), tmp_path, tmp_path) for v in same)
    assert first.data == second.data
    assert first.schedule == second.schedule


def test_time_is_counted_in_steps_of_the_real_stage():
    run = result(SHARED, [4.5, 3.6, 3.2, 2.8], switched=4)
    np.testing.assert_allclose(run.real_steps(run.steps, 0.25), [0.5, 1.0, 3.0, 5.0])
    assert run.real_steps(8.0, 1.0) == 8.0


def test_the_step_that_reaches_a_loss_is_between_two_scores():
    run = result(SHARED, [4.5, 3.6, 3.2, 2.8])
    assert run.step_reaching(3.4) == pytest.approx(5.0)
    assert run.step_reaching(4.5) == 2.0
    assert run.step_reaching(2.7) is None


def test_pseudo_steps_are_relative_to_the_real_step_asked_for(found):
    assert found.pseudo_step(SHARED, RESIDENT) == pytest.approx(0.5)
    assert found.pseudo_step(SHARED, STREAMED) == pytest.approx(0.25)
    assert found.pseudo_step(SHARED, "v6e:16x16") == pytest.approx(0.2)
    assert found.pseudo_step(SCRATCH, STREAMED) == 1.0
    assert dataclasses.replace(found, step_times=None).pseudo_step(SHARED, RESIDENT) is None


def test_every_stage_of_the_study_has_a_step_to_be_measured():
    names = set(step_times.contenders(Study()))
    used = {
        f"unit{v.unit}" + ("" if v.own == "nothing" else f"-own-{v.own}")
        for v in planned()
        if v.unit is not None
    }
    assert names == used | {RESIDENT, STREAMED}


def test_what_is_reached_is_a_share_of_real_from_scratch(found):
    # 3.0 is passed at step 7: 4 Pseudo steps and 3 Real ones, of 8 Real ones.
    shared = found.runs[SHARED.name]
    assert tables.reached(found, shared, None) == pytest.approx(7 / 8)
    assert tables.reached(found, shared, STREAMED) == pytest.approx((4 * 0.25 + 3) / 8)
    assert tables.reached(found, found.runs[SCRATCH.name], RESIDENT) == 1.0
    worse = result(Variant(unit=2, switch=50), [4.5, 3.6, 3.5, 3.1], 4)
    assert tables.reached(found, worse, None) is None


def test_tables_say_what_was_found_and_what_was_not(found, monkeypatch):
    monkeypatch.setattr(tables, "planned", lambda: [SCRATCH, SHARED, Variant(unit=4)])
    monkeypatch.setattr(tables, "HEADLINE", (("shared", SHARED), ("missing", Variant(unit=2))))
    made = tables.all_tables(found)
    assert "| shared | 1 | 2.800 | -6.7 % | 88 % | 62 % | 50 % | 48 % |" in made["seeds"]
    assert "| missing | 0 | – | – | – | – | – | – |" in made["seeds"]
    assert made["grid"].count("\n") == 3  # header, rule, two of the three runs
    assert "| `unit1` | 100 ms | 0.50 | 0.25 |" in made["steps"]
    assert "| `v6e:16x16` real | 1.0 | 0.5 | 0.0 | 2 GB | 1.00 |" in made["steps"]
    assert "| 4 | real | 4.0 MB | 4.0 MB | 8.0 MB | 6.0 MB | 50 ms | 12 ms |" in made["depths"]


def test_tables_of_nothing_are_empty():
    nothing = Found(runs={}, step_times=None, depths=None, paper=None)
    assert all(made.startswith("| ") for made in tables.all_tables(nothing).values())
    assert list(plots.pictures(nothing)) == []


def test_pictures_are_small_and_show_what_there_is(found, tmp_path):
    grid_run = result(Variant(unit=1, switch=60), [4.5, 3.6, 3.2, 2.9], 4)
    own_run = result(Variant(unit=1, switch=60, own="norms-router"), [4.5, 3.6, 3.2, 2.7], 4)
    more = {run.variant.name: run for run in (grid_run, own_run)}
    drawn = dataclasses.replace(found, runs=found.runs | more)
    labels = dict(plots.others(drawn))
    assert labels["own norms router, 60 %"] == pytest.approx(-0.3)
    assert labels["RESET, mean"] is None
    paths = plots.save(plots.pictures(drawn), tmp_path)
    names = ["pseudo_to_real_curves", "pseudo_to_real_grid", "pseudo_to_real_depths"]
    assert [path.stem for path in paths] == names
    assert all(0 < path.stat().st_size < 150_000 for path in paths)


def test_a_page_gets_its_tables():
    text = "before\n<!-- table: grid -->\nold\n<!-- end -->\nafter\n"
    once = page.with_tables(text, {"grid": "| new |"})
    assert once == "before\n<!-- table: grid -->\n| new |\n<!-- end -->\nafter\n"
    assert page.with_tables(once, {"grid": "| new |"}) == once
    with pytest.raises(KeyError):
        page.with_tables(text, {})


def test_what_is_committed_can_be_read_and_is_of_planned_runs():
    committed = results.read(ROOT / "benchmarks" / "results" / "pseudo_to_real")
    names = {variant.name for variant in planned()}
    for name, run in committed.runs.items():
        assert name in names
        assert run.study == Study()
        assert np.isfinite(run.loss).all()
    text = (ROOT / "docs" / page.PAGE).read_text(encoding="utf-8")
    assert page.with_tables(text, tables.all_tables(committed)) == text, (
        "docs and results differ: python benchmarks/pseudo_to_real.py --plot"
    )


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A directory of the study's text, made of speeches that were fetched into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    speeches = tmp_path / "speeches"
    speeches.mkdir()
    for i in range(20):
        lines = "\n".join(f"{line} {i}" for line in runs.LINES)
        (speeches / f"{i:02}.txt").write_text(lines + "\n", encoding="utf-8")
    monkeypatch.setattr(fetch, "fetched", lambda name: speeches)
    return running.text_of_study()


def test_every_tenth_speech_is_held_out(text):
    assert sorted(p.stem for p in (text / "held_out").iterdir()) == ["09", "19"]
    assert len(list((text / "train").iterdir())) == 18


@pytest.mark.long
def test_a_run_gives_a_result_when_it_has_ended_and_only_once(text, tmp_path, monkeypatch):
    found = tmp_path / "results"
    stopped = train.Result(step=3, finished=False, evaluation={}, samples=[], report=[])
    with monkeypatch.context() as patch:
        patch.setattr(train, "run", lambda experiment: stopped)
        assert running.run(SHARED, TINY, text, found) is None
    assert not found.exists()
    path = running.run(SHARED, TINY, text, found)
    run = results.read_run(json.loads(path.read_text()))
    assert run.variant == SHARED
    assert run.study == TINY
    assert run.steps.tolist() == [4, 8]
    assert run.switched == 4
    studies = tmp_path / "cache" / "m6jax" / "studies"
    assert list(studies.glob("*/*")) == []  # what the run wrote was removed
    written = path.stat().st_mtime_ns
    assert running.run(SHARED, TINY, text, found).stat().st_mtime_ns == written


def test_steps_and_depths_are_measured(text, tmp_path, monkeypatch):
    chosen = {"real": (SCRATCH, 0, False)}
    monkeypatch.setattr(step_times, "contenders", lambda study: chosen)
    measured = step_times.measure(TINY, text, tmp_path, rounds=1)
    assert measured["median"]["real"] >= measured["fastest"]["real"] > 0
    measured = depths.measure(tmp_path, 1, (TINY,))
    read = results.read(tmp_path)
    assert read.depths == measured
    (row,) = measured["depths"]
    # One layer more: attention 4 x 8 x 8, router 8 x 4, experts 4 x 2 x 8 x 8, norms 2 x 8.
    assert row["real"]["parameters"] - row["pseudo"]["parameters"] == 4 * (256 + 32 + 512 + 16)
    assert row["real"]["gradients"] == row["real"]["parameters"]
    assert row["real"]["optimizer"] == pytest.approx(2 * row["real"]["parameters"], rel=0.01)
    assert row["delink_seconds"] > 0
