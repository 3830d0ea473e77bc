"""Signal to noise of a 1024 x 2048 x 1024 linear layer on normal data, against float32.

Floors are the issue's where it states one, else what was measured, less half a decibel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import Recipe
from tests.quick import with_gradients

M, K, N = 1024, 2048, 1024

MXFP6_E2M3 = recipes.mxfp6_e2m3()


@functools.cache
def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Input, weight and cotangent of the output."""
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((M, K), (K, N), (M, N))
    )
    return x, w, g


@functools.cache
def measure(recipe: Recipe) -> tuple[float, float, float]:
    """SQNR in dB of output, input gradient and weight gradient."""
    run = jax.jit(with_gradients(functools.partial(mx_jax.matmul, recipe=recipe)))
    x, w, g = arrays()
    exact = (x @ w, g @ w.T, x.T @ g)
    output, dx, dw = map(mx_jax.inspect.sqnr_db, exact, run(x, w, g))
    return output, dx, dw


@pytest.mark.slow(but="mxfp8")
@pytest.mark.parametrize(
    ("recipe", "floors"),
    [
        (recipes.mxfp8(), (27, 25, 24)),
        (MXFP6_E2M3, (27.5, 27.5, 27.5)),
        (recipes.mxint8(), (38.1, 38.1, 38.1)),
        (recipes.mxfp4(), (15.5, 15.5, 15.5)),
        (recipes.nvfp4(), (16.9, 16.9, 16.9)),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_floors(recipe: Recipe, floors: tuple[float, float, float]):
    measured = measure(recipe)
    assert all(np.greater_equal(measured, floors)), measured
