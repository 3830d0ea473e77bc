"""Any dot_general in one axis order, reached by transposes alone, and by none where possible.

lhs becomes `[*batch, *m, *k]` or `[*batch, *k, *m]`, rhs `[*batch, *n, *k]` or `[*batch, *k, *n]`,
and the product is `[*batch, *m, *n]`, dot_general's own order. JAX differentiates the transposes,
so no cotangent needs dimension-number algebra, and kept axes are never merged: merging two sharded
axes would cost an all-gather. An operand whose groups only stand in the other order is left alone:
quantizing a transposed copy costs XLA several times what quantizing along the other axis does.
"""

from typing import Any

from jax import lax

from mx_jax.axes import Axes, ProductAxes
from mx_jax.backends.calls import AnyOperand
from mx_jax.packed import Quantized
from mx_jax.sharding.movement import STAY, Movement, Moves, as_gathered


def canonicalize(
    lhs: AnyOperand,
    rhs: AnyOperand,
    dimension_numbers: lax.DotDimensionNumbers,
    moves: Moves = STAY,
) -> tuple[AnyOperand, AnyOperand, ProductAxes, tuple[int, ...], Moves]:
    """Bring both operands into canonical order, transposing only what needs it.

    An operand without kept axes gets one of length one, so that every backward product has an axis
    to contract; it comes out of the product again.

    Args:
      lhs: values or MXArray.
      rhs: values or MXArray.
      dimension_numbers: as `jax.lax.dot_general` takes them; negative axes are allowed.
      moves: how the operands get to the product.

    Returns:
      The operands in canonical order, their axes, the axes of the product that have length one
      because an operand had no kept axes, which `jax.lax.squeeze` takes out, and how the operands
      in their new order get to the product.

    Raises:
      ValueError: contracting or batch sizes that differ, repeated or out-of-range axes, or an
        MXArray whose blocks do not lie along the last contracting axis.
    """
    left, right = lhs, rhs
    if moves != STAY:
        left, right = as_gathered(lhs, moves[0]), as_gathered(rhs, moves[1])
    (lhs_k, rhs_k), (lhs_b, rhs_b) = check_dimension_numbers(left, right, dimension_numbers)
    assert lhs_k, "nothing to lay blocks along: dot_general leaves it to XLA"
    lhs_m, rhs_n = _kept(lhs, lhs_k, lhs_b, "lhs"), _kept(rhs, rhs_k, rhs_b, "rhs")
    lhs, left, lhs_move = _arrange(lhs, Axes(lhs_b, lhs_m, lhs_k), "lhs", moves[0])
    rhs, right, rhs_move = _arrange(rhs, Axes(rhs_b, rhs_n, rhs_k), "rhs", moves[1])
    first_n = len(lhs_b) + len(left.kept)
    empty = (len(lhs_b),) * (not lhs_m) + (first_n,) * (not rhs_n)
    return lhs, rhs, ProductAxes(left, right), empty, (lhs_move, rhs_move)


def check_dimension_numbers(
    lhs: Any, rhs: Any, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[Any, Any]:
    """Dimension numbers with non-negative axes, checked against both shapes.

    Raises:
      ValueError: contracting or batch sizes that differ, or axes out of range.
    """
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
    lhs_k, lhs_b = _axes(lhs_k, lhs, "lhs"), _axes(lhs_b, lhs, "lhs")
    rhs_k, rhs_b = _axes(rhs_k, rhs, "rhs"), _axes(rhs_b, rhs, "rhs")
    _check_pairs("contracting", lhs, rhs, lhs_k, rhs_k)
    _check_pairs("batch", lhs, rhs, lhs_b, rhs_b)
    return (lhs_k, rhs_k), (lhs_b, rhs_b)


def _axes(axes: Any, operand: Any, side: str) -> tuple[int, ...]:
    axes = tuple(int(axis) for axis in axes)
    for axis in axes:
        if not -operand.ndim <= axis < operand.ndim:
            raise ValueError(
                f"dot_general: axis={axis} is out of range for {side} of shape={operand.shape}"
            )
    return tuple(axis % operand.ndim for axis in axes)


def _check_pairs(
    what: str,
    lhs: Any,
    rhs: Any,
    lhs_axes: tuple[int, ...],
    rhs_axes: tuple[int, ...],
) -> None:
    left = tuple(lhs.shape[axis] for axis in lhs_axes)
    right = tuple(rhs.shape[axis] for axis in rhs_axes)
    if left != right:
        raise ValueError(
            f"dot_general: {what} sizes must agree, got lhs.shape={lhs.shape} with "
            f"{what} axes {lhs_axes} of sizes {left} and rhs.shape={rhs.shape} with {what} axes "
            f"{rhs_axes} of sizes {right}"
        )


def _kept(
    operand: AnyOperand, contracting: tuple[int, ...], batch: tuple[int, ...], side: str
) -> tuple[int, ...]:
    used = (*contracting, *batch)
    if len(set(used)) != len(used):
        raise ValueError(
            f"dot_general: each axis of {side} may appear once, got contracting={contracting} "
            f"and batch={batch}"
        )
    return tuple(axis for axis in range(operand.ndim) if axis not in used)


def _arrange(
    operand: AnyOperand, axes: Axes, side: str, move: Movement | None
) -> tuple[AnyOperand, Axes, Movement | None]:
    """The operand as `[*batch, *kept, *k]`, or `[*batch, *k, *kept]` if it is that already."""
    if isinstance(operand, Quantized):
        check_blocks(operand, axes.contracting[-1], side)
    batch, kept, k = (len(group) for group in (axes.batch, axes.kept, axes.contracting))
    if axes.is_canonical and kept:
        return operand, axes, move
    order = (*axes.batch, *axes.kept, *axes.contracting)
    if order != tuple(range(axes.ndim)):
        operand = operand.transpose(order)
    if not kept:
        operand = operand[(slice(None),) * batch + (None,)]
    if move is not None:
        move = move.transposed(order, None if kept else batch)
    return operand, Axes.ordered(batch=batch, kept=max(kept, 1), contracting=k), move


def check_blocks(
    operand: Quantized, wanted: int, side: str, operation: str = "dot_general"
) -> None:
    """An MXArray's scales can leave the sum only if its blocks lie along the contracting axis."""
    blocked = [axis % operand.ndim for axis, _ in operand.blocks]
    if wanted not in blocked:
        raise ValueError(
            f"{operation}: {side} is contracted along axis={wanted}, but this MXArray "
            f"({operand.format.name}, shape={operand.shape}) has its blocks along "
            f"axis={', '.join(map(str, blocked))}; quantize it with axis={wanted}, or pass "
            f"{side}.dequantize()"
        )
