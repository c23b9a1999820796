"""A run in Python: train it, open it again, and use its model.

>>> import m6jax
>>> run = m6jax.train("configs/quickstart.gin", MODEL_DIR="runs/mine", STEPS=200)
>>> run = m6jax.load("runs/mine")
>>> run.generate(["It is a truth"])
>>> run.evaluate("texts/*.txt")
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from m6jax import configuration, layouts
from m6jax.data.sources import HeldOutFiles
from m6jax.data.vocab import Vocabulary
from m6jax.decoding import Beam, Greedy, Sampling
from m6jax.experiment import Experiment, Sample, Stage
from m6jax.experiment.identity import Identity
from m6jax.experiment.model_dir import MACROS
from m6jax.experiment.programs import StageProgram
from m6jax.experiment.sampling import continue_prompts
from m6jax.formats import Export, exporting
from m6jax.formats.exporting import Exported
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, offload
from m6jax.modeling import M6
from m6jax.modeling.balancing import split as without_router_bias
from m6jax.reporting.tables import MetricTable
from m6jax.reporting.writers import read_records
from m6jax.run import train as training_loop
from m6jax.run.evaluation import evaluate_sets
from m6jax.run.position import open_checkpoint


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The model of a run at one of its checkpoints.

    Attributes:
      experiment: the run's settings.
      step: updates that were made.
      vocabulary: of the run.
      program: mesh, layout and compiled functions of the stage.
      served: parameters that are evaluated (the average, if there is one), with router biases.
    """

    experiment: Experiment
    step: int
    vocabulary: Vocabulary
    program: StageProgram
    served: Tree

    @property
    def params(self) -> Tree:
        """The parameters, as `TrainState.params` and `M6`'s `variables["params"]` have them."""
        return without_router_bias(self.served)[0]

    @property
    def module(self) -> M6:
        """The model as a flax module: `module.apply({"params": run.params}, batch)`."""
        return M6(self.experiment.model, self.program.layout)

    @property
    def metrics(self) -> MetricTable:
        """What the run has written to `metrics.jsonl`."""
        return MetricTable(read_records(self.experiment.model_dir))

    def generate(
        self,
        prompts: Sequence[str],
        *,
        method: Greedy | Sampling | Beam | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> list[str]:
        """Returns each prompt with what the model continues it with, `num_samples` texts of each.

        Other settings, such as stop strings, are those of `Experiment.sample`.

        Args:
          prompts: beginnings of texts.
          method: how tokens are chosen; None: as `Experiment.sample` says.
          max_new_tokens: None: as `Experiment.sample` says.
          seed: of what is drawn; None: the run's.

        Raises:
          ConfigError: a prompt is longer than the model allows.
        """
        sample = self.experiment.sample or Sample()
        changes: dict[str, Any] = {"prompts": _texts(prompts)}
        changes |= {} if method is None else {"method": method}
        changes |= {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        changes |= {} if seed is None else {"seed": seed}
        sample = dataclasses.replace(sample, **changes)
        seed = self.experiment.seed
        return continue_prompts(self.program, self.served, sample, self.vocabulary, seed)

    def evaluate(self, files: str | None = None, document: str = "line") -> dict[str, Any]:
        """Returns the metrics of held-out text.

        Args:
          files: pattern of text files; None: the run's own held-out sets.
          document: what a document is in these files, see `TextFiles.document`.

        Returns:
          The metrics of each set by its name; a pattern's name is `files`.

        Raises:
          ConfigError: the run's own held-out text is not that with which it began.
          DataError: there is no text.
        """
        experiment = self.experiment
        if files is None:
            Identity(experiment.model_dir).check_held_out(experiment.data)
            return dict(evaluate_sets(experiment, self.program, self.served))
        own = HeldOutFiles(name="files", files=files, document=document)  # type: ignore[arg-type]
        data = dataclasses.replace(experiment.data, held_out=(own,))
        experiment = dataclasses.replace(experiment, data=data)
        return dict(evaluate_sets(experiment, self.program, self.served, ["files"]))

    def export(self, directory: str, **settings: Any) -> Exported:
        """Writes the model for other programs, every layer by itself.

        Args:
          directory: a folder, new or empty.
          settings: those of `Export`, as in `format="HUGGING_FACE"`.

        Raises:
          ConfigError: the format does not know this model, or the folder holds files.
        """
        chosen = Export(**({"length": self.experiment.data.length} | settings))
        layout = self.program.layout
        return exporting.export(
            self.served,
            self.experiment.model,
            layout,
            self.vocabulary,
            chosen,
            pathlib.Path(directory),
            {"step": self.step},
        )

    def delink(self, unit: int | None = None, form: Form | str = Form.UNROLLED) -> "TrainedModel":
        """Returns the same model with more distinct layers, which compute the same.

        Args:
          unit: distinct layers; None: all.
          form: STACKED, or UNROLLED where all layers are distinct.

        Raises:
          ConfigError: the unit does not fit the depth.
          LayoutError: the layout cannot be reached from this one.
        """
        stage = Stage(name="delinked", unit=unit, form=form)  # type: ignore[arg-type]
        experiment = dataclasses.replace(self.experiment, stages=(stage,), initial=None)
        program = StageProgram(experiment, 0, self.step)
        old, new = self.program.layout, program.layout

        def convert(params: Tree) -> Tree:
            return layouts.convert(offload.to_device(params), old, new)

        with program.activate():
            served = jax.jit(convert)(self.served)
        return dataclasses.replace(self, experiment=experiment, program=program, served=served)


def load(model_dir: epath.PathLike, step: int | None = None) -> TrainedModel:
    """Opens a run's checkpoint for use.

    Args:
      model_dir: the run's directory, wherever it has been moved to.
      step: of the checkpoint; None: the newest.

    Raises:
      ConfigError: there is no run, or no checkpoint of this step.
      CheckpointError: the checkpoint is damaged.
    """
    directory = epath.Path(model_dir)
    config = directory / "config.gin"
    if not config.exists():
        raise ConfigError(f"load: there is no run in {directory}: {config} is missing")
    bindings = [f"MODEL_DIR={str(directory)!r}"]
    experiment = configuration.load([config], bindings, root=Experiment, macros=MACROS).value
    with open_checkpoint(experiment, step) as (prepared, position):
        return TrainedModel(
            prepared.experiment,
            position.step,
            prepared.vocabulary,
            position.program,
            position.state.served(),
        )


def train(
    *gin_files: epath.PathLike,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **macros: Any,
) -> TrainedModel:
    """Trains as the command line does, and opens the run.

    Args:
      gin_files: configurations; of two that set one thing the later wins.
      settings: values by `Class.field`, as in `{"Experiment.keep": 1}`.
      quiet: show results alone.
      macros: values by macro, as in `MODEL_DIR="runs/mine", STEPS=200`.

    Returns:
      The run at its newest checkpoint; it is the last one unless the run was asked to stop.

    Raises:
      ConfigError: something cannot work; nothing was compiled.
    """
    bindings = [f"{name}={value!r}" for name, value in {**macros, **(settings or {})}.items()]
    experiment = configuration.load(gin_files, bindings, root=Experiment, macros=MACROS).value
    training_loop.run(experiment, quiet=quiet)
    return load(experiment.model_dir)


def _texts(prompts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(prompts, str):
        raise ConfigError(f"generate.prompts: a list of texts is needed (write [{prompts!r}])")
    return tuple(prompts)
