import models
import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout
from m6jax.modeling.config import LayerKind, MoEConfig

DENSE, SPARSE = LayerKind.DENSE, LayerKind.SPARSE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "MoEConfig.num_experts: 0 is not greater than 0"),
        ({"num_prototypes": 0}, "MoEConfig.num_prototypes: 0 is not"),
        ({"num_selected_experts": -1}, "MoEConfig.num_selected_experts: -1 is not"),
        ({"capacity_factor": 0.0}, "MoEConfig.capacity_factor: 0.0 is not"),
        ({"group_size": 0}, "MoEConfig.group_size: 0 is not"),
        ({"num_experts": 9}, "9 experts do not divide into 2 prototypes"),
        ({"num_selected_experts": 5}, "5 of the 4 experts of a prototype cannot be chosen"),
        ({"router_jitter": 1.0}, r"router_jitter: 1.0 is not in \[0, 1\)"),
        ({"capacity_factor": None, "capacity_mode": "ONE_X"}, "ONE_X needs a capacity_factor"),
        ({"capacity_mode": "TWO_X"}, "'TWO_X' is not a CapacityMode .*ONE_X"),
        ({"num_experts": "8"}, r"expected int, got '8' \(str\) \(did you mean 8\?\)"),
        ({"load_balance_loss": -0.1}, "MoEConfig.load_balance_loss: -0.1"),
        ({"router_z_loss": -0.1}, "MoEConfig.router_z_loss: -0.1"),
        ({"router_dtype": "int8"}, "MoEConfig.router_dtype: unknown type 'int8'"),
    ],
)
def test_experts_refuse_what_cannot_be(changes, message):
    """B9 (iv), (viii)."""
    with pytest.raises(ConfigError, match=message):
        models.experts(**changes)


def test_experts_per_prototype():
    assert MoEConfig(num_experts=12, num_prototypes=3).experts_per_prototype == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "ModelConfig.vocab_size: 0 is not greater than 0"),
        ({"num_layers": 0}, "ModelConfig.num_layers: 0 is not"),
        ({"embed_dim": -16}, "ModelConfig.embed_dim: -16 is not"),
        ({"num_heads": 0}, "ModelConfig.num_heads: 0 is not"),
        ({"mlp_dim": 0}, "ModelConfig.mlp_dim: 0 is not"),
        ({"max_length": 0}, "ModelConfig.max_length: 0 is not"),
        ({"num_kv_heads": 0}, "ModelConfig.num_kv_heads: 0 is not"),
        ({"head_dim": 0}, "ModelConfig.head_dim: 0 is not"),
        ({"init_scale": 0.0}, "ModelConfig.init_scale: 0.0 is not"),
        ({"patch_dim": 0}, "ModelConfig.patch_dim: 0 is not"),
        ({"dtype": "bfloat61"}, r"ModelConfig.dtype: .*'bfloat61' \(did you mean 'bfloat16'\?\)"),
        ({"param_dtype": "int8"}, "ModelConfig.param_dtype: unknown type 'int8'"),
        ({"dropout": 1.0}, r"ModelConfig.dropout: 1.0 is not in \[0, 1\)"),
        ({"num_heads": 3}, r"3 heads do not divide embed_dim = 16 \(set head_dim\)"),
        ({"head_dim": 3}, "ModelConfig.head_dim: 3 is odd; ROTARY"),
        ({"num_kv_heads": 3}, "ModelConfig.num_kv_heads: 3 does not divide 8 heads"),
        ({"pattern": ()}, "0 kinds do not divide 2 layers"),
        ({"pattern": ("DENSE", "SPARSE", "SPARSE")}, "3 kinds do not divide 2 layers"),
        ({"pattern": ("DENSE", "SPARCE")}, r"'SPARCE' is not a LayerKind .*'SPARSE'"),
        (
            {"moe": None},
            r"ModelConfig.moe: the pattern has SPARSE layers .* pattern = \('DENSE',\)",
        ),
    ],
)
def test_model_refuses_what_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        models.tiny(**changes)


def test_sizes_that_follow_from_others():
    config = models.tiny()
    assert (config.head_size, config.kv_heads) == (2, 8)
    config = models.tiny(head_dim=4, num_kv_heads=2)
    assert (config.head_size, config.kv_heads) == (4, 2)


def test_odd_heads_are_fine_without_rotation():
    assert models.tiny(head_dim=3, positions="LEARNED").head_size == 3


def test_a_dense_model_needs_no_experts():
    assert models.tiny(pattern=(DENSE,), moe=None).num_blocks == 2


def test_a_block_is_one_round_of_the_pattern():
    config = models.tiny(num_layers=12, pattern=(DENSE, DENSE, SPARSE))
    assert config.num_blocks == 4
    assert config.layout(6, Form.STACKED) == Layout(depth=4, unit=2)
    assert config.layout(12, Form.UNROLLED) == Layout(depth=4, unit=4, form=Form.UNROLLED)


@pytest.mark.parametrize(
    ("unit", "form", "message"),
    [
        (5, "STACKED", "unit: 5 does not divide the depth of 12 layers"),
        (2, "STACKED", "Stage.unit: 2 layers are not whole rounds of the pattern of 3 kinds"),
        (6, "UNROLLED", "UNROLLED needs a unit of all"),
    ],
)
def test_layout_refuses_units_that_cannot_be(unit, form, message):
    """B9 (vii): a unit that does not divide the depth, counted in layers."""
    config = models.tiny(num_layers=12, pattern=(DENSE, DENSE, SPARSE))
    with pytest.raises(ConfigError, match=message):
        config.layout(unit, Form[form])
