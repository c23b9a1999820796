"""Runs whose checkpoints are converted: a tiny model of 4 layers, its state filled with numbers."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import runs

from m6jax import layouts
from m6jax.checkpointing import Checkpoints
from m6jax.converting.source_checkpoint import expected_state
from m6jax.experiment import Experiment, Stage
from m6jax.foundation import pytrees
from m6jax.layouts import Form, Layout
from m6jax.pseudo_to_real import delinking
from m6jax.pseudo_to_real.delinking import Policy

DEPTH, STEP = 4, 7
DATA_STATE = {"place": 7}
REAL = Stage(name="real", form=Form.UNROLLED, optimizer_state=Policy.COPY)


def experiment(directory: pathlib.Path, stage: Stage = REAL, **changes: Any) -> Experiment:
    """A run of one stage; its text is not there."""
    model = changes.pop("model", models.tiny(num_layers=DEPTH))
    return runs.experiment(
        pathlib.Path("/nowhere"), directory, model=model, stages=(stage,), **changes
    )


def layout(unit: int, form: Form = Form.STACKED, parts: tuple[layouts.Part, ...] = ()) -> Layout:
    return Layout(depth=DEPTH, unit=unit, form=form, parts=parts)


def make_state(run: Experiment, lies: Layout, seed: int = 0) -> Any:
    """A state with numbers of its own in every leaf; counts are small."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 100, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    state = jax.tree.map(fill, expected_state(run, lies))
    return state.replace(step=jnp.int32(STEP))


def save(directory: pathlib.Path, state: Any, lies: Layout, step: int = STEP) -> None:
    description = {"stage": 0, "stage_name": "pseudo", "layout": lies.to_json()}
    with Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(step, state, DATA_STATE, description, wait=True)


def load(directory: pathlib.Path, step: int = STEP) -> dict[str, np.ndarray]:
    """The leaves of a checkpoint by name."""
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return dict(pytrees.flatten_named(checkpoints.restore(step, checkpoints.metadata(step))))


def delinked(state: Any, old: Layout, new: Layout, policy: Policy | None) -> dict[str, Any]:
    """What `delinking` makes of a state in memory, by name."""
    return dict(pytrees.flatten_named(delinking.delink(state, old, new, policy)))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal names, types and bits."""
    assert sorted(ours) == sorted(theirs)
    for name, leaf in theirs.items():
        assert ours[name].dtype == leaf.dtype, name
        assert np.asarray(ours[name]).tobytes() == np.asarray(leaf).tobytes(), name
