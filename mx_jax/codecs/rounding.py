"""Rounding modes as values: how a significand loses its low bits.

A mode sees an integer significand `sig`, the number of low bits to drop, and, where it asks for
them, random bits. Everything is integer arithmetic: XLA on CPU flushes subnormal floats.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.codecs import float32
from mx_jax.codecs.float32 import clip
from mx_jax.formats.element import unknown_name

# A significand has 24 bits; past this many dropped bits nothing but the random part can matter.
_MAX_SHIFT = 31
# The fewest bits that a float32 significand drops in any format.
MAX_RANDOM_BITS = 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """A way to drop bits of a magnitude.

    Attributes:
      name: `"nearest"`, `"away"`, `"toward_zero"` or `"stochastic"`.
      random_bits: how many random bits an element consumes; 0 for deterministic modes.
      apply: `(sig, shift, bits) -> sig / 2^shift`, rounded to an integer.
    """

    name: str
    random_bits: int
    apply: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]

    def __repr__(self) -> str:
        return f"Rounding({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own by name and width, so that pickles hold no internals; any other by its
        # function.
        if self in ROUNDINGS:
            return rounding_mode, (self.name,)
        if self.is_stochastic:
            return stochastic, (self.random_bits,)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(Rounding, **fields), ()

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether it is the library's own stochastic rounding, of any width."""
        known = 1 <= self.random_bits <= MAX_RANDOM_BITS
        return known and self == stochastic(self.random_bits)


def _nearest(sig: jax.Array, shift: jax.Array, bits: jax.Array | None) -> jax.Array:
    # Adding just under half, plus the bit that decides ties, makes truncation round to even.
    # Past 25 dropped bits every 24-bit significand is below half: the result is 0 there too.
    shift = float32.min(shift, 25)
    odd = float32.bitwise_and(float32.shift_right(sig, shift), 1)
    below_half = float32.sub(float32.shift_left(1, float32.sub(shift, 1)), 1)
    return float32.shift_right(float32.add(float32.add(sig, below_half), odd), shift)


def _away(sig: jax.Array, shift: jax.Array, bits: jax.Array | None) -> jax.Array:
    shift = float32.min(shift, 25)
    half = float32.shift_left(1, float32.sub(shift, 1))
    return float32.shift_right(float32.add(sig, half), shift)


def _toward_zero(sig: jax.Array, shift: jax.Array, bits: jax.Array | None) -> jax.Array:
    return float32.shift_right(sig, float32.min(shift, _MAX_SHIFT))


@dataclasses.dataclass(frozen=True)
class _Stochastic:
    """Up with the probability of the fraction, by so many random bits. Equal if the widths are."""

    num_bits: int

    def __call__(self, sig: jax.Array, shift: jax.Array, bits: jax.Array | None) -> jax.Array:
        # Up iff floor(frac 2^n) + r >= 2^n. Every shift is at least 17 >= n, so the fraction's
        # leading n bits are what remains of the dropped part after dropping shift - n bits.
        most = float32.min(shift, _MAX_SHIFT)
        kept = float32.shift_right(sig, most)
        dropped = float32.sub(sig, float32.shift_left(kept, most))
        rest = clip(float32.sub(shift, self.num_bits), 0, _MAX_SHIFT)
        leading = float32.shift_right(dropped, rest)
        assert bits is not None, "stochastic rounding without random bits"
        up = float32.shift_right(float32.add(leading, bits), self.num_bits)
        return float32.add(kept, up)


def stochastic(num_bits: int) -> Rounding:
    """Stochastic rounding with `num_bits` random bits an element.

    The magnitude rounds up iff `floor(frac * 2^n) + r >= 2^n` for the n-bit random integer r, so
    exact values never move and the expected value is right to `2^-n` of the quantum.

    Args:
      num_bits: n, 1 to 17 (a float32 significand drops at least 17 bits in every format).

    Raises:
      ValueError: if n is out of range.
    """
    if not 1 <= num_bits <= MAX_RANDOM_BITS:
        raise ValueError(f"stochastic: needs 1 <= num_bits <= 17, got num_bits={num_bits}")
    return Rounding(name="stochastic", random_bits=num_bits, apply=_Stochastic(num_bits))


NEAREST = Rounding(name="nearest", random_bits=0, apply=_nearest)
AWAY = Rounding(name="away", random_bits=0, apply=_away)
TOWARD_ZERO = Rounding(name="toward_zero", random_bits=0, apply=_toward_zero)
STOCHASTIC = stochastic(16)

ROUNDINGS: tuple[Rounding, ...] = (NEAREST, AWAY, TOWARD_ZERO, STOCHASTIC)


def rounding_mode(rounding: Rounding | str) -> Rounding:
    """The rounding mode meant by an object or a name.

    Raises:
      ValueError: unknown name; the message lists the known.
    """
    if isinstance(rounding, Rounding):
        return rounding
    known = {mode.name: mode for mode in ROUNDINGS}
    if not isinstance(rounding, str) or rounding not in known:
        raise unknown_name("rounding", rounding, known)
    return known[rounding]


# Random bits, by key and shape alone -----------------------------------------------------------


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
