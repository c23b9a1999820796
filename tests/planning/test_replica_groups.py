"""Groups of devices in a program's text, and the mesh axes that they go along."""

import pytest

from m6jax.planning.replica_groups import axes_of, groups_of

CUBE = {"data": 2, "expert": 2, "model": 2}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "expert")),
        ("{}", ("data", "expert", "model")),
        ("[4,2]<=[8]", ("model",)),
        ("[4,2]<=[4,2]T(1,0)", ("expert",)),  # 0 2, 4 6, 1 3, 5 7
        ("[4,2]<=[2,4]T(1,0)", ("data",)),  # 0 4, 1 5, 2 6, 3 7
        ("[4,2]<=[2,2,2]T(2,1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "expert", "model")),
        ("[8,1]<=[8]", ()),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("expert", "model")),
        ("mesh['a'=1,'b'=2,'c'=2,'d'=2], device_ids=([2,2,2]T(1,0,2)) {'b'}", ("expert",)),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ("expert",)),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ("model",)),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ("data", "model")),
        ("{{0,0},{1,4},{4,1},{5,5}}", ("data", "model")),  # pairs of a permutation
    ],
)
def test_axes_by_hand(groups, axes):
    assert axes_of(groups, CUBE) == axes
    assert groups_of(f", channel_id=1, replica_groups={groups}, use_global=true") == groups


def test_groups_of_instructions():
    assert groups_of("), dimensions={0}, to_apply=%add") == "{}"
    assert groups_of("), source_target_pairs={{0,1},{1,0}}, metadata={}") == "{{0,1},{1,0}}"
    with pytest.raises(ValueError, match=r"cannot be read: .*replica_groups=a new way"):
        groups_of("), replica_groups=a new way, to_apply=%add")
