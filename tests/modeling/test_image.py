import jax
import jax.numpy as jnp
import models
import numpy as np

from m6jax.modeling.image import PatchEmbedder
from m6jax.modeling.transformer import Transformer

# B rows, T length, M width, two patches of a row, F features of a patch.
B, T, M, F = 2, 5, 4, 3
MASK = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 1, 0]])


def arguments():
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, T, M)).astype(np.float32), rng.normal(size=(B, 2, F)).astype(
        np.float32
    )


def embedder(dtype=jnp.float32):
    return PatchEmbedder(1.0, dtype, jnp.float32)


def test_patches_stand_where_the_mask_says_in_their_order():
    x, patches = arguments()
    kernel = np.random.default_rng(1).normal(size=(F, M)).astype(np.float32)
    y = models.jit(embedder().apply)({"params": {"kernel": kernel}}, x, patches, MASK)
    expected = x.copy()
    expected[0, 0], expected[0, 1] = patches[0, 0] @ kernel, patches[0, 1] @ kernel
    expected[1, 3] = patches[1, 0] @ kernel
    models.assert_close(y, expected)
    np.testing.assert_array_equal(np.asarray(y)[MASK == 0], x[MASK == 0])


def test_gradient_reaches_used_patches_alone():
    x, patches = arguments()
    params = models.unboxed(embedder(), x, patches, MASK)

    def loss(params, x, patches):
        return embedder().apply({"params": params}, x, patches, MASK).sum()

    to_params, to_x, to_patches = models.jit(jax.grad(loss, (0, 1, 2)))(params, x, patches)
    np.testing.assert_array_equal(to_x, np.where(MASK[..., None] > 0, 0, np.ones_like(x)))
    assert not np.asarray(to_patches[1, 1]).any()  # row 1 has one patch
    assert np.asarray(to_patches[1, 0]).any()
    used = patches[0, 0] + patches[0, 1] + patches[1, 0]
    models.assert_close(to_params["kernel"], np.tile(used[:, None], (1, M)))


def test_parameters():
    x, patches = arguments()
    kernel = models.boxed(embedder(), x, patches, MASK)["kernel"]
    assert (kernel.value.shape, kernel.axes) == ((F, M), (None, "embed"))


def test_arithmetic_is_of_dtype():
    x, patches = arguments()
    params = models.unboxed(embedder(), x, patches, MASK)
    y = embedder(jnp.bfloat16).apply({"params": params}, x.astype(jnp.bfloat16), patches, MASK)
    assert y.dtype == jnp.bfloat16


def test_a_model_sees_patches_in_the_place_of_tokens():
    config = models.tiny(num_layers=1, patch_dim=F, moe=models.experts(capacity_factor=None))
    layout, model = models.stacked(config), Transformer(config)
    batch = models.make_batch(rows=2, length=T, prefix=2) | {
        "segment_ids": np.ones((2, T), np.int32),
        "patches": arguments()[1],
        "patch_mask": np.array([[1, 1, 0, 0, 0]] * 2),
    }
    params = models.draw(config, layout)
    apply = models.jit(lambda params, batch: model.apply(params, batch, layout).logits)
    logits = np.asarray(apply(params, batch))

    tokens = batch["tokens"].copy()
    tokens[:, :2] = 31  # a patch stands here
    models.assert_equal(apply(params, batch | {"tokens": tokens}), logits)
    patches = batch["patches"].copy()
    patches[0, 1] += 1
    changed = np.asarray(apply(params, batch | {"patches": patches}))
    assert (changed[0] != logits[0]).any(-1).all()
    np.testing.assert_array_equal(changed[1], logits[1])
