"""ragged_dot with a recipe: rows in consecutive groups, each with a right operand of its own.

Two of the three products keep the rows (output, grad_input), the third sums over those of each
group (grad_weight). Nothing is transposed: blocks lie along whichever axis is contracted.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, OperandType, RaggedCall
from mx_jax.backends.primitive import bind, choose
from mx_jax.backends.target import on_devices_of
from mx_jax.codecs.explicit_axes import AxisNames, explicit_mesh
from mx_jax.codecs.rounding import NEAREST, DerivedKey
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray
from mx_jax.ops import arguments, dense
from mx_jax.ops.arguments import Key, as_operand
from mx_jax.ops.dot_general import check_blocks
from mx_jax.ops.packing import packed_for, tell_of_packing, unpacked_for
from mx_jax.ops.product import Primal, run_product
from mx_jax.ops.programs import QUANTIZED
from mx_jax.ops.sharded_operands import agreed_scale, moves_of, stored
from mx_jax.packed import OperandLike, PackedMXArray, Quantized
from mx_jax.reference import matmul
from mx_jax.reference.matmul import RaggedRows, ragged_rows
from mx_jax.sharding.exchange import as_int32, dispatch
from mx_jax.sharding.movement import Movement, as_gathered, spec_of
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec

# Dimension numbers of what packed weights are laid out for.
_EXPERTS = (((1,), (1,)), ((), (0,)))
# The axis of experts is no batch axis here: a format that is WHOLE takes one matrix at a time.
LAST = Axes.ordered()
AXES = ProductAxes(LAST, Axes.ordered(k_first=True))
_GRAD_WEIGHT = AXES.cotangent("rhs")[0]


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
        return matmul.grouped_dot(lhs, rhs, sizes, (-1, -2), precision, dtype)
    _check_rows(recipe)
    out_dtype = arguments.dtype_of_product(preferred_element_type, lhs, rhs, "ragged_dot")
    for operand, side in ((lhs, "lhs"), (rhs, "rhs")):
        if isinstance(operand, MXArray):
            check_blocks(operand, 1, side, "ragged_dot")
    groups = Groups(ragged_rows(sizes, lhs.shape[0], unit=1).sizes, key)

    def multiply(own: MatmulRecipe, lhs: Primal, rhs: Primal, groups: Groups) -> jax.Array:
        moves = None, experts_move(own, lhs.operand, rhs.operand)
        product = RaggedProduct(recipe=own, out_dtype=out_dtype, precision=precision, moves=moves)
        return run_product(product, lhs, rhs, groups)

    with on_devices_of(lhs, rhs):
        mesh, given = explicit_mesh(lhs, rhs), (Primal.of(lhs), Primal.of(rhs), groups)
        if mesh is None:
            return multiply(recipe, *given)
        # JAX infers no types of ragged products: rows are sharded as lhs's, columns as rhs's.
        with jax.sharding.use_abstract_mesh(mesh):
            rows, lies, own = stored(lhs)[0], stored(rhs), recipe
            gathered = frozenset[str]()
            if recipe.gather is not None:
                gathered = recipe.gather.on_mesh()
                where = dataclasses.replace(recipe.gather, rhs=spec_of(lies))
                own = dataclasses.replace(recipe, gather=where)
            columns = tuple(name for name in lies[2] if name not in {*gathered, *rows})
            run: Any = jax.sharding.auto_axes(
                functools.partial(multiply, own),
                axes=mesh.explicit_axes,
                out_sharding=PartitionSpec(rows or None, columns or None),
            )
            return run(*given)


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


class Groups(NamedTuple):
    """What a ragged product depends on besides its operands."""

    sizes: jax.Array
    key: Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(dense.RecipeProduct[Groups]):
    """`[m, k]` by `[g, k, n]` to `[m, n]`, by a recipe."""

    axes: ProductAxes = AXES

    def key_of(self, extra: Groups) -> Key:
        return extra.key

    def prepared(self, task: dense.Task, extra: Groups) -> dense.Task:
        lhs, own, sizes = task.lhs, task.spec.lhs, extra.sizes
        if task.axes == _GRAD_WEIGHT:
            # The rows of each group are padded to whole blocks.
            assert not isinstance(task.rhs, Quantized), "g comes as values"
            # So that blocks and transforms along the rows end with their group.
            given = (task.spec.lhs, task.spec.rhs)
            units = [x.format.block[1] for x in given if x is not None]
            if task.spec.transform is not None:
                units.append(task.spec.transform.size)
            unit = math.lcm(*(size for size in units if isinstance(size, int)))
            rows = ragged_rows(sizes, task.rhs.shape[0], unit)
            if isinstance(lhs, MXArray):
                # Its square blocks end within groups.
                lhs = dense.dequantize_operand(lhs, np.dtype(np.float32), saturates=True)
            assert not isinstance(lhs, PackedMXArray)
            lhs, rhs = rows.place(lhs), rows.place(task.rhs)
            along_rows = functools.partial(_prepare_contracted, rows)
            prepares = along_rows, along_rows
            return task._replace(lhs=lhs, rhs=rhs, prepares=prepares, sizes=rows.sizes)
        # Products leave out the rows of no group; scales of more than a row would count them.
        shared = own and (own.format.tensor_scale or isinstance(own.format.block[0], Whole))
        if shared and not isinstance(lhs, Quantized):
            lhs = ragged_rows(sizes, lhs.shape[0], unit=1).place(lhs)
        by_row = functools.partial(_prepare_rows, sizes)
        return task._replace(lhs=lhs, prepares=(by_row, dense.prepare), sizes=sizes)

    def multiply(
        self, taken: dense.Taken, out_dtype: np.dtype, stored: Collection[Side] = ()
    ) -> jax.Array:
        (lhs, rhs), axes, sizes = taken.operands, taken.task.axes, taken.task.sizes
        assert sizes is not None
        if axes != _GRAD_WEIGHT:
            axes = dataclasses.replace(axes, rhs=axes.rhs.in_batch())
        if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
            contracting = axes.lhs.block_axis, axes.rhs.block_axis
            return matmul.scaled_ragged_dot(lhs, rhs, sizes, contracting, out_dtype, self.precision)
        call = RaggedCall(
            lhs=OperandType.of(lhs, axes.lhs),
            rhs=OperandType.of(rhs, axes.rhs),
            num_groups=sizes.shape[0],
            out_dtype=out_dtype,
            precision=self.precision,
        )
        choice = choose(call)
        if "rhs" in stored and isinstance(rhs, MXArray):
            tell_of_packing(rhs, call, choice, "ragged_dot")
        if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
            rhs = unpacked_for(rhs, choice, "ragged_dot")
            call = dataclasses.replace(call, rhs=OperandType.of(rhs, axes.rhs))
        return bind(call, lhs, rhs, sizes)


def _prepare_rows(
    sizes: jax.Array, x: AnyOperand, spec: OperandSpec | None, axes: Axes, key: Key, *others: object
) -> AnyOperand:
    """`[m, k]` quantized along k, in blocks that end with their group if they hold several rows."""
    if spec is None or isinstance(x, Quantized) or spec.format.block[0] == 1:
        return dense.prepare(x, spec, axes, key)
    height = spec.format.block[0]
    if isinstance(height, Whole):
        return _quantize_groups(ragged_rows(sizes, x.shape[0], unit=1), x, spec, axes, key, "lhs")
    rows = ragged_rows(sizes, x.shape[0], unit=height)
    padded = dense.prescaled(rows.place(x), spec)
    drawn = key if spec.random_bits else None
    codes = rows.restore(dense.cast_operand(padded, spec, axes.blocks(spec.format), drawn))
    # Not that of the padded rows.
    with dense.named_cast("lhs", spec, axes):
        return dense.as_cast(dense.prescaled(x, spec), codes, spec)


def _prepare_contracted(
    rows: RaggedRows,
    x: jax.Array,
    spec: OperandSpec | None,
    axes: Axes,
    key: Key,
    tensor_scale: None,
    side: Side,
) -> AnyOperand:
    """`[p, c]` quantized along p, where groups start with blocks."""
    if spec is None or not isinstance(spec.format.block[1], Whole):
        return dense.prepare(x, spec, axes, key, tensor_scale, side)
    return _quantize_groups(rows, x, spec, axes, key, side)


def _quantize_groups(
    rows: RaggedRows, x: jax.Array, spec: OperandSpec, axes: Axes, key: Key, side: Side
) -> MXArray:
    """`[p, c]` in blocks that hold all rows of a group: scales come from the groups' peaks."""
    x = dense.prescaled(x, spec)
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    peaks = dense.quantize_operand(matmul.group_peaks(x, rows), nearest, axes.blocks(spec.format))
    width = spec.rounding.random_bits
    bits = arguments.draw_bits(key, x.shape, width) if key is not None and width else None
    codes = matmul.encode_by_group(x, rows, peaks, spec.rounding, bits)
    with dense.named_cast(side, spec, axes):
        return checkpoint_name(dense.as_cast(x, codes, spec), QUANTIZED)


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
            drawn = dense.operand_keys(arguments.product_key(recipe, "output", key))[0]
        tensor_scale = agreed_scale(lhs, spec, blocks, axes)
        codes = dense.quantize_operand(lhs, spec, blocks, drawn, tensor_scale)
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
    own = spec.lhs
    if own is None or own.prescale != 1.0 or spec.transform is not None:
        return False
    return own.format.block[0] == 1
