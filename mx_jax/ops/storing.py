"""Weights quantized once, as the products that will read them would have quantized them."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mx_jax.axes import Axes
from mx_jax.backends.target import follow
from mx_jax.mxarray import MXArray
from mx_jax.ops.packing import packed_where_they_lie
from mx_jax.ops.quantize import quantize_operand
from mx_jax.packed import PackedMXArray
from mx_jax.specs import MatmulRecipe


def why_not_stored(recipe: MatmulRecipe) -> str | None:
    """Why a product by this recipe cannot read weights quantized before; None: it can."""
    spec = recipe.fwd.rhs
    if spec is None:
        return "its recipe leaves weights in high precision"
    if recipe.fwd.transform is not None:
        return "its recipe transforms weights in every product"
    if spec.random_bits:
        return "its recipe rounds weights anew in every product"
    return None if spec.prescale == 1.0 else "its recipe scales weights before it casts them"


def store_weights(
    x: jax.Array,
    recipe: MatmulRecipe,
    axes: Axes,
    *,
    num_stacked: int,
    packed: bool,
    by: Callable[[jax.Array], MXArray] | None = None,
) -> MXArray | PackedMXArray:
    """A weight as the right operand of `recipe`'s product: codes of the same bits.

    Args:
      x: `[*stack, ...]`, float32, bfloat16 or float16.
      recipe: one without a reason of `why_not_stored`.
      axes: of one weight of the stack in its product.
      num_stacked: how many leading axes count weights; each has a tensor scale of its own.
      packed: whether to lay the codes out for this machine, where its kernels have a layout.
      by: another way from one weight of the stack to its codes; not mapped, so that it may look at
        values.
    """
    spec = recipe.fwd.rhs
    assert spec is not None

    def quantized(weight: jax.Array) -> MXArray:
        return quantize_operand(weight, spec, axes.blocks(spec.format))

    with follow(x):
        stored = _stacked(quantized, x, num_stacked) if by is None else _each(by, x, num_stacked)
    num_batch = num_stacked + len(axes.batch)
    if not packed or axes.batch != tuple(range(len(axes.batch))):
        return stored
    contracting = tuple(axis + num_stacked for axis in axes.contracting)
    if contracting != tuple(sorted(contracting)):
        return stored
    found, reason = packed_where_they_lie(stored, contracting, num_batch, recipe)
    if reason is not None:
        warnings.warn(f"convert.weights: stored as MXArray: {reason}", stacklevel=2)
    return found


def _stacked(quantized: Callable[[jax.Array], MXArray], x: jax.Array, num_stacked: int) -> MXArray:
    for _ in range(num_stacked):
        quantized = jax.vmap(quantized)
    return quantized(x)


def _each(by: Callable[[jax.Array], MXArray], x: jax.Array, num_stacked: int) -> MXArray:
    if not num_stacked:
        return by(x)
    parts = [_each(by, part, num_stacked - 1) for part in x]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
