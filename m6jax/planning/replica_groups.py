"""Over which mesh axes a collective of a compiled program goes, from the groups in its text.

The compiler numbers devices in the order of the mesh. It writes groups in several ways; on a mesh
of data 2 x expert 4 these are all the same groups:

    replica_groups={{0,1,2,3},{4,5,6,7}}
    replica_groups=[2,4]<=[8]
    replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}

>>> axes_of("[2,4]<=[8]", {"data": 2, "expert": 4})
('expert',)
"""

import math
import re
from collections.abc import Mapping

import numpy as np

_TILES = r"\[[\d,]+\](?:T\([\d,]+\))?"
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\{\}"
    rf"|\[[\d,]+\]<={_TILES}"
    rf"|mesh\[[^\]]*\](?:, device_ids=\({_TILES}\))? \{{[^}}]*\}})"
)
_ARRAY = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str) -> str:
    """Returns the text of an instruction's groups; '{}', all devices, where it names none.

    Raises:
      ValueError: they are written in a way that is not known here.
    """
    found = _GROUPS.search(attributes)
    if found is None and "replica_groups=" in attributes:
        raise ValueError(f"groups of devices that cannot be read: {attributes[:200]!r}")
    return found[1] if found else "{}"


def axes_of(groups: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ, in the order of the mesh.

    Args:
      groups: text of `groups_of`.
      mesh: sizes of the mesh axes.
    """
    shape = tuple(mesh.values())
    places = np.stack(np.unravel_index(np.asarray(_members(groups, math.prod(shape))), shape))
    differ = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


def _members(groups: str, devices: int) -> list[list[int]]:
    """Returns groups of device numbers, of equal length; one of them where all look alike."""
    if groups == "{}":
        return [list(range(devices))]
    if groups.startswith("{"):
        rows = re.findall(r"\{?\{([\d,]+)\}", groups)
        return [[int(number) for number in row.split(",")] for row in rows]
    if groups.startswith("mesh"):
        return [_along_axes(groups, devices)]
    shape, _, tiles = groups.partition("<=")
    _, size = _ints(shape.strip("[]"))
    return [_iota(tiles).reshape(-1, size)[0].tolist()]


def _along_axes(groups: str, devices: int) -> list[int]:
    """Returns the first group of a text such as mesh['a'=2,'b'=4], device_ids=(...) {'b'}."""
    head, _, named = groups.rpartition("{")
    sizes, _, order = head.partition("]")
    names = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    ids = _iota(order) if "device_ids" in order else np.arange(devices)
    ids = ids.reshape(tuple(names.values()))
    kept = {name: slice(0, 1) for name in names}
    for name, before, size in _AXIS.findall(named):
        # 'b':(2)4 are 4 parts of an axis, each of what is left behind 2 * 4.
        inner = names[name] // (int(before) * int(size)) if size else 1
        kept[name] = slice(0, inner * int(size) if size else names[name], inner)
    return ids[tuple(kept.values())].ravel().tolist()


def _iota(text: str) -> np.ndarray:
    """Returns the numbers that '[2,4]T(1,0)' stands for, in their order."""
    found = _ARRAY.search(text)
    assert found is not None  # as _GROUPS has it
    sizes = _ints(found[1])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_ints(found[2])) if found[2] else ids


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
