"""recipe.dot_general in Flax's own layers."""

import flax.linen as flax_nn
import jax
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax.nn import linen
from mx_jax.nn import nnx as ours
from mx_jax.recipes import Recipe
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import HIGH, MXFP4
from tests.quick import quick

KEY = jax.random.key(0)


@pytest.fixture
def x() -> np.ndarray:
    return draw_few_octaves(np.random.default_rng(0), (2, 5, 40))


def test_linen_dense(x: np.ndarray):
    """An injected recipe is the layer of this library, in Flax's clothes."""
    variables = quick(flax_nn.Dense(8).init)(KEY, x)
    injected = flax_nn.Dense(8, dot_general=MXFP4.dot_general)
    by_class = flax_nn.Dense(8, dot_general_cls=lambda: MXFP4.dot_general)
    expected = linen.Dense(8, recipe=MXFP4).apply(variables, x)
    assert_bitwise_equal(injected.apply(variables, x), expected)
    assert_bitwise_equal(by_class.apply(variables, x), expected)


def test_nnx_linear(x: np.ndarray):
    injected = nnx.Linear(40, 8, dot_general=MXFP4.dot_general, rngs=nnx.Rngs(0))
    layer = ours.Linear(40, 8, recipe=MXFP4, rngs=nnx.Rngs(0))
    assert_bitwise_equal(injected(x), layer(x))


def test_linen_attention(x: np.ndarray):
    """High precision changes nothing; MXFP4 changes what the four projections multiply."""

    def attention(recipe: Recipe | None):
        inject = None if recipe is None else recipe.dot_general
        return flax_nn.MultiHeadDotProductAttention(
            num_heads=2, qkv_dot_general=inject, out_dot_general=inject
        )

    variables = quick(attention(None).init)(KEY, x)
    plain, high, quantized = (
        quick(attention(recipe).apply)(variables, x) for recipe in (None, HIGH, MXFP4)
    )
    assert_bitwise_equal(high, plain)
    assert 5 < mx_jax.inspect.sqnr_db(plain, quantized) < 25
