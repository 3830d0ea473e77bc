"""The plain product: which power of two its operands are held at, and how it is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax import MXArray
from mx_jax.reference.matmul import scaled_matmul, scaled_values

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


def test_precision_and_dtype_of_the_product():
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
    result = scaled_matmul(*quantized, PLAIN, jnp.bfloat16)
    values = [np.asarray(x.dequantize(), np.float64) for x in quantized]
    np.testing.assert_array_equal(result, jnp.bfloat16(np.float32(values[0] @ values[1])))
