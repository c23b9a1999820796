"""Whether Pseudo-to-Real pays: the study behind docs/pseudo_to_real.md.

    python benchmarks/fetch.py sotu              once: the text
    python benchmarks/pseudo_to_real.py --list   the runs, and which have a result
    python benchmarks/pseudo_to_real.py --run    the next runs, until stopped; goes on where it was
    python benchmarks/pseudo_to_real.py --run unit1-at60-copy-mean-s0
    python benchmarks/pseudo_to_real.py --time   seconds a step of each stage, on a quiet machine
    python benchmarks/pseudo_to_real.py --depths bytes and seconds for depths 4 to 48
    python benchmarks/pseudo_to_real.py --paper  the model of 10 trillion parameters, as planned
    python benchmarks/pseudo_to_real.py --plot   redraws the plots and tables of the docs

A run takes 2 to 6 minutes on two cores, adds a JSON file to benchmarks/results/pseudo_to_real, and
redraws the page.

Losses against tokens come from the runs: they are the same under any load of the machine. Seconds
come from one measurement in which the steps of all stages take turns (`--time`), since those of a
run say as much about the machine's other users. A streamed Real stage gives the same losses as an
ordinary one, so that the memory-bound case needs no runs of its own.
"""

import argparse
import sys
from pathlib import Path

from m6jax.foundation.platforms import leave_out_absent_tpus

leave_out_absent_tpus()

import fetch  # noqa: E402  jax may not be imported before
import jax  # noqa: E402
from pseudo_to_real_study import depths, page, paper, running, step_times  # noqa: E402
from pseudo_to_real_study.variants import Study, planned  # noqa: E402

from m6jax.foundation.cache_root import cache_root  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pseudo_to_real"
STUDY = Study()


def list_runs() -> None:
    """Prints the names of the runs, those that are done marked."""
    for variant in planned():
        done = (RESULTS / f"{variant.name}.json").exists()
        print("done   " if done else "       ", variant.name)


def make_runs(names: list[str]) -> int:
    """Makes the runs of these names, or all that have no result yet, one after another."""
    variants = {variant.name: variant for variant in planned()}
    unknown = sorted(set(names) - variants.keys())
    if unknown:
        print(f"no run is named {unknown[0]!r}; see --list", file=sys.stderr)
        return 2
    text = running.text_of_study()
    for name in names or variants:
        if running.run(variants[name], STUDY, text, RESULTS) is None:
            return 75
        page.draw(RESULTS, ROOT / "docs")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="name the runs")
    what.add_argument("--run", nargs="*", metavar="NAME", help="make these runs, or all that lack")
    what.add_argument("--time", action="store_true", help="measure the steps of all stages")
    what.add_argument("--depths", action="store_true", help="measure stages of depths 4 to 48")
    what.add_argument("--paper", action="store_true", help="plan 10 trillion parameters")
    what.add_argument("--plot", action="store_true", help="redraw plots and tables")
    parser.add_argument("--rounds", type=int, default=15, help="turns of --time and --depths")
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compiled"))
    try:
        if options.list:
            list_runs()
        elif options.run is not None:
            return make_runs(options.run)
        elif options.time:
            step_times.measure(STUDY, running.text_of_study(), RESULTS, options.rounds)
        elif options.depths:
            depths.measure(RESULTS, options.rounds)
        elif options.paper:
            paper.measure(RESULTS, ROOT)
        else:
            page.draw(RESULTS, ROOT / "docs")
    except fetch.NotFetched as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
