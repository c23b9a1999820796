"""The mode infer: prompts from the command line or a file, texts to the screen or a file."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import jax

from m6jax.decoding import Beam
from m6jax.experiment import Experiment, Sample
from m6jax.experiment.sampling import Written, write_texts
from m6jax.foundation.validated import ConfigError
from m6jax.reporting.writers import write_lines
from m6jax.run.choosing import NEWEST, choose_steps
from m6jax.run.position import open_checkpoint


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line asks for; without prompts those of Experiment.sample are continued.

    Attributes:
      prompts: texts.
      file: with one prompt a line, or `.jsonl` with {"prompt": ...} a line; `-`: standard input.
      out: gets one JSON object a text; None: they are printed.
      steps: one checkpoint; see `choose_steps`.
    """

    prompts: Sequence[str] = ()
    file: str | None = None
    out: str | None = None
    steps: Sequence[str] = (NEWEST,)


def infer(experiment: Experiment, asked: Asked | None = None) -> int:
    """Continues prompts with a checkpoint of a run.

    On a terminal a text appears as it comes, unless it is searched for with beams.

    Raises:
      ConfigError: there is nothing to continue, or a file cannot be read or written.
    """
    asked = asked or Asked()
    sample = dataclasses.replace(experiment.sample or Sample(), prompts=_prompts(experiment, asked))
    if asked.out is not None:
        check_writable(asked.out)
    if len(asked.steps) > 1:
        raise ConfigError(f"--step {' '.join(asked.steps)}: --mode=infer takes one checkpoint")
    (step,) = choose_steps(experiment.model_dir, asked.steps)
    alone = jax.process_count() == 1 and asked.out is None and sys.stdout.isatty()
    show = _Terminal() if alone and not isinstance(sample.method, Beam) else None
    with open_checkpoint(experiment, step) as (prepared, position):
        written = write_texts(
            position.program,
            position.state.served(),
            sample,
            prepared.vocabulary,
            experiment.seed,
            show,
        )
    if jax.process_index() == 0:
        if asked.out is not None:
            _write(asked.out, written, step)
        elif show is None:
            for text in written:
                print(f"sample   {text.whole}", flush=True)
    return 0


class _Terminal:
    """Prints a text as it grows; another one begins on a line of its own."""

    def __init__(self) -> None:
        self._shown: str | None = None

    def __call__(self, text: str, last: bool) -> None:
        if self._shown is None:
            print("sample   ", end="")
            self._shown = ""
        if text != self._shown:
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text
        if last:
            print(flush=True)
            self._shown = None


def _prompts(experiment: Experiment, asked: Asked) -> tuple[str, ...]:
    if asked.file is None:
        found = tuple(asked.prompts) or (experiment.sample or Sample()).prompts
        if not found:
            raise ConfigError(
                "Sample.prompts: there is nothing to continue (give --prompt TEXT or --prompts"
                " FILE, or a tuple of texts in the configuration)"
            )
        return found
    try:
        text = (
            sys.stdin.read() if asked.file == "-" else pathlib.Path(asked.file).read_text("utf-8")
        )
        lines = [line for line in text.split("\n") if line.strip()]
        if asked.file.endswith(".jsonl"):
            lines = [str(json.loads(line)["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--prompts {asked.file}: cannot be read: {error!r} (one prompt a line in UTF-8; in a"
            ' file *.jsonl {"prompt": "..."} a line)'
        ) from error
    if not lines:
        raise ConfigError(f"--prompts {asked.file}: there is no prompt in it")
    return (*asked.prompts, *lines)


def check_writable(out: str) -> None:
    """Raises ConfigError for a file that cannot be written, and leaves what is in it."""
    if jax.process_index():
        return
    try:
        with open(out, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error


def _write(out: str, written: Sequence[Written], step: int) -> None:
    records = [dataclasses.asdict(text) | {"step": step} for text in written]
    for record in records:
        del record["whole"]
    write_lines(out, records)
    print(f"wrote    {len(written)} texts to {out}", file=sys.stderr)
