"""Random bits for stochastic rounding: by key and shape alone."""

import jax
import jax.numpy as jnp


def draw_bits(key: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    """Random integers of so many bits, int32: of `jax.random.bits` the upper ones.

    Args:
      key: a PRNG key.
      shape: of the result.
      width: 1 to 31; up to 16 they are drawn as uint16.
    """
    if width > 16:
        return (jax.random.bits(key, shape, jnp.uint32) >> (32 - width)).astype(jnp.int32)
    return jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32) >> (16 - width)
