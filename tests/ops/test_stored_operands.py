"""What belongs to operands quantized here, and what to those that come quantized: prescales,
saved codes, and the gradient of a product with a quantized weight."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.jaxpr.read import walk
from mx_jax.recipes import Residuals, operand
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick, with_gradients
from tests.recipes.uniform import uniform

# Prescales ----------------------------------------------------------------------------------------


@pytest.mark.slow(but="both")
@pytest.mark.parametrize("stored", ["neither", "lhs", "rhs", "both"])
def test_a_stored_operand_never_had_a_prescale(stored: str):
    """matmul and ragged_dot alike: 32 products of 1 by 1."""
    recipe = uniform(operand("mxfp8_e4m3", prescale=2.0))
    x, w = np.ones((4, 32), np.float32), np.ones((32, 2), np.float32)
    experts = w[None]
    if stored in ("lhs", "both"):
        x = mx_jax.quantize(x, "mxfp8_e4m3")
    if stored in ("rhs", "both"):
        w = mx_jax.quantize(w, "mxfp8_e4m3", axis=0)
        experts = mx_jax.quantize(experts, "mxfp8_e4m3", axis=1)
    assert np.all(mx_jax.matmul(x, w, recipe=recipe) == 32)
    assert np.all(mx_jax.ragged_dot(x, experts, [4], recipe=recipe) == 32)
    if stored == "rhs":
        dense = jax.grad(lambda x: mx_jax.matmul(x, w, recipe=recipe).sum())(x)
        ragged = jax.grad(lambda x: mx_jax.ragged_dot(x, experts, [4], recipe=recipe).sum())(x)
        assert np.all(dense == 2) and np.all(ragged == 2)


def test_a_prescale_leaves_no_bias_in_bfloat16():
    """16/9 is no bfloat16: rounded to one, it would lengthen every product by 0.2 %."""
    recipe = uniform(operand("mxfp4", scale_rule="rceil", prescale=0.75))
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in ((64, 64), (64, 64)))
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    narrow, wide = (
        np.asarray(mx_jax.matmul(x, w, recipe=recipe, preferred_element_type=dtype), np.float64)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert abs(np.mean(narrow / wide) - 1) < 3e-4


# The gradient belongs to the function that ran ----------------------------------------------------

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
G = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)


def vjp(operation, dtype=jnp.float32):
    return quick(with_gradients(operation))(X.astype(dtype), W.astype(dtype), G.astype(dtype))


@pytest.mark.slow(but="float32-mxfp4|float32-nvfp4|bfloat16-float8")
@pytest.mark.parametrize("format", ["mxfp4", "mxint8", "nvfp4", "float8_rowwise_e4m3"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weight_only_s_gradient_is_that_of_its_forward(format: str, dtype):
    """grad_input by the weight that was multiplied; grad_weight straight through to the weight."""
    recipe = recipes.weight_only(format)
    rule = recipe.output.rhs.scale_rule  # pyright: ignore[reportOptionalMemberAccess]
    quantized = mx_jax.quantize(W.astype(dtype), format, axis=0, scale_rule=rule)
    multiply = functools.partial(mx_jax.matmul, recipe=recipe)
    product, dx, dw = vjp(multiply, dtype)
    assert_bitwise_equal(product, quick(multiply)(X.astype(dtype), W.astype(dtype)))
    operands = X.astype(dtype), quantized.dequantize(), G.astype(dtype)
    x, w, g = (np.asarray(each, np.float64) for each in operands)
    rtol = 1e-5 if dtype == jnp.float32 else 2e-2
    for gradient, exact in ((dx, g @ w.T), (dw, x.T @ g)):
        np.testing.assert_allclose(gradient.astype(np.float32), exact, rtol=rtol, atol=10 * rtol)
    if format == "mxfp4":
        assert np.abs(dx.astype(np.float32) - g @ W.T).max() > 0.3, "by the weight itself"


def test_a_stored_weight_and_the_weight_give_one_gradient():
    recipe = recipes.weight_only("mxfp4")
    stored = mx_jax.quantize(W, "mxfp4", axis=0, scale_rule="even")

    @quick
    def by_stored(x, w, g):
        return jax.vjp(lambda x: mx_jax.matmul(x, w, recipe=recipe), x)[1](g)[0]

    expected = vjp(functools.partial(mx_jax.matmul, recipe=recipe))
    for weight in (stored, mx_jax.pack_weights(stored)):
        assert_bitwise_equal(by_stored(X, weight, G), expected[1])
    # The only one of a mixture of experts has it too.
    ragged = vjp(lambda x, w: mx_jax.ragged_dot(x, w[None], [4], recipe=recipe))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(near, ragged, expected)


# Saved codes --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_codes_are_requantized_from_their_exact_values():
    """NVFP4's values need more bits than bfloat16 has: in float32 they are rounded once."""
    recipe = uniform(operand("nvfp4"), residuals=Residuals.QUANTIZED)
    rng = np.random.default_rng(3)
    x, w, g = (jnp.bfloat16(rng.standard_normal(shape)) for shape in ((64, 64), (64, 64), (64, 64)))
    dx = jax.vjp(lambda x: mx_jax.matmul(x, w, recipe=recipe), x)[1](g)[0]
    saved = mx_jax.quantize(w, "nvfp4", axis=0).dequantize(jnp.float32)
    expected, other = (
        mx_jax.matmul(
            g,
            mx_jax.quantize(each, "nvfp4", axis=1).transpose(),
            recipe=recipe,
            preferred_element_type=jnp.bfloat16,
        )
        for each in (saved, saved.astype(jnp.bfloat16))
    )
    assert not np.array_equal(expected, other), "the data do not tell them apart"
    assert_bitwise_equal(dx, expected)


def test_saved_codes_of_a_product_in_high_precision_have_the_operand_s_dtype():
    """qat in bfloat16: the gradients multiply bfloat16 by bfloat16, as the operands came."""
    recipe, x = recipes.qat("nvfp4"), jnp.ones((64, 64), jnp.bfloat16)

    def gradients(x, w, g):
        return jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w)[1](g)

    result = factors(jax.make_jaxpr(gradients)(x, x, x).jaxpr)
    # The forward product's own are float32: what plain JAX makes of quantized operands.
    assert sorted(result - {("float32", "float32")}) == [("bfloat16", "bfloat16")]


def factors(jaxpr: Any) -> set[tuple[str, ...]]:
    """Dtypes of the two operands of every dot_general, at any depth."""
    dots = (site.eqn for site in walk(jaxpr) if site.eqn.primitive.name == "dot_general")
    avals: Any = ((operand.aval for operand in eqn.invars) for eqn in dots)
    return {tuple(str(aval.dtype) for aval in each) for each in avals}
