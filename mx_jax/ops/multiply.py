"""One product of prepared operands in canonical order: select a backend, run it."""

import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax import lax

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType
from mx_jax.backends.select import select
from mx_jax.codecs.explicit_axes import has_explicit_axes
from mx_jax.mxarray import MXArray
from mx_jax.ops.explicit_axes import packed_by_shards
from mx_jax.ops.partition import is_split, multiply_split, part_choice
from mx_jax.ops.unpacking import tell_of_packing, unpacked_for
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
    )
    return _by_choice(lhs, rhs, call, stored, split)


def _by_choice(
    lhs: AnyOperand, rhs: AnyOperand, call: MatmulCall, stored: Collection[Side], split: bool
) -> jax.Array:
    """A call by who takes it."""
    choice = select(call)
    if choice.target.num_devices > 1 and (part := part_choice(rhs, call, choice)) is not None:
        return multiply_split(unpacked(lhs), rhs, call, part)
    sides: tuple[tuple[Side, AnyOperand], ...] = ("lhs", lhs), ("rhs", rhs)
    for side, operand in sides:
        if side in stored and isinstance(operand, MXArray):
            tell_of_packing(operand, call, choice, side=side)
    if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
        rhs = unpacked_for(rhs, choice)
    lhs = unpacked(lhs)
    if split and not jax.sharding.get_abstract_mesh().empty and is_split(rhs, call, choice):
        return multiply_split(lhs, rhs, call, choice)
    return choice.offer.run(lhs, rhs, call)
