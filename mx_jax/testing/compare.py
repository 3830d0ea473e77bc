"""Equality of bits, with a message that says where the first difference is; values in float64."""

import math

import numpy as np
from jax.typing import ArrayLike

from mx_jax.backends.calls import MatmulCall, Operand
from mx_jax.codecs.blocks import block_extent
from mx_jax.mxarray import MXArray

# One unsigned integer type for each width of element; ml_dtypes gives narrow floats one byte.
_PATTERNS = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}


def bit_patterns(array: ArrayLike) -> np.ndarray:
    """The bits of an array's elements, as unsigned integers of the same width."""
    array = np.asarray(array)
    pattern = _PATTERNS.get(array.dtype.itemsize)
    if pattern is None or array.dtype.kind in "cmMOSU":
        raise TypeError(
            f"bit_patterns: needs real numbers of 1, 2, 4 or 8 bytes, got dtype={array.dtype}"
        )
    return np.ascontiguousarray(array).view(pattern).reshape(array.shape)


def assert_bitwise_equal(
    actual: ArrayLike, expected: ArrayLike, *, what: str = "array", any_nan: bool = False
) -> None:
    """Raise unless both arrays have the same dtype, shape and bits.

    0.0 and -0.0 differ, and so do two NaNs with different payloads, unless `any_nan`.

    Examples:
      >>> import numpy as np
      >>> from mx_jax.testing.compare import assert_bitwise_equal
      >>> assert_bitwise_equal(np.float32([0.5, 1.0]), np.float32([0.5, 1.0]))
      >>> assert_bitwise_equal(np.float32([[1.0, 0.0]]), np.float32([[1.0, -0.0]]), what="zeros")
      Traceback (most recent call last):
      AssertionError: zeros: 1 of 2 elements differ, the first at [0, 1]: actual 0x00000000 (0.0),
      expected 0x80000000 (-0.0)
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    for fact in ("dtype", "shape"):
        left, right = getattr(actual, fact), getattr(expected, fact)
        if left != right:
            raise AssertionError(f"{what}: {fact}s differ: actual {left}, expected {right}")
    left, right = bit_patterns(actual), bit_patterns(expected)
    differs = left != right
    if any_nan:
        differs &= ~(_is_nan(actual) & _is_nan(expected))
    count = int(np.count_nonzero(differs))
    if count:
        first = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
        raise AssertionError(
            f"{what}: {count} of {differs.size} elements differ, the first at {list(first)}: "
            f"actual {_describe(actual, left, first)}, expected {_describe(expected, right, first)}"
        )


def _is_nan(array: np.ndarray) -> np.ndarray:
    # A NaN alone differs from itself, also in ml_dtypes; signalling ones would warn of it.
    with np.errstate(invalid="ignore"):
        return array != array


def _describe(array: np.ndarray, patterns: np.ndarray, index: tuple[int, ...]) -> str:
    digits = 2 * patterns.dtype.itemsize
    return f"0x{int(patterns[index]):0{digits}X} ({array[index]})"


def exact_values(operand: Operand) -> np.ndarray:
    """The values of an operand in float64, from the formats' tables alone, without codecs."""
    if not isinstance(operand, MXArray):
        return np.asarray(operand).astype(np.float64)
    element, scale = operand.format.element, operand.format.scale
    table = np.array([element.value(code) for code in range(1 << element.bits)])
    values = table[np.asarray(operand.codes)]
    scales = np.asarray(operand.scales)
    if not scale.is_float32:
        scales = np.array([scale.value(code) for code in range(256)])[scales]
    scales = scales.astype(np.float64)
    for axis, size in operand.blocks:
        length = operand.shape[axis]
        repeated = np.repeat(scales, block_extent(size, length), axis=axis)
        scales = np.take(repeated, range(length), axis=axis)
    if operand.tensor_scale is not None:
        scales = scales * np.asarray(operand.tensor_scale, np.float64)
    return values / scales if scale.kind == "divisor" else values * scales


def exact_product(call: MatmulCall, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """`[*batch, *m, *n]` of float64 values."""
    left, m = _as_matrices(lhs, call.num_batch, call.lhs.axes.contracting)
    right, n = _as_matrices(rhs, call.num_batch, call.rhs.axes.contracting)
    product = left @ np.swapaxes(right, -1, -2)
    return product.reshape(*lhs.shape[: call.num_batch], *m, *n)


def _as_matrices(
    x: np.ndarray, num_batch: int, contracting: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """`[batch, kept, k]`, and the lengths of the kept axes."""
    kept = [axis for axis in range(num_batch, x.ndim) if axis not in contracting]
    batch, lengths, ks = (
        [x.shape[axis] for axis in axes] for axes in (range(num_batch), kept, contracting)
    )
    moved = x.transpose(*range(num_batch), *kept, *contracting)
    sizes = (math.prod(batch), math.prod(lengths), math.prod(ks))
    return moved.reshape(sizes), tuple(lengths)
