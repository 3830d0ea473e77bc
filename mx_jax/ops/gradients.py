"""The three quantized products of a differentiable matmul."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.base import AnyOperand, Operand
from mx_jax.backends.target import follow
from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.mxarray import MXArray, decode
from mx_jax.ops.canonical import Groups
from mx_jax.ops.clipping import mask_clipped
from mx_jax.ops.keys import Product, product_key
from mx_jax.ops.matmul import (
    Place,
    lhs_place,
    operand_keys,
    prepare_operands,
    quantized_matmul,
    rhs_place,
)
from mx_jax.ops.quantize_both import Cast, quantize_operand_both, reads_once
from mx_jax.ops.varying import sum_like
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.reference import hadamard
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec, Residuals


class Static(NamedTuple):
    """What a product knows before it is traced.

    Attributes:
      recipe: formats of the product and of its two gradient products.
      groups: sizes of the axis groups.
      lhs_dtype: dtype of the left operand's cotangent; None if it is an MXArray.
      rhs_dtype: likewise for the right operand.
      out_dtype: dtype of the product.
      precision: for high-precision operands.
      out_sharding: of the product, on a mesh with explicit axes.
    """

    recipe: MatmulRecipe
    groups: Groups
    lhs_dtype: np.dtype | None
    rhs_dtype: np.dtype | None
    out_dtype: np.dtype
    precision: Any
    out_sharding: Any = None


class Bar(NamedTuple):
    """What a cotangent has to be.

    Attributes:
      dtype: dtype of the operand.
      out_sharding: where the operand lies, on a mesh with explicit axes.
    """

    dtype: np.dtype
    out_sharding: Any


def differentiable_matmul(
    recipe: MatmulRecipe,
    groups: Groups,
    lhs: AnyOperand,
    rhs: AnyOperand,
    out_dtype: np.dtype,
    precision: Any,
    key: jax.Array | None,
    out_sharding: Any = None,
) -> jax.Array:
    """`[*batch, *m, *n]` with the recipe's own gradient products.

    An MXArray that was quantized in the same trace hands its cotangent to what it was made of; any
    other has none.
    """
    static = Static(
        recipe,
        groups,
        cotangent_dtype(lhs),
        cotangent_dtype(rhs),
        out_dtype,
        precision,
        out_sharding,
    )
    with follow(lhs, rhs):
        return _matmul(static, lhs, rhs, primal_of(lhs), primal_of(rhs), key)


def cotangent_dtype(operand: AnyOperand) -> np.dtype | None:
    """Dtype of an operand's cotangent; None for an MXArray, which has none of its own."""
    return None if isinstance(operand, Quantized) else np.dtype(operand.dtype)


def primal_of(operand: AnyOperand) -> jax.Array | None:
    """What an MXArray was made of, while that is being traced."""
    return operand.primal if isinstance(operand, MXArray) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    static: Static,
    lhs: AnyOperand,
    rhs: AnyOperand,
    lhs_primal: jax.Array | None,
    rhs_primal: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    return _forward(static, lhs, rhs, key)


def _matmul_fwd(static, lhs, rhs, lhs_primal, rhs_primal, key):
    if static.recipe.residuals is Residuals.QUANTIZED:
        # The same key gives the same codes as without a gradient.
        lhs, rhs = _quantize_both(static, lhs, rhs, key)
    return _forward(static, lhs, rhs, key), (lhs, rhs, lhs_primal, rhs_primal, key)


def _matmul_bwd(static, saved, cotangent):
    lhs, rhs, lhs_primal, rhs_primal, key = saved
    left, right = (lhs, static.lhs_dtype, lhs_primal), (rhs, static.rhs_dtype, rhs_primal)
    g_left = g_right = cotangent
    if all(dtype is not None or primal is not None for _, dtype, primal in (left, right)):
        g_left, g_right = quantize_cotangent(static, cotangent, key)
    lhs_bars = cotangents(_grad_lhs, static, left, g_left, rhs, key)
    rhs_bars = cotangents(_grad_rhs, static, right, g_right, lhs, key)
    lhs_bars = (sum_like(lhs_bars[0], lhs), sum_like(lhs_bars[1], lhs_primal))
    rhs_bars = (sum_like(rhs_bars[0], rhs), sum_like(rhs_bars[1], rhs_primal))
    if static.recipe.mask_clipped:
        lhs_bars = (mask(static, "lhs", lhs_bars[0], lhs, key), lhs_bars[1])
        rhs_bars = (mask(static, "rhs", rhs_bars[0], rhs, key), rhs_bars[1])
    key_bar = None if key is None else np.zeros(key.shape, jax.dtypes.float0)
    return lhs_bars[0], rhs_bars[0], lhs_bars[1], rhs_bars[1], key_bar


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def quantize_cotangent(
    static: Static, g: jax.Array, key: jax.Array | None
) -> tuple[Operand, Operand]:
    """g for grad_lhs and for grad_rhs: quantized for both in one call, if a backend reads it once.

    Otherwise, or where a product changes it first, as it is: the products quantize it themselves,
    to the same bits.
    """
    casts, keys = [], []
    products: tuple[tuple[MatmulSpec, tuple[Groups, bool], Product], ...] = (
        (static.recipe.dlhs, static.groups.grad_lhs(), "dlhs"),
        (static.recipe.drhs, static.groups.grad_rhs(), "drhs"),
    )
    for spec, (groups, is_lhs), product in products:
        own = spec.lhs
        if own is None or own.prescale != 1.0 or spec.transform is not None:
            return g, g
        place = lhs_place(groups) if is_lhs else rhs_place(groups)
        casts.append(Cast(own, place.blocks(own)))
        drawn = operand_keys(product_key(static.recipe, product, key))[0 if is_lhs else 1]
        keys.append(drawn if own.rounding.random_bits else None)
    if not reads_once(g, (casts[0], casts[1])):
        return g, g
    with jax.named_scope("grad_both"):
        return quantize_operand_both(g, (casts[0], casts[1]), (keys[0], keys[1]))


def cotangents(gradient, static, operand, g, other, key):
    """Cotangents of an operand and of what an MXArray operand was made of: one at most is there.

    Args:
      gradient: `_grad_lhs` or `_grad_rhs`.
      static: of the product.
      operand: the operand, its cotangent's dtype or None, and its primal or None.
      g: cotangent of the product.
      other: the other operand.
      key: of the product.
    """
    value, dtype, primal = operand
    if dtype is not None:
        leaf = value.codes if isinstance(value, MXArray) else value
        return gradient(static, g, other, Bar(dtype, explicit_sharding(leaf)), key), None
    if primal is not None:
        bar = Bar(np.dtype(primal.dtype), explicit_sharding(primal))
        return None, gradient(static, g, other, bar, key)
    return None, None


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: Static, lhs: AnyOperand, rhs: AnyOperand, key: jax.Array | None) -> jax.Array:
    recipe, groups = static.recipe, static.groups
    with jax.named_scope("output"):
        return quantized_matmul(
            lhs,
            rhs,
            recipe.fwd,
            groups,
            static.out_dtype,
            static.precision,
            product_key(recipe, "fwd", key),
            static.out_sharding,
        )


@functools.partial(jax.jit, static_argnums=0)
def _quantize_both(
    static: Static, lhs: AnyOperand, rhs: AnyOperand, key: jax.Array | None
) -> tuple[AnyOperand, AnyOperand]:
    return prepare_operands(
        lhs, rhs, static.recipe.fwd, static.groups, product_key(static.recipe, "fwd", key)
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grad_lhs(
    static: Static, g: Operand, rhs: AnyOperand, bar: Bar, key: jax.Array | None
) -> jax.Array:
    """`g rhs^T`, contracted over n, in lhs's order."""
    groups, g_is_lhs = static.groups.grad_lhs()
    own = product_key(static.recipe, "dlhs", key)
    with jax.named_scope("grad_lhs"):
        return _gradient(static.recipe.dlhs, groups, g_is_lhs, g, rhs, bar, static.precision, own)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grad_rhs(
    static: Static, g: Operand, lhs: AnyOperand, bar: Bar, key: jax.Array | None
) -> jax.Array:
    """`lhs^T g`, contracted over m, in rhs's order."""
    groups, g_is_lhs = static.groups.grad_rhs()
    own = product_key(static.recipe, "drhs", key)
    with jax.named_scope("grad_rhs"):
        return _gradient(static.recipe.drhs, groups, g_is_lhs, g, lhs, bar, static.precision, own)


def _gradient(
    spec: MatmulSpec,
    groups: Groups,
    g_is_lhs: bool,
    g: Operand,
    other: AnyOperand,
    bar: Bar,
    precision: Any,
    key: jax.Array | None,
) -> jax.Array:
    """The product of a cotangent (spec.lhs) and a saved operand (spec.rhs), in either order."""
    other = reuse(other, spec.rhs, rhs_place(groups) if g_is_lhs else lhs_place(groups))
    left, right, spec = (g, other, spec) if g_is_lhs else (other, g, spec.swapped())
    return quantized_matmul(left, right, spec, groups, bar.dtype, precision, key, bar.out_sharding)


@functools.partial(jax.jit, static_argnums=(0, 1))
def mask(
    static: Static, side: str, bar: jax.Array | None, operand: AnyOperand, key: jax.Array | None
) -> jax.Array | None:
    """An operand's cotangent without what the forward product clipped of it."""
    groups, fwd = static.groups, static.recipe.fwd
    left = side == "lhs"
    spec, place = (fwd.lhs, lhs_place(groups)) if left else (fwd.rhs, rhs_place(groups))
    if bar is None or spec is None or isinstance(operand, Quantized):
        return bar
    signs = None
    if fwd.transform is not None:
        signs = hadamard.draw_signs(
            fwd.transform, operand_keys(product_key(static.recipe, "fwd", key))[2]
        )
    return mask_clipped(bar, operand, spec, place.blocks(spec), signs, place.block_axis)


def reuse(operand: AnyOperand, spec: OperandSpec | None, place: Place) -> Operand:
    """A saved operand for a backward product.

    Codes are reused if their blocks also lie along the new contracting axis (square blocks);
    otherwise they are dequantized, to be quantized anew.
    """
    if isinstance(operand, PackedMXArray):
        operand = operand.unpack()
    if not isinstance(operand, MXArray):
        return operand
    if spec is None:
        return decode(operand, operand.dtype, saturates=True)
    reusable = operand.format == spec.format and operand.blocks == place.blocks(spec)
    return operand if reusable else decode(operand, jnp.float32, saturates=True)
