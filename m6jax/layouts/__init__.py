"""How the layers of a stack lie in the parameter tree, and how to go from one layout to another.

A stack of depth L holds U distinct layers (the *unit*), applied in a cycle R = L / U times. With
L = 6, U = 2 the layers are 0 1 0 1 0 1. The tree has one of two forms:

* STACKED: the key `layers`, each leaf with a leading axis of size U;
* UNROLLED: the keys `layers_0` ... `layers_{L-1}` (U = L), each layer with leaves of its own.

`expand` is *delinking*: the Pseudo Giant (U = 1) becomes the Real Giant (U = L) by copying.

>>> pseudo = {"head": h, "layers": {"w": w}}                   # w: [1, M, H]
>>> real = expand(pseudo, Layout(depth=3, unit=1), Layout(depth=3, unit=3))    # layers/w: [3, M, H]
>>> sorted(unstack(real))
['head', 'layers_0', 'layers_1', 'layers_2']

Parts of a layer may have units of their own: norms of every layer's own beside experts that all
layers share. Then the leaves under `layers` have leading axes of different sizes, and each distinct
tensor still exists once:

>>> layout = Layout(depth=48, unit=4, parts=(Part(pattern="norm"), Part(pattern="moe/up", unit=1)))
>>> [layout.unit_of(name) for name in ("layers/norm/scale", "layers/moe/up", "layers/moe/down")]
[48, 1, 4]

A stack of distinct layers may be cut in runs that rest in different memories, and be one all the
same:

>>> sorted(cut(real, Layout(depth=3, unit=3, borders=(2,)))["layers"])
['0to1', '2to2']

The functions work on any tree that has such dictionaries somewhere inside: parameters, the state of
any optimizer that keeps parameter-shaped trees, a whole train state. They are pure, total and alike
on arrays and on ShapeDtypeStructs with shardings. This is the only place that knows layer names.
"""

from m6jax.layouts.changes import convert, cut, expand, link, mend, stack, unstack
from m6jax.layouts.layout import Form, Layout, LayoutError, Part, join_stack, split_stack
from m6jax.layouts.leaf_name import STACK, LeafName, Run, has_layers, layer_names
from m6jax.layouts.offload import OffloadPlan

__all__ = [
    "STACK",
    "Form",
    "Layout",
    "LayoutError",
    "LeafName",
    "OffloadPlan",
    "Part",
    "Run",
    "convert",
    "cut",
    "expand",
    "has_layers",
    "join_stack",
    "layer_names",
    "link",
    "mend",
    "split_stack",
    "stack",
    "unstack",
]
