"""Optimizers' moments in MXFP8: codes that are right on average, and a step from some to the next.

Casts of their own: as the library's, they would take half of a step. XLA makes them a part of the
kernels that compute the moments, which are never written as float32; on CPUs a handler in C++ takes
such a step in one pass, where XLA computes a moment for its scale, its code and the update. What
they give up is what Adam has no use for: numbers below 2^-126, and odds finer than 2^-20, of roots
2^-17.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.codecs.float32 import ABS, HIDDEN, INF, MANTISSA, from_bits, to_bits

# Codes and scales.
Stored = tuple[jax.Array, jax.Array]

BLOCK = 32
# E4M3 as float32 patterns: a code shifted by _SHIFT, its exponent counted from _BIAS.
_SHIFT, _BIAS = 20, (127 - 7) << 3
_SMALLEST_NORMAL, _LARGEST = 2.0**-6, 448.0


def blocks_of(shape: tuple[int, ...]) -> Blocks:
    """Along the last axis that 32 divides, or the last."""
    whole = [axis for axis in range(-len(shape), 0) if shape[axis] % BLOCK == 0]
    return (((whole or [-1])[-1], BLOCK),)


def step(
    stored: Stored,
    added: jax.Array,
    factors: jax.Array,
    words: jax.Array,
    is_root: bool,
    is_square: bool,
) -> Stored:
    """Codes and scales of `factors[0] * moment + factors[1] * added`, or of `added` squared."""
    moment = decode(*stored, is_root, np.dtype(np.float32))
    added = jnp.square(added) if is_square else added
    return encode(factors[1] * added + factors[0] * moment, words, is_root)


@functools.partial(jax.jit, static_argnames=("root", "dtype"), inline=True)
def decode(codes: jax.Array, scales: jax.Array, root: bool, dtype: np.dtype) -> jax.Array:
    """The values, or the squares of roots; as `dequantize`, but numbers below 2^-126 are 0."""
    exponents = scales.astype(jnp.int32)
    factors = from_bits(jnp.where(exponents == 255, INF | 1, exponents << 23))
    if root:
        values = from_bits((codes.astype(jnp.int32) + _BIAS) << _SHIFT)
        return jnp.square(values * _of_elements(factors, codes.shape)).astype(dtype)
    # Sign, exponent and mantissa where float16 has them, 2^8 too small, subnormals included.
    half = (lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16) << 7) & ~0x4000
    values = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    # By 2^4 twice: the factor of the largest moments has no 2^8 left.
    return (16 * values * _of_elements(16 * factors, codes.shape)).astype(dtype)


@functools.partial(jax.jit, static_argnames="root", inline=True)
def encode(x: jax.Array, words: jax.Array, root: bool) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of x, or of its root, rounded stochastically by two random words."""
    x = x.astype(jnp.float32)
    patterns, random = to_bits(x), random_bits(x, words)
    # As unsigned: a negative number is larger than NaN. So of squares it is an error, as NaN is.
    magnitudes = lax.bitcast_convert_type(patterns, jnp.uint32) if root else patterns & ABS
    pieces, inside = block_shapes.split(magnitudes, blocks_of(x.shape))
    amax = jnp.minimum(lax.reduce_max(pieces, inside), INF).astype(jnp.int32)
    # RCEIL: the smallest power of two that brings the largest to at most 448 = 1.75 * 2^8.
    if root:
        # Of squares to 448^2 = 1.53125 * 2^17, by a power of four; zeros stay zeros.
        exponents = 127 + ((((amax + (MANTISSA - 0x440000)) >> 23) - 127 - 16) >> 1)
        exponents = jnp.where(amax < HIDDEN, 1, exponents)
    else:
        exponents = jnp.maximum(((amax + (MANTISSA - 0x600000)) >> 23) - 8, 1)
    exponents = lax.optimization_barrier(jnp.where(amax >= INF, 255, exponents))
    if root:
        codes = _codes_of_roots(patterns + _of_elements((127 - exponents) << 24, x.shape), random)
    else:
        # E4M3 codes of magnitudes up to 448: up with the odds of what is dropped.
        values = from_bits(magnitudes) * _of_elements(from_bits((254 - exponents) << 23), x.shape)
        # Halfway to the smallest normal number the step halves too: subnormal codes count on.
        subnormal = 0.5 * values + 0.5 * _SMALLEST_NORMAL
        codes = ((jnp.maximum(to_bits(values), to_bits(subnormal)) + random) >> _SHIFT) - _BIAS
        codes = (codes & 0x7F) | ((patterns >> 24) & 0x80)
    return codes.astype(jnp.uint8), exponents.astype(jnp.uint8)


def _of_elements(factors: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each element's factor. Behind a barrier: computed once a block, and not by each element."""
    factors = lax.optimization_barrier(factors)
    like, inside = block_shapes.split(jnp.zeros(shape, bool), blocks_of(shape))
    factors = jnp.broadcast_to(lax.expand_dims(factors, inside), like.shape)
    return block_shapes.merge(factors, shape, inside)


def _codes_of_roots(squares: jax.Array, random: jax.Array) -> jax.Array:
    """Normal E4M3 codes of roots up to 448, by the patterns of their squares.

    A root is m + f by some power of two, m from 8 to 15: up has the odds
    `((m + f)^2 - m^2) / ((m + 1)^2 - m^2)`, which keep the square right. All numbers but the root
    are exact, and of that only the integer counts: so every machine has the same bits.
    """
    squares = jnp.clip(squares, _pattern(_SMALLEST_NORMAL**2), _pattern(_LARGEST**2))
    squares = squares - _pattern(1.0)
    # In [64, 256), by some power of four.
    square = from_bits((squares & 0xFFFFFF) + _pattern(64.0))
    m = jnp.floor(jnp.sqrt(square))
    # From 1 to 2, in steps of 2^-17.
    odds = from_bits(((random << 3) & 0x7FFFC0) + _pattern(1 + 2.0**-18))
    up = square > odds * (2 * m + 1) + (m * (m - 2) - 1)
    return ((squares >> 24) << 3) + (m.astype(jnp.int32) + 48) + up.astype(jnp.int32)


def _pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def random_bits(x: jax.Array, words: jax.Array) -> jax.Array:
    """20 random bits an element of x, int32: a hash of its position and two random words.

    Fused into what reads it and sharded as x; threefry takes as long as the step. Positions that
    are 16 apart, the halves of a block, take one hash, which the second turns by 16 bits.
    """
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
    position = sum(
        lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=explicit_sharding(x))
        * jnp.uint32(stride % 2**32)
        for axis, stride in enumerate(strides)
    )
    mixed = (position & ~jnp.uint32(16)) * jnp.uint32(0x9E3779B1) + words[0]
    mixed = (mixed ^ (mixed >> 16)) * (words[1] | 1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x735A2D97)
    mixed = jnp.where(position & 16, (mixed << 16) | (mixed >> 16), mixed)
    return (mixed >> (32 - _SHIFT)).astype(jnp.int32)
