"""What stochastic rounding draws, and the keys that products draw from: JAX's own, by calls.

XLA compiles threefry anew wherever it stands, which takes longer than the rest of a layer: on CPUs
a compiled handler gives the same bits.
"""

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import DeriveKeysCall, RandomBitsCall
from mx_jax.backends.primitive import choose
from mx_jax.reference.hadamard import Hadamard


def draw_bits(key: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    """`reference.random_bits.draw_bits`: random integers of so many bits, by key and shape."""
    key = _typed(key)
    call = RandomBitsCall(
        shape=shape,
        width=width,
        implementation=str(jax.random.key_impl(key)),
        is_partitionable=bool(jax.config.jax_threefry_partitionable),
    )
    return choose(call).offer.run(jax.random.key_data(key), call)


def draw_signs(transform: Hadamard, key: jax.Array | None) -> jax.Array:
    """`reference.hadamard.draw_signs`: a transform's signs, from the key if it draws them."""
    if transform.signs is not None:
        return jnp.asarray(transform.signs, jnp.float32)
    assert key is not None, "random signs without a key"
    # A float32 below 0.5 is drawn where the first bit is 0.
    drawn = draw_bits(key, (transform.size,), 17)
    return jnp.where(drawn < 1 << 16, jnp.float32(1), jnp.float32(-1))


def split_key(key: jax.Array, number: int = 2) -> jax.Array:
    """`jax.random.split`."""
    return _derived(key, 0, number)


def fold_in(key: jax.Array, place: int) -> jax.Array:
    """`jax.random.fold_in` of a number from 0 on."""
    return _derived(key, place, None)


def _derived(key: jax.Array, first: int, number: int | None) -> jax.Array:
    typed = _typed(key)
    call = DeriveKeysCall(
        first=first,
        number=number,
        words=jax.random.key_data(typed).shape[-1],
        implementation=str(jax.random.key_impl(typed)),
        is_partitionable=bool(jax.config.jax_threefry_partitionable),
    )
    data = choose(call).offer.run(jax.random.key_data(typed), call)
    return data if typed is not key else jax.random.wrap_key_data(data, impl=call.implementation)


def _typed(key: jax.Array) -> jax.Array:
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)
