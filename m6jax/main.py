"""The command line: `m6jax --gin_file=F [--gin.NAME=VALUE ...] [--mode=MODE]`.

`python -m m6jax.main` is the same, where the package is not installed.

Exit codes: 0 the job is finished; 2 the configuration or the data cannot work (one message, no
traceback); 75 the run was asked to stop (SIGTERM, Ctrl-C), has saved its state, and goes on with
the same command; 76 the numbers became NaN or infinite, and the newest checkpoint is as it was; 1
anything else. Where several processes work together, all end with the same.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import shtab

from m6jax.foundation import platforms
from m6jax.foundation.streams import lasting_streams

EXIT_BAD_CONFIGURATION = 2
EXIT_PREEMPTED = 75
GIN = "--gin."

MODES = {
    "train": "train through all stages, or go on from the newest checkpoint (default)",
    "eval": "evaluate checkpoints (--step) on the held-out documents",
    "infer": "continue --prompt, --prompts or those of Experiment.sample",
    "export": "write the newest checkpoint for other programs; see m6jax --mode=settings Export",
    "replay": "make the steps after the newest checkpoint again, and look at the one not finite",
    "data": "show documents, tokens, epochs, duplicates and lengths, and some rows in full",
    "report": "draw MODEL_DIR/report again; with --runs one page of several runs",
    "plan": "say what the stages need and whether they fit, without the devices",
    "settings": "list what may be set; with NAME one class or setting, with --find WORD a search",
    "delink": "make the checkpoint of Conversion.source one of more distinct layers, in MODEL_DIR",
    "link": "likewise, one of fewer distinct layers",
    "stack": "likewise, one with all layers in one stack",
    "unstack": "likewise, one with each layer by itself",
}

# What people do next, by mode; on standard error, so that results can be piped.
NEXT = {
    "train": "--mode=infer continues your prompts, --mode=eval evaluates again;"
    " plots: {0}/report; tensorboard --logdir {0}/tensorboard",
    "eval": "--mode=infer continues your prompts; other texts: see m6jax --mode=settings TextData",
    "infer": "other ways to choose tokens: see m6jax --mode=settings Sample",
    "export": "docs/exporting.md says how other programs read the files",
    "replay": "--mode=train with a smaller learning rate, or with clipping, from that checkpoint",
    "data": "--mode=train trains on these rows; what may be set: m6jax --mode=settings TextData",
    "report": "tensorboard --logdir {0}/tensorboard shows the same while a run goes on",
    "plan": "--mode=train with the same files trains what was planned",
    "settings": "--gin.Class.field=VALUE on a command line, or Class.field = VALUE in a gin file",
}


# Modes that need no other process, wherever they are started.
ALONE = ("data", "report", "plan", "settings")
# Flags that only some modes take.
FLAGS_OF_MODES = {
    "step": ("eval", "infer", "export"),
    "prompt": ("infer",),
    "prompts": ("infer",),
    "out": ("eval", "infer", "report"),
    "runs": ("report",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    with lasting_streams():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    bindings = [a.removeprefix(GIN) for a in arguments if a.startswith(GIN)]
    parser = _parser()
    options = parser.parse_args([a for a in arguments if not a.startswith(GIN)])
    _check_options(parser, options)
    _quiet_libraries()
    platforms.leave_out_absent_tpus()
    # Imports that take seconds come after --help and misspelt flags have been answered.
    from m6jax.foundation.failures import RunError
    from m6jax.foundation.validated import ConfigError

    if options.mode in ALONE:
        group = None
    else:
        from m6jax import processes

        try:
            group = processes.start(
                *(getattr(options, name) for name in processes.FLAGS),
                timeout=options.process_timeout,
            )
        except ConfigError as error:
            print(f"m6jax: {error}", file=sys.stderr)
            return EXIT_BAD_CONFIGURATION

    def end(code: int, message: str) -> int:
        if group is not None:
            return group.end(code, message)
        print(message, file=sys.stderr)
        return code

    try:
        code = _run(options, bindings)
    except ConfigError as error:
        return end(EXIT_BAD_CONFIGURATION, f"m6jax: {error}")
    except RunError as error:
        return end(error.exit_code, f"m6jax: {error}")
    except (Exception, KeyboardInterrupt) as error:
        if group is None or group.count == 1:
            raise
        if not isinstance(error, KeyboardInterrupt):
            group.end_lost()
        return group.end(1, "".join(traceback.format_exception(error)))
    if group is not None:
        group.leave()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m6jax",
        description="Pretrain Mixture-of-Experts transformers: Pseudo Giant, delink, Real Giant.",
        epilog="modes:\n" + "\n".join(f"  {name:8}{text}" for name, text in MODES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="F",
        help="configuration; may be given several times, a later file wins",
    ).complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument(
        "--gin_search_paths",
        action="append",
        default=[],
        metavar="DIR",
        help="where to look for gin files and what they include",
    ).complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="with --mode=settings: of a setting"
    )
    parser.add_argument("--find", metavar="WORD", help="with --mode=settings: a word to look for")
    parser.add_argument(
        "--step",
        nargs="+",
        metavar="N",
        help="with eval (several), infer, export: of a checkpoint; a number, best or newest",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="with infer: a text to continue"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="with infer: one prompt a line; - is standard input"
    ).complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument(
        "--runs", nargs="+", metavar="DIR", help="with report: runs to be shown side by side"
    ).complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="with eval, infer: gets the results, one JSON object a line; with report --runs: the"
        " page",
    ).complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument("--mode", choices=list(MODES), default="train", help="what to do")
    parser.add_argument(
        "--gin.NAME",
        metavar="VALUE",
        dest="binding",
        help="override a macro (--gin.MODEL_DIR=\"'/tmp/run'\") or a field"
        " (--gin.Experiment.steps=100)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show results and mistakes, nothing on the way to them"
    )
    _add_process_flags(parser)
    shtab.add_argument_to(
        parser,
        "--print-completion",
        help='print what completes modes and flags: eval "$(m6jax --print-completion bash)"',
    )
    return parser


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes", "only where the launcher is none that jax knows; see docs/scale.md"
    )
    group.add_argument(
        "--coordinator_address", metavar="HOST:PORT", help="where the first process listens"
    )
    group.add_argument(
        "--num_processes", type=int, metavar="N", help="how many there are; 1: this one alone"
    )
    group.add_argument("--process_id", type=int, metavar="I", help="number of this one, from 0")
    parser.add_argument(
        "--process_timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a process that gives no sign of life for so long counts as lost (default 120)",
    )


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Stops with a usage message where flags do not go together."""
    for flag, modes in FLAGS_OF_MODES.items():
        if getattr(options, flag) and options.mode not in modes:
            parser.error(f"--{flag}: only --mode={', '.join(modes)} takes it")
    if options.mode != "settings":
        if not options.gin_file and not options.runs:
            parser.error("the following arguments are required: --gin_file")
        if options.name or options.find:
            parser.error(f"{options.name or '--find'}: only --mode=settings takes it")
    elif options.name and options.find:
        parser.error("give NAME or --find WORD, not both")


def _run(options: argparse.Namespace, bindings: Sequence[str]) -> int:
    from m6jax import configuration
    from m6jax.converting.settings import Conversion, LayoutChange
    from m6jax.experiment import Experiment
    from m6jax.experiment.model_dir import MACROS
    from m6jax.formats import Export
    from m6jax.planning.settings import PlanSettings

    roots = (Experiment, PlanSettings, Conversion, Export)
    if options.mode == "settings":
        print(configuration.reference(roots, options.name, options.find))
        _say_next(options)
        return 0

    if options.runs:
        return _compare(options.runs, options.out)

    def load(root: type[Any]) -> Any:
        return configuration.load(
            options.gin_file,
            bindings,
            options.gin_search_paths,
            root=root,
            roots=roots,
            macros=MACROS if root is Experiment else None,
        ).value

    experiment = load(Experiment)
    _keep_compiled_programs()
    if options.mode == "plan":
        code = _plan(experiment, load(PlanSettings))
    elif options.mode == "export":
        code = _export(experiment, load(Export), options.step or ["newest"])
    elif options.mode in [change.value for change in LayoutChange]:
        code = _convert(experiment, load(Conversion), LayoutChange(options.mode))
    else:
        code = _mode(options)(experiment)
    if code == 0:
        _say_next(options, experiment.model_dir)
    return code


def _say_next(options: argparse.Namespace, model_dir: str = "") -> None:
    if options.mode not in NEXT or options.quiet:
        return
    if options.mode not in ("plan", "settings"):
        import jax

        if jax.process_index():
            return
    print(f"next     {NEXT[options.mode].format(model_dir)}", file=sys.stderr)


def _keep_compiled_programs() -> None:
    """Lets jax find programs again that an earlier run compiled."""
    import jax

    from m6jax.foundation.cache_root import cache_root

    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compiled"))


def _mode(options: argparse.Namespace) -> Callable[[Any], int]:
    from m6jax.run import modes, train

    steps = options.step or ["newest"]

    def train_mode(experiment: Any) -> int:
        finished = train.run(experiment, quiet=options.quiet).finished
        return 0 if finished else EXIT_PREEMPTED

    def infer_mode(experiment: Any) -> int:
        asked = modes.Asked(options.prompt or (), options.prompts, options.out, steps)
        return modes.infer(experiment, asked)

    return {
        "train": train_mode,
        "eval": lambda experiment: modes.evaluate(experiment, steps, options.out),
        "infer": infer_mode,
        "data": modes.data,
        "replay": modes.replay,
        "report": modes.report,
    }[options.mode]


def _plan(experiment: Any, settings: Any) -> int:
    from m6jax.run import modes

    return 0 if modes.plan(experiment, settings) else EXIT_BAD_CONFIGURATION


def _compare(runs: Sequence[str], out: str | None) -> int:
    from m6jax.reporting.report import write_comparison

    print(write_comparison(runs, out or "report_of_runs.html"))
    return 0


def _export(experiment: Any, settings: Any, steps: Sequence[str]) -> int:
    from m6jax.run import modes

    return modes.export(experiment, settings, steps)


def _convert(experiment: Any, conversion: Any, change: Any) -> int:
    from m6jax.run import modes

    return modes.convert(experiment, conversion, change)


def _quiet_libraries() -> None:
    """Keeps what libraries say to their developers off a user's screen."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.basicConfig(level=logging.WARNING, format="m6jax: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
