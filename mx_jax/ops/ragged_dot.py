"""ragged_dot with a recipe: rows in consecutive groups, each with a right operand of its own.

Two of its three products keep the rows (output, grad_input), the third sums over those of each
group (grad_weight). Nothing is transposed: blocks lie along whichever axis is contracted.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, Operand, OperandType, RaggedCall
from mx_jax.backends.primitive import choose
from mx_jax.backends.target import follow
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import AxisNames
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import (
    GRADIENTS,
    Key,
    as_operand,
    as_recipe,
    check_matmul_key,
    dtype_of_product,
    goes_to_lax,
    product_key,
)
from mx_jax.ops.dense import HIGH_PRECISION
from mx_jax.ops.dot_general import check_blocks
from mx_jax.ops.operands import as_taken, mask_clipped, operand_keys, quantize_operand, unscaled
from mx_jax.ops.packing import packed_for, tell_of_packing, unpacked_for
from mx_jax.ops.product import (
    AnyResidual,
    CotangentAval,
    Primal,
    Residual,
    one_program,
    run_product,
)
from mx_jax.ops.quantize import with_primal
from mx_jax.ops.ragged_operands import (
    LAST,
    SECOND_LAST,
    as_group_sizes,
    at_most,
    check_rows,
    check_shapes,
    contracted_operands,
    experts_move,
    keep_both,
    matrices_back,
    on_automatic_axes,
    prepare_kept,
    without_unused,
)
from mx_jax.ops.sharded_operands import agreed_scale
from mx_jax.ops.tags import GRADIENT, Free, remark, watching
from mx_jax.ops.watched import watched
from mx_jax.packed import OperandLike, PackedMXArray, Quantized, unpacked
from mx_jax.reference import ragged
from mx_jax.reference.ragged import ragged_rows
from mx_jax.reference.random_bits import DerivedKey
from mx_jax.sharding.dispatch import dispatch
from mx_jax.sharding.movement import Movement, as_gathered, manual_axes, reduced_in
from mx_jax.specs import MatmulRecipe, MatmulSpec, Residuals

_FORWARD = ProductAxes(LAST, SECOND_LAST)
_GRAD_LHS = ProductAxes(LAST, LAST)
_EXPERTS = (((1,), (1,)), ((), (0,)))
_GRAD_RHS = ProductAxes(SECOND_LAST, SECOND_LAST)
# Of `[m, k]` by `[g, k, n]` to `[m, n]`, of g by `[g, k, n]` to `[m, k]`, of g by `[m, k]`.
_FREE: dict[Side | None, tuple[Free, ...]] = {
    None: (Free(1, 2, 1),),
    "lhs": (Free(1, 1, 1),),
    "rhs": (Free(0, 1, 2), Free(1, 1, 1)),
}


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
    lhs = as_operand(unpacked(lhs), "lhs", recipe, "ragged_dot")
    rhs = packed_for(as_operand(rhs, "rhs", recipe, "ragged_dot"), _EXPERTS, "ragged_dot")
    sizes, to_lax = as_group_sizes(group_sizes), goes_to_lax(recipe, lhs, rhs)
    move = None if to_lax else experts_move(recipe, lhs, rhs)
    check_shapes(lhs, as_gathered(rhs, move), sizes)
    sizes = at_most(sizes, lhs.shape[0])
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
    sizes = ragged_rows(sizes, lhs.shape[0], unit=1).sizes

    def run(lhs: Primal, rhs: Primal, extra: _Extra, recipe: MatmulRecipe) -> jax.Array:
        move = experts_move(recipe, lhs.operand, rhs.operand)
        product = RaggedProduct(recipe=recipe, out_dtype=out_dtype, precision=precision, move=move)
        return (watched if watching.value else run_product)(product, lhs, rhs, extra)

    with follow(lhs, rhs):
        given = Primal.of(lhs), Primal.of(rhs), _Extra(sizes, key)
        return on_automatic_axes(run, *given, recipe)


class _Extra(NamedTuple):
    sizes: jax.Array
    key: Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct:
    """`[m, k]` by `[g, k, n]` to `[m, n]`, by a recipe."""

    recipe: MatmulRecipe
    out_dtype: np.dtype
    precision: lax.PrecisionLike
    move: Movement | None = None  # how rhs gets to the products that multiply it; None: it is there

    @one_program("self", "stored")
    def forward(
        self, lhs: AnyResidual, rhs: AnyResidual, extra: _Extra, stored: tuple[Side, ...] = ()
    ) -> jax.Array:
        spec = self.recipe.fwd
        if isinstance(lhs, Residual) or isinstance(rhs, Residual):
            lhs, rhs, spec = as_taken(lhs, rhs, spec)
        key = product_key(self.recipe, "fwd", extra.key)
        with jax.named_scope("output"):
            experts = rhs, self.move
            return self._multiply(_FORWARD, spec, lhs, experts, extra.sizes, key, "rhs" in stored)

    def keep(
        self, lhs: AnyOperand, rhs: AnyOperand, extra: _Extra
    ) -> tuple[AnyResidual, AnyResidual, _Extra]:
        if self.recipe.residuals is Residuals.QUANTIZED:
            return *self._taken(lhs, rhs, extra), extra
        return lhs, rhs, extra

    @one_program("self")
    def _taken(
        self, lhs: AnyOperand, rhs: AnyOperand, extra: _Extra
    ) -> tuple[AnyResidual, AnyResidual]:
        key = product_key(self.recipe, "fwd", extra.key)
        return keep_both(self.recipe, lhs, rhs, _FORWARD, extra.sizes, key, self.move)

    def cotangents(
        self, g: jax.Array, saved: _Extra, both: bool
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        """g for each gradient, which quantizes it itself."""
        del both
        return (g, g), None

    @one_program("self", "side", "aval")
    def gradient(
        self, side: Side, g: Operand, other: AnyResidual, aval: CotangentAval, saved: _Extra
    ) -> jax.Array:
        """`[m, n]` by `[g, k, n]` to `[m, k]`, or `[m, k]` by `[m, n]` to `[g, k, n]`."""
        assert not isinstance(g, Quantized)
        key = product_key(self.recipe, GRADIENTS[side], saved.key)
        other = other.operand if isinstance(other, Residual) else other
        with jax.named_scope(GRADIENT[side]):
            # Devices of shard_map add up what this returns.
            asked = self.recipe.reduce_dtype if manual_axes() else None
            wide = dataclasses.replace(self, out_dtype=reduced_in(aval.dtype, asked))
            if side == "rhs":
                return wide._grad_weight(g, other, saved.sizes, key)
            spec = self.recipe.dlhs
            experts = matrices_back(other, self.move, spec)
            return wide._multiply(_GRAD_LHS, spec, g, experts, saved.sizes, key)

    def masked(
        self, side: Side, cotangent: jax.Array, own: AnyResidual, saved: _Extra
    ) -> jax.Array:
        if side == "lhs" and not isinstance(own, Residual):
            own = without_unused(own, saved.sizes)
        return mask_clipped(self.recipe, side, _FORWARD, cotangent, own, saved.key)

    def _multiply(
        self,
        axes: ProductAxes,
        spec: MatmulSpec,
        lhs: AnyOperand,
        rhs: tuple[AnyOperand, Movement | None],
        sizes: jax.Array,
        key: Key,
        stored: bool = False,
    ) -> jax.Array:
        """A product that keeps the rows, by matrices, stored or not, and how they get to it."""
        matrices, move = rhs
        left, right = prepare_kept(lhs, matrices, axes, sizes, spec, key, move)
        in_groups = dataclasses.replace(axes, rhs=axes.rhs.in_batch())
        product = _scaled(self, left, right, sizes, in_groups, stored)
        return unscaled(product, lhs, matrices, spec)

    def _grad_weight(self, g: jax.Array, lhs: AnyOperand, sizes: jax.Array, key: Key) -> jax.Array:
        """`[p, k]` by `[p, n]`: p are the rows, those of each group padded to whole blocks."""
        spec, move = self.recipe.drhs.swapped(), self.move
        found = contracted_operands(lhs, g, sizes, spec, _GRAD_RHS, key)
        product = _scaled(self, found.lhs, found.rhs, found.rows.sizes, _GRAD_RHS)
        product = unscaled(product, *found.given, spec)
        return product if move is None else move.move_back(product)

    def in_high_precision(self) -> "RaggedProduct":
        wide, precision = np.dtype(np.float32), lax.Precision.HIGHEST
        return dataclasses.replace(self, recipe=HIGH_PRECISION, out_dtype=wide, precision=precision)

    def free(self, side: Side | None) -> tuple[Free, ...]:
        """The columns, unless devices pass the matrices on; groups part the rows."""
        return () if self.move is not None else _FREE[side]


def _scaled(
    how: RaggedProduct,
    lhs: AnyOperand,
    rhs: AnyOperand,
    sizes: jax.Array,
    axes: ProductAxes,
    stored: bool = False,
) -> jax.Array:
    dtype, precision = how.out_dtype, how.precision
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        contracting = axes.lhs.block_axis, axes.rhs.block_axis
        shapes = " x ".join(f"{x.dtype} {list(x.shape)}" for x in (lhs, rhs))
        groups = f"{sizes.shape[0]} groups, to {dtype}"
        remark(f"ragged product {shapes}, {groups} -> jax.lax, not quantized")
        return ragged.scaled_ragged_dot(lhs, rhs, sizes, contracting, dtype, precision)
    call = RaggedCall(
        lhs=OperandType.of(lhs, axes.lhs),
        rhs=OperandType.of(rhs, axes.rhs),
        num_groups=sizes.shape[0],
        out_dtype=dtype,
        precision=precision,
    )
    choice = choose(call)
    if stored and isinstance(rhs, MXArray):
        tell_of_packing(rhs, call, choice, "ragged_dot")
    if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
        rhs = unpacked_for(rhs, choice, "ragged_dot")
        call = dataclasses.replace(call, rhs=OperandType.of(rhs, axes.rhs))
    return choice.offer.run(lhs, rhs, sizes, call)


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
    lhs = unpacked(as_operand(lhs, "lhs", recipe, "expert_ragged_dot"))
    sizes = at_most(as_group_sizes(group_sizes), lhs.shape[0])
    key = check_matmul_key(key, recipe)
    if key is not None:
        key = DerivedKey.of(key).fold_in(lax.axis_index(axis_name))
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
    blocks: Blocks = LAST.blocks(spec.format)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    drawn = operand_keys(product_key(recipe, "fwd", key))[0] if spec.random_bits else None
    tensor_scale = agreed_scale(x, spec, blocks, axes)
    return with_primal(quantize_operand(x, spec, blocks, drawn, tensor_scale), x)


def goes_by_row(spec: MatmulSpec) -> bool:
    """Whether a product takes its rows as they are quantized one by one, wherever they lie."""
    own = spec.lhs
    if own is None or own.prescale != 1.0 or spec.transform is not None:
        return False
    return own.format.block[0] == 1
