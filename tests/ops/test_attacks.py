"""What hostile programs found: ends of ranges, and dtypes that few people train with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mx_jax
from mx_jax.testing.compare import assert_bitwise_equal

KEY = jax.random.key(0)


@pytest.mark.parametrize("exponent", [59, 61, 80, 120])
def test_gaussian_scales_of_large_numbers(exponent: int):
    """Squares that overflow once took the largest scale, which makes zeros of the block."""
    x = jax.random.normal(KEY, (4, 64))
    expected = mx_jax.cast(x, "mxfp4", scale_rule="gaussian")
    found = mx_jax.cast(x * 2.0**exponent, "mxfp4", scale_rule="gaussian")
    assert_bitwise_equal(found * 2.0**-exponent, expected, what=f"x * 2^{exponent}")


def test_states_of_float64_parameters():
    """They once stayed as they were, and nothing said so."""
    optimizer = mx_jax.quantize_state(optax.adam(1e-2), min_size=1)
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)))
        updates, state = jax.jit(optimizer.update)(w, optimizer.init(w), w)
        assert (w.dtype, updates.dtype, state.state[0].mu.dtype) == ("float64", "float64", "uint8")
        np.testing.assert_allclose(updates, -1e-2 * np.sign(w), rtol=1e-4)
