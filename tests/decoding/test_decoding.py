"""Decoding with a model against the whole-row pass (B19)."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m6jax.decoding import (
    PROMPT_MULTIPLE,
    Beam,
    Greedy,
    Sampling,
    decode_step,
    decoding_model,
    generate,
    prefill,
    prompt_batch,
)
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.modeling.config import CapacityMode, LayerKind, ModelConfig, MoEConfig, Positions
from m6jax.modeling.transformer import Transformer

# B rows, T length, S slots, V vocabulary, N new tokens, K beams, F features of a patch.

F = 3
START, PAD = 0, 0
NEVER = -1  # an end that no token is
DROPLESS = MoEConfig(num_experts=4, num_prototypes=2, capacity_factor=None)
SPARSE, DENSE = LayerKind.SPARSE, LayerKind.DENSE


SMALL = {
    "vocab_size": 12,
    "num_layers": 2,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "moe": DROPLESS,
    "dtype": "float32",
}
# Every layout, pattern and kind of position is in one of them.
MODELS = {
    "shared, sparse": {"unit": 1},
    "unit of two in four rounds of dense and sparse": {
        "unit": 4,
        "num_layers": 8,
        "pattern": (DENSE, SPARSE),
        "num_kv_heads": 1,
        "patch_dim": F,
    },
    "unrolled, dense, learned positions": {
        "unit": 2,
        "form": Form.UNROLLED,
        "pattern": (DENSE,),
        "positions": Positions.LEARNED,
        "max_length": 12,
        "tied_output": False,
        "patch_dim": F,
    },
    "pictures": {"unit": 2, "pattern": (DENSE,), "patch_dim": F},
    "three tokens": {"unit": 1, "pattern": (DENSE,), "vocab_size": 3},
}


@functools.cache
def make(name):
    """Returns model, parameters (random, norms included) and layout."""
    settings = dict(MODELS[name])
    unit, form = settings.pop("unit"), settings.pop("form", Form.STACKED)
    model = Transformer(ModelConfig(**(SMALL | settings)))
    layout = model.config.layout(unit, form)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), layout))
    rng = np.random.default_rng(0)

    def draw(leaf):  # drawing in numpy compiles nothing
        return jnp.asarray(rng.normal(scale=0.5, size=leaf.shape), leaf.dtype)

    return model, jax.tree.map(draw, shapes), layout


@pytest.fixture(scope="module")
def small():
    return make("shared, sparse")


def continue_(small, prompts, method=None, n=6, eos_id=NEVER, **kwargs):
    return generate(
        *small,
        prompts,
        method=method or Greedy(),
        max_new_tokens=n,
        eos_id=eos_id,
        pad_id=PAD,
        start_id=START,
        **kwargs,
    )


fill = jax.jit(prefill, static_argnums=(0, 2, 4))
step = jax.jit(decode_step, static_argnums=(0, 2))


@functools.partial(jax.jit, static_argnums=(0, 2))
def whole_pass(model, params, layout, batch):
    return model.apply(params, batch, layout).logits


def log_probs_of(small, prompts, texts):
    """Returns log-probabilities of whole rows, one array [n, V] for the n tokens of every text."""
    rows = [[*p, *text[:-1]] for p, text in zip(prompts, texts, strict=True)]
    log_probs = jax.nn.log_softmax(whole_pass(*small, prompt_batch(rows, PAD, START)))
    pairs = zip(prompts, texts, strict=True)
    return [np.asarray(log_probs[b, len(p) :][: len(text)]) for b, (p, text) in enumerate(pairs)]


def scores_of(small, prompts, texts):
    """Returns the sum of every text's log-probabilities."""
    log_probs = log_probs_of(small, prompts, texts)
    return [lp[np.arange(len(t)), t].sum() for lp, t in zip(log_probs, texts, strict=True)]


@pytest.mark.parametrize("name", list(MODELS)[:3])
def test_cached_steps_equal_the_whole_pass(name):
    model, params, layout = make(name)
    rng = np.random.default_rng(0)
    prompts, new = [[], [3, 4, 5, 6], [7, 8]], rng.integers(0, 12, (3, 4))
    lengths, patches = np.array([1, 5, 3]), None
    if model.config.patch_dim:
        patches = [rng.normal(size=(i, F)).astype(np.float32) for i in (2, 0, 3)]
        lengths = np.array([3, 5, 6])
    whole = [[*p, *c] for p, c in zip(prompts, new.tolist(), strict=True)]
    whole = prompt_batch(whole, PAD, START, patches=patches)

    for bidirectional in (True, False):
        batch = prompt_batch(prompts, PAD, START, bidirectional=True, patches=patches)
        batch["bidirectional"] = batch["bidirectional"] * bidirectional
        # The new tokens are not part of the prefix.
        whole["bidirectional"] = batch["bidirectional"]
        expected = whole_pass(model, params, layout, whole)
        state = fill(model, params, layout, batch, PROMPT_MULTIPLE + 4)
        for n in range(5):
            np.testing.assert_array_equal(state.lengths, lengths + n)
            wanted = expected[np.arange(3), lengths + n - 1]
            np.testing.assert_allclose(state.logits, wanted, rtol=1e-5, atol=1e-5)
            if n < 4:
                state = step(model, params, layout, state, new[:, n], np.ones(3, bool))


def test_padding_and_ended_rows_write_nothing_and_change_nothing(small):
    model, params, layout = small
    num_slots = PROMPT_MULTIPLE + 4
    batch = prompt_batch([[3, 4], [5], []], PAD, START, bidirectional=True)
    state = fill(model, params, layout, batch, num_slots)
    for leaf in jax.tree.leaves(state.caches):  # [L, B, S, J, D]
        assert leaf.shape == (2, 3, num_slots, 2, 4)
        for row, length in enumerate((3, 2, 1)):
            assert np.all(np.any(leaf[:, row, :length] != 0, (-2, -1)))
            assert np.all(leaf[:, row, length:] == 0)

    other = np.where(batch["segment_ids"] > 0, batch["tokens"], 9)
    again = fill(model, params, layout, batch | {"tokens": other}, num_slots)
    jax.tree.map(np.testing.assert_array_equal, state, again)

    active = np.array([True, False, False])
    after = step(model, params, layout, state, np.array([6, 7, 8]), active)
    np.testing.assert_array_equal(after.lengths, [4, 2, 1])
    for old, new in zip(*map(jax.tree.leaves, (state.caches, after.caches)), strict=True):
        np.testing.assert_array_equal(new[:, 1:], old[:, 1:])
        assert np.all(np.any(new[:, 0, 3] != 0, (-2, -1)))
        assert np.all(new[:, 0, 4:] == 0)


def test_greedy_takes_the_most_probable_token_and_no_notice_of_other_rows(small):
    prompts = [[3, 4, 5], [], [6]]
    together = continue_(small, prompts)
    for others in ([[7, 8], [9]], [[], [1] * 9]):
        again = continue_(small, [others[0], prompts[0], others[1]])
        assert again.tokens[1] == together.tokens[0]
        assert again.log_probabilities[1] == pytest.approx(together.log_probabilities[0])
    log_probs = log_probs_of(small, prompts, together.tokens)
    for text, of_text in zip(together.tokens, log_probs, strict=True):
        assert text == of_text.argmax(-1).tolist()
    expected = [of_text.max(-1).sum() for of_text in log_probs]
    np.testing.assert_allclose(together.log_probabilities, expected, rtol=1e-5)


def test_prompts_with_pictures_and_a_prefix():
    small, prompts = make("pictures"), [[3, 4], [3, 4], [3, 4]]
    patches = [np.ones((2, F)), np.zeros((0, 0)), np.full((1, F), -2.0)]
    found = {}
    for bidirectional in (False, True):
        settings = {"bidirectional": bidirectional, "patches": patches}
        found[bidirectional] = continue_(
            small, prompts, n=2, patches=patches, bidirectional_prompt=bidirectional
        )
        texts, scores = found[bidirectional].tokens, found[bidirectional].log_probabilities
        # The prompts alone give the first token, prompts and that token the second.
        batch = prompt_batch(prompts, PAD, START, **settings)
        longer = [[*p, text[0]] for p, text in zip(prompts, texts, strict=True)]
        longer = prompt_batch(longer, PAD, START, **settings)
        if bidirectional:
            longer["bidirectional"] = batch["bidirectional"]
        rows, last = np.arange(3), np.array([4, 2, 3])
        logits = whole_pass(*small, longer)
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        first, second = log_probs[rows, last], log_probs[rows, last + 1]
        assert texts == np.stack([first.argmax(-1), second.argmax(-1)], 1).tolist()
        np.testing.assert_allclose(scores, first.max(-1) + second.max(-1), rtol=1e-5)
    assert np.all(np.abs(np.subtract(*[f.log_probabilities for f in found.values()])) > 1e-3)


def test_nothing_comes_after_the_end(small):
    prompts = [[3, 4, 5], [], [6]]
    free = continue_(small, prompts).tokens
    eos_id = next(token for token in free[0] if token not in free[1])
    ended = continue_(small, prompts, eos_id=eos_id)
    cut = [row[: row.index(eos_id) + 1] if eos_id in row else row for row in free]
    assert len(cut[0]) < len(cut[1]) == 6  # one row goes on when another has ended
    assert ended.tokens == cut
    expected = scores_of(small, prompts, cut)
    np.testing.assert_allclose(ended.log_probabilities, expected, rtol=1e-5)


def test_watched_texts_are_the_same_and_can_be_ended(small):
    method = Sampling(repetition_penalty=1.3)
    prompts = [[3, 4, 5], [], [6]]
    whole = continue_(small, prompts, method)
    seen = []

    def watch(tokens):
        seen.append(tokens)
        return [False, len(tokens[1]) >= 3, False]

    watched = continue_(small, prompts, method, watch=watch, watch_every=2)
    assert watched.tokens == [whole.tokens[0], whole.tokens[1][:3], whole.tokens[2]]
    assert [len(tokens[0]) for tokens in seen] == [1, 3, 5, 6]
    expected = scores_of(small, prompts, watched.tokens)
    np.testing.assert_allclose(watched.log_probabilities, expected, rtol=1e-5)


def test_sampling_depends_on_the_seed_and_the_number_of_the_row_alone(small):
    method = Sampling(temperature=1.5, top_k=8, top_p=0.95)
    sample = functools.partial(continue_, small, method=method)
    prompts = [[3, 4], [3, 4], [5]]
    first = sample(prompts)
    np.testing.assert_allclose(
        first.log_probabilities, scores_of(small, prompts, first.tokens), rtol=1e-5
    )
    assert first.tokens[0] != first.tokens[1]
    assert sample(prompts) == first
    assert sample(prompts, seed=1).tokens[0] != first.tokens[0]
    assert sample([[7, 8, 9], [3, 4], []]).tokens[1] == first.tokens[1]
    assert sample([[3, 4], [5], []], rows=[1, 2, 3]).tokens[:2] == first.tokens[1:]


def all_texts(vocab_size, num_tokens, eos_id):
    """Returns every text that ends, or has `num_tokens` tokens."""
    texts = set()
    for text in itertools.product(range(vocab_size), repeat=num_tokens):
        texts.add(text[: text.index(eos_id) + 1] if eos_id in text else text)
    return sorted(texts)


def test_beam_of_a_model_is_the_best_of_all_texts_and_its_score_the_sum():
    small, prompts = make("three tokens"), [[1, 0], [2], []]
    for eos_id in (1, NEVER):
        texts = [list(text) for text in all_texts(3, 3, eos_id)]
        found = continue_(small, prompts, Beam(num_beams=15), n=3, eos_id=eos_id)
        for row, prompt in enumerate(prompts):
            scores = scores_of(small, [prompt] * len(texts), texts)
            assert found.tokens[row] == texts[np.argmax(scores)]
            np.testing.assert_allclose(found.log_probabilities[row], max(scores), rtol=1e-5)


def test_one_beam_is_greedy(small):
    prompts = [[3, 4, 5], [], [6]]
    for eos_id in (NEVER, continue_(small, prompts).tokens[0][2]):
        greedy = continue_(small, prompts, eos_id=eos_id)
        beam = continue_(small, prompts, Beam(num_beams=1), eos_id=eos_id)
        assert beam.tokens == greedy.tokens
        np.testing.assert_allclose(beam.log_probabilities, greedy.log_probabilities, rtol=1e-5)


def test_capacity_drops_nothing_in_decoding(small):
    model, params, layout = small
    # Room for one of the 64 tokens of the padded prompt, if the rule of training applied.
    tight = with_experts(model, capacity_factor=0.01, group_size=64)
    prompts = [[3, 4, 5], [], [6]]
    assert continue_((tight, params, layout), prompts) == continue_(small, prompts)
    assert decoding_model(tight).config == with_experts(model, group_size=None).config
    assert decoding_model(model) is model


def with_experts(model, **changes):
    moe = dataclasses.replace(model.config.moe, **changes)
    return Transformer(dataclasses.replace(model.config, moe=moe))


def test_one_x_is_refused_unless_forced(small):
    model, params, layout = small
    one_x = with_experts(model, capacity_factor=1.0, capacity_mode=CapacityMode.ONE_X)
    with pytest.raises(ConfigError, match=r"capacity_mode: decoding serves all 2 .* force=True"):
        continue_((one_x, params, layout), [[3]])
    assert decoding_model(one_x, force=True).config == model.config
    dense = Transformer(dataclasses.replace(one_x.config, pattern=(DENSE,)))
    assert decoding_model(dense) is dense


def test_learned_positions_are_the_limit():
    small = make("unrolled, dense, learned positions")  # 12 positions
    prompt = [3, 4, 5]  # with the start 4 positions, so token 10 is made from the twelfth
    found = continue_(small, [prompt, []], n=9)
    assert [len(row) for row in found.tokens] == [9, 9]
    assert np.isfinite(found.log_probabilities).all()
    with pytest.raises(
        ConfigError, match=r"4 positions .* 10 new tokens need 13 .*max_length is 12"
    ):
        continue_(small, [prompt, []], n=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts: there is no prompt"),
        ({"prompts": [[3], [12]]}, "token 12 .* vocabulary of 12 tokens"),
        ({"prompts": [[-1]]}, "token -1 .* vocabulary of 12 tokens"),
        ({"n": 0}, "max_new_tokens: 0 is not greater than 0"),
        ({"patches": []}, "0 pictures for 1 prompts"),
        ({"patches": [np.zeros((2, 5))]}, "patches of 5 features, ModelConfig.patch_dim is 3"),
        (
            {"prompts": [[3], [4]], "patches": [np.zeros((2, 5)), np.zeros((2, 3))]},
            r"pictures differ in their features: \[3, 5\]",
        ),
    ],
)
def test_prompts_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigError, match=message):
        continue_(make("pictures"), **({"prompts": [[3]]} | arguments))


def test_a_mesh_changes_nothing(small):
    model, params, layout = small
    partitioning = Partitioning(data=1, expert=2, model=2)
    mesh = partitioning.make_mesh(jax.devices()[:4])
    prompts = [[3, 4, 5], []]
    alone = continue_(small, prompts, Beam(num_beams=2), n=4)
    shardings = partitioning.weight_shardings(model.parameters(layout), mesh)
    with partitioning.activate(mesh):
        params = jax.device_put(params, shardings)
        on_mesh = continue_((model, params, layout), prompts, Beam(num_beams=2), n=4)
    assert on_mesh.tokens == alone.tokens
    np.testing.assert_allclose(on_mesh.log_probabilities, alone.log_probabilities, rtol=1e-5)
