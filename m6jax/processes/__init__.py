"""Several processes that train together: how they start, agree, watch each other and end.

>>> group = start(timeout=120)                # what the launcher says; alone where it says nothing
>>> group.first(newest_step_on_disk())        # all take what the first process sees
>>> reason = group.reached(step)              # before each step: None, or why all stop here

One process is a group of one: the same calls, without any waiting.
"""

from m6jax.processes.group import Group, current
from m6jax.processes.launchers import FLAGS, start

__all__ = ["FLAGS", "Group", "current", "start"]
