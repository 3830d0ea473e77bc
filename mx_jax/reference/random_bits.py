"""Random bits for stochastic rounding: by key and shape alone."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("data",),
    meta_fields=("implementation", "derivations"),
)
@dataclasses.dataclass(frozen=True)
class DerivedKey:
    """A key that is derived where it is drawn from, in the same call."""

    # XLA compiles threefry anew wherever it stands, which takes longer than the rest of a layer.

    data: jax.Array  # of the key that all others are derived from
    implementation: str  # JAX's name for it, e.g. "threefry2x32"
    derivations: tuple[tuple[int, int | None], ...] = ()  # an index of `split`, or of `fold_in`

    @classmethod
    def of(cls, key: "jax.Array | DerivedKey") -> "DerivedKey":
        """A key of JAX, typed or raw, or one that is derived already."""
        if isinstance(key, DerivedKey):
            return key
        typed: Any = key
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            typed = jax.random.wrap_key_data(key)
        return cls(jax.random.key_data(typed), str(jax.random.key_impl(typed)))

    def fold_in(self, number: jax.typing.ArrayLike) -> "DerivedKey":
        """`jax.random.fold_in`, at once if the number is traced."""
        if isinstance(number, int):
            return self._derived(number, None)
        return DerivedKey.of(jax.random.fold_in(self.get(), number))

    def split(self, number: int = 2) -> "tuple[DerivedKey, ...]":
        """`jax.random.split`."""
        return tuple(self._derived(index, number) for index in range(number))

    def _derived(self, index: int, number: int | None) -> "DerivedKey":
        return dataclasses.replace(self, derivations=(*self.derivations, (index, number)))

    def get(self) -> jax.Array:
        """The key itself."""
        key = jax.random.wrap_key_data(self.data, impl=self.implementation)
        for index, number in self.derivations:
            if number is None:
                key = jax.random.fold_in(key, np.uint32(index))
            else:
                key = jax.random.split(key, number)[index]
        return key


def draw_bits(key: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    """Random integers of 1 to 32 bits, int32: of `jax.random.bits` the upper ones."""
    if width > 16:
        return (jax.random.bits(key, shape, jnp.uint32) >> (32 - width)).astype(jnp.int32)
    return jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32) >> (16 - width)
