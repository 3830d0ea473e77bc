"""One product of prepared operands in canonical order: select a backend, run it."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax import lax

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType
from mx_jax.backends.primitive import bind, choose, compiler_splits
from mx_jax.backends.records import active
from mx_jax.codecs.explicit_axes import has_explicit_axes
from mx_jax.mxarray import MXArray
from mx_jax.ops.explicit_axes import packed_by_shards
from mx_jax.ops.packing import tell_of_packing, unpacked_for
from mx_jax.ops.placing import twice
from mx_jax.packed import PackedMXArray, Quantized, unpacked


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

    Returns:
      `[*batch, *m, *n]`.
    """
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        return lax.dot_general(
            lhs,
            rhs,
            axes.dimension_numbers,
            precision=precision,
            preferred_element_type=out_dtype,
            out_sharding=out_sharding,
        )
    if isinstance(rhs, PackedMXArray) and has_explicit_axes() and rhs.layout.cut is not None:
        local = functools.partial(
            multiply, axes=axes, precision=precision, fast_accumulation=fast_accumulation
        )
        return packed_by_shards(local, unpacked(lhs), rhs, axes, out_dtype, out_sharding)
    call = MatmulCall(
        lhs=OperandType.of(lhs, axes.lhs),
        rhs=OperandType.of(rhs, axes.rhs),
        out_dtype=out_dtype,
        precision=precision,
        fast_accumulation=fast_accumulation,
        out_sharding=out_sharding,
        moves_codes=split,
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
        f"the compiler moves them along mesh axes={axes}{twice(lhs)}{twice(rhs)}"
    )
