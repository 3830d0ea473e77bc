"""Scales that leave the sums of a product: one for each row of an operand, or one for all of it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, Operand, PackCall
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import varying_axes
from mx_jax.codecs.float32 import select
from mx_jax.codecs.scale import scale_to_float32, true_divide
from mx_jax.mxarray import MXArray


class SumScale(NamedTuple):
    """What sums are multiplied or divided by: float32 that broadcasts to them."""

    values: jax.Array
    divides: bool = False


def row_scales(side: Side, operand: MXArray, call: MatmulCall) -> SumScale:
    """The block scales of an operand whose blocks are whole along the contracted axes."""
    scale = operand.format.scale
    values = scale_to_float32(operand.scales, scale)
    for axis, size in operand.blocks:
        if isinstance(size, int):
            # As often as there are rows that share one.
            values = jnp.repeat(values, size, axis)
            values = lax.slice_in_dim(values, 0, operand.shape[axis], axis=axis)
    return SumScale(_in_product(side, values, call), scale.kind == "divisor")


def tensor_scale(side: Side, operand: MXArray, call: MatmulCall) -> tuple[SumScale, ...]:
    """The tensor scale of an operand, if it has one: the same along the contracted axes."""
    values = operand.tensor_scale
    return () if values is None else (SumScale(_in_product(side, values, call)),)


def without_row_scales(
    lhs: AnyOperand, rhs: AnyOperand, axes: ProductAxes, by_row: Sequence[bool]
) -> tuple[AnyOperand, AnyOperand, list[SumScale]]:
    """Both operands, those by row under a tensor scale of 1, and the scales of their rows."""
    operands, scales, groups = [lhs, rhs], [], (axes.lhs, axes.rhs)
    for at, (x, x_axes) in enumerate(zip((lhs, rhs), groups, strict=True)):
        # Where experts are in front, which of them a row of the sums has is data.
        if not by_row[at] or not isinstance(x, MXArray) or x.ndim != x_axes.ndim:
            continue
        if (values := x.tensor_scale) is None:
            continue
        if not set(varying_axes(values)) & set(x_axes.contracting):
            # One row as well: its numbers are those that it has among others.
            rows = lax.squeeze(values, x_axes.contracting)
            first, count = len(x_axes.batch) if at else rows.ndim, len(groups[1 - at].kept)
            scales.append(SumScale(jnp.expand_dims(rows, tuple(range(first, first + count)))))
            ones = jnp.ones((1,) * x.ndim, jnp.float32)
            operands[at] = dataclasses.replace(x, tensor_scale=ones)
    return operands[0], operands[1], scales


def _in_product(side: Side, values: jax.Array, call: MatmulCall) -> jax.Array:
    """A scalar, or one number for each row in the place of the operand's rows."""
    if all(length == 1 for length in values.shape):
        return values.reshape(())
    operand, other = (call.lhs, call.rhs) if side == "lhs" else (call.rhs, call.lhs)
    if any(values.shape[axis] == 0 for axis in operand.axes.contracting):
        return jnp.ones((), values.dtype)  # nothing is summed: no blocks, and zero under any scale
    values = lax.squeeze(values, operand.axes.contracting)
    first = values.ndim if side == "lhs" else call.num_batch
    return jnp.expand_dims(values, tuple(range(first, first + len(other.axes.kept))))


def scaled(sums: jax.Array, *scales: SumScale) -> jax.Array:
    """Float32 sums under their operands' scales; within float32 as long as the result is."""
    # Each scale multiplies in two halves, all first ones before all second ones: a large and a
    # small one meet before either has taken the sums out of range. Scales may be subnormal.
    first, second = [], []
    # Scalars before rows: they meet each other at no cost.
    for scale in sorted(scales, key=lambda scale: scale.values.ndim > 0):
        halves = _halves(scale.values, scale.divides)
        for factors, half in zip((first, second), halves, strict=True):
            if factors and factors[-1].ndim == half.ndim == 0:
                half = float32.mul(factors.pop(), half)
            factors.append(half)
    # Behind the barrier they are arrays to XLA, and the product stays one kernel: else it spreads
    # a part of their arithmetic to the sums' shape, in memory.
    return _product(sums, *lax.optimization_barrier((*first, *second)))


def _product(*factors: jax.Array) -> jax.Array:
    return functools.reduce(float32.mul, factors)


def _halves(values: jax.Array, divides: bool) -> tuple[jax.Array, jax.Array]:
    """Two factors of about equal exponents; of zero, Inf and NaN, one is 1."""
    bits = float32.float32_bits(values)
    magnitude = float32.bitwise_and(bits, float32.ABS)
    biased, mantissa = float32.split_exponent_mantissa(magnitude)
    ordinary = float32.gt(magnitude, 0)
    ordinary = float32.bitwise_and(ordinary, float32.lt(magnitude, float32.INF))
    sign = float32.bitwise_and(bits, float32.SIGN)
    one = 127 << 23
    significand = float32.bitwise_or(float32.bitwise_or(sign, mantissa), one)
    significand = select(ordinary, float32.from_bits(significand), values)
    exponent = select(ordinary, float32.sub(biased, 127), 0)
    if divides:
        significand = true_divide(lax.full_like(values, 1), significand)
        exponent = lax.neg(exponent)
    half = float32.shift_right(exponent, 1)
    rest = float32.power_of_two(float32.sub(exponent, half))
    return float32.mul(significand, float32.power_of_two(half)), rest


def as_matrices(operand: Operand, axes: Axes) -> tuple[Operand, tuple[int, ...]]:
    """An operand as `[batch, kept, k]`, blocks last, tensor scale `(1, 1, 1)`; its kept lengths."""

    def arrange(array: jax.Array) -> jax.Array:
        sizes = tuple(math.prod(group) for group in axes.sizes(array.shape))
        return array.transpose(*axes.batch, *axes.kept, *axes.contracting).reshape(sizes)

    _, lengths, _ = axes.sizes(operand.shape)
    if not isinstance(operand, MXArray):
        return arrange(operand), lengths
    tensor_scale = operand.tensor_scale
    matrices = MXArray(
        codes=arrange(operand.codes),
        scales=arrange(operand.scales),
        tensor_scale=None if tensor_scale is None else tensor_scale.reshape(1, 1, 1),
        format=operand.format,
        blocks=((-1, operand.format.block[1]),),
        dtype=operand.dtype,
    )
    return matrices, lengths


def without_tensor_scale(x: MXArray) -> MXArray:
    """Codes and block scales alone: what is left once the tensor scale goes elsewhere."""
    format = dataclasses.replace(x.format, tensor_scale=False)
    return dataclasses.replace(x, tensor_scale=None, format=format)


def rejects_parts_of_blocks(
    call: MatmulCall, group: Literal["kept", "contracting"] = "contracting"
) -> str | None:
    """Why axes of a group cannot be merged: blocks that end within them. None if they can."""
    for side, operand in call.sides:
        axes: tuple[int, ...] = getattr(operand.axes, group)
        block = None if operand.format is None else operand.format.block[group == "contracting"]
        length = operand.shape[axes[-1]] if len(axes) > 1 else 0
        if not isinstance(block, int) or block == 1:
            continue
        # How many whole blocks a symbolic length has is not known.
        if not isinstance(length, int) or length % block:
            return (
                f"needs the last of several {group} axes in whole blocks of {block}, got "
                f"{side}_shape={operand.shape}, {group}={axes}"
            )
    return None


def rejects_scale_axes(call: MatmulCall | PackCall, *, batch: bool) -> str | None:
    """Why tensor scales cannot leave the sums, or None."""
    operands = (call.weights,) if isinstance(call, PackCall) else (call.lhs, call.rhs)
    for operand in operands:
        if any(axis >= len(operand.axes.batch) * batch for axis in operand.scale_axes):
            each = "a matrix" if batch else "an operand"
            axes = operand.scale_axes
            return f"needs one tensor scale {each}, got one for each position of axes={axes}"
    return None
