"""Names to mesh axes, strictly; and what happens on the devices of a mesh."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from m6jax.foundation import partitioning
from m6jax.foundation.partitioning import (
    DEFAULT_RULES,
    Parameter,
    Partitioning,
    PartitioningError,
    constrain,
    declare,
    exchange,
    partition_spec,
    sharded,
    total,
)
from m6jax.foundation.validated import ConfigError

CUBE = Partitioning(data=2, expert=2, model=2)


def parameter(shape, axes):
    value = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Parameter(value, axes, jax.nn.initializers.zeros)


TREE = {
    "layers": {"up": parameter((2, 8, 16, 4), ("layers", "expert", "embed", "mlp"))},
    "norm": parameter((16,), ("embed",)),
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU, as far as a mesh is made of it."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0
    client: None = None


class TestPartitioning:
    def test_data_takes_what_is_left(self):
        assert Partitioning().mesh_shape(8) == (8, 1, 1)
        assert Partitioning(expert=2, model=2).mesh_shape(8) == (2, 2, 2)
        assert Partitioning(data=1, expert=8).mesh_shape(8) == (1, 8, 1)

    def test_expert_takes_what_is_left_where_data_does_not(self):
        assert Partitioning(data=1, expert=-1).mesh_shape(8) == (1, 8, 1)
        assert Partitioning(data=2, expert=-1, model=2).mesh_shape(8) == (2, 2, 2)
        with pytest.raises(ConfigError, match="does not fit 8 devices"):
            Partitioning(data=3, expert=-1).mesh_shape(8)

    @pytest.mark.parametrize(
        "partitioning",
        [
            Partitioning(data=4),
            Partitioning(expert=3),
            Partitioning(expert=16),
            Partitioning(data=16),
        ],
    )
    def test_refuses_sizes_that_do_not_fit_the_devices(self, partitioning):
        """B9 (viii)."""
        with pytest.raises(ConfigError, match=r"data .* x expert .* does not fit 8 devices"):
            partitioning.mesh_shape(8)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"data": 0}, "Partitioning.data: 0 devices; at least 1"),
            ({"data": -2}, "Partitioning.data: -2 devices"),
            ({"expert": 0}, "Partitioning.expert: 0 devices"),
            ({"model": -1}, "Partitioning.model: -1 devices"),
            ({"expert": -1}, r"expert: -1 beside data = -1 does not say"),
            (
                {"rules": {"expart": ()}},
                r"unknown logical axis 'expart' \(did you mean 'expert'\?\)",
            ),
            (
                {"rules": {"mlp": ("modal",)}},
                r"rules\['mlp'\]: unknown mesh axis 'modal' .*'model'",
            ),
        ],
    )
    def test_refuses_what_cannot_be(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            Partitioning(**settings)

    def test_mesh_has_the_three_axes_whatever_their_sizes(self):
        mesh = Partitioning().make_mesh()
        assert dict(mesh.shape) == {"data": 8, "expert": 1, "model": 1}
        assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}

    def test_mesh_of_some_devices(self):
        devices = jax.devices()[2:6]
        mesh = Partitioning(data=2, expert=1, model=2).make_mesh(devices)
        assert mesh.devices.tolist() == [[devices[:2]], [devices[2:]]]

    @pytest.mark.parametrize("sizes", [(1, 256, 1), (4, 64, 1), (4, 16, 4)])
    def test_any_mesh_that_fits_is_laid_on_a_torus(self, sizes):
        """Also where an axis is no product of the sides, 16 x 16."""
        sides = itertools.product(range(16), range(16))
        chips = [Chip(id=i, coords=(x, y, 0)) for i, (y, x) in enumerate(sides)]
        data, expert, model = sizes
        mesh = Partitioning(data=data, expert=expert, model=model).make_mesh(chips)
        assert mesh.devices.shape == sizes
        assert {chip.id for chip in mesh.devices.flat} == set(range(256))

    def test_rules_replace_those_of_the_table(self):
        rules = Partitioning(rules={"heads": ()}).activation_rules
        assert rules == DEFAULT_RULES | {"heads": ()}

    def test_fully_sharded_cuts_weights_but_not_activations(self):
        partitioning = Partitioning(fully_sharded=True)
        assert partitioning.weight_rules["embed"] == ("data",)
        assert partitioning.activation_rules["embed"] == ()

    def test_rows_divisor_counts_the_devices_that_have_rows(self):
        assert CUBE.rows_divisor(8) == 4
        assert Partitioning(model=8).rows_divisor(8) == 1
        assert Partitioning(expert=2, rules={"batch": ("data",)}).rows_divisor(8) == 4
        assert Partitioning(rules={"batch": ()}).rows_divisor(8) == 1

    def test_batch_sharding_spreads_rows(self):
        sharding = CUBE.batch_sharding(CUBE.make_mesh())
        assert sharding.spec == PartitionSpec(("data", "expert"))
        assert sharding.shard_shape((8, 3)) == (2, 3)


class TestWeightShardings:
    def test_follow_the_table(self):
        mesh = CUBE.make_mesh()
        shardings = CUBE.weight_shardings(TREE, mesh)
        assert shardings["layers"]["up"] == NamedSharding(
            mesh, PartitionSpec(None, "expert", None, "model")
        )
        assert shardings["norm"].spec == PartitionSpec(None)

    def test_fully_sharded_cuts_embed_over_data(self):
        partitioning = Partitioning(expert=2, model=2, fully_sharded=True)
        shardings = partitioning.weight_shardings(TREE, partitioning.make_mesh())
        assert shardings["layers"]["up"].spec == PartitionSpec(None, "expert", "data", "model")
        assert shardings["norm"].spec == PartitionSpec("data")

    @pytest.mark.parametrize(
        ("partitioning", "message"),
        [
            (
                Partitioning(model=8),
                r"layers/up: mlp = 4 does not divide over the mesh axes model = 8 .* divides 4\)",
            ),
            (
                Partitioning(expert=2, rules={"expert": ("data", "expert"), "embed": ("data",)}),
                "'expert' and 'embed' are both on the mesh axis 'data'",
            ),
            (
                Partitioning(expert=4, model=2, rules={"mlp": ("expert", "model"), "expert": ()}),
                "layers/up: mlp = 4 does not divide over the mesh axes expert = 4 x model = 2",
            ),
        ],
    )
    def test_refuse_what_does_not_divide_or_collides(self, partitioning, message):
        """B9 (viii): experts and widths that the mesh does not divide."""
        with pytest.raises((ConfigError, PartitioningError), match=message):
            partitioning.weight_shardings(TREE, partitioning.make_mesh())


class TestPartitionSpec:
    @pytest.mark.parametrize(
        ("names", "spec"),
        [
            (("batch", "length", "embed"), PartitionSpec(("data", "expert"), None, None)),
            (("expert", "embed", "mlp"), PartitionSpec("expert", None, "model")),
            (("layers", "embed", "heads", "kv"), PartitionSpec(None, None, "model", None)),
            (("vocab", None), PartitionSpec("model", None)),
            ((), PartitionSpec()),
        ],
    )
    def test_of_the_table(self, names, spec):
        assert partition_spec(names, DEFAULT_RULES) == spec

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("batch", "lenght"), r"unknown logical axis 'lenght' \(did you mean 'length'\?\)"),
            (("heads", "mlp"), "'heads' and 'mlp' are both on the mesh axis 'model'"),
            (("batch", "expert"), "'batch' and 'expert' are both on the mesh axis 'expert'"),
            (("vocab", "vocab"), "'vocab' and 'vocab' are both on the mesh axis 'model'"),
        ],
    )
    def test_refuses_unknown_names_and_axes_used_twice(self, names, message):
        with pytest.raises(PartitioningError, match=message):
            partition_spec(names, DEFAULT_RULES)


class TestConstrain:
    def test_is_the_identity_without_a_mesh(self):
        x = jnp.ones((2, 3))
        assert constrain(x, ("batch", "embed")) is x

    def test_places_an_activation(self):
        mesh = CUBE.make_mesh()
        with CUBE.activate(mesh):
            y = jax.jit(lambda x: constrain(x * 2, ("batch", "mlp")))(jnp.ones((8, 4)))
        expected = NamedSharding(mesh, PartitionSpec(("data", "expert"), "model"))
        assert y.sharding.is_equivalent_to(expected, 2)

    def test_follows_the_active_rules(self):
        partitioning = Partitioning(expert=2, model=2, rules={"batch": ("model",), "mlp": ()})
        mesh = partitioning.make_mesh()
        with partitioning.activate(mesh):
            y = jax.jit(lambda x: constrain(x * 2, ("batch", "mlp")))(jnp.ones((8, 4)))
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("model")), 2)

    @pytest.mark.parametrize("on_a_mesh", [False, True])
    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("batch", "embedd"), "unknown logical axis 'embedd' .*'embed'"),
            (("mlp", "heads"), "both on the mesh axis 'model'"),
            (("batch",), r"names 1 axes, the array has shape \(8, 8\)"),
            (("batch", None, None), "names 3 axes"),
        ],
    )
    def test_is_strict(self, names, message, on_a_mesh):
        def check():
            with pytest.raises(PartitioningError, match=message):
                constrain(jnp.ones((8, 8)), names)

        if on_a_mesh:
            with CUBE.activate(CUBE.make_mesh()):
                check()
        else:
            check()

    def test_rules_end_with_the_mesh_also_after_an_error(self):
        partitioning = Partitioning(rules={"mlp": ()})

        def fail():
            with partitioning.activate(partitioning.make_mesh()):
                constrain(jnp.ones((8, 8)), ("mlp", "heads"))  # allowed by these rules
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert jax.sharding.get_abstract_mesh().empty
        with pytest.raises(PartitioningError, match="both on the mesh axis 'model'"):
            constrain(jnp.ones((8, 8)), ("mlp", "heads"))


class TestSharded:
    def test_without_a_mesh_is_the_function_itself(self):
        def fn(x):
            return total(exchange(x, "expert", 0, 1), "batch", "mlp")

        run = sharded(fn, [("batch", None)], ("batch", None))
        x = jnp.arange(6.0).reshape(2, 3)
        np.testing.assert_array_equal(run(x), x)

    def test_every_device_has_its_part(self):
        with CUBE.activate(CUBE.make_mesh()):
            run = sharded(lambda x: jnp.full((1, 1), x.size), [("batch", "mlp")], ("batch", "mlp"))
            sizes = jax.jit(run)(jnp.ones((8, 6)))
        np.testing.assert_array_equal(sizes, np.full((4, 2), 2 * 3))

    def test_total_sums_over_the_devices_of_the_names(self):
        def fn(x):
            return total(x.sum(), "batch", "mlp"), total(x, "mlp")

        x = jnp.arange(8.0).reshape(4, 2)
        with CUBE.activate(CUBE.make_mesh()):
            whole, rows = jax.jit(sharded(fn, [("batch", "mlp")], ((), ("batch", None))))(x)
        assert float(whole) == 28
        np.testing.assert_array_equal(rows, x.sum(1, keepdims=True))

    def test_exchange_sends_every_piece_to_the_device_of_its_number(self):
        # x[b, e] = 10 b + e. Devices of one data index exchange: expert device e gets column e.
        x = 10.0 * jnp.arange(4)[:, None] + jnp.arange(2)
        with CUBE.activate(CUBE.make_mesh()):
            run = sharded(
                lambda x: exchange(x, "expert", split=1, concat=0),
                [("batch", None)],
                ("batch", None),
            )
            received = jax.jit(run)(x)  # data 0, expert 0: rows 0 and 1, column 0, and so on
        np.testing.assert_array_equal(received[:, 0], [0, 10, 1, 11, 20, 30, 21, 31])

    @pytest.mark.parametrize(
        "partitioning",
        [CUBE, Partitioning(data=2, expert=4, rules={"expert": ("data", "expert")})],
        ids=["one axis", "two axes"],
    )
    def test_exchange_there_and_back_is_the_identity(self, partitioning):
        def fn(x):  # [1, experts, 2]
            there = exchange(x, "expert", split=1, concat=0)
            return exchange(there, "expert", split=0, concat=1)

        x = jnp.arange(8 * 8 * 2.0).reshape(8, 8, 2)
        rows = ("batch", None, None)
        with partitioning.activate(partitioning.make_mesh()):
            np.testing.assert_array_equal(jax.jit(sharded(fn, [rows], rows))(x), x)

    @pytest.mark.parametrize(
        "function", [lambda x: total(x, "mpl"), lambda x: exchange(x, "mpl", 0, 0)]
    )
    def test_collectives_refuse_unknown_names(self, function):
        with pytest.raises(PartitioningError, match="unknown logical axis 'mpl'"):
            function(jnp.ones(2))

    @pytest.mark.parametrize("names", [([("batsh",)], ("batch",)), ([("batch",)], ("batsh",))])
    def test_refuses_unknown_names_with_and_without_a_mesh(self, names):
        with pytest.raises(PartitioningError, match="unknown logical axis 'batsh'"):
            sharded(lambda x: x, *names)
        with CUBE.activate(CUBE.make_mesh()), pytest.raises(PartitioningError, match="'batsh'"):
            sharded(lambda x: x, *names)

    def test_gradients_are_those_of_one_device(self):
        def fn(x, w):
            rows = exchange(x[:, :, None], "expert", split=1, concat=0)
            rows = exchange(rows * w[None], "expert", split=0, concat=1)
            return total(rows.sum(-1), "mlp")

        def loss(x, w):
            run = sharded(fn, [("batch", None), ("expert", "mlp")], ("batch", None))
            return (run(x, w) ** 2 * jnp.arange(8.0)[:, None]).sum()

        x, w = jnp.arange(16.0).reshape(8, 2), jnp.arange(1.0, 9).reshape(2, 4)
        expected = jax.grad(loss, (0, 1))(x, w)
        with CUBE.activate(CUBE.make_mesh()):
            got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


class TestParameter:
    def test_declare_keeps_axes_and_initializer_beside_the_value(self):
        init = jax.nn.initializers.ones
        boxed = declare(init, ("embed", "mlp"))(jax.random.key(0), (2, 3), jnp.bfloat16)
        assert partitioning.is_parameter(boxed)
        assert (boxed.axes, boxed.initializer) == (("embed", "mlp"), init)
        assert boxed.unbox().dtype == jnp.bfloat16
        np.testing.assert_array_equal(boxed.unbox(), np.ones((2, 3)))
        assert boxed.replace_boxed(jnp.zeros(1)).axes == boxed.axes

    def test_a_lifted_transform_names_the_axis_of_layers(self):
        boxed = parameter((2,), ("embed",))
        stacked = boxed.add_axis(0, {})
        assert stacked.axes == ("layers", "embed")
        assert stacked.remove_axis(0, {}).axes == boxed.axes
