"""The meaning of a scaled product, in plain jnp (OCP MX v1.0, sections 6.1 and 6.2)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.mxarray import MXArray


def scaled_matmul(
    lhs: jax.Array | MXArray,
    rhs: jax.Array | MXArray,
    dimension_numbers: lax.DotDimensionNumbers,
    out_dtype: jax.typing.DTypeLike,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`sum over blocks of X_A X_B (sum over the block of P_A P_B)`.

    Both operands are dequantized to float32, where element times scale is exact, multiplied
    exactly and accumulated in float32.

    Args:
      lhs: values or an MXArray.
      rhs: values or an MXArray.
      dimension_numbers: as `jax.lax.dot_general` takes them.
      out_dtype: dtype of the product; one rounding from the float32 sum.
      precision: for products with a high-precision operand; two quantized operands always take
        the highest, so that no platform rounds them again on the way in.
      out_sharding: of the product, as in `jax.lax.dot_general`.

    Returns:
      The product, axes in `dot_general`'s order.
    """
    if isinstance(lhs, MXArray) and isinstance(rhs, MXArray):
        precision = lax.Precision.HIGHEST
    product = lax.dot_general(
        _values(lhs),
        _values(rhs),
        dimension_numbers,
        precision=precision,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )
    return product.astype(out_dtype)


def _values(operand: jax.Array | MXArray) -> jax.Array:
    if isinstance(operand, MXArray):
        return operand.dequantize(jnp.float32)
    return operand.astype(jnp.float32)
