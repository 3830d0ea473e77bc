"""Gradients of a clipping cast: nothing passes where the forward product saturated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import ElementFormat
from mx_jax.ops.keys import Key, product_key
from mx_jax.ops.operands import operand_keys, prescaled, transformed
from mx_jax.ops.quantize import quantize_operand
from mx_jax.packed import Quantized
from mx_jax.reference import hadamard
from mx_jax.specs import MatmulRecipe, OperandSpec


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def mask_clipped(
    recipe: MatmulRecipe,
    side: Side,
    axes: ProductAxes,
    bar: jax.Array,
    operand: AnyOperand,
    key: Key,
) -> jax.Array:
    """An operand's cotangent without what the forward product clipped, if the recipe says so.

    Args:
      recipe: of the product.
      side: which operand.
      axes: of the forward product.
      bar: the cotangent.
      operand: as it came to the forward product; codes have nothing clipped.
      key: of the product.
    """
    fwd = recipe.fwd
    spec, own = (fwd.lhs, axes.lhs) if side == "lhs" else (fwd.rhs, axes.rhs)
    if not recipe.mask_clipped or spec is None or isinstance(operand, Quantized):
        return bar
    signs = None
    if fwd.transform is not None:
        signs = hadamard.draw_signs(fwd.transform, operand_keys(product_key(recipe, "fwd", key))[2])
    return _without_clipped(bar, operand, spec, own, signs)


def _without_clipped(
    cotangent: jax.Array, operand: jax.Array, spec: OperandSpec, axes: Axes, signs: Any
) -> jax.Array:
    """The operand's cotangent without what belongs to clipped values.

    With T the forward's transform: `T^-1(T(cotangent) * [|T(operand)| is representable])`.

    Args:
      cotangent: of the operand, in its shape.
      operand: as it came to the forward product.
      spec: how the forward product quantized it.
      axes: of the operand there: the transform and the blocks lie along its last contracted one.
      signs: of the forward's transform, or None without one.

    Returns:
      A cotangent like the given one.
    """
    axis, blocks = axes.block_axis, axes.blocks(spec.format)
    values = operand if signs is None else transformed(operand, signs, axis)
    values = prescaled(values, spec)
    # Scales are deterministic, and what lies beyond the largest code saturates however it is
    # rounded: the mask needs none of the forward's random bits.
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    quantized = quantize_operand(values, nearest, blocks)
    limit = dataclasses.replace(quantized, codes=_largest(values, spec.format.element))
    clipped = jnp.abs(values.astype(jnp.float32)) > jnp.abs(limit.dequantize(jnp.float32))
    turned = cotangent if signs is None else transformed(cotangent, signs, axis)
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
