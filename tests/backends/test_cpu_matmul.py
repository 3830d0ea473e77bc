"""Products of the CPU library: rows by themselves, NaN and Inf."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.testing.backend_suite import exact_product, exact_values
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("kernels_alone"), pytest.mark.slow(but=5)]


def product(case: MatmulCase, lhs: Any, rhs: Any) -> jax.Array:
    return jax.jit(lambda lhs, rhs: CPU_FFI.run(case.call, lhs, rhs))(lhs, rhs)


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


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("format", (*formats.MX_FORMATS, formats.NVFP4), ids=str)
def test_a_nan_scale_makes_its_row_nan(format, rows: int):
    case = MatmulCase(lhs=format, rhs=format, m=(rows,), n=(40,), k=(96,))
    left, right = case.operands(np.random.default_rng(3))
    nan = 255 if format.scale.kind == "exponent" else 127
    expected = np.array(product(case, left, right))
    expected[1, :], expected[:, 39] = np.nan, np.nan
    left, right = (
        dataclasses.replace(x, scales=x.scales.at[row, 1].set(nan))
        for x, row in ((left, 1), (right, 39))
    )
    assert_bitwise_equal(product(case, left, right), expected, any_nan=True)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("rhs", [formats.MXFP8_E4M3, formats.MXFP8_E5M2], ids=str)
@pytest.mark.parametrize("lhs", [None, formats.MXFP8_E4M3], ids=str)
def test_special_codes_spread(lhs, rhs, rows: int):
    """Code 0x7F is NaN in both float8 formats; E5M2's 0x7C is Inf."""
    case = MatmulCase(lhs=lhs, rhs=rhs, m=(rows,), n=(40,), k=(96,))
    left, right = case.operands(np.random.default_rng(4))
    codes = right.codes.at[3, 50].set(0x7F).at[20, 7].set(0x7C)
    right = dataclasses.replace(right, codes=codes)
    actual = product(case, left, right)
    with np.errstate(invalid="ignore"):
        expected = exact_product(case.call, exact_values(left), exact_values(right))
    for special in (np.isnan, np.isinf):
        assert_bitwise_equal(special(actual), special(expected), what=special.__name__)
