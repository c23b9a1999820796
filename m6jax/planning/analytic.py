"""The analytic engine: what a step needs, from shapes, shardings and memory kinds, in seconds.

>>> estimate(experiment, stage=1, devices=256).hbm_bytes_per_device
11_614_000_000

Exact are the state's bytes by memory, the parameters, and what the program asks to be moved between
host and device. FLOPs are those of matrix products (`flops`), collectives those that follow from
the shardings (`traffic`), and what the step holds besides its state is a model of the compiler
(`activations`). The compiled engine measures what these assume.
"""

from m6jax.experiment import Experiment
from m6jax.planning import activations, device_traffic, flops, traffic
from m6jax.planning.estimate import Estimate, Memory
from m6jax.planning.stages import StageShapes, bytes_of, parameters_by_group, stage_shapes

ASSUMPTIONS = (
    "FLOPs: matrix products alone, every query with all keys, experts' buffers as if full",
    "memory besides the state: a model of the compiler, see m6jax/planning/activations.py",
    "device traffic: what products and the update read and write, the rest on the way, see"
    " m6jax/planning/device_traffic.py",
    "collectives: those that follow from the shardings, see m6jax/planning/traffic.py",
)


def estimate(
    experiment: Experiment,
    stage: int,
    devices: int,
    *,
    hardware: str | None = None,
    patches: int | None = None,
) -> Estimate:
    """Estimates a stage on so many devices, which need not exist.

    Args:
      experiment: the run.
      stage: number of the stage.
      devices: number of devices.
      hardware: name in `hardware.TABLE`, for the report.
      patches: image patches of a row; None: see `patches_of`.

    Raises:
      ConfigError: mesh, rows, groups, experts or plan do not fit.
    """
    return estimate_shapes(stage_shapes(experiment, stage, devices, patches=patches), hardware)


def estimate_shapes(shapes: StageShapes, hardware: str | None = None) -> Estimate:
    """Estimates a described stage; see `estimate`."""
    working = activations.working_memory(shapes)
    parts = flops.executed_flops(shapes)
    copied, sent = traffic.host_traffic(shapes), traffic.collectives(shapes)
    return Estimate(
        engine="analytic",
        stage=shapes.experiment.stages[shapes.stage].name,
        devices=shapes.devices,
        mesh=dict(shapes.mesh.shape),
        hardware=hardware,
        positions_per_step=shapes.experiment.rows(shapes.stage) * shapes.length,
        parameters_total=shapes.parameters_total,
        parameters_active=shapes.parameters_active,
        parameters_by_group=parameters_by_group(shapes.state.params),
        hbm=Memory(
            **_state(shapes, host=False),
            gradients=working.gradients,
            activations=working.activations,
            temporaries=working.temporaries,
        ),
        host=Memory(
            **_state(shapes, host=True),
            gradients=working.host_gradients,
            activations=working.host_activations,
        ),
        host_temp_bytes_per_device=working.host_gradients + working.host_activations,
        flops_per_device=sum(parts.values()),
        model_flops_per_device=flops.model_flops(shapes),
        flops_by_part=parts,
        host_traffic_bytes_per_device=copied,
        device_traffic_by_part=device_traffic.device_traffic(shapes, copied, sent),
        collectives=sent,
        assumptions=(*ASSUMPTIONS, *_arithmetic(shapes)),
    )


def _arithmetic(shapes: StageShapes) -> tuple[str, ...]:
    dtype = shapes.model.dtype
    if dtype == "bfloat16":
        return ()
    return (
        f"peak: of products in bfloat16; the model's are in {dtype} (ModelConfig.dtype), which most"
        " chips compute more slowly: the step takes longer than said, and MFU is lower",
    )


def _state(shapes: StageShapes, host: bool) -> dict[str, int]:
    """Returns the bytes of the state in one memory: weights with their averages, and the rest."""
    state = shapes.state
    weights = bytes_of((state.params, state.extra.averaged), host)
    return {"weights": weights, "optimizer_state": bytes_of(state, host) - weights}
