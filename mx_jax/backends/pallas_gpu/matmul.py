"""Products by a GPU kernel: which calls it takes, how operands reach it, which tiles it gets."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.base import MatmulCall, Operand, Target
from mx_jax.backends.pallas_gpu.tuning import Tiles, choose
from mx_jax.backends.pallas_gpu.weights import BLOCK, PAD_N, PackedWeights, pack
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

# The first version whose Mosaic GPU has everything that the kernel calls.
MIN_JAX = (0, 11, 2)
_ARCHITECTURES = {(9, 0): "sm90"}
_ELEMENTS = ("e2m1", "e4m3", "e5m2")
_ACTIVATIONS = tuple(map(jnp.dtype, ("bfloat16", "float16")))
_OUTPUTS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
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
        return f"needs weights in MXFP4 or MXFP8 on one side: lhs {reasons[0]}; rhs {reasons[1]}"
    weights = "lhs" if reasons[1] else "rhs"
    for side, format, dtype in sides:
        if side == weights:
            continue
        if format is None and dtype not in _ACTIVATIONS:
            return f"needs activations in bfloat16 or float16, got {side} in {dtype}"
        if format is not None and format.scale.name != "e8m0":
            # Every value of such an operand is a bfloat16.
            return f"needs e8m0 scales on both sides, got {side}={format.name}"
    return None


def rejects_weights(format: BlockFormat | None) -> str | None:
    """Why weights of a format are not taken, or None."""
    if format is None:
        return "is in high precision"
    if format.element.name not in _ELEMENTS or format.scale.name != "e8m0":
        return f"is {format.name}"
    if format.block != (1, BLOCK):
        return f"has blocks {format.block}, not (1, {BLOCK})"
    return None


def _rejects_sizes(call: MatmulCall) -> str | None:
    sides: tuple[tuple[Literal["lhs", "rhs"], tuple[int, ...], BlockFormat | None], ...] = (
        ("lhs", call.lhs_shape, call.lhs_format),
        ("rhs", call.rhs_shape, call.rhs_format),
    )
    for side, shape, format in sides:
        axes = call.contracting_axes(side)
        if format is not None and len(axes) > 1 and shape[axes[-1]] % BLOCK:
            return (
                f"needs the last of several contracted axes in whole blocks of {BLOCK}, got "
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
    if isinstance(activations, MXArray):
        activations = activations.dequantize(jnp.bfloat16)
    packed = pack(weights.codes, weights.scales, weights.format, weights.dtype)
    out = multiply(activations, packed, call.out_dtype, interpret=interpret)
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
    matrices = MXArray(
        codes=arrange(operand.codes),
        scales=arrange(operand.scales),
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
    padded_k, padded_n = weights.scales.shape[1] * BLOCK, weights.scales.shape[2]
    bits = 4 if weights.format.element.bits == 4 else 8
    if tiles is None:
        tiles = choose("sm90", bits, batch=batch, m=rows, n=padded_n, k=padded_k)
    padded = jnp.pad(parts, ((0, 0), (0, -rows % tiles.m), (0, padded_k - k)))
    once = tiles.splits == 1 and rows == m and dtype == jnp.bfloat16
    sums = kernel_sm90.matmul(
        padded.reshape(-1, padded_k),
        weights.codes.reshape(batch * padded_n, -1),
        weights.scales.reshape(-1, padded_n),
        element=weights.format.element,
        batch=batch,
        tiles=tiles,
        out_dtype=jnp.bfloat16 if once else jnp.float32,
        interpret=interpret,
    )
    sums = sums.reshape(tiles.splits, batch, -1, padded_n)[:, :, :rows, :n]
    if once:
        return sums[0]
    return sums.reshape(-1, batch, rows // m, m, n).sum((0, 2)).astype(dtype)


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
