"""The plain product: which power of two its operands are held at, and how it is asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax import MXArray
from mx_jax.reference.matmul import attend, scaled_matmul, scaled_values, unscaled

X = np.array([[6, -3, 0.5, 1.5], [1, 2, 0, 4]], np.float32)
PLAIN = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("format", "factor"), [("mxfp4", 4.0), ("nvfp4", 1.0), ("float8_rowwise_e4m3", 1.0)]
)
def test_what_operands_are_held_at(format: str, factor: float):
    """E8M0 as a quarter: a scale that is rounded up brings the largest float32 to 2^128."""
    quantized = mx_jax.quantize(X, format)
    held = scaled_values(quantized)
    assert held.values.dtype == jnp.float32
    assert float(held.factor) == factor
    np.testing.assert_array_equal(np.asarray(held.values) * factor, quantized.dequantize())


def test_plain_values_are_themselves():
    held = scaled_values(jnp.bfloat16(X))
    assert (held.values.dtype, held.factor) == (jnp.float32, 1.0)
    np.testing.assert_array_equal(held.values, X)


def tiny(scale: np.ndarray) -> MXArray:
    """Elements of 1 and -6, a block scale of 1, under a tensor scale."""
    quantized = mx_jax.quantize(
        np.array([[6, -6]] * 2, np.float32), "nvfp4", tensor_scale=np.float32(1)
    )
    codes = jnp.uint8([[2, 15], [2, 15]])
    ones = jnp.full_like(quantized.scales, 0x38)
    return dataclasses.replace(
        quantized, codes=codes, scales=ones, tensor_scale=jnp.asarray(scale), primal=None
    )


def test_a_tiny_tensor_scale_is_lifted():
    """Where it is one number, and below 2^-100; else the values are what they are."""
    for scale, factor in ((2.0**-101, 2.0**-64), (2.0**-100, 1.0)):
        held = scaled_values(tiny(np.full((1, 1), scale, np.float32)))
        assert held.factor.shape == () and float(held.factor) == factor
        one = np.float64(scale) / factor
        np.testing.assert_array_equal(held.values, np.array([[one, -6 * one]] * 2, np.float32))
    two = scaled_values(tiny(np.array([[2.0**-101], [2.0]], np.float32)))
    assert two.factor == 1.0
    np.testing.assert_array_equal(
        two.values, np.array([[2.0**-101, -6 * 2.0**-101], [2, -12]], np.float32)
    )


def test_factors_multiply_the_product():
    held = [scaled_values(jnp.ones(1))._replace(factor=f) for f in (1.0, 4.0, jnp.float32(0.5))]
    for left in held:
        for right in held:
            expected = 3 * float(left.factor) * float(right.factor)
            assert float(unscaled(jnp.float32(3), left, right)) == expected
    plain = jnp.ones(2)
    assert unscaled(plain, held[0], held[0]) is plain  # so that no program multiplies by one


def test_the_gradient_link_is_held_at_the_same_power():
    """d(product)/dx is w, whatever power of two x is held at."""
    w = jnp.float32([[1], [2], [-3], [4]])

    def product(x):
        held = scaled_values(mx_jax.quantize(x, "mxfp4"))
        return (held.values @ w * held.factor).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(product))(X), [[1, 2, -3, 4]] * 2)


def test_how_the_product_is_asked_for():
    """Two quantized operands at the highest precision; float32 sums, rounded once."""
    quantized = mx_jax.quantize(X, "mxfp4"), mx_jax.quantize(X.T, "mxfp4", axis=0)
    low, high = lax.Precision.DEFAULT, lax.Precision.HIGHEST
    for lhs, rhs, precision in (
        (*quantized, high),
        (quantized[0], X.T, low),
        (X, quantized[1], low),
        (X, X.T, low),
    ):

        def product(lhs=lhs, rhs=rhs):
            lhs, rhs = (x if isinstance(x, MXArray) else jnp.asarray(x) for x in (lhs, rhs))
            return scaled_matmul(lhs, rhs, PLAIN, jnp.bfloat16, precision=low)

        (dot,) = [e for e in jax.make_jaxpr(product)().eqns if e.primitive.name == "dot_general"]
        assert dot.params["precision"] == (precision, precision)
        assert dot.params["preferred_element_type"] == jnp.float32
    found = scaled_matmul(*quantized, PLAIN, jnp.bfloat16)
    values = [np.asarray(x.dequantize(), np.float64) for x in quantized]
    np.testing.assert_array_equal(found, jnp.bfloat16(np.float32(values[0] @ values[1])))


def by_hand(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, tokens: int
) -> np.ndarray:
    """Query by query: those of a head follow each other, and see the rows up to their own."""
    out = np.zeros((*queries.shape[:2], values.shape[-1]))
    for matrix, query in np.ndindex(queries.shape[:2]):
        rows = slice(position + query % tokens + 1)
        scores = keys[matrix, rows] @ queries[matrix, query] / np.sqrt(queries.shape[-1])
        weights = np.exp(scores)
        out[matrix, query] = weights @ values[matrix, rows] / weights.sum()
    return out


@pytest.mark.parametrize(("position", "tokens"), [(0, 1), (4, 1), (0, 3), (2, 3), (6, 1), (9, 3)])
def test_attend(position: int, tokens: int):
    """Two matrices of seven rows, two heads each; beyond the end every row is seen."""
    rng = np.random.default_rng(position)
    shapes = (2, 2 * tokens, 8), (2, 7, 8), (2, 7, 5)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    found = attend(*arrays, position, tokens)
    assert found.dtype == np.float32
    wide = (array.astype(np.float64) for array in arrays)
    np.testing.assert_allclose(found, by_hand(*wide, position, tokens), rtol=0, atol=2e-6)
