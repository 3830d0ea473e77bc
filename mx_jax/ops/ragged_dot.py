"""ragged_dot with a recipe: rows in consecutive groups, each with a right operand of its own.

Two of its three products keep the rows (output, grad_lhs), the third sums over those of each group
(grad_rhs). Nothing is transposed: blocks lie along whichever axis is contracted.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.base import Operand
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray, decode
from mx_jax.ops import gradients
from mx_jax.ops.arguments import as_operand, check_out_dtype, goes_to_lax
from mx_jax.ops.canonical import Groups, _check_blocks
from mx_jax.ops.gradients import Bar, Static
from mx_jax.ops.keys import check_matmul_key, product_key
from mx_jax.ops.matmul import Place, _transform, operand_keys, prepare, prescaled, unscaled
from mx_jax.ops.quantize import draw_bits, quantize_operand
from mx_jax.ops.ragged_checks import as_group_sizes, at_most, check_rows, check_shapes
from mx_jax.ops.recipe_names import as_recipe
from mx_jax.packed import unpacked
from mx_jax.reference import hadamard, ragged
from mx_jax.reference.ragged import RaggedRows, ragged_rows
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec, Residuals

# The axis of experts is no batch axis here: a format that is WHOLE takes one matrix at a time.
_GROUPS = Groups(batch=0, m=1, n=1, k=1, rhs_k_first=True)
_LAST = Place(batch=0, kept=1, k=1, k_first=False)
_SECOND_LAST = Place(batch=0, kept=1, k=1, k_first=True)

Key = jax.Array | None


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    recipe: MatmulRecipe | str,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with quantized operands and gradients: a mixture of experts' matmul.

    lhs `[m, k]`, rhs `[g, k, n]`, group_sizes `[g]`, product `[m, n]`: the rows of lhs are
    consecutive groups, and each group multiplies its own matrix of rhs. With `I_j` the rows of
    group j, `y[I_j] = Q(lhs[I_j]) Q(rhs[j])`, `dlhs[I_j] = Q(g[I_j]) Q(rhs[j])^T` and
    `drhs[j] = Q(lhs[I_j])^T Q(g[I_j])`: what `matmul` gives for each group alone, so no block
    crosses a group border, and blocks along the rows start at each group's first. Only a tensor
    scale (NVFP4) belongs to a whole operand. Rows beyond the last group, whatever they hold, give
    zeros and take part in nothing.

    Args:
      lhs: float32, bfloat16 or float16 values, or an MXArray blocked along its last axis, which is
        used as it is.
      rhs: likewise, blocked along its second-last axis.
      group_sizes: integers, not negative; what they add up to beyond m is cut off.
      recipe: what to quantize, e.g. `mx_jax.recipes.mxfp8()` or its name; `high_precision()` is
        `jax.lax.ragged_dot` itself.
      precision: as in `jax.lax.ragged_dot`, for high-precision operands.
      preferred_element_type: dtype of the product; default: the operands' common dtype.
      key: PRNG key, if a product that runs draws random bits; others do not use it.

    Returns:
      The product, `[m, n]`.

    Raises:
      ValueError: shapes that do not fit, an MXArray blocked along another axis, a key missing,
        group sizes known to be negative or beyond JAX's integers, a recipe with what cannot be
        done group by group.
      TypeError: group sizes that are no integers, operands that are not float32, bfloat16, float16
        or MXArray, or a recipe that is none.

    Example:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax.ops.ragged_dot import ragged_dot
      >>> tokens = jnp.ones((4, 64))
      >>> experts = jnp.stack([jnp.full((64, 2), 0.5), jnp.full((64, 2), 2.0)])
      >>> ragged_dot(tokens, experts, jnp.array([1, 2]), recipe=mx_jax.recipes.mxfp8())
      Array([[ 32.,  32.],
             [128., 128.],
             [128., 128.],
             [  0.,   0.]], dtype=float32)
    """
    recipe = as_recipe(recipe, "ragged_dot")
    lhs, rhs = (
        as_operand(unpacked(operand), side, recipe, "ragged_dot")
        for operand, side in ((lhs, "lhs"), (rhs, "rhs"))
    )
    sizes = as_group_sizes(group_sizes)
    check_shapes(lhs, rhs, sizes)
    sizes = at_most(sizes, lhs.shape[0])
    key = check_matmul_key(key, recipe)
    if goes_to_lax(recipe, lhs, rhs):
        return lax.ragged_dot(
            lhs, rhs, sizes, precision=precision, preferred_element_type=preferred_element_type
        )
    check_rows(recipe)
    check_out_dtype(preferred_element_type, "ragged_dot")
    out_dtype = preferred_element_type
    if out_dtype is None:
        out_dtype = jnp.result_type(lhs.dtype, rhs.dtype)
    for operand, side in ((lhs, "lhs"), (rhs, "rhs")):
        if isinstance(operand, MXArray):
            _check_blocks(operand, 1, side)
    bars = (gradients.cotangent_dtype(lhs), gradients.cotangent_dtype(rhs))
    static = Static(recipe, _GROUPS, *bars, np.dtype(out_dtype), precision)
    sizes = ragged_rows(sizes, lhs.shape[0], unit=1).sizes
    primals = (gradients.primal_of(lhs), gradients.primal_of(rhs))
    return _ragged_dot(static, lhs, rhs, *primals, sizes, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(static, lhs, rhs, lhs_primal, rhs_primal, sizes, key) -> jax.Array:
    return _forward(static, lhs, rhs, sizes, key)[0]


def _ragged_dot_fwd(static, lhs, rhs, lhs_primal, rhs_primal, sizes, key):
    product, prepared = _forward(static, lhs, rhs, sizes, key)
    if static.recipe.residuals is Residuals.QUANTIZED:
        lhs, rhs = prepared
    return product, (lhs, rhs, lhs_primal, rhs_primal, sizes, key)


def _ragged_dot_bwd(static, saved, g):
    lhs, rhs, lhs_primal, rhs_primal, sizes, key = saved
    left, right = (lhs, static.lhs_dtype, lhs_primal), (rhs, static.rhs_dtype, rhs_primal)
    lhs_bars = gradients.cotangents(_grad_lhs, static, left, g, (rhs, sizes), key)
    rhs_bars = gradients.cotangents(_grad_rhs, static, right, g, (lhs, sizes), key)
    lhs_bar, rhs_bar = lhs_bars[0], rhs_bars[0]
    if static.recipe.mask_clipped:
        lhs_bar = gradients.mask(static, "lhs", lhs_bar, _without_unused(lhs, sizes), key)
        rhs_bar = gradients.mask(static, "rhs", rhs_bar, rhs, key)
    no_bars = [None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in (sizes, key)]
    return lhs_bar, rhs_bar, lhs_bars[1], rhs_bars[1], *no_bars


_ragged_dot.defvjp(_ragged_dot_fwd, _ragged_dot_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: Static, lhs: Operand, rhs: Operand, sizes: jax.Array, key: Key):
    """`[m, k]` by `[g, k, n]` to `[m, n]`; and both operands as the product took them."""
    spec = static.recipe.fwd
    with jax.named_scope("output"):
        own, given = product_key(static.recipe, "fwd", key), (lhs, rhs)
        lhs, rhs = _prepare_kept(lhs, rhs, _SECOND_LAST, sizes, spec, own)
        product = ragged.scaled_ragged_dot(
            lhs, rhs, sizes, (-1, -2), static.out_dtype, static.precision
        )
        return unscaled(product, *given, spec), (lhs, rhs)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grad_lhs(static: Static, g: jax.Array, other, bar: Bar, key: Key) -> jax.Array:
    """`[m, n]` by `[g, k, n]` to `[m, k]`."""
    (rhs, sizes), spec = other, static.recipe.dlhs
    with jax.named_scope("grad_lhs"):
        rhs = gradients.reuse(rhs, spec.rhs, _LAST)
        own, given = product_key(static.recipe, "dlhs", key), (g, rhs)
        lhs, rhs = _prepare_kept(g, rhs, _LAST, sizes, spec, own)
        product = ragged.scaled_ragged_dot(lhs, rhs, sizes, (-1, -1), bar.dtype, static.precision)
        return unscaled(product, *given, spec)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grad_rhs(static: Static, g: jax.Array, other, bar: Bar, key: Key) -> jax.Array:
    """`[p, k]` by `[p, n]` to `[g, k, n]`: p are the rows, those of each group padded to blocks."""
    (lhs, sizes), spec = other, static.recipe.drhs.swapped()
    with jax.named_scope("grad_rhs"):
        if isinstance(lhs, MXArray):
            lhs = decode(lhs, lhs.dtype if spec.lhs is None else jnp.float32, saturates=True)
        rows = ragged_rows(sizes, g.shape[0], _unit(spec))
        lhs, rhs, lhs_key, rhs_key = _transform_both(
            rows.place(lhs), rows.place(g), (-2, -2), spec, product_key(static.recipe, "drhs", key)
        )
        given = lhs, rhs
        lhs = _prepare_contracted(rows, lhs, spec.lhs, lhs_key)
        rhs = _prepare_contracted(rows, rhs, spec.rhs, rhs_key)
        product = ragged.scaled_ragged_dot(
            lhs, rhs, rows.sizes, (-2, -2), bar.dtype, static.precision
        )
        return unscaled(product, *given, spec)


def _unit(spec: MatmulSpec) -> int:
    """Rows that each group is padded to, so that blocks and transforms along them end with it."""
    sizes = [x.format.block[1] for x in (spec.lhs, spec.rhs) if x is not None]
    transformed = 1 if spec.transform is None else spec.transform.size
    return math.lcm(transformed, *(size for size in sizes if isinstance(size, int)))


def _without_unused(x: Operand, sizes: jax.Array) -> Operand:
    """x with zeros in the rows of no group, which a tensor scale would count."""
    return x if isinstance(x, MXArray) else ragged_rows(sizes, x.shape[0], unit=1).place(x)


def _transform_both(
    lhs: Operand, rhs: Operand, contracting: tuple[int, int], spec: MatmulSpec, key: Key
) -> tuple[Any, Any, Key, Key]:
    """Both operands transformed along their contracting axes, and each one's key."""
    lhs_key, rhs_key, sign_key = operand_keys(key)
    if spec.transform is not None:
        signs = hadamard.draw_signs(spec.transform, sign_key)
        lhs, rhs = _transform(lhs, signs, contracting[0]), _transform(rhs, signs, contracting[1])
    return lhs, rhs, lhs_key, rhs_key


def _prepare_kept(
    lhs: Operand, rhs: Operand, right: Place, sizes: jax.Array, spec: MatmulSpec, key: Key
) -> tuple[Operand, Operand]:
    """Both operands as a product that keeps the rows takes them."""
    lhs = _without_unused(lhs, sizes)
    lhs, rhs, lhs_key, rhs_key = _transform_both(lhs, rhs, (-1, right.block_axis), spec, key)
    return _prepare_rows(sizes, lhs, spec.lhs, lhs_key), prepare(rhs, spec.rhs, right, rhs_key)


def _prepare_rows(sizes: jax.Array, x: Operand, spec: OperandSpec | None, key: Key) -> Operand:
    """`[m, k]` quantized along k, in blocks that end with their group if they hold several rows."""
    if spec is None or isinstance(x, MXArray) or spec.format.block[0] == 1:
        return prepare(x, spec, _LAST, key)
    height = spec.format.block[0]
    if isinstance(height, Whole):
        return _quantize_groups(ragged_rows(sizes, x.shape[0], unit=1), x, spec, _LAST, key)
    rows = ragged_rows(sizes, x.shape[0], unit=height)
    return rows.restore(prepare(rows.place(x), spec, _LAST, key))


def _prepare_contracted(
    rows: RaggedRows, x: jax.Array, spec: OperandSpec | None, key: Key
) -> Operand:
    """`[p, c]` quantized along p, where groups start with blocks."""
    if spec is None or not isinstance(spec.format.block[1], Whole):
        return prepare(x, spec, _SECOND_LAST, key)
    return _quantize_groups(rows, x, spec, _SECOND_LAST, key)


def _quantize_groups(
    rows: RaggedRows, x: jax.Array, spec: OperandSpec, place: Place, key: Any
) -> MXArray:
    """`[p, c]` in blocks that hold all rows of a group: scales come from the groups' peaks."""
    x = prescaled(x, spec)
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    peaks = quantize_operand(ragged.group_peaks(x, rows), nearest, place.blocks(spec))
    bits = draw_bits(key, x.shape, spec.rounding) if spec.rounding.random_bits else None
    return ragged.encode_by_group(x, rows, peaks, spec.rounding, bits)
