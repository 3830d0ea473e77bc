"""Products by a GPU kernel: which calls it takes, how operands reach it, which tiles it gets."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.base import MatmulCall, Operand, Target
from mx_jax.backends.pallas_gpu.tuning import Tiles, choose
from mx_jax.backends.pallas_gpu.weights import (
    MIN_BLOCK,
    PAD_N,
    PackedWeights,
    pack,
    stored_bits,
)
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

# The first version whose Mosaic GPU has everything that the kernel calls.
MIN_JAX = (0, 11, 2)
_ARCHITECTURES = {(9, 0): "sm90"}
_ACTIVATIONS = tuple(map(jnp.dtype, ("bfloat16", "float16")))
_OUTPUTS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
# Significant bits of a bfloat16.
_SIGNIFICANT = 8
# The kernel counts elements in 32 bits; a grid's second axis has 16, in tiles of 128 rows.
_MAX_ELEMENTS = 2**31 - 1
_MAX_ROWS = 65535 * PAD_N


def rejects(
    call: MatmulCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why the kernel does not take a call on a machine, or None."""
    if target.platform != "cuda":
        return f"runs on platform=cuda, got platform={target.platform}"
    if target.compute_capability not in _ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in _ARCHITECTURES)
        got = target.compute_capability
        shown = None if got is None else ".".join(map(str, got))
        return f"has kernels for CUDA compute capability {known}, got {shown}"
    if jax_version < MIN_JAX:
        needed, got = (".".join(map(str, version)) for version in (MIN_JAX, jax_version))
        return f"needs jax>={needed}, got jax=={got}"
    if call.out_sharding is not None:
        return f"takes no out_sharding, got out_sharding={call.out_sharding}"
    if call.out_dtype not in _OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    return _rejects_formats(call) or _rejects_sizes(call)


def _rejects_formats(call: MatmulCall) -> str | None:
    sides = (
        ("lhs", call.lhs_format, call.lhs_dtype),
        ("rhs", call.rhs_format, call.rhs_dtype),
    )
    reasons = [rejects_weights(format) for _, format, _ in sides]
    if all(reasons):
        return f"needs weights in a block format on one side: lhs {reasons[0]}; rhs {reasons[1]}"
    weights = "lhs" if reasons[1] else "rhs"
    for side, format, dtype in sides:
        if side == weights:
            continue
        if format is None and dtype not in _ACTIVATIONS:
            return f"needs activations in bfloat16 or float16, got {side} in {dtype}"
        if format is not None and not _fits_bfloat16(format):
            return f"needs values that bfloat16 holds on both sides, got {side}={format.name}"
    return None


def rejects_weights(format: BlockFormat | None) -> str | None:
    """Why weights of a format are not taken, or None."""
    if format is None:
        return "is in high precision"
    if not _fits_bfloat16(format):
        return f"is {format.name}"
    kept, block = format.block
    if kept != 1 or not isinstance(block, int) or block % MIN_BLOCK:
        return f"has blocks {format.block}, not (1, a multiple of {MIN_BLOCK})"
    return None


def _fits_bfloat16(format: BlockFormat) -> bool:
    """Whether each element times its block's scale is a bfloat16, exponent aside."""
    element, scale = format.element, format.scale
    if scale.is_float32 or (element.kind == "float" and not element.has_negative_zero):
        return False
    in_scale = 0 if scale.element is None else scale.element.mantissa_bits + 1
    return element.mantissa_bits + 1 + in_scale <= _SIGNIFICANT


def _rejects_sizes(call: MatmulCall) -> str | None:
    sides: tuple[tuple[Literal["lhs", "rhs"], tuple[int, ...], BlockFormat | None], ...] = (
        ("lhs", call.lhs_shape, call.lhs_format),
        ("rhs", call.rhs_shape, call.rhs_format),
    )
    for side, shape, format in sides:
        axes = call.contracting_axes(side)
        block = None if format is None else format.block[1]
        if isinstance(block, int) and len(axes) > 1 and shape[axes[-1]] % block:
            return (
                f"needs the last of several contracted axes in whole blocks of {block}, got "
                f"{side}_shape={shape}, contracting={axes}"
            )
        if math.prod(shape) > _MAX_ELEMENTS:
            return f"needs at most {_MAX_ELEMENTS} elements, got {side}_shape={shape}"
        kept = (shape[i] for i in range(call.num_batch, len(shape)) if i not in axes)
        if math.prod(kept) > _MAX_ROWS:
            return f"needs at most {_MAX_ROWS} rows, got {side}_shape={shape}"
    return None


def scaled_matmul(
    lhs: Operand, rhs: Operand, call: MatmulCall, *, interpret: Any = None
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`."""
    left, m = _as_matrices(lhs, call.num_batch, call.contracting_axes("lhs"))
    right, n = _as_matrices(rhs, call.num_batch, call.contracting_axes("rhs"))
    shape = (*call.lhs_shape[: call.num_batch], *m, *n)
    if 0 in (*left.shape, *right.shape):
        return jnp.zeros(shape, call.out_dtype)
    swapped = rejects_weights(call.rhs_format) is not None
    activations, weights = (right, left) if swapped else (left, right)
    assert isinstance(weights, MXArray)
    factor = None
    if isinstance(activations, MXArray):
        # Exact in bfloat16, but for the tensor's scale, which is left for the product.
        factor = activations.tensor_scale
        activations = dataclasses.replace(activations, tensor_scale=None).dequantize(jnp.bfloat16)
    out_dtype = call.out_dtype if factor is None else jnp.float32
    out = multiply(activations, pack(weights), out_dtype, interpret=interpret)
    if factor is not None:
        out = (out * factor).astype(call.out_dtype)
    return (out.swapaxes(1, 2) if swapped else out).reshape(shape)


def _as_matrices(
    operand: Operand, num_batch: int, contracting: tuple[int, ...]
) -> tuple[Operand, tuple[int, ...]]:
    """`[batch, kept, k]`, and the lengths of the kept axes; blocks stay along k."""
    batch = tuple(range(num_batch))
    kept = tuple(axis for axis in range(num_batch, operand.ndim) if axis not in contracting)

    def arrange(array: jax.Array) -> jax.Array:
        sizes = (math.prod(array.shape[axis] for axis in g) for g in (batch, kept, contracting))
        return array.transpose(*batch, *kept, *contracting).reshape(tuple(sizes))

    lengths = tuple(operand.shape[axis] for axis in kept)
    if not isinstance(operand, MXArray):
        return arrange(operand), lengths
    tensor_scale = operand.tensor_scale
    matrices = MXArray(
        codes=arrange(operand.codes),
        scales=arrange(operand.scales),
        tensor_scale=None if tensor_scale is None else tensor_scale.reshape(1, 1, 1),
        format=operand.format,
        blocks=((-1, operand.format.block[1]),),
        dtype=operand.dtype,
    )
    return matrices, lengths


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    out_dtype: jax.typing.DTypeLike,
    *,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`x[batch, m, k]` by packed `weights[batch, n, k]`: `[batch, m, n]`.

    Args:
      x: bfloat16 or float16; no axis empty.
      weights: what `pack` gave.
      out_dtype: float32, bfloat16 or float16.
      tiles: instead of the table's.
      interpret: parameters of Mosaic's interpreter.

    Returns:
      The product; one rounding from float32 sums.
    """
    # Mosaic GPU is missing from older versions of JAX, which `rejects` keeps away from here.
    from mx_jax.backends.pallas_gpu import kernel_sm90

    batch, m, k = x.shape
    n, dtype = weights.shape[1], np.dtype(out_dtype)
    parts = _bfloat16_parts(x)
    rows = parts.shape[1]
    padded_n, padded_k = weights.padded_n, weights.padded_k
    if tiles is None:
        bits = stored_bits(weights.format.element)
        tiles = choose("sm90", bits, batch=batch, m=rows, n=padded_n, k=padded_k)
    padded = jnp.pad(parts, ((0, 0), (0, -rows % tiles.m), (0, padded_k - k)))
    factor = weights.tensor_scale
    once = tiles.splits == 1 and rows == m and dtype == jnp.bfloat16 and factor is None
    sums = kernel_sm90.matmul(
        padded.reshape(-1, padded_k),
        weights.codes.reshape(-1, *weights.codes.shape[2:]),
        weights.scales.reshape(-1, padded_n),
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


def _bfloat16_parts(x: jax.Array) -> jax.Array:
    """Rows of bfloat16 whose products sum to x's: x itself, or a float16's two parts below.

    A float16 has 11 significant bits, so what bfloat16's 8 leave over is a bfloat16 too. Where few
    rows multiply, reading weights takes the time and the second row is free.
    """
    if x.dtype == jnp.bfloat16:
        return x
    exact = x.astype(jnp.float32)
    # Not a pair of casts, which XLA may leave out.
    high = lax.reduce_precision(exact, exponent_bits=8, mantissa_bits=7)
    low = jnp.where(jnp.isfinite(high), exact - high, 0.0)
    return jnp.concatenate([high, low], axis=1).astype(jnp.bfloat16)
