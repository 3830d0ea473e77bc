"""Rows in groups by matrices that meet them on the tensor cores: how operands are laid out.

Tensor cores take scales in tiles of 128 rows, and groups begin anywhere. So the scales of each
visit's rows are gathered, a 16th or 32nd of the codes' bytes; codes stay where they are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.backends.calls import AnyOperand, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.grouped.visits import CHUNK_ROWS, FIELDS, visits
from mx_jax.backends.pallas_gpu.layouts.factors import factors_of
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand, scale_tiles
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.sums import as_matrices
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

# What rows of the result take at least, so that they are copied each by itself: bytes.
_ROW_UNIT = 16


def multiply_groups(
    lhs: MXArray,
    rhs: AnyOperand,
    group_sizes: jax.Array,
    call: RaggedCall,
    architecture: Architecture,
    interpret: Any,
) -> jax.Array:
    """The product `[p, n]` in `call.out_dtype`, zeros in rows of no group; no axis is empty."""
    return multiply(
        lhs,
        _laid_out(rhs, call),
        group_sizes,
        call.out_dtype,
        architecture=architecture,
        interpret=interpret,
    )


def multiply(
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
      tiles: instead of the table's, with `programs`.
      interpret: parameters of Mosaic's interpreter.
    """
    kernel = architecture.kernel(x.format, weights.format)
    assert kernel.load_groups is not None
    (rows, _), (groups, n, _), block = x.shape, weights.shape, x.format.block[1]
    assert isinstance(block, int)
    tiles = tiles or tiles_for(architecture, rows, weights)
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
    if not isinstance(rhs, PackedMXArray):
        assert isinstance(rhs, MXArray)
        scale = rhs.tensor_scale
        matrices, _ = as_matrices(dataclasses.replace(rhs, tensor_scale=None), call.rhs.axes)
        assert isinstance(matrices, MXArray)
        laid_out = ScaledOperand.of(matrices)
        return dataclasses.replace(laid_out, tensor_scale=scale)
    weights = rhs.arrays.merged()
    if isinstance(weights, PackedWeights):
        return ScaledOperand.of(weights.unpack())
    assert isinstance(weights, ScaledOperand)
    return weights


def tiles_for(architecture: Architecture, rows: int, weights: ScaledOperand) -> Tiles:
    """The table's tiles for as many rows as a group has, in programs that stay."""
    groups, n, _ = weights.shape
    tiles = choose(
        architecture,
        architecture.kernel(weights.format, weights.format),
        weights.format.element.bits,
        batch=groups,
        m=-(-rows // min(groups, rows)) + CHUNK_ROWS - 1,
        n=n,
        k=weights.padded_k,
    )
    if tiles.programs:
        return tiles
    return dataclasses.replace(tiles, splits=1, programs=architecture.num_sms)
