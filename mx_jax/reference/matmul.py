"""The meaning of a scaled product, of attention and of ragged products, in plain jnp (OCP MX v1.0,
6.1 and 6.2)."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import result_aval, vary_alike
from mx_jax.codecs.lowering import eager
from mx_jax.codecs.rounding import Rounding
from mx_jax.codecs.scale import LIFT, encode_scaled, is_tiny, lift
from mx_jax.codecs.straight_through import straight_through
from mx_jax.mxarray import MXArray, decode, unlinked
from mx_jax.packed import PackedRows, Rows


def scaled_matmul(
    lhs: jax.Array | MXArray,
    rhs: jax.Array | MXArray,
    dimension_numbers: lax.DotDimensionNumbers,
    out_dtype: jax.typing.DTypeLike,
    precision: lax.PrecisionLike = None,
    decoded: Callable = decode,
) -> jax.Array:
    """`sum over blocks of X_A X_B (sum over the block of P_A P_B)`.

    Both operands are dequantized to float32, where element times scale is exact, multiplied
    exactly and accumulated in float32. A code may stand for 2^128, which is not a float32; so
    operands with E8M0 scales are decoded as 2^-2 of what they are, and the sums multiplied back.
    What is below 2^-124 of such an operand may count as zero, where a platform flushes subnormals.
    An operand under one tiny tensor scale (NVFP4) is decoded as 2^64 of what it is.

    Args:
      lhs: values or an MXArray.
      rhs: values or an MXArray.
      dimension_numbers: as `jax.lax.dot_general` takes them.
      out_dtype: dtype of the product; one rounding from the float32 sum.
      precision: for products with a high-precision operand; two quantized operands always take
        the highest, so that no platform rounds them again on the way in.
      decoded: decodes an operand, as `decode` does.

    Returns:
      The product, axes in `dot_general`'s order.
    """
    if isinstance(lhs, MXArray) and isinstance(rhs, MXArray):
        precision = lax.Precision.HIGHEST
    left, right = scaled_values(lhs, decoded), scaled_values(rhs, decoded)
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    product = lax.dot_general(left.values, right.values, dimension_numbers, **how)
    return unscaled(product, left, right).astype(out_dtype)


class ScaledValues(NamedTuple):
    """Float32 values that stand for `values * factor`, a power of two, perhaps a scalar array."""

    values: jax.Array
    factor: Any = 1.0


def scaled_values(operand: jax.Array | MXArray, decoded: Callable = decode) -> ScaledValues:
    """The values of an operand, of which none is Inf that the quantized array did not have."""
    if not isinstance(operand, MXArray):
        return ScaledValues(operand.astype(jnp.float32))
    exponent, factor, lifted = 0, 1.0, False
    scale, scaled = operand.tensor_scale, operand
    if operand.format.scale.kind == "exponent":
        exponent, factor = -_HEADROOM, 2.0**_HEADROOM
    elif scale is not None and scale.size == 1:
        small = is_tiny(scale)
        scaled, lifted = dataclasses.replace(operand, tensor_scale=lift(scale, small)), True
        factor = jnp.where(small, jnp.float32(2.0**-LIFT), jnp.float32(1)).reshape(())
    values = decoded(unlinked(scaled), jnp.float32, exponent=exponent, lifted=lifted)
    if operand.primal is not None:
        values = straight_through(values, operand.primal.astype(jnp.float32) / factor)
    return ScaledValues(values, factor)


def unscaled(product: jax.Array, lhs: ScaledValues, rhs: ScaledValues) -> jax.Array:
    """A product of the operands' values as one of what they stand for."""
    for factor in (lhs.factor, rhs.factor):
        if isinstance(factor, jax.Array) or factor != 1.0:
            product = product * factor
    return product


# Scales that are rounded up bring the largest finite float32 to 2^128 at most.
_HEADROOM = 2


def attend(
    shared: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike, tokens: int
) -> jax.Array:
    """Causal attention: `softmax(q k^T / sqrt(features)) v`, each query over rows up to its own.

    Args:
      shared: queries `[matrices, heads * tokens, features]`, of the heads that share keys.
      keys: `[matrices, length, features]`, as values or as codes.
      values: likewise.
      position: row of the first token.
      tokens: how many of a head follow each other.
    """
    keys, values = _row_values(keys), _row_values(values)
    scores = jnp.einsum("hqd,hkd->hqk", shared, keys, preferred_element_type=jnp.float32)
    last = position + jnp.arange(tokens)
    rows = jnp.arange(keys.shape[1])[None, None]
    seen = rows <= jnp.tile(last, shared.shape[1] // tokens)[None, :, None]
    scores = jnp.where(seen, scores * shared.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(values.dtype)
    # Whatever rows behind the last token hold, NaN too, they take part in nothing.
    values = jnp.where(rows.mT <= last[-1], values, 0)
    return jnp.einsum("hqk,hkd->hqd", weights, values)


def _row_values(rows: Rows) -> jax.Array:
    return rows.unpacked().dequantize() if isinstance(rows, PackedRows) else rows


# Rows in consecutive groups -----------------------------------------------------------------------

# Blocks that hold several rows start at each group's first row, so that none crosses a group
# border. Group sizes are data and shapes are not: a layout has a fixed length in which every group
# starts at a multiple of the block, or, for blocks of a whole group, each row takes the scale of
# its group.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedRows:
    """The places of rows in a layout whose groups start at multiples of `unit`."""

    unit: int  # 1 leaves every row in its place
    sizes: jax.Array  # int32 `[g]`, rows of each group in the layout
    group: jax.Array  # int32 `[p]`, the group of each row of the layout; g behind the last group
    source: jax.Array  # int32 `[p]`, the row that stands there; m for padding
    position: jax.Array  # int32 `[m]`, where each row stands; p for a row of no group

    def place(self, x: jax.Array) -> jax.Array:
        """`[m, c]` in the layout, `[p, c]`: padding and rows of no group are zeros."""
        if self.unit == 1:
            return jnp.where((self.group < self.sizes.shape[0])[:, None], x, 0)
        return jnp.take(x, self.source, axis=0, mode="fill", fill_value=0)

    def restore(self, x: MXArray) -> MXArray:
        """`[p, c]` in blocks of `unit` rows as `[m, c]`, where every row has its block's scales."""
        return dataclasses.replace(
            x,
            codes=jnp.take(x.codes, self.position, axis=0, mode="fill", fill_value=0),
            scales=jnp.take(x.scales, self.position // self.unit, axis=0, mode="clip"),
            blocks=_without_rows(x.blocks),
        )


def ragged_rows(group_sizes: jax.Array, num_rows: int, unit: int) -> RaggedRows:
    """The layout of m rows in groups: p rows, `p <= m + min(g, m) * (unit - 1)`."""
    # What sizes, int32 `[g]`, add up to beyond `num_rows` is cut off.
    num_groups = group_sizes.shape[0]
    ends = _sums_up_to(num_rows, group_sizes)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    padded = (ends - starts + unit - 1) // unit * unit
    padded_ends = jnp.cumsum(padded)
    padded_starts = padded_ends - padded
    # Every group may need padding.
    num_padded = (num_rows + min(num_groups, num_rows) * (unit - 1)) // unit * unit

    layout_row = jnp.arange(num_padded, dtype=jnp.int32)
    group = _group_of(layout_row, padded_ends)
    offset = layout_row - _of_group(padded_starts, group)
    filled = offset < _of_group(ends - starts, group)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    row_group = _group_of(row, ends)
    position = _of_group(padded_starts - starts, row_group) + row
    return RaggedRows(
        unit=unit,
        sizes=padded,
        group=group,
        source=jnp.where(filled, _of_group(starts, group) + offset, num_rows),
        position=jnp.where(row_group < num_groups, position, num_padded),
    )


def _sums_up_to(most: int, sizes: jax.Array) -> jax.Array:
    """Cumulative sums, none above `most`, whatever int32 would overflow to."""
    sizes = jnp.minimum(sizes, most)
    if most * sizes.shape[0] <= jnp.iinfo(jnp.int32).max:
        return jnp.minimum(jnp.cumsum(sizes), most)
    return lax.associative_scan(lambda a, b: jnp.minimum(a, most - b) + b, sizes)


def _group_of(row: jax.Array, ends: jax.Array) -> jax.Array:
    """The group of each row; an empty group has none."""
    return jnp.searchsorted(ends, row, side="right", method="compare_all").astype(jnp.int32)


def _of_group(of_each: jax.Array, group: jax.Array) -> jax.Array:
    """A number of each row's group; 0 for rows of none."""
    return jnp.append(of_each, 0)[group]


def _without_rows(blocks: Blocks) -> Blocks:
    return tuple((axis, size) for axis, size in blocks if axis != -2)


def group_peaks(x: jax.Array, rows: RaggedRows) -> jax.Array:
    """The largest magnitude of each column within each group, float32 `[g, 1, c]` of `[p, c]`."""
    # Found as an integer, so subnormals, infinities and NaN come out as they are; 0 without rows.
    magnitudes = float32.float32_bits(x) & float32.ABS
    peaks = jax.ops.segment_max(
        magnitudes, rows.group, num_segments=rows.sizes.shape[0], indices_are_sorted=True
    )
    return float32.from_bits(jnp.maximum(peaks, 0))[:, None]


def encode_by_group(
    x: jax.Array,
    rows: RaggedRows,
    peaks: MXArray,
    rounding: Rounding,
    random_bits: jax.Array | None,
) -> MXArray:
    """x under the scales that its groups' peaks were quantized with."""
    blocks = _without_rows(peaks.blocks)
    pieces, inside = block_shapes.split(x, blocks)
    # Rows of no group are zeros, under a scale of their own that keeps them so.
    scales = jnp.pad(peaks.scales[:, 0], ((0, 1), (0, 0)), constant_values=1)[rows.group]
    tensor_scale = None if peaks.tensor_scale is None else peaks.tensor_scale[0]
    codes = encode_scaled(
        pieces,
        block_shapes.spread(scales, inside),
        peaks.format,
        tensor_scale=None if tensor_scale is None else block_shapes.spread(tensor_scale, inside),
        rounding=rounding,
        random_bits=None if random_bits is None else block_shapes.split(random_bits, blocks)[0],
    )
    return MXArray(
        codes=block_shapes.merge(codes, x.shape, inside),
        scales=scales,
        tensor_scale=tensor_scale,
        format=peaks.format,
        blocks=blocks,
        dtype=x.dtype,
    )


def scaled_ragged_dot(
    lhs: jax.Array | MXArray,
    rhs: jax.Array | MXArray,
    group_sizes: jax.Array,
    contracting: tuple[int, int],
    out_dtype: jax.typing.DTypeLike,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """`reference.matmul.scaled_matmul` group by group: exact factors, added in float32.

    Args:
      lhs: `[p, k]`.
      rhs: `[g, k, n]` or `[g, n, k]`; `[p, n]` if the rows are contracted.
      group_sizes: int32 `[g]`.
      contracting: axes of lhs and rhs, counted from the end; (-2, -2) contracts the rows.
      out_dtype: dtype of the product.
      precision: for products with a high-precision operand; two quantized ones take the highest.

    Returns:
      `[p, n]` with zeros in rows of no group, or `[g, k, n]` if the rows are contracted.
    """
    if not isinstance(lhs, MXArray) and not isinstance(rhs, MXArray):
        return grouped_dot(lhs, rhs, group_sizes, contracting, precision, out_dtype)
    if isinstance(lhs, MXArray) and isinstance(rhs, MXArray):
        precision = lax.Precision.HIGHEST
    a, b = scaled_values(lhs), scaled_values(rhs)
    product = grouped_dot(a.values, b.values, group_sizes, contracting, precision, jnp.float32)
    return unscaled(product, a, b).astype(out_dtype)


def grouped_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    contracting: tuple[int, int],
    precision: lax.PrecisionLike,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """`lax.ragged_dot_general`, but with `vmap` of some operands and second derivatives, and with
    NaN and Inf of one group's matrix in its rows alone, as NaN."""
    how = {"precision": precision, "preferred_element_type": np.dtype(dtype)}
    return _grouped.bind(*vary_alike((lhs, rhs, group_sizes)), contracting=contracting, **how)


def _dot(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contracting: tuple[int, int], **how: Any
) -> jax.Array:
    if contracting == (-2, -2):
        return _ragged(lhs, rhs, sizes, contracting, **how)
    # XLA multiplies zeros by the matrices of other groups.
    finite = jnp.isfinite(rhs)
    product = _ragged(lhs, jnp.where(finite, rhs, 0), sizes, contracting, **how)
    spoilt = functools.partial(_of_rows, num_rows=lhs.shape[-2])
    for _ in range(sizes.ndim - 1):
        spoilt = jax.vmap(spoilt)
    return jnp.where(spoilt(~finite.all(contracting[1]), sizes), jnp.nan, product)


def _of_rows(of_groups: jax.Array, sizes: jax.Array, num_rows: int) -> jax.Array:
    """`[g, n]` as each of the rows has it, `[m, n]`; False for rows of no group."""
    group = _group_of(jnp.arange(num_rows), jnp.cumsum(sizes))
    return jnp.pad(of_groups, ((0, 1), (0, 0)))[group]


def _ragged(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contracting: tuple[int, int], **how: Any
) -> jax.Array:
    rows_contracted, num_batch = contracting == (-2, -2), sizes.ndim - 1
    batch = tuple(range(num_batch))
    axes = (lhs.ndim + contracting[0],), (rhs.ndim + contracting[1],)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(axes, (batch, batch)),
        lhs_ragged_dimensions=(num_batch,),
        rhs_group_dimensions=() if rows_contracted else (num_batch,),
    )
    result = lax.ragged_dot_general(lhs, rhs, sizes, numbers, **how)
    # With the rows contracted, jax puts the groups before the batch.
    return jnp.moveaxis(result, 0, num_batch) if rows_contracted else result


def _type(
    lhs: ShapedArray, rhs: ShapedArray, sizes: ShapedArray, contracting: tuple[int, int], **how: Any
) -> ShapedArray:
    rows = (*sizes.shape, lhs.shape[-1]) if contracting == (-2, -2) else lhs.shape[:-1]
    return result_aval(lhs, (*rows, rhs.shape[-3 - contracting[1]]), how["preferred_element_type"])


def _batch(
    operands: Sequence[jax.Array], axes: Sequence[int | None], **how: Hashable
) -> tuple[jax.Array, int]:
    """jax's own rule only takes operands that are all mapped, all along their first axis."""
    (size, *_) = [x.shape[at] for x, at in zip(operands, axes, strict=True) if at is not None]
    every = (
        jnp.broadcast_to(x, (size, *x.shape)) if at is None else jnp.moveaxis(x, at, 0)
        for x, at in zip(operands, axes, strict=True)
    )
    return _grouped.bind(*every, **how), 0


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], **how: Hashable
) -> tuple[jax.Array, jax.Array]:
    lhs, rhs, sizes = primals
    pairs = (tangents[0], rhs), (lhs, tangents[1])
    real = [pairs[at] for at in (0, 1) if not isinstance(tangents[at], ad.Zero)]
    terms = [_grouped.bind(*vary_alike((*pair, sizes)), **how) for pair in real]
    return _grouped.bind(*primals, **how), functools.reduce(jnp.add, terms)


def _transpose(
    g: jax.Array, lhs: Any, rhs: Any, sizes: jax.Array, *, contracting: tuple[int, int], **how: Any
) -> tuple[jax.Array | None, ...]:
    """The cotangent of the one operand that the product is linear in."""
    is_lhs = ad.is_undefined_primal(lhs)
    how["preferred_element_type"] = (lhs if is_lhs else rhs).aval.dtype
    if contracting == (-2, -2):
        factors, axes = ((rhs, g), (-1, -1)) if is_lhs else ((lhs, g), (-1, -2))
    elif is_lhs:
        factors, axes = (g, rhs), (-1, -3 - contracting[1])
    else:
        factors, axes = (lhs, g) if contracting[1] == -2 else (g, lhs), (-2, -2)
    cotangent = _grouped.bind(*vary_alike((*factors, sizes)), contracting=axes, **how)
    return (cotangent, None, None) if is_lhs else (None, cotangent, None)


_grouped: Any = Primitive("mx_grouped_dot")
_grouped.is_high = lambda *types, **params: False
_grouped.def_abstract_eval(_type)
_grouped.def_impl(functools.partial(eager, _grouped))
batching.primitive_batchers[_grouped] = _batch
ad.primitive_jvps[_grouped], ad.primitive_transposes[_grouped] = _jvp, _transpose
mlir.register_lowering(_grouped, mlir.lower_fun(_dot, multiple_results=False))
