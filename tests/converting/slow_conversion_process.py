"""Delinks SOURCE to TARGET; once half of the leaves are written it says so, and waits."""

import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import source_runs

from m6jax.converting import values
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange

make, made = values.make, set()


def slowly(recipe, *arguments):
    made.add(recipe.name)
    if len(made) == 60:
        print("in the middle", flush=True)
        time.sleep(600)
    return make(recipe, *arguments)


def main():
    source, target = sys.argv[1:]
    values.make = slowly
    run = source_runs.experiment(pathlib.Path(target))
    convert(run, Conversion(source=source), LayoutChange.DELINK)


main()
