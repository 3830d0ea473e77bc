"""Scales that leave the sums of a product: one for each row of an operand, or one for all of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.calls import MatmulCall
from mx_jax.codecs import float32
from mx_jax.codecs.scale import scale_to_float32, true_divide
from mx_jax.mxarray import MXArray


class SumScale(NamedTuple):
    """What sums are multiplied or divided by.

    Attributes:
      values: float32, a scalar, or an array that broadcasts to the sums.
      divides: whether the sums are divided.
    """

    values: jax.Array
    divides: bool = False


def row_scales(side: Side, operand: MXArray, call: MatmulCall) -> SumScale:
    """The block scales of an operand whose blocks are whole along the contracted axes."""
    scale = operand.format.scale
    values = scale_to_float32(operand.scales, scale)
    for axis, size in operand.blocks:
        if isinstance(size, int):
            repeated = jnp.repeat(values, size, axis)
            values = lax.slice_in_dim(repeated, 0, operand.shape[axis], axis=axis)
    return SumScale(_in_product(side, values, call), scale.kind == "divisor")


def tensor_scale(side: Side, operand: MXArray, call: MatmulCall) -> tuple[SumScale, ...]:
    """The tensor scale of an operand, if it has one: the same along the contracted axes."""
    values = operand.tensor_scale
    return () if values is None else (SumScale(_in_product(side, values, call)),)


def _in_product(side: Side, values: jax.Array, call: MatmulCall) -> jax.Array:
    """A scalar, or one number for each row in the place of the operand's rows."""
    if all(length == 1 for length in values.shape):
        return values.reshape(())
    num_m, num_n = len(call.lhs.axes.kept), len(call.rhs.axes.kept)
    if side == "lhs":
        values = lax.squeeze(values, call.lhs.axes.contracting)
        return jnp.expand_dims(values, tuple(range(values.ndim, values.ndim + num_n)))
    values = lax.squeeze(values, call.rhs.axes.contracting)
    return jnp.expand_dims(values, tuple(range(call.num_batch, call.num_batch + num_m)))


def scaled(sums: jax.Array, *scales: SumScale) -> jax.Array:
    """Float32 sums under their operands' scales; within float32 as long as the result is.

    Each scale multiplies in two halves, all first ones before all second ones: a large scale and a
    small one meet before either has taken the sums out of range. Scales may be subnormal.
    """
    first, second = [], []
    # Scalars before rows: they meet each other at no cost.
    for scale in sorted(scales, key=lambda scale: scale.values.ndim > 0):
        for factors, half in zip((first, second), _halves(scale), strict=True):
            if factors and factors[-1].ndim == half.ndim == 0:
                half = factors.pop() * half
            factors.append(half)
    # Behind the barrier they are arrays to XLA, and the product stays one kernel: else it spreads
    # a part of their arithmetic to the sums' shape, in memory.
    for factor in lax.optimization_barrier((*first, *second)):
        sums = sums * factor
    return sums


def _halves(scale: SumScale) -> tuple[jax.Array, jax.Array]:
    """Two factors of about equal exponents; of zero, Inf and NaN, one is 1."""
    values = scale.values
    bits = float32.to_bits(values)
    magnitude = bits & float32.ABS
    biased, mantissa = float32.normalize(magnitude)
    ordinary = (magnitude > 0) & (magnitude < float32.INF)
    significand = float32.from_bits(bits & jnp.int32(float32.SIGN) | mantissa | _ONE)
    significand = jnp.where(ordinary, significand, values)
    exponent = jnp.where(ordinary, biased - 127, 0)
    if scale.divides:
        significand, exponent = true_divide(jnp.ones_like(values), significand), -exponent
    half = exponent >> 1
    return significand * float32.power_of_two(half), float32.power_of_two(exponent - half)


_ONE = 127 << 23
