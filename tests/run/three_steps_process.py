"""One of the processes of a training run: PROCESS ADDRESS DIRECTORY; also imported for `run`."""

import functools
import pathlib
import sys

import jax
import models
import numpy as np
from jax.experimental import multihost_utils

from m6jax import decoding
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import Update, model_loss, train_step

# On 2 x 4 devices the experts are on both processes; parameters cut over `data` are so on the cube.
MESHES = {
    "experts": Partitioning(data=1, expert=8, model=1),
    "cube": Partitioning(data=2, expert=2, model=2, fully_sharded=True),
}
CONFIG = models.tiny(num_layers=1)


def run(where):
    """Three steps over all devices of all processes.

    Returns:
      name -> array: losses and norms of every step, what the model then thinks of the texts that it
      generates, and the last parameters, whole.
    """
    mesh, layout, optimizer = where.make_mesh(), models.stacked(CONFIG), AdamW()
    model = Transformer(CONFIG)
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    abstract = train_state.abstract_state(model, layout, optimizer, where, mesh, averaged=False)
    step = functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss()),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 1e-2,
        update=Update(clip_norm=0.5),
    )
    metrics = []
    with where.activate(mesh):
        state = train_state.initialize(model, layout, tx, 3, abstract)
        compiled = models.jit(step, out_shardings=(train_state.shardings_of(abstract), None))
        batch = own_rows(models.make_batch(), where.batch_sharding(mesh))
        for _ in range(3):
            state, measured = compiled(state, batch)
            metrics.append({name: float(measured[name]) for name in ("total_loss", "grad_norm")})
        generated = decoding.generate(
            decoding.decoding_model(model, force=True),
            state.params,
            layout,
            [[i + 1] for i in range(8)],
            method=decoding.Greedy(),
            max_new_tokens=3,
            eos_id=0,
            pad_id=0,
            start_id=0,
        )
        params = multihost_utils.process_allgather(state.params, tiled=True)
    scores = np.array(generated.log_probabilities)  # of texts that every process has in whole
    return (
        dict(flatten_named(params))
        | {"generated": scores}
        | {name: np.array([m[name] for m in metrics]) for name in metrics[0]}
    )


def own_rows(batch, sharding):
    """Global arrays of which each process gives its contiguous part."""
    rows = len(batch["tokens"]) // jax.process_count()
    own = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    return {
        name: jax.make_array_from_process_local_data(sharding, values[own])
        for name, values in batch.items()
    }


def main():
    process, address, directory = sys.argv[1:]
    jax.distributed.initialize(address, 2, int(process))
    for name, where in MESHES.items():
        results = run(where)
        if process == "0":
            np.savez(pathlib.Path(directory, name), **results)


if __name__ == "__main__":
    main()
