"""What a model is: sizes and choices, each checked, none looking at devices.

>>> ModelConfig(vocab_size=8000, num_layers=4, embed_dim=256, num_heads=4, mlp_dim=1024,
...             moe=MoEConfig(num_experts=16, num_prototypes=4))
"""

import enum
from dataclasses import replace

from m6jax.foundation.validated import ConfigError, nearest, validated
from m6jax.layouts import Form, Layout, Part
from m6jax.modeling.routers import ExpertChoice, TokenHash, TopK

DTYPES = ("float32", "bfloat16", "float16")


class LayerKind(enum.Enum):
    """What follows attention in a layer."""

    DENSE = "dense"
    SPARSE = "sparse"


class Norm(enum.Enum):
    """Normalisation of a layer's input."""

    RMS = "rms"
    LAYER = "layer"


class Activation(enum.Enum):
    """What stands between the matrices of a feed-forward.

    GELU is the tanh form (arXiv 1606.08415); SILU is x * sigmoid(x), with which a gated
    feed-forward is SwiGLU (arXiv 2002.05202).
    """

    GELU = "gelu"
    SILU = "silu"


class Positions(enum.Enum):
    """How a token knows where it stands."""

    ROTARY = "rotary"
    LEARNED = "learned"


class Remat(enum.Enum):
    """What the backward pass recomputes: NOTHING, all but matrix products, or all of a layer."""

    NOTHING = "nothing"
    ALL_BUT_PRODUCTS = "all_but_products"
    FULL = "full"


class CapacityMode(enum.Enum):
    """How capacity grows with the experts that a token asks for.

    KX: S * P * K * factor / E, every token really gets P * K experts. ONE_X: S * factor / E, M6-T's
    constant cost whatever P and K.
    """

    KX = "kx"
    ONE_X = "1x"


class BalanceOver(enum.Enum):
    """Over what the balance loss compares loads: a (micro)BATCH, or each SEQUENCE (row) alone.

    With SEQUENCE (as in DeepSeek-V3) the loss is the mean over rows, weighted by their
    tokens; unlike BATCH it does not depend on how a batch is cut in microbatches.
    """

    BATCH = "batch"
    SEQUENCE = "sequence"


@validated
class MoEConfig:
    """Experts and how tokens reach them.

    Attributes:
      num_experts: E, over all prototypes.
      num_prototypes: P; experts are cut in P groups, each of which serves every token.
      num_selected_experts: K, experts chosen in each prototype.
      router: who chooses; see `routers`.
      num_shared_experts: experts that every token passes besides, with weight 1.
      capacity_factor: room of an expert relative to an even load; None: dropless.
      capacity_mode: KX or ONE_X.
      group_size: S, number of tokens that compete for capacity; None: one row of the batch.
      load_balance_loss: weight of the balance loss in the total loss (0: only reported).
      balance_over: over what the balance loss compares loads.
      router_z_loss: weight of the router's z-loss.
      normalize_weights: make the K weights of a prototype sum to 1 (with K = 1 all of them are 1,
        and a router learns from its own losses alone).
      router_jitter: in training, multiply the router's input by uniform(1 - j, 1 + j).
      router_dtype: type of the router's weights. In bfloat16 scores of 8.00 and 8.02 would be
        equal, and another expert would be chosen; a router is small beside its experts.
    """

    num_experts: int
    num_prototypes: int = 1
    num_selected_experts: int = 1
    router: TopK | TokenHash | ExpertChoice = TopK()
    num_shared_experts: int = 0
    capacity_factor: float | None = 1.25
    capacity_mode: CapacityMode = CapacityMode.KX
    group_size: int | None = None
    load_balance_loss: float = 0.0
    balance_over: BalanceOver = BalanceOver.BATCH
    router_z_loss: float = 0.0
    normalize_weights: bool = False
    router_jitter: float = 0.0
    router_dtype: str = "float32"

    def check(self) -> None:
        """Raises ConfigError for numbers that do not fit together."""
        require_positive(self, "num_experts", "num_prototypes", "num_selected_experts")
        require_positive(self, "group_size", "capacity_factor")
        for field in ("num_shared_experts", "load_balance_loss", "router_z_loss"):
            if getattr(self, field) < 0:
                raise ConfigError(f"MoEConfig.{field}: {getattr(self, field)} is negative")
        if self.num_experts % self.num_prototypes:
            raise ConfigError(
                f"MoEConfig.num_experts: {self.num_experts} experts do not divide into"
                f" {self.num_prototypes} prototypes"
            )
        if self.num_selected_experts > self.experts_per_prototype:
            raise ConfigError(
                f"MoEConfig.num_selected_experts: {self.num_selected_experts} of the"
                f" {self.experts_per_prototype} experts of a prototype cannot be chosen"
            )
        if not 0 <= self.router_jitter < 1:
            raise ConfigError(f"MoEConfig.router_jitter: {self.router_jitter} is not in [0, 1)")
        _check_type("MoEConfig.router_dtype", self.router_dtype)
        if self.capacity_factor is None and self.capacity_mode is CapacityMode.ONE_X:
            raise ConfigError(
                "MoEConfig.capacity_mode: ONE_X needs a capacity_factor (dropless serves every"
                " choice, which is another model than one trained with ONE_X)"
            )
        self._check_router()

    def _check_router(self) -> None:
        name = type(self.router).__name__
        if not self.router.learned:
            for field in ("load_balance_loss", "router_z_loss", "router_jitter"):
                if getattr(self, field):
                    raise ConfigError(
                        f"MoEConfig.{field}: {getattr(self, field)} has no effect with router ="
                        f" {name}, which learns nothing (set it to 0, or choose TopK)"
                    )
        has_loss = self.router.learned and not self.router.balanced
        if self.balance_over is BalanceOver.SEQUENCE and not has_loss:
            raise ConfigError(
                "MoEConfig.balance_over: SEQUENCE is for a balance loss, which router ="
                f" {name} cannot have (leave it at BATCH, or choose TopK)"
            )
        if not self.router.balanced:
            return
        if self.load_balance_loss:
            raise ConfigError(
                f"MoEConfig.load_balance_loss: {self.load_balance_loss} has no use with router ="
                f" {name}, whose load is always even (set it to 0)"
            )
        if self.capacity_factor is None or self.capacity_mode is CapacityMode.ONE_X:
            raise ConfigError(
                f"MoEConfig.capacity_factor: with router = {name} an expert takes as many tokens as"
                f" it has room for; {self.capacity_factor} with capacity_mode ="
                f" {self.capacity_mode.name} does not say how many (set a factor, with KX)"
            )

    @property
    def experts_per_prototype(self) -> int:
        """E / P."""
        return self.num_experts // self.num_prototypes


@validated
class ModelConfig:
    """M6's one transformer: a prefix that sees itself in full, then a causal target.

    Attributes:
      vocab_size: V.
      num_layers: L, attention-and-FFN layers that a token passes.
      embed_dim: M.
      num_heads: N.
      mlp_dim: H, FFN width (of one expert in sparse layers).
      num_kv_heads: heads of keys and values; None: as many as num_heads.
      head_dim: D; None: embed_dim / num_heads.
      max_length: longest row; size of the table of learned positions.
      pattern: kinds of layers, repeated over the depth; (DENSE, SPARSE): MoE in every other layer.
      moe: needed where the pattern has a SPARSE layer.
      norm: RMS or LAYER.
      norm_epsilon: added to the mean square (or variance) before the root of every norm.
      sandwich_norm: also normalise what attention and FFN give back.
      positions: ROTARY or LEARNED.
      rope_base: ROTARY turns pair i of D / 2 by position * rope_base ** (-2 i / D).
      gated_mlp: gated FFN with three matrices instead of two.
      activation: of the FFN, of its gate if there is one.
      scale_embedding: multiply the rows of the token table by sqrt(embed_dim).
      tied_output: logits from the embedding table.
      dropout: rate, in training.
      dtype: type of the arithmetic.
      param_dtype: type of the weight matrices; norms are float32, for routers see
        `MoEConfig.router_dtype`.
      remat: what the backward pass recomputes.
      init_scale: factor on the standard deviation of every initial weight matrix.
      patch_dim: size of an image patch's features; None: text only.
      causal: a token sees what came before it (and its prefix). False: all of its document, for
        uses other than predicting the next token.
      num_ids: ids from here on are never predicted: vocab_size is larger than the vocabulary, so
        that it divides well. None: all V are; a run sets it to what its vocabulary has.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_length: int = 1024
    pattern: tuple[LayerKind, ...] = (LayerKind.SPARSE,)
    moe: MoEConfig | None = None
    norm: Norm = Norm.RMS
    norm_epsilon: float = 1e-6
    sandwich_norm: bool = False
    positions: Positions = Positions.ROTARY
    rope_base: float = 10_000.0
    gated_mlp: bool = False
    activation: Activation = Activation.GELU
    scale_embedding: bool = True
    tied_output: bool = True
    dropout: float = 0.0
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: Remat = Remat.NOTHING
    init_scale: float = 1.0
    patch_dim: int | None = None
    causal: bool = True
    num_ids: int | None = None

    def check(self) -> None:
        """Raises ConfigError for numbers that do not fit together."""
        require_positive(
            self, "vocab_size", "num_layers", "embed_dim", "num_heads", "mlp_dim", "max_length"
        )
        require_positive(self, "num_kv_heads", "head_dim", "init_scale", "patch_dim", "num_ids")
        require_positive(self, "norm_epsilon", "rope_base")
        if self.num_ids is not None and self.num_ids > self.vocab_size:
            raise ConfigError(
                f"ModelConfig.num_ids: {self.num_ids} are more than vocab_size = {self.vocab_size}"
            )
        for field in ("dtype", "param_dtype"):
            _check_type(f"ModelConfig.{field}", getattr(self, field))
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"ModelConfig.dropout: {self.dropout} is not in [0, 1)")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ConfigError(
                f"ModelConfig.num_heads: {self.num_heads} heads do not divide embed_dim ="
                f" {self.embed_dim} (set head_dim)"
            )
        if self.positions is Positions.ROTARY and self.head_size % 2:
            raise ConfigError(f"ModelConfig.head_dim: {self.head_size} is odd; ROTARY turns pairs")
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"ModelConfig.num_kv_heads: {self.kv_heads} does not divide {self.num_heads} heads"
            )
        if not self.pattern or self.num_layers % len(self.pattern):
            raise ConfigError(
                f"ModelConfig.pattern: {len(self.pattern)} kinds do not divide"
                f" {self.num_layers} layers"
            )
        if LayerKind.SPARSE in self.pattern and self.moe is None:
            raise ConfigError(
                "ModelConfig.moe: the pattern has SPARSE layers but there are no experts (set"
                " ModelConfig.moe = @MoEConfig(), or pattern = ('DENSE',))"
            )
        if self.moe is not None:
            self._check_router(self.moe)

    def _check_router(self, moe: MoEConfig) -> None:
        name = type(moe.router).__name__
        if self.causal and not moe.router.causal:
            raise ConfigError(
                f"MoEConfig.router: with {name} the experts of a token depend on later tokens,"
                " which a causal model must not see (choose TopK; ModelConfig.causal = False is"
                " for models that do not predict the next token)"
            )
        if self.patch_dim is not None and not moe.router.learned:
            raise ConfigError(
                f"MoEConfig.router: {name} goes by token ids, which image patches do not have"
                " (choose TopK, or leave ModelConfig.patch_dim unset)"
            )

    @property
    def head_size(self) -> int:
        """D."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    def layer_name(self, i: int) -> str:
        """Name of layer i of the pattern in the parameters of a block of several layers."""
        return f"{self.pattern[i].value}_{i}"

    @property
    def num_blocks(self) -> int:
        """Depth of the stack: one block is one round of the pattern."""
        return self.num_layers // len(self.pattern)

    def layout(self, unit: int, form: Form = Form.STACKED, parts: tuple[Part, ...] = ()) -> Layout:
        """Returns the layout of a stack with `unit` distinct layers (of L).

        Args:
          unit: of all that `parts` do not name.
          form: of the stack.
          parts: leaves with units of their own, in layers too.

        Raises:
          ConfigError: a unit does not divide the depth, or cuts the pattern.
        """
        Layout(depth=self.num_layers, unit=unit, parts=parts)
        round_ = len(self.pattern)

        def rounds(unit: int, field: str) -> int:
            if unit % round_:
                raise ConfigError(
                    f"{field}: {unit} layers are not whole rounds of the pattern of {round_} kinds"
                )
            return unit // round_

        return Layout(
            depth=self.num_blocks,
            unit=rounds(unit, "Stage.unit"),
            form=form,
            parts=tuple(
                part if part.unit is None else replace(part, unit=rounds(part.unit, "Part.unit"))
                for part in parts
            ),
        )


def require_positive(config: object, *fields: str) -> None:
    """Raises ConfigError unless every field is None or greater than 0."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not value > 0:
            raise ConfigError(f"{type(config).__name__}.{field}: {value} is not greater than 0")


def _check_type(setting: str, name: str) -> None:
    if name not in DTYPES:
        raise ConfigError(f"{setting}: unknown type {name!r}{nearest(name, DTYPES)}")
