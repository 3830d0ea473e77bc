"""Each scale function at the ends of float32, asked directly with what a rule may look at."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn as E4M3

from mx_jax.formats import (
    FLOAT8_BLOCKWISE_E4M3,
    FLOAT8_ROWWISE_E4M3,
    MXFP4,
    NVFP4,
    NVFP4_ONE_LEVEL,
    BlockFormat,
)
from mx_jax.reference import scale_functions as functions
from mx_jax.reference.scale_functions import BlockData
from mx_jax.testing.compare import assert_bitwise_equal

F = np.float32
TINY = F(2.0**-126)
# Normal numbers beside every guard, among them 2^-100 and 1e-12 times the largest elements.
AMAX = F([1e-12, 3e-12, 1, 1.75, 6, 448, 449, 3e30, 2.0**-100 * 448, 2.0**-99 * 448, 2.0**-101])
AMAX = np.concatenate([AMAX, np.nextafter(AMAX, F(0)), np.nextafter(AMAX, F(np.inf))])
NOT_FINITE = F([np.inf, np.nan])


def ask(function: Any, amax: np.ndarray, format: BlockFormat, tensor_scale: Any = None):
    patterns = amax[:, None].view(np.int32) & 0x7FFFFFFF
    unseen: Any = None
    run = jax.jit(lambda a, p: function(BlockData(unseen, (1,), a, format, p)))
    return np.asarray(run(patterns, tensor_scale))[:, 0]


def test_multiplier():
    """amax / max, at least 2^-100; 1 for zeros, NaN for what is not finite."""
    amax = np.concatenate([AMAX, F([0, 1e-45]), NOT_FINITE])
    scales = ask(functions.multiplier, amax, FLOAT8_BLOCKWISE_E4M3)
    expected = np.maximum(AMAX / F(448), F(2.0**-100))
    assert_bitwise_equal(scales[:-4], expected)
    assert (scales[-4], scales[-3]) == (1, F(2.0**-100)) and np.isnan(scales[-2:]).all()


def test_divisors():
    """max / max(amax, 1e-12), and the power of two at or below it."""
    amax = np.concatenate([AMAX, F([0, 1e-45]), NOT_FINITE])
    exact = F(448 / np.maximum(amax[:-2].astype(np.float64), 1e-12))
    scales = ask(functions.divisor, amax, FLOAT8_ROWWISE_E4M3)
    assert_bitwise_equal(scales[:-2], exact)
    powers = ask(functions.divisor_power_of_two, amax, FLOAT8_ROWWISE_E4M3)
    assert_bitwise_equal(powers[:-2], np.ldexp(F(1), np.frexp(exact)[1] - 1).astype(F))
    assert np.isnan(scales[-2:]).all() and np.isnan(powers[-2:]).all()


@pytest.mark.parametrize("tensor_scale", [None, 0.75, 2.0**-101 * 1.5])
def test_element_scales(tensor_scale: float | None):
    """E4M3 of (amax / 6) / p, at least the smallest normal, or subnormal, and at most 448."""
    p = F(1 if tensor_scale is None else tensor_scale)
    wanted = F([1, 2.0**-6, 2.0**-7, 3 * 2.0**-9, 2.0**-9, 2.0**-10, 448, 1000, 1.0625, 1.1875, 0])
    finite = wanted * p * F(6)
    amax = np.concatenate([finite, NOT_FINITE])
    format = NVFP4_ONE_LEVEL if tensor_scale is None else NVFP4
    for function, smallest in (
        (functions.amax, 2.0**-6),
        (functions.amax_subnormal, 2.0**-9),
    ):
        given = None if tensor_scale is None else np.full((1, 1), p)
        codes = ask(function, amax, format, given)
        expected = np.clip(wanted, F(smallest), F(448)).astype(E4M3).view(np.uint8)
        assert_bitwise_equal(codes[:-2], expected, what=function.__name__)
        assert (codes[-2:] == 0x7F).all()


def test_four_over_six_takes_four_where_it_loses_less():
    """3 and 4 are codes over 4/4 and not over 4/6; 6 over 6/6 and nothing over 6/4. Ties: six."""
    blocks = F([[4, 3, 1, 0.5], [6, 4, 2, 1], [0, 0, 0, 0], [np.inf, 1, 1, 1], [9, 0, 0, 0]])
    patterns = np.max(blocks.view(np.int32), axis=1, keepdims=True)
    run = jax.jit(
        lambda x, amax: functions.four_over_six(BlockData(x, (1,), amax, NVFP4_ONE_LEVEL, None))
    )
    scales = np.asarray(run(blocks, patterns))[:, 0]
    assert scales[:2].view(E4M3).astype(F).tolist() == [1, 1]
    # 9: 1.5 over 6, and 2.25 over 4: both exact.
    assert scales[2:].tolist() == [0x01, 0x7F, F(1.5).astype(E4M3).view(np.uint8)]


def test_squared_error():
    """Over each block by itself, the axis kept."""
    x = F([[1, 5, -0.3], [0.5, 0.25, 7]])

    @jax.jit
    def lose(x, scales):
        data = BlockData(x, (1,), jnp.zeros((2, 1), jnp.int32), MXFP4, None)
        return functions.squared_error(data, scales)

    lost = lose(x, np.uint8([[127], [128]]))
    values = F([[1, 4, -0.5], [0, 0, 8]])
    values[1, 0] = 0  # 0.25 of the scale, a tie, to even
    np.testing.assert_allclose(lost, np.square(values - x).sum(1, keepdims=True), rtol=1e-6)


def test_gaussian():
    """2^floor(log2(2.92247856 deviation / 6 + 1e-8)); a block alike has the smallest deviation."""
    rows = F([[-1, 1, -1, 1], [-3, 1, 5, 1], [2, 2, 2, 2], [np.nan, 1, 1, 1], [np.inf, 1, 1, 1]])
    rows = np.concatenate([rows, rows[:2] * F(2.0**-25), rows[:1] * F(6 / 2.92247856 * 0.999999)])
    amax = np.max(np.abs(rows).view(np.int32), axis=1, keepdims=True)
    run = jax.jit(lambda x, a: functions.gaussian(BlockData(x, (1,), a, MXFP4, None)))
    found = np.asarray(run(rows, amax))[:, 0]
    with np.errstate(invalid="ignore"):
        spread = rows.astype(np.float64).std(axis=1) * 2.92247856 / 6 + 1e-8
    expected = np.floor(np.log2(np.delete(spread, [3, 4]))).astype(int) + 127
    assert np.delete(found, [3, 4]).tolist() == expected.tolist()
    assert found[[3, 4]].tolist() == [255, 255]


def test_what_is_important_counts_more():
    """Two values whose errors under a scale of one are 1/2 and 1/4."""
    given = F([[2.5, 0.75]])
    data = BlockData(jnp.asarray(given), (1,), given[:, :1].view(np.int32), MXFP4, None)
    scales = np.uint8([[127]])
    assert functions.squared_error(data, scales) == 0.5**2 + 0.25**2
    found = functions.squared_error(data, scales, jnp.asarray(F([[4, 16]])))
    assert found == 4 * 0.5**2 + 16 * 0.25**2
