"""A run in Python: `m6jax.train` and `m6jax.load`."""

import dataclasses
import json
import pathlib
import shutil
import sys
import types

import jax
import models
import numpy as np
import pytest
import runs

import m6jax
from m6jax import configuration
from m6jax.decoding import Greedy, Sampling, decoding_model
from m6jax.experiment import Experiment, Sample
from m6jax.experiment.model_dir import MACROS
from m6jax.formats import Export
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.transformer import Transformer
from m6jax.run import harness, modes
from m6jax.run.choosing import choose_steps

sys.path.append(str(pathlib.Path(__file__).parents[2] / "docs"))
import read_model

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of four shared steps, then one: trained from a gin file."""
    root = tmp_path_factory.mktemp("trained")
    experiment = runs.experiment(text, root / "elsewhere", steps=2 * runs.DELINK_STEP)
    file = root / "run.gin"
    file.write_text(configuration.to_gin(experiment, macros=MACROS), encoding="utf-8")
    settings = {"Experiment.steps": runs.DELINK_STEP + 1}
    return m6jax.train(file, MODEL_DIR=str(root / "run"), settings=settings, quiet=True)


def test_a_run_is_opened_where_it_was_moved_to(trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained.experiment.model_dir, moved)
    run = m6jax.load(moved)
    assert run.step == runs.DELINK_STEP + 1
    jax.tree.map(np.testing.assert_array_equal, run.params, trained.params)
    assert run.generate(["the whale"]) == trained.generate(["the whale"])
    assert run.generate(["the whale", "a"], max_new_tokens=2)[1].startswith("a")


def test_metrics_are_a_table(trained):
    table = trained.metrics
    losses = table.split("train")
    assert losses["step"].tolist() == list(range(1, runs.DELINK_STEP + 2))
    assert np.isfinite(losses["loss"]).all()
    assert np.isnan(table["loss_before"]).sum() == len(table) - 1
    assert str(losses).splitlines()[0].split()[:3] == ["step", "stage", "split"]
    with pytest.raises(KeyError, match="no split 'valid'"):
        table.split("valid")
    with pytest.raises(KeyError, match="no column 'lost'"):
        table["lost"]


def test_evaluation_of_files(trained, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(runs.LINES) + "\n", encoding="utf-8")
    metrics = trained.evaluate(str(tmp_path / "*.txt"))
    assert metrics.keys() == {"files"}
    assert metrics["files"]["bits_per_byte"] > 0
    own = trained.evaluate()
    last = trained.metrics.split("eval/text")["loss"][-1]
    assert own.keys() == {"text"}
    assert float(own["text"]["loss"]) == pytest.approx(last, rel=1e-6)


def test_a_shared_model_is_delinked(trained, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(runs.LINES) + "\n", encoding="utf-8")
    shared = m6jax.load(trained.experiment.model_dir, step=runs.DELINK_STEP)
    assert set(shared.params) == {"embedder", "layers", "final_norm"}
    real = shared.delink()
    assert real.module.layout.unit == 2
    assert set(real.params) == {"embedder", "layers_0", "layers_1", "final_norm"}
    files = str(tmp_path / "*.txt")
    before, after = (model.evaluate(files)["files"]["loss"] for model in (shared, real))
    assert float(after) == pytest.approx(float(before), rel=1e-6)
    assert real.generate(["the sea"]) == shared.generate(["the sea"])


def test_what_cannot_be_opened(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"load: there is no run in .*config.gin is missing"):
        m6jax.load(tmp_path)
    with pytest.raises(ConfigError, match=r"step 5000: .* has no checkpoint of it \(there are"):
        m6jax.load(trained.experiment.model_dir, step=5000)
    with pytest.raises(ConfigError, match=r"a list of texts is needed \(write \['a'\]\)"):
        trained.generate("a")
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        m6jax.lode  # noqa: B018


def as_given(trained):
    """The run's experiment as the command line reads it."""
    directory = pathlib.Path(trained.experiment.model_dir)
    bindings = [f"MODEL_DIR={str(directory)!r}"]
    file = directory / "config.gin"
    return configuration.load([file], bindings, root=Experiment, macros=MACROS).value


def test_the_mode_export_writes_a_shared_checkpoint_delinked(trained, tmp_path, capsys):
    experiment = as_given(trained)
    settings = Export(directory=str(tmp_path / "folder"))
    assert modes.export(experiment, settings, [str(runs.DELINK_STEP)]) == 0
    assert "config.json, model.safetensors, vocabulary.model" in capsys.readouterr().out
    model, tensors = read_model.load(tmp_path / "folder")
    assert model["num_ids"] is None or model["num_ids"] <= runs.VOCABULARY
    up = [tensors[f"layers.{i}.moe.up"] for i in range(2)]
    np.testing.assert_array_equal(*up)
    shared = m6jax.load(experiment.model_dir, step=runs.DELINK_STEP)
    np.testing.assert_array_equal(up[0], shared.params["layers"]["moe"]["up"][0])
    exported = trained.export(str(tmp_path / "other"), dtype="float16")
    assert exported.parameters == sum(x.size for x in tensors.values())


def test_what_cannot_be_exported(trained, tmp_path):
    experiment = as_given(trained)
    with pytest.raises(ConfigError, match="num_prototypes is 2"):
        modes.export(experiment, Export(format="HUGGING_FACE"))
    with pytest.raises(ConfigError, match="--step 1 2: --mode=export writes one checkpoint"):
        modes.export(experiment, Export(), ["1", "2"])
    with pytest.raises(ConfigError, match="is no local folder"):
        modes.export(experiment, Export(directory="gs://bucket/model"))
    with pytest.raises(ConfigError, match=r"--step 77: .* no such checkpoint \(choices: best, new"):
        modes.export(experiment, Export(), ["77"])
    empty = dataclasses.replace(experiment, model_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        modes.export(empty, Export())


def test_the_best_checkpoint_is_the_one_with_the_least_held_out_loss(trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained.experiment.model_dir, moved)
    first, last = runs.DELINK_STEP, runs.DELINK_STEP + 1
    assert choose_steps(str(moved), ["newest", str(first), "newest"]) == [last, first]

    def record(losses):
        records = [{"step": s, "split": f"eval/{n}", "loss": x} for s, n, x in losses]
        (moved / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))

    record([(first, "a", 3.0), (first, "b", 1.0), (last, "a", 2.5), (last, "b", 2.5)])
    assert choose_steps(str(moved), ["best"]) == [first]
    record([(first, "a", 3.0), (last, "a", 2.5), (1, "a", 0.5)])
    assert choose_steps(str(moved), ["best"]) == [last]
    record([(1, "a", 0.5)])
    with pytest.raises(ConfigError, match=r"--step best: no checkpoint .* was evaluated"):
        choose_steps(str(moved), ["best"])


PROMPTS = ("the whale", "the", "calm was the sea and", "nothing")


def inferred(trained, capsys, asked, **sample):
    settings = {"method": Sampling(), "max_new_tokens": 6} | sample
    experiment = dataclasses.replace(as_given(trained), sample=Sample(**settings))
    assert modes.infer(experiment, asked) == 0
    return capsys.readouterr()


def test_prompts_of_a_file_become_json_lines(trained, tmp_path, capsys):
    lines, out = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    lines.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    asked = modes.Asked(file=str(lines), out=str(out))
    said = inferred(trained, capsys, asked, num_samples=2, seed=3)
    assert (said.out, said.err) == ("", f"wrote    8 texts to {out}\n")
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(r["prompt"], r["sample"]) for r in records] == [
        (p, i) for p in PROMPTS for i in (0, 1)
    ]
    assert all(r["tokens"] == 6 or r["ended"] == "end" for r in records)
    assert all(r["log_probability"] < 0 and r["step"] == runs.DELINK_STEP + 1 for r in records)
    # Another size of the batches, and JSON for prompts, change nothing.
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    asked = modes.Asked(file=str(lines), out=str(tmp_path / "again.jsonl"))
    inferred(trained, capsys, asked, num_samples=2, seed=3, batch_size=8)
    again = [
        json.loads(line) for line in (tmp_path / "again.jsonl").read_text("utf-8").splitlines()
    ]
    assert [r["text"] for r in again] == [r["text"] for r in records]


def test_text_appears_as_it_comes_on_a_terminal(trained, capsys, monkeypatch):
    plain = inferred(trained, capsys, modes.Asked(PROMPTS[:2]), seed=3).out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = []
    monkeypatch.setattr("builtins.print", lambda *args, **_: shown.append("".join(args)))
    inferred(trained, capsys, modes.Asked(PROMPTS[:2]), seed=3)
    assert len(shown) > 6
    assert "".join(part or "\n" for part in shown) == plain


def test_a_text_ends_before_a_stop_string(trained, capsys):
    whole = inferred(trained, capsys, modes.Asked(PROMPTS[:1]), seed=3).out
    new = whole.removeprefix("sample   ").removeprefix(PROMPTS[0]).rstrip("\n")
    stop = new[len(new) // 2 :][:2]
    cut = inferred(trained, capsys, modes.Asked(PROMPTS[:1]), seed=3, stop=(stop,)).out
    assert cut == f"sample   {PROMPTS[0]}{new[: new.index(stop)]}\n"


def test_prompts_that_cannot_be(trained, tmp_path, monkeypatch):
    experiment = dataclasses.replace(as_given(trained), sample=None)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "odd.jsonl").write_text("{}\n")
    bad = [
        (modes.Asked(), "there is nothing to continue"),
        (modes.Asked(file=str(tmp_path / "empty.txt")), "there is no prompt in it"),
        (modes.Asked(file=str(tmp_path / "odd.jsonl")), "cannot be read: KeyError"),
        (modes.Asked(file="/nowhere/x"), "--prompts /nowhere/x: cannot be read"),
        (modes.Asked(("a",), out="/nowhere/x"), "--out /nowhere/x: cannot be written"),
        (modes.Asked(("a",), steps=("1", "2")), "--mode=infer takes one checkpoint"),
    ]
    for asked, message in bad:
        with pytest.raises(ConfigError, match=message):
            modes.infer(experiment, asked)


def test_several_checkpoints_are_compared(trained, tmp_path, capsys):
    out = tmp_path / "evaluations.jsonl"
    steps = [str(runs.DELINK_STEP), "newest"]
    assert modes.evaluate(as_given(trained), steps, str(out)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"step     {runs.DELINK_STEP}"
    assert "accuracy" in said[1]
    head, *rows = said[-3:]
    assert head.split() == ["step", "set", "loss", "perplexity", "bits_per_byte", "accuracy"]
    assert [row.split()[0] for row in rows] == [str(runs.DELINK_STEP), str(runs.DELINK_STEP + 1)]
    assert sum("*" in row for row in rows) == 1
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(r["step"], r["split"]) for r in records] == [
        (runs.DELINK_STEP, "eval/text"),
        (runs.DELINK_STEP + 1, "eval/text"),
    ]


@pytest.fixture
def lm_eval(monkeypatch):
    """The one class of lm-evaluation-harness that a model is made of."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = type("LM", (), {})
    return sys.modules["lm_eval.api.model"].LM


def asked(*arguments):
    return types.SimpleNamespace(args=arguments)


def test_likelihoods_for_lm_evaluation_harness(trained, lm_eval):
    model = harness.language_model(trained, batch_size=8)
    assert isinstance(model, lm_eval)
    pairs = [("the whale", " was seen"), ("", "calm was the sea"), ("the", " ship")]
    found = model.loglikelihood([asked(*pair) for pair in pairs])

    # By the logits of whole rows.
    config, layout = trained.experiment.model, trained.program.layout
    dropless = decoding_model(Transformer(config))
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        ids = trained.vocabulary.encode(context + continuation)
        asked_for = len(ids) - len(trained.vocabulary.encode(context))
        batch = models.whole_rows([[trained.vocabulary.start_id, *ids[:-1]]])
        logits = models.jit(lambda p, b: dropless.apply(p, b, layout).logits)(trained.served, batch)
        log_probs = np.asarray(jax.nn.log_softmax(logits))[0]
        rows = range(len(ids) - asked_for, len(ids))
        assert score == pytest.approx(sum(log_probs[i, ids[i]] for i in rows), rel=1e-4)
        assert greedy == all(log_probs[i].argmax() == ids[i] for i in rows)

    text = " ".join(runs.LINES)
    tokens = trained.vocabulary.encode(text)
    assert len(tokens) > 2 * trained.experiment.data.length
    scorer = harness.Scorer(trained, 8)
    assert [i for _, window in scorer.windows(tokens) for i in window] == tokens
    (rolling,) = model.loglikelihood_rolling([asked(text)])
    assert rolling == pytest.approx(sum(x for x, _ in scorer.score(scorer.windows(tokens))))


def test_texts_for_lm_evaluation_harness(trained, lm_eval):
    model = harness.language_model(trained)
    settings = {"until": ["\n"], "max_gen_toks": 4}
    (text,) = model.generate_until([asked("the whale", settings)])
    (whole,) = trained.generate(["the whale"], method=Greedy(), max_new_tokens=4)
    assert text == whole.removeprefix("the whale").split("\n")[0]


def test_lm_evaluation_harness_that_is_missing(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ConfigError, match=r"lm_eval is not installed \(pip install"):
        harness.language_model(trained)
