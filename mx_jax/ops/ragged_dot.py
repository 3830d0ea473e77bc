"""ragged_dot with a recipe: rows in consecutive groups, each with a right operand of its own.

Two of the three products keep the rows (output, grad_input), the third sums over those of each
group (grad_weight). Nothing is transposed: blocks lie along whichever axis is contracted.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from mx_jax.axes import Axes, ProductAxes
from mx_jax.backends.calls import AnyOperand, OperandType, RaggedCall
from mx_jax.backends.primitive import bind
from mx_jax.codecs.explicit_axes import AxisNames
from mx_jax.codecs.rounding import NEAREST, DerivedKey
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray
from mx_jax.ops import arguments
from mx_jax.ops.arguments import Key, as_operand
from mx_jax.ops.dot_general import check_blocks
from mx_jax.ops.packing import packed_for
from mx_jax.ops.product import (
    CastArguments,
    MatmulPass,
    Operands,
    QuantizedMatmul,
    as_cast,
    cast_array,
    cast_operand,
    on_automatic_axes,
    operand_keys,
    product_key,
    quantize_operands,
)
from mx_jax.ops.programs import QUANTIZED
from mx_jax.ops.sharded_operands import agreed_scale, moves_of, stored
from mx_jax.packed import OperandLike, PackedMXArray, Quantized
from mx_jax.reference.matmul import (
    RaggedRows,
    encode_by_group,
    group_peaks,
    grouped_dot,
    ragged_rows,
    scaled_ragged_dot,
)
from mx_jax.sharding.exchange import as_int32, dispatch
from mx_jax.sharding.movement import Movement, as_gathered, spec_of
from mx_jax.specs import MatmulRecipe, MatmulSpec

# Dimension numbers of what packed weights are laid out for.
_EXPERTS = (((1,), (1,)), ((), (0,)))
# The axis of experts is no batch axis here: a format that is WHOLE takes one matrix at a time.
LAST = Axes.ordered()
AXES = ProductAxes(LAST, Axes.ordered(k_first=True))


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
    group j, `y[I_j] = Q(lhs[I_j]) Q(rhs[j])`, `grad_input[I_j] = Q(g[I_j]) Q(rhs[j])^T` and
    `grad_weight[j] = Q(lhs[I_j])^T Q(g[I_j])`: what `matmul` gives for each group alone, so no
    block crosses a group border, and blocks along the rows start at each group's first. Only a
    tensor scale (NVFP4) belongs to a whole operand. Rows beyond the last group, whatever they hold,
    give zeros and take part in nothing; NaN in a matrix is in the rows of its group alone (without
    a kernel for it, Inf counts as NaN).

    Args:
      lhs: float32, bfloat16 or float16 values, or an MXArray blocked along its last axis, which is
        used as it is.
      rhs: likewise, blocked along its second-last axis.
      group_sizes: integers, not negative; what they add up to beyond m is cut off.
      recipe: what to quantize, e.g. `mx_jax.recipes.mxfp8()` or its name; `high_precision()` is
        `jax.lax.ragged_dot`, but for NaN in the matrices of other groups.
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
    recipe = arguments.as_recipe(recipe, "ragged_dot")
    lhs = as_operand(lhs, "lhs", recipe, "ragged_dot")
    rhs = as_operand(rhs, "rhs", recipe, "ragged_dot")
    if isinstance(rhs, PackedMXArray):
        rhs = packed_for(rhs, _EXPERTS, "ragged_dot")
    sizes, to_lax = as_group_sizes(group_sizes), arguments.goes_to_lax(recipe, lhs, rhs)
    move = None if to_lax else experts_move(recipe, lhs, rhs)
    _check_shapes(lhs, as_gathered(rhs, move), sizes)
    sizes = as_int32(sizes, lhs.shape[0])
    key = arguments.check_matmul_key(key, recipe)
    if to_lax:
        assert not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized)
        if not jnp.issubdtype(rhs.dtype, jnp.floating):
            how: Any = {"preferred_element_type": preferred_element_type}
            return lax.ragged_dot(lhs, rhs, sizes, precision=precision, **how)
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        return grouped_dot(lhs, rhs, sizes, (-1, -2), precision, dtype)
    _check_rows(recipe)
    arguments.check_precision(precision, "ragged_dot")
    out_dtype = arguments.dtype_of_product(preferred_element_type, lhs, rhs, "ragged_dot")
    for operand, side in ((lhs, "lhs"), (rhs, "rhs")):
        if isinstance(operand, MXArray):
            check_blocks(operand, 1, side, "ragged_dot")
    sizes = ragged_rows(sizes, lhs.shape[0], unit=1).sizes

    def run(
        recipe: MatmulRecipe, lhs: AnyOperand, rhs: AnyOperand, key: Key, sizes: jax.Array
    ) -> jax.Array:
        return QuantizedMatmul(
            recipe=recipe,
            axes=AXES,
            out_dtype=out_dtype,
            precision=precision,
            moves=(None, experts_move(recipe, lhs, rhs)),
            quantizer=_quantize,
            multiplier=_multiply,
        ).run(lhs, rhs, key, sizes)

    mesh = arguments.explicit_mesh(lhs, rhs)
    if mesh is None:
        return run(recipe, lhs, rhs, key, sizes)
    # JAX infers no types of ragged products: rows are sharded as lhs's, columns as rhs's.
    with jax.sharding.use_abstract_mesh(mesh):
        rows, lies = stored(lhs)[0], stored(rhs)
        gathered = frozenset[str]()
        if recipe.gather is not None:
            gathered = recipe.gather.on_mesh()
            where = dataclasses.replace(recipe.gather, rhs=spec_of(lies))
            recipe = dataclasses.replace(recipe, gather=where)
        columns = tuple(name for name in lies[2] if name not in {*gathered, *rows})
        out = PartitionSpec(rows or None, columns or None)
        by_recipe = functools.partial(run, recipe)
        return on_automatic_axes(by_recipe, mesh, out, lhs, rhs, key, sizes)


# What it refuses ----------------------------------------------------------------------------------


def as_group_sizes(group_sizes: jax.typing.ArrayLike | Sequence[int]) -> jax.Array:
    """Group sizes as an array of integers; known ones that it could not hold are refused."""
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(group_sizes)):
        # JAX would wrap what is larger than its integers, without a word.
        known = np.asarray(group_sizes)
        largest = jnp.iinfo(jnp.asarray(0).dtype).max
        for size in known.flat if known.dtype.kind in "iuO" else ():
            if isinstance(size, int | np.integer) and not 0 <= size <= largest:
                raise ValueError(
                    f"ragged_dot: group_sizes must lie in 0..{largest}, got {size} among "
                    f"{known.size}; what exceeds the rows of lhs is cut off: "
                    "numpy.clip(group_sizes, 0, lhs.shape[0])"
                )
    sizes = group_sizes if isinstance(group_sizes, jax.Array) else jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"ragged_dot: group_sizes must be integers, got dtype={sizes.dtype}, "
            f"shape={sizes.shape}; convert them, e.g. group_sizes.astype(jnp.int32)"
        )
    return sizes


def _check_shapes(
    lhs: AnyOperand, rhs: AnyOperand | jax.ShapeDtypeStruct, sizes: jax.Array
) -> None:
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


def _check_rows(recipe: MatmulRecipe) -> None:
    """Raise for what a recipe asks of the ragged axis and cannot have."""
    output, grad_input, grad_weight = recipe.output, recipe.grad_input, recipe.grad_weight
    over_rows = [("output.lhs", output.lhs, 0), ("grad_input.lhs", grad_input.lhs, 0)]
    over_rows += [("grad_weight.lhs", grad_weight.lhs, 1), ("grad_weight.rhs", grad_weight.rhs, 1)]
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
    return moves_of(recipe, lhs, rhs)[1]


# The product --------------------------------------------------------------------------------------


def _quantize(
    this: MatmulPass, operands: Operands, key: Key, sizes: jax.Array
) -> tuple[Operands, jax.Array | None]:
    """`product.quantize_operands`, in blocks that end with their group."""
    lhs, rhs = operands
    if this.name == "grad_weight":
        # The rows of each group are padded to whole blocks, so that blocks and transforms along
        # the rows end with their group.
        units = [spec.format.block[1] for spec in this.specs if spec is not None]
        if this.spec.transform is not None:
            units.append(this.spec.transform.size)
        unit = math.lcm(*(size for size in units if isinstance(size, int)))
        rows = ragged_rows(sizes, rhs.shape[0], unit)
        along_rows = functools.partial(_quantize_along_rows, rows)
        pair = rows.place(lhs), rows.place(rhs)
        return quantize_operands(this, pair, key, rows.sizes, (along_rows, along_rows))
    # Products leave out the rows of no group; scales of more than a row would count them.
    spec = this.spec.lhs
    shared = spec and (spec.format.tensor_scale or isinstance(spec.format.block[0], Whole))
    if shared and not isinstance(lhs, Quantized):
        lhs = ragged_rows(sizes, lhs.shape[0], unit=1).place(lhs)
    by_row = functools.partial(_quantize_by_row, sizes)
    return quantize_operands(this, (lhs, rhs), key, sizes, (by_row, None))


def _multiply(
    matmul: QuantizedMatmul,
    this: MatmulPass,
    operands: Operands,
    sizes: jax.Array,
    stored: bool,
    sources: object,
) -> jax.Array:
    (lhs, rhs), axes = operands, this.axes
    if this.name != "grad_weight":
        axes = dataclasses.replace(axes, rhs=axes.rhs.in_batch())
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        contracting = axes.lhs.block_axis, axes.rhs.block_axis
        return scaled_ragged_dot(lhs, rhs, sizes, contracting, this.dtype, matmul.precision)
    call = RaggedCall(
        lhs=OperandType.of(lhs, axes.lhs),
        rhs=OperandType.of(rhs, axes.rhs),
        num_groups=sizes.shape[0],
        out_dtype=this.dtype,
        precision=matmul.precision,
    )
    return bind(call, lhs, rhs, sizes)


def _quantize_by_row(sizes: jax.Array, x: jax.Array, how: CastArguments) -> MXArray:
    """`[m, k]` quantized along k, in blocks that end with their group if they hold several rows."""
    height = how.spec.format.block[0]
    if height == 1:
        return cast_operand(x, *how)
    if isinstance(height, Whole):
        return _quantize_groups(ragged_rows(sizes, x.shape[0], unit=1), x, how)
    rows = ragged_rows(sizes, x.shape[0], unit=height)
    codes = rows.restore(cast_operand(rows.place(x), how.spec, how.blocks, how.key))
    # Not that of the padded rows.
    with jax.named_scope(how.scope):
        return as_cast(x, codes, how.spec)


def _quantize_along_rows(rows: RaggedRows, x: jax.Array, how: CastArguments) -> MXArray:
    """`[p, c]` quantized along p, where groups start with blocks."""
    if isinstance(how.spec.format.block[1], Whole):
        return _quantize_groups(rows, x, how)
    return cast_operand(x, *how)


def _quantize_groups(rows: RaggedRows, x: jax.Array, how: CastArguments) -> MXArray:
    """`[p, c]` in blocks that hold all rows of a group: scales come from the groups' peaks."""
    nearest = dataclasses.replace(how.spec, rounding=NEAREST)
    peaks = cast_array(group_peaks(x, rows), nearest, how.blocks)
    width, bits = how.spec.rounding.random_bits, None
    if how.key is not None and width:
        bits = arguments.draw_bits(how.key, x.shape, width)
    codes = encode_by_group(x, rows, peaks, how.spec.rounding, bits)
    with jax.named_scope(how.scope):
        return checkpoint_name(as_cast(x, codes, how.spec), QUANTIZED)


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
    recipe = arguments.as_recipe(recipe, "expert_ragged_dot")
    lhs = as_operand(lhs, "lhs", recipe, "expert_ragged_dot")
    sizes = as_int32(as_group_sizes(group_sizes), lhs.shape[0])
    key = arguments.check_matmul_key(key, recipe)
    if key is not None:
        key = DerivedKey.of(key).fold_in(lax.axis_index(axis_name))
    assert not isinstance(lhs, PackedMXArray)
    rows, spec = lhs, recipe.output.lhs
    if not isinstance(lhs, MXArray) and spec is not None and _goes_by_row(recipe.output):
        if spec.format.tensor_scale:
            # The scale of all rows is that of those in groups.
            lhs = ragged_rows(sizes, lhs.shape[0], unit=1).place(lhs)
        blocks = LAST.blocks(spec.format)
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        drawn = None
        if spec.random_bits:
            drawn = operand_keys(product_key(recipe, "output", key))[0]
        tensor_scale = agreed_scale(lhs, spec, blocks, axes)
        codes = cast_array(lhs, spec, blocks, drawn, tensor_scale)
        rows = dataclasses.replace(codes, primal=lhs)
    same_scale = not isinstance(lhs, MXArray)
    sent = dispatch(rows, sizes, axis_name, capacity=capacity, same_scale=same_scale)
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


def _goes_by_row(spec: MatmulSpec) -> bool:
    """Whether a product takes its rows as they are quantized one by one, wherever they lie."""
    rows = spec.lhs
    if rows is None or rows.prescale != 1.0 or spec.transform is not None:
        return False
    return rows.format.block[0] == 1 and rows.tensor_scale == "tensor"
