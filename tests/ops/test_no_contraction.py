"""Products that contract nothing have nothing to quantize: they are XLA's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax import recipes
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

A = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
B = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
RECIPES = (recipes.mxfp8(), recipes.mxfp4_stochastic(), recipes.high_precision())
BATCH = (((), ()), ((0, 1), (0, 1)))
EINSUMS = {
    "bk,bk->bk": (A, B),
    "bk,ck->bck": (A, B),
    "i,j->ij": (A[0], B[1]),
    "i,j->ji": (A[0], B[1]),
    "...k,k->...k": (A, B[0]),
    "bk,b->kb": (A, B[:, 0]),
    "b,->b": (A[0], B[0, 0]),
}


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: recipe.name)
def test_einsum(recipe):
    def run(operation, a, b):
        product, pullback = jax.vjp(operation, a, b)
        return product, *pullback(jnp.ones_like(product))

    def both(subscripts, pair):
        ours = functools.partial(mx_jax.einsum, subscripts, recipe=recipe)
        return run(ours, *pair), run(functools.partial(jnp.einsum, subscripts), *pair)

    run_all = quick(lambda pairs: list(map(both, EINSUMS, pairs)))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for ours, theirs in run_all([*EINSUMS.values()]):
        jax.tree.map(near, ours, theirs)


def test_dot_general_is_lax_s():
    for options in ({}, {"preferred_element_type": jnp.int32}, {"precision": "highest"}):
        ours = mx_jax.dot_general(A, B, BATCH, recipe=RECIPES[0], **options)
        assert_bitwise_equal(ours, lax.dot_general(A, B, BATCH, **options))
    mixed = mx_jax.dot_general(A, jnp.bfloat16(B), BATCH, recipe=RECIPES[0])
    assert mixed.dtype == jnp.float32
    key = jax.random.key(0)
    drawn = mx_jax.dot_general(A, B, BATCH, recipe=RECIPES[1], key=key)
    assert_bitwise_equal(drawn, lax.dot_general(A, B, BATCH))


def test_what_is_quantized_already_is_read():
    q = mx_jax.quantize(B, "mxfp8_e4m3")
    product = mx_jax.dot_general(A, q, BATCH, recipe=RECIPES[0])
    assert_bitwise_equal(product, lax.dot_general(A, q.dequantize(), BATCH))
    through = jax.grad(
        lambda b: mx_jax.einsum(
            "bk,bk->bk", A, mx_jax.quantize(b, "mxfp8_e4m3"), recipe=RECIPES[0]
        ).sum()
    )(B)
    np.testing.assert_allclose(through, A)
