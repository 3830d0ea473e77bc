"""Random bits for stochastic rounding: by key and shape alone."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp


def draw_bits(key: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    """Random integers of so many bits, int32: of `jax.random.bits` the upper ones.

    Args:
      key: a PRNG key.
      shape: of the result.
      width: 1 to 32; up to 16 they are drawn as uint16.
    """
    if width > 16:
        return (jax.random.bits(key, shape, jnp.uint32) >> (32 - width)).astype(jnp.int32)
    return jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32) >> (16 - width)


def derive(key: jax.Array, derivations: Iterable[tuple[int, int | None]]) -> jax.Array:
    """A key made of another, one step after the other.

    Args:
      key: a PRNG key.
      derivations: (number, None): `jax.random.fold_in` of the number; (index, n): that one of
        `jax.random.split` into n.
    """
    for index, number in derivations:
        if number is None:
            key = jax.random.fold_in(key, index)
        else:
            key = jax.random.split(key, number)[index]
    return key
