"""Differentiable products with a recipe: dot_general, matmul, and a callable to inject.

Any dot_general is brought into one axis order by transposes alone, and by none where possible: lhs
becomes `[*batch, *m, *k]` or `[*batch, *k, *m]`, rhs `[*batch, *n, *k]` or `[*batch, *k, *n]`, and
the product is `[*batch, *m, *n]`. Kept axes are never merged: merging two sharded axes would cost
an all-gather. Quantizing a transposed copy costs XLA several times what the other axis does.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Axes, ProductAxes
from mx_jax.backends.calls import AnyOperand
from mx_jax.backends.target import follow
from mx_jax.codecs.explicit_axes import Spec, explicit_mesh, partitions, with_partitions
from mx_jax.ops import arguments
from mx_jax.ops.dense import DenseProduct
from mx_jax.ops.packing import packed_for
from mx_jax.ops.product import Primal, run_product
from mx_jax.ops.sharded_operands import gathered_once, gathering, given_moves, product_spec
from mx_jax.ops.tags import watching
from mx_jax.ops.watched import watched
from mx_jax.packed import OperandLike, PackedMXArray, Quantized
from mx_jax.sharding.movement import STAY, Movement, Moves, as_gathered
from mx_jax.specs import MatmulRecipe

# Axes of lhs and of rhs.
Pair = tuple[tuple[int, ...], tuple[int, ...]]


def dot_general(
    lhs: OperandLike,
    rhs: OperandLike,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: MatmulRecipe | str,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Spec | None = None,
    key: arguments.Key = None,
) -> jax.Array:
    """`jax.lax.dot_general` with quantized operands and quantized gradients.

    Each operand of each of the three products is quantized along its own contracting axis, as the
    recipe says; blocks lie along the last contracting axis. With Q the casts,
    `y = Q(lhs) Q(rhs)`, `dlhs = Q(g) Q(rhs)^T`, `drhs = Q(lhs)^T Q(g)`, and every cast counts as
    the identity in the gradient. A product that contracts nothing is `jax.lax.dot_general`'s.

    Args:
      lhs: float32, bfloat16 or float16 values, or an MXArray blocked along its last contracting
        axis, which is used as it is.
      rhs: likewise.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      recipe: what to quantize, e.g. `mx_jax.recipes.mxfp8()`, or a name, e.g. `"mxfp8"`.
      precision: as in `jax.lax.dot_general`, for high-precision operands.
      preferred_element_type: dtype of the product; default: the operands' common dtype.
      out_sharding: sharding of the product, as in `jax.lax.dot_general`.
      key: PRNG key, if a product that runs draws random bits; others do not use it.

    Returns:
      The product, axes `[*batch, *lhs_kept, *rhs_kept]`.

    Raises:
      ValueError: sizes or axes that do not fit, an MXArray blocked along another axis, a key
        missing, here or when the gradient is taken.
      TypeError: operands that are not float32, bfloat16, float16 or MXArray, a dtype of the
        product that is not floating point, or a recipe or key that is none.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x, w = jnp.ones((2, 64)), jnp.full((64, 3), 0.5)
      >>> recipe = mx_jax.recipes.mxfp8()
      >>> mx_jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe)[0]
      Array([32., 32., 32.], dtype=float32)
    """
    recipe = arguments.as_recipe(recipe, "dot_general")
    lhs = arguments.as_operand(lhs, "lhs", recipe, "dot_general")
    rhs = arguments.as_operand(rhs, "rhs", recipe, "dot_general")
    dimension_numbers = arguments.check_depth(dimension_numbers)
    if arguments.goes_to_lax(recipe, lhs, rhs) or not dimension_numbers[0][0]:
        # What contracts nothing has nothing to quantize either, and draws nothing.
        return lax.dot_general(
            _values(lhs),
            _values(rhs),
            check_dimension_numbers(lhs, rhs, dimension_numbers),
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    key = arguments.check_matmul_key(key, recipe)
    if isinstance(rhs, PackedMXArray):
        rhs = packed_for(rhs, dimension_numbers)
    dtype = arguments.dtype_of_product(preferred_element_type, lhs, rhs, "dot_general")
    if (mesh := explicit_mesh(lhs, rhs)) is not None:
        # Types say where operands, cotangents and the product lie, and the compiler what moves.
        dimension_numbers = check_dimension_numbers(lhs, rhs, dimension_numbers)
        with jax.sharding.use_abstract_mesh(mesh):
            out = product_spec(lhs, rhs, dimension_numbers, out_sharding, recipe)
            own = gathering(recipe, lhs, rhs, dimension_numbers, out)
            run: Any = jax.sharding.auto_axes(
                lambda lhs, rhs, key: dot_general(
                    lhs.whole,
                    rhs.whole,
                    dimension_numbers,
                    recipe=own,
                    precision=precision,
                    preferred_element_type=dtype,
                    key=key,
                ),
                axes=mesh.explicit_axes,
                out_sharding=out,
            )
            return run(Primal.of(lhs), Primal.of(rhs), key)
    moves = STAY
    if recipe.gather is not None:
        lhs, rhs, recipe, moves = gathered_once(recipe, lhs, rhs)
    lhs, rhs, axes, empty, moves = canonicalize(lhs, rhs, dimension_numbers, moves)
    product = DenseProduct(
        recipe=recipe, axes=axes, out_dtype=dtype, precision=precision, moves=moves
    )
    with follow(lhs, rhs):
        run = watched if watching.value else run_product
        value = run(product, Primal.of(lhs), Primal.of(rhs), key)
    return constrain(lax.squeeze(value, empty) if empty else value, out_sharding)


def _values(operand: AnyOperand) -> jax.Array:
    return operand.dequantize() if isinstance(operand, Quantized) else operand


def constrain(product: jax.Array, out_sharding: Spec | None) -> jax.Array:
    """The product where the caller wants it; meshes with explicit axes move it, others hint."""
    if out_sharding is None:
        return product
    if jax.sharding.get_abstract_mesh().are_all_axes_explicit:
        return jax.sharding.reshard(product, out_sharding)
    return lax.with_sharding_constraint(product, out_sharding)


def matmul(
    lhs: OperandLike,
    rhs: OperandLike,
    *,
    recipe: MatmulRecipe | str,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Spec | None = None,
    key: arguments.Key = None,
) -> jax.Array:
    """`jnp.matmul` with a recipe: `[..., m, k] @ [..., k, n]`, leading axes broadcast.

    Args:
      lhs: values or an MXArray blocked along its last axis; one axis means a row vector.
      rhs: values or an MXArray blocked along its second-last axis; one axis means a column vector.
      recipe: what to quantize, or a recipe's name.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the product.
      out_sharding: sharding of the product, as in `jnp.matmul`.
      key: PRNG key, if a product that runs draws random bits; others do not use it.

    Returns:
      `[..., m, n]`.

    Raises:
      ValueError: no axes, contracting sizes that differ, or leading axes that do not broadcast.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> w = mx_jax.quantize(jnp.ones((64, 3)), "mxfp4", axis=0)
      >>> mx_jax.matmul(jnp.ones((2, 64)), w, recipe=mx_jax.recipes.weight_only("mxfp4")).shape
      (2, 3)
    """
    recipe = arguments.as_recipe(recipe, "matmul")
    lhs, rhs = arguments.as_operand(lhs, "lhs", recipe), arguments.as_operand(rhs, "rhs", recipe)
    if not arguments.goes_to_lax(recipe, lhs, rhs):
        arguments.check_out_dtype(preferred_element_type, "matmul")
    drop = [-2] * (lhs.ndim == 1 and rhs.ndim > 2)
    rhs_contracting = max(rhs.ndim - 2, 0)
    left, right = lhs.shape, rhs.shape
    if recipe.gather is not None:
        moves = given_moves(recipe, lhs, rhs)
        left, right = (as_gathered(x, m).shape for x, m in zip((lhs, rhs), moves, strict=True))
    _check_matmul_shapes(left, right, rhs_contracting)
    batch = _broadcast_batch(lhs.shape[:-2], rhs.shape[:-2])
    # Leading axes of lhs alone are kept axes; only what both sides have is a batch.
    num_batch = len(batch) if rhs.ndim > 2 else 0
    if num_batch:
        if recipe.gather is not None:
            added = max(lhs.ndim, num_batch + 2) - lhs.ndim, num_batch + 2 - rhs.ndim
            recipe = dataclasses.replace(recipe, gather=recipe.gather.with_leading(*added))
        lhs, rhs = _with_batch(lhs, batch), _with_batch(rhs, batch)
        rhs_contracting = rhs.ndim - 2
    axes = tuple(range(num_batch))
    if drop and out_sharding is not None:
        parts = partitions(out_sharding, num_batch + 1)
        out_sharding = with_partitions(out_sharding, [*parts[:-1], None, parts[-1]])
    product = dot_general(
        lhs,
        rhs,
        (((lhs.ndim - 1,), (rhs_contracting,)), (axes, axes)),
        recipe=recipe,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        key=key,
    )
    return jnp.squeeze(product, drop) if drop else product


def _check_matmul_shapes(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], rhs_contracting: int
) -> None:
    if not lhs_shape or not rhs_shape:
        raise ValueError(
            f"matmul: both operands need an axis, got lhs.shape={lhs_shape}, rhs.shape={rhs_shape}"
        )
    if lhs_shape[-1] != rhs_shape[rhs_contracting]:
        raise ValueError(
            f"matmul: contracting sizes must agree, got lhs.shape={lhs_shape} with k="
            f"{lhs_shape[-1]} and rhs.shape={rhs_shape} with k={rhs_shape[rhs_contracting]}"
        )


def _broadcast_batch(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return jnp.broadcast_shapes(left, right)
    except ValueError:
        raise ValueError(
            f"matmul: leading axes must broadcast, got lhs batch={left} and rhs batch={right}"
        ) from None


def _with_batch(operand: AnyOperand, batch: tuple[int, ...]) -> AnyOperand:
    if operand.shape[:-2] == batch:
        return operand
    if isinstance(operand, Quantized):
        raise ValueError(
            f"matmul: an MXArray is not broadcast, got batch={operand.shape[:-2]} where the "
            f"product has batch={batch}; quantize the broadcast array, or pass dequantize()"
        )
    tail = operand.shape[-2:] if operand.ndim > 1 else (1, *operand.shape)
    return jnp.broadcast_to(operand, (*batch, *tail))


class ProductOptions(TypedDict, total=False):
    """Keyword arguments of products, as `jax.lax.dot_general` has them."""

    precision: lax.PrecisionLike
    preferred_element_type: jax.typing.DTypeLike | None
    out_sharding: Spec | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeDotGeneral:
    """A drop-in for `jax.lax.dot_general`, to inject where a layer takes one.

    A pytree without leaves, so that it may stand in one that jit is given. Equal recipes make equal
    instances, so rebuilding a model does not retrace it, as a fresh `functools.partial` would.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> layer = nn.Dense(8, dot_general=mx_jax.recipes.mxfp8().dot_general)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 64)))[0].shape
      (2, 8)
    """

    recipe: MatmulRecipe

    def __post_init__(self):
        object.__setattr__(self, "recipe", arguments.as_recipe(self.recipe, "RecipeDotGeneral"))

    def __call__(
        self,
        lhs: OperandLike,
        rhs: OperandLike,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Spec | None = None,
        key: arguments.Key = None,
    ) -> jax.Array:
        """See `mx_jax.dot_general`."""
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            recipe=self.recipe,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )


# Canonical order ----------------------------------------------------------------------------------


def canonicalize(
    lhs: AnyOperand,
    rhs: AnyOperand,
    dimension_numbers: lax.DotDimensionNumbers,
    moves: Moves = STAY,
) -> tuple[AnyOperand, AnyOperand, ProductAxes, tuple[int, ...], Moves]:
    """Bring both operands into canonical order, transposing only what needs it.

    An operand without kept axes gets one of length one, for backward products to contract.

    Returns:
      Operands, their axes, the axes of length one to squeeze out of the product, and the operands'
      moves in their new order.
    """
    left, right = lhs, rhs
    if moves != STAY:
        left, right = as_gathered(lhs, moves[0]), as_gathered(rhs, moves[1])
    (lhs_k, rhs_k), (lhs_b, rhs_b) = check_dimension_numbers(left, right, dimension_numbers)
    assert lhs_k, "nothing to lay blocks along: dot_general leaves it to XLA"
    lhs_m, rhs_n = _kept(lhs, lhs_k, lhs_b, "lhs"), _kept(rhs, rhs_k, rhs_b, "rhs")
    lhs, left, lhs_move = _arrange(lhs, Axes(lhs_b, lhs_m, lhs_k), "lhs", moves[0])
    rhs, right, rhs_move = _arrange(rhs, Axes(rhs_b, rhs_n, rhs_k), "rhs", moves[1])
    first_n = len(lhs_b) + len(left.kept)
    empty = (len(lhs_b),) * (not lhs_m) + (first_n,) * (not rhs_n)
    return lhs, rhs, ProductAxes(left, right), empty, (lhs_move, rhs_move)


def check_dimension_numbers(
    lhs: AnyOperand | jax.ShapeDtypeStruct,
    rhs: AnyOperand | jax.ShapeDtypeStruct,
    dimension_numbers: lax.DotDimensionNumbers,
) -> tuple[Pair, Pair]:
    """Dimension numbers with non-negative axes, checked against both shapes."""
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
    lhs_k, lhs_b = _axes(lhs_k, lhs, "lhs"), _axes(lhs_b, lhs, "lhs")
    rhs_k, rhs_b = _axes(rhs_k, rhs, "rhs"), _axes(rhs_b, rhs, "rhs")
    _check_pairs("contracting", lhs, rhs, lhs_k, rhs_k)
    _check_pairs("batch", lhs, rhs, lhs_b, rhs_b)
    return (lhs_k, rhs_k), (lhs_b, rhs_b)


def _axes(
    axes: Sequence[int], operand: AnyOperand | jax.ShapeDtypeStruct, side: str
) -> tuple[int, ...]:
    axes = tuple(int(axis) for axis in axes)
    for axis in axes:
        if not -operand.ndim <= axis < operand.ndim:
            raise ValueError(
                f"dot_general: axis={axis} is out of range for {side} of shape={operand.shape}"
            )
    return tuple(axis % operand.ndim for axis in axes)


def _check_pairs(
    what: str,
    lhs: AnyOperand | jax.ShapeDtypeStruct,
    rhs: AnyOperand | jax.ShapeDtypeStruct,
    lhs_axes: tuple[int, ...],
    rhs_axes: tuple[int, ...],
) -> None:
    left = tuple(lhs.shape[axis] for axis in lhs_axes)
    right = tuple(rhs.shape[axis] for axis in rhs_axes)
    if left != right:
        raise ValueError(
            f"dot_general: {what} sizes must agree, got lhs.shape={lhs.shape} with "
            f"{what} axes {lhs_axes} of sizes {left} and rhs.shape={rhs.shape} with {what} axes "
            f"{rhs_axes} of sizes {right}"
        )


def _kept(
    operand: AnyOperand, contracting: tuple[int, ...], batch: tuple[int, ...], side: str
) -> tuple[int, ...]:
    used = (*contracting, *batch)
    if len(set(used)) != len(used):
        raise ValueError(
            f"dot_general: each axis of {side} may appear once, got contracting={contracting} "
            f"and batch={batch}"
        )
    return tuple(axis for axis in range(operand.ndim) if axis not in used)


def _arrange(
    operand: AnyOperand, axes: Axes, side: str, move: Movement | None
) -> tuple[AnyOperand, Axes, Movement | None]:
    """The operand as `[*batch, *kept, *k]`, or `[*batch, *k, *kept]` if it is that already."""
    if isinstance(operand, Quantized):
        check_blocks(operand, axes.contracting[-1], side)
    batch, kept, k = (len(group) for group in (axes.batch, axes.kept, axes.contracting))
    if axes.is_canonical and kept:
        return operand, axes, move
    order = (*axes.batch, *axes.kept, *axes.contracting)
    if order != tuple(range(axes.ndim)):
        operand = operand.transpose(order)
    if not kept:
        operand = operand[(slice(None),) * batch + (None,)]
    if move is not None:
        move = move.transposed(order, None if kept else batch)
    return operand, Axes.ordered(batch=batch, kept=max(kept, 1), contracting=k), move


def check_blocks(
    operand: Quantized, wanted: int, side: str, operation: str = "dot_general"
) -> None:
    """An MXArray's scales can leave the sum only if its blocks lie along the contracting axis."""
    blocked = [axis % operand.ndim for axis, _ in operand.blocks]
    if wanted not in blocked:
        raise ValueError(
            f"{operation}: {side} is contracted along axis={wanted}, but this MXArray "
            f"({operand.format.name}, shape={operand.shape}) has its blocks along "
            f"axis={', '.join(map(str, blocked))}; quantize it with axis={wanted}, or pass "
            f"{side}.dequantize()"
        )
