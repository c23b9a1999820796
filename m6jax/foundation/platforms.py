"""Which kind of device jax shall look for."""

import glob
import importlib.util
import os

TPU_SIGNS = ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "COLAB_TPU_ADDR")


def leave_out_absent_tpus() -> None:
    """Keeps jax from looking for TPUs where libtpu is installed (to plan with) but none is there.

    It would find none, after a wait and with several lines of complaint. To be called before jax
    is used for the first time; a JAX_PLATFORMS in the environment, or a sign of a TPU there or
    among the device files, leaves jax alone.
    """
    if "JAX_PLATFORMS" in os.environ or tpu_is_here():
        return
    if importlib.util.find_spec("libtpu") is None:
        return
    gpu = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13, 14))
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if gpu else "cpu"


def tpu_is_here() -> bool:
    """Whether the environment or the device files say that this machine has a TPU."""
    if any(name in os.environ for name in TPU_SIGNS):
        return True
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
