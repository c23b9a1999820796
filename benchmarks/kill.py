"""Kills runs at random moments, starts them again, and compares with runs that nobody killed.

    python benchmarks/kill.py --kills=50

A run of 60 steps with a delink, text and pictures saves every three steps. Half of the kills (-9)
are of a run of one process; the other half of one of two processes, of which the other one then
ends by itself. A moment is drawn anew for each start: while the run starts and restores (one in
four), or up to a third of a second after a step was written, so that it falls in steps, saves and
the delink. The same command then goes on. Prints

    kills, resumes      a kill before the first checkpoint is no resume: the run begins anew
    most steps lost     between the last step that had been written and the step gone on from
    values that differ  of the state at the end and of all records, against a run that nobody killed
"""

import argparse
import dataclasses
import pathlib
import random
import re
import sys
import tempfile
import time

from local_runs import Runs, children, different_bits, kill, recorded

STEPS, DELINK, SAVE_EVERY = 60, 31, 3


@dataclasses.dataclass
class Count:
    """What came of the kills."""

    kills: int = 0
    resumes: int = 0
    steps_lost: int = 0
    different: int = 0
    records: int = 0


def kill_once(runs: Runs, name: str, processes: int, chance: random.Random) -> bool:
    """Starts a run and kills one of its processes; False if the run ended before.

    Args:
      runs: all runs.
      name: of the run.
      processes: of the run.
      chance: draws the moment and the process.
    """
    begun = max(runs.steps(name), default=0)
    launcher = runs.start(name, processes)
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, 12))
    else:
        step = chance.randrange(begun + 1, STEPS + 1) if begun < STEPS else STEPS
        while launcher.poll() is None and max(runs.steps(name), default=0) < step:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
    victims = children(launcher)
    killed = bool(victims) and kill(chance.choice(victims))
    code = launcher.wait()
    if code not in (0, 1):
        raise RuntimeError(f"{name} ended with {code}:\n{runs.output(name)}")
    return killed and code != 0


def killed_runs(
    runs: Runs, processes: int, kills: int, chance: random.Random, count: Count
) -> None:
    """Kills runs of so many processes, and compares each at its end with one without a kill."""
    straight = f"straight{processes}"
    runs.finish(straight, processes)
    number = 0
    while number < kills:
        name = f"killed{processes}_{count.records}"
        while number < kills:
            if not kill_once(runs, name, processes, chance):
                break
            number += 1
            count.kills += 1
            print(
                f"{processes} processes, kill {number} of {kills}: at step"
                f" {max(runs.steps(name), default=0)}",
                flush=True,
            )
            lost(runs, name, count)
        runs.finish(name, processes)
        count.different += different_bits(runs.end(name)[0], runs.end(straight)[0])
        ours, theirs = (recorded(runs.records(n)) for n in (name, straight))
        count.different += len(set(ours) ^ set(theirs)) + abs(len(ours) - len(theirs))
        count.records += 1
        count.resumes += len(re.findall(r"^0\| resume ", runs.output(name), re.MULTILINE))


def lost(runs: Runs, name: str, count: Count) -> None:
    """Counts the steps that were made and have to be made again."""
    steps = [p.name for p in runs.directory(name).glob("checkpoints/[0-9]*") if p.name.isdigit()]
    whole = [int(s) for s in steps if (runs.directory(name) / "checkpoints" / s / "state").is_dir()]
    count.steps_lost = max(
        count.steps_lost, max(runs.steps(name), default=0) - max(whole, default=0)
    )


def main() -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count, chance = Count(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(pathlib.Path(scratch), STEPS, DELINK, SAVE_EVERY)
        for i, processes in enumerate(options.processes):
            share = len(range(i, options.kills, len(options.processes)))
            killed_runs(runs, processes, share, chance, count)
    print(
        f"{count.kills} kills, {count.resumes} resumes, {count.steps_lost} steps lost at most,"
        f" {count.different} values differ in {count.records} runs"
    )
    return 1 if count.different else 0


if __name__ == "__main__":
    sys.exit(main())
