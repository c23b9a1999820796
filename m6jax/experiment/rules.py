"""Rules that join settings of several parts of an experiment; the planner asks them too."""

from m6jax.data.config import ALL_SETS, TextData
from m6jax.foundation.validated import ConfigError, nearest
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import ModelConfig, Remat
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training.streaming import check_update
from m6jax.training.train_step import Update

BEST_METRICS = ("loss", "accuracy", "mean_loss")


def check_offload(plan: OffloadPlan, model: ModelConfig, update: Update) -> None:
    """Raises ConfigError where a plan does not go with rematerialisation or update."""
    if plan.streamed:
        check_update(update)
        if model.dtype == "float16":
            raise ConfigError(
                "OffloadPlan.streamed: with ModelConfig.dtype = 'float16' the loss is scaled, and"
                " how much is known when all gradients are; the streamed step updates each layer"
                " before (set ModelConfig.dtype = 'bfloat16' or 'float32', or OffloadPlan.streamed"
                " = False)"
            )
        return
    if plan.weights and model.remat is Remat.NOTHING:
        raise ConfigError(
            "OffloadPlan.weights: with ModelConfig.remat = NOTHING the copies of all layers'"
            " weights wait for the backward pass on the device (set ModelConfig.remat ="
            " 'ALL_BUT_PRODUCTS' or 'FULL', or OffloadPlan.streamed = True)"
        )
    if plan.activations and model.remat is not Remat.FULL:
        raise ConfigError(
            f"OffloadPlan.activations: with ModelConfig.remat = {model.remat.name} more"
            " than the layers' inputs waits for the backward pass, on the device (set"
            " ModelConfig.remat = 'FULL', or OffloadPlan.streamed = True)"
        )


def check_scale(where: str, policy: Policy | None, update: Update) -> None:
    """Raises ConfigError where a policy leaves moments at another scale than the gradients.

    Gradients that are means stay as large when layers are delinked, so that moments are right as
    they are; those that are sums become smaller, and the moments have to.

    Args:
      where: the stage, for the message.
      policy: for the optimizer's state.
      update: says what shared gradients are.
    """
    mean = update.mean_shared_gradient
    wrong, right = (Policy.RESCALE, Policy.COPY) if mean else (Policy.COPY, Policy.RESCALE)
    if policy is wrong:
        raise ConfigError(
            f"Stage.optimizer_state: {wrong.name} in {where} with Update.mean_shared_gradient ="
            f" {mean} leaves the optimizer's state at another scale than the gradients (choose"
            f" {right.name}, or Update.mean_shared_gradient = {not mean}; for a study of the wrong"
            " scale set Stage.allow_other_scale = True)"
        )


def check_pictures(model: ModelConfig, data: TextData) -> None:
    """Raises ConfigError for pictures whose patches the model does not take."""
    features = data.pictures.patch_dim
    if data.has_pictures and model.patch_dim != features:
        raise ConfigError(
            f"ModelConfig.patch_dim: {model.patch_dim}, but Pictures.patch_size ="
            f" {data.pictures.patch_size} makes patches of {features} features (set it to"
            f" {features})"
        )


def best_of(keep_best: int, best_metric: str, data: TextData) -> str:
    """Returns the metric by which checkpoints are kept, with its held-out set: 'books/loss'.

    Args:
      keep_best: see `Experiment`.
      best_metric: see `Experiment`.
      data: says which sets there are.

    Raises:
      ConfigError: there is no such set, no such metric, or nothing is held out.
    """
    if keep_best < 0:
        raise ConfigError(f"Experiment.keep_best: {keep_best} is negative")
    sets = data.eval_names()
    if not sets:
        raise ConfigError(
            f"Experiment.keep_best: {keep_best} checkpoints cannot be kept for a held-out metric:"
            " nothing is held out (see TextFiles.validation, TextFiles.hold_out_every and"
            " TextData.held_out, or set keep_best = 0)"
        )
    several = len(sets) > 1
    name, _, metric = best_metric.rpartition("/")
    name = name or (ALL_SETS if several else sets[0])
    there = (*sets, ALL_SETS) if several else sets
    if name not in there:
        raise ConfigError(
            f"Experiment.best_metric: {name!r} is no held-out set{nearest(name, there)}"
        )
    metrics = BEST_METRICS if name == ALL_SETS and several else BEST_METRICS[:2]
    if metric not in metrics:
        raise ConfigError(
            f"Experiment.best_metric: {metric!r} of {name!r} does not say which checkpoint is the"
            f" best{nearest(metric, metrics)} (choices: {', '.join(metrics)})"
        )
    return f"{name}/{metric}"
