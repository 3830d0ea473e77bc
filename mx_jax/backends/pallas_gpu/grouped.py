"""Products of rows in groups by GPU kernels: how operands reach them.

Nothing is padded, gathered or masked around a kernel where sizes are multiples of a few elements:
each program reads which rows are its own, copies end with their arrays, and rows of no group are
written as zeros by the kernel itself. (Tensor cores take scales in tiles of 128 rows, and groups
begin anywhere: so of operands that they take as they are, the scales of each program's rows are
gathered, a 16th or 32nd of the codes' bytes.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.calls import AnyOperand, Operand, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.layouts import (
    CHUNK,
    PackedWeights,
    ScaledOperand,
    factors_of,
    scale_tiles,
    storage,
)
from mx_jax.backends.pallas_gpu.products import in_high_precision
from mx_jax.backends.pallas_gpu.tiles import CHUNK_ROWS, FIELDS, Tiles, visits
from mx_jax.backends.pallas_gpu.tuning import choose
from mx_jax.backends.sums import as_matrices, without_tensor_scale
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

# What rows of the result take at least, so that they are copied each by itself: bytes.
_ROW_UNIT = 16


def multiply_groups(
    lhs: Operand,
    rhs: AnyOperand,
    group_sizes: jax.Array,
    call: RaggedCall,
    *,
    architecture: Architecture | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product `[p, n]` in `call.out_dtype`, zeros in rows of no group; or sums `[g, m, n]`.

    Args:
      lhs: the rows, `[p, k]`; `[p, m]` if they are contracted.
      rhs: a matrix for each group, or what was packed of them; `[p, n]` if rows are contracted.
      group_sizes: int32 `[g]`.
      call: their description, which `rejects` takes.
      architecture: the GPU; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter.
    """
    if call.contracts_rows:
        return _sum_groups(lhs, rhs, group_sizes, call, architecture, interpret)
    shape = call.lhs.shape[0], call.rhs.rows
    if 0 in (*call.lhs.shape, *call.rhs.shape):
        return jnp.zeros(shape, call.out_dtype)
    architecture = architecture or current_architecture()
    if not architecture.kernel(call.lhs.format, call.rhs.format).decodes:
        assert isinstance(lhs, MXArray)
        how = {"architecture": architecture, "interpret": interpret}
        return multiply_scaled(lhs, _laid_out(rhs, call), group_sizes, call.out_dtype, **how)
    weights, scale = _packed(rhs, call)
    x, factor = in_high_precision(lhs)
    return multiply(
        x,
        weights,
        group_sizes,
        call.out_dtype,
        factors=factors_of((scale, factor), call.num_groups),
        architecture=architecture,
        interpret=interpret,
    )


def lays_out(call: RaggedCall) -> Side | None:
    """The side that `multiply_groups` lays out: the groups' matrices, unless packed before."""
    return None if call.contracts_rows or call.rhs.packed_by is not None else "rhs"


def _packed(rhs: AnyOperand, call: RaggedCall) -> tuple[PackedWeights, jax.Array | None]:
    """Matrices in the kernel's layout, and their tensor scales: one, or one of each."""
    if isinstance(rhs, PackedMXArray):
        weights = rhs.arrays.merged()
        return weights, weights.tensor_scale
    assert isinstance(rhs, MXArray)
    matrices, _ = as_matrices(without_tensor_scale(rhs), call.rhs.axes)
    assert isinstance(matrices, MXArray)
    return PackedWeights.of(matrices), rhs.tensor_scale


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    group_sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    *,
    factors: jax.Array | None = None,
    architecture: Architecture,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """bfloat16 `x[p, k]` in groups by packed `weights[g, n, k]`: `[p, n]`, rounded once.

    Args:
      x: the rows; no axis empty.
      weights: packed; a tensor scale of theirs is left out.
      group_sizes: int32 `[g]`, which sum to at most p.
      out_dtype: float32, bfloat16 or float16.
      factors: of the sums, as the kernel takes them.
      architecture: the GPU.
      tiles: instead of the table's.
      interpret: parameters of Mosaic's interpreter.
    """
    kernel = architecture.decoding
    assert kernel.load_groups is not None
    rows, n, dtype = x.shape[0], weights.shape[1], jnp.dtype(out_dtype)
    x = _aligned(x)
    if tiles is None:
        tiles = _tiles(architecture, rows, weights)
    once = tiles.splits == 1 and dtype != jnp.float16
    written = dtype if once else jnp.dtype(jnp.float32)
    whole = n * written.itemsize % _ROW_UNIT == 0
    sums = kernel.load_groups()(
        x,
        weights.codes.reshape(-1, *weights.codes.shape[2:]),
        weights.scales.reshape(-1, *weights.scales.shape[2:]),
        visits(group_sizes, x.shape[0], tiles.m),
        factors,
        num_groups=weights.shape[0],
        columns=n if whole else weights.padded_n,
        format=weights.format,
        tiles=tiles,
        out_dtype=written,
        interpret=interpret,
    )
    if not once:
        sums = sums.reshape(tiles.splits, *x.shape[:1], -1).sum(0).astype(dtype)
    return sums[:rows, :n]


def _aligned(x: jax.Array) -> jax.Array:
    """Rows and columns up to what one copy takes: as they are, but for odd sizes."""
    rows, columns = -x.shape[0] % CHUNK_ROWS, -x.shape[1] % CHUNK
    return jnp.pad(x, ((0, rows), (0, columns))) if rows or columns else x


def _sum_groups(
    lhs: Operand,
    rhs: AnyOperand,
    group_sizes: jax.Array,
    call: RaggedCall,
    architecture: Architecture | None,
    interpret: Any,
) -> jax.Array:
    """`[g, m, n]`: of both operands in bfloat16, which loses nothing of them."""
    m, n = call.lhs.shape[1], call.rhs.shape[1]
    if 0 in (*call.lhs.shape, *call.rhs.shape, call.num_groups):
        return jnp.zeros((call.num_groups, m, n), call.out_dtype)
    assert not isinstance(rhs, PackedMXArray)
    left, left_scale = in_high_precision(lhs)
    right, right_scale = in_high_precision(rhs)
    left, right = (_aligned(x) for x in (left, right))
    factors = [
        jnp.float32(1) if scale is None else scale.reshape(())
        for scale in (left_scale, right_scale)
    ]
    starts = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    kernel = (architecture or current_architecture()).decoding
    assert kernel.load_group_sums is not None
    dtype = jnp.dtype(jnp.float32) if call.out_dtype == jnp.float16 else call.out_dtype
    sums = kernel.load_group_sums()(
        left,
        right,
        jnp.concatenate([starts, group_sizes]),
        jnp.stack(factors),
        tiles=sums_tiles(left.shape[1], right.shape[1]),
        out_dtype=dtype,
        interpret=interpret,
    )
    return sums[:, :m, :n].astype(call.out_dtype)


def sums_tiles(m: int, n: int) -> Tiles:
    """Two operands of 128 columns and 64 rows at a step, of which four are in flight."""
    return Tiles(m=min(m, 128), n=min(n, 128), k=64, stages=4)


def _tiles(
    architecture: Architecture,
    rows: int,
    weights: PackedWeights | ScaledOperand,
) -> Tiles:
    """The table's tiles for as many rows as a group has, wherever in its chunk it begins."""
    groups, padded_rows = min(weights.shape[0], rows), rows + -rows % CHUNK_ROWS
    decodes, element = isinstance(weights, PackedWeights), weights.format.element
    tiles = choose(
        architecture,
        architecture.decoding if decodes else architecture.kernels[0],
        storage(element).bits if decodes else element.bits,
        batch=groups,
        m=min(-(-rows // groups) + CHUNK_ROWS - 1, padded_rows),
        n=weights.shape[1],
        k=weights.padded_k,
    )
    return dataclasses.replace(tiles, m=min(tiles.m, padded_rows)) if decodes else tiles


# Operands that tensor cores take as they are ------------------------------------------------------


def multiply_scaled(
    x: MXArray,
    weights: ScaledOperand,
    group_sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    *,
    architecture: Architecture,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`x[p, k]` in groups by `weights[g, n, k]`: `[p, n]`, rounded once from float32 sums.

    Args:
      x: the rows, with blocks along k; no axis empty.
      weights: of a format that meets the rows'.
      group_sizes: int32 `[g]`, which sum to at most p.
      out_dtype: float32, bfloat16 or float16.
      architecture: the GPU.
      tiles: instead of the table's.
      interpret: parameters of Mosaic's interpreter.
    """
    kernel = architecture.kernel(x.format, weights.format)
    assert kernel.load_groups is not None
    (rows, _), (groups, n, _), block = x.shape, weights.shape, x.format.block[1]
    assert isinstance(block, int)
    tiles = dataclasses.replace(tiles or _tiles(architecture, rows, weights), splits=1)
    codes = jnp.pad(x.codes, ((0, -rows % CHUNK_ROWS), (0, weights.padded_k - x.shape[1])))
    elements = packing.pack(codes, x.format.element.bits)
    table = visits(group_sizes, codes.shape[0], tiles.m)
    dtype = jnp.dtype(out_dtype)
    written = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
    whole = n * written.itemsize % _ROW_UNIT == 0
    sums = kernel.load_groups()(
        lax.bitcast_convert_type(elements, x.format.element.dtype).reshape(codes.shape),
        weights.elements,
        _scales(x, table, tiles.m, weights.padded_k // block),
        weights.scale_values,
        table,
        factors_of((x.tensor_scale, weights.tensor_scale), groups),
        block=block,
        num_groups=groups,
        columns=n if whole else weights.codes.shape[0] // groups,
        tiles=tiles,
        out_dtype=written,
        interpret=interpret,
    )
    return sums[:rows, :n].astype(dtype)


def _scales(x: MXArray, table: jax.Array, tile_rows: int, columns: int) -> jax.Array:
    """Tiles of the scales of each visit's rows, whosever they are."""
    first = table.reshape(-1, FIELDS)[:, 1:2]
    rows = (first + jnp.arange(tile_rows, dtype=jnp.int32)).reshape(-1)
    taken = jnp.take(x.scales, rows, axis=0, mode="clip")
    taken = jnp.pad(taken, ((0, 0), (0, columns - taken.shape[1])))
    return lax.bitcast_convert_type(scale_tiles(taken), x.format.scale.dtype)


def _laid_out(rhs: AnyOperand, call: RaggedCall) -> ScaledOperand:
    """The groups' matrices as tensor cores take them; packed to be decoded, they are laid out."""
    if isinstance(rhs, PackedMXArray):
        return ScaledOperand.of(rhs.arrays.merged().unpack())
    assert isinstance(rhs, MXArray)
    matrices, _ = as_matrices(dataclasses.replace(rhs, tensor_scale=None), call.rhs.axes)
    assert isinstance(matrices, MXArray)
    return dataclasses.replace(ScaledOperand.of(matrices), tensor_scale=rhs.tensor_scale)
