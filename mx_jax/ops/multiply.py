"""One product of prepared operands in canonical order: select a backend, run it."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax import lax

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType
from mx_jax.backends.primitive import bind, choose, compiler_splits
from mx_jax.backends.records import active
from mx_jax.mxarray import MXArray
from mx_jax.ops.packing import tell_of_packing, unpacked_for
from mx_jax.ops.placing import twice
from mx_jax.packed import PackedMXArray, Quantized, unpacked
from mx_jax.sharding.movement import reduced_in


def multiply(
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    out_dtype: np.dtype,
    *,
    precision: Any = None,
    fast_accumulation: bool = False,
    out_sharding: Any = None,
    stored: Collection[Side] = (),
    split: bool = True,
    reduce_dtype: np.dtype | None = None,
) -> jax.Array:
    """Two canonical operands to `[*batch, *m, *n]`, as they are.

    Args:
      lhs: quantized, or values that stay in high precision.
      rhs: likewise.
      axes: of both operands, in canonical order.
      out_dtype: dtype of the product.
      precision: for high-precision operands.
      fast_accumulation: whether a native kernel may add in lower precision.
      out_sharding: of the product, on a mesh with explicit axes.
      stored: which sides came quantized, so that weights could have come packed.
      split: whether codes move where the compiler, on automatic mesh axes, has to move an operand.
      reduce_dtype: in which devices add up what each has of the sums, if wider than `out_dtype`.

    Returns:
      `[*batch, *m, *n]`.
    """
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        return lax.dot_general(
            lhs,
            rhs,
            axes.dimension_numbers,
            precision=precision,
            preferred_element_type=reduced_in(out_dtype, reduce_dtype),
            out_sharding=out_sharding,
        ).astype(out_dtype)
    call = MatmulCall(
        lhs=OperandType.of(lhs, axes.lhs),
        rhs=OperandType.of(rhs, axes.rhs),
        out_dtype=out_dtype,
        precision=precision,
        fast_accumulation=fast_accumulation,
        out_sharding=out_sharding,
        moves_codes=split,
        reduce_dtype=reduce_dtype,
    )
    if not stored and not isinstance(rhs, PackedMXArray) and active.value is None:
        return bind(call, unpacked(lhs), rhs)
    choice = choose(call)
    sides: tuple[tuple[Side, AnyOperand], ...] = ("lhs", lhs), ("rhs", rhs)
    for side, operand in sides:
        if side in stored and isinstance(operand, MXArray):
            tell_of_packing(operand, call, choice, side=side)
    whole = isinstance(rhs, PackedMXArray) and rhs.layout.cut is None and compiler_splits()
    if isinstance(rhs, PackedMXArray) and (whole or rhs.backend != choice.backend.name):
        rhs = unpacked_for(rhs, choice)
        call = dataclasses.replace(call, rhs=OperandType.of(rhs, axes.rhs))
    if (recorder := active.value) is not None and split and compiler_splits():
        recorder.entries.append(_moves(lhs, rhs, call))
    return choice.offer.run(unpacked(lhs), rhs, call)


def _moves(lhs: AnyOperand, rhs: AnyOperand, call: MatmulCall) -> str:
    """What `explain` says of a product that the compiler splits."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    what = "whole tiles" if isinstance(rhs, PackedMXArray) else "codes and scales"
    return (
        f"operands of lhs.shape={call.lhs.shape}, rhs.shape={call.rhs.shape} -> {what}, where "
        f"the compiler moves them along mesh axes={axes}{twice(lhs)}{twice(rhs)}; parts of the "
        f"product are added up in {reduced_in(call.out_dtype, call.reduce_dtype)}"
    )
