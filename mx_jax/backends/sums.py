"""Scales that leave the sums of a product: one for each row of an operand, or one for all of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.base import MatmulCall
from mx_jax.codecs import float32
from mx_jax.codecs.scale import scale_to_float32, true_divide
from mx_jax.mxarray import MXArray


class SumScale(NamedTuple):
    """Float32 scales of an operand's rows, to multiply or divide the product's sums by.

    Attributes:
      side: whose they are.
      values: of the operand's shape, or one that broadcasts to it, one along contracted axes.
      divides: whether the sums are divided.
    """

    side: Side
    values: jax.Array
    divides: bool = False


def row_scales(side: Side, operand: MXArray) -> SumScale:
    """The block scales of an operand whose blocks are whole along the contracted axes."""
    scale = operand.format.scale
    values = scale_to_float32(operand.scales, scale)
    for axis, size in operand.blocks:
        if isinstance(size, int):
            repeated = jnp.repeat(values, size, axis)
            values = lax.slice_in_dim(repeated, 0, operand.shape[axis], axis=axis)
    return SumScale(side, values, scale.kind == "divisor")


def scaled(sums: jax.Array, call: MatmulCall, *scales: SumScale) -> jax.Array:
    """Float32 sums under their operands' scales; within float32 as long as the result is.

    Each scale multiplies in two halves, all first ones before all second ones: a large scale and a
    small one meet before either has taken the sums out of range. Scales may be subnormal.

    Args:
      sums: `[*batch, *m, *n]`.
      call: the product.
      *scales: in any order.

    Returns:
      `[*batch, *m, *n]`, each scale's significand multiplied with one rounding.
    """
    first, second = [], []
    # Scalars before rows: they meet each other at no cost.
    for scale in sorted(scales, key=lambda scale: not _is_scalar(scale)):
        halves = _halves(_in_product(scale, call), scale.divides)
        for factors, half in zip((first, second), halves, strict=True):
            if factors and factors[-1].ndim == half.ndim == 0:
                half = factors.pop() * half
            factors.append(half)
    # Behind the barrier they are arrays to XLA, and the product stays one kernel: else it spreads
    # a part of their arithmetic to the sums' shape, in memory.
    for factor in lax.optimization_barrier((*first, *second)):
        sums = sums * factor
    return sums


def _is_scalar(scale: SumScale) -> bool:
    return all(length == 1 for length in scale.values.shape)


def _in_product(scale: SumScale, call: MatmulCall) -> jax.Array:
    """A scalar, or scales in the place of the operand's rows in the product."""
    values = scale.values.astype(jnp.float32)
    if _is_scalar(scale):
        return values.reshape(())
    num_m, num_n = len(call.lhs.axes.kept), len(call.rhs.axes.kept)
    if scale.side == "lhs":
        values = lax.squeeze(values, call.lhs.axes.contracting)
        return jnp.expand_dims(values, tuple(range(values.ndim, values.ndim + num_n)))
    values = lax.squeeze(values, call.rhs.axes.contracting)
    return jnp.expand_dims(values, tuple(range(call.num_batch, call.num_batch + num_m)))


def _halves(values: jax.Array, divides: bool) -> tuple[jax.Array, jax.Array]:
    """Two factors of about equal exponents; of zero, Inf and NaN, one is 1."""
    bits = float32.to_bits(values)
    magnitude = bits & float32.ABS
    biased, mantissa = float32.normalize(magnitude)
    ordinary = (magnitude > 0) & (magnitude < float32.INF)
    significand = float32.from_bits(bits & jnp.int32(float32.SIGN) | mantissa | _ONE)
    significand = jnp.where(ordinary, significand, values)
    exponent = jnp.where(ordinary, biased - 127, 0)
    if divides:
        significand, exponent = true_divide(jnp.ones_like(values), significand), -exponent
    half = exponent >> 1
    return significand * float32.power_of_two(half), float32.power_of_two(exponent - half)


_ONE = 127 << 23
