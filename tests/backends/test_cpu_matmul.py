"""Products of the CPU library: random ones against float64, exact ones, NaN and Inf."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.mxarray import MXArray
from mx_jax.testing.backend_suite import exact_product, exact_values
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

FORMATS = (*formats.MX_FORMATS, formats.NVFP4)
pytestmark = [needs_library, pytest.mark.usefixtures("kernels_alone"), pytest.mark.slow(but=5)]


def product(case: MatmulCase, lhs: Any, rhs: Any) -> jax.Array:
    return jax.jit(lambda lhs, rhs: CPU_FFI.run(case.call, lhs, rhs))(lhs, rhs)


# Those whose values are small integers times a power of two.
INTEGERS = [
    format
    for format in formats.MX_FORMATS
    if format.element.max / format.element.smallest_subnormal < 2**12
]


@pytest.mark.parametrize("rhs", INTEGERS, ids=lambda format: format.name)
@pytest.mark.parametrize("lhs", INTEGERS, ids=lambda format: format.name)
def test_one_block_is_exact(lhs, rhs):
    """A block's sum has no rounding, whatever its codes."""
    case = MatmulCase(lhs=lhs, rhs=rhs, m=(40,), n=(70,), k=(32,))
    left, right = case.operands(np.random.default_rng(1))
    expected = exact_product(case.call, exact_values(left), exact_values(right))
    assert_bitwise_equal(product(case, left, right), expected.astype(np.float32), what="product")


@pytest.mark.parametrize("rows", [1, 2, 5, 13, 61])
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (None, formats.MXFP4),
        (None, formats.MXFP8_E4M3),
        (formats.MXFP8_E5M2, formats.MXFP8_E4M3),
        (formats.MXINT8, formats.MXFP4),
        (formats.NVFP4, formats.NVFP4),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_the_others(lhs, rhs, rows: int):
    """The same bits alone, among a few and among many: on one thread and on several."""
    case = MatmulCase(lhs=lhs, rhs=rhs, m=(200,), n=(150,), k=(1100,))
    left, right = case.operands(np.random.default_rng(2))
    few = left[7 : 7 + rows]
    alone = product(dataclasses.replace(case, m=(rows,)), few, right)
    assert_bitwise_equal(alone, product(case, left, right)[7 : 7 + rows], what="rows")


def with_scales(x: MXArray, row: int, byte: int) -> MXArray:
    return dataclasses.replace(x, scales=x.scales.at[row, 1].set(byte))


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_nan_scale_makes_its_row_nan(format, rows: int):
    case = MatmulCase(lhs=format, rhs=format, m=(rows,), n=(40,), k=(96,))
    left, right = case.operands(np.random.default_rng(3))
    nan = 255 if format.scale.kind == "exponent" else 127
    clean = np.asarray(product(case, left, right))
    spoilt = np.asarray(product(case, with_scales(left, 1, nan), with_scales(right, 39, nan)))
    expected = clean.copy()
    expected[1, :], expected[:, 39] = np.nan, np.nan
    assert_bitwise_equal(np.isnan(spoilt), np.isnan(expected), what="NaN")
    kept = ~np.isnan(expected)
    assert_bitwise_equal(spoilt[kept], clean[kept], what="the others")


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("rhs", [formats.MXFP8_E4M3, formats.MXFP8_E5M2], ids=str)
@pytest.mark.parametrize("lhs", [None, formats.MXFP8_E4M3], ids=str)
def test_special_codes_spread(lhs, rhs, rows: int):
    """Code 0x7F is NaN in both float8 formats; E5M2's 0x7C is Inf."""
    case = MatmulCase(lhs=lhs, rhs=rhs, m=(rows,), n=(40,), k=(96,))
    left, right = case.operands(np.random.default_rng(4))
    assert isinstance(right, MXArray)
    codes = right.codes.at[3, 50].set(0x7F).at[20, 7].set(0x7C)
    right = dataclasses.replace(right, codes=codes)
    actual = np.asarray(product(case, left, right))
    with np.errstate(invalid="ignore"):
        expected = exact_product(case.call, exact_values(left), exact_values(right))
    assert_bitwise_equal(np.isnan(actual), np.isnan(expected), what="NaN")
    assert_bitwise_equal(np.isinf(actual), np.isinf(expected), what="Inf")
