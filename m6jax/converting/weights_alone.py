"""Parameters with which a run begins that knows nothing else of where they come from.

They are those of a folder in Hugging Face's format (Llama, Mistral or Mixtral), or of a dense
model's run, every expert a copy of the dense feed-forward (`pseudo_to_real.upcycling`); or both.
The settings that say which function the parameters are of must be those of the source.

>>> taken = take(experiment, program)
>>> taken.params["layers"]["moe"]["up"]       # where the stage wants it
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from m6jax import configuration, layouts
from m6jax.checkpointing import Index, assemble
from m6jax.converting.source_checkpoint import open_source
from m6jax.experiment import Experiment, Initial
from m6jax.experiment.model_dir import MACROS, ModelDir
from m6jax.experiment.programs import StageProgram
from m6jax.formats import hugging_face, tensor_files
from m6jax.formats.weights import Weight, Weights, layer_weights, unrolled
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import is_parameter
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, LayoutError, LeafName
from m6jax.modeling.config import LayerKind, ModelConfig, MoEConfig
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.pseudo_to_real import upcycling

# Settings that say how a run trains or stores a model, not which function its parameters are of.
_FREE = {
    *("max_length", "dropout", "dtype", "param_dtype", "remat", "init_scale", "vocab_size"),
    *("num_ids", "num_kv_heads", "head_dim", "pattern", "moe"),
}
_FUNCTION_OF_EXPERTS = (
    *("num_experts", "num_prototypes", "num_selected_experts", "num_shared_experts"),
    "normalize_weights",
)


@dataclasses.dataclass(frozen=True)
class Taken:
    """Parameters of another model.

    Attributes:
      where: what to call their source.
      step: updates that were made there; 0 where that is not known.
      layout: how the layers lay.
      params: in the layout of the stage, where its state rests.
    """

    where: str
    step: int
    layout: Layout
    params: Tree


@dataclasses.dataclass(frozen=True)
class _Given:
    """What is there: the model, its parameters as they lie, and the names of single layers."""

    where: str
    step: int
    config: ModelConfig
    layout: Layout
    tree: Any
    weights: Weights


def is_folder(model_dir: str) -> bool:
    """Whether a path is of a folder in Hugging Face's format, not of a run."""
    path = pathlib.Path(model_dir)
    return (path / "config.json").exists() and not ModelDir(model_dir).checkpoints.exists()


def take(experiment: Experiment, program: StageProgram) -> Taken:
    """Returns the parameters of `experiment.initial`, in the stage's layout and shardings.

    Raises:
      ConfigError: they are of a model that computes something else, or do not become this one's.
      CheckpointError: the checkpoint is damaged.
    """
    initial = experiment.initial
    assert initial is not None  # who calls has looked
    opened = _folder if is_folder(initial.model_dir) else _run
    with opened(experiment, initial) as given:
        if initial.upcycle:
            params = _upcycled(experiment, initial, program, given)
        else:
            params = _placed(experiment.model, program, given)
    return Taken(given.where, given.step, given.layout, params)


@contextlib.contextmanager
def _folder(experiment: Experiment, initial: Initial) -> Iterator[_Given]:
    directory = pathlib.Path(initial.model_dir)
    where = str(directory / "config.json")
    found = hugging_face.config_of(json.loads(pathlib.Path(where).read_text("utf-8")), where)
    _check_vocabulary(experiment, directory)
    model = experiment.model
    _check_function(found, _dense(model, found) if initial.upcycle else model, where)
    weights = hugging_face.own_weights(tensor_files.read(directory), found, str(directory))
    weights = _with_rows(weights, found, model.vocab_size, where)
    config = dataclasses.replace(model, pattern=found.pattern, moe=found.moe)
    layout = config.layout(config.num_layers, Form.UNROLLED)
    yield _Given(str(directory), 0, config, layout, None, weights)


@contextlib.contextmanager
def _run(experiment: Experiment, initial: Initial) -> Iterator[_Given]:
    """The parameters of a dense model's run, for upcycling."""
    config = ModelDir(initial.model_dir).path / "config.gin"
    found = dataclasses.replace(experiment.model, pattern=(LayerKind.DENSE,), moe=None)
    if config.exists():
        loaded = configuration.load([config], [], root=Experiment, macros=MACROS).value
        found = loaded.model
    _check_function(found, _dense(experiment.model, found), str(config))
    found = dataclasses.replace(experiment.model, pattern=found.pattern, moe=found.moe)
    with open_source("Initial.model_dir", initial.model_dir, initial.step) as source:
        tree: dict[str, Any] = {}
        for name, leaf in source.reader.leaves().items():
            if name.startswith("params/"):
                whole = tuple(slice(0, size) for size in leaf.shape)
                node, (*path, last) = tree, name.split("/")[1:]
                for part in path:
                    node = node.setdefault(part, {})
                node[last] = source.reader.read(name, whole)
        yield _Given(source.where, source.step, found, source.layout, tree, {})


def _dense(model: ModelConfig, found: ModelConfig) -> ModelConfig:
    """Returns the model as it was before it was upcycled."""
    if LayerKind.SPARSE in found.pattern and found.pattern == model.pattern:
        raise ConfigError(
            "Initial.upcycle: the other model's layers are SPARSE already (leave it False, or set"
            " another ModelConfig.pattern)"
        )
    return dataclasses.replace(model, pattern=found.pattern, moe=found.moe)


def _placed(model: ModelConfig, program: StageProgram, given: _Given) -> Tree:
    """Makes every leaf of the stage where it rests, from leaves of single layers."""
    layout = program.layout
    if not layout.all_distinct:
        raise ConfigError(
            f"Stage.unit: {given.where} has {layout.depth} distinct layers, which a stage with"
            f" {layout.units[0]} cannot have (leave Stage.unit None)"
        )

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        found = layer_weights(name, given.weights, model, layout)
        shapes = {weight.shape for weight in found}
        inside = leaf.shape[1:] if LeafName.of(name).stacked else leaf.shape
        if shapes != {inside}:
            raise ConfigError(
                f"{given.where}: {name} is {[list(shape) for shape in shapes]} there and"
                f" {list(inside)} in the configuration"
            )

        def read(index: Index) -> np.ndarray:
            if not LeafName.of(name).stacked:
                return np.asarray(found[0].make()[index]).astype(leaf.dtype)
            parts = [weight.make()[index[1:]] for weight in found[index[0]]]
            return np.stack(parts).astype(leaf.dtype)

        return assemble(leaf, read)

    return pytrees.map_named(place, program.abstract.params)


def _upcycled(
    experiment: Experiment, initial: Initial, program: StageProgram, given: _Given
) -> Tree:
    model, source = experiment.model, given.config
    tree = given.tree
    if tree is None:
        tree = unrolled({name: w.make() for name, w in given.weights.items()}, source)
    described = Transformer(source).parameters(given.layout)
    dtypes = {
        name: leaf.value.dtype for name, leaf in pytrees.flatten_named(described, is_parameter)
    }
    tree = pytrees.map_named(lambda n, x: np.asarray(x).astype(dtypes.get(n, x.dtype)), tree)

    def make(params: Tree) -> Tree:
        key = jax.random.key(experiment.seed)
        sparse = upcycling.upcycle(params, source, model, given.layout, key, initial.keep_function)
        lies = upcycling.new_layout(source, model, given.layout)
        return layouts.convert(sparse, lies, program.layout)

    try:
        with program.activate():
            return jax.jit(make, out_shardings=program.shardings.params)(tree)
    except (upcycling.UpcyclingError, LayoutError) as error:
        raise ConfigError(
            f"Initial.upcycle: {given.where} cannot become the model of the stage: {error}"
        ) from error


def _check_function(found: ModelConfig, model: ModelConfig, where: str) -> None:
    """Refuses settings with which the parameters would be those of another function."""
    names = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in _FREE]
    pairs = [(name, getattr(found, name), getattr(model, name)) for name in names]
    pairs += [
        ("num_kv_heads", found.kv_heads, model.kv_heads),
        ("head_dim", found.head_size, model.head_size),
        ("pattern", _kinds(found), _kinds(model)),
    ]
    if found.moe is not None and model.moe is not None:
        pairs += [
            (f"moe.{name}", getattr(found.moe, name), getattr(model.moe, name))
            for name in _FUNCTION_OF_EXPERTS
        ]
        routers = (_unbiased(found.moe), _unbiased(model.moe))
        pairs.append(("moe.router", *routers))
    other = [f"{name} = {there} there, {here} here" for name, there, here in pairs if there != here]
    if other:
        dense = LayerKind.SPARSE not in found.pattern and LayerKind.SPARSE in model.pattern
        hint = " (Initial.upcycle = True makes experts of dense layers)" if dense else ""
        raise ConfigError(
            f"ModelConfig: {where} is of a model that computes something else:"
            f" {'; '.join(other)}{hint}"
        )


def _unbiased(moe: MoEConfig) -> Any:
    """Returns the router without biases, which begin at 0 and change nothing at first."""
    router = moe.router
    return dataclasses.replace(router, bias_rate=0.0) if isinstance(router, TopK) else router


def _kinds(model: ModelConfig) -> list[str]:
    return sorted({kind.name for kind in model.pattern})


def _check_vocabulary(experiment: Experiment, directory: pathlib.Path) -> None:
    path = directory / hugging_face.TOKENIZER
    if path.exists() and experiment.data.vocab().model != path.read_bytes():
        raise ConfigError(
            f"SentencePiece.path: the weights in {directory} were trained with its own vocabulary"
            f" (set SentencePiece.path = '{path}')"
        )


def _with_rows(weights: Weights, found: ModelConfig, rows: int, where: str) -> Weights:
    """Adds rows of zeros for ids that the vocabulary has not; they are never predicted."""
    more = rows - found.vocab_size
    if more < 0:
        raise ConfigError(
            f"ModelConfig.vocab_size: {rows} is less than the {found.vocab_size} ids of {where}"
        )
    axes = {"embedder.table": 0, "head.kernel": 1}

    def padded(weight: Weight, axis: int) -> Weight:
        width = [(0, more if i == axis else 0) for i in range(2)]
        shape = tuple(size + add for size, (_, add) in zip(weight.shape, width, strict=True))
        return Weight(shape, weight.dtype, lambda: np.pad(weight.make(), width))

    return {n: padded(w, axes[n]) if n in axes and more else w for n, w in weights.items()}
