"""A product under vmap as one product of more axes, so that devices split it as any other."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mx_jax.axes import Axes
from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


class Batched(NamedTuple):
    """One product that stands for many.

    Attributes:
      lhs: with the batch among its axes, if it has one.
      rhs: likewise.
      call: of these.
      axis: of the product that counts the batch.
    """

    lhs: AnyOperand
    rhs: AnyOperand
    call: MatmulCall
    axis: int


def batched(
    tree: Any, call: MatmulCall, size: int, in_batched: Sequence[bool], leaves: Sequence[jax.Array]
) -> Batched:
    """The product whose batch both operands have, or which keeps the batch of one.

    Args:
      tree: of both operands.
      call: of one product.
      size: how many there are.
      in_batched: which leaves have the batch in front.
      leaves: of both operands.
    """
    lhs, rhs = jax.tree.unflatten(tree, leaves)
    of_lhs, of_rhs = map(jax.tree.leaves, jax.tree.unflatten(tree, in_batched))
    if any(of_rhs) and (any(of_lhs) or isinstance(rhs, PackedMXArray)):
        lhs, rhs = _filled(lhs, of_lhs, size), _filled(rhs, of_rhs, size)
        left, right = call.lhs.axes.in_batch(), call.rhs.axes.in_batch()
        return Batched(lhs, rhs, _typed(call, lhs, rhs, left, right), 0)
    axis = len(call.lhs.axes.batch)
    if any(of_lhs):
        lhs, left = _kept(_filled(lhs, of_lhs, size), call.lhs.axes)
        return Batched(lhs, rhs, _typed(call, lhs, rhs, left, call.rhs.axes), axis)
    rhs, right = _kept(_filled(rhs, of_rhs, size), call.rhs.axes)
    axis += len(call.lhs.axes.kept)
    return Batched(lhs, rhs, _typed(call, lhs, rhs, call.lhs.axes, right), axis)


def _typed(
    call: MatmulCall, lhs: AnyOperand, rhs: AnyOperand, left: Axes, right: Axes
) -> MatmulCall:
    return dataclasses.replace(call, lhs=OperandType.of(lhs, left), rhs=OperandType.of(rhs, right))


def _filled(operand: Any, in_batched: Sequence[bool], size: int) -> Any:
    """An operand each of whose arrays has the batch; of a tensor scale that all share, once."""
    leaves, tree = jax.tree.flatten(operand)
    packed = isinstance(operand, PackedMXArray)
    shared = not packed and len(leaves) == 3
    filled = [
        leaf
        if own
        else leaf[None]
        if shared and number == 2
        else jnp.broadcast_to(leaf, (size, *leaf.shape))
        for number, (leaf, own) in enumerate(zip(leaves, in_batched, strict=True))
    ]
    return jax.tree.unflatten(tree, filled)


def _kept(operand: Any, axes: Axes) -> tuple[Any, Axes]:
    """An operand that keeps its batch as the first of the axes that the product has from it."""
    first = min(axes.kept or axes.contracting)
    order = (*range(1, first + 1), 0, *range(first + 1, axes.ndim + 1))
    moved = operand.transpose(order)
    if isinstance(operand, MXArray):
        moved = dataclasses.replace(moved, primal=None)
    return moved, Axes.ordered(
        batch=len(axes.batch),
        kept=len(axes.kept) + 1,
        contracting=len(axes.contracting),
        k_first=axes.k_first,
    )
