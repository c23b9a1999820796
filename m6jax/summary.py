"""What a person reads on the screen: what will be trained, and how it ended."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from m6jax import pytrees
from m6jax.experiment import Experiment
from m6jax.layouts import Form
from m6jax.modeling.config import ModelConfig
from m6jax.modeling.transformer import Transformer
from m6jax.partitioning import is_parameter

UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


def count(number: float) -> str:
    """Returns a number as people write it.

    >>> count(12_345_678)
    '12.3M'
    """
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def parameters_by_use(config: ModelConfig, unit: int, form: Form) -> tuple[int, int]:
    """Returns the number of distinct parameters, and of those that a token passes.

    A token passes P * K of E experts, and a shared layer once for each of its uses.
    """
    layout = config.layout(unit, form)
    parameters = Transformer(config).parameters(layout)
    stored, active = 0, 0.0
    for name, parameter in pytrees.flatten_named(parameters, is_leaf=is_parameter):
        size = parameter.value.size
        share = 1.0
        if config.moe is not None and parameter.axes[-3:-2] == ("expert",):
            chosen = config.moe.num_prototypes * config.moe.num_selected_experts
            share = chosen / config.moe.num_experts
        uses = layout.repeats if name.startswith("layers") else 1
        stored += size
        active += size * share * uses
    return stored, round(active)


def describe_run(experiment: Experiment, mesh: Mesh, vocabulary_size: int) -> str:
    """Returns the lines that say what will be trained, on what, and where the outputs go."""
    model, data = experiment.model, experiment.data
    devices = mesh.devices.flat
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    lines = [
        f"model    {_model_line(model)}",
        f"data     {', '.join(source.name for source in data.sources)}; rows of {data.length}"
        f" tokens, vocabulary of {vocabulary_size:,} pieces",
        f"devices  {mesh.size} x {devices[0].device_kind} ({shape}), {jax.process_count()}"
        f" process{'es' if jax.process_count() > 1 else ''}",
    ]
    begin = 0
    for i, stage in enumerate(experiment.stages):
        unit = stage.unit or model.num_layers
        stored, active = parameters_by_use(model, unit, stage.form)
        end = experiment.end_of(i).step
        tokens = experiment.rows(i) * data.length
        lines.append(
            f"stage    {stage.name}: steps {begin:,} to {end:,}, {unit} distinct of"
            f" {model.num_layers} layers ({stage.form.name.lower()}), {count(stored)} parameters,"
            f" {count(active)} used by a token, {count(tokens * (end - begin))} tokens in batches"
            f" of {tokens:,}"
        )
        begin = end
    lines.append(f"outputs  {experiment.model_dir}")
    return "\n".join(lines)


def describe_evaluation(name: str, metrics: Mapping[str, Any]) -> str:
    """Returns a line about one held-out set."""
    line = f"held-out {name}: loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.1f}"
    if "bits_per_byte" in metrics:
        line += f", {metrics['bits_per_byte']:.3f} bits per byte"
    return line


def _model_line(config: ModelConfig) -> str:
    line = (
        f"{config.num_layers} layers, width {config.embed_dim}, {config.num_heads} heads, FFN"
        f" {config.mlp_dim}"
    )
    if config.moe is not None:
        moe = config.moe
        line += (
            f", {moe.num_experts} experts in {moe.num_prototypes}"
            f" prototype{'s' if moe.num_prototypes > 1 else ''}, top-{moe.num_selected_experts} of"
            " each"
        )
    return f"{line}, {config.dtype} arithmetic"
