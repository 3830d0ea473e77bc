"""ragged_dot with a recipe: rows in consecutive groups, each with a right operand of its own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from mx_jax.backends.calls import AnyOperand
from mx_jax.backends.target import follow
from mx_jax.codecs.explicit_axes import AxisNames, explicit_mesh
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import (
    Key,
    as_operand,
    as_recipe,
    check_matmul_key,
    dtype_of_product,
    goes_to_lax,
    product_key,
)
from mx_jax.ops.dense import operand_keys, quantize_operand
from mx_jax.ops.dot_general import check_blocks
from mx_jax.ops.packing import packed_for
from mx_jax.ops.product import Primal, run_product
from mx_jax.ops.ragged_product import LAST, Groups, RaggedProduct
from mx_jax.ops.sharded_operands import agreed_scale, given_moves, stored
from mx_jax.ops.tags import watching
from mx_jax.ops.watched import watched
from mx_jax.packed import OperandLike, PackedMXArray, Quantized
from mx_jax.reference.ragged import ragged_rows
from mx_jax.reference.random_bits import DerivedKey
from mx_jax.sharding.dispatch import as_int32, dispatch
from mx_jax.sharding.movement import Movement, as_gathered, spec_of
from mx_jax.specs import MatmulRecipe, MatmulSpec

_EXPERTS = (((1,), (1,)), ((), (0,)))


def ragged_dot(
    lhs: OperandLike,
    rhs: OperandLike,
    group_sizes: jax.typing.ArrayLike | Sequence[int],
    *,
    recipe: MatmulRecipe | str,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    key: Key = None,
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

    Examples:
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
    lhs = as_operand(lhs, "lhs", recipe, "ragged_dot")
    rhs = as_operand(rhs, "rhs", recipe, "ragged_dot")
    if isinstance(rhs, PackedMXArray):
        rhs = packed_for(rhs, _EXPERTS, "ragged_dot")
    sizes, to_lax = as_group_sizes(group_sizes), goes_to_lax(recipe, lhs, rhs)
    move = None if to_lax else experts_move(recipe, lhs, rhs)
    check_shapes(lhs, as_gathered(rhs, move), sizes)
    sizes = as_int32(sizes, lhs.shape[0])
    key = check_matmul_key(key, recipe)
    if to_lax:
        assert not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized)
        return lax.ragged_dot(
            lhs, rhs, sizes, precision=precision, preferred_element_type=preferred_element_type
        )
    check_rows(recipe)
    out_dtype = dtype_of_product(preferred_element_type, lhs, rhs, "ragged_dot")
    for operand, side in ((lhs, "lhs"), (rhs, "rhs")):
        if isinstance(operand, MXArray):
            check_blocks(operand, 1, side, "ragged_dot")
    groups = Groups(ragged_rows(sizes, lhs.shape[0], unit=1).sizes, key)

    def run(lhs: Primal, rhs: Primal, groups: Groups, recipe: MatmulRecipe) -> jax.Array:
        moves = None, experts_move(recipe, lhs.operand, rhs.operand)
        product = RaggedProduct(
            recipe=recipe, out_dtype=out_dtype, precision=precision, moves=moves
        )
        return (watched if watching.value else run_product)(product, lhs, rhs, groups)

    with follow(lhs, rhs):
        # JAX infers no types of ragged products: rows are sharded as lhs's, columns as rhs's.
        mesh, given = explicit_mesh(lhs, rhs), (Primal.of(lhs), Primal.of(rhs), groups)
        return run(*given, recipe) if mesh is None else _on_explicit_axes(mesh, run, *given, recipe)


def _on_explicit_axes(
    mesh: AbstractMesh,
    multiply: Callable[..., jax.Array],
    lhs: Primal,
    rhs: Primal,
    groups: Groups,
    recipe: MatmulRecipe,
) -> jax.Array:
    with jax.sharding.use_abstract_mesh(mesh):
        rows, lies = stored(lhs.operand)[0], stored(rhs.operand)
        gathered = frozenset[str]()
        if recipe.gather is not None:
            gathered = recipe.gather.on_mesh()
            own = dataclasses.replace(recipe.gather, rhs=spec_of(lies))
            recipe = dataclasses.replace(recipe, gather=own)
        columns = tuple(name for name in lies[2] if name not in {*gathered, *rows})
        run: Any = jax.sharding.auto_axes(
            lambda lhs, rhs, groups: multiply(lhs, rhs, groups, recipe),
            axes=mesh.explicit_axes,
            out_sharding=PartitionSpec(rows or None, columns or None),
        )
        return run(lhs, rhs, groups)


# What it refuses ----------------------------------------------------------------------------------


def as_group_sizes(group_sizes: jax.typing.ArrayLike | Sequence[int]) -> jax.Array:
    """Group sizes as an array of integers; known ones that it could not hold are refused."""
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(group_sizes)):
        _check_numbers(np.asarray(group_sizes))
    sizes = group_sizes if isinstance(group_sizes, jax.Array) else jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"ragged_dot: group_sizes must be integers, got dtype={sizes.dtype}, "
            f"shape={sizes.shape}; convert them, e.g. group_sizes.astype(jnp.int32)"
        )
    return sizes


def _check_numbers(sizes: np.ndarray) -> None:
    """JAX would wrap what is larger than its integers, without a word."""
    if sizes.dtype.kind not in "iuO" or not sizes.size:
        return
    largest = jnp.iinfo(jnp.asarray(0).dtype).max
    for size in sizes.flat:
        if isinstance(size, int | np.integer) and not 0 <= size <= largest:
            raise ValueError(
                f"ragged_dot: group_sizes must lie in 0..{largest}, got {size} among "
                f"{sizes.size}; what exceeds the rows of lhs is cut off: "
                "numpy.clip(group_sizes, 0, lhs.shape[0])"
            )


def check_shapes(lhs: AnyOperand, rhs: AnyOperand | jax.ShapeDtypeStruct, sizes: jax.Array) -> None:
    """Raise ValueError unless the shapes are those of a ragged product."""
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


def check_rows(recipe: MatmulRecipe) -> None:
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


def experts_move(recipe: MatmulRecipe, lhs: AnyOperand, rhs: AnyOperand) -> Movement | None:
    """How the matrices get to their products: as their recipe gathers them; None: not at all.

    Raises:
      ValueError: rows that would be gathered, whose groups no gather would put together.
    """
    if recipe.gather is not None and recipe.gather.lhs is not None:
        raise ValueError(
            f"ragged_dot: gather brings experts to their rows, not rows together, whose groups "
            f"would be torn apart, got lhs={recipe.gather.lhs} with lhs.shape={lhs.shape}; leave "
            "lhs out, or send rows to their experts with mx_jax.expert_ragged_dot"
        )
    return given_moves(recipe, lhs, rhs)[1]


# Experts on several devices -----------------------------------------------------------------------


def expert_ragged_dot(
    lhs: OperandLike,
    rhs: OperandLike,
    group_sizes: jax.typing.ArrayLike | Sequence[int],
    axis_name: AxisNames,
    *,
    recipe: MatmulRecipe | str,
    capacity: int | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    key: Key = None,
) -> jax.Array:
    """`ragged_dot` with its experts sharded over a mesh axis; inside `jax.shard_map`.

    Each of d devices has rows of its own for all experts, and an equal part of the experts. Rows
    are quantized where they are, sent to the devices of their experts as codes at their real width
    and scales, multiplied there by `ragged_dot`, and the products sent back; gradients go the same
    way in high precision. Groups have any length. The product is that of
    `ragged_dot(quantize(lhs), all experts)` for all devices' rows; a group's rows lie by device.

    Sent as values, and quantized as they arrive, are rows that the recipe keeps in high precision,
    transforms, prescales, or quantizes in blocks of several rows. One tensor scale (NVFP4) is that
    of all devices' rows. `sharding.dispatch` is for several products between the two all-to-alls.

    Args:
      lhs: `[m, k]`, this device's rows, by expert: values, or an MXArray blocked along k.
      rhs: `[experts / d, k, n]`, this device's consecutive part, as `ragged_dot` takes it.
      group_sizes: integers `[experts]`, this device's rows for each of all experts.
      axis_name: mesh axis, or axes, of d devices.
      recipe: as `ragged_dot` takes it.
      capacity: as in `sharding.dispatch`: None loses no row.
      precision: as in `ragged_dot`.
      preferred_element_type: as in `ragged_dot`; products are sent back in it.
      key: as in `ragged_dot`, the same on all devices: each one's index is folded into it.

    Returns:
      The product of this device's rows, `[m, n]`; zeros in rows of no group.

    Raises:
      ValueError: what `ragged_dot` and `sharding.dispatch` raise.
      TypeError: likewise.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> product = functools.partial(
      ...     mx_jax.expert_ragged_dot, axis_name="expert", recipe="mxfp4")
      >>> run = jax.shard_map(product, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> jax.jit(run)(jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([1, 2]))[:, 0]
      Array([64., 64., 64.,  0.], dtype=float32)
    """
    recipe = as_recipe(recipe, "expert_ragged_dot")
    lhs = as_operand(lhs, "lhs", recipe, "expert_ragged_dot")
    sizes = as_int32(as_group_sizes(group_sizes), lhs.shape[0])
    key = check_matmul_key(key, recipe)
    if key is not None:
        key = DerivedKey.of(key).fold_in(lax.axis_index(axis_name))
    assert not isinstance(lhs, PackedMXArray)
    given = isinstance(lhs, MXArray)
    rows = lhs if given else _quantized(lhs, recipe, sizes, axis_name, key)
    sent = dispatch(rows, sizes, axis_name, capacity=capacity, same_scale=not given)
    y = ragged_dot(
        sent.rows,
        rhs,
        sent.group_sizes,
        recipe=recipe,
        precision=precision,
        preferred_element_type=preferred_element_type,
        key=key,
    )
    return sent.send_back(y)


def _quantized(
    x: jax.Array, recipe: MatmulRecipe, sizes: jax.Array, axis_name: AxisNames, key: Key
) -> jax.Array | MXArray:
    """Rows as the product takes them, unless it takes rows together, or changes them first."""
    if not goes_by_row(recipe.fwd):
        return x
    spec = recipe.fwd.lhs
    assert spec is not None
    if spec.format.tensor_scale:
        # The scale of all rows is that of those in groups.
        x = ragged_rows(sizes, x.shape[0], unit=1).place(x)
    blocks = LAST.blocks(spec.format)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    drawn = operand_keys(product_key(recipe, "fwd", key))[0] if spec.random_bits else None
    tensor_scale = agreed_scale(x, spec, blocks, axes)
    codes = quantize_operand(x, spec, blocks, drawn, tensor_scale)
    return dataclasses.replace(codes, primal=x)


def goes_by_row(spec: MatmulSpec) -> bool:
    """Whether a product takes its rows as they are quantized one by one, wherever they lie."""
    own = spec.lhs
    if own is None or own.prescale != 1.0 or spec.transform is not None:
        return False
    return own.format.block[0] == 1
