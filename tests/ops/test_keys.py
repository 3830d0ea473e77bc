"""Calls that need a key, calls that only accept one, and their products."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import MatmulSpec, Recipe, operand
from mx_jax.testing.compare import assert_bitwise_equal
from tests.ops.calls import CALLS
from tests.quick import quick

KEY = jax.random.key(3)
NEAREST = recipes.mxfp4()
DRAWS = operand("mxfp4", scale_rule="rceil", rounding="stochastic")
X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)


def drawing(**products: MatmulSpec) -> Recipe:
    return dataclasses.replace(NEAREST, name="drawing", **products)


BOTH = MatmulSpec(lhs=DRAWS, rhs=DRAWS)
BACKWARD = drawing(grad_input=BOTH, grad_weight=BOTH)
CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.mark.slow(but="matmul|dot_general|einsum")
@CALL
def test_a_forward_product_that_draws_nothing_needs_no_key(call):
    """Inference with a training recipe: the product of the recipe's nearest-rounded forward."""
    for recipe in (BACKWARD, recipes.mxfp4_backward(), recipes.nvfp4_pretraining()):
        product = call(X, W, recipe=recipe)
        assert_bitwise_equal(product, call(X, W, recipe=recipe, key=KEY))


@CALL
@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        (drawing(output=BOTH), ""),
        (drawing(grad_input=BOTH), " in grad_input"),
        (drawing(grad_weight=BOTH), " in grad_weight"),
    ],
    ids=["output", "lhs", "rhs"],
)
def test_a_product_that_draws_says_so(call, recipe: Recipe, where: str):
    message = re.escape(
        f"recipe 'drawing' rounds stochastically{where} and needs a key, got key=None; pass "
        "key=jax.random.key(seed)"
    )
    gradients = jax.grad(lambda x, w: call(x, w, recipe=recipe).sum(), argnums=(0, 1))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(gradients, X, W)


def test_only_gradients_that_are_computed_draw():
    """A stored weight has no cotangent, so its stochastic gradient product never runs."""
    recipe = drawing(grad_weight=BOTH)
    stored = mx_jax.quantize(W, "mxfp4", axis=0, scale_rule="even")
    dx = jax.grad(lambda x: mx_jax.matmul(x, stored, recipe=recipe).sum())(X)
    expected = jax.grad(lambda x: mx_jax.matmul(x, stored, recipe=NEAREST).sum())(X)
    assert_bitwise_equal(dx, expected)


@pytest.mark.slow(but="matmul|dot_general")
@CALL
def test_a_recipe_that_draws_nothing_takes_a_key(call):
    """Code may be the same for every recipe: the key is not used, in any product."""
    for recipe in (NEAREST, recipes.high_precision()):

        def run(x, w, key, recipe=recipe):
            product, pullback = jax.vjp(lambda x, w: call(x, w, recipe=recipe, key=key), x, w)
            return product, *pullback(jnp.ones_like(product))

        compiled = quick(run)
        jax.tree.map(assert_bitwise_equal, compiled(X, W, KEY), compiled(X, W, None))


NO_KEYS = {
    "two": (jax.random.split(KEY), "dtype=key<fry>, shape=(2,)"),
    "seed": (3, "3"),
    "floats": (np.array([1, 2], np.float32), "dtype=float32, shape=(2,)"),
    "number": (np.uint32(1), "dtype=uint32, shape=()"),
}


@CALL
@pytest.mark.parametrize(("key", "got"), NO_KEYS.values(), ids=NO_KEYS)
def test_what_is_no_key_is_refused(call, key, got: str):
    """By recipes that draw nothing too."""
    message = "key must be one PRNG key from jax.random.key or jax.random.PRNGKey, got " + got
    for recipe in (NEAREST, drawing(output=BOTH)):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(X, W, recipe=recipe, key=key)
