"""The meaning of a scaled product and of attention, in plain jnp (OCP MX v1.0, 6.1 and 6.2)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.codecs.scale import LIFT, is_tiny, lift
from mx_jax.codecs.straight_through import straight_through
from mx_jax.mxarray import MXArray, decode, unlinked
from mx_jax.packed import PackedRows, Rows


def scaled_matmul(
    lhs: jax.Array | MXArray,
    rhs: jax.Array | MXArray,
    dimension_numbers: lax.DotDimensionNumbers,
    out_dtype: jax.typing.DTypeLike,
    precision: lax.PrecisionLike = None,
    decoded: Callable = decode,
) -> jax.Array:
    """`sum over blocks of X_A X_B (sum over the block of P_A P_B)`.

    Both operands are dequantized to float32, where element times scale is exact, multiplied
    exactly and accumulated in float32. A code may stand for 2^128, which is not a float32; so
    operands with E8M0 scales are decoded as 2^-2 of what they are, and the sums multiplied back.
    What is below 2^-124 of such an operand may count as zero, where a platform flushes subnormals.
    An operand under one tiny tensor scale (NVFP4) is decoded as 2^64 of what it is.

    Args:
      lhs: values or an MXArray.
      rhs: values or an MXArray.
      dimension_numbers: as `jax.lax.dot_general` takes them.
      out_dtype: dtype of the product; one rounding from the float32 sum.
      precision: for products with a high-precision operand; two quantized operands always take
        the highest, so that no platform rounds them again on the way in.
      decoded: decodes an operand, as `decode` does.

    Returns:
      The product, axes in `dot_general`'s order.
    """
    if isinstance(lhs, MXArray) and isinstance(rhs, MXArray):
        precision = lax.Precision.HIGHEST
    left, right = scaled_values(lhs, decoded), scaled_values(rhs, decoded)
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    product = lax.dot_general(left.values, right.values, dimension_numbers, **how)
    return unscaled(product, left, right).astype(out_dtype)


class ScaledValues(NamedTuple):
    """Float32 values that stand for `values * factor`, a power of two, perhaps a scalar array."""

    values: jax.Array
    factor: Any = 1.0


def scaled_values(operand: jax.Array | MXArray, decoded: Callable = decode) -> ScaledValues:
    """The values of an operand, of which none is Inf that the quantized array did not have."""
    if not isinstance(operand, MXArray):
        return ScaledValues(operand.astype(jnp.float32))
    exponent, factor, lifted = 0, 1.0, False
    scale, scaled = operand.tensor_scale, operand
    if operand.format.scale.kind == "exponent":
        exponent, factor = -_HEADROOM, 2.0**_HEADROOM
    elif scale is not None and scale.size == 1:
        small = is_tiny(scale)
        scaled, lifted = dataclasses.replace(operand, tensor_scale=lift(scale, small)), True
        factor = jnp.where(small, jnp.float32(2.0**-LIFT), jnp.float32(1)).reshape(())
    values = decoded(unlinked(scaled), jnp.float32, exponent=exponent, lifted=lifted)
    if operand.primal is not None:
        values = straight_through(values, operand.primal.astype(jnp.float32) / factor)
    return ScaledValues(values, factor)


def unscaled(product: jax.Array, lhs: ScaledValues, rhs: ScaledValues) -> jax.Array:
    """A product of the operands' values as one of what they stand for."""
    for factor in (lhs.factor, rhs.factor):
        if isinstance(factor, jax.Array) or factor != 1.0:
            product = product * factor
    return product


# Scales that are rounded up bring the largest finite float32 to 2^128 at most.
_HEADROOM = 2


def attend(
    shared: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike, tokens: int
) -> jax.Array:
    """Causal attention: `softmax(q k^T / sqrt(features)) v`, each query over rows up to its own.

    Args:
      shared: queries `[matrices, heads * tokens, features]`, of the heads that share keys.
      keys: `[matrices, length, features]`, as values or as codes.
      values: likewise.
      position: row of the first token.
      tokens: how many of a head follow each other.
    """
    keys, values = _row_values(keys), _row_values(values)
    scores = jnp.einsum("hqd,hkd->hqk", shared, keys, preferred_element_type=jnp.float32)
    last = position + jnp.arange(tokens)
    rows = jnp.arange(keys.shape[1])[None, None]
    seen = rows <= jnp.tile(last, shared.shape[1] // tokens)[None, :, None]
    scores = jnp.where(seen, scores * shared.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(values.dtype)
    # Whatever rows behind the last token hold, NaN too, they take part in nothing.
    values = jnp.where(rows.mT <= last[-1], values, 0)
    return jnp.einsum("hqk,hkd->hqd", weights, values)


def _row_values(rows: Rows) -> jax.Array:
    return rows.unpacked().dequantize() if isinstance(rows, PackedRows) else rows
