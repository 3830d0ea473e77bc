"""Gradients of a clipping cast: nothing passes where the forward product saturated."""

import jax
import jax.numpy as jnp

from mx_jax.codecs.blocks import Blocks
from mx_jax.ops.quantize import quantize_operand
from mx_jax.reference import hadamard
from mx_jax.specs import OperandSpec


def mask_clipped(
    cotangent: jax.Array,
    operand: jax.Array,
    spec: OperandSpec,
    blocks: Blocks,
    signs: jax.Array | None,
    axis: int,
) -> jax.Array:
    """The operand's cotangent without what belongs to clipped values.

    With T the forward's transform: `T^-1(T(cotangent) * [|T(operand)| is representable])`.

    Args:
      cotangent: of the operand, in its shape.
      operand: as it came to the forward product.
      spec: how the forward product quantized it.
      blocks: its blocks there.
      signs: of the forward's transform, or None without one.
      axis: the axis that the transform and the blocks lie along.

    Returns:
      A cotangent like the given one.
    """
    values = operand if signs is None else hadamard.apply(operand, signs, axis)
    values = values.astype(jnp.float32) * spec.prescale
    quantized = quantize_operand(values, spec, blocks)
    at_limit = jnp.abs(quantized.dequantize(jnp.float32)) < jnp.abs(values)
    half = quantized.codes & (spec.format.element.sign_code - 1)
    clipped = at_limit & (half == spec.format.element.max_code)
    turned = cotangent if signs is None else hadamard.apply(cotangent, signs, axis)
    kept = jnp.where(clipped, 0, turned)
    if signs is not None:
        kept = hadamard.invert(kept, signs, cotangent.shape[axis], axis)
    return kept.astype(cotangent.dtype)
