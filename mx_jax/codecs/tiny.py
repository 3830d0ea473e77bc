"""Tensor scales near the bottom of float32: their arithmetic done 2^64 times as large, exactly.

NVFP4 divides by its tensor scale p. Of a tiny tensor p is a subnormal, which some platforms flush,
and 1 / p may be Inf. So where p is tiny, both p and what it divides are lifted: multiplied by a
power of two, which leaves the quotients, hence codes and block scales, as they are. What is
multiplied by p is lowered again, in integers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from mx_jax.codecs import float32

# Exponent of the power of two that lifts.
LIFT = 64
# 2^-100: above, no step of the arithmetic leaves the normal numbers.
_TINY = (127 - 100) << 23


def is_tiny(tensor_scale: jax.Array) -> jax.Array:
    """Where a tensor scale, which is positive, is below 2^-100."""
    return float32.to_bits(tensor_scale) < _TINY


def lift(x: jax.Array, where: jax.Array) -> jax.Array:
    """Float32 values, times 2^64 where asked; subnormals are the numbers that they are.

    Args:
      x: float32, bfloat16 or float16.
      where: bool, broadcastable to x.
    """
    bits = float32.to_bits(x)
    values, magnitude = float32.from_bits(bits), bits & float32.ABS
    # A subnormal is its pattern times 2^-149, and integers below 2^24 convert exactly.
    small = float32.to_bits(magnitude.astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149)))
    small = float32.from_bits(small | bits ^ magnitude)
    lifted = jnp.where(magnitude < float32.HIDDEN, small, values * jnp.float32(2.0**LIFT))
    return jnp.where(where, lifted, values)


def lower(bits: jax.Array, where: jax.Array) -> jax.Array:
    """Float32 patterns, divided by 2^64 where asked, rounded once where the result is subnormal.

    Args:
      bits: int32 patterns of normal numbers, zeros, Inf or NaN.
      where: bool, broadcastable to bits.
    """
    magnitude = bits & float32.ABS
    # Beside 2^-62, which is subnormals' end times 2^64, the sum's last bit is their unit: addition
    # rounds, to nearest and ties to even, and what it adds to the pattern is the result's pattern.
    beside = float32.from_bits(magnitude) + jnp.float32(2.0**-62)
    subnormal = float32.to_bits(beside) - ((127 - 62) << 23)
    lowered = magnitude - (LIFT << 23)
    lowered = jnp.where(magnitude < (127 - 62) << 23, subnormal, lowered)
    fixed = (magnitude >= float32.INF) | ~where
    return jnp.where(fixed, magnitude, lowered) | bits ^ magnitude


def divided(x: jax.Array, tensor_scale: jax.Array, by: Callable[..., Any]) -> Any:
    """`by(x, tensor_scale)`, or the same of both lifted: only if a scale is tiny, x is read for it.

    Args:
      x: what the scale divides.
      tensor_scale: float32, broadcastable to x.
      by: gives the same for both multiplied by one number.
    """
    tiny = is_tiny(tensor_scale)
    return lax.cond(
        any_of(tiny),
        lambda: by(lift(x, tiny), lift(tensor_scale, tiny)),
        lambda: by(x, tensor_scale),
    )


@custom_vmap
def any_of(mask: jax.Array) -> jax.Array:
    """`jnp.any`, also over the axes that vmap adds: a cond stays a branch there."""
    return jnp.any(mask)


@any_of.def_vmap
def _any_of_batch(axis_size: int, in_batched: Any, mask: jax.Array) -> tuple[jax.Array, bool]:
    return any_of(mask), False
