"""Operands of a product as batches of matrices: what kernels with three axes share."""

import math
from typing import Literal

import jax

from mx_jax.backends.base import MatmulCall, Operand, PackCall
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray


def as_matrices(
    operand: Operand, num_batch: int, contracting: tuple[int, ...]
) -> tuple[Operand, tuple[int, ...]]:
    """An operand as `[batch, kept, k]`, and the lengths of its kept axes.

    Args:
      operand: `[*batch, *kept, *k]` or `[*batch, *k, *kept]`; an MXArray has blocks along the last
        axis of k, whole ones if k has several axes.
      num_batch: how many leading axes are batch axes.
      contracting: the axes of k.

    Returns:
      The operand with blocks along its last axis, and a tensor scale of shape `(1, 1, 1)` if it had
      one.
    """
    batch = tuple(range(num_batch))
    kept = tuple(axis for axis in range(num_batch, operand.ndim) if axis not in contracting)

    def arrange(array: jax.Array) -> jax.Array:
        sizes = (math.prod(array.shape[axis] for axis in g) for g in (batch, kept, contracting))
        return array.transpose(*batch, *kept, *contracting).reshape(tuple(sizes))

    lengths = tuple(operand.shape[axis] for axis in kept)
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


def rejects_parts_of_blocks(call: MatmulCall) -> str | None:
    """Why contracted axes cannot be merged: blocks that end within them. None if they can."""
    sides: tuple[tuple[Literal["lhs", "rhs"], tuple[int, ...], BlockFormat | None], ...] = (
        ("lhs", call.lhs_shape, call.lhs_format),
        ("rhs", call.rhs_shape, call.rhs_format),
    )
    for side, shape, format in sides:
        axes = call.contracting_axes(side)
        block = None if format is None else format.block[1]
        if isinstance(block, int) and len(axes) > 1 and shape[axes[-1]] % block:
            return (
                f"needs the last of several contracted axes in whole blocks of {block}, got "
                f"{side}_shape={shape}, contracting={axes}"
            )
    return None


def rejects_scale_axes(call: MatmulCall | PackCall, *, batch: bool) -> str | None:
    """Why tensor scales cannot leave the sums, or None.

    Args:
      call: a product, or weights for one.
      batch: whether each matrix of a batch may have a tensor scale of its own.
    """
    allowed = call.num_batch if batch else 0
    given = (
        (call.scale_axes,)
        if isinstance(call, PackCall)
        else (call.lhs_scale_axes, call.rhs_scale_axes)
    )
    for axes in given:
        if any(axis >= allowed for axis in axes):
            each = "a matrix" if batch else "an operand"
            return f"needs one tensor scale {each}, got one for each position of axes={axes}"
    return None
