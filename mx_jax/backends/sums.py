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
    halves = [_halves(scale, call) for scale in scales]
    for first, _ in halves:
        sums = sums * first
    for _, second in halves:
        sums = sums * second
    return sums


def _halves(scale: SumScale, call: MatmulCall) -> tuple[jax.Array, jax.Array]:
    """Two factors of about equal exponents, in the place of the operand's rows in the product."""
    own = call.lhs if scale.side == "lhs" else call.rhs
    values = lax.squeeze(scale.values.astype(jnp.float32), own.axes.contracting)
    num_m, num_n = len(call.lhs.axes.kept), len(call.rhs.axes.kept)
    if scale.side == "lhs":
        values = jnp.expand_dims(values, tuple(range(values.ndim, values.ndim + num_n)))
    else:
        values = jnp.expand_dims(values, tuple(range(call.num_batch, call.num_batch + num_m)))
    bits = float32.to_bits(values)
    magnitude = bits & float32.ABS
    biased, mantissa = float32.normalize(magnitude)
    ordinary = (magnitude > 0) & (magnitude < float32.INF)
    significand = float32.from_bits(bits & jnp.int32(float32.SIGN) | mantissa | _ONE)
    # Zero, Inf and NaN have no exponent to halve.
    significand = jnp.where(ordinary, significand, values)
    exponent = jnp.where(ordinary, biased - 127, 0)
    if scale.divides:
        significand, exponent = true_divide(jnp.ones_like(values), significand), -exponent
    first = exponent >> 1
    return significand * _power(first), _power(exponent - first)


def _power(exponent: jax.Array) -> jax.Array:
    """`2^exponent`, of a normal number."""
    return float32.from_bits((exponent + 127) << 23)


_ONE = 127 << 23
