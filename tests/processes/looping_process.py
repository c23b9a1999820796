"""One of two processes that make steps together: PROCESS ADDRESS TIMEOUT WHAT.

WHAT is `step`, or `sleep`: then the second process sleeps before step 20 for ever.
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m6jax import processes
from m6jax.run.preemption import Preemption


def main():
    index, address, timeout, what = sys.argv[1:]
    group = processes.start(address, 2, int(index), timeout=float(timeout))
    assert group.gather(int(index)) == [0, 1]
    assert group.first(f"from {index}") == "from 0"
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    x = jax.make_array_from_callback((2,), sharding, lambda _: jax.numpy.ones((1,)))
    step_fn = jax.jit(lambda x: x + x.sum() * 1e-3, out_shardings=sharding)
    x = step_fn(x).block_until_ready()
    step = 0
    with Preemption(group):
        try:
            while (reason := group.reached(step)) is None:
                if what == "sleep" and index == "1" and step == 20:
                    time.sleep(600)
                group.joins()
                x = step_fn(x).block_until_ready()
                step += 1
                print("step", step, flush=True)
                time.sleep(0.02)
        except jax.errors.JaxRuntimeError as error:
            group.end_lost()
            group.end(1, f"not because of the other: {error}")
    print(f"stopped by {reason} after {step}", flush=True)
    group.leave()


main()
