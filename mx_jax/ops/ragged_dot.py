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
from mx_jax.mxarray import MXArray
from mx_jax.ops import gradients
from mx_jax.ops.canonical import Groups, _check_blocks
from mx_jax.ops.dot_general import _check_matmul_key, as_operand
from mx_jax.ops.gradients import Bar, Static
from mx_jax.ops.matmul import Place, _transform, operand_keys, prepare
from mx_jax.ops.quantize import draw_bits, quantize_operand
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
      key: PRNG key, if the recipe rounds stochastically.

    Returns:
      The product, `[m, n]`.

    Raises:
      ValueError: shapes that do not fit, an MXArray blocked along another axis, a key missing or
        not wanted, a recipe with what cannot be done group by group.
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
        as_operand(unpacked(operand), side, recipe)
        for operand, side in ((lhs, "lhs"), (rhs, "rhs"))
    )
    sizes = _as_group_sizes(group_sizes)
    _check_shapes(lhs, rhs, sizes)
    _check_matmul_key(key, recipe)
    if recipe.is_high_precision and not isinstance(lhs, MXArray) and not isinstance(rhs, MXArray):
        return lax.ragged_dot(
            lhs, rhs, sizes, precision=precision, preferred_element_type=preferred_element_type
        )
    _check_rows(recipe)
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


def _as_group_sizes(group_sizes: Any) -> jax.Array:
    sizes = group_sizes if isinstance(group_sizes, jax.Array) else jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"ragged_dot: group_sizes must be integers, got dtype={sizes.dtype}, "
            f"shape={sizes.shape}; convert them, e.g. group_sizes.astype(jnp.int32)"
        )
    # Narrow integers would overflow when sizes are added up.
    return sizes.astype(jnp.int32)


def _check_shapes(lhs: Operand, rhs: Operand, sizes: jax.Array) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or sizes.ndim != 1:
        rule = "needs lhs [m, k], rhs [g, k, n] and group_sizes [g] (jax.vmap adds a batch)"
    elif lhs.shape[1] != rhs.shape[1]:
        rule = f"contracting sizes must agree, here k={lhs.shape[1]} and k={rhs.shape[1]}"
    elif rhs.shape[0] != sizes.shape[0]:
        rule = f"every group needs a matrix, here g={sizes.shape[0]} and g={rhs.shape[0]}"
    else:
        return
    raise ValueError(
        f"ragged_dot: {rule}; got lhs.shape={lhs.shape}, rhs.shape={rhs.shape}, "
        f"group_sizes.shape={sizes.shape}"
    )


def _check_rows(recipe: MatmulRecipe) -> None:
    """Raise for what a recipe asks of the ragged axis and cannot have."""
    fwd, dlhs, drhs = recipe.fwd, recipe.dlhs, recipe.drhs
    over_rows = [("fwd.lhs", fwd.lhs, 0), ("dlhs.lhs", dlhs.lhs, 0)]
    over_rows += [("drhs.lhs", drhs.lhs, 1), ("drhs.rhs", drhs.rhs, 1)]
    for name, spec, axis in over_rows:
        if spec is None or not isinstance(spec.format.block[axis], Whole):
            continue
        # Such a rule cannot be split into peaks and scales.
        if spec.scale_rule.reads_values:
            raise ValueError(
                f"ragged_dot: {name} of recipe {recipe.name!r} has one block for all rows of a "
                f"group, got block={spec.format.block} of format={spec.format.name}, which "
                f"scale_rule={spec.scale_rule.name!r} cannot fill, since it looks at more than "
                "the largest value; use another rule, or blocks of a fixed size (a function of "
                "one's own that looks at amax alone: FromAmax(function))"
            )
    if recipe.mask_clipped and fwd.lhs is not None and fwd.lhs.format.block[0] != 1:
        raise ValueError(
            f"ragged_dot: mask_clipped=True of recipe {recipe.name!r} needs blocks of one row in "
            f"fwd.lhs, got block={fwd.lhs.format.block} of format={fwd.lhs.format.name}; use such "
            "a format, or mask_clipped=False"
        )


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
        lhs, rhs = _prepare_kept(lhs, rhs, _SECOND_LAST, sizes, spec, gradients.fold_in(key, 0))
        product = _product(lhs, rhs, (-1, -2), sizes, spec, static.out_dtype, static.precision)
        return product, (lhs, rhs)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grad_lhs(static: Static, g: jax.Array, other, bar: Bar, key: Key) -> jax.Array:
    """`[m, n]` by `[g, k, n]` to `[m, k]`."""
    (rhs, sizes), spec = other, static.recipe.dlhs
    with jax.named_scope("grad_lhs"):
        rhs = gradients.reuse(rhs, spec.rhs, _LAST)
        lhs, rhs = _prepare_kept(g, rhs, _LAST, sizes, spec, gradients.fold_in(key, 1))
        return _product(lhs, rhs, (-1, -1), sizes, spec, bar.dtype, static.precision)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grad_rhs(static: Static, g: jax.Array, other, bar: Bar, key: Key) -> jax.Array:
    """`[p, k]` by `[p, n]` to `[g, k, n]`: p are the rows, those of each group padded to blocks."""
    (lhs, sizes), spec = other, static.recipe.drhs.swapped()
    with jax.named_scope("grad_rhs"):
        if isinstance(lhs, MXArray):
            lhs = lhs.dequantize() if spec.lhs is None else lhs.dequantize(jnp.float32)
        rows = ragged_rows(sizes, g.shape[0], _unit(spec))
        lhs, rhs, lhs_key, rhs_key = _transform_both(
            rows.place(lhs), rows.place(g), (-2, -2), spec, gradients.fold_in(key, 2)
        )
        lhs = _prepare_contracted(rows, lhs, spec.lhs, lhs_key)
        rhs = _prepare_contracted(rows, rhs, spec.rhs, rhs_key)
        return _product(lhs, rhs, (-2, -2), rows.sizes, spec, bar.dtype, static.precision)


def _product(lhs, rhs, contracting, sizes, spec: MatmulSpec, dtype, precision: Any) -> jax.Array:
    product = ragged.scaled_ragged_dot(lhs, rhs, sizes, contracting, dtype, precision)
    return product if spec.unscale == 1.0 else product * jnp.asarray(spec.unscale, dtype)


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
    if spec.prescale != 1.0:
        x = x * jnp.asarray(spec.prescale, x.dtype)
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    peaks = quantize_operand(ragged.group_peaks(x, rows), nearest, place.blocks(spec))
    bits = draw_bits(key, x.shape, spec.rounding) if spec.rounding.random_bits else None
    return ragged.encode_by_group(x, rows, peaks, spec.rounding, bits)
