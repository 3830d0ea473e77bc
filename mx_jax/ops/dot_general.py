"""Differentiable products with a recipe: dot_general, matmul, einsum, and a callable to inject.

Any dot_general is brought into one axis order by transposes alone, and by none where possible: lhs
becomes `[*batch, *m, *k]` or `[*batch, *k, *m]`, rhs `[*batch, *n, *k]` or `[*batch, *k, *n]`, and
the product is `[*batch, *m, *n]`. Kept axes are never merged: merging two sharded axes would cost
an all-gather. Quantizing a transposed copy costs XLA several times what the other axis does.
"""

import dataclasses
import operator
import re
from typing import TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from opt_einsum.parser import parse_einsum_input

from mx_jax.axes import SIDES, Axes, ProductAxes
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import (
    Spec,
    has_explicit_axes,
    partitions,
    with_partitions,
)
from mx_jax.ops import arguments
from mx_jax.ops.packing import packed_for
from mx_jax.ops.product import QuantizedMatmul, multiply, on_automatic_axes, quantize_operands
from mx_jax.ops.sharded_operands import gathering, moves_of, product_spec
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
    `y = Q(lhs) Q(rhs)`, `grad_input = Q(g) Q(rhs)^T`, `grad_weight = Q(lhs)^T Q(g)`, and every
    cast counts as the identity in the gradient. A product that contracts nothing is
    `jax.lax.dot_general`'s.

    Args:
      lhs: float32, bfloat16 or float16 values, or an MXArray blocked along its last contracting
        axis, which is used as it is.
      rhs: likewise.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      recipe: what to quantize, e.g. `mx_jax.recipes.mxfp8()`, or a name, e.g. `"mxfp8"`.
      precision: as in `jax.lax.dot_general`, for high-precision operands; `"highest"` also keeps
        all digits of float8 in blocks of 128, which accelerators else round to bfloat16.
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
    dimension_numbers = _as_tuples(dimension_numbers)
    recipe = arguments.as_recipe(recipe, "dot_general")
    lhs = arguments.as_operand(lhs, "lhs", recipe, "dot_general")
    rhs = arguments.as_operand(rhs, "rhs", recipe, "dot_general")
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
    if precision is not None:
        arguments.check_precision(precision, "dot_general")
    if isinstance(rhs, PackedMXArray):
        rhs = packed_for(rhs, dimension_numbers)
    dtype = arguments.dtype_of_product(preferred_element_type, lhs, rhs, "dot_general")
    if (mesh := arguments.explicit_mesh(lhs, rhs)) is not None:
        # Types say where operands, cotangents and the product lie, and the compiler what moves.
        dimension_numbers = check_dimension_numbers(lhs, rhs, dimension_numbers)
        with jax.sharding.use_abstract_mesh(mesh):
            out = product_spec(lhs, rhs, dimension_numbers, out_sharding, recipe)
            recipe = gathering(recipe, lhs, rhs, dimension_numbers, out)

            def run(lhs: AnyOperand, rhs: AnyOperand, key: arguments.Key) -> jax.Array:
                return dot_general(
                    lhs,
                    rhs,
                    dimension_numbers,
                    recipe=recipe,
                    precision=precision,
                    preferred_element_type=dtype,
                    key=key,
                )

            return on_automatic_axes(run, mesh, out, lhs, rhs, key)
    moves = STAY if recipe.gather is None else moves_of(recipe, lhs, rhs)
    lhs, rhs, axes, empty, moves = canonicalize(lhs, rhs, dimension_numbers, moves)
    product = QuantizedMatmul(
        recipe=recipe,
        axes=axes,
        out_dtype=dtype,
        precision=precision,
        moves=moves,
        quantizer=quantize_operands,
        multiplier=multiply,
    ).run(lhs, rhs, key)
    product = lax.squeeze(product, empty) if empty else product
    return product if out_sharding is None else _constrain(product, out_sharding)


def _values(operand: AnyOperand) -> jax.Array:
    return operand.dequantize() if isinstance(operand, Quantized) else operand


def _constrain(product: jax.Array, out_sharding: Spec) -> jax.Array:
    """The product where the caller wants it; meshes with explicit axes move it, others hint."""
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
        moves = moves_of(recipe, lhs, rhs)
        left, right = (as_gathered(x, m).shape for x, m in zip((lhs, rhs), moves, strict=True))
    if not left or not right:
        raise ValueError(
            f"matmul: both operands need an axis, got lhs.shape={left}, rhs.shape={right}"
        )
    if left[-1] != right[rhs_contracting]:
        raise ValueError(
            f"matmul: contracting sizes must agree, got lhs.shape={left} with k={left[-1]} and "
            f"rhs.shape={right} with k={right[rhs_contracting]}"
        )
    left, right = lhs.shape[:-2], rhs.shape[:-2]
    try:
        batch = jnp.broadcast_shapes(left, right)
    except ValueError:
        raise ValueError(
            f"matmul: leading axes must broadcast, got lhs batch={left} and rhs batch={right}"
        ) from None
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


def einsum(
    subscripts: str,
    lhs: OperandLike,
    rhs: OperandLike,
    *,
    recipe: MatmulRecipe | str,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Spec | None = None,
    key: arguments.Key = None,
) -> jax.Array:
    """`jnp.einsum` of two operands with a recipe.

    Letters in both operands and not in the result are contracted, blocks lie along the last of
    them in lhs's order; letters in all three are batch axes. Letters of one operand that are in
    nothing else are summed first, in high precision. Without a contracted letter there is nothing
    to quantize.

    Args:
      subscripts: e.g. `"...td,dhk->...thk"`; without `->`, letters that occur once, in order.
      lhs: values or an MXArray blocked along the last contracted axis.
      rhs: likewise.
      recipe: what to quantize, or a recipe's name.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the product.
      out_sharding: sharding of the product.
      key: PRNG key, if a product that runs draws random bits; others do not use it.

    Returns:
      The product, axes as the subscripts say.

    Raises:
      ValueError: subscripts that do not fit the operands; a letter twice in one operand; a sum
        over an MXArray's own axis.
      TypeError: subscripts that are no string.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x, w = jnp.ones((2, 5, 64)), jnp.ones((64, 4, 8))
      >>> mx_jax.einsum("btd,dhk->bthk", x, w, recipe=mx_jax.recipes.mxfp8()).shape
      (2, 5, 4, 8)
    """
    recipe = arguments.as_recipe(recipe, "einsum")
    lhs = arguments.as_operand(lhs, "lhs", recipe, "einsum")
    rhs = arguments.as_operand(rhs, "rhs", recipe, "einsum")
    left, right, out = _parse(subscripts, lhs, rhs)
    lhs, rhs = _broadcast(subscripts, lhs, left, rhs, right)
    lhs, left = _sum_alone(lhs, left, right + out, subscripts)
    rhs, right = _sum_alone(rhs, right, left + out, subscripts)
    both = [letter for letter in left if letter in right]
    batch = [letter for letter in both if letter in out]
    contracted = [letter for letter in both if letter not in out]
    if contracted and not arguments.goes_to_lax(recipe, lhs, rhs):
        arguments.check_out_dtype(preferred_element_type, "einsum")
    sizes = dict(zip(left, lhs.shape, strict=True))
    for letter, size in zip(right, rhs.shape, strict=True):
        if sizes.get(letter, size) != size:
            raise ValueError(
                f"einsum: sizes of {letter!r} in subscripts={subscripts!r} must agree, got "
                f"lhs.shape={lhs.shape} with {sizes[letter]} and rhs.shape={rhs.shape} with {size}"
            )
    order = batch + [c for c in left if c not in right] + [c for c in right if c not in left]
    before = None  # the product's sharding before its axes are permuted
    if out_sharding is not None and has_explicit_axes():
        parts = partitions(out_sharding, len(order))
        before = with_partitions(out_sharding, [parts[out.index(c)] for c in order])
    product = dot_general(
        lhs,
        rhs,
        (
            ([left.index(c) for c in contracted], [right.index(c) for c in contracted]),
            ([left.index(c) for c in batch], [right.index(c) for c in batch]),
        ),
        recipe=recipe,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=before,
        key=key,
    )
    product = jnp.transpose(product, [order.index(letter) for letter in out])
    return product if out_sharding is None else _constrain(product, out_sharding)


def _parse(subscripts: str, lhs: AnyOperand, rhs: AnyOperand) -> tuple[str, str, str]:
    """A letter an axis of both operands and of the product, those of an ellipsis too."""
    got = f"got subscripts={subscripts!r}"
    if not isinstance(subscripts, str):
        raise TypeError(f"einsum: subscripts must be a string such as 'mk,kn->mn', {got}")
    if subscripts.partition("->")[0].count(",") != 1:
        raise ValueError(f"einsum: needs exactly two operands, {got}")
    if not re.fullmatch("[a-zA-Z., ]*(- *>[a-zA-Z. ]*)?", subscripts):
        raise ValueError(f"einsum: subscripts are letters and '...', {got}")
    try:
        shapes = (tuple(lhs.shape), tuple(rhs.shape))
        inputs, out, _ = parse_einsum_input((subscripts, *shapes), shapes=True)
    except ValueError as error:
        raise ValueError(f"einsum: {error} ({got}, ndim={lhs.ndim} and {rhs.ndim})") from None
    left, right = inputs.split(",")
    for term, x in ((left, lhs), (right, rhs)):
        if len(set(term)) != len(term):
            raise ValueError(f"einsum: a letter may occur once in each term, {got}")
        if len(term) != x.ndim:
            raise ValueError(
                f"einsum: a term names {len(term)} axes, the operand has ndim={x.ndim}, {got}"
            )
    return left, right, out


def _broadcast(
    subscripts: str, lhs: AnyOperand, left: str, rhs: AnyOperand, right: str
) -> tuple[AnyOperand, AnyOperand]:
    """Both operands, of an ellipsis's axes with the lengths that they broadcast to."""
    pairs = [*zip(left, lhs.shape, strict=True), *zip(right, rhs.shape, strict=True)]
    lengths = {c: n for c, n in pairs if n != 1 and c not in subscripts}
    results: list[AnyOperand] = []
    for x, term in ((lhs, left), (rhs, right)):
        shape = tuple(
            lengths.get(c, n) if n == 1 else n for c, n in zip(term, x.shape, strict=True)
        )
        if shape == x.shape:
            results.append(x)
            continue
        if isinstance(x, Quantized):
            raise ValueError(
                f"einsum: an MXArray is not broadcast, got shape={x.shape} where the ellipsis of "
                f"subscripts={subscripts!r} has shape={shape}; pass dequantize()"
            )
        results.append(jnp.broadcast_to(x, shape))
    return results[0], results[1]


def _sum_alone(
    operand: AnyOperand, term: str, others: str, subscripts: str
) -> tuple[AnyOperand, str]:
    """Sum over the letters that are in this operand alone."""
    alone = [axis for axis, letter in enumerate(term) if letter not in others]
    if not alone:
        return operand, term
    if isinstance(operand, Quantized):
        raise ValueError(
            f"einsum: subscripts={subscripts!r} sum over an axis of an MXArray alone; pass "
            "dequantize() instead"
        )
    return operand.sum(alone), "".join(c for c in term if c in others)


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


def _as_tuples(dimension_numbers: lax.DotDimensionNumbers) -> lax.DotDimensionNumbers:
    """Dimension numbers as tuples of ints; raises where they are not nested so."""
    try:
        (lhs_k, rhs_k), (lhs_batch, rhs_batch) = dimension_numbers
        groups = [tuple(group) for group in (lhs_k, rhs_k, lhs_batch, rhs_batch)]
    except (TypeError, ValueError):
        raise ValueError(
            "dot_general: dimension_numbers must be ((lhs_contracting, rhs_contracting), "
            "(lhs_batch, rhs_batch)), each a sequence of axes, got "
            f"dimension_numbers={dimension_numbers!r}; for matrices, (((1,), (0,)), ((), ()))"
        ) from None
    try:
        lhs_k, rhs_k, lhs_batch, rhs_batch = (tuple(map(operator.index, group)) for group in groups)
    except TypeError:
        raise TypeError(
            f"dot_general: axes must be integers, got dimension_numbers={dimension_numbers!r}"
        ) from None
    return (lhs_k, rhs_k), (lhs_batch, rhs_batch)


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
    lhs, left, lhs_move, lhs_empty = _arrange(lhs, lhs_b, lhs_k, "lhs", moves[0])
    rhs, right, rhs_move, rhs_empty = _arrange(rhs, rhs_b, rhs_k, "rhs", moves[1])
    first_n = len(lhs_b) + len(left.kept)
    empty = (len(lhs_b),) * lhs_empty + (first_n,) * rhs_empty
    return lhs, rhs, ProductAxes(left, right), empty, (lhs_move, rhs_move)


def check_dimension_numbers(
    lhs: AnyOperand | jax.ShapeDtypeStruct,
    rhs: AnyOperand | jax.ShapeDtypeStruct,
    dimension_numbers: lax.DotDimensionNumbers,
) -> tuple[Pair, Pair]:
    """Dimension numbers with non-negative axes, checked against both shapes."""
    pairs: list[Pair] = []
    for what, pair in zip(("contracting", "batch"), dimension_numbers, strict=True):
        checked = []
        for side, x, axes in zip(SIDES, (lhs, rhs), pair, strict=True):
            for axis in axes:
                if not -x.ndim <= axis < x.ndim:
                    raise ValueError(
                        f"dot_general: axis={axis} is out of range for {side} of shape={x.shape}"
                    )
            checked.append(tuple(int(axis) % x.ndim for axis in axes))
        left, right = checked
        sizes = tuple(lhs.shape[axis] for axis in left), tuple(rhs.shape[axis] for axis in right)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"dot_general: {what} sizes must agree, got lhs.shape={lhs.shape} with {what} axes "
                f"{left} of sizes {sizes[0]} and rhs.shape={rhs.shape} with {what} axes {right} of "
                f"sizes {sizes[1]}"
            )
        pairs.append((left, right))
    contracting, batch = pairs
    return contracting, batch


def _arrange(
    operand: AnyOperand,
    batch: tuple[int, ...],
    contracting: tuple[int, ...],
    side: str,
    move: Movement | None,
) -> tuple[AnyOperand, Axes, Movement | None, bool]:
    """The operand as `[*batch, *kept, *k]`, or `[*batch, *k, *kept]` if it is that already; and
    whether its kept axis had to be put in."""
    used = (*contracting, *batch)
    if len(set(used)) != len(used):
        raise ValueError(
            f"dot_general: each axis of {side} may appear once, got contracting={contracting} "
            f"and batch={batch}"
        )
    if isinstance(operand, Quantized):
        check_blocks(operand, contracting[-1], side)
    kept = tuple(axis for axis in range(operand.ndim) if axis not in used)
    order = (*batch, *kept, *contracting)
    if kept and tuple(range(operand.ndim)) in (order, (*batch, *contracting, *kept)):
        return operand, Axes(batch, kept, contracting), move, False
    if order != tuple(range(operand.ndim)):
        operand = operand.transpose(order)
    if not kept:
        operand = operand[(slice(None),) * len(batch) + (None,)]
    if move is not None:
        move = move.transposed(order, None if kept else len(batch))
    axes = Axes.ordered(batch=len(batch), kept=max(len(kept), 1), contracting=len(contracting))
    return operand, axes, move, not kept


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
