"""Dtypes of products and cotangents: those of lax.dot_general, each with one rounding."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import Recipe
from mx_jax.testing.backend_suite import exact_values
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick, with_gradients
from tests.sharding.collectives import check

DIMENSIONS = (((1,), (0,)), ((), ()))
DTYPES = ("float32", "bfloat16", "float16")
RECIPES = (recipes.mxfp8(), recipes.weight_only("mxfp4"))


def dtypes(operation, lhs: str, rhs: str, preferred: str | None) -> list[str]:
    """Of the product and both cotangents."""

    def run(x, w):
        product, pullback = jax.vjp(
            lambda x, w: operation(x, w, DIMENSIONS, preferred_element_type=preferred), x, w
        )
        return product, *pullback(product)

    x, w = jax.ShapeDtypeStruct((6, 40), lhs), jax.ShapeDtypeStruct((40, 5), rhs)
    return [str(result.dtype) for result in jax.eval_shape(run, x, w)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_dtypes_are_those_of_lax(recipe: Recipe):
    for lhs, rhs, preferred in itertools.product(DTYPES, DTYPES, (None, "bfloat16")):
        actual = dtypes(recipe.dot_general, lhs, rhs, preferred)
        if {lhs, rhs} == {"bfloat16", "float16"}:
            # lax depends on the order of the two here; float32 holds both.
            assert actual == [preferred or "float32", lhs, rhs]
        else:
            expected = dtypes(lax.dot_general, lhs, rhs, preferred)
            assert actual == expected, (lhs, rhs, preferred)


def test_narrow_operands_round_once(rng: np.random.Generator):
    """Sums are float32 whatever goes in and out: one rounding, of the final value."""
    x, w, g = (
        jnp.asarray(draw_few_octaves(rng, shape), jnp.bfloat16)
        for shape in ((6, 70), (70, 5), (6, 5))
    )

    def cast(array, axis):
        return exact_values(mx_jax.quantize(array, "mxfp4", axis=axis, scale_rule="even"))

    wide = (cast(x, 1) @ cast(w, 0), cast(g, 1) @ cast(w, 1).T, cast(x, 0).T @ cast(g, 0))
    multiply = functools.partial(mx_jax.matmul, recipe=recipes.mxfp4())
    actual = quick(with_gradients(multiply))(x, w, g)
    check(actual, [each.astype(np.float32).astype(jnp.bfloat16) for each in wide])
    # preferred_element_type=float32 keeps the bits of the sum, which bfloat16 drops.
    product = multiply(x, w, preferred_element_type=jnp.float32)
    check([product], [wide[0].astype(np.float32)])


def test_without_x64_float64_is_float32():
    """As JAX has it, with its warning."""
    x = jnp.ones((2, 64))
    q = mx_jax.quantize(x, "mxfp4")
    runs: dict[str, Any] = {
        "method": lambda x: q.dequantize("float64"),
        "function": lambda x: mx_jax.dequantize(q, float),
        "product": lambda x: mx_jax.matmul(x, x.T, recipe="mxfp8", preferred_element_type=float),
    }
    for run in runs.values():
        with pytest.warns(UserWarning, match="dtype float64 .* will be truncated"):
            assert jax.jit(run)(x).dtype == np.float32
    with pytest.warns(UserWarning, match="will be truncated"):
        jax.grad(lambda x: mx_jax.quantize(x, "mxfp4").dequantize(float).sum())(x)


def test_an_mxarray_stands_for_the_dtype_that_was_quantized():
    def product(x, w):
        w = mx_jax.quantize(w, "mxfp4", axis=0)
        return mx_jax.matmul(x, w, recipe=recipes.mxfp8())

    w = jax.ShapeDtypeStruct((40, 3), jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.ShapeDtypeStruct((2, 40), dtype)
        assert jax.eval_shape(product, x, w).dtype == dtype
