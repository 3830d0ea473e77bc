"""Products that draw random bits: a function of the key alone, in every transformation."""

import dataclasses
import functools
import itertools

import jax
import numpy as np

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import MatmulSpec, Recipe, Residuals, operand
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick, with_gradients

SPEC = operand("mxfp4", scale_rule="rceil", rounding="stochastic")
BOTH = MatmulSpec(lhs=SPEC, rhs=SPEC)
RECIPE = Recipe(
    name="stochastic", output=BOTH, grad_input=BOTH, grad_weight=BOTH, residuals=Residuals.PRIMAL
)
NEAREST = recipes.mxfp4()
KEY = jax.random.key(3)


def value_and_grads(x, w, g, key, recipe=RECIPE):
    return with_gradients(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key))(x, w, g)


run = quick(value_and_grads)

SQUARE = draw_few_octaves(np.random.default_rng(0), (32, 32))


def same(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_same_key_same_bits():
    first = run(SQUARE, SQUARE, SQUARE, KEY)
    assert same(first, run(SQUARE, SQUARE, SQUARE, jax.random.key(3)))
    assert same(first, value_and_grads(SQUARE, SQUARE, SQUARE, KEY)), "eager and jit differ"
    other = run(SQUARE, SQUARE, SQUARE, jax.random.key(4))
    for name, left, right in zip(("product", "dx", "dw"), first, other, strict=True):
        assert not np.array_equal(left, right), name


def test_every_operand_of_every_product_draws_other_bits():
    """Multiplied with the identity, a cast shows; no two of the six are the same."""
    a = np.random.default_rng(0).uniform(1.05, 1.45, (32, 32)).astype(np.float32)
    one = np.eye(32, dtype=np.float32)
    casts = {}
    casts["x"], casts["g for dx"], _ = run(a, one, a, KEY)
    casts["w"], casts["w for dx"], _ = run(one, a, one, KEY)
    _, _, casts["g for dw"] = run(one, one, a, KEY)
    _, _, casts["x for dw"] = run(a, one, one, KEY)
    assert len(casts) == 6
    for (name, left), (other, right) in itertools.combinations(casts.items(), 2):
        assert set(np.unique(left)) == {1.0, 1.5}, name
        agreement = max(np.mean(left == right), np.mean(left == np.transpose(right)))
        # Values that round up with p in 0.1..0.9 agree with 0.61 by chance, the same bits with 1.
        assert 0.4 < agreement < 0.7, (name, other)


def test_gradients_do_not_change_the_forward_bits():
    """With residuals kept as codes too: the product is the one without a gradient."""
    for residuals in Residuals:
        recipe = dataclasses.replace(RECIPE, residuals=residuals)
        alone = mx_jax.matmul(SQUARE, SQUARE, recipe=recipe, key=KEY)
        with_gradient = quick(functools.partial(value_and_grads, recipe=recipe))
        assert_bitwise_equal(with_gradient(SQUARE, SQUARE, SQUARE, KEY)[0], alone)


def test_vmap_over_keys():
    keys = jax.random.split(KEY, 3)
    mapped = quick(jax.vmap(value_and_grads, in_axes=(None, None, None, 0)))
    actual = mapped(SQUARE, SQUARE, SQUARE, keys)
    for i, key in enumerate(keys):
        assert same([part[i] for part in actual], run(SQUARE, SQUARE, SQUARE, key))
