"""Products by the compiled handlers, of codes as they are or of packed weights, dense or in groups.

Float8 under float32 scales is decoded by a handler, and multiplied by XLA's float32 dot. XLA's own
ragged product multiplies masked rows by every group's matrix on CPUs, g times the work: here a loop
multiplies each tile of a group's rows by the one matrix that is its group's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Axes
from mx_jax.backends.calls import (
    AnyOperand,
    DequantizeCall,
    MatmulCall,
    Operand,
    RaggedCall,
    rejects_symbolic,
)
from mx_jax.backends.cpu_ffi import casts, rejections
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.weights import PANEL_ROWS, PANELS, ROWS, by_parts, by_rows
from mx_jax.codecs.explicit_axes import vary_alike
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


def rejects(call: MatmulCall) -> str | None:
    """Why no handler multiplies or decodes for a product, or None."""
    reason = rejections.rejects(call)
    return None if reason is None or _is_decoded(call) else reason


def multiply(lhs: Operand, rhs: Operand | PackedMXArray, call: MatmulCall) -> jax.Array:
    """The product `[*batch, *m, *n]`. Packed weights give the bits that they give unpacked."""
    if isinstance(rhs, PackedMXArray):
        return by_packed(call, lhs, rhs)
    return by_values(call, lhs, rhs) if _is_decoded(call) else by_codes(call, lhs, rhs)


def _is_decoded(call: MatmulCall) -> bool:
    """Whether all that is quantized is float8 under float32 scales, and not packed."""
    found = [own for _, own in call.sides if own.format is not None]
    return all(
        own.format is not None
        and own.format.scale.is_float32
        and own.packed_by is None
        and casts.rejects_dequantize(_dequantize_call(own.shape, own.format, own.axes)) is None
        for own in found
    )


def _dequantize_call(shape: tuple[int, ...], format: BlockFormat, axes: Axes) -> DequantizeCall:
    float32 = np.dtype(np.float32)
    return DequantizeCall(shape=shape, dtype=float32, format=format, blocks=axes.blocks(format))


def by_values(call: MatmulCall, lhs: Operand, rhs: Operand) -> jax.Array:
    """The reference's product, of values that the handler decodes."""

    def values(x: Operand, axes: Axes) -> jax.Array:
        if not isinstance(x, MXArray):
            return x.astype(jnp.float32)
        return casts.dequantize(x, _dequantize_call(x.shape, x.format, axes))

    quantized = isinstance(lhs, MXArray) and isinstance(rhs, MXArray)
    return lax.dot_general(
        values(lhs, call.lhs.axes),
        values(rhs, call.rhs.axes),
        call.dimension_numbers,
        precision=lax.Precision.HIGHEST if quantized else call.precision,
        preferred_element_type=jnp.float32,
    ).astype(call.out_dtype)


def by_codes(call: MatmulCall, lhs: Operand, rhs: Operand) -> jax.Array:
    """The product of codes as they are, by the handler."""
    (format, *_) = [f for f in (call.lhs.format, call.rhs.format) if f is not None]
    left, right = _side(lhs, call.lhs.axes, "lhs"), _side(rhs, call.rhs.axes, "rhs")
    handler = Handler(
        target=rejections.MATMUL,
        axes=f"{left.axes}, {right.axes} -> *lr {left.kept} {right.kept}",
        dtypes=(np.dtype(call.out_dtype),),
        attributes=hashable(
            left.attributes | right.attributes | {"block": np.int32(rejections.block_size(format))}
        ),
    )
    (product,) = handler(*left.arrays, *right.arrays)
    return product


def by_packed(call: MatmulCall, lhs: Operand, rhs: PackedMXArray) -> jax.Array:
    """The product by packed weights, by the handler."""
    if rhs.layout == ROWS:
        return by_rows(by_packed, call, lhs, rhs)
    if rhs.layout.parts is not None:
        return by_parts(by_packed, PANELS, call, lhs, rhs)
    rows = math.prod(rhs.kept)
    left, (element, scale) = _side(lhs, call.lhs.axes, "lhs"), rejections.names(rhs.format)
    tensor_scale, axes = _tensor_scale(rhs.arrays.tensor_scale, "*t")
    handler = Handler(
        target=rejections.PACKED_MATMUL,
        axes=f"{left.axes}, *r n/{PANEL_ROWS} bytes, {axes} -> *lr {left.kept} n",
        dtypes=(np.dtype(call.out_dtype),),
        attributes=hashable(
            left.attributes
            | {"rhs_element": element, "rhs_scale": scale}
            | {"block": np.int32(rejections.block_size(rhs.format))}
        ),
        sizes=(("n", rows),),
    )
    (product,) = handler(*left.arrays, rhs.arrays.bytes, tensor_scale)
    return product.reshape(*product.shape[:-1], *rhs.kept)


def _tensor_scale(scale: jax.Array | None, axes: str) -> tuple[jax.Array, str]:
    """One for each matrix of an operand, and its axes; an empty array where there is none."""
    return (jnp.zeros((0,), jnp.float32), "0") if scale is None else (scale, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
    """One operand as the handler takes it."""

    arrays: tuple[jax.Array, ...]  # elements, scales and tensor scales
    axes: str
    kept: str  # axes that the handler takes as one
    attributes: dict[str, object]


def _side(operand: Operand, axes: Axes, which: Literal["lhs", "rhs"]) -> _Side:
    format = operand.format if isinstance(operand, MXArray) else None
    together = rejections.block_rows(format)
    batch, letter = ("*l", "m") if which == "lhs" else ("*r", "n")
    kept = " ".join(f"{letter}{index}" for index in range(len(axes.kept)))
    k = " ".join(f"k{index}" for index in range(len(axes.contracting)))

    def in_order(k: str, kept: str) -> str:
        return f"{batch} ({k}) ({kept})" if axes.k_first else f"{batch} ({kept}) ({k})"

    if isinstance(operand, MXArray):
        elements, scales, given = operand.codes, operand.scales, operand.tensor_scale
        rows = f"{kept}/{together}" if kept and together != 1 else kept
        scale_axes = in_order(f"{k}/{rejections.block_size(operand.format)}", rows)
    else:
        elements = operand if operand.dtype in rejections.DTYPES else operand.astype(jnp.float32)
        scales, given, scale_axes = jnp.zeros((0,), jnp.uint8), None, "0"
    # A batch of its own: one matrix's scale may stand for all.
    own = ("*s" if which == "lhs" else "*t") + " 1" * (operand.ndim - len(axes.batch))
    tensor_scale, own = _tensor_scale(given, own)
    element, scale = rejections.names(format)
    return _Side(
        arrays=(elements, scales, tensor_scale),
        axes=f"{in_order(k, kept)}, {scale_axes}, {own}",
        kept=f"({kept})",
        attributes={
            f"{which}_element": element,
            f"{which}_scale": scale,
            f"{which}_k_first": axes.k_first,
            f"{which}_block_rows": np.int32(together),
        },
    )


# Rows of a tile: about as many as a group has, within what keeps a matrix's decoding worth while
# and rows of other groups few; contracted ones in whole blocks.
_FEWEST_ROWS, _FEWEST_CONTRACTED, _MOST_ROWS = 16, 32, 256


def rejects_groups(call: RaggedCall) -> str | None:
    """Why the handler does not take the product of a tile, or None."""
    return rejects_symbolic(call) or rejections.rejects(_tile_call(call))


def multiply_groups(
    lhs: Operand, rhs: AnyOperand, group_sizes: jax.Array, call: RaggedCall
) -> jax.Array:
    """The product, by tiles. Packed weights give the bits that they give unpacked."""
    return _by_tiles(call, lhs, rhs, group_sizes)


def _tile_call(call: RaggedCall) -> MatmulCall:
    rows, across = _tile_rows(call), call.lhs.shape[1]
    lhs = dataclasses.replace(call.lhs, shape=(rows, across))
    if call.contracts_rows:
        rhs = dataclasses.replace(call.rhs, shape=(rows, call.rhs.shape[1]))
        return MatmulCall(lhs=lhs, rhs=rhs, out_dtype=jnp.dtype(jnp.float32))
    scale_axes = tuple(axis - 1 for axis in call.rhs.scale_axes if axis)
    axes = Axes.ordered(k_first=call.rhs.axes.k_first)
    rhs = dataclasses.replace(call.rhs, shape=call.rhs.shape[1:], axes=axes, scale_axes=scale_axes)
    return MatmulCall(lhs=lhs, rhs=rhs, out_dtype=call.out_dtype, precision=call.precision)


def _tile_rows(call: RaggedCall) -> int:
    num_rows = call.lhs.shape[0]
    in_a_group = -(-num_rows // max(call.num_groups, 1))
    rows = 1 << max(in_a_group - 1, 0).bit_length()
    fewest = _FEWEST_CONTRACTED if call.contracts_rows else _FEWEST_ROWS
    return min(max(rows, fewest), _MOST_ROWS, num_rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Which rows are multiplied at each step."""

    rows: int  # of a tile
    num_rows: int  # of all groups, and behind them
    ends: jax.Array  # int32 `[g]`, where each group's rows end
    last: jax.Array  # int32 `[g]`, up to which step each group's tiles go

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, num_rows: int) -> "_Tiles":
        return cls(
            rows=rows,
            num_rows=num_rows,
            ends=jnp.cumsum(sizes, dtype=jnp.int32),
            last=jnp.cumsum(-(-sizes // rows), dtype=jnp.int32),
        )

    def at(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The group of a step, the first row to read, and which of those read are to count."""
        group = jnp.searchsorted(self.last, step, side="right", method="compare_all")
        end = self.ends[group]
        before = jnp.where(group > 0, self.last[group - 1], 0)
        start = jnp.where(group > 0, self.ends[group - 1], 0) + (step - before) * self.rows
        # The last tile of all reads rows again that came before it: what is sliced has one size.
        first = jnp.minimum(start, self.num_rows - self.rows)
        row = first + jnp.arange(self.rows, dtype=jnp.int32)
        return group, first, (row >= start) & (row < end)


def _by_tiles(call: RaggedCall, lhs: Operand, rhs: AnyOperand, group_sizes: jax.Array) -> jax.Array:
    n = call.rhs.shape[2 if call.rhs.axes.k_first and not call.contracts_rows else 1]
    if call.contracts_rows:
        shape, dtype = (call.num_groups, call.lhs.shape[1], n), jnp.dtype(jnp.float32)
    else:
        shape, dtype = (call.lhs.shape[0], n), call.out_dtype
    zeros = jnp.zeros(shape, dtype)
    if 0 in (*call.lhs.shape, *call.rhs.shape):
        return zeros.astype(call.out_dtype)
    tiles = _Tiles.of(group_sizes, _tile_rows(call), call.lhs.shape[0])
    step = _contracted if call.contracts_rows else _kept
    start, *_ = vary_alike((zeros, *jax.tree.leaves((lhs, rhs, group_sizes))))
    body = functools.partial(step, _tile_call(call), tiles, lhs, rhs)
    return lax.fori_loop(0, tiles.last[-1], body, start).astype(call.out_dtype)


def _kept(
    call: MatmulCall, tiles: _Tiles, lhs: Operand, rhs: AnyOperand, step: jax.Array, out: jax.Array
) -> jax.Array:
    """One tile's rows of the product `[p, n]`."""
    group, first, counts = tiles.at(step)
    matrix = _each(rhs, lambda x: lax.dynamic_index_in_dim(x, group, keepdims=False))
    by_handler: Any = by_packed if isinstance(matrix, PackedMXArray) else by_codes
    product = by_handler(call, _rows(lhs, first, tiles), matrix)
    before = lax.dynamic_slice_in_dim(out, first, tiles.rows)
    product = jnp.where(counts[:, None], product, before)
    return lax.dynamic_update_slice_in_dim(out, product, first, 0)


def _contracted(
    call: MatmulCall, tiles: _Tiles, lhs: Operand, rhs: Operand, step: jax.Array, out: jax.Array
) -> jax.Array:
    """One tile's part of a group's sum in `[g, m, n]`."""
    group, first, counts = tiles.at(step)
    left, right = (_only(_rows(x, first, tiles), counts) for x in (lhs, rhs))
    so_far = lax.dynamic_index_in_dim(out, group, keepdims=False)
    added = so_far + by_codes(call, left, right)
    return lax.dynamic_update_index_in_dim(out, added, group, 0)


def _rows(x: Operand, first: jax.Array, tiles: _Tiles) -> Operand:
    """A tile of `[p, c]`: blocks along the rows are whole in it, and begin with it."""
    return _each(
        x,
        lambda part: lax.dynamic_slice_in_dim(
            part,
            first // (tiles.num_rows // part.shape[0]),
            tiles.rows // (tiles.num_rows // part.shape[0]),
        ),
    )


def _only(x: Operand, counts: jax.Array) -> Operand:
    """A tile with zeros, under scales of no NaN, in the rows that do not count."""
    return _each(
        x,
        lambda part: jnp.where(
            counts.reshape(part.shape[0], -1)[:, :1], part, jnp.zeros((), part.dtype)
        ),
    )


def _each(x: AnyOperand, change: Callable[[jax.Array], jax.Array]) -> Any:
    """The same of codes and scales, or of values; one tensor scale stays, others are indexed."""
    if isinstance(x, PackedMXArray):
        return dataclasses.replace(x, arrays=jax.tree.map(change, x.arrays))
    if not isinstance(x, MXArray):
        return change(x)
    scale = x.tensor_scale
    if scale is not None and scale.ndim > 2:
        scale = scale[0] if scale.shape[0] == 1 else change(scale)
    return MXArray(
        codes=change(x.codes),
        scales=change(x.scales),
        tensor_scale=scale,
        format=x.format,
        blocks=x.blocks,
        dtype=x.dtype,
    )
