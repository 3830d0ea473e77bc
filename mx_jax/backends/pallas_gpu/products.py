"""Products and packing by GPU kernels: how operands reach them, and which one computes.

Around rows in groups nothing is padded, gathered or masked where sizes are multiples of a few
elements: each program reads which rows are its own, copies end with their arrays, and rows of no
group are written as zeros by the kernel itself. (Tensor cores take scales in tiles of 128 rows, and
groups begin anywhere: so of operands that they take as they are, the scales of each program's rows
are gathered, a 16th or 32nd of the codes' bytes.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, Operand, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import (
    Architecture,
    Kernel,
    Tiles,
    choose,
    current_architecture,
)
from mx_jax.backends.pallas_gpu.layouts import (
    CHUNK,
    CHUNK_ROWS,
    FIELDS,
    MATRICES,
    PackedWeights,
    ScaledOperand,
    factors_of,
    scale_tiles,
    stored_bits,
    visits,
)
from mx_jax.backends.pallas_gpu.rejections import rejects_weights
from mx_jax.backends.sums import as_matrices, without_tensor_scale
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

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
    lhs: Operand,
    rhs: Operand | PackedMXArray,
    call: MatmulCall,
    *,
    architecture: Architecture | None = None,
    interpret: object = None,
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`.

    Weights are packed to be decoded. Where tensor cores would take both operands as they are, few
    rows decode them all the same; for many, to lay them out anew is little beside the product.
    """
    left, m = as_matrices(lhs, call.lhs.axes)
    if isinstance(rhs, PackedMXArray):
        right, n = rhs.arrays.merged(), rhs.kept
    else:
        right, n = as_matrices(rhs, call.rhs.axes)
    shape = (*call.lhs.shape[: call.num_batch], *m, *n)
    if 0 in (*left.shape, *right.shape):
        return jnp.zeros(shape, call.out_dtype)
    architecture = architecture or current_architecture()
    direct = architecture.kernel(call.lhs.format, call.rhs.format) is architecture.direct
    if isinstance(right, PackedWeights) and direct:
        direct = left.shape[1] >= architecture.decoding.crossover
        right = right.unpack() if direct else right
    if direct:
        assert isinstance(left, MXArray) and isinstance(right, MXArray)
        operands = ScaledOperand.of(left), ScaledOperand.of(right)
        out = multiply_scaled(*operands, call.out_dtype, architecture, interpret=interpret)
        return out.reshape(shape)
    swapped = rejects_weights(call.rhs.format) is not None
    activations, weights = (right, left) if swapped else (left, right)
    assert not isinstance(activations, PackedWeights) and not isinstance(weights, jax.Array)
    out = by_weights(activations, weights, call.out_dtype, architecture, interpret)
    return (out.swapaxes(1, 2) if swapped else out).reshape(shape)


def lays_out(call: MatmulCall, architecture: Architecture | None = None) -> Side | None:
    """The side whose weights `scaled_matmul` lays out: for few rows, and not packed before."""
    if call.rhs.packed_by is not None:
        return None
    swapped = rejects_weights(call.rhs.format) is not None
    rows = (call.rhs if swapped else call.lhs).rows
    if rows >= (architecture or current_architecture()).decoding.crossover:
        return None
    return "lhs" if swapped else "rhs"


# Two operands as they are -----------------------------------------------------------------------


def multiply_scaled(
    lhs: ScaledOperand | MXArray,
    rhs: ScaledOperand,
    out_dtype: np.dtype,
    architecture: Architecture,
    *,
    group_sizes: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: object = None,
) -> jax.Array:
    """`lhs[batch, m, k]` by `rhs[batch, n, k]`: `[batch, m, n]`, one rounding from float32 sums.

    Rows in groups are an MXArray `[p, k]`, by a matrix for each group: `[1, p, n]`.
    """
    kernel, bits = architecture.kernel(lhs.format, rhs.format), lhs.format.element.bits
    (batch, n, _), dtype, block = rhs.shape, np.dtype(out_dtype), lhs.format.block[1]
    m, k = lhs.shape[-2], rhs.padded_k
    lists, factors = (), [x.tensor_scale for x in (lhs, rhs) if x.tensor_scale is not None]
    if isinstance(lhs, ScaledOperand):
        tiles = tiles or choose(architecture, kernel, bits, batch=batch, m=m, n=n, k=k)
        elements, scales = lhs.elements, lhs.scale_values
        once = tiles.splits == 1 and dtype == jnp.bfloat16 and not factors
    else:
        assert group_sizes is not None and isinstance(block, int)
        tiles = tiles or _tiles_of_groups(architecture, kernel, bits, m, rhs)
        tiles = dataclasses.replace(tiles, splits=1)
        codes = jnp.pad(lhs.codes, ((0, -m % CHUNK_ROWS), (0, k - lhs.shape[1])))
        elements = lax.bitcast_convert_type(packing.pack(codes, bits), lhs.format.element.dtype)
        elements = elements.reshape(1, *codes.shape)
        table = visits(group_sizes, codes.shape[0], tiles.m)
        # Tiles of the scales of each visit's rows, whosever they are.
        first = table.reshape(-1, FIELDS)[:, 1:2]
        rows = (first + jnp.arange(tiles.m, dtype=jnp.int32)).reshape(-1)
        row_scales = jnp.take(lhs.scales, rows, axis=0, mode="clip")
        row_scales = jnp.pad(row_scales, ((0, 0), (0, k // block - row_scales.shape[1])))
        scales = lax.bitcast_convert_type(scale_tiles(row_scales), lhs.format.scale.dtype)
        lists = table, factors_of((lhs.tensor_scale, rhs.tensor_scale), batch)
        once, factors = dtype != jnp.float16, []
    sums = kernel.load()(
        elements,
        rhs.elements,
        scales,
        rhs.scale_values,
        *lists,
        block=block,
        n=n,
        tiles=tiles,
        out_dtype=dtype if once else _FLOAT32,
        interpret=interpret,
    )
    out = sums[:, :m, :n]
    for factor in factors:
        out = out * factor
    return out.astype(dtype)


# Weights that a kernel decodes on their way, or that XLA multiplies once decoded ------------------


def by_weights(
    activations: Operand,
    weights: MXArray | PackedWeights,
    out_dtype: np.dtype,
    architecture: Architecture,
    interpret: object = None,
) -> jax.Array:
    """Few rows by a kernel that decodes the weights; many by XLA, dequantized once."""
    activations, factor = _in_high_precision(activations)
    between = out_dtype if factor is None else jnp.dtype(jnp.float32)
    if activations.shape[1] >= architecture.decoding.crossover:
        # Each step on its own: fused, XLA's copies out of a packed layout take ten times as long,
        # and are done again in each tile of its product.
        unpacked = weights if isinstance(weights, MXArray) else weights.unpack()
        unpacked = lax.optimization_barrier(without_tensor_scale(unpacked))
        values = lax.optimization_barrier(unpacked.dequantize(jnp.bfloat16))
        parts, scale, m = _bfloat16_parts(activations), weights.tensor_scale, activations.shape[1]
        exact = parts is activations and scale is None
        sums = lax.dot_general(
            parts,
            values,
            (((2,), (2,)), ((0,), (0,))),
            preferred_element_type=np.dtype(between) if exact else jnp.float32,
        )
        sums = sums.reshape(values.shape[0], -1, m, values.shape[1]).sum(1)
        out = (sums if scale is None else sums * scale).astype(between)
    else:
        packed = PackedWeights.of(weights) if isinstance(weights, MXArray) else weights
        out = multiply(activations, packed, between, architecture, interpret=interpret)
    return out if factor is None else (out * factor).astype(out_dtype)


def _in_high_precision(activations: Operand) -> tuple[jax.Array, jax.Array | None]:
    """Activations in bfloat16 or as they are, and a factor of the product."""
    if not isinstance(activations, MXArray):
        return activations, None
    # Exact in bfloat16, but for the tensor's scale, which is left for the product.
    values = without_tensor_scale(activations).dequantize(jnp.bfloat16)
    return values, activations.tensor_scale


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: np.dtype,
    architecture: Architecture,
    *,
    group_sizes: jax.Array | None = None,
    factors: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: object = None,
) -> jax.Array:
    """`x[batch, m, k]` by packed `weights[batch, n, k]`: `[batch, m, n]`, rounded once.

    Args:
      x: bfloat16 or float16; of rows in groups bfloat16 `[1, rows, k]`. No axis is empty.
      weights: packed; in groups their tensor scale is left out.
      out_dtype: float32, bfloat16 or float16.
      architecture: the GPU.
      group_sizes: int32 `[g]`, which sum to at most all rows; None: no groups.
      factors: of the groups' sums, as the kernel takes them.
      tiles: instead of the table's.
      interpret: parameters of Mosaic's interpreter.
    """
    kernel, parts = architecture.decoding, _bfloat16_parts(x)
    bits = stored_bits(weights.format.element)
    (batch, m, k), n, dtype = x.shape, weights.shape[1], np.dtype(out_dtype)
    lists, factor = (), weights.tensor_scale
    if group_sizes is None:
        sizes = {"batch": batch, "m": parts.shape[1], "n": n, "k": k}
        tiles = tiles or choose(architecture, kernel, bits, **sizes)
    else:
        tiles = tiles or _tiles_of_groups(architecture, kernel, bits, m, weights)
        lists, factor = (visits(group_sizes, m + -m % CHUNK_ROWS, tiles.m), factors), None
    once = tiles.splits == 1 and parts is x and dtype != jnp.float16 and factor is None
    sums = kernel.load()(
        parts,
        weights.codes,
        weights.scales,
        *lists,
        n=n,
        format=weights.format,
        tiles=tiles,
        out_dtype=dtype if once else _FLOAT32,
        interpret=interpret,
    )
    if once:
        return sums
    out = sums.reshape(batch, -1, m, n).sum(1)
    return (out if factor is None else out * factor).astype(dtype)


def _bfloat16_parts(x: jax.Array) -> jax.Array:
    """Rows of bfloat16 whose products sum to x's: x itself, or a float16's two parts below.

    A float16 has 11 significant bits, so what bfloat16's 8 leave over is a bfloat16 too. Where few
    rows multiply, reading weights takes the time and the second row is free. Both parts have x's
    sign, and neither is zero unless x is: where nothing is left over, they are halves. So both
    products of an infinite weight are the same infinity, and their sum is no NaN.
    """
    if x.dtype == jnp.bfloat16:
        return x
    exact = x.astype(jnp.float32)
    # Rounded toward zero by a mask, not by a pair of casts, which XLA may leave out.
    bits = lax.bitcast_convert_type(exact, jnp.uint32) & jnp.uint32(0xFFFF0000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    halved = high == exact
    high = jnp.where(halved, 0.5 * exact, high)
    low = jnp.where(halved, high, exact - high)
    return jnp.concatenate([high, low], axis=1).astype(jnp.bfloat16)


# Rows in groups -----------------------------------------------------------------------------------


def ragged_dot(
    lhs: Operand,
    rhs: AnyOperand,
    group_sizes: jax.Array,
    call: RaggedCall,
    *,
    architecture: Architecture | None = None,
    interpret: object = None,
) -> jax.Array:
    """The product `[p, n]` in `call.out_dtype`, zeros in rows of no group; or sums `[g, m, n]`.

    The rows are `[p, k]`, or `[p, m]` if they are contracted; rhs has a matrix for each group,
    packed or not, or is `[p, n]`.
    """
    architecture = architecture or current_architecture()
    if call.contracts_rows:
        return _sum_groups(lhs, rhs, group_sizes, call, architecture, interpret)
    if 0 in (*call.lhs.shape, *call.rhs.shape):
        return jnp.zeros((call.lhs.shape[0], call.rhs.rows), call.out_dtype)
    if isinstance(rhs, PackedMXArray):
        matrices = rhs.arrays.merged()
        scale = matrices.tensor_scale
    else:
        assert isinstance(rhs, MXArray)
        matrices, _ = as_matrices(dataclasses.replace(rhs, tensor_scale=None), call.rhs.axes)
        scale = rhs.tensor_scale
    assert not isinstance(matrices, jax.Array)
    how: dict[str, Any] = {"group_sizes": group_sizes, "interpret": interpret}
    if architecture.kernel(call.lhs.format, call.rhs.format) is architecture.direct:
        assert isinstance(lhs, MXArray)
        # What is packed is laid out to be decoded.
        unpacked = matrices if isinstance(matrices, MXArray) else matrices.unpack()
        weights = dataclasses.replace(ScaledOperand.of(unpacked), tensor_scale=scale)
        return multiply_scaled(lhs, weights, call.out_dtype, architecture, **how)[0]
    weights = PackedWeights.of(matrices) if isinstance(matrices, MXArray) else matrices
    x, factor = _in_high_precision(lhs)
    factors = factors_of((scale, factor), call.num_groups)
    return multiply(x[None], weights, call.out_dtype, architecture, factors=factors, **how)[0]


def _tiles_of_groups(
    architecture: Architecture,
    kernel: Kernel,
    bits: int,
    rows: int,
    weights: PackedWeights | ScaledOperand,
) -> Tiles:
    """The table's tiles for as many rows as a group has, wherever in its chunk it begins."""
    (groups, n, _), padded_rows = weights.shape, rows + -rows % CHUNK_ROWS
    groups = min(groups, rows)
    m = min(-(-rows // groups) + CHUNK_ROWS - 1, padded_rows)
    tiles = choose(architecture, kernel, bits, batch=groups, m=m, n=n, k=weights.padded_k)
    if kernel is architecture.direct:
        return tiles
    return dataclasses.replace(tiles, m=min(tiles.m, padded_rows))


def _sum_groups(
    lhs: Operand,
    rhs: AnyOperand,
    group_sizes: jax.Array,
    call: RaggedCall,
    architecture: Architecture,
    interpret: object,
) -> jax.Array:
    """`[g, m, n]`: of both operands in bfloat16, which loses nothing of them."""
    m, n = call.lhs.shape[1], call.rhs.shape[1]
    if 0 in (*call.lhs.shape, *call.rhs.shape, call.num_groups):
        return jnp.zeros((call.num_groups, m, n), call.out_dtype)
    assert not isinstance(rhs, PackedMXArray)
    (left, left_scale), (right, right_scale) = map(_in_high_precision, (lhs, rhs))
    # Up to what one copy takes: as they are, but for odd sizes.
    left, right = (
        jnp.pad(x, ((0, -x.shape[0] % CHUNK_ROWS), (0, -x.shape[1] % CHUNK))) for x in (left, right)
    )
    starts = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    factors = factors_of((left_scale, right_scale), 1)
    sums = architecture.decoding.load("group_sums")(
        left,
        right,
        jnp.concatenate([starts, group_sizes]),
        jnp.ones(2, jnp.float32) if factors is None else factors,
        out_dtype=_FLOAT32 if call.out_dtype == jnp.float16 else call.out_dtype,
        interpret=interpret,
    )
    return sums[:, :m, :n].astype(call.out_dtype)
