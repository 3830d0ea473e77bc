"""The plain products: how they are asked for, and rows under the scales of their groups."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax.codecs.rounding import NEAREST, STOCHASTIC, TOWARD_ZERO
from mx_jax.formats import FLOAT8_TENSORWISE_E4M3, NVFP4, WHOLE
from mx_jax.reference.matmul import (
    encode_by_group,
    group_peaks,
    ragged_rows,
    scaled_matmul,
    scaled_ragged_dot,
)
from mx_jax.reference.quantize import quantize
from mx_jax.reference.scale_rules import scale_rule_for
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

LOW, HIGH = lax.Precision.DEFAULT, lax.Precision.HIGHEST
HOW = {"out_dtype": jnp.bfloat16, "precision": LOW}
MULTIPLY = {
    "dot_general": functools.partial(
        scaled_matmul, dimension_numbers=(((2,), (1,)), ((0,), (0,))), **HOW
    ),
    "mx_grouped_dot": functools.partial(
        scaled_ragged_dot, group_sizes=np.array([3, 1], np.int32), contracting=(-1, -2), **HOW
    ),
}


@pytest.mark.parametrize("primitive", MULTIPLY)
def test_precision_and_dtype_of_the_product(primitive: str):
    """Two quantized operands at the highest precision; sums in float32, of groups unless neither
    is quantized, and rounded once."""
    multiply: Callable = MULTIPLY[primitive]
    x, w = jnp.ones((4, 32) if "grouped" in primitive else (2, 4, 32)), jnp.ones((2, 32, 8))
    q, r = mx_jax.quantize(x, "mxfp4"), mx_jax.quantize(w, "mxfp4", axis=1)
    for lhs, rhs, precision in ((q, r, HIGH), (q, w, LOW), (x, r, LOW), (x, w, LOW)):

        def product(lhs=lhs, rhs=rhs):
            return multiply(lhs, rhs)

        (dot,) = [e for e in jax.make_jaxpr(product)().eqns if e.primitive.name == primitive]
        precisions = dot.params["precision"]
        assert {*np.atleast_1d(precisions)} == {precision}
        is_wide = primitive == "dot_general" or not (lhs is x and rhs is w)
        assert dot.params["preferred_element_type"] == (jnp.float32 if is_wide else jnp.bfloat16)
        lowered = jax.jit(product).lower().as_text("hlo")
        assert ("operand_precision={highest" in lowered) == (precision == HIGH)
        result = quick(product)()
        assert result.dtype == jnp.bfloat16 and (np.asarray(result) == 32).all()


def test_numbers_beyond_float32_stay_finite_in_sums():
    """A scale that is rounded up brings the largest float32 to 2^128."""
    largest, small = np.full((1, 32), np.finfo(np.float32).max), np.full((32, 1), 2.0**-10)
    x = mx_jax.quantize(largest.astype(np.float32), "mxfp4", scale_rule="even")
    w = mx_jax.quantize(small.astype(np.float32), "mxfp4", axis=0)
    assert np.isinf(x.dequantize()).all()
    assert scaled_matmul(x, w, (((1,), (0,)), ((), ())), jnp.float32) == 2.0**123


ROWS = np.array([[1, -2], [3, 0.5], [-7, np.inf], [0, -1e-45], [9, 9]], np.float32)


@pytest.mark.parametrize("format", [FLOAT8_TENSORWISE_E4M3, NVFP4], ids=lambda f: f.name)
def test_rows_under_their_groups_scales(format):
    """As if every group were quantized by itself; rows of no group are zeros that stay zeros."""
    x = np.where(np.isfinite(ROWS), ROWS, 2).astype(np.float32)
    x[1, 1] = 0.46  # rounds up to nearest
    blocks = ((-2, WHOLE), (-1, format.block[1]))
    rule = scale_rule_for(None, format)

    @jax.jit
    def by_group(x, sizes):
        rows = ragged_rows(sizes, 5, 1)
        placed = rows.place(x)
        peaks = quantize(group_peaks(placed, rows), format, blocks, rule)
        ways = (NEAREST, None), (TOWARD_ZERO, None), (STOCHASTIC, jnp.zeros(x.shape, jnp.int32))
        return [encode_by_group(placed, rows, peaks, *way) for way in ways], peaks

    (result, down, drawn), peaks = by_group(x, np.array([2, 0, 2], np.int32))
    assert_bitwise_equal(drawn.codes, down.codes, what="zeros for random bits never round up")
    assert (np.asarray(down.codes) != result.codes).any()
    assert result.blocks == blocks[1:] and result.dtype == jnp.float32
    scales = np.asarray(peaks.scales)[:, 0]
    assert_bitwise_equal(result.scales[:4], scales[[0, 0, 2, 2]])
    assert not np.asarray(result.codes)[4].any()
    assert np.asarray(result.scales)[4].tolist() == [1] * scales.shape[1]
    if format is NVFP4:
        assert_bitwise_equal(result.tensor_scale, np.asarray(peaks.tensor_scale)[0])
    else:
        values = np.asarray(result.dequantize())[:4]
        np.testing.assert_allclose(values, x[:4], rtol=1 / 16, atol=1e-4)
