"""What the name of a leaf says of the stack: parsed here, once, and nowhere else.

>>> leaf = LeafName.of("opt_state/mu/layers/2to5/moe/up")
>>> leaf.stacked, leaf.run, leaf.inside, leaf.whole
(True, Run(first=2, length=4), 'moe/up', 'opt_state/mu/layers/moe/up')
>>> LeafName.of("params/layers_3/moe/up").layers((8, 16))
range(3, 4)
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

STACK = "layers"
_LAYER = re.compile(rf"{STACK}_(\d+)")
_RUN = re.compile(r"(\d+)to(\d+)")


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of a stack that is cut in runs.

    Attributes:
      first: number of the first layer.
      length: number of layers.
    """

    first: int
    length: int

    @property
    def key(self) -> str:
        """What the run is called in the stack: `0to23`."""
        return f"{self.first}to{self.first + self.length - 1}"

    @property
    def layers(self) -> slice:
        """Where the run is on an axis of all layers."""
        return slice(self.first, self.first + self.length)


@dataclasses.dataclass(frozen=True)
class LeafName:
    """The path of a leaf, from anywhere above the layers, in its parts.

    Attributes:
      above: what stands before the key, with the last `/`: 'opt_state/mu/'.
      key: says that the leaf is in the stack: `layers`, or `layers_3`; None for other leaves.
      number: of the layer, where each has leaves of its own (UNROLLED); else None.
      run: that the leaf belongs to; None where the stack is whole.
      inside: the path inside of the layer; of other leaves the whole path.
    """

    above: str
    key: str | None
    number: int | None
    run: Run | None
    inside: str

    @staticmethod
    @functools.cache
    def of(path: str) -> "LeafName":
        """Returns the parts of a path."""
        parts = path.split("/")
        for i, part in enumerate(parts):
            layer = _LAYER.fullmatch(part)
            if part != STACK and layer is None:
                continue
            above, inside = "".join(f"{p}/" for p in parts[:i]), parts[i + 1 :]
            run = _RUN.fullmatch(inside[0]) if inside and part == STACK else None
            return LeafName(
                above=above,
                key=part,
                number=int(layer[1]) if layer else None,
                run=Run(int(run[1]), int(run[2]) - int(run[1]) + 1) if run else None,
                inside="/".join(inside[1:] if run else inside),
            )
        return LeafName("", None, None, None, path)

    @property
    def in_stack(self) -> bool:
        """Whether the leaf holds something of layers."""
        return self.key is not None

    @property
    def stacked(self) -> bool:
        """Whether the leaf's first axis is that of layers."""
        return self.key == STACK

    @property
    def first(self) -> int:
        """Number of the first layer in the leaf; 0 outside of the stack."""
        return self.run.first if self.run else (self.number or 0)

    @property
    def whole(self) -> str:
        """The path where the stack is not cut in runs."""
        return self._path(self.key)

    @property
    def of_any_layer(self) -> str:
        """The path with `layers_*` in place of one layer's key."""
        return self._path(self.key if self.number is None else f"{STACK}_*")

    @property
    def layer_key(self) -> str | None:
        """What leaves of the same layers have in common: key and run; None outside of the stack."""
        return f"{self.key}/{self.run.key}" if self.run else self.key

    def in_layer(self, number: int) -> str:
        """Returns the path in another layer of an UNROLLED stack; outside of it, as it is."""
        return self._path(None if self.key is None else f"{STACK}_{number}")

    def layers(self, shape: Sequence[int]) -> range:
        """Returns the numbers of the layers in a leaf of this shape; none outside of the stack."""
        if self.key is None:
            return range(0)
        return range(self.first, self.first + (shape[0] if self.stacked else 1))

    def _path(self, key: str | None) -> str:
        return f"{self.above}{key}/{self.inside}".rstrip("/") if key else self.inside


def layer_names(depth: int) -> list[str]:
    """Returns the keys of the UNROLLED form in order."""
    return [f"{STACK}_{i}" for i in range(depth)]


def has_layers(node: Any) -> bool:
    """Whether a node of a tree is a dictionary with the layers of a stack among its entries."""
    return isinstance(node, dict) and any(LeafName.of(key).in_stack for key in node)
