"""What ragged products do to their operands before they multiply."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import explicit_mesh
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import Key, draw_bits
from mx_jax.ops.operands import (
    SWAPPED,
    check_whole_groups,
    dequantize_operand,
    keep,
    operand_keys,
    prepare,
    prescaled,
    quantize_operand,
    reuse_moved,
    transform_operands,
)
from mx_jax.ops.product import AnyResidual, Primal, R, note_cast
from mx_jax.ops.remat import QUANTIZED
from mx_jax.ops.sharded_operands import Placed, given_moves, place, stored
from mx_jax.packed import Quantized, unpacked
from mx_jax.reference import ragged
from mx_jax.reference.ragged import RaggedRows, ragged_rows
from mx_jax.sharding.movement import Movement, spec_of
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec

# The axis of experts is no batch axis here: a format that is WHOLE takes one matrix at a time.
LAST = Axes.ordered()
SECOND_LAST = Axes.ordered(k_first=True)


def values_of(x: AnyOperand, spec: OperandSpec | None) -> jax.Array:
    """A saved operand's values, to be quantized anew unless it is to stay in high precision."""
    x = unpacked(x)
    if not isinstance(x, MXArray):
        return x
    dtype = x.dtype if spec is None else np.dtype(np.float32)
    return dequantize_operand(x, dtype, saturates=True)


def padding_unit(spec: MatmulSpec) -> int:
    """Rows that each group is padded to, so that blocks and transforms along them end with it."""
    given = [x for x in (spec.lhs, spec.rhs) if x is not None]
    sizes = [x.format.block[1] for x in given] + [x.scale_rule.group for x in given]
    transformed = 1 if spec.transform is None else spec.transform.size
    return math.lcm(transformed, *(size for size in sizes if isinstance(size, int)))


def without_unused(x: AnyOperand, sizes: jax.Array) -> AnyOperand:
    """x with zeros in the rows of no group, which a tensor scale would count."""
    return x if isinstance(x, Quantized) else ragged_rows(sizes, x.shape[0], unit=1).place(x)


def prepare_kept(
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    sizes: jax.Array,
    spec: MatmulSpec,
    key: Key,
    move: Movement | None = None,
) -> tuple[AnyOperand, AnyOperand]:
    """Both operands as a product that keeps the rows takes them; rhs gets to it by `move`."""
    _, (rows, matrices), placed = _take_kept(lhs, rhs, axes, sizes, spec, key, move)
    if placed.move is not None and isinstance(matrices, MXArray):
        matrices = placed.move.move_codes(matrices)
    return rows, matrices


def keep_both(
    recipe: MatmulRecipe,
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    sizes: jax.Array,
    key: Key,
    move: Movement | None,
) -> tuple[AnyResidual, AnyResidual]:
    """Both operands as such a product takes them, where they lie, for its gradients."""
    check_whole_groups(recipe, rhs, axes.rhs, move)
    spec = recipe.fwd
    (left, right), (rows, matrices), _ = _take_kept(lhs, rhs, axes, sizes, spec, key, None)
    return keep(recipe, lhs, left, rows, axes.lhs), keep(recipe, rhs, right, matrices, axes.rhs)


def _take_kept(
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    sizes: jax.Array,
    spec: MatmulSpec,
    key: Key,
    move: Movement | None,
) -> tuple[tuple[Any, Any], tuple[Any, Any], Placed]:
    """Both operands transformed, the same as the product takes them, and where rhs is quantized."""
    # Products leave out the rows of no group; scales of more than a row would count them.
    own = None if spec.lhs is None else spec.lhs.format
    if own is not None and (own.tensor_scale or isinstance(own.block[0], Whole)):
        lhs = without_unused(lhs, sizes)
    lhs_key, rhs_key, _ = operand_keys(key)
    placed = place(rhs, move, spec.rhs, axes.rhs, rhs_key, spec.transform)
    left, right, _ = transform_operands(lhs, placed.operand, spec, axes, key)
    rows = _prepare_rows(sizes, left, spec.lhs, lhs_key)
    matrices = prepare(right, spec.rhs, axes.rhs, placed.key, placed.tensor_scale, side="rhs")
    return (left, right), (rows, matrices), placed


def _prepare_rows(
    sizes: jax.Array, x: AnyOperand, spec: OperandSpec | None, key: Key
) -> AnyOperand:
    """`[m, k]` quantized along k, in blocks that end with their group if they hold several rows."""
    if spec is None or isinstance(x, Quantized) or spec.format.block[0] == 1:
        return prepare(x, spec, LAST, key)
    height = spec.format.block[0]
    if isinstance(height, Whole):
        return _quantize_groups(ragged_rows(sizes, x.shape[0], unit=1), x, spec, LAST, key, "lhs")
    rows = ragged_rows(sizes, x.shape[0], unit=height)
    padded = prepare(rows.place(x), spec, LAST, key)
    assert isinstance(padded, MXArray)
    quantized = rows.restore(padded)
    # Instead of the padded rows.
    note_cast("lhs", prescaled(x, spec), quantized, spec.scale_rule.name, LAST.block_axis)
    return quantized


def prepare_contracted(
    rows: RaggedRows, x: jax.Array, spec: OperandSpec | None, key: Key, side: Side
) -> AnyOperand:
    """`[p, c]` quantized along p, where groups start with blocks."""
    if spec is None or not isinstance(spec.format.block[1], Whole):
        return prepare(x, spec, SECOND_LAST, key, side=side)
    return _quantize_groups(rows, x, spec, SECOND_LAST, key, side)


class Contracted(NamedTuple):
    """Operands whose rows are padded to whole groups: as given, and quantized."""

    rows: RaggedRows
    given: tuple[jax.Array, jax.Array]
    lhs: AnyOperand
    rhs: AnyOperand


def contracted_operands(
    lhs: AnyOperand, g: jax.Array, sizes: jax.Array, spec: MatmulSpec, axes: ProductAxes, key: Key
) -> Contracted:
    """Both operands of a product that sums over the rows of each group."""
    rows = ragged_rows(sizes, g.shape[0], padding_unit(spec))
    given = rows.place(values_of(lhs, spec.lhs)), rows.place(g)
    left, right, (lhs_key, rhs_key) = transform_operands(*given, spec, axes, key)
    return Contracted(
        rows,
        given,
        prepare_contracted(rows, left, spec.lhs, lhs_key, SWAPPED[0]),
        prepare_contracted(rows, right, spec.rhs, rhs_key, SWAPPED[1]),
    )


def _quantize_groups(
    rows: RaggedRows, x: jax.Array, spec: OperandSpec, axes: Axes, key: Key, side: Side
) -> MXArray:
    """`[p, c]` in blocks that hold all rows of a group: scales come from the groups' peaks."""
    x = prescaled(x, spec)
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    peaks = quantize_operand(ragged.group_peaks(x, rows), nearest, axes.blocks(spec.format))
    width = spec.rounding.random_bits
    bits = draw_bits(key, x.shape, width) if key is not None and width else None
    codes = ragged.encode_by_group(x, rows, peaks, spec.rounding, bits)
    note_cast(side, x, codes, spec.scale_rule.name, axes.block_axis)
    return checkpoint_name(codes, QUANTIZED)


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


def at_most(sizes: jax.Array, num_rows: int) -> jax.Array:
    """Sizes as int32: no group has more than all rows."""
    # Narrow integers would overflow when sizes are added up, wide ones when they are made narrow.
    if sizes.dtype.itemsize >= 4:
        sizes = jnp.minimum(sizes, jnp.asarray(num_rows, sizes.dtype))
    return sizes.astype(jnp.int32)


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


def matrices_back(
    rhs: AnyOperand, move: Movement | None, spec: MatmulSpec
) -> tuple[AnyOperand, Movement | None]:
    """Saved matrices as the rows' gradient multiplies them, and how they get there."""
    return reuse_moved(rhs, move, spec, LAST)


def on_automatic_axes(
    multiply: Callable[[Primal, Primal, R, MatmulRecipe], jax.Array],
    lhs: Primal,
    rhs: Primal,
    extra: R,
    recipe: MatmulRecipe,
) -> jax.Array:
    """A ragged product, on explicit mesh axes as on automatic ones."""
    # JAX infers no types of ragged products: rows are sharded as lhs's, columns as rhs's that stay.
    if (mesh := explicit_mesh(lhs, rhs)) is None:
        return multiply(lhs, rhs, extra, recipe)
    with jax.sharding.use_abstract_mesh(mesh):
        return _on_explicit_axes(mesh, multiply, lhs, rhs, extra, recipe)


def _on_explicit_axes(
    mesh: AbstractMesh,
    multiply: Callable[[Primal, Primal, R, MatmulRecipe], jax.Array],
    lhs: Primal,
    rhs: Primal,
    extra: R,
    recipe: MatmulRecipe,
) -> jax.Array:
    rows, lies = stored(lhs.operand)[0], stored(rhs.operand)
    gathered = frozenset[str]()
    if recipe.gather is not None:
        gathered = recipe.gather.on_mesh()
        own = dataclasses.replace(recipe.gather, rhs=spec_of(lies))
        recipe = dataclasses.replace(recipe, gather=own)
    columns = tuple(name for name in lies[2] if name not in {*gathered, *rows})
    run: Any = jax.sharding.auto_axes(
        lambda lhs, rhs, extra: multiply(lhs, rhs, extra, recipe),
        axes=mesh.explicit_axes,
        out_sharding=PartitionSpec(rows or None, columns or None),
    )
    return run(lhs, rhs, extra)
