"""Operands of a product as batches of matrices: what kernels with three axes share."""

import dataclasses
import math

import jax

from mx_jax.axes import Axes
from mx_jax.backends.calls import MatmulCall, Operand, PackCall
from mx_jax.mxarray import MXArray


def as_matrices(operand: Operand, axes: Axes) -> tuple[Operand, tuple[int, ...]]:
    """An operand as `[batch, kept, k]`, and the lengths of its kept axes.

    Args:
      operand: values, or an MXArray with blocks along the last axis of k, whole ones if k has
        several axes.
      axes: its axes, in canonical order.

    Returns:
      The operand with blocks along its last axis, and a tensor scale of shape `(1, 1, 1)` if it had
      one.
    """

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


def rejects_parts_of_blocks(call: MatmulCall) -> str | None:
    """Why contracted axes cannot be merged: blocks that end within them. None if they can."""
    for side, own in call.sides:
        axes = own.axes.contracting
        block = None if own.format is None else own.format.block[1]
        if isinstance(block, int) and len(axes) > 1 and own.shape[axes[-1]] % block:
            return (
                f"needs the last of several contracted axes in whole blocks of {block}, got "
                f"{side}_shape={own.shape}, contracting={axes}"
            )
    return None


def rejects_scale_axes(call: MatmulCall | PackCall, *, batch: bool) -> str | None:
    """Why tensor scales cannot leave the sums, or None.

    Args:
      call: a product, or weights for one.
      batch: whether each matrix of a batch may have a tensor scale of its own.
    """
    operands = (call.weights,) if isinstance(call, PackCall) else (call.lhs, call.rhs)
    for own in operands:
        if any(axis >= len(own.axes.batch) * batch for axis in own.scale_axes):
            each = "a matrix" if batch else "an operand"
            return (
                f"needs one tensor scale {each}, got one for each position of axes={own.scale_axes}"
            )
    return None
