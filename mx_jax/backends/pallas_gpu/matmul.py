"""Products by GPU kernels: how operands reach them, and which one computes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.base import MatmulCall, Operand, PackCall
from mx_jax.backends.matrices import as_matrices
from mx_jax.backends.pallas_gpu import packed, scaled
from mx_jax.backends.pallas_gpu.packed import GpuWeights
from mx_jax.backends.pallas_gpu.rejections import (
    ACCELERATED,
    ARCHITECTURES,
    BLOCK_SCALED,
    rejects_weights,
)
from mx_jax.backends.pallas_gpu.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.storage import storage
from mx_jax.backends.pallas_gpu.tuning import Tiles, choose, table
from mx_jax.backends.pallas_gpu.weights import (
    PackedWeights,
    pack,
)
from mx_jax.backends.target import current_target
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray, without_tensor_scale


def scaled_matmul(
    lhs: Operand,
    rhs: Operand,
    call: MatmulCall,
    *,
    architecture: str | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`.

    Args:
      lhs: left operand.
      rhs: right operand.
      call: their description, which `rejects` takes.
      architecture: one of `ARCHITECTURES`; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter.
    """
    left, m = as_matrices(lhs, call.num_batch, call.contracting_axes("lhs"))
    right, n = as_matrices(rhs, call.num_batch, call.contracting_axes("rhs"))
    shape = (*call.lhs_shape[: call.num_batch], *m, *n)
    if 0 in (*left.shape, *right.shape):
        return jnp.zeros(shape, call.out_dtype)
    how = {"architecture": architecture or current_architecture(), "interpret": interpret}
    if _as_they_are(call, how["architecture"]):
        assert isinstance(left, MXArray) and isinstance(right, MXArray)
        operands = scaled.lay_out(left, left=True), scaled.lay_out(right)
        return scaled.multiply(*operands, call.out_dtype, interpret=interpret).reshape(shape)
    swapped = rejects_weights(call.rhs_format) is not None
    activations, weights = (right, left) if swapped else (left, right)
    assert isinstance(weights, MXArray)
    out = _by_weights(activations, weights, call.out_dtype, how)
    return (out.swapaxes(1, 2) if swapped else out).reshape(shape)


def packed_matmul(
    lhs: Operand,
    rhs: GpuWeights,
    call: MatmulCall,
    *,
    architecture: str | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product `[*batch, *m, *n]` by weights that were packed for it; see `scaled_matmul`.

    Weights in the layout that the product does not want are brought into the other: for many rows
    that is little beside the product itself, for few it takes longer than the product.
    """
    left, m = as_matrices(lhs, call.num_batch, call.contracting_axes("lhs"))
    shape = (*call.lhs_shape[: call.num_batch], *m, *rhs.kept)
    if 0 in left.shape:
        return jnp.zeros(shape, call.out_dtype)
    how = {"architecture": architecture or current_architecture(), "interpret": interpret}
    weights, as_they_are = rhs.weights.merged(), _as_they_are(call, how["architecture"])
    many = left.shape[1] >= crossover(how["architecture"], weights.format)
    if as_they_are and many and isinstance(weights, PackedWeights):
        weights = scaled.lay_out(weights.unpack())
    if isinstance(weights, ScaledOperand):
        if as_they_are:
            assert isinstance(left, MXArray)
            left = scaled.lay_out(left, left=True)
            out = scaled.multiply(left, weights, call.out_dtype, interpret=interpret)
            return out.reshape(shape)
        weights = weights.unpack()
    return _by_weights(left, weights, call.out_dtype, how).reshape(shape)


def pack_weights(x: MXArray, call: PackCall, *, architecture: str | None = None) -> GpuWeights:
    """Weights in a layout that `packed_matmul` reads."""
    matrices, _ = as_matrices(x, call.num_batch, call.contracting)
    assert isinstance(matrices, MXArray)
    return packed.pack(matrices, call, architecture or current_architecture())


def _as_they_are(call: MatmulCall, architecture: str) -> bool:
    """Whether the tensor cores take both operands of a product without decoding."""
    return architecture in BLOCK_SCALED and scaled.meet(call.lhs_format, call.rhs_format)


def current_architecture() -> str:
    """Which of `ARCHITECTURES` the machine has that a call is for."""
    capability = current_target(1).compute_capability
    if capability not in ARCHITECTURES:
        raise ValueError(
            f"pallas_gpu: has no kernels for compute_capability={capability}; see "
            "mx_jax.inspect.explain for what takes a call here"
        )
    return ARCHITECTURES[capability]


def _by_weights(
    activations: Operand, weights: MXArray | PackedWeights, out_dtype: Any, how: dict[str, Any]
) -> jax.Array:
    """Decode or keep the activations, then multiply by weights that are decoded on their way."""
    activations, factor = _in_high_precision(activations)
    between = out_dtype if factor is None else jnp.float32
    many = activations.shape[1] >= crossover(how["architecture"], weights.format)
    if isinstance(weights, MXArray) and many:
        values = without_tensor_scale(weights).dequantize(jnp.bfloat16)
        out = _dequantize_dot(activations, values, weights.tensor_scale, between)
    else:
        packed_weights = pack(weights) if isinstance(weights, MXArray) else weights
        out = multiply(activations, packed_weights, between, **how)
    return out if factor is None else (out * factor).astype(out_dtype)


def _in_high_precision(activations: Operand) -> tuple[jax.Array, jax.Array | None]:
    """Activations in bfloat16 or as they are, and a factor of the product."""
    if not isinstance(activations, MXArray):
        return activations, None
    # Exact in bfloat16, but for the tensor's scale, which is left for the product.
    values = without_tensor_scale(activations).dequantize(jnp.bfloat16)
    return values, activations.tensor_scale


def crossover(architecture: str, format: BlockFormat) -> float:
    """Rows from which weights are dequantized once and XLA multiplies."""
    return table().crossover.get((architecture, storage(format.element).bits), math.inf)


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


def _decoded(weights: PackedWeights, architecture: str, interpret: Any) -> jax.Array:
    """Packed weights in bfloat16, `[batch, n', k']`, their tensor scale left out."""
    from mx_jax.backends.pallas_gpu import kernel_dequantize

    values = kernel_dequantize.dequantize(
        weights.codes.reshape(-1, *weights.codes.shape[2:]),
        weights.scales.reshape(-1, *weights.scales.shape[2:]),
        format=weights.format,
        accelerated=architecture in ACCELERATED,
        interpret=interpret,
    )
    return values.reshape(weights.shape[0], weights.padded_n, weights.padded_k)


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: jax.typing.DTypeLike,
    *,
    architecture: str | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`x[batch, m, k]` by packed `weights[batch, n, k]`: `[batch, m, n]`.

    Args:
      x: bfloat16 or float16; no axis empty.
      weights: what `pack` gave.
      out_dtype: float32, bfloat16 or float16.
      architecture: one of `ARCHITECTURES`; None: that of the machine it is for.
      tiles: instead of the table's; a kernel then multiplies any number of rows.
      interpret: parameters of Mosaic's interpreter.

    Returns:
      The product; one rounding from float32 sums.
    """
    architecture = architecture or current_architecture()
    if tiles is None and x.shape[1] >= crossover(architecture, weights.format):
        return decoded_dot(x, weights, out_dtype, architecture, interpret)
    batch, m, k = x.shape
    n, dtype = weights.shape[1], np.dtype(out_dtype)
    parts = _bfloat16_parts(x)
    rows = parts.shape[1]
    padded_n, padded_k = weights.padded_n, weights.padded_k
    if tiles is None:
        bits = storage(weights.format.element).bits
        tiles = choose(architecture, bits, batch=batch, m=rows, n=padded_n, k=padded_k)
    padded = jnp.pad(parts, ((0, 0), (0, -rows % tiles.m), (0, padded_k - k)))
    factor = weights.tensor_scale
    once = tiles.splits == 1 and rows == m and dtype == jnp.bfloat16 and factor is None
    sums = kernel(architecture).matmul(
        padded.reshape(-1, padded_k),
        weights.codes.reshape(-1, *weights.codes.shape[2:]),
        weights.scales.reshape(-1, *weights.scales.shape[2:]),
        format=weights.format,
        batch=batch,
        tiles=tiles,
        out_dtype=jnp.bfloat16 if once else jnp.float32,
        interpret=interpret,
    )
    sums = sums.reshape(tiles.splits, batch, -1, padded_n)[:, :, :rows, :n]
    if once:
        return sums[0]
    out = sums.reshape(-1, batch, rows // m, m, n).sum((0, 2))
    return (out if factor is None else out * factor).astype(dtype)


def decoded_dot(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: jax.typing.DTypeLike,
    architecture: str,
    interpret: Any,
) -> jax.Array:
    """`multiply` by XLA, of weights decoded once."""
    # Zeros in x, not fewer columns of the weights, which would be copied.
    widened = jnp.pad(x, ((0, 0), (0, 0), (0, weights.padded_k - x.shape[2])))
    values = _decoded(weights, architecture, interpret)
    out = _dequantize_dot(widened, values, weights.tensor_scale, out_dtype)
    return out[..., : weights.shape[1]]


def kernel(architecture: str) -> Any:
    """The module whose `matmul` multiplies by weights."""
    # Mosaic GPU is missing from older versions of JAX, which `rejects` keeps away from here.
    from mx_jax.backends.pallas_gpu import kernel_sm80, kernel_sm90

    return kernel_sm90 if architecture == "sm90" else kernel_sm80


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
