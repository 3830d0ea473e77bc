"""The library promotes no dtype and no rank silently, so users may forbid JAX to."""

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import recipes

# Each kind of element, scale and block, and of what a recipe does to them.
FORMATS = ["mxfp6_e3m2", "mxint8", "nvfp4_2d", "float8_rowwise_e4m3", "float8_blockwise_2d_e4m3"]
RECIPES = ["mxfp8", "mxfp4_stochastic", "float8_rowwise"]


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def test_strictness_is_on():
    with pytest.raises(ValueError, match="dtype promotion"):
        _ = jnp.ones(2, jnp.bfloat16) + jnp.ones(2)
    with pytest.raises(ValueError, match="rank"):
        _ = jnp.ones((2, 2)) + jnp.ones(2)


@pytest.mark.slow(but="mxfp6|nvfp4")
@pytest.mark.parametrize("format", FORMATS)
def test_quantize(format: str):
    x = jnp.linspace(-1.0, 1.0, 2 * 40).reshape(2, 40).astype(jnp.bfloat16)
    assert mx_jax.quantize(x, format).dequantize(jnp.float32).dtype == jnp.float32
    assert mx_jax.cast(x, format).dtype == x.dtype


@pytest.mark.slow(but="mxfp8")
@pytest.mark.parametrize("name", RECIPES)
def test_matmul_and_gradients(name: str):
    recipe = recipes.from_name(name)
    key = jax.random.key(0) if recipe.is_stochastic else None
    x, w = jnp.ones((3, 40), jnp.bfloat16), jnp.ones((40, 5), jnp.bfloat16)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        product = mx_jax.matmul(x, w, recipe=recipe, key=key)
        return product.astype(jnp.float32).sum()

    dx, dw = jax.grad(loss, (0, 1))(x, w)
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (x.shape, x.dtype, w.shape, w.dtype)
