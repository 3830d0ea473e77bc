"""Random bits for stochastic rounding: by key and shape alone."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp


def draw_bits(key: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    """Random integers of 1 to 32 bits, int32: of `jax.random.bits` the upper ones."""
    if width > 16:
        return (jax.random.bits(key, shape, jnp.uint32) >> (32 - width)).astype(jnp.int32)
    return jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32) >> (16 - width)


def derive(key: jax.Array, derivations: Iterable[tuple[int, int | None]]) -> jax.Array:
    """A key made of another, one step after the other."""
    for index, number in derivations:
        if number is None:
            key = jax.random.fold_in(key, index)
        else:
            key = jax.random.split(key, number)[index]
    return key
