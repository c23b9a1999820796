"""Shapes in annotations are what really comes: checked in a process of its own, never in a run."""

import os
import pathlib
import subprocess
import sys

import annotated_steps
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float

HERE = pathlib.Path(__file__).parent


def test_the_shapes_in_annotations_are_true():
    """Of training steps with routers, biases, patches, parts and dropout."""
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
    result = subprocess.run(
        [sys.executable, "-c", "import annotated_steps; annotated_steps.main()"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split() == list(annotated_steps.CASES)


def test_a_wrong_shape_is_found():
    @jaxtyping.jaxtyped(typechecker=annotated_steps.check)
    def rows(x: Float[Array, "B T"], y: Float[Array, " B"]) -> None:
        pass

    rows(jnp.zeros((2, 3)), jnp.zeros(2))
    with pytest.raises(jaxtyping.TypeCheckError, match="B=2"):
        rows(jnp.zeros((2, 3)), jnp.zeros(3))
