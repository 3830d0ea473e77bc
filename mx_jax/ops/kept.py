"""An operand as the forward product took it, kept for the gradients where codes do not say it all.

After a transform the gradients multiply turned operands: an operand's cotangent comes out turned
too, and is turned back. What the cast clipped is one bit an element: the codes do not show it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs import packing
from mx_jax.codecs.rounding import NEAREST
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import Key, product_key
from mx_jax.ops.operands import (
    operand_keys,
    prepare,
    prescaled,
    transform_operands,
    transformed,
    turned_back,
)
from mx_jax.ops.product import Kept
from mx_jax.ops.quantize import quantize_operand
from mx_jax.ops.random import draw_signs
from mx_jax.ops.remat import QUANTIZED
from mx_jax.packed import Quantized
from mx_jax.sharding.movement import Movement, Moves
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec


def keep(
    recipe: MatmulRecipe, given: AnyOperand, turned: Any, taken: AnyOperand, axes: Axes
) -> AnyOperand | Kept:
    """What is kept of one operand: its codes alone, if they say it all.

    Args:
      recipe: of the product.
      given: the operand as it came.
      turned: the operand transformed.
      taken: as the product takes it.
      axes: of the operand.
    """
    masks = recipe.mask_clipped and isinstance(taken, MXArray)
    if isinstance(given, Quantized) or not (masks or recipe.fwd.transform):
        return taken
    clipped = None
    if masks:
        assert isinstance(taken, MXArray)
        bits = packing.pack(beyond(turned, taken).astype(jnp.uint8), 1)
        clipped = checkpoint_name(bits, QUANTIZED)
    return Kept(operand=taken, clipped=clipped, length=given.shape[axes.block_axis])


def keep_both(
    recipe: MatmulRecipe,
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    key: Key,
    moves: Moves,
) -> tuple[AnyOperand | Kept, AnyOperand | Kept]:
    """Both operands of a dense product as it takes them."""
    spec = recipe.fwd
    check_whole_groups(recipe, lhs, axes.lhs, moves[0])
    check_whole_groups(recipe, rhs, axes.rhs, moves[1])
    left, right, (lhs_key, rhs_key) = transform_operands(lhs, rhs, spec, axes, key)
    taken = (
        prepare(left, spec.lhs, axes.lhs, lhs_key),
        prepare(right, spec.rhs, axes.rhs, rhs_key, side="rhs"),
    )
    return (
        keep(recipe, lhs, left, taken[0], axes.lhs),
        keep(recipe, rhs, right, taken[1], axes.rhs),
    )


def check_whole_groups(
    recipe: MatmulRecipe, x: AnyOperand, axes: Axes, move: Movement | None
) -> None:
    """Raise ValueError if a device of shard_map would transform a part of a group."""
    transform, k = recipe.fwd.transform, axes.block_axis
    if transform is None or move is None:
        return
    names = [name for name in move.stored[k] if name in move.manual]
    if names and x.shape[k] % transform.size:
        raise ValueError(
            f"gather: residuals=QUANTIZED of recipe {recipe.name!r} keeps what each device "
            f"transforms, but a group of {transform} would lie on two along axis={k % x.ndim}, got "
            f"shard size={x.shape[k]} along mesh axes={names} of shard_map; use "
            "residuals='primal', or shard another axis"
        )


def beyond(values: jax.Array, quantized: MXArray) -> jax.Array:
    """Which values lie beyond the largest code of their block.

    Args:
      values: what was quantized.
      quantized: its scales count, not its codes.
    """
    element = quantized.format.element
    # On each value's own side of zero, and where the codes lie.
    largest = jnp.full_like(quantized.codes, element.max_code)
    if element.negative_extra:
        largest = jnp.where(values < 0, jnp.uint8(element.sign_code), largest)
    limit = dataclasses.replace(quantized, codes=largest, primal=None)
    return jnp.abs(values.astype(jnp.float32)) > jnp.abs(limit.dequantize(jnp.float32))


def as_taken(lhs: Any, rhs: Any, spec: MatmulSpec) -> tuple[Any, Any, MatmulSpec]:
    """Operands of which some are kept, as the product took them, and what is left to do to them:
    those that are kept are transformed."""
    lhs, rhs = (x.operand if isinstance(x, Kept) else x for x in (lhs, rhs))
    return lhs, rhs, dataclasses.replace(spec, transform=None)


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
        signs = draw_signs(fwd.transform, operand_keys(product_key(recipe, "fwd", key))[2])
    if isinstance(operand, Kept):
        return _turned_back(bar, operand.clips(), signs, operand.length, own.block_axis)
    assert not isinstance(operand, Quantized), "codes have nothing clipped"
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
