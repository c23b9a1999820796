"""Settings of routers: what cannot be is named, what can be comes back from its gin text."""

import models
import pytest

from m6jax import configuration
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.config import ModelConfig, MoEConfig
from m6jax.modeling.routers import ExpertChoice, TokenHash, TopK

NO_LOSSES = {"load_balance_loss": 0.0, "router_z_loss": 0.0}
BAD = {
    "hash with a balance loss": (
        {"router": TokenHash(), "router_z_loss": 0.0},
        "MoEConfig.load_balance_loss: 0.1 has no effect with router = TokenHash, which learns"
        " nothing .*TopK",
    ),
    "hash with a z-loss": (
        {"router": TokenHash(), "load_balance_loss": 0.0},
        "MoEConfig.router_z_loss: 0.1 has no effect with router = TokenHash",
    ),
    "hash with jitter": (
        {"router": TokenHash(), "router_jitter": 0.1, **NO_LOSSES},
        "MoEConfig.router_jitter: 0.1 has no effect with router = TokenHash",
    ),
    "hash over sequences": (
        {"router": TokenHash(), "balance_over": "SEQUENCE", **NO_LOSSES},
        "balance_over: SEQUENCE is for a balance loss, which router = TokenHash cannot .*BATCH",
    ),
    "even anyway": (
        {"router": ExpertChoice()},
        "load_balance_loss: 0.1 has no use with router = ExpertChoice, whose load is always even",
    ),
    "even over sequences": (
        {"router": ExpertChoice(), "balance_over": "SEQUENCE", "load_balance_loss": 0.0},
        "balance_over: SEQUENCE .* ExpertChoice cannot have",
    ),
    "expert choice dropless": (
        {"router": ExpertChoice(), "capacity_factor": None, "load_balance_loss": 0.0},
        "capacity_factor: with router = ExpertChoice .* None with capacity_mode = KX .*a factor",
    ),
    "expert choice 1x": (
        {"router": ExpertChoice(), "capacity_mode": "ONE_X", "load_balance_loss": 0.0},
        "capacity_factor: with router = ExpertChoice .* 1.0 with capacity_mode = ONE_X",
    ),
    "shared": ({"num_shared_experts": -1}, "MoEConfig.num_shared_experts: -1 is negative"),
    "more than there are": ({"num_selected_experts": 5}, "5 of the 4 experts of a prototype"),
    "no router": ({"router": "TopK"}, "MoEConfig.router: expected TopK"),
    "over what": ({"balance_over": "ROWS"}, "'ROWS' is not a BalanceOver .*BATCH, SEQUENCE"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_impossible_combinations_are_named_with_the_way_out(changes, message):
    with pytest.raises(ConfigError, match=message):
        models.experts(**changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: TopK(bias_rate=-0.1), "TopK.bias_rate: -0.1 is negative"),
        (lambda: TopK(scores="SOFTMIN"), "'SOFTMIN' is not a Scores .*'SOFTMAX'"),
        (lambda: TokenHash(seed=-1), r"TokenHash.seed: -1 is not in \[0, 2\*\*32\)"),
        (
            lambda: models.tiny(moe=models.experts(router=ExpertChoice(), load_balance_loss=0.0)),
            "MoEConfig.router: with ExpertChoice the experts of a token depend on later tokens,"
            " which a causal model must not see .*TopK.*causal = False",
        ),
        (
            lambda: models.tiny(moe=models.experts(router=TokenHash(), **NO_LOSSES), patch_dim=3),
            "MoEConfig.router: TokenHash goes by token ids, which image patches do not have .*TopK",
        ),
    ],
    ids=["rate", "scores", "seed", "causal", "patches"],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        settings()


def test_the_default_is_softmax_top_k():
    assert MoEConfig(num_experts=2).router == TopK(scores="SOFTMAX", bias_rate=0.0)


@pytest.mark.parametrize(
    "router",
    [
        TopK(),
        TopK(scores="SIGMOID", bias_rate=1e-3),
        TokenHash(seed=3),
        ExpertChoice(),
    ],
    ids=lambda router: type(router).__name__,
)
def test_configuration_comes_back_from_its_text(router, tmp_path):
    moe = MoEConfig(
        num_experts=8,
        router=router,
        num_shared_experts=2,
        balance_over="SEQUENCE" if isinstance(router, TopK) else "BATCH",
    )
    config = models.tiny(moe=moe, causal=router.causal)
    file = tmp_path / "model.gin"
    file.write_text(configuration.to_gin(config), encoding="utf-8")
    loaded = configuration.load([file], root=ModelConfig)
    assert loaded.value == config
    assert loaded.text == file.read_text(encoding="utf-8")


def test_a_rate_for_a_router_without_biases_is_named(tmp_path):
    """B9 (iii): balancing by biases and a hash do not go together."""
    text = configuration.to_gin(models.tiny(moe=MoEConfig(num_experts=8, router=TokenHash())))
    file = tmp_path / "model.gin"
    file.write_text(text + "\nmodeling.TokenHash.bias_rate = 0.001\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"TokenHash.*bias_rate"):
        configuration.load([file], root=ModelConfig)
