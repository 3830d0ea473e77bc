"""Any dot_general in one axis order, reached by transposes alone, and by none where possible.

lhs becomes `[*batch, *m, *k]` or `[*batch, *k, *m]`, rhs `[*batch, *n, *k]` or `[*batch, *k, *n]`,
and the product is `[*batch, *m, *n]`, dot_general's own order. JAX differentiates the transposes,
so no cotangent needs dimension-number algebra, and kept axes are never merged: merging two sharded
axes would cost an all-gather. An operand whose groups only stand in the other order is left alone:
quantizing a transposed copy costs XLA several times what quantizing along the other axis does.
"""

import dataclasses
from typing import Any

import jax
from jax import lax

from mx_jax.backends.base import AnyOperand
from mx_jax.packed import Quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """How many axes each group of a product has, and in which order the operands hold them.

    Attributes:
      batch: batch axes, first in both operands.
      m: kept axes of lhs.
      n: kept axes of rhs.
      k: contracting axes.
      lhs_k_first: whether lhs is `[*batch, *k, *m]` rather than `[*batch, *m, *k]`.
      rhs_k_first: whether rhs is `[*batch, *k, *n]` rather than `[*batch, *n, *k]`.
    """

    batch: int
    m: int
    n: int
    k: int
    lhs_k_first: bool = False
    rhs_k_first: bool = False

    def filled(self) -> "Groups":
        """The groups of the canonical operands, where no kept group is empty."""
        return dataclasses.replace(self, m=max(self.m, 1), n=max(self.n, 1))

    def grad_lhs(self) -> tuple["Groups", bool]:
        """Groups of the product that gives lhs's cotangent, in lhs's own order.

        With g `[*batch, *m, *n]`: g by rhs if lhs holds m first, rhs by g if it holds k first.

        Returns:
          The groups, and whether g is the left operand.
        """
        rhs_n_first = not self.rhs_k_first
        if self.lhs_k_first:
            return Groups(
                batch=self.batch, m=self.k, n=self.m, k=self.n, lhs_k_first=rhs_n_first
            ), False
        return Groups(batch=self.batch, m=self.m, n=self.k, k=self.n, rhs_k_first=rhs_n_first), True

    def grad_rhs(self) -> tuple["Groups", bool]:
        """Groups of the product that gives rhs's cotangent, in rhs's own order.

        With g `[*batch, *m, *n]`: lhs by g if rhs holds k first, g by lhs if it holds n first.

        Returns:
          The groups, and whether g is the left operand.
        """
        lhs_m_first = not self.lhs_k_first
        if self.rhs_k_first:
            return Groups(
                batch=self.batch,
                m=self.k,
                n=self.n,
                k=self.m,
                lhs_k_first=lhs_m_first,
                rhs_k_first=True,
            ), False
        return Groups(
            batch=self.batch,
            m=self.n,
            n=self.k,
            k=self.m,
            lhs_k_first=True,
            rhs_k_first=lhs_m_first,
        ), True


def canonicalize(
    lhs: AnyOperand, rhs: AnyOperand, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[AnyOperand, AnyOperand, Groups]:
    """Bring both operands into canonical order, transposing only what needs it.

    An operand without kept axes gets one of length one, so that every backward product has an axis
    to contract; `restore` takes it out of the product again.

    Args:
      lhs: values or MXArray.
      rhs: values or MXArray.
      dimension_numbers: as `jax.lax.dot_general` takes them; negative axes are allowed.

    Returns:
      The operands in canonical order and the sizes of the groups.

    Raises:
      ValueError: contracting or batch sizes that differ, repeated or out-of-range axes, or an
        MXArray whose blocks do not lie along the last contracting axis.
    """
    (lhs_k, rhs_k), (lhs_b, rhs_b) = check_dimension_numbers(lhs, rhs, dimension_numbers)
    assert lhs_k, "nothing to lay blocks along: dot_general leaves it to XLA"
    lhs_m, rhs_n = _kept(lhs, lhs_k, lhs_b, "lhs"), _kept(rhs, rhs_k, rhs_b, "rhs")
    lhs, lhs_k_first = _arrange(lhs, lhs_b, lhs_m, lhs_k, "lhs")
    rhs, rhs_k_first = _arrange(rhs, rhs_b, rhs_n, rhs_k, "rhs")
    groups = Groups(
        batch=len(lhs_b),
        m=len(lhs_m),
        n=len(rhs_n),
        k=len(lhs_k),
        lhs_k_first=lhs_k_first,
        rhs_k_first=rhs_k_first,
    )
    return lhs, rhs, groups


def check_dimension_numbers(
    lhs: AnyOperand, rhs: AnyOperand, dimension_numbers: lax.DotDimensionNumbers
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


def restore(product: jax.Array, groups: Groups) -> jax.Array:
    """Drop the axes of length one that `canonicalize` gave to empty groups."""
    drop = [groups.batch] * (not groups.m)
    drop += [groups.batch + max(groups.m, 1)] * (not groups.n)
    return lax.squeeze(product, drop) if drop else product


def _axes(axes: Any, operand: AnyOperand, side: str) -> tuple[int, ...]:
    axes = tuple(int(axis) for axis in axes)
    for axis in axes:
        if not -operand.ndim <= axis < operand.ndim:
            raise ValueError(
                f"dot_general: axis={axis} is out of range for {side} of shape={operand.shape}"
            )
    return tuple(axis % operand.ndim for axis in axes)


def _check_pairs(
    what: str,
    lhs: AnyOperand,
    rhs: AnyOperand,
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
    operand: AnyOperand,
    batch: tuple[int, ...],
    kept: tuple[int, ...],
    contracting: tuple[int, ...],
    side: str,
) -> tuple[AnyOperand, bool]:
    """The operand as `[*batch, *kept, *k]`, or `[*batch, *k, *kept]` if it is that already."""
    if isinstance(operand, Quantized):
        _check_blocks(operand, contracting[-1], side)
    as_it_is = tuple(range(operand.ndim))
    if kept and (*batch, *contracting, *kept) == as_it_is:
        return operand, True
    order = (*batch, *kept, *contracting)
    if order != as_it_is:
        operand = operand.transpose(order)
    if not kept:
        operand = operand[(slice(None),) * len(batch) + (None,)]
    return operand, False


def _check_blocks(operand: Quantized, wanted: int, side: str) -> None:
    """An MXArray's scales can leave the sum only if its blocks lie along the contracting axis."""
    blocked = [axis % operand.ndim for axis, _ in operand.blocks]
    if wanted not in blocked:
        raise ValueError(
            f"dot_general: {side} is contracted along axis={wanted}, but this MXArray "
            f"({operand.format.name}, shape={operand.shape}) has its blocks along "
            f"axis={', '.join(map(str, blocked))}; quantize it with axis={wanted}, or pass "
            f"{side}.dequantize()"
        )
