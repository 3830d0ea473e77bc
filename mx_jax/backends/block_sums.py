"""Products whose float32 scales change along the contracted axis: block by block, then scaled.

`C = sum over blocks of s_a s_b (sum over the block of a_code b_code)`: a block's codes are
bfloat16, and its sums take its scales before they are added.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.sums import SumScale, scaled
from mx_jax.codecs import blocks
from mx_jax.mxarray import MXArray


class BlockScales(NamedTuple):
    """Float32 scales of an operand's blocks.

    Attributes:
      side: whose.
      values: of the operand's shape, but for the contracted axis, which counts blocks.
      divides: whether the sums are divided.
    """

    side: Side
    values: jax.Array
    divides: bool


def block_scales(side: Side, operand: MXArray, contracting: int) -> BlockScales:
    """The scales of an operand's blocks, each as often as there are rows that share it."""
    values = operand.scales
    for axis, size in operand.blocks:
        axis %= operand.ndim
        if axis != contracting and isinstance(size, int):
            repeated = jnp.repeat(values, size, axis)
            values = lax.slice_in_dim(repeated, 0, operand.shape[axis], axis=axis)
        elif axis != contracting:
            shape = list(values.shape)
            shape[axis] = operand.shape[axis]
            values = jnp.broadcast_to(values, shape)
    return BlockScales(side, values, operand.format.scale.kind == "divisor")


def blockwise_dot(
    lhs: jax.Array, rhs: jax.Array, size: int, scales: Sequence[BlockScales], call: MatmulCall
) -> jax.Array:
    """Float32 `[*batch, *m, *n]` of bfloat16 operands, one contracted axis each.

    As many blocks at a time as leave their sums smaller than the operands; then the next ones.

    Args:
      lhs: values without the scales.
      rhs: likewise.
      size: of the blocks along the contracted axes.
      scales: of one operand or of both, in blocks of this size.
      call: the product.
    """
    axis = {side: own.axes.contracting[0] for side, own in call.sides}
    operands = tuple(_blocks_first(x, axis[side], size) for x, side in ((lhs, "lhs"), (rhs, "rhs")))
    count = operands[0].shape[0]
    entries = math.prod(call.lhs.shape) * call.rhs.rows // max(lhs.shape[axis["lhs"]], 1)
    together = max(1, min(count, (lhs.size + rhs.size) // max(entries, 1)))
    together = max(n for n in range(1, together + 1) if count % n == 0)
    factors = tuple(_placed(each, axis[each.side], call) for each in scales)

    def sums(left: jax.Array, right: jax.Array, factors: tuple[jax.Array, ...]) -> jax.Array:
        kinds = (each.divides for each in scales)
        dots = _dots(left, right, call)
        return scaled(dots, *map(SumScale, factors, kinds)).sum(axis=0)

    parts = jax.tree.map(
        lambda x: x.reshape(count // together, together, *x.shape[1:]), (*operands, factors)
    )
    if count == together:
        return sums(*jax.tree.map(lambda x: x[0], parts))
    shape = jax.eval_shape(sums, *jax.tree.map(lambda x: x[0], parts))
    start = jnp.zeros(shape.shape, shape.dtype)
    return lax.scan(lambda total, part: (total + sums(*part), None), start, parts)[0]


def _blocks_first(x: jax.Array, axis: int, size: int) -> jax.Array:
    """`[blocks, ...]`, each a piece of the axis; the last is filled up with zeros."""
    pieces, _ = blocks.split(x, ((axis - x.ndim, size),), fill=True)
    return jnp.moveaxis(pieces, axis, 0)


def _placed(scales: BlockScales, axis: int, call: MatmulCall) -> jax.Array:
    """`[blocks, *batch, *m, *n]` with ones in the place of the other operand's axes."""
    values = jnp.moveaxis(scales.values, axis, 0)
    num_m, num_n = len(call.lhs.axes.kept), len(call.rhs.axes.kept)
    if scales.side == "lhs":
        return jnp.expand_dims(values, tuple(range(values.ndim, values.ndim + num_n)))
    first = 1 + call.num_batch
    return jnp.expand_dims(values, tuple(range(first, first + num_m)))


def _dots(left: jax.Array, right: jax.Array, call: MatmulCall) -> jax.Array:
    """The product of each block alone."""
    axes = ProductAxes(call.lhs.axes.in_batch(), call.rhs.axes.in_batch())
    return lax.dot_general(
        left,
        right,
        axes.dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
