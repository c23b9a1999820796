"""The compiled engine: the step that trains, compiled ahead of time, and what the compiler says.

>>> estimate(experiment, stage=1, topology=parse("v6e:16x16")).hbm_bytes_per_device
11_180_000_000

The step is that of `StageProgram`, for devices that need not be here. Bytes of arguments and
temporaries are the compiler's; FLOPs, collectives and copies between host and device are read from
the program's text, see `hlo`.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from m6jax.experiment import Experiment
from m6jax.experiment.programs import StageProgram
from m6jax.experiment.summary import parameters_by_use
from m6jax.foundation.validated import ConfigError
from m6jax.planning import hardware, hlo, topologies
from m6jax.planning.estimate import Estimate, Memory
from m6jax.planning.stages import bytes_of, parameters_by_group, patches_of
from m6jax.planning.topologies import Topology
from m6jax.training.train_state import TrainState

TEXT = "*after_optimizations.txt"


class DoesNotFitError(ConfigError):
    """The compiler finds no room for the program."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Attributes:
      text: the program after optimizations.
      memory: the compiler's memory analysis, in bytes of one device.
      seconds: that lowering and compiling took.
    """

    text: str
    memory: Any
    seconds: float


def estimate(
    experiment: Experiment,
    stage: int,
    topology: Topology | None,
    *,
    patches: int | None = None,
    dump: str | None = None,
) -> Estimate:
    """Compiles the step of a stage and says what it needs.

    Args:
      experiment: the run.
      stage: number of the stage.
      topology: what to compile for; None: the devices that are here.
      patches: image patches of a row; None: see `patches_of`.
      dump: directory to keep the compiled program's text in; None: it is not kept.

    Raises:
      MissingCompilerError: nothing here compiles for the topology.
      DoesNotFitError: the compiler finds no room for the program.
      ConfigError: mesh, rows or plan do not fit the devices.
    """
    devices = jax.devices() if topology is None else topologies.devices_of(topology)
    program = StageProgram(experiment, stage, 0, devices)
    step = compile_step(program, patches_of(experiment, patches), dump)
    measured = hlo.measure(step.text)
    state, name = program.abstract, experiment.stages[stage].name
    stored, active = parameters_by_use(experiment.model, program.layout)
    kind = devices[0].device_kind if topology is None else topology.generation
    known = hardware.find(kind)
    return Estimate(
        engine="compiled",
        stage=name,
        devices=program.mesh.size,
        mesh=dict(program.mesh.shape),
        platform=devices[0].platform,
        hardware=known.name if known else None,
        positions_per_step=program.rows * experiment.data.length,
        parameters_total=stored,
        parameters_active=active,
        parameters_by_group=parameters_by_group(state.params),
        hbm=_device_memory(state, step.memory),
        host=_host_memory(state, step.memory),
        host_temp_bytes_per_device=step.memory.host_temp_size_in_bytes,
        flops_per_device=measured.flops,
        host_traffic_bytes_per_device=measured.to_device + measured.to_host,
        collectives=measured.collectives(program.mesh.shape),
        compile_seconds=round(step.seconds, 1),
        assumptions=_assumptions(measured, devices[0].platform),
    )


def compile_step(program: StageProgram, patches: int, dump: str | None = None) -> CompiledStep:
    """Compiles the step of a stage.

    Args:
      program: the stage.
      patches: image patches of a row, for a model that has them.
      dump: directory for the program's text, which must not hold another's.

    Raises:
      DoesNotFitError: the compiler finds no room for it.
    """
    begin = time.perf_counter()
    lowered = program.lower(program.batch_shapes(patches))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as scratch, _without_cache():
        directory = dump or scratch
        # The text of a program with host memory in it can be had in this way alone: `as_text` of
        # jax 0.10.2 fails for it.
        options: dict[str, str | bool] = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFitError(_reason(program, str(error))) from error
        seconds = time.perf_counter() - begin
        # Beside the step there may be small programs that the compiler tried things with.
        texts = pathlib.Path(directory).glob(TEXT)
        text = max(texts, key=lambda path: path.stat().st_size).read_text(encoding="utf-8")
    return CompiledStep(text, compiled.memory_analysis(), seconds)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Makes the compiler work: a program that an earlier run compiled comes without its text."""
    directory = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()


def _device_memory(state: TrainState, memory: Any) -> Memory:
    """Splits the device's bytes: the state's are exact, the rest is what the compiler adds."""
    return _split(
        state,
        False,
        memory.argument_size_in_bytes - _counted_for_device(state, memory),
        memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )


def _host_memory(state: TrainState, memory: Any) -> Memory:
    results = memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    return _split(
        state,
        True,
        memory.host_argument_size_in_bytes + _counted_for_device(state, memory),
        results + memory.host_temp_size_in_bytes,
        memory.host_generated_code_size_in_bytes,
    )


def _split(state: TrainState, host: bool, arguments: int, allocated: int, code: int) -> Memory:
    weights = bytes_of((state.params, state.extra.averaged), host)
    optimizer_state = bytes_of(state, host) - weights
    return Memory(
        weights=weights,
        optimizer_state=optimizer_state,
        gradients=None,
        activations=None,
        temporaries=arguments + allocated - weights - optimizer_state,
        code=code,
    )


def _counted_for_device(state: TrainState, memory: Any) -> int:
    """Returns bytes on the host that the compiler takes for the device's, as it does for CPUs."""
    return 0 if memory.host_argument_size_in_bytes else bytes_of(state, host=True)


def _assumptions(measured: hlo.Program, platform: str) -> tuple[str, ...]:
    lines = ["memory: the compiler's; gradients, activations and the batch are among temporaries"]
    if platform == "cpu":
        lines.append("host memory: on CPUs it is the device's too, so that nothing is copied")
    if measured.unknown_loops:
        lines.append(
            f"{len(measured.unknown_loops)} loops whose length depends on data are counted once"
        )
    return tuple(lines)


def _reason(program: StageProgram, error: str) -> str:
    said = error.split("RESOURCE_EXHAUSTED: ", 1)[1].splitlines()[0]
    return f"the step does not fit {program.mesh.size} devices; the compiler says: {said}"
