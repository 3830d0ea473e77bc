"""Packing, and products by packed weights: how activations reach a kernel, and its tiles.

Around rows in groups nothing is padded, gathered or masked where sizes are multiples of a few
elements: each program reads which rows are its own, copies end with their arrays, and rows of no
group are written as zeros by the kernel itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import MatmulCall, Operand, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu.layouts import (
    CHUNK_ROWS,
    MATRICES,
    PackedWeights,
    concatenate_tensor_scales,
    stored_bits,
    visits,
)
from mx_jax.backends.pallas_gpu.tiles import CROSSOVER, Tiles, choose
from mx_jax.backends.sums import as_matrices, without_tensor_scale
from mx_jax.backends.target import Late
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

# Imports Mosaic GPU, which older versions of JAX lack.
_wgmma = Late("mx_jax.backends.pallas_gpu.wgmma")
_FLOAT32 = np.dtype("float32")


def pack_weights(x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights that `rejects_packing` lets through, to be decoded: for activations of any kind."""
    matrices, _ = as_matrices(x, call.weights.axes)
    ((_, block),) = call.blocks
    assert isinstance(matrices, MXArray) and isinstance(block, int)
    matrices = dataclasses.replace(matrices, format=call.format.with_block(block))
    batch, kept, k = call.weights.axes.sizes(call.weights.shape)
    if not batch:
        arrays = PackedWeights.of(matrices)
    else:
        # One by one, `[*batch]` in front of every array.
        scale = matrices.tensor_scale
        if scale is not None:
            scale = jnp.broadcast_to(scale, (matrices.shape[0], 1, 1))[:, None]
        singles = dataclasses.replace(
            matrices,
            codes=matrices.codes[:, None],
            scales=matrices.scales[:, None],
            tensor_scale=scale,
        )
        stacked = jax.vmap(PackedWeights.of)(singles)
        arrays = jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), stacked)
    return PackedMXArray(
        arrays=arrays,
        layout=MATRICES,
        kept=kept,
        k=k,
        k_first=call.weights.axes.k_first,
        format=matrices.format,
        dtype=matrices.dtype,
    )


def scaled_matmul(
    lhs: Operand, rhs: PackedMXArray, call: MatmulCall, interpret: Any = None
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`; `interpret` as of `wgmma.multiply`."""
    (left, m), weights = as_matrices(lhs, call.lhs.axes), rhs.arrays.merged()
    shape = (*call.lhs.shape[: call.num_batch], *m, *rhs.kept)
    if not left.size:
        return jnp.zeros(shape, call.out_dtype)
    return by_weights(left, weights, call.out_dtype, interpret).reshape(shape)


def by_weights(
    activations: Operand, weights: PackedWeights, out_dtype: np.dtype, interpret: Any = None
) -> jax.Array:
    """Few rows by a kernel that decodes the weights; many by XLA, dequantized once."""
    activations, factor = _in_bfloat16(activations)
    between = np.dtype(out_dtype) if factor is None else _FLOAT32
    if activations.shape[1] < CROSSOVER:
        out = multiply(activations, weights, between, interpret)
    else:
        # Each step on its own: fused, XLA's copies out of a packed layout take ten times as long,
        # and are done again in each tile of its product.
        unpacked = lax.optimization_barrier(without_tensor_scale(weights.unpack()))
        values = lax.optimization_barrier(unpacked.dequantize(jnp.bfloat16))
        scale, dimensions = weights.tensor_scale, (((2,), (2,)), ((0,), (0,)))
        dtype = between if scale is None else _FLOAT32
        sums = lax.dot_general(activations, values, dimensions, preferred_element_type=dtype)
        out = (sums if scale is None else sums * scale).astype(between)
    return out if factor is None else (out * factor).astype(out_dtype)


def _in_bfloat16(activations: Operand) -> tuple[jax.Array, jax.Array | None]:
    """Activations in bfloat16, and a factor of the product."""
    if not isinstance(activations, MXArray):
        return activations, None
    # Exact, but for the tensor's scale, which is left for the product.
    values = without_tensor_scale(activations).dequantize(jnp.bfloat16)
    return values, activations.tensor_scale


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: np.dtype,
    interpret: Any = None,
    tiles: Tiles | None = None,
) -> jax.Array:
    """`x[batch, m, k]` by packed `weights[batch, n, k]`: `[batch, m, n]`, rounded once.

    Args:
      x: bfloat16; no axis is empty.
      weights: packed.
      out_dtype: float32, bfloat16 or float16.
      interpret: as of `wgmma.multiply`.
      tiles: instead of the table's.
    """
    (batch, m, k), n = x.shape, weights.shape[1]
    bits, factor, dtype = stored_bits(weights.format.element), weights.tensor_scale, out_dtype
    tiles = tiles or choose(bits, batch=batch, m=m, n=n, k=k)
    once = tiles.splits == 1 and dtype != jnp.float16 and factor is None
    sums = _wgmma.multiply(x, weights, tiles, dtype if once else _FLOAT32, interpret)
    return (sums if factor is None else sums * factor).astype(dtype)


def ragged_dot(
    lhs: Operand,
    rhs: PackedMXArray,
    group_sizes: jax.Array,
    call: RaggedCall,
    interpret: Any = None,
) -> jax.Array:
    """The product `[p, n]` in `call.out_dtype` of rows `[p, k]`, zeros in rows of no group."""
    weights = rhs.arrays.merged()
    if not lhs.shape[0]:
        return jnp.zeros((lhs.shape[0], call.rhs.rows), call.out_dtype)
    x, factor = _in_bfloat16(lhs)
    rows, n, bits = x.shape[0], weights.shape[1], stored_bits(weights.format.element)
    # The table's tiles for as many rows as a group has, wherever in its chunk it begins.
    groups, padded_rows = min(call.num_groups, rows), rows + -rows % CHUNK_ROWS
    m = min(-(-rows // groups) + CHUNK_ROWS - 1, padded_rows)
    tiles = choose(bits, batch=groups, m=m, n=n, k=weights.padded_k)
    tiles = dataclasses.replace(tiles, m=min(tiles.m, padded_rows))
    once = tiles.splits == 1 and call.out_dtype != jnp.float16
    lists = visits(group_sizes, padded_rows, tiles.m)
    factors = concatenate_tensor_scales((weights.tensor_scale, factor), call.num_groups)
    dtype = call.out_dtype if once else _FLOAT32
    sums = _wgmma.multiply(x[None], weights, tiles, dtype, interpret, (lists, factors))
    return sums[0].astype(call.out_dtype)
