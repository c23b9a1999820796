import jax
import jax.numpy as jnp
import pytest

from m6jax.checkpointing import CheckpointError
from m6jax.checkpointing.partial import select


def leaf(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


SAVED = {
    "params/head": leaf(jnp.float32, 8),
    "params/body": leaf(jnp.float32, 4, 4),
    "opt_state/mu/head": leaf(jnp.float32, 8),
    "step": leaf(jnp.int32),
}


def take_all(name):
    return True


def test_parameters_alone():
    asked = {"params": {"head": leaf(jnp.float32, 8), "body": leaf(jnp.float32, 4, 4)}}

    wanted, report = select(7, SAVED, asked, take_all)

    assert wanted == {
        "params/head": asked["params"]["head"],
        "params/body": asked["params"]["body"],
    }
    assert report.taken == ("params/body", "params/head")
    assert (report.cast, report.missing) == ((), ())
    assert report.skipped == ("opt_state/mu/head", "step")


def test_every_leaf_is_accounted_for():
    asked = {
        "params": {"head": leaf(jnp.bfloat16, 8), "gate": leaf(jnp.float32, 2)},
        "opt_state": {"mu": {"head": leaf(jnp.float32, 8)}},
    }

    _, report = select(7, SAVED, asked, lambda name: not name.startswith("opt_state"))

    assert str(report) == (
        "checkpoint 7: 1 leaves taken\n"
        "  cast: params/head: float32 to bfloat16\n"
        "  missing: params/gate\n"
        "  skipped: params/body\n"
        "  skipped: opt_state/mu/head\n"
        "  skipped: step"
    )


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"params": {"head": leaf(jnp.float32, 9)}}, "params/head: float32[8] against float32[9]"),
        ({"step": leaf(jnp.float32)}, "step: int32[] against float32[]"),
        ({"step": leaf(jnp.int8)}, "step: int32[] against int8[]"),
    ],
)
def test_other_shapes_and_kinds_of_numbers_are_refused(asked, line):
    with pytest.raises(CheckpointError, match="checkpoint 7 has leaves that cannot") as caught:
        select(7, SAVED, asked, take_all)
    assert f"\n  {line}\n" in str(caught.value)

    wanted, _ = select(7, SAVED, asked, lambda name: False)
    assert wanted == {}
