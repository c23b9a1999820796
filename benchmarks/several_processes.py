"""Two and four processes against one: saved with two, gone on with one and four, killed, delinked.

    python benchmarks/several_processes.py [--only NAME ...]

Each run ends after the same steps; its losses are to be those of one process to 1e-5, its place in
the data exactly the same:

    two        two processes, from the beginning to the end
    one_later  saved by two processes, gone on with by one
    four_later saved by two processes, gone on with by four
    delink     both of two processes killed after the last step before the delink: two others
               restore, delink and go on
    elastic    one of two killed in the middle; the launcher starts again with one
"""

import argparse
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from local_runs import Runs, children, kill

STEPS, DELINK = 40, 20


def wait_for(runs: Runs, name: str, step: int) -> None:
    """Waits until a run has written the record of a step."""
    deadline = time.monotonic() + 600
    while max(runs.steps(name), default=0) < step:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not come to step {step}:\n{runs.output(name)}")
        time.sleep(0.02)


def stopped_and_gone_on(runs: Runs, name: str, processes: int) -> None:
    """Two processes are asked to stop; others go on."""
    launcher = runs.start(name, 2)
    wait_for(runs, name, 3)
    launcher.send_signal(signal.SIGTERM)
    if (code := launcher.wait()) != 75:
        raise RuntimeError(f"{name} ended with {code}, not 75:\n{runs.output(name)}")
    runs.finish(name, processes)


def killed_at_the_delink(runs: Runs, name: str) -> None:
    """Both processes are killed while they compile what comes after the delink."""
    launcher = runs.start(name, 2)
    while "delink   step" not in runs.output(name):
        if launcher.poll() is not None:
            raise RuntimeError(f"{name} ended:\n{runs.output(name)}")
        time.sleep(0.02)
    for process in children(launcher):
        kill(process)
    launcher.wait()
    runs.finish(name, 2)
    if f"resume   step {DELINK}, stage pseudo" not in runs.output(name):
        raise RuntimeError(f"{name} did not delink again:\n{runs.output(name)}")


def elastic(runs: Runs, name: str) -> None:
    """The second of two processes is killed; the launcher starts one."""
    launcher = runs.start(name, 2, "--restarts=1", "--elastic")
    wait_for(runs, name, 5)
    kill(children(launcher)[1])
    if launcher.wait() != 0 or "starting again with 1" not in runs.output(name):
        raise RuntimeError(f"{name} did not go on:\n{runs.output(name)}")


def compare(runs: Runs, name: str, reference: str) -> tuple[float, bool]:
    """Returns the largest relative difference of losses, and whether the data is the same."""
    theirs, ours = (
        {(r["step"], r["split"]): r["loss"] for r in runs.records(n) if "loss" in r}
        for n in (reference, name)
    )
    if theirs.keys() != ours.keys():
        raise RuntimeError(f"{name} has other records: {theirs.keys() ^ ours.keys()}")
    worst = max(abs(ours[key] - loss) / abs(loss) for key, loss in theirs.items())
    return float(worst), runs.end(name)[1] == runs.end(reference)[1]


CASES: dict[str, Callable[[Runs, str], None]] = {
    "two": lambda runs, name: runs.finish(name, 2),
    "one_later": lambda runs, name: stopped_and_gone_on(runs, name, 1),
    "four_later": lambda runs, name: stopped_and_gone_on(runs, name, 4),
    "delink": killed_at_the_delink,
    "elastic": elastic,
}


def main() -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(pathlib.Path(scratch), steps=STEPS, delink=DELINK, save_every=1000)
        runs.finish("one", 1)
        good = True
        for name in options.only:
            CASES[name](runs, name)
            worst, same = compare(runs, name, "one")
            good &= same and bool(np.isfinite(worst)) and worst < 1e-5
            data = "same" if same else "OTHER"
            print(f"{name:11} losses differ by {worst:.1e} at most, data {data}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
