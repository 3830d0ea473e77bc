"""The two batched products of attention, by Flax's own arguments."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import Recipe
from tests.quick import quick

HEADS, TIME, FEATURES = 2, 40, 64
RECIPE = recipes.mxfp8()


def attention(recipe: Recipe | None) -> nn.Module:
    """Projections in high precision, both batched products by the recipe."""
    inject = None if recipe is None else recipe.dot_general
    return nn.MultiHeadDotProductAttention(
        num_heads=HEADS,
        attention_fn=functools.partial(nn.dot_product_attention, einsum_dot_general=inject),
    )


def by_hand(params: Any, x: jax.Array) -> jax.Array:
    """Softmax(Q K^T / sqrt(d)) V, both products written out with the recipe."""

    def project(name: str) -> jax.Array:
        layer = params[name]
        return jnp.einsum("btd,dhk->bthk", x, layer["kernel"]) + layer["bias"]

    query, key, value = (project(name) for name in ("query", "key", "value"))
    query = query / jnp.sqrt(query.shape[-1])
    weights = mx_jax.einsum("bqhd,bkhd->bhqk", query, key, recipe=RECIPE)
    weights = jax.nn.softmax(weights)
    out = mx_jax.einsum("bhqk,bkhd->bqhd", weights, value, recipe=RECIPE)
    return jnp.einsum("bqhd,hdf->bqf", out, params["out"]["kernel"]) + params["out"]["bias"]


@pytest.mark.slow
def test_multi_head_attention_multiplies_by_the_recipe():
    """Output and every gradient are those of the products written out, and not float32's."""
    x = jax.random.normal(jax.random.key(0), (2, TIME, FEATURES))
    params = quick(attention(None).init)(jax.random.key(1), x)["params"]
    weight = jax.random.normal(jax.random.key(2), x.shape)

    def run(function: Any) -> list[np.ndarray]:
        def loss(params, x):
            y = function(params, x)
            return jnp.sum(weight * y), y

        gradients, y = quick(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((y, gradients))]

    plain, high, quantized = (
        run(lambda params, x, recipe=recipe: attention(recipe).apply({"params": params}, x))
        for recipe in (None, recipes.high_precision(), RECIPE)
    )
    expected = run(by_hand)
    for before, same, after, wanted in zip(plain, high, quantized, expected, strict=True):
        np.testing.assert_array_equal(same, before)
        # A code may tip over where the two programs round a sum differently.
        assert mx_jax.inspect.sqnr_db(wanted, after) > 45 or np.abs(wanted).max() < 1e-4
    assert 15 < mx_jax.inspect.sqnr_db(plain[0], quantized[0]) < 45
