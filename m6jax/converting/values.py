"""The values of one leaf's part, made from a checkpoint by its recipe.

What is read is at most what is returned, and once more while layers are averaged; so who asks for
small parts needs little memory.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from m6jax.checkpointing import CheckpointError, Index, WholeReader
from m6jax.converting.recipes import Origin, Recipe
from m6jax.layouts import LayoutError


def make(recipe: Recipe, reader: WholeReader, index: Index, average: bool = False) -> np.ndarray:
    """Returns the values of a leaf of the target at an index.

    Args:
      recipe: of the leaf.
      reader: of the source.
      index: slices with a start and a stop, one for each axis.
      average: take the mean of layers that differ and become one.

    Raises:
      LayoutError: layers that become one differ, and `average` is not set.
      CheckpointError: the source is damaged, or the values are not finite.
    """
    if recipe.factor == 0:
        return np.zeros([part.stop - part.start for part in index], recipe.dtype)
    layers, rest = (index[0], index[1:]) if recipe.stacked else (slice(0, 1), index)

    def copy(origins: tuple[Origin, ...]) -> np.ndarray:
        return _read(reader, origins[layers], rest, recipe.stacked)

    values = copy(recipe.copies[0])
    if len(recipe.copies) > 1 and average:
        values = _mean(values, (copy(origins) for origins in recipe.copies[1:]), len(recipe.copies))
    elif any(not np.array_equal(values, copy(origins)) for origins in recipe.copies[1:]):
        raise LayoutError(
            f"{recipe.name}: the layers to be linked differ (average them to link all the same)"
        )
    if recipe.factor != 1:
        values = values * recipe.factor
    values = values.astype(recipe.dtype, copy=False)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{recipe.name} would not be finite; it is made of {', '.join(recipe.sources())} in the"
            " checkpoint that is read (take an older one: Conversion.step or Initial.step)"
        )
    return values


def _read(reader: WholeReader, origins: Sequence[Origin], rest: Index, stacked: bool) -> np.ndarray:
    """Returns origins one after the other, [len(origins), ...] if the target is stacked."""
    names = {origin.name for origin in origins}
    if len(names) == 1 and origins[0].layer is not None:
        return _read_layers(reader, origins, rest, stacked)
    if not stacked:
        return reader.read(origins[0].name, rest)
    values: np.ndarray | None = None
    for i, origin in enumerate(origins):
        layer = reader.read(origin.name, rest)
        if values is None:
            values = np.empty((len(origins), *layer.shape), layer.dtype)
        values[i] = layer
    assert values is not None  # an index is never empty
    return values


def _read_layers(
    reader: WholeReader, origins: Sequence[Origin], rest: Index, stacked: bool
) -> np.ndarray:
    """As `_read`, of one stacked leaf: the layers that are wanted lie together in it."""
    layers = [origin.layer or 0 for origin in origins]
    first, last = min(layers), max(layers)
    values = reader.read(origins[0].name, (slice(first, last + 1), *rest))
    if not stacked:
        return values[0]
    if layers != list(range(first, last + 1)):
        values = values[[layer - first for layer in layers]]
    return values


def _mean(first: np.ndarray, others: Iterable[np.ndarray], number: int) -> np.ndarray:
    """Returns the mean; equal values bit for bit, integers (step counts) as the first has them."""
    if np.issubdtype(first.dtype, np.integer):
        return first
    total = first.astype(np.promote_types(first.dtype, np.float32))
    equal = np.ones(first.shape, bool)
    for other in others:
        total += other
        equal &= other == first
    return np.where(equal, first, (total / number).astype(first.dtype))
