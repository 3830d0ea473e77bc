"""Operands for tests and benchmarks, drawn with NumPy so that making them compiles nothing."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import Operand
from mx_jax.codecs.blocks import Blocks, scales_shape
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

Shape = tuple[int, ...]


def draw_few_octaves(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Float32 of both signs with magnitudes `2^u`, u uniform in [-2, 2).

    Casts to FP8, FP6, FP4 and INT8 round nearly all of them, and yet sums of some hundred products
    of what they become need no more than float32's 24 bits. So results are equal bit for bit in
    whatever order a product is summed.
    """
    return with_signs(rng, 2.0 ** rng.uniform(-2, 2, shape)).astype(np.float32)


def draw_any_bits(rng: np.random.Generator, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Uniform bit patterns of a float dtype: NaN, Inf, subnormals, both zeros, every exponent.

    One row in four is tame (a few octaves), so that not every block holds something special.
    """
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    patterns = rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=np.uint64)
    wild = patterns.astype(unsigned).view(dtype)
    tame = draw_few_octaves(rng, shape).astype(dtype)
    return np.where(rng.random((*shape[:-1], 1)) < 0.25, tame, wild)


def with_signs(rng: np.random.Generator, magnitudes: np.ndarray) -> np.ndarray:
    """Magnitudes, every second one negative on average."""
    return np.where(rng.random(magnitudes.shape) < 0.5, -magnitudes, magnitudes)


def draw_mxarray(
    rng: np.random.Generator, shape: Shape, format: BlockFormat, blocks: Blocks, octaves: int
) -> MXArray:
    """An MXArray of uniformly drawn finite codes, under scales of `2 * octaves` octaves."""
    # Around the one that brings the largest code near one: products stay far from float32's ends.
    counts = scales_shape(shape, blocks)
    exponents = rng.integers(-octaves, octaves + 1, counts)
    tensor_scale = None
    match format.scale.kind:
        case "exponent":
            scales = (exponents + 127 - format.element.emax).astype(np.uint8)
        case "element":
            # An E4M3 exponent field and any mantissa, below the code of NaN.
            scales = np.minimum(8 * (exponents % 16) + rng.integers(0, 8, counts), 126)
            scales = scales.astype(np.uint8)
        case _:
            scales = 2.0 ** (exponents + rng.random(counts)) * format.element.max
            scales = (scales if format.scale.kind == "divisor" else 1 / scales).astype(np.float32)
    if format.tensor_scale:
        tensor_scale = jnp.full((1,) * len(shape), rng.uniform(2.0**-12, 2.0**-9), jnp.float32)
    return MXArray(
        codes=jnp.asarray(rng.choice(finite_codes(format), shape)),
        scales=jnp.asarray(scales),
        tensor_scale=tensor_scale,
        format=format,
        blocks=blocks,
        dtype=jnp.dtype("float32"),
    )


def in_pairs(operand: Operand, axis: int, negated: bool) -> Operand:
    """Make every second position along an axis a copy of the one before, or its negative."""
    if not isinstance(operand, MXArray):
        values = np.array(operand)
        return jnp.asarray(_pair(values, -values if negated else values, axis))
    seconds = codes = np.array(operand.codes)
    if negated:
        # For each finite code the one whose value is nearest to the negative, 0 for the others.
        element, finite = operand.format.element, finite_codes(operand.format)
        values = np.array([element.value(int(code)) for code in finite])
        opposite = np.zeros(1 << element.bits, np.uint8)
        opposite[finite] = finite[np.argmin(np.abs(values[:, None] + values), axis=1)]
        seconds = opposite[codes]
    return dataclasses.replace(operand, codes=jnp.asarray(_pair(codes, seconds, axis)))


def _pair(firsts: np.ndarray, seconds: np.ndarray, axis: int) -> np.ndarray:
    result = np.moveaxis(firsts.copy(), axis, -1)
    to_change = result[..., 3::2]
    to_change[...] = np.moveaxis(seconds, axis, -1)[..., 2::2][..., : to_change.shape[-1]]
    return np.moveaxis(result, -1, axis)


def finite_codes(format: BlockFormat) -> np.ndarray:
    """Every element code that stands for a finite number, as uint8."""
    codes = range(1 << format.element.bits)
    return np.array([c for c in codes if math.isfinite(format.element.value(c))], np.uint8)
