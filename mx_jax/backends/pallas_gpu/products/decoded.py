"""Products by weights that a kernel decodes on their way, or that XLA multiplies once decoded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import Operand
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.pallas_gpu.tuning.tuned import tuned
from mx_jax.backends.sums import without_tensor_scale
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray


def by_weights(
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
    from mx_jax.backends.pallas_gpu.casts import dequantize_kernel

    values = dequantize_kernel.dequantize(
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
        return decoded_dot(x, weights, out_dtype, architecture, interpret)
    batch, m, k = x.shape
    n, dtype = weights.shape[1], np.dtype(out_dtype)
    parts = _bfloat16_parts(x)
    if tiles is None:
        bits, rows = storage(weights.format.element).bits, parts.shape[1]
        tiles = choose(architecture, kernel, bits, batch=batch, m=rows, n=n, k=k)
    factor = weights.tensor_scale
    once = tiles.whole and parts is x and dtype == jnp.bfloat16 and factor is None
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


def decoded_dot(
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
