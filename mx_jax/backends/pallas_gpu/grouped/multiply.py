"""Products of rows in groups by GPU kernels: how operands reach them.

Nothing is padded, gathered or masked around a kernel where sizes are multiples of a few elements:
each program reads which rows are its own, copies end with their arrays, and rows of no group are
written as zeros by the kernel itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import AnyOperand, Operand, RaggedCall
from mx_jax.backends.matrices import as_matrices, without_tensor_scale
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.grouped.visits import CHUNK_ROWS, visits
from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, PackedWeights
from mx_jax.backends.pallas_gpu.products.decoded import in_high_precision
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
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
    """The product `[p, n]` in `call.out_dtype`, zeros in rows of no group.

    Args:
      lhs: the rows, `[p, k]`.
      rhs: a matrix for each group, or what was packed of them.
      group_sizes: int32 `[g]`.
      call: their description, which `rejects` takes.
      architecture: the GPU; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter.
    """
    shape = call.lhs.shape[0], call.rhs.rows
    if 0 in (*call.lhs.shape, *call.rhs.shape):
        return jnp.zeros(shape, call.out_dtype)
    weights, scale = _packed(rhs, call)
    x, factor = in_high_precision(lhs)
    ones = jnp.ones(call.num_groups, jnp.float32)
    factors = (ones if each is None else ones * each.reshape(-1) for each in (scale, factor))
    return multiply(
        x,
        weights,
        jnp.concatenate(list(factors)),
        group_sizes,
        call.out_dtype,
        architecture=architecture or current_architecture(),
        interpret=interpret,
    )


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
    factors: jax.Array,
    group_sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    *,
    architecture: Architecture,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """bfloat16 `x[p, k]` in groups by packed `weights[g, n, k]`: `[p, n]`, rounded once.

    Args:
      x: the rows; no axis empty.
      weights: packed; a tensor scale of theirs is left out.
      factors: float32 `[2 * g]`, of the sums, as the kernel takes them.
      group_sizes: int32 `[g]`, which sum to at most p.
      out_dtype: float32, bfloat16 or float16.
      architecture: the GPU.
      tiles: instead of the table's.
      interpret: parameters of Mosaic's interpreter.
    """
    kernel = architecture.decoding
    assert kernel.load_groups is not None
    (rows, k), n, dtype = x.shape, weights.shape[1], jnp.dtype(out_dtype)
    if rows % CHUNK_ROWS or k % CHUNK:
        x = jnp.pad(x, ((0, -rows % CHUNK_ROWS), (0, -k % CHUNK)))
    if tiles is None:
        tiles = tiles_for(architecture, rows, weights)
    once = tiles.splits == 1 and dtype != jnp.float16
    written = dtype if once else jnp.dtype(jnp.float32)
    whole = n * written.itemsize % _ROW_UNIT == 0
    sums = kernel.load_groups()(
        x,
        weights.codes.reshape(-1, *weights.codes.shape[2:]),
        weights.scales.reshape(-1, *weights.scales.shape[2:]),
        factors,
        visits(group_sizes, x.shape[0], tiles.m),
        columns=n if whole else weights.padded_n,
        format=weights.format,
        tiles=tiles,
        out_dtype=written,
        interpret=interpret,
    )
    if not once:
        sums = sums.reshape(tiles.splits, *x.shape[:1], -1).sum(0).astype(dtype)
    return sums[:rows, :n]


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
