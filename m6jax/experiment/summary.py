"""What a person reads on the screen: what will be trained, and how it ended."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from m6jax.experiment.experiment import Experiment, Stage
from m6jax.foundation import meshes, pytrees
from m6jax.foundation.partitioning import is_parameter
from m6jax.layouts import Layout
from m6jax.modeling.config import ModelConfig
from m6jax.modeling.transformer import Transformer

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


def parameters_by_use(config: ModelConfig, layout: Layout) -> tuple[int, int]:
    """Returns the number of distinct parameters, and of those that a token passes.

    A token passes P * K of E experts, and a shared layer once for each of its uses.
    """
    parameters = Transformer(config).parameters(layout)
    stored, active = 0, 0.0
    for name, parameter in pytrees.flatten_named(parameters, is_leaf=is_parameter):
        size = parameter.value.size
        share = 1.0
        if config.moe is not None and parameter.axes[-3:-2] == ("expert",):
            chosen = config.moe.num_prototypes * config.moe.num_selected_experts
            share = chosen / config.moe.num_experts
        uses = layout.repeats_of(name)
        stored += size
        active += size * share * uses
    return stored, round(active)


def describe_run(
    experiment: Experiment, mesh: Mesh, vocabulary_size: int, stage: int = 0, step: int = 0
) -> str:
    """Returns the lines that say what will be trained, on what, and where the outputs go.

    Args:
      experiment: the run.
      mesh: the devices.
      vocabulary_size: of the data.
      stage: number of the stage in which the run stands; those before are left out.
      step: updates made when that stage began.
    """
    model, data = experiment.model, experiment.data
    devices = mesh.devices.flat
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    crossing = meshes.crossing(mesh.devices, mesh.axis_names)
    shape += "".join(f", {axis} over {n} machines" for axis, n in crossing.items())
    lines = [
        f"model    {_model_line(model)}",
        f"data     {', '.join(source.name for source in data.sources)}; rows of {data.length}"
        f" tokens, vocabulary of {vocabulary_size:,} pieces",
        f"devices  {mesh.size} x {devices[0].device_kind} ({shape}), {jax.process_count()}"
        f" process{'es' if jax.process_count() > 1 else ''}",
    ]
    begin = step, step
    for i in range(stage, len(experiment.stages)):
        trigger = experiment.end_of(i)
        end = max(begin[0] + 1, trigger.at_least), trigger.at_most
        if end[1] > begin[0]:
            lines.append(_stage_line(experiment, i, begin, end))
            begin = end
    lines.append(f"outputs  {experiment.model_dir}")
    return "\n".join(lines)


def _stage_line(
    experiment: Experiment, number: int, begin: tuple[int, int], end: tuple[int, int]
) -> str:
    """Returns a line about a stage, with its least and its latest begin and end."""
    model, stage = experiment.model, experiment.stages[number]
    stored, active = parameters_by_use(model, experiment.layout(number))
    positions = experiment.rows(number) * experiment.data.length  # padding is among them
    most = count(positions * (end[1] - begin[0]))
    known = begin[0] == begin[1] and end[0] == end[1]
    return (
        f"stage    {stage.name}: steps {_between(*begin)} to {_between(*end)},"
        f" {describe_units(stage, model)} distinct of {model.num_layers} layers"
        f" ({stage.form.name.lower()}), {count(stored)} parameters, {count(active)} used by a"
        f" token, {most if known else f'at most {most}'} positions in batches of {positions:,}"
    )


def describe_units(stage: Stage, model: ModelConfig) -> str:
    """Returns how many layers are distinct, and of which parts others: `1 (norm: 4, moe: 2)`."""
    own = ", ".join(f"{part.pattern}: {part.unit or model.num_layers}" for part in stage.parts)
    return f"{stage.unit or model.num_layers}" + (f" ({own})" if own else "")


def describe_evaluation(name: str, metrics: Mapping[str, Any]) -> str:
    """Returns a line about one held-out set."""
    line = f"held-out {name}: loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.1f}"
    line += f", accuracy {metrics['accuracy']:.4f}" if "accuracy" in metrics else ""
    if "bits_per_byte" in metrics:
        line += f", {metrics['bits_per_byte']:.3f} bits per byte"
    if "mean_loss" in metrics:
        line += f", mean of the sets' losses {metrics['mean_loss']:.4f}"
    return line


# What a table of evaluations shows, with how many digits.
_COLUMNS = {"loss": ".4f", "perplexity": ".2f", "bits_per_byte": ".4f", "accuracy": ".4f"}


def table_of_evaluations(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns a table with a row for each step and set; the least loss of a set is marked."""
    kept = [record for record in records if "loss" in record]
    least: dict[str, float] = {}
    for record in kept:
        least[record["split"]] = min(float(record["loss"]), least.get(record["split"], math.inf))
    rows = [["step", "set", *_COLUMNS]]
    for record in kept:
        cells = [format(float(record[n]), f) if n in record else "" for n, f in _COLUMNS.items()]
        mark = " *" if float(record["loss"]) == least[record["split"]] else ""
        name = record["split"].removeprefix("eval/")
        rows.append([f"{record['step']:,}", name, cells[0] + mark, *cells[1:]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def describe_metrics(name: str, metrics: Mapping[str, Any]) -> str:
    """Returns a line about a task's own metrics, numbers or texts."""
    parts = (f"{k} {v if isinstance(v, str) else f'{v:.4g}'}" for k, v in metrics.items())
    return f"metrics  {name}: {', '.join(parts)}"


def _between(least: int, most: int) -> str:
    """Returns a step, or the two between which a trigger decides."""
    return f"{most:,}" if least == most else f"{least:,} ... {most:,}"


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
