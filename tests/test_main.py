"""The command line: help, exit codes, and no traceback for a user's mistake."""

import pathlib
import subprocess
import sys
import time

import pytest

from m6jax import main

ROOT = pathlib.Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.gin")


def run(*arguments):
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    return result, time.perf_counter() - begin


def test_help_needs_no_library():
    code = (
        "import sys\nfrom m6jax import main\n"
        "try:\n  main.main(['--help'])\nexcept SystemExit as e:\n  assert e.code == 0\n"
        "assert not {'tensorflow', 'seqio', 'jax', 'orbax'} & set(sys.modules)"
    )
    result, _ = run("-c", code)
    assert result.returncode == 0, result.stderr
    assert "--gin_file" in result.stdout
    assert "report" in result.stdout


def test_importing_m6jax_and_its_parts_needs_no_tensorflow():
    code = (
        "import sys, m6jax.main, m6jax.run.train, m6jax.run.modes\n"
        "assert not {'tensorflow', 'seqio'} & set(sys.modules)"
    )
    result, _ = run("-W", "error", "-c", code)
    assert result.returncode == 0, result.stderr


def test_unknown_flags_and_modes_stop_at_once(capsys):
    for wrong in (["--gin_fil=x"], ["--gin_file=x", "--mode=trian"]):
        with pytest.raises(SystemExit) as stop:
            main.main(wrong)
        assert stop.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["--gin.STEPS='8'"], "expected int"),
        (["--gin.STEPZ=8"], "STEPS"),
        (["--gin.Experiment.batch_sise=8"], "batch_size"),
        (["--gin.NUM_LAYERS=3", "--gin.real/Stage.unit=2"], "does not divide the depth"),
        (["--gin.MoEConfig.num_prototypes=3"], "do not divide into 3 prototypes"),
        (["--gin.Partitioning.expert=3"], "does not fit 8 devices"),
        (["--gin.Update.microbatches=3"], "3 do not divide a batch of 16 rows"),
        (["--gin.Adafactor.weight_decay=0.1"], "Adafactor"),
        (["--gin.SentencePiece.size=5000"], "vocab_size: 4000 is less than the 5000 tokens"),
    ],
)
def test_wrong_configurations_exit_with_2(bindings, message, tmp_path, capsys):
    arguments = [f"--gin_file={QUICKSTART}", f"--gin.MODEL_DIR='{tmp_path}'", *bindings]
    assert main.main(arguments) == main.EXIT_BAD_CONFIGURATION
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "config.gin").exists()


def test_a_missing_file_is_named(capsys):
    assert main.main(["--gin_file=configs/quikstart.gin"]) == 2
    assert "configs/quikstart.gin" in capsys.readouterr().err


def test_completion_is_a_shell_script(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--print-completion=bash"])
    assert stop.value.code == 0
    script = capsys.readouterr().out
    assert "--gin_search_paths" in script
    assert "delink" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_what_to_do_next_is_no_result(capsys):
    assert main.main(["--mode=settings", "Greedy"]) == 0
    loud = capsys.readouterr()
    assert main.main(["--mode=settings", "Greedy", "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert loud.out == quiet.out
    assert loud.err.startswith("next ")
    assert quiet.err == ""


def test_flags_that_only_some_modes_take(tmp_path, capsys):
    for flags, message in (
        (["--prompt", "a"], "--prompt: only --mode=infer takes it"),
        (["--mode=train", "--step", "best"], "--step: only --mode=eval, infer, export takes it"),
        (["--mode=eval", "--runs", "a"], "--runs: only --mode=report takes it"),
    ):
        with pytest.raises(SystemExit) as stop:
            main.main(["--gin_file=x", *flags])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert main.main(["--mode=report", "--runs", str(tmp_path)]) == 2
    assert "there is no metrics.jsonl" in capsys.readouterr().err
