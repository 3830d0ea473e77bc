"""Values whose codes round up to 2^128: what is finite stays finite, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.mxarray import decode
from tests.quick import quick

RECIPES = {
    "mxfp8": recipes.mxfp8(),
    "weight_only": recipes.weight_only("mxfp8_e4m3", scale_rule="rceil"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradient_by_a_stored_weight_is_finite(recipe):
    w = np.full((32, 64), 1.0, np.float32)
    w[3, 5] = 3.4e38
    stored = mx_jax.quantize(jnp.asarray(w), "mxfp8_e4m3", axis=0, scale_rule="rceil")
    assert np.isinf(stored.dequantize()[3, 5])
    x = jnp.zeros((4, 32))

    @jax.jit
    def loss(x):
        y = mx_jax.matmul(x, stored, recipe=recipe)
        return jnp.sum(y * 2.0**-120), y

    gradient, y = jax.grad(loss, has_aux=True)(x)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(gradient[:, 3], 2.0**8, rtol=1e-5)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_ragged_gradients_keep_to_finite_numbers_and_to_nan(bad):
    recipe = dataclasses.replace(recipes.mxfp8(), residuals="quantized")
    sizes = jnp.array([32, 32], jnp.int32)
    w, x = jnp.full((2, 32, 32), 2.0**-120), np.ones((64, 32), np.float32)
    x[7, 9] = 3.4e38

    @quick
    def gradient(x):
        def total(w):
            return jnp.sum(mx_jax.ragged_dot(x, w, sizes, recipe=recipe) * 2.0**-20)

        return jax.grad(total)(w)

    good = gradient(jnp.asarray(x))
    assert np.isfinite(good).all()
    np.testing.assert_allclose(good[0, 9], 2.0**108, rtol=1e-5)
    x[40, 3] = bad
    assert np.isnan(gradient(jnp.asarray(x))[1, 3]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saturated_values_differ_only_where_codes_are_finite_and_values_are_not(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([[largest] * 32, [1.0] * 32, [np.nan] * 32], dtype)
    q = mx_jax.quantize(x, "mxfp8_e5m2", scale_rule="ceil")
    values = np.asarray(decode(q, dtype, saturates=True)).astype(np.float64)
    assert np.isinf(np.asarray(q.dequantize()).astype(np.float64)[0]).all()
    assert (values[0] == largest).all()
    assert (values[1] == 1).all()
    assert np.isnan(values[2]).all()


# What hostile programs found: ends of ranges, and dtypes that few people train with.


def test_states_of_float64_parameters():
    """They once stayed as they were, and nothing said so."""
    optimizer = mx_jax.quantize_state(optax.adam(1e-2), min_size=1)
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)))
        updates, state = quick(optimizer.update)(w, quick(optimizer.init)(w), w)
        assert (w.dtype, updates.dtype, state.state[0].mu.dtype) == ("float64", "float64", "uint8")
        np.testing.assert_allclose(updates, -1e-2 * np.sign(w), rtol=1e-4)
