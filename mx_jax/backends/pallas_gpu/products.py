"""Products and packing by GPU kernels: how operands reach them, and which one computes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.calls import MatmulCall, Operand, PackCall
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.layouts import MATRICES, PackedWeights, ScaledOperand, storage
from mx_jax.backends.pallas_gpu.rejections import rejects_weights
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.backends.pallas_gpu.tuning import choose, tuned
from mx_jax.backends.sums import as_matrices, without_tensor_scale
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


def pack_weights(x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights that `rejects_packing` lets through, to be decoded: for activations of any kind."""
    matrices, _ = as_matrices(x, call.weights.axes)
    ((_, block),) = call.blocks
    assert isinstance(matrices, MXArray) and isinstance(block, int)
    format = call.format.with_block(block)
    _, kept, k = call.weights.axes.sizes(call.weights.shape)
    return PackedMXArray(
        arrays=_stack(dataclasses.replace(matrices, format=format), call),
        layout=MATRICES,
        kept=kept,
        k=k,
        k_first=call.weights.axes.k_first,
        format=format,
        dtype=matrices.dtype,
    )


def _stack(matrices: MXArray, call: PackCall) -> PackedWeights:
    """Matrices `[batch, n, k]` laid out one by one, `[*batch]` in front of every array."""
    batch, _, _ = call.weights.axes.sizes(call.weights.shape)
    if not batch:
        return PackedWeights.of(matrices)
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
    return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), stacked)


def scaled_matmul(
    lhs: Operand,
    rhs: Operand | PackedMXArray,
    call: MatmulCall,
    *,
    architecture: Architecture | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`.

    Weights are packed to be decoded. Where tensor cores would take both operands as they are, few
    rows decode them all the same; for many, to lay them out anew is little beside the product.

    Args:
      lhs: left operand.
      rhs: right operand, or weights that were packed for the product.
      call: their description, which `rejects` takes.
      architecture: the GPU; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter.
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
    as_they_are = not architecture.kernel(call.lhs.format, call.rhs.format).decodes
    if isinstance(right, PackedWeights) and as_they_are:
        as_they_are = left.shape[1] >= crossover(architecture, right.format)
        right = right.unpack() if as_they_are else right
    if as_they_are:
        assert isinstance(left, MXArray) and isinstance(right, MXArray)
        operands = ScaledOperand.of(left, left=True), ScaledOperand.of(right)
        out = multiply_scaled(*operands, call.out_dtype, architecture, interpret=interpret)
        return out.reshape(shape)
    swapped = rejects_weights(call.rhs.format) is not None
    activations, weights = (right, left) if swapped else (left, right)
    assert not isinstance(activations, PackedWeights) and not isinstance(weights, jax.Array)
    out = _by_weights(activations, weights, call.out_dtype, architecture, interpret)
    return (out.swapaxes(1, 2) if swapped else out).reshape(shape)


def lays_out(call: MatmulCall, architecture: Architecture | None = None) -> Side | None:
    """The side whose weights `scaled_matmul` lays out: for few rows, and not packed before."""
    if call.rhs.packed_by is not None:
        return None
    swapped = rejects_weights(call.rhs.format) is not None
    rows, weights = (call.rhs, call.lhs) if swapped else (call.lhs, call.rhs)
    assert weights.format is not None
    architecture = architecture or current_architecture()
    if rows.rows >= crossover(architecture, weights.format):
        return None
    return "lhs" if swapped else "rhs"


# Two operands as they are -----------------------------------------------------------------------


def multiply_scaled(
    lhs: ScaledOperand,
    rhs: ScaledOperand,
    out_dtype: jax.typing.DTypeLike,
    architecture: Architecture,
    *,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`lhs[batch, m, k]` by `rhs[batch, n, k]`: `[batch, m, n]`, one rounding from float32 sums."""
    kernel = architecture.kernel(lhs.format, rhs.format)
    (batch, m, _), n, dtype = lhs.shape, rhs.shape[1], np.dtype(out_dtype)
    rows, columns, k = lhs.codes.shape[0] // batch, rhs.codes.shape[0] // batch, lhs.padded_k
    if tiles is None:
        bits = lhs.format.element.bits
        tiles = choose(architecture, kernel, bits, batch=batch, m=rows, n=columns, k=k)
    factors = [x.tensor_scale for x in (lhs, rhs) if x.tensor_scale is not None]
    once = tiles.splits == 1 and dtype == jnp.bfloat16 and not factors
    sums = kernel.load()(
        lhs.elements,
        rhs.elements,
        lhs.scale_values,
        rhs.scale_values,
        block=lhs.format.block[1],
        batch=batch,
        tiles=tiles,
        out_dtype=jnp.bfloat16 if once else jnp.float32,
        interpret=interpret,
    )
    out = sums.reshape(tiles.splits, batch, rows, columns)[:, :, :m, :n]
    out = out[0] if tiles.splits == 1 else out.sum(0)
    for factor in factors:
        out = out * factor
    return out.astype(dtype)


# Weights that a kernel decodes on their way, or that XLA multiplies once decoded ------------------


def _by_weights(
    activations: Operand,
    weights: MXArray | PackedWeights,
    out_dtype: jax.typing.DTypeLike,
    architecture: Architecture,
    interpret: Any,
) -> jax.Array:
    """Decode or keep the activations, then multiply by weights that are decoded on their way."""
    activations, factor = in_high_precision(activations)
    between = out_dtype if factor is None else jnp.float32
    many = activations.shape[1] >= crossover(architecture, weights.format)
    if isinstance(weights, MXArray) and many:
        values = without_tensor_scale(weights).dequantize(jnp.bfloat16)
        out = _dequantize_dot(activations, values, weights.tensor_scale, between)
    else:
        packed = PackedWeights.of(weights) if isinstance(weights, MXArray) else weights
        out = multiply(activations, packed, between, architecture=architecture, interpret=interpret)
    return out if factor is None else (out * factor).astype(out_dtype)


def in_high_precision(activations: Operand) -> tuple[jax.Array, jax.Array | None]:
    """Activations in bfloat16 or as they are, and a factor of the product."""
    if not isinstance(activations, MXArray):
        return activations, None
    # Exact in bfloat16, but for the tensor's scale, which is left for the product.
    values = without_tensor_scale(activations).dequantize(jnp.bfloat16)
    return values, activations.tensor_scale


def crossover(architecture: Architecture, format: BlockFormat) -> float:
    """Rows from which weights are dequantized once and XLA multiplies."""
    return tuned(architecture.decoding, storage(format.element).bits).crossover


def _dequantize_dot(
    x: jax.Array, values: jax.Array, factor: jax.Array | None, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """`x[batch, m, k]` by bfloat16 `values[batch, n, k]` and a factor, by XLA, rounded once."""
    m, parts = x.shape[1], _bfloat16_parts(x)
    kept = np.dtype(out_dtype) if parts is x and factor is None else jnp.float32
    numbers = (((2,), (2,)), ((0,), (0,)))
    sums = lax.dot_general(parts, values, numbers, preferred_element_type=kept)
    out = sums.reshape(x.shape[0], -1, m, values.shape[1]).sum(1)
    return (out if factor is None else out * factor).astype(out_dtype)


def decode(weights: PackedWeights, architecture: Architecture, interpret: Any) -> jax.Array:
    """Packed weights in bfloat16, `[batch, n', k']`, their tensor scale left out."""
    # Mosaic GPU is missing from older versions of JAX, which are rejected before.
    from mx_jax.backends.pallas_gpu.decode import dequantize

    values = dequantize(
        weights.codes.reshape(-1, *weights.codes.shape[2:]),
        weights.scales.reshape(-1, *weights.scales.shape[2:]),
        format=weights.format,
        accelerated=architecture.copies_by_tma,
        interpret=interpret,
    )
    return values.reshape(weights.shape[0], weights.padded_n, weights.padded_k)


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: jax.typing.DTypeLike,
    *,
    architecture: Architecture | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`x[batch, m, k]` by packed `weights[batch, n, k]`: `[batch, m, n]`.

    Args:
      x: bfloat16 or float16; no axis empty.
      weights: packed.
      out_dtype: float32, bfloat16 or float16.
      architecture: the GPU; None: that of the machine it is for.
      tiles: instead of the table's; a kernel then multiplies any number of rows.
      interpret: parameters of Mosaic's interpreter.

    Returns:
      The product; one rounding from float32 sums.
    """
    architecture = architecture or current_architecture()
    kernel = architecture.decoding
    if tiles is None and x.shape[1] >= crossover(architecture, weights.format):
        return _decoded_dot(x, weights, out_dtype, architecture, interpret)
    batch, m, k = x.shape
    n, dtype = weights.shape[1], np.dtype(out_dtype)
    parts = _bfloat16_parts(x)
    if tiles is None:
        bits, rows = storage(weights.format.element).bits, parts.shape[1]
        tiles = choose(architecture, kernel, bits, batch=batch, m=rows, n=n, k=k)
    factor = weights.tensor_scale
    once = tiles.splits == 1 and parts is x and dtype == jnp.bfloat16 and factor is None
    sums = kernel.load()(
        parts,
        weights.codes,
        weights.scales,
        n=n,
        format=weights.format,
        tiles=tiles,
        out_dtype=jnp.bfloat16 if once else jnp.float32,
        interpret=interpret,
    )
    if once:
        return sums
    out = sums.reshape(batch, -1, m, n).sum(1)
    return (out if factor is None else out * factor).astype(dtype)


def _decoded_dot(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: jax.typing.DTypeLike,
    architecture: Architecture,
    interpret: Any,
) -> jax.Array:
    """`multiply` by XLA, of weights decoded once."""
    # Zeros in x, not fewer columns of the weights, which would be copied.
    widened = jnp.pad(x, ((0, 0), (0, 0), (0, weights.padded_k - x.shape[2])))
    values = decode(weights, architecture, interpret)
    out = _dequantize_dot(widened, values, weights.tensor_scale, out_dtype)
    return out[..., : weights.shape[1]]


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
