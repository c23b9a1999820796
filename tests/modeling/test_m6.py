"""The flax module against the functions of explicit trees, and what users of flax expect of it."""

import collections
import contextlib
import re

import flax
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import linen as nn

from m6jax.foundation.partitioning import Partitioning, is_parameter
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, Part, offload
from m6jax.layouts.layout import LayoutError
from m6jax.modeling import M6, balancing
from m6jax.modeling.block import Block
from m6jax.modeling.m6 import apply_layers
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor
from m6jax.training import train_state

PARTS = (Part(pattern="norm"), Part(pattern="attention", unit=2))
BIASED = models.experts(router=TopK(scores="SIGMOID", bias_rate=0.01))
JITTERED = models.experts(router_jitter=0.1)
PATCHED = {"norm": "LAYER", "sandwich_norm": True, "positions": "LEARNED", "patch_dim": 3}
MESH = Partitioning(data=2, expert=2, model=2)
CASES = {
    "one shared layer": ({}, Layout(depth=4, unit=1), ["bidirectional"]),
    "units of two": ({"remat": "FULL", "dropout": 0.1}, Layout(depth=4, unit=2), ["key"]),
    "distinct": ({"moe": JITTERED, "remat": "ALL_BUT_PRODUCTS"}, Layout(depth=4, unit=4), ["key"]),
    "unrolled": (
        {"remat": "FULL", "moe": BIASED, "dropout": 0.1},
        Layout(depth=2, unit=2, form=Form.UNROLLED),
        ["key", "biases"],
    ),
    "parts": ({"moe": BIASED}, Layout(depth=4, unit=1, parts=PARTS), ["biases"]),
    "pattern": (
        {"pattern": ("DENSE", "SPARSE"), "tied_output": False, **PATCHED},
        Layout(depth=2, unit=1),
        ["bidirectional", "patches"],
    ),
    "eight devices": (
        {"moe": BIASED, "remat": "FULL", "dropout": 0.1},
        Layout(depth=4, unit=1, parts=PARTS),
        ["key"],
    ),
}


def model_of(name):
    changes, layout, _ = CASES[name]
    layers = layout.depth * len(changes.get("pattern", (0,)))
    return M6(models.tiny(num_layers=layers, **changes), layout)


def batch_of(model, rows=2):
    batch = models.make_batch(rows=rows, prefix=2)
    if model.config.patch_dim is not None:
        patches = np.random.default_rng(0).normal(size=(rows, 2, 3)).astype(np.float32)
        mask = np.zeros_like(batch["tokens"])
        mask[:, :2] = 1
        batch |= {"patches": patches, "patch_mask": mask}
    return batch


@contextlib.contextmanager
def case(name):
    """Gives a case's model and a batch, on the mesh if it has one."""
    model = model_of(name)
    if name != "eight devices":
        yield model, batch_of(model)
        return
    mesh = MESH.make_mesh()
    with MESH.activate(mesh):
        yield model, jax.device_put(batch_of(model, rows=8), MESH.batch_sharding(mesh))


def variables_of(model):
    params = models.draw(model.config, model.layout)
    return balancing.variables(
        balancing.join(params, models.draw_biases(model.config, model.layout))
    )


def loss_and_gradients(apply):
    """Of (parameters, biases), batch, key."""

    def loss(weights, *args):
        output = apply(*weights, *args)
        router = output.router
        extra = router.load_balance_loss.sum() + router.router_z_loss.sum()
        return (output.logits**2).mean() + extra, output

    return models.jit(jax.value_and_grad(loss, has_aux=True))


def both(model):
    """The same by explicit slices of the trees, and by the module."""

    def explicit(params, biases, batch, key):
        params = balancing.join(params, biases)
        return Transformer(model.config).apply(params, batch, model.layout, key)

    def module(params, biases, batch, key):
        variables = {"params": params}
        if biases is not None:
            variables[balancing.COLLECTION] = biases
        return model.apply(variables, batch, rngs={"dropout": key})

    return loss_and_gradients(explicit), loss_and_gradients(module)


def operations(lowered):
    """How often each operation is in a program, but for those that only rename and repeat."""
    found = re.findall(r"stablehlo\.\w+", lowered.as_text())
    return collections.Counter(found) - collections.Counter(
        {name: len(found) for name in ("stablehlo.reshape", "stablehlo.constant")}
    )


def without(what, weights, batch, key):
    """The arguments with one of them changed."""
    if what == "key":
        return weights, batch, jax.random.key(4)
    if what == "biases":
        return (weights[0], jax.tree.map(np.negative, weights[1])), batch, key
    return weights, batch | {what: np.zeros_like(batch[what])}, key


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_transformer(name):
    """The same numbers, with no operation more: it takes no longer to compile or to run."""
    with case(name) as (model, batch):
        variables = variables_of(model)
        weights = variables["params"], variables.get(balancing.COLLECTION)
        args = weights, batch, jax.random.key(3)
        explicit, module = (fn.lower(*args) for fn in both(model))
        assert operations(module) <= operations(explicit)
        compiled = module.compile()
        (total, output), grads = explicit.compile()(*args)
        (got_total, got), got_grads = compiled(*args)
        models.assert_close(got_total, total)
        models.assert_close(got, output, 2e-6)
        models.assert_close(got_grads, grads, 5e-6)
        for what in CASES[name][-1]:
            (other, _), _ = compiled(*without(what, *args))
            assert abs(other - total) > 1e-4 * total, f"{what} has no effect"
    assert not any(map(np.any, jax.tree.leaves(got_grads[1]))), "biases have no gradient"


@pytest.mark.parametrize("name", CASES)
def test_variables_are_the_trees_of_the_training_state(name):
    """Names and shapes, also from a batch without patches; shardings come from the one table."""
    model, mesh = model_of(name), MESH.make_mesh()
    got = jax.eval_shape(model.init, jax.random.key(0), models.make_batch(rows=1))
    state = train_state.abstract_state(
        Transformer(model.config), model.layout, Adafactor(), MESH, mesh, averaged=False
    )
    expected = {"params": state.params}
    if state.extra.router_bias is not None:
        expected[balancing.COLLECTION] = state.extra.router_bias
    assert not models.differences(got, expected)
    assert model.shardings(MESH, mesh) == train_state.shardings_of(expected)


def test_a_mesh_that_does_not_divide_is_refused():
    where = Partitioning(data=1, expert=8, model=1)
    model = M6(models.tiny(moe=models.experts(num_experts=4)), Layout(depth=2, unit=2))
    with pytest.raises(ConfigError, match=r"params/layers/moe/.*expert = 4 does not divide"):
        model.shardings(where, where.make_mesh())


def test_init_draws_by_path_and_layer_where_variables_lie():
    model, mesh = model_of("one shared layer"), MESH.make_mesh()
    batch, shardings = batch_of(model, rows=8), model.shardings(MESH, mesh)

    def init(key):
        output, variables = model.init_with_output({"params": key}, batch)
        again = model.apply(variables, batch)
        drawn = Transformer(model.config).init(key, model.layout)
        return variables, drawn, output.logits, again.logits

    with MESH.activate(mesh):
        jitted = models.jit(init, out_shardings=(shardings, None, None, None))
        variables, drawn, *logits = jitted(jax.random.key(1))
    assert jax.tree.map(lambda leaf: leaf.sharding, variables) == shardings
    models.assert_close(variables["params"], drawn)
    models.assert_close(*logits)


class Twice(nn.Module):
    """A user's module with the model inside."""

    model: M6

    def __call__(self, batch):
        return 2 * self.model(batch).logits


def ways(model, variables, batch):
    """Logits by all that a user of flax may do."""
    inside = {name: {"model": tree} for name, tree in variables.items()}
    bound = model.bind(variables)
    return {
        "apply": model.apply(variables, batch).logits,
        "frozen": model.apply(flax.core.freeze(variables), batch).logits,
        "changed": model.apply(variables, batch, mutable=["params"])[0].logits,
        "bind": bound.logits(bound.hidden(batch).x),
        "nn.jit": nn.jit(M6)(model.config, model.layout).apply(variables, batch).logits,
        "inside": Twice(model).apply(inside, batch) / 2,
    }


def test_users_of_flax_get_the_same_logits_by_every_way():
    model = model_of("parts")
    logits = models.jit(lambda *args: ways(model, *args))(variables_of(model), batch_of(model))
    for got in logits.values():
        models.assert_close(got, logits["apply"])


@pytest.mark.parametrize("name", ["units of two", "unrolled", "pattern"])
def test_it_is_a_module_like_others(name):
    model, key = model_of(name), jax.random.PRNGKey(1)  # an old key too
    batch, rngs = batch_of(model), {"params": key, "dropout": key}
    variables = jax.eval_shape(model.init, key, batch)
    shapes = {
        leaf.shape for leaf in jax.eval_shape(lambda *a: ways(model, *a), variables, batch).values()
    }
    assert shapes == {(*batch["tokens"].shape, model.config.vocab_size)}
    output, again = jax.eval_shape(model.init_with_output, rngs, batch)
    assert output.logits.shape in shapes
    assert not models.differences(again, variables)
    by_nn_jit = jax.eval_shape(nn.jit(M6)(model.config, model.layout).init, key, batch)
    assert not models.differences(by_nn_jit, variables)
    nested = jax.eval_shape(Twice(model).init, key, batch)
    assert nested.keys() == variables.keys()
    for collection, tree in nested.items():
        assert not models.differences(tree["model"], variables[collection])


def test_init_without_a_key_is_refused():
    model = model_of("one shared layer")
    with pytest.raises(flax.errors.InvalidRngError, match='needs PRNG for "params"'):
        model.init({"dropout": jax.random.key(0)}, batch_of(model))


def test_the_table_shows_every_parameter_once():
    model = model_of("one shared layer")
    batch, wide = models.make_batch(rows=1), {"width": 200}
    table = model.tabulate(jax.random.key(0), batch, console_kwargs=wide)
    described = jax.tree.leaves(model.declared(), is_leaf=is_parameter)
    size = sum(np.prod(parameter.value.shape) for parameter in described)
    assert f"Total Parameters: {size:,}" in table
    assert table.count("layers/moe/router") == 1


def test_the_output_before_the_head():
    model = model_of("one shared layer")
    variables, batch = variables_of(model), batch_of(model)
    hidden = model.apply(variables, batch, method="hidden").x
    logits = model.apply(variables, hidden, method="logits")
    models.assert_close(logits, model.apply(variables, batch).logits)
    assert logits.dtype == jnp.float32


def uses_the_module(layout, move=lambda params: params):
    """Whether `apply_layers` traces the flax module."""
    config, seen = models.tiny(num_layers=layout.depth), []

    def note(call, args, kwargs, context):
        seen.append(type(context.module))
        return call(*args, **kwargs)

    def apply(params, batch):
        return apply_layers(Transformer(config), move(params), batch, layout).x

    params = jax.tree.map(lambda p: p.value, models.describe(config, layout), is_leaf=is_parameter)
    with nn.intercept_methods(note):
        jax.eval_shape(apply, params, models.make_batch())
    assert Block in seen
    return M6 in seen


def test_the_ordinary_step_applies_the_module():
    assert uses_the_module(Layout(depth=4, unit=2))
    assert uses_the_module(Layout(depth=2, unit=2, form=Form.UNROLLED))


def test_what_needs_explicit_slices_gets_them():
    assert not uses_the_module(Layout(depth=4, unit=4, borders=(2,)))
    assert not uses_the_module(
        Layout(depth=4, unit=4),
        lambda params: params | {"layers": offload.to_host(params["layers"])},
    )


def test_a_stack_in_runs_is_refused():
    model = M6(models.tiny(num_layers=4), Layout(depth=4, unit=4, borders=(2,)))
    with pytest.raises(LayoutError, match=r"M6\.layout.*\(2,\).*Transformer\.apply"):
        model.init(jax.random.key(0), models.make_batch(rows=1))
