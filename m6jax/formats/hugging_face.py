"""Mixtral's and Llama's folders: what they call a model's settings and leaves.

A model whose layers all have gated experts is Mixtral (arXiv 2401.04088), one whose layers all are
dense and gated is Llama. A matrix [in, out] of m6jax is [out, in] there:

    layers.3.attention.query [M, N, D]    model.layers.3.self_attn.q_proj.weight [N * D, M]
    layers.3.moe.gate [E, M, H]           E leaves [H, M]: ...block_sparse_moe.experts.0.w1.weight
    embedder.table [V, M]                 model.embed_tokens.weight, as it is

Nothing is rounded, so that what comes back is bit for bit what left. Ids that the vocabulary does
not have (`ModelConfig.num_ids`) are cut off.

Axis letters: L layers, V vocabulary, M width (embed), H FFN width (mlp), N heads, J heads of keys
and values, D head size, E experts, K experts chosen.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from m6jax.data.vocab import Vocabulary
from m6jax.formats.weights import Weight, Weights, floating
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.config import (
    Activation,
    CapacityMode,
    LayerKind,
    ModelConfig,
    MoEConfig,
    Norm,
    Positions,
)
from m6jax.modeling.routers import Scores, TopK

TOKENIZER = "tokenizer.model"
MIXTRAL, LLAMA = "mixtral", "llama"
# What layers of Mistral's and Llama's folders are called is the same.
_DENSE_TYPES = (LLAMA, "mistral")
_CLASSES = {MIXTRAL: "MixtralForCausalLM", LLAMA: "LlamaForCausalLM"}
_ACTIVATIONS = {Activation.SILU: "silu", Activation.GELU: "gelu_pytorch_tanh"}


def refuse(config: ModelConfig) -> None:
    """Raises ConfigError, with every reason, for a model that is neither Mixtral nor Llama."""
    moe = config.moe
    sparse = LayerKind.SPARSE in config.pattern
    reasons = [
        (len(set(config.pattern)) > 1, "pattern has dense and sparse layers"),
        (config.norm is not Norm.RMS, "norm is LAYER, not RMS"),
        (config.sandwich_norm, "sandwich_norm is set"),
        (config.positions is not Positions.ROTARY, "positions are LEARNED, not ROTARY"),
        (not config.gated_mlp, "gated_mlp is not set"),
        (config.scale_embedding, "scale_embedding is set"),
        (config.patch_dim is not None, "patch_dim: it sees pictures"),
        (not config.causal, "causal is False"),
    ]
    if sparse and moe is not None:
        router = moe.router
        plain = isinstance(router, TopK) and router.scores is Scores.SOFTMAX
        biased = isinstance(router, TopK) and router.bias_rate > 0
        reasons += [
            (not plain, "moe.router is not TopK with SOFTMAX"),
            (biased, "moe.router has biases (bias_rate)"),
            (moe.num_prototypes > 1, f"moe.num_prototypes is {moe.num_prototypes}, not 1"),
            (moe.num_shared_experts > 0, "moe.num_shared_experts is not 0"),
            (not moe.normalize_weights, "moe.normalize_weights is not set"),
            (moe.capacity_mode is CapacityMode.ONE_X, "moe.capacity_mode is ONE_X"),
        ]
    found = [reason for holds, reason in reasons if holds]
    if found:
        raise ConfigError(
            f"Export.format: HUGGING_FACE knows this model's shape as"
            f" {'Mixtral' if sparse else 'Llama'} but for this, of ModelConfig: {'; '.join(found)}"
            " (SAFETENSORS takes every model)"
        )


def document(config: ModelConfig, dtype: np.dtype, about: dict[str, Any]) -> dict[str, Any]:
    """Returns what `config.json` says of a model that `refuse` let pass.

    Args:
      config: the model.
      dtype: of the tensors.
      about: `start_id`, `eos_id` and `pad_id` of the vocabulary.
    """
    moe = config.moe if LayerKind.SPARSE in config.pattern else None
    kind = LLAMA if moe is None else MIXTRAL
    written = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.num_ids or config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tied_output,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "torch_dtype": str(dtype),
        "bos_token_id": about["start_id"],
        "eos_token_id": about["eos_id"],
        "pad_token_id": about["pad_id"],
    }
    if moe is None:
        return written | {"mlp_bias": False}
    return written | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_selected_experts,
        "router_aux_loss_coef": moe.load_balance_loss,
        "router_jitter_noise": moe.router_jitter,
    }


def tokenizer(vocabulary: Vocabulary, config: ModelConfig) -> dict[str, Any]:
    """Returns what `tokenizer_config.json` says of a SentencePiece vocabulary."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)

    def piece(number: int) -> str:
        return str(pieces.id_to_piece(number))

    sentinels = [vocabulary.sentinel(i) for i in range(vocabulary.extra_ids)]
    added = {
        str(number): {
            "content": f"<extra_id_{i}>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, number in enumerate(sentinels)
    }
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": piece(vocabulary.start_id),
        "eos_token": piece(vocabulary.eos_id),
        "pad_token": piece(vocabulary.pad_id),
        "unk_token": piece(pieces.unk_id()),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_length,
        "added_tokens_decoder": added,
    }


def config_of(written: dict[str, Any], where: str) -> ModelConfig:
    """Returns the model that a `config.json` describes.

    Args:
      written: what it says.
      where: its path, for messages.

    Raises:
      ConfigError: it is of another kind, or has what m6jax has not.
    """
    kind = written.get("model_type")
    if kind not in (MIXTRAL, *_DENSE_TYPES):
        raise ConfigError(
            f"{where}: model_type {kind!r} cannot be read (choices: {MIXTRAL},"
            f" {', '.join(_DENSE_TYPES)})"
        )
    rope = written.get("rope_parameters") or written.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    length = written["max_position_embeddings"]
    window = written.get("sliding_window")
    activations = {name: activation for activation, name in _ACTIVATIONS.items()}
    reasons = [
        (written.get("attention_bias", False), "attention_bias is true"),
        (written.get("mlp_bias", False), "mlp_bias is true"),
        (scaled, f"rotary positions are scaled ({rope})"),
        (window is not None and window < length, f"sliding_window is {window}"),
        (written["hidden_act"] not in activations, f"hidden_act is {written['hidden_act']}"),
    ]
    found = [reason for holds, reason in reasons if holds]
    if found:
        raise ConfigError(f"{where}: m6jax has no such model: {'; '.join(found)}")
    moe = None
    if kind == MIXTRAL:
        moe = MoEConfig(
            num_experts=written["num_local_experts"],
            num_selected_experts=written["num_experts_per_tok"],
            capacity_factor=None,
            normalize_weights=True,
            load_balance_loss=written.get("router_aux_loss_coef", 0.0),
            router_jitter=written.get("router_jitter_noise", 0.0),
        )
    return ModelConfig(
        vocab_size=written["vocab_size"],
        num_layers=written["num_hidden_layers"],
        embed_dim=written["hidden_size"],
        num_heads=written["num_attention_heads"],
        mlp_dim=written["intermediate_size"],
        num_kv_heads=written.get("num_key_value_heads"),
        head_dim=written.get("head_dim"),
        max_length=length,
        pattern=(LayerKind.DENSE if moe is None else LayerKind.SPARSE,),
        moe=moe,
        norm_epsilon=written["rms_norm_eps"],
        rope_base=float(written.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
        gated_mlp=True,
        activation=activations[written["hidden_act"]],
        scale_embedding=False,
        tied_output=written.get("tie_word_embeddings", False),
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a leaf lies there.

    Attributes:
      own: its name in m6jax.
      theirs: its name there, `{}` for the number of an expert.
      there: from a leaf of m6jax (of one expert) to theirs.
      back: the inverse.
      experts: whether each expert has a leaf there.
    """

    own: str
    theirs: str
    there: Callable[[Any], Any]
    back: Callable[[Any], Any]
    experts: bool = False


def written_weights(weights: Weights, config: ModelConfig) -> Weights:
    """Returns a model's leaves with their names and shapes there; see `weights.delinked`."""
    found: Weights = {}
    for place in _places(config):
        weight = weights[place.own]
        if not place.experts:
            found[place.theirs] = weight.map(place.there)
            continue
        for e in range(weight.shape[0]):
            found[place.theirs.format(e)] = weight.map(functools.partial(_expert, place, e))
    return found


def _expert(place: "_Place", number: int, x: Any) -> Any:
    return place.there(x[number])


def own_weights(written: Weights, config: ModelConfig, where: str) -> Weights:
    """Returns the leaves of m6jax from those of a folder; the inverse of `written_weights`.

    Args:
      written: the folder's, by name.
      config: the model.
      where: the folder, for messages.

    Raises:
      ConfigError: a leaf is missing, or there is one more.
    """
    # Kept by some old checkpoints, and computed from rope_theta.
    rest = {name for name in written if not name.endswith("rotary_emb.inv_freq")}
    found: Weights = {}
    for place in _places(config):
        numbers = range(config.moe.num_experts) if place.experts and config.moe else [0]
        names = [place.theirs.format(e) for e in numbers]
        missing = [name for name in names if name not in written]
        if missing:
            raise ConfigError(f"{where}: the weights have no {missing[0]}, which config.json asks")
        rest -= set(names)
        parts = [written[name].map(place.back) for name in names]
        found[place.own] = _stacked(parts) if place.experts else parts[0]
    rest -= {"lm_head.weight"} if config.tied_output else set()
    if rest:
        raise ConfigError(
            f"{where}: {len(rest)} weights belong to no part of the model that config.json"
            f" describes, the first is {min(rest)}"
        )
    return found


def _stacked(parts: list[Weight]) -> Weight:
    shape = (len(parts), *parts[0].shape)
    return Weight(shape, parts[0].dtype, lambda: np.stack([part.make() for part in parts]))


def _places(config: ModelConfig) -> Iterator[_Place]:
    N, J, D, M = config.num_heads, config.kv_heads, config.head_size, config.embed_dim
    ids = slice(config.num_ids)

    def same(own: str, theirs: str) -> _Place:
        return _Place(own, theirs, lambda x: x, lambda x: x)

    def matrix(own: str, theirs: str, experts: bool = False) -> _Place:
        return _Place(own, theirs, lambda x: x.T, lambda x: x.T, experts)

    def heads(own: str, theirs: str, count: int) -> _Place:
        return _Place(
            own,
            theirs,
            lambda x: x.reshape(M, count * D).T,
            lambda x: x.T.reshape(M, count, D),
        )

    yield _Place("embedder.table", "model.embed_tokens.weight", lambda x: x[ids], lambda x: x)
    for i in range(config.num_layers):
        own, theirs = f"layers.{i}", f"model.layers.{i}"
        yield same(f"{own}.attention_norm.scale", f"{theirs}.input_layernorm.weight")
        yield heads(f"{own}.attention.query", f"{theirs}.self_attn.q_proj.weight", N)
        yield heads(f"{own}.attention.key", f"{theirs}.self_attn.k_proj.weight", J)
        yield heads(f"{own}.attention.value", f"{theirs}.self_attn.v_proj.weight", J)
        yield _Place(
            f"{own}.attention.output",
            f"{theirs}.self_attn.o_proj.weight",
            lambda x: x.reshape(N * D, M).T,
            lambda x: x.T.reshape(N, D, M),
        )
        yield same(f"{own}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight")
        if LayerKind.SPARSE in config.pattern:
            theirs = f"{theirs}.block_sparse_moe"
            yield matrix(f"{own}.moe.router.kernel", f"{theirs}.gate.weight")
            for name, number in (("gate", 1), ("down", 2), ("up", 3)):
                expert = f"{theirs}.experts.{{}}.w{number}.weight"
                yield matrix(f"{own}.moe.{name}", expert, experts=True)
        else:
            for name in ("gate", "up", "down"):
                yield matrix(f"{own}.mlp.{name}", f"{theirs}.mlp.{name}_proj.weight")
    yield same("final_norm.scale", "model.norm.weight")
    if not config.tied_output:
        yield _Place("head.kernel", "lm_head.weight", lambda x: x[:, ids].T, lambda x: x.T)


def type_of(weights: Weights) -> np.dtype:
    """Returns the floating-point type of most elements."""
    sizes: dict[np.dtype, int] = {}
    for weight in weights.values():
        if floating(weight.dtype):
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.size
    return max(sizes, key=lambda dtype: sizes[dtype])
