"""Logits of exported models as Hugging Face's transformers computes them, on a CPU.

    python benchmarks/against_transformers.py write /tmp/models      # with m6jax
    python benchmarks/against_transformers.py read /tmp/models       # with torch and transformers

transformers needs torch, which m6jax does not: give it an environment of its own
(`pip install torch transformers sentencepiece protobuf`). `read` compares logits and tokens, and
writes the logits to tests/goldens/transformers.json, with which a test compares m6jax.
"""

import json
import pathlib
import sys

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "goldens" / "transformers.json"
NAMES = ("mixtral", "llama")
TOLERANCE = 1e-4
TEXTS = ("the whale was seen at noon", "  two  spaces,\na line", "鲸鱼 sailed ё")
TOKENS = np.random.default_rng(0).integers(2, 320, (1, 12)).astype(np.int32)


def config_of(name):
    """A tiny model of Mixtral's or Llama's shape."""
    from m6jax.modeling import Activation, LayerKind, ModelConfig, MoEConfig

    moe = MoEConfig(
        num_experts=8, num_selected_experts=2, capacity_factor=None, normalize_weights=True
    )
    sparse = {"moe": moe, "tied_output": False}
    return ModelConfig(
        vocab_size=320,
        num_layers=3,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        mlp_dim=48,
        max_length=64,
        gated_mlp=True,
        activation=Activation.SILU,
        scale_embedding=False,
        rope_base=1e6,
        norm_epsilon=1e-5,
        dtype="float32",
        **(sparse if name == "mixtral" else {"pattern": (LayerKind.DENSE,)}),
    )


def params_of(config, layout):
    """Parameters that do not depend on jax's random numbers."""
    from m6jax.foundation.partitioning import is_parameter
    from m6jax.foundation.pytrees import map_named
    from m6jax.modeling.transformer import Transformer

    rng = np.random.default_rng(1)

    def draw(name, parameter):
        noise = rng.normal(size=parameter.value.shape)
        noise = 1 + 0.1 * noise if name.endswith("scale") else 0.3 * noise
        return noise.astype(np.float32)

    return map_named(draw, Transformer(config).parameters(layout), is_leaf=is_parameter)


def logits_of(config, params, layout):
    """m6jax's own, float32[B, T, V]."""
    import jax

    from m6jax.modeling.transformer import Transformer

    batch = {
        "tokens": TOKENS,
        "segment_ids": np.ones_like(TOKENS),
        "positions": np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape),
    }
    apply = jax.jit(lambda params, batch: Transformer(config).apply(params, batch, layout).logits)
    return np.asarray(apply(params, batch))


def write(folder):
    """Writes the models, and what m6jax makes of tokens and texts."""
    from m6jax.data.vocab import SentencePiece
    from m6jax.data.vocab_training import train, training_options
    from m6jax.formats import Export, exporting

    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{text} {i}" for i in range(100) for text in TEXTS[:2]]
    (folder / "vocabulary.model").write_bytes(train(lines, training_options(320, 0.995)))
    vocabulary = SentencePiece(path=str(folder / "vocabulary.model")).load(())
    for name in NAMES:
        config = config_of(name)
        layout = config.layout(config.num_layers, "STACKED")
        params = params_of(config, layout)
        settings = Export(format="HUGGING_FACE")
        exporting.export(params, config, layout, vocabulary, settings, folder / name, {})
        np.save(folder / f"{name}.npy", logits_of(config, params, layout))
    ids = [[vocabulary.start_id, *vocabulary.encode(text)] for text in TEXTS]
    (folder / "ids.json").write_text(json.dumps(ids))


def read(folder):
    """Compares with transformers, and writes its logits for the test."""
    import torch
    import transformers

    golden = {}
    for name in NAMES:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32
        )
        with torch.no_grad():
            logits = model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
        difference = np.abs(logits - np.load(folder / f"{name}.npy")).max()
        print(
            f"{name}: logits up to {np.abs(logits).max():.3f}, largest difference {difference:.1e}"
        )
        assert difference < TOLERANCE
        golden[name] = np.round(logits.astype(np.float64), 5).tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "mixtral")
    expected = json.loads((folder / "ids.json").read_text())
    for text, ids in zip(TEXTS, expected, strict=True):
        print(f"{text!r}: {'the same ids' if tokenizer(text).input_ids == ids else 'OTHER IDS'}")
        assert tokenizer(text).input_ids == ids, (tokenizer(text).input_ids, ids)
    GOLDEN.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}: {GOLDEN}")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
