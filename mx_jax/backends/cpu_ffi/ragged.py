"""Products of rows in groups by the compiled handlers: one tile of a group's rows after the other.

XLA's own ragged product multiplies masked rows by every group's matrix on CPUs, g times the work.
Here a loop of as many steps as the groups have tiles multiplies each tile by the one matrix that is
its group's. Groups end where they end: a tile's rows of other groups are masked, not padded.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Axes
from mx_jax.backends.calls import AnyOperand, MatmulCall, Operand, RaggedCall, rejects_symbolic
from mx_jax.backends.cpu_ffi import rejections
from mx_jax.backends.cpu_ffi.products import by_codes, by_packed
from mx_jax.codecs.explicit_axes import vary_alike
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

# Rows of a tile: about as many as a group has, within what keeps a matrix's decoding worth while
# and rows of other groups few; contracted ones in whole blocks.
_FEWEST_ROWS, _FEWEST_CONTRACTED, _MOST_ROWS = 16, 32, 256


def rejects(call: RaggedCall) -> str | None:
    """Why the handler does not take the product of a tile, or None."""
    return rejects_symbolic(call) or rejections.rejects(_tile_call(call))


def multiply_groups(
    lhs: Operand, rhs: AnyOperand, group_sizes: jax.Array, call: RaggedCall
) -> jax.Array:
    """The product, by tiles. Packed weights give the bits that they give unpacked."""
    return _by_tiles(call, lhs, rhs, group_sizes)


def _tile_call(call: RaggedCall) -> MatmulCall:
    """The product of one tile of rows."""
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
    """Which rows are multiplied at each step.

    Attributes:
      rows: of a tile.
      num_rows: of all groups, and behind them.
      ends: int32 `[g]`, where each group's rows end.
      last: int32 `[g]`, up to which step each group's tiles go.
    """

    rows: int
    num_rows: int
    ends: jax.Array
    last: jax.Array

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
    call: MatmulCall, tiles: _Tiles, lhs: Operand, rhs: Any, step: Any, out: jax.Array
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
    call: MatmulCall, tiles: _Tiles, lhs: Operand, rhs: Any, step: Any, out: jax.Array
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


def _each(x: Any, change: Any) -> Any:
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
