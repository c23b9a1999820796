"""Traces training steps while every annotation of modeling and training is checked.

A program of its own, since what is to be checked must be imported with jaxtyping's hook.
"""

import functools

import jax
import jax.numpy as jnp
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CASES = ("parts", "pattern", "dropless")
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    """Checks all but constructors: a setting may be given as the name of its enum's member."""
    return function if function.__name__ == "__init__" else _beartype(function)


def main():
    with install_import_hook(["m6jax.modeling", "m6jax.training"], "annotated_steps.check"):
        import models
        import test_m6

        from m6jax.modeling import M6
        from m6jax.modeling.transformer import Transformer
        from m6jax.optimizers import AdamW
        from m6jax.training import losses, train_state, train_step

    def trace(model, batch, apply):
        """Traces a whole step: loss, gradients, update."""
        functions, layout = Transformer(model.config), model.layout
        tx = AdamW().build(train_state.logical_axes(functions.parameters(layout)))
        loss = losses.Loss(label_smoothing=0.1, z_loss=0.1, chunk_length=4)
        step = functools.partial(
            train_step.train_step,
            loss_fn=train_step.model_loss(functions, layout, loss, apply=apply),
            layout=layout,
            tx=tx,
            learning_rate=lambda step: jnp.float32(1e-3),
            update=train_step.Update(microbatches=2),
            balance=train_step.router_balance(functions, layout),
        )

        def first(params, biases, batch):
            return step(train_state.create(params, tx, 0, True, biases), batch)

        weights = models.draw(model.config, layout), models.draw_biases(model.config, layout)
        jax.eval_shape(first, *weights, batch)

    dropless = models.tiny(moe=models.experts(capacity_factor=None), dropout=0.1)
    for name in CASES:
        model = M6(dropless, models.unrolled(dropless))
        if name != "dropless":
            model = test_m6.model_of(name)
        batch = test_m6.batch_of(model)
        trace(model, batch, train_step.apply_layers)
        if name == "parts":
            trace(model, batch, Transformer.apply_layers)
        print(name)


if __name__ == "__main__":
    main()
