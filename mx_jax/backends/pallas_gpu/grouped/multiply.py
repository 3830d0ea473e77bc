"""Products of rows in groups by GPU kernels: how operands reach them.

Nothing is padded, gathered or masked around a kernel where sizes are multiples of a few elements:
each program reads which rows are its own, copies end with their arrays, and rows of no group are
written as zeros by the kernel itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.axes import Side
from mx_jax.backends.calls import AnyOperand, Operand, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.grouped import scaled
from mx_jax.backends.pallas_gpu.grouped.visits import CHUNK_ROWS, visits
from mx_jax.backends.pallas_gpu.layouts.factors import factors_of
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, PackedWeights
from mx_jax.backends.pallas_gpu.products.decoded import in_high_precision
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.sums import as_matrices, without_tensor_scale
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
    if architecture.kernel(call.lhs.format, call.rhs.format).layout is ScaledOperand:
        assert isinstance(lhs, MXArray)
        return scaled.multiply_groups(lhs, rhs, group_sizes, call, architecture, interpret)
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
        assert isinstance(weights, PackedWeights)
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
        tiles = tiles_for(architecture, rows, weights)
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


def tiles_for(architecture: Architecture, rows: int, weights: PackedWeights) -> Tiles:
    """The table's tiles for as many rows as a group has, wherever in its chunk it begins."""
    groups = min(weights.shape[0], rows)
    padded_rows = rows + -rows % CHUNK_ROWS
    in_a_group = min(-(-rows // groups) + CHUNK_ROWS - 1, padded_rows)
    tiles = choose(
        architecture,
        architecture.decoding,
        storage(weights.format.element).bits,
        batch=groups,
        m=in_a_group,
        n=weights.padded_n,
        k=weights.padded_k,
        stripes=False,
    )
    return dataclasses.replace(tiles, m=min(tiles.m, padded_rows))
