"""What one accelerator trains with and without offload; used by `offload.py --gpu`.

The largest model is found by trial: every size is trained for some steps in a process of its own,
so that one that runs out of memory, of the device or of the host, ends that process alone.
"""

import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from m6jax.layouts import offload
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import ModelConfig, MoEConfig, Remat

ROWS, LENGTH, LAYERS = 16, 512, 8
EXPERTS = "moe/(up|down)$"
PLANS = {
    "off": OffloadPlan(),
    "offload": OffloadPlan(weights=(EXPERTS,), streamed=True),
    # The same program without copies, for the time that copies add.
    "streamed_without_copies": OffloadPlan(streamed=True),
}
HOST_SHARE = 0.8  # of the host's free memory that a model may take


def config_of(experts: int) -> ModelConfig:
    """A mixture of `experts` experts a layer, 16.8 million bfloat16 weights each."""
    return ModelConfig(
        vocab_size=32_768,
        num_layers=LAYERS,
        embed_dim=2048,
        num_heads=16,
        mlp_dim=4096,
        max_length=LENGTH,
        moe=MoEConfig(num_experts=experts, num_prototypes=2, group_size=ROWS * LENGTH),
        dtype="bfloat16",
        param_dtype="bfloat16",
        remat=Remat.FULL,
    )


def measure(script: str, steps: int) -> dict[str, Any]:
    """Finds the largest models and times them.

    Args:
      script: path of the script that makes one trial with `--trial JSON`.
      steps: that are timed.

    Returns:
      For `off` and `offload` the largest number of experts, parameters and tokens a second; both
      again at the size that trains without offload, and the share of copy time that is hidden.
    """

    def trial(plan: str, experts: int) -> dict[str, Any] | None:
        asked = json.dumps({"plan": plan, "experts": experts, "steps": steps})
        done = subprocess.run([sys.executable, script, "--trial", asked], stdout=subprocess.PIPE)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None

    best = {plan: largest(lambda n, p=plan: trial(p, n), 8) for plan in ("off", "offload")}
    same = best["off"]["experts"]
    copied, resident = trial("offload", same), trial("streamed_without_copies", same)
    hidden = None
    if copied and resident:
        hidden = hidden_share(
            resident["step_seconds"], copied["step_seconds"], copied["copy_seconds"]
        )
    return {
        "largest": best,
        "offload_at_the_size_without": copied,
        "without_copies_at_that_size": resident,
        "copy_time_hidden": hidden,
    }


def largest(trial: Callable[[int], dict[str, Any] | None], start: int) -> dict[str, Any]:
    """Returns the trial of the largest multiple of `start` that succeeds, to an eighth of it.

    Args:
      trial: returns what was measured at a size, None for a size that is too large.
      start: a size that succeeds.

    Raises:
      RuntimeError: it does not.
    """
    best = trial(start)
    if best is None:
        raise RuntimeError(f"a model of {start} experts does not train here")
    low, high = start, 2 * start
    while (result := trial(high)) is not None:
        best, low, high = result, high, 2 * high
    while high - low > max(start, low // 8):
        middle = (low + high) // 2 // start * start
        result = trial(middle)
        if result is None:
            high = middle
        else:
            best, low = result, middle
    return best


def hidden_share(without_copies: float, with_copies: float, copies: float) -> float:
    """Returns which share of copy time passes beside computation, from 0 to 1.

    Args:
      without_copies: seconds of a step whose weights are on the device.
      with_copies: seconds of the same step with weights on the host.
      copies: seconds that its copies take alone.
    """
    return min(max(1 - (with_copies - without_copies) / copies, 0.0), 1.0)


def copy_seconds(state: Any) -> float:
    """Returns how long the copies of a streamed step take alone: two to the device, one back."""
    on_host = [leaf for leaf in jax.tree.leaves(state.params) if offload.on_host(leaf)]
    total = 0.0
    for leaf in on_host:  # one after another, since all may not fit
        one = jax.jit(lambda stack: offload.to_device(stack[0] if stack.ndim > 3 else stack))
        layer = jax.block_until_ready(one(leaf))
        back = jax.jit(offload.to_host)
        for call, argument, times in ((one, leaf, 2), (back, layer, 1)):
            jax.block_until_ready(call(argument))
            begin = time.perf_counter()
            jax.block_until_ready([call(argument) for _ in range(4)])
            total += times * leaf.shape[0] * (time.perf_counter() - begin) / 4
    return total


def free_host_bytes() -> int:
    """Returns the bytes of the host that are free."""
    text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"MemAvailable:\s*(\d+) kB", text)
    assert found
    return int(found[1]) * 1024


def check_host(abstract: Any) -> None:
    """Raises MemoryError for a description that takes too much of the host, before it is made."""
    needed, free = offload.bytes_by_memory(abstract)[offload.HOST], free_host_bytes()
    if needed > HOST_SHARE * free:
        raise MemoryError(f"{needed:,} bytes on a host with {free:,} free")


def batch_of(vocab_size: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, jax.Array]:
    """Returns random tokens, every row one document."""
    row = jnp.ones((rows, length), jnp.int32)
    tokens = jax.random.randint(jax.random.key(0), row.shape, 1, vocab_size)
    positions = jnp.broadcast_to(jnp.arange(length), row.shape)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": row, "positions": positions}
    return batch | {"loss_weights": jnp.ones(row.shape)}
