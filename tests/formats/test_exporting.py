"""Exported models: what others compute of the files is what the model computes."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import models
import numpy as np
import pytest
import safetensors.numpy

from m6jax import layouts
from m6jax.data.config import TokenIds
from m6jax.formats import Export, Format, exporting, hugging_face, tensor_files
from m6jax.formats.weights import Weight, delinked, unrolled
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Part
from m6jax.modeling import balancing
from m6jax.modeling.config import Activation, LayerKind, Norm, Positions
from m6jax.modeling.routers import Scores, TokenHash, TopK

sys.path.append(str(pathlib.Path(__file__).parents[2] / "docs"))
import read_model

B, T, V = 2, 8, 32
TOKENS = np.random.default_rng(0).integers(1, V, (B, T)).astype(np.int32)
VOCABULARY = TokenIds(size=V).load(())
DROPLESS = {"capacity_factor": None, "load_balance_loss": 0.0, "router_z_loss": 0.0}


def mixtral(**changes):
    moe = models.experts(num_prototypes=1, normalize_weights=True, **DROPLESS)
    settings = {
        "moe": moe,
        "gated_mlp": True,
        "activation": Activation.SILU,
        "scale_embedding": False,
        "tied_output": False,
        "num_kv_heads": 4,
        "head_dim": 4,
        "rope_base": 1e6,
        "norm_epsilon": 1e-5,
    }
    return models.tiny(**(settings | changes))


def llama(**changes):
    return mixtral(moe=None, pattern=(LayerKind.DENSE,), **changes)


def weights_of(config, layout=None):
    layout = layout or models.stacked(config)
    biases = models.draw_biases(config, layout)
    return balancing.join(models.draw(config, layout), biases), layout


def export(directory, config, layout=None, **settings):
    params, layout = weights_of(config, layout)
    return exporting.export(
        params, config, layout, VOCABULARY, Export(**settings), directory, {"step": 7}
    )


def logits_of(config, layout):
    params, _ = weights_of(config, layout)
    return np.asarray(models.logits_fn(config, layout)(params, models.whole_rows(TOKENS)))


PLAIN = {
    "prototypes, shared by layers": (
        models.tiny(num_layers=4, moe=models.experts(**DROPLESS), num_ids=20),
        2,
    ),
    "dense and sparse, LayerNorm, positions, biases of routers": (
        models.tiny(
            num_layers=4,
            pattern=(LayerKind.DENSE, LayerKind.SPARSE),
            norm=Norm.LAYER,
            positions=Positions.LEARNED,
            sandwich_norm=True,
            gated_mlp=True,
            moe=models.experts(
                router=TopK(scores=Scores.SIGMOID, bias_rate=1e-3),
                normalize_weights=True,
                num_shared_experts=1,
                **DROPLESS,
            ),
        ),
        2,
    ),
    "Mixtral": (mixtral(), 1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_numpy_alone_computes_the_logits(name, tmp_path):
    config, unit = PLAIN[name]
    layout = models.stacked(config, unit)
    exported = export(tmp_path / "new" / "folder", config, layout)
    expected = logits_of(config, layout)
    assert exported.files == ("config.json", "model.safetensors")
    model, tensors = read_model.load(exported.directory)
    ids = config.num_ids or config.vocab_size
    found = read_model.logits(model, tensors, TOKENS)
    np.testing.assert_allclose(found, expected[..., :ids], rtol=0, atol=1e-4)
    assert np.abs(expected[..., :ids]).max() > 0.5
    assert sum(name.startswith("layers.3.") for name in tensors) == (
        sum(name.startswith("layers.1.") for name in tensors) if config.num_layers == 4 else 0
    )


def test_the_reader_says_what_it_cannot_read(tmp_path):
    config = models.tiny(moe=models.experts(router=TokenHash(), **DROPLESS))
    params, layout = weights_of(config)
    exporting.export(params, config, layout, VOCABULARY, Export(), tmp_path, {})
    with pytest.raises(ValueError, match="routers that are TopK"):
        read_model.logits(*read_model.load(tmp_path), TOKENS)


def test_parts_and_runs_are_delinked_too():
    config = models.tiny(num_layers=4)
    shared = config.layout(1, Form.STACKED, (Part(pattern="norm"),))
    params, _ = weights_of(config, shared)
    weights = delinked(params, config, shared)
    real = models.stacked(config)
    tree = unrolled({name: w.make() for name, w in weights.items()}, config)
    expected = layouts.convert(params, shared, models.unrolled(config))
    models.assert_equal(tree, expected)
    cut = layouts.Layout(depth=4, unit=4, borders=(3,))
    runs = layouts.cut(layouts.convert(params, shared, real), cut)
    again = delinked(runs, config, cut)
    models.assert_equal(unrolled({n: w.make() for n, w in again.items()}, config), expected)


@pytest.mark.parametrize("make", [mixtral, llama])
def test_hugging_face_and_back_is_bit_equal(make, tmp_path):
    config = make()
    params, layout = weights_of(config)
    settings = Export(format=Format.HUGGING_FACE)
    exporting.export(params, config, layout, VOCABULARY, settings, tmp_path, {})
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 1e6
    assert written["num_key_value_heads"] == 4
    read = hugging_face.config_of(written, "config.json")
    assert read == dataclasses.replace(config, dtype=read.dtype)
    back = hugging_face.own_weights(tensor_files.read(tmp_path), read, "folder")
    tree = unrolled({name: weight.make() for name, weight in back.items()}, read)
    before = unrolled({n: w.make() for n, w in delinked(params, config, layout).items()}, config)
    models.assert_equal(tree, before)
    # The library of the format reads the same.
    library = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(library["model.embed_tokens.weight"], params["embedder"]["table"])


def test_ids_that_are_never_predicted_are_cut_off(tmp_path):
    export(tmp_path, mixtral(num_ids=20), format=Format.HUGGING_FACE)
    weights = tensor_files.read(tmp_path)
    assert weights["model.embed_tokens.weight"].shape == (20, 16)
    assert weights["lm_head.weight"].shape == (20, 16)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": Norm.LAYER}, "norm is LAYER"),
        ({"sandwich_norm": True}, "sandwich_norm"),
        ({"positions": Positions.LEARNED}, "positions are LEARNED"),
        ({"gated_mlp": False}, "gated_mlp is not set"),
        ({"scale_embedding": True}, "scale_embedding is set"),
        ({"patch_dim": 4}, "pictures"),
        ({"pattern": (LayerKind.DENSE, LayerKind.SPARSE)}, "dense and sparse"),
        ({"moe": models.experts(num_prototypes=2, **DROPLESS)}, "num_prototypes is 2"),
        ({"moe": models.experts(num_shared_experts=1)}, "num_shared_experts"),
        ({"moe": models.experts(normalize_weights=False)}, "normalize_weights is not set"),
        ({"moe": models.experts(capacity_mode="ONE_X")}, "ONE_X"),
        ({"moe": models.experts(router=TopK(scores="SIGMOID"))}, "TopK with SOFTMAX"),
        ({"moe": models.experts(router=TopK(bias_rate=1e-3))}, "biases"),
    ],
)
def test_what_hugging_face_does_not_know_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        exporting.check(mixtral(**changes), Export(format=Format.HUGGING_FACE))
    assert "SAFETENSORS takes every model" in str(error.value)


def test_a_program_runs_without_m6jax(tmp_path):
    config = models.tiny(moe=models.experts(**DROPLESS))
    layout = models.stacked(config, 1)
    export(tmp_path, config, layout, format=Format.STABLEHLO, rows=B, length=T)
    expected = logits_of(config, layout)
    np.save(tmp_path / "tokens.npy", TOKENS)
    code = (
        "import sys, jax, numpy as np, safetensors.numpy\n"
        "program = jax.export.deserialize(open('model.stablehlo', 'rb').read())\n"
        "weights = safetensors.numpy.load_file('model.safetensors')\n"
        "np.save('logits.npy', program.call(weights, np.load('tokens.npy')))\n"
        "assert not any(name.startswith(('m6jax', 'flax')) for name in sys.modules)\n"
    )
    flags = ["-W", "error", "-c", code]
    subprocess.run([sys.executable, *flags], check=True, cwd=tmp_path, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=0, atol=1e-4)


def test_what_a_program_cannot_be():
    settings = Export(format=Format.STABLEHLO)
    with pytest.raises(ConfigError, match="STABLEHLO maps token ids alone"):
        exporting.check(models.tiny(patch_dim=4), settings)
    with pytest.raises(ConfigError, match=r"Export.dtype: unknown type 'bflot16' .*'bfloat16'"):
        Export(dtype="bflot16")


def test_other_types_and_several_files(tmp_path):
    config = mixtral()
    exported = export(tmp_path / "whole", config, dtype="bfloat16")
    weights = tensor_files.read(exported.directory)
    assert {str(weight.dtype) for weight in weights.values()} == {"bfloat16"}
    (tmp_path / "cut").mkdir()
    paths = tensor_files.write(tmp_path / "cut", weights, most_bytes=3000)
    assert len(paths) > 3
    again = tensor_files.read(tmp_path / "cut")
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(again[name].make(), weight.make())


def test_folders_that_cannot_be(tmp_path):
    config = models.tiny()
    params, layout = weights_of(config)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"Export.directory: .* holds mine.txt already"):
        exporting.export(params, config, layout, VOCABULARY, Export(), tmp_path, {})
    with pytest.raises(ConfigError, match=r"Export.directory: .*mine.txt.* cannot be made"):
        exporting.export(params, config, layout, VOCABULARY, Export(), tmp_path / "mine.txt/a", {})
    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        tensor_files.read(tmp_path)


def test_a_file_that_ends_early_is_named(tmp_path):
    weight = Weight((4, 2), np.dtype(np.float32), lambda: np.ones((4, 2), np.float32))
    (path,) = tensor_files.write(tmp_path, {"a": weight})
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:4], b"\xff" * 16):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="not a whole safetensors file"):
            tensor_files.read(tmp_path)


BAD = {
    "model_type": ("gpt2", "model_type 'gpt2' cannot be read"),
    "attention_bias": (True, "attention_bias is true"),
    "mlp_bias": (True, "mlp_bias is true"),
    "rope_scaling": ({"rope_type": "yarn", "factor": 4}, "rotary positions are scaled"),
    "sliding_window": (8, "sliding_window is 8"),
    "hidden_act": ("relu", "hidden_act is relu"),
}


@pytest.mark.parametrize("field", BAD)
def test_folders_of_other_models_are_refused(field):
    about = {"start_id": 0, "eos_id": 1, "pad_id": 0}
    written = hugging_face.document(mixtral(), np.dtype(np.float32), about)
    value, reason = BAD[field]
    with pytest.raises(ConfigError, match=reason):
        hugging_face.config_of(written | {field: value}, "there/config.json")


def test_weights_that_do_not_fit_are_named(tmp_path):
    config = mixtral()
    export(tmp_path, config, format=Format.HUGGING_FACE)
    weights = tensor_files.read(tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    less = {n: w for n, w in weights.items() if n != name}
    with pytest.raises(ConfigError, match=f"the weights have no {name}"):
        hugging_face.own_weights(less, config, "there")
    more = weights | {"model.layers.9.extra": weights[name]}
    with pytest.raises(ConfigError, match="1 weights belong to no part"):
        hugging_face.own_weights(more, config, "there")
