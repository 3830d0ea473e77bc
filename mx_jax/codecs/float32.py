"""Float32 bit patterns: exact widening, narrowing and normalizing, without float arithmetic.

XLA on CPU flushes subnormals on input, output and comparison; bit casts preserve them. By lax's
operations: operators of arrays are each a jnp function under a `jit` of its own, which takes five
times as long to trace. For lax a Python number is 64 bits wide under `jax_enable_x64`, so each has
the dtype of the array beside it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs.explicit_axes import broadcast_like
from mx_jax.codecs.lowering import by_halves

SIGN = -(1 << 31)
ABS = 0x7FFFFFFF
INF = 0x7F800000
NAN = 0x7FC00000
MANTISSA = 0x007FFFFF
HIDDEN = 0x00800000


def canonical_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype of an array that is asked for: without x64 none has 64 bits, which JAX warns of."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize < 8 else jnp.zeros((), dtype).dtype


def _with_operands_alike(operation: Callable[..., jax.Array]) -> Callable[[Any, Any], jax.Array]:
    @functools.wraps(operation)
    def apply(left: Any, right: Any) -> jax.Array:
        if isinstance(right, int | float):
            right = left.dtype.type(right)
        elif isinstance(left, int | float):
            left = right.dtype.type(left)
        elif left.shape != right.shape and left.ndim and right.ndim:
            # One of them has the shape of the result.
            if left.shape == jnp.broadcast_shapes(left.shape, right.shape):
                right = broadcast_like(right, left)
            else:
                left = broadcast_like(left, right)
        return operation(left, right)

    return apply


add = _with_operands_alike(lax.add)
sub = _with_operands_alike(lax.sub)
mul = _with_operands_alike(lax.mul)
div = _with_operands_alike(lax.div)
min = _with_operands_alike(lax.min)
max = _with_operands_alike(lax.max)
bitwise_and = _with_operands_alike(lax.bitwise_and)
bitwise_or = _with_operands_alike(lax.bitwise_or)
bitwise_xor = _with_operands_alike(lax.bitwise_xor)
shift_left = _with_operands_alike(lax.shift_left)
shift_right = _with_operands_alike(lax.shift_right_arithmetic)
eq = _with_operands_alike(lax.eq)
lt = _with_operands_alike(lax.lt)
gt = _with_operands_alike(lax.gt)
ge = _with_operands_alike(lax.ge)


def select(which: jax.Array, on_true: jax.Array | float, on_false: jax.Array | float) -> jax.Array:
    """`jnp.where` of an array and another or a number; in one or two equations if shapes agree."""
    if not isinstance(on_true, jax.Array):
        on_true = lax.full_like(on_false, on_true)
    elif not isinstance(on_false, jax.Array):
        on_false = lax.full_like(on_true, on_false)
    if not which.shape == jnp.shape(on_true) == jnp.shape(on_false):
        return jnp.where(which, on_true, on_false)
    return lax.select(which, on_true, on_false)


def clip(x: jax.Array, low: int, high: int) -> jax.Array:
    """`jnp.clip` in one equation."""
    return lax.clamp(x.dtype.type(low), x, x.dtype.type(high))


def float32_bits(x: jax.Array) -> jax.Array:
    """The bits, as int32, of the float32 values equal to x: float32, bfloat16 or float16 input."""
    if x.dtype == jnp.bfloat16:
        high = lax.bitcast_convert_type(x, jnp.uint16)
        return shift_left(lax.convert_element_type(high, jnp.int32), 16)
    # float16's subnormals are normal in float32, so its conversion has nothing to flush.
    return lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), jnp.int32)


def widened_bits(x: jax.Array) -> jax.Array:
    """As `float32_bits`, where converting bfloat16 flushes no subnormals, as on TPUs."""
    return lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), jnp.int32)


def from_bits(bits: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """The float32 values of int32 patterns, rounded once to `dtype` (nearest, ties to even)."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bfloat16:
        nan = gt(bitwise_and(bits, ABS), INF)
        odd = bitwise_and(shift_right(bits, 16), 1)
        nearest = add(add(bits, 0x7FFF), odd)
        high = bitwise_and(shift_right(select(nan, NAN, nearest), 16), 0xFFFF)
        return lax.bitcast_convert_type(lax.convert_element_type(high, jnp.uint16), jnp.bfloat16)
    if dtype == jnp.float16:
        # Float32 subnormals are far below half of float16's quantum: flushing them is right.
        return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.float16)
    return lax.convert_element_type(lax.bitcast_convert_type(bits, jnp.float32), dtype)


def rounded(product: jax.Array) -> jax.Array:
    """A product that keeps its own rounding: LLVM would contract it and a sum into one FMA.

    Args:
      product: float32; -inf becomes the lowest finite number.
    """
    return max(product, float(np.finfo(np.float32).min))


def sum_in_order(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Sums over axes, kept with size 1, by halves: the same bits wherever they are added.

    `jnp.sum` adds in an order that each of XLA's backends chooses.
    """
    x = rounded(x)
    for axis in (axis % x.ndim for axis in axes):
        size = 1 << (x.shape[axis] - 1).bit_length()
        if size > x.shape[axis]:
            missing = [(0, size - n if i == axis else 0, 0) for i, n in enumerate(x.shape)]
            x = lax.pad(x, x.dtype.type(0), missing)
        x = by_halves(add, x, axis)
    return x


def power_of_two(exponent: jax.Array) -> jax.Array:
    """`2^exponent` of int32 exponents from -126 to 127."""
    return from_bits(shift_left(add(exponent, 127), 23))


def split_exponent_mantissa(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Biased exponents and 23-bit mantissas of patterns of numbers >= 0, subnormal ones too."""
    # `(1 + mantissa / 2^23) * 2^(exponent - 127)` for every finite non-zero input: exponents of
    # subnormals are 0 to -22. Zero has exponent -149, below everything else, and mantissa 0.
    # A subnormal is its integer pattern times 2^-149, and integers convert to float32 exactly.
    as_float = float32_bits(lax.convert_element_type(magnitude, jnp.float32))
    pattern = select(lt(magnitude, HIDDEN), sub(as_float, 149 << 23), magnitude)
    return shift_right(pattern, 23), bitwise_and(pattern, MANTISSA)
