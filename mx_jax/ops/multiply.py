"""One quantized product in canonical order: quantize, select a backend, run it."""

from typing import Any

import jax
import numpy as np
from jax import lax

from mx_jax.axes import ProductAxes
from mx_jax.backends.base import AnyOperand, MatmulCall, OperandType
from mx_jax.backends.select import current_target, select
from mx_jax.ops.keys import Key
from mx_jax.ops.operands import prepare, transform_operands, unscaled
from mx_jax.ops.unpacking import unpacked_for
from mx_jax.packed import PackedMXArray, Quantized, unpacked
from mx_jax.specs import MatmulSpec


def quantized_matmul(
    lhs: AnyOperand,
    rhs: AnyOperand,
    spec: MatmulSpec,
    axes: ProductAxes,
    out_dtype: np.dtype,
    precision: Any = None,
    key: Key = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Two canonical operands to `[*batch, *m, *n]`: quantize, select a backend, run it.

    Args:
      lhs: values, quantized here as spec.lhs says, or an MXArray, taken as it is.
      rhs: likewise, by spec.rhs.
      spec: formats of the two operands.
      axes: of both operands, in canonical order.
      out_dtype: dtype of the product.
      precision: for high-precision operands.
      key: PRNG key if the spec rounds stochastically.
      out_sharding: of the product, on a mesh with explicit axes.

    Returns:
      `[*batch, *m, *n]`.
    """
    given = lhs, rhs
    lhs, rhs, (lhs_key, rhs_key) = transform_operands(lhs, rhs, spec, axes, key)
    lhs = prepare(lhs, spec.lhs, axes.lhs, lhs_key)
    rhs = prepare(rhs, spec.rhs, axes.rhs, rhs_key)
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        return lax.dot_general(
            lhs,
            rhs,
            axes.dimension_numbers,
            precision=precision,
            preferred_element_type=out_dtype,
            out_sharding=out_sharding,
        )
    call = MatmulCall(
        lhs=OperandType.of(lhs, axes.lhs),
        rhs=OperandType.of(rhs, axes.rhs),
        out_dtype=out_dtype,
        precision=precision,
        fast_accumulation=spec.fast_accumulation,
        out_sharding=out_sharding,
    )
    choice = select(call, current_target())
    if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
        rhs = unpacked_for(rhs, choice)
    product = choice.backend.run(call, unpacked(lhs), rhs)
    return unscaled(product, *given, spec)
