"""Damages files of a checkpoint, one at a time: is it found and named, or harmless?

    python benchmarks/fuzz_checkpoint.py --cases=500

A checkpoint of a small state (a stack, bfloat16, a leaf on the host, a scalar) is written once.
Each case copies it, flips one bit of a random file or cuts the file at a random place, and reads
everything as a run does: documents, description, arrays. What may come of it:

    named      a CheckpointError that names a file of the step
    harmless   every value and every document is bit for bit as it was written

Anything else is a failure: another number, another exception, a process that ends or that takes
more than a gigabyte on top. Prints a line for each kind of file, and ends with code 1 if there is a
failure.
"""

import argparse
import collections
import multiprocessing
import pathlib
import random
import resource
import shutil
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from m6jax.checkpointing import CheckpointError, Checkpoints
from m6jax.foundation import platforms

STEP = 7
DOCUMENTS = ({"position": 12345, "shards": [1, 2, 3]}, {"stage": 1, "layout": {"unit": 2}})
MOST_BYTES = 10**9


def write(directory: pathlib.Path) -> None:
    """Writes the checkpoint that is damaged."""
    on_host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {
        "params": {
            "layers": {"w": jnp.arange(4 * 64 * 32, dtype=jnp.float32).reshape(4, 64, 32)},
            "head": jnp.linspace(-1, 1, 2048, dtype=jnp.bfloat16).reshape(64, 32),
        },
        "moments": jax.device_put(jnp.arange(4096.0), on_host),
        "step": jnp.int32(STEP),
    }
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(STEP, state, *DOCUMENTS, wait=True)


def read(directory: pathlib.Path) -> Any:
    """Returns all that a run takes from a checkpoint."""
    with Checkpoints(directory) as checkpoints:
        documents = checkpoints.restore_data_state(STEP), checkpoints.description(STEP)
        return documents, checkpoints.restore(STEP, checkpoints.metadata(STEP))


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint, from its directory."""
    return sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file())


def damage(file: pathlib.Path, chance: random.Random) -> str:
    """Flips a bit of a file or cuts it; returns what was done."""
    content = bytearray(file.read_bytes())
    if not content:
        return "left, it is empty"
    if chance.random() < 0.5:
        kept = chance.randrange(len(content))
        file.write_bytes(content[:kept])
        return f"cut to {kept} of {len(content)} bytes"
    byte, bit = chance.randrange(len(content)), chance.randrange(8)
    content[byte] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {byte} flipped"


def outcome(directory: pathlib.Path, expected: Any) -> str:
    """Returns 'named', 'harmless', or what went wrong."""
    try:
        documents, state = read(directory)
    except CheckpointError as error:
        return "named" if str(directory) in str(error) else f"not named: {error}"
    except Exception as error:
        return f"another error: {type(error).__name__}: {error}"
    if documents != expected[0]:
        return f"other documents: {documents}"
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), state, expected[1]
    )
    return "harmless" if all(jax.tree.leaves(same)) else f"other numbers: {same}"


def run_cases(whole: pathlib.Path, cases: range, seed: int) -> list[tuple[str, str, str]]:
    """Returns (file, what was done, what came of it) of some cases.

    Args:
      whole: the checkpoint.
      cases: their numbers.
      seed: of what is drawn; a case of a number is the same whatever others there are.
    """
    expected, found = read(whole), []
    files = files_of(whole)
    for case in cases:
        chance = random.Random(f"{seed} {case}")
        file = chance.choice(files)
        with tempfile.TemporaryDirectory() as scratch:
            copy = pathlib.Path(scratch, "checkpoints")
            shutil.copytree(whole, copy)
            done = damage(copy / file, chance)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            came = outcome(copy, expected)
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if grown > MOST_BYTES:
            came = f"took {grown:,} bytes"
        found.append((str(file), done, came))
    return found


def _worker(whole: pathlib.Path, cases: range, seed: int, results: Any) -> None:
    for case in cases:
        results.send((case, run_cases(whole, range(case, case + 1), seed)[0]))


def run_apart(whole: pathlib.Path, number: int, seed: int) -> list[tuple[str, str, str]]:
    """Returns the same as `run_cases`, where a process that ends is a failure of its case."""
    found: list[tuple[str, str, str]] = []
    while len(found) < number:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        rest = range(len(found), number)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_worker, args=(whole, rest, seed, theirs))
        process.start()
        theirs.close()
        try:
            while len(found) < number:
                found.append(ours.recv()[1])
        except EOFError:
            process.join()
            found.append(("unknown", f"case {len(found)}", f"process ended: {process.exitcode}"))
        process.join()
    return found


def kind_of(file: str) -> str:
    """Returns the name of a file without what differs from one checkpoint to the next."""
    parts = pathlib.Path(file).parts[1:]
    return "/".join("*" if len(part) == 32 else part for part in parts)


def main() -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    platforms.leave_out_absent_tpus()
    with tempfile.TemporaryDirectory() as scratch:
        whole = pathlib.Path(scratch, "whole")
        write(whole)
        found = run_apart(whole, options.cases, options.seed)
    table = collections.Counter((kind_of(file), came) for file, _, came in found)
    for (file, came), number in sorted(table.items()):
        print(f"{number:6}  {came:10.200}  {file}")
    bad = [case for case in found if case[2] not in ("named", "harmless")]
    for file, done, came in bad:
        print(f"FAILED  {file}: {done}: {came}")
    print(f"{len(found)} cases, {len(bad)} failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
