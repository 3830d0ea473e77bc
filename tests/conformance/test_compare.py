"""The comparison that every test relies on says where and what differs, and lets nothing pass."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax.testing.compare import assert_bitwise_equal, bit_patterns


def test_equal_arrays_of_any_kind_pass():
    for array in (
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.zeros((0, 3), np.float16),
        np.array(3, np.int64),
        np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn),
        np.arange(12.0).reshape(3, 4).T,
        np.array([True, False]),
    ):
        assert_bitwise_equal(array, array.copy())
    assert_bitwise_equal(jnp.ones(3, jnp.bfloat16), np.ones(3, ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (
            np.array([[1, 2], [3, 4]], np.float32),
            np.array([[1, 2], [5, 6]], np.float32),
            "it: 2 of 4 elements differ, the first at [1, 0]: "
            "actual 0x40400000 (3.0), expected 0x40A00000 (5.0)",
        ),
        (
            np.array(7, np.uint8),
            np.array(8, np.uint8),
            "it: 1 of 1 elements differ, the first at []: actual 0x07 (7), expected 0x08 (8)",
        ),
        (
            np.zeros(2, np.uint8),
            np.zeros(2, np.int8),
            "it: dtypes differ: actual uint8, expected i",
        ),
        (np.zeros((2, 1)), np.zeros(2), "it: shapes differ: actual (2, 1), expected (2,)"),
    ],
    ids=["values", "scalar", "dtype", "shape"],
)
def test_differences_are_described(actual, expected, message: str):
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_bitwise_equal(actual, expected, what="it")


def test_nans_with_other_payloads_differ_unless_any_will_do():
    quiet, other = np.array([0x7FC00000, 1], np.uint32), np.array([0xFFC00001, 1], np.uint32)
    actual, expected = quiet.view(np.float32), other.view(np.float32)
    with pytest.raises(AssertionError, match=r"actual 0x7FC00000 \(nan\), expected 0xFFC00001"):
        assert_bitwise_equal(actual, expected)
    assert_bitwise_equal(actual, expected, any_nan=True)
    with pytest.raises(AssertionError, match=r"actual 0x7FC00000 \(nan\), expected 0x3F800000"):
        assert_bitwise_equal(actual, np.array([1, 0], np.float32), any_nan=True)
    # Numbers next to a NaN are still compared.
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, the first at \[1\]"):
        assert_bitwise_equal(actual, np.array([np.nan, 2], np.float32), any_nan=True)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.zeros(2, np.complex64), np.zeros(1, "M8[s]")]
)
def test_what_has_no_bits_is_refused(array: np.ndarray):
    with pytest.raises(TypeError, match=r"needs real numbers of 1, 2, 4 or 8 bytes, got dtype="):
        bit_patterns(array)
