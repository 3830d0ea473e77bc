"""Arithmetic of casts on words: bfloat16 of two neighbouring rows in each 32-bit lane.

A quotient by a power of two is exact in bfloat16, and one bfloat16 addition rounds it to an
element: beside a number that is larger by a power of two, the element's last digit is the sum's.
Fields of patterns are cut out of both halves of a word at once. Blocks with NaN or Inf, or so small
that TPUs would flush something of them to zero, are cast once more, exactly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from mx_jax.backends.calls import HEADROOM
from mx_jax.formats import ElementFormat

# Of bfloat16: fraction bits, bias, patterns.
_DIGITS, _BIAS = 7, 127
_SIGN, _MAGNITUDE, _EXPONENT, _NAN = 0x8000, 0x7FFF, 0x7F80, 0x7FC0
_SCALE_NAN = 255


def both(pattern: int) -> np.uint32:
    """16 bits in both halves of a word."""
    return np.uint32(pattern * 0x10001)


def words(x: jax.Array) -> jax.Array:
    """`[2 r, n]` bfloat16 as `[r, n]` words."""
    return pltpu.bitcast(x, jnp.uint32)


def numbers(w: jax.Array) -> jax.Array:
    """The bfloat16 in words."""
    return pltpu.bitcast(w, jnp.bfloat16)


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of two words, half by half, the larger magnitudes."""
    return words(jnp.maximum(numbers(a), numbers(b)))


def magnitudes(w: jax.Array) -> jax.Array:
    """Words without signs."""
    return w & both(_MAGNITUDE)


def parts(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves as int32."""
    return pltpu.bitcast(w & np.uint32(0xFFFF), jnp.int32), pltpu.bitcast(w >> 16, jnp.int32)


def joined(low: jax.Array, high: jax.Array) -> jax.Array:
    """Words of two halves."""
    return pltpu.bitcast(low | (high << 16), jnp.uint32)


def as_bytes(w: jax.Array) -> jax.Array:
    """The low bytes of both halves, `[2 r, n]`."""
    return pltpu.bitcast(w, jnp.uint16).astype(jnp.uint8)


def _power(exponent: int) -> jax.Array:
    return jnp.bfloat16(2.0**exponent)


def _times_power(pattern: jax.Array, exponent: jax.Array) -> jax.Array:
    """A bfloat16 pattern times a power of two, as one: subnormals count, but not in the result."""
    small = pattern < (1 << _DIGITS)
    # A subnormal is its pattern times 2^-133.
    number = jnp.where(
        small, pattern.astype(jnp.float32), pltpu.bitcast(pattern << 16, jnp.float32)
    )
    exponent = exponent - jnp.where(small, _BIAS - 1 + _DIGITS, 0)
    for part in (exponent >> 1, exponent - (exponent >> 1)):
        number = number * pltpu.bitcast((jnp.clip(part, -126, 127) + 127) << 23, jnp.float32)
    return pltpu.bitcast(number, jnp.int32) >> 16


@dataclasses.dataclass(frozen=True)
class Coding:
    """What a block of bfloat16 becomes.

    Attributes:
      element: the element format.
      carry: what brings the pattern of a block's largest magnitude to the next exponent, if the
        scale rule rounds it up.
      values: whether to bfloat16 values times `2^-HEADROOM`; else to codes.
    """

    element: ElementFormat
    carry: int
    values: bool

    @functools.cached_property
    def lift(self) -> int:
        """Quotients are kept times this power of two."""
        # Then the exponents' offset is 0 modulo 2^8 in codes, and no reciprocal is subnormal.
        lift, step = 1 - self.element.emin, 1 << (8 - self.element.mantissa_bits)
        while self.element.emax + lift < 2:
            lift += step
        return lift

    @functools.cached_property
    def lowest(self) -> int:
        """The smallest biased exponent of a largest magnitude of which nothing counts that TPUs
        flush: reciprocals of scales are finite, subnormals are below half of the last code."""
        return self.element.emax + self.lift + self.element.mantissa_bits + 2

    def reciprocals(self, largest: jax.Array) -> jax.Array:
        """Of scales, as `results` takes them, in words like blocks' largest magnitudes."""
        exponents = numbers((largest + both(self.carry)) & both(_EXPONENT))
        exponents = words(jnp.maximum(exponents, _power(self.lowest - _BIAS)))
        return both((2 * _BIAS + self.element.emax + self.lift) << _DIGITS) - exponents

    def results(self, w: jax.Array, reciprocals: jax.Array) -> jax.Array:
        """Words with codes in the halves' low bytes, or with values; of blocks that need no
        `exact_results`."""
        sums = self._rounded(numbers(magnitudes(w)) * numbers(reciprocals))
        if not self.values:
            return self._codes(*sums, w)
        total, beside, _ = sums
        scales = numbers(both((2 * _BIAS - HEADROOM) << _DIGITS) - reciprocals)
        return words((total - beside) * scales) | (w & both(_SIGN))

    def exact_results(self, w: jax.Array, largest: jax.Array) -> jax.Array:
        """The same of any block, by its largest magnitude."""
        stored = [self._stored(half) for half in parts(largest)]
        quotients = (
            _times_power(half, self.lift + _BIAS - scale)
            for half, scale in zip(parts(magnitudes(w)), stored, strict=True)
        )
        total, beside, field = self._rounded(numbers(joined(*quotients)))
        nan = joined(*(jnp.where(scale == _SCALE_NAN, 0xFFFF, 0) for scale in stored))
        if not self.values:
            code = self.element.nan_code or 0
            return (self._codes(total, beside, field, w) & ~nan) | (nan & both(code))
        rounded = (
            _times_power(half, scale - (_BIAS + self.lift + HEADROOM))
            for half, scale in zip(parts(words(total - beside)), stored, strict=True)
        )
        value = joined(*rounded) | (w & both(_SIGN))
        return (value & ~nan) | (nan & both(_NAN))

    def scales(self, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Words with stored scales, and where a block needs `exact_results`."""
        odd = jnp.zeros(largest.shape, bool)
        for half in parts(largest):
            tiny = (half > 0) & (half + self.carry < (self.lowest << _DIGITS))
            odd = odd | tiny | (half >= _EXPONENT)
        return joined(*(self._stored(half) for half in parts(largest))), odd

    def _stored(self, largest: jax.Array) -> jax.Array:
        """E8M0 of a block's largest magnitude, both int32."""
        pattern = largest
        if self.element.emax < 1:
            # Elsewhere a subnormal has the smallest scale, whatever its exponent.
            number = pltpu.bitcast(pattern.astype(jnp.float32), jnp.int32) >> (23 - _DIGITS)
            normal = number - ((_BIAS + _DIGITS - 1) << _DIGITS)
            pattern = jnp.where(pattern < (1 << _DIGITS), normal, pattern)
        stored = jnp.clip(((pattern + self.carry) >> _DIGITS) - self.element.emax, 0, 254)
        return jnp.where(largest >= _EXPONENT, _SCALE_NAN, stored)

    def _rounded(self, quotients: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sums whose last digit is the element's, what was added, and the quotients' powers."""
        element = self.element
        capped = jnp.minimum(quotients, jnp.bfloat16(element.max * 2.0**self.lift))
        powers = numbers(words(capped) & both(_EXPONENT))
        powers = jnp.maximum(powers, _power(element.emin + self.lift))
        beside = powers * _power(_DIGITS - element.mantissa_bits)
        return capped + beside, beside, powers

    def _codes(
        self, total: jax.Array, beside: jax.Array, powers: jax.Array, w: jax.Array
    ) -> jax.Array:
        """Codes in the low bytes of halves, from `_rounded` and the words with signs."""
        element = self.element
        digits = words(total) - words(beside)
        half = digits + (words(powers) >> (_DIGITS - element.mantissa_bits))
        half = half & both(element.sign_code - 1)
        if element.kind == "float":
            return half | ((w & both(_SIGN)) >> (16 - element.bits))
        # Two's complement.
        negative = (w >> 15) & both(1)
        ones = (negative << element.bits) - negative
        return ((half ^ ones) + negative) & both((element.sign_code << 1) - 1)
