"""What stochastic rounding draws, and the keys that products draw from: JAX's own bits, by calls.

XLA compiles threefry anew wherever it stands, which takes longer than the rest of a layer: on CPUs
a compiled handler gives the same bits. So keys are derived where something is drawn, in its call.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import RandomBitsCall
from mx_jax.backends.primitive import bind
from mx_jax.reference import random_bits
from mx_jax.reference.hadamard import Hadamard


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("root",), meta_fields=("derivations",)
)
@dataclasses.dataclass(frozen=True)
class DerivedKey:
    """A key that is still to be derived.

    Attributes:
      root: a PRNG key.
      derivations: what makes it of the root, as `reference.random_bits.derive` takes them.
    """

    root: jax.Array
    derivations: tuple[tuple[int, int | None], ...]

    def get(self) -> jax.Array:
        """The key."""
        return random_bits.derive(self.root, self.derivations)


def draw_bits(key: jax.Array | DerivedKey | None, shape: tuple[int, ...], width: int) -> jax.Array:
    """`reference.random_bits.draw_bits`: random integers of so many bits, by key and shape."""
    assert key is not None, "random bits without a key"
    of = _lazily(key)
    root = of.root
    if not jnp.issubdtype(root.dtype, jax.dtypes.prng_key):
        root = jax.random.wrap_key_data(root)
    call = RandomBitsCall(
        shape=shape,
        width=width,
        derivations=of.derivations,
        implementation=str(jax.random.key_impl(root)),
        is_partitionable=bool(jax.config.jax_threefry_partitionable),
    )
    return bind(call, jax.random.key_data(root))


def draw_signs(transform: Hadamard, key: jax.Array | DerivedKey | None) -> jax.Array:
    """A transform's signs as int32, of which negative ones stand for -1.

    They are those of `reference.hadamard.draw_signs`: it draws a float32 below 0.5 where the first
    bit is 0.
    """
    if transform.signs is not None:
        return jnp.asarray(transform.signs, jnp.int32)
    assert key is not None, "random signs without a key"
    return draw_bits(key, (transform.size,), 32)


def split_key(key: jax.Array | DerivedKey, number: int = 2) -> tuple[DerivedKey, ...]:
    """`jax.random.split`."""
    return tuple(_derived(key, index, number) for index in range(number))


def fold_in(key: jax.Array | DerivedKey, place: jax.typing.ArrayLike) -> jax.Array | DerivedKey:
    """`jax.random.fold_in` of a number, at once if it is traced."""
    if isinstance(place, int):
        return _derived(key, place, None)
    return jax.random.fold_in(key.get() if isinstance(key, DerivedKey) else key, place)


def _derived(key: jax.Array | DerivedKey, index: int, number: int | None) -> DerivedKey:
    of = _lazily(key)
    return DerivedKey(of.root, (*of.derivations, (index, number)))


def _lazily(key: jax.Array | DerivedKey) -> DerivedKey:
    return key if isinstance(key, DerivedKey) else DerivedKey(key, ())
