"""MXArrays as operands: used as they are, linked to what they were made of within one trace."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import Recipe, Residuals
from mx_jax.testing.backend_suite import exact_values
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick

MXFP4, MXINT8 = recipes.mxfp4(), recipes.mxint8()


def product(lhs, rhs) -> np.ndarray:
    """`[m, k] @ [k, n]` of whatever the operands stand for; float32 holds it exactly here."""
    return (exact_values(lhs) @ exact_values(rhs)).astype(np.float32)


def as_mxfp4(x: np.ndarray, axis: int) -> mx_jax.MXArray:
    return mx_jax.quantize(x, "mxfp4", axis=axis, scale_rule="even")


X, W = (draw_few_octaves(np.random.default_rng(0), shape) for shape in ((6, 70), (70, 5)))


@pytest.mark.slow(but="both")
@pytest.mark.parametrize("sides", ["lhs", "rhs", "both"])
def test_codes_are_used_as_they_are(sides: str):
    """MXINT8 codes go into an MXFP4 product unchanged; the other operand becomes MXFP4."""
    left, right = mx_jax.quantize(X, "mxint8"), mx_jax.quantize(W, "mxint8", axis=0)
    if sides == "lhs":
        arguments, used = (left, W), (left, as_mxfp4(W, 0))
    elif sides == "rhs":
        arguments, used = (X, right), (as_mxfp4(X, 1), right)
    else:
        arguments = used = (left, right)
    assert_bitwise_equal(mx_jax.matmul(*arguments, recipe=MXFP4), product(*used))


@pytest.mark.parametrize(
    "recipe", [recipes.high_precision(), recipes.weight_only("mxfp8_e4m3")], ids=str
)
def test_high_precision_around_an_mxarray(recipe: Recipe):
    kernel = mx_jax.quantize(W, "mxfp4", axis=0)
    # x has all its bits here, so the sums may round.
    actual = mx_jax.matmul(X, kernel, recipe=recipe)
    np.testing.assert_allclose(actual, product(X, kernel), rtol=0, atol=1e-4)


def test_gradients_past_an_mxarray():
    """The other operand's cotangent comes from the MXArray's values; it has none itself."""
    kernel = mx_jax.quantize(W, "mxint8", axis=0)

    @jax.jit
    def gradient(x, kernel):
        return jax.grad(lambda x: mx_jax.matmul(x, kernel, recipe=MXFP4).sum())(x)

    g = as_mxfp4(np.ones((6, 5), np.float32), 1)
    again = as_mxfp4(exact_values(kernel).astype(np.float32), 1)
    assert_bitwise_equal(gradient(X, kernel), product(g, exact_values(again).T))


def test_an_mxarray_itself_has_no_gradient():
    kernel = mx_jax.quantize(W, "mxint8", axis=0)
    grads = jax.grad(lambda kernel: mx_jax.matmul(X, kernel, recipe=MXFP4).sum(), allow_int=True)(
        kernel
    )
    assert grads.codes.dtype == grads.scales.dtype == jax.dtypes.float0


@pytest.mark.slow(but="PRIMAL")
@pytest.mark.parametrize("residuals", Residuals)
def test_straight_through_within_one_trace(residuals: Residuals):
    """The array behind an MXArray gets the cotangent of a plain operand."""
    recipe = dataclasses.replace(MXFP4, residuals=residuals)
    g = np.round(X[:, :5] * 4)

    def through(x, w):
        return jnp.sum(mx_jax.matmul(as_mxfp4(x, 1), as_mxfp4(w, 0), recipe=recipe) * g)

    def plain(x, w):
        quantized = dataclasses.replace(recipe, residuals="quantized")
        return jnp.sum(mx_jax.matmul(x, w, recipe=quantized) * g)

    both = [quick(jax.value_and_grad(f, argnums=(0, 1)))(X, W) for f in (through, plain)]
    jax.tree.map(assert_bitwise_equal, *both)
    assert np.abs(both[0][1][0]).max() > 0


def test_blocks_along_another_axis():
    wrong = mx_jax.quantize(W, "mxfp4", axis=1)
    message = (
        "dot_general: rhs is contracted along axis=0, but this MXArray (mxfp4, shape=(70, 5)) has "
        "its blocks along axis=1; quantize it with axis=0, or pass rhs.dequantize()"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        mx_jax.matmul(X, wrong, recipe=MXFP4)
    # Each of the two remedies works.
    for remedy in (as_mxfp4(W, 0), wrong.dequantize()):
        assert mx_jax.matmul(X, remedy, recipe=MXFP4).shape == (6, 5)


def test_blocks_along_another_contracted_axis(rng: np.random.Generator):
    """Blocks lie along the last contracted axis; others of the group do not count."""
    x = mx_jax.quantize(draw_few_octaves(rng, (6, 40, 3)), "mxfp4", axis=1)
    y = draw_few_octaves(rng, (40, 3, 5))
    message = "lhs is contracted along axis=2, but this MXArray (mxfp4, shape=(6, 40, 3)) has"
    with pytest.raises(ValueError, match=re.escape(message)):
        mx_jax.dot_general(x, y, (((1, 2), (0, 1)), ((), ())), recipe=MXFP4)
    actual = mx_jax.dot_general(x, y, (((2, 1), (1, 0)), ((), ())), recipe=MXFP4)
    expected = np.einsum("mij,ijn->mn", exact_values(x), exact_values(as_mxfp4(y, 0)))
    assert_bitwise_equal(actual, expected.astype(np.float32))
