"""Gradients of a clipping cast: nothing passes where the forward product saturated."""

import dataclasses

import jax
import jax.numpy as jnp

from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import ElementFormat
from mx_jax.ops.matmul import prescaled
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
    values = prescaled(values, spec)
    # Scales are deterministic, and what lies beyond the largest code saturates however it is
    # rounded: the mask needs none of the forward's random bits.
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    quantized = quantize_operand(values, nearest, blocks)
    limit = dataclasses.replace(quantized, codes=_largest(values, spec.format.element))
    clipped = jnp.abs(values.astype(jnp.float32)) > jnp.abs(limit.dequantize(jnp.float32))
    turned = cotangent if signs is None else hadamard.apply(cotangent, signs, axis)
    kept = jnp.where(clipped, 0, turned)
    if signs is not None:
        kept = hadamard.invert(kept, signs, cotangent.shape[axis], axis)
    return kept.astype(cotangent.dtype)


def _largest(values: jax.Array, element: ElementFormat) -> jax.Array:
    """Codes of the largest magnitudes on each value's own side of zero."""
    top = jnp.full(values.shape, element.max_code, jnp.uint8)
    if not element.negative_extra:
        return top
    return jnp.where(values < 0, jnp.uint8(element.sign_code), top)
