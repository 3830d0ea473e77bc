"""Gradients of a clipping cast: nothing passes where the forward product saturated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.rounding import NEAREST
from mx_jax.ops.kept import beyond
from mx_jax.ops.keys import Key, product_key
from mx_jax.ops.operands import operand_keys, prescaled, transformed, turned_back
from mx_jax.ops.product import Kept
from mx_jax.ops.quantize import quantize_operand
from mx_jax.packed import Quantized
from mx_jax.reference import hadamard
from mx_jax.specs import MatmulRecipe, OperandSpec


def mask_clipped(
    recipe: MatmulRecipe,
    side: Side,
    axes: ProductAxes,
    bar: jax.Array,
    operand: AnyOperand | Kept,
    key: Key,
) -> jax.Array:
    """An operand's cotangent without what the forward product clipped, if the recipe says so.

    The cotangent of a kept operand is turned back too.

    Args:
      recipe: of the product.
      side: which operand.
      axes: of the forward product.
      bar: the cotangent.
      operand: as it came to the forward product, or as it was kept; codes have nothing clipped.
      key: of the product.
    """
    kept = isinstance(operand, Kept)
    if not kept and (not recipe.mask_clipped or isinstance(operand, Quantized)):
        return bar
    return _masked(recipe, side, axes, bar, operand, key)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _masked(
    recipe: MatmulRecipe,
    side: Side,
    axes: ProductAxes,
    bar: jax.Array,
    operand: AnyOperand | Kept,
    key: Key,
) -> jax.Array:
    fwd = recipe.fwd
    spec, own = (fwd.lhs, axes.lhs) if side == "lhs" else (fwd.rhs, axes.rhs)
    signs = None
    if fwd.transform is not None:
        signs = hadamard.draw_signs(fwd.transform, operand_keys(product_key(recipe, "fwd", key))[2])
    if isinstance(operand, Kept):
        return _turned_back(bar, operand.clips(), signs, operand.length, own.block_axis)
    return bar if spec is None else _without_clipped(bar, operand, spec, own, signs)


def _turned_back(
    turned: jax.Array, clipped: jax.Array | None, signs: Any, length: int, axis: int
) -> jax.Array:
    """`T^-1` of a cotangent without what belongs to clipped values, in the cotangent's dtype."""
    kept = turned if clipped is None else jnp.where(clipped, 0, turned)
    if signs is not None:
        kept = turned_back(kept, signs, length, axis)
    return kept.astype(turned.dtype)


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
    turned = cotangent if signs is None else transformed(cotangent, signs, axis)
    length = cotangent.shape[axis]
    kept = _turned_back(turned, beyond(values, quantized), signs, length, axis)
    return kept.astype(cotangent.dtype)
