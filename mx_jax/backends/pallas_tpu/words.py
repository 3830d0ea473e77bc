"""How kernels are called, and casts on words: bfloat16 of two neighbouring rows in 32-bit lanes.

A quotient by a power of two is exact in bfloat16, and one bfloat16 addition rounds it to an
element: beside a number that is larger by a power of two, the element's last digit is the sum's.
Fields of patterns are cut out of both halves of a word at once. Blocks with NaN or Inf, or so small
that TPUs would flush something of them to zero, are cast once more, exactly.

By lax's operations, as `codecs.float32` has them: those of arrays are each a function under a `jit`
of its own, which makes a kernel take seconds to lower.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from mx_jax.backends.calls import HEADROOM
from mx_jax.backends.target import current_target
from mx_jax.codecs.float32 import (
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    clip,
    ge,
    gt,
    lt,
    mul,
    select,
    shift_left,
    shift_right,
    sub,
)
from mx_jax.codecs.float32 import max as maximum
from mx_jax.codecs.float32 import min as minimum
from mx_jax.formats import ElementFormat

# Of bfloat16: fraction bits, bias, patterns.
_DIGITS, _BIAS = 7, 127
_SIGN, _MAGNITUDE, _EXPONENT, _NAN = 0x8000, 0x7FFF, 0x7F80, 0x7FC0
_SCALE_NAN = 255


def both(pattern: int) -> int:
    """16 bits in both halves of a word."""
    return pattern * 0x10001


def words(x: jax.Array) -> jax.Array:
    """`[2 r, n]` bfloat16 as `[r, n]` words."""
    return pltpu.bitcast(x, jnp.uint32)


def numbers(w: jax.Array) -> jax.Array:
    """The bfloat16 in words."""
    return pltpu.bitcast(w, jnp.bfloat16)


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of two words, half by half, the larger magnitudes."""
    return words(maximum(numbers(a), numbers(b)))


def magnitudes(w: jax.Array) -> jax.Array:
    """Words without signs."""
    return bitwise_and(w, both(_MAGNITUDE))


def down(w: jax.Array, digits: int) -> jax.Array:
    """Words, shifted; what crosses into the lower half is for the caller to cut off."""
    return lax.shift_right_logical(w, np.uint32(digits))


def parts(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves as int32."""
    return pltpu.bitcast(bitwise_and(w, 0xFFFF), jnp.int32), pltpu.bitcast(down(w, 16), jnp.int32)


def joined(low: jax.Array, high: jax.Array) -> jax.Array:
    """Words of two halves."""
    return pltpu.bitcast(bitwise_or(low, shift_left(high, 16)), jnp.uint32)


def as_bytes(w: jax.Array) -> jax.Array:
    """The low bytes of both halves, `[2 r, n]`."""
    return lax.convert_element_type(pltpu.bitcast(w, jnp.uint16), jnp.uint8)


def _times_power(pattern: jax.Array, exponent: jax.Array) -> jax.Array:
    """A bfloat16 pattern times a power of two, as one: subnormals count, but not in the result."""
    small = lt(pattern, 1 << _DIGITS)
    # A subnormal is its pattern times 2^-133.
    wide = pltpu.bitcast(shift_left(pattern, 16), jnp.float32)
    number = select(small, lax.convert_element_type(pattern, jnp.float32), wide)
    exponent = sub(exponent, select(small, lax.full_like(exponent, _BIAS - 1 + _DIGITS), 0))
    half = shift_right(exponent, 1)
    for part in (half, sub(exponent, half)):
        power = shift_left(add(clip(part, -126, 127), 127), 23)
        number = mul(number, pltpu.bitcast(power, jnp.float32))
    return shift_right(pltpu.bitcast(number, jnp.int32), 16)


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
        exponents = bitwise_and(add(largest, both(self.carry)), both(_EXPONENT))
        exponents = words(maximum(numbers(exponents), 2.0 ** (self.lowest - _BIAS)))
        return sub(both((2 * _BIAS + self.element.emax + self.lift) << _DIGITS), exponents)

    def results(self, w: jax.Array, reciprocals: jax.Array) -> jax.Array:
        """Words with codes in the halves' low bytes, or with values; of blocks that need no
        `exact_results`."""
        total, beside, powers = self._rounded(mul(numbers(magnitudes(w)), numbers(reciprocals)))
        if not self.values:
            return self._codes(total, beside, powers, w)
        scales = numbers(sub(both((2 * _BIAS - HEADROOM) << _DIGITS), reciprocals))
        value = words(mul(sub(total, beside), scales))
        return bitwise_or(value, bitwise_and(w, both(_SIGN)))

    def exact_results(self, w: jax.Array, largest: jax.Array) -> jax.Array:
        """The same of any block, by its largest magnitude."""
        stored = [self._stored(half) for half in parts(largest)]
        quotients = (
            _times_power(half, sub(self.lift + _BIAS, scale))
            for half, scale in zip(parts(magnitudes(w)), stored, strict=True)
        )
        total, beside, powers = self._rounded(numbers(joined(*quotients)))
        is_nan = (ge(scale, _SCALE_NAN) for scale in stored)
        nan = joined(*(select(each, lax.full_like(stored[0], 0xFFFF), 0) for each in is_nan))
        if self.values:
            rounded = (
                _times_power(half, sub(scale, _BIAS + self.lift + HEADROOM))
                for half, scale in zip(parts(words(sub(total, beside))), stored, strict=True)
            )
            result = bitwise_or(joined(*rounded), bitwise_and(w, both(_SIGN)))
        else:
            result = self._codes(total, beside, powers, w)
        of_nan = _NAN if self.values else self.element.nan_code or 0
        kept = bitwise_and(result, bitwise_xor(nan, 0xFFFFFFFF))
        return bitwise_or(kept, bitwise_and(nan, both(of_nan)))

    def scales(self, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Words with stored scales, and where a block needs `exact_results`, as 1."""
        odd, stored = [], []
        for half in parts(largest):
            small = lt(add(half, self.carry), self.lowest << _DIGITS)
            odd.append(bitwise_or(bitwise_and(gt(half, 0), small), ge(half, _EXPONENT)))
            stored.append(self._stored(half))
        return joined(*stored), lax.convert_element_type(bitwise_or(*odd), jnp.int32)

    def _stored(self, largest: jax.Array) -> jax.Array:
        """E8M0 of a block's largest magnitude, both int32."""
        pattern = largest
        if self.element.emax < 1:
            # Elsewhere a subnormal has the smallest scale, whatever its exponent.
            number = pltpu.bitcast(lax.convert_element_type(pattern, jnp.float32), jnp.int32)
            normal = sub(shift_right(number, 23 - _DIGITS), (_BIAS + _DIGITS - 1) << _DIGITS)
            pattern = select(lt(pattern, 1 << _DIGITS), normal, pattern)
        exponent = shift_right(add(pattern, self.carry), _DIGITS)
        stored = clip(sub(exponent, self.element.emax), 0, 254)
        return select(ge(largest, _EXPONENT), _SCALE_NAN, stored)

    def _rounded(self, quotients: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sums whose last digit is the element's, what was added, and the quotients' powers."""
        element = self.element
        capped = minimum(quotients, element.max * 2.0**self.lift)
        powers = numbers(bitwise_and(words(capped), both(_EXPONENT)))
        powers = maximum(powers, 2.0 ** (element.emin + self.lift))
        beside = mul(powers, 2.0 ** (_DIGITS - element.mantissa_bits))
        return add(capped, beside), beside, powers

    def _codes(
        self, total: jax.Array, beside: jax.Array, powers: jax.Array, w: jax.Array
    ) -> jax.Array:
        """Codes in the low bytes of halves, from `_rounded` and the words with signs."""
        element = self.element
        digits = sub(words(total), words(beside))
        half = add(digits, down(words(powers), _DIGITS - element.mantissa_bits))
        half = bitwise_and(half, both(element.sign_code - 1))
        if element.kind == "float":
            return bitwise_or(half, down(bitwise_and(w, both(_SIGN)), 16 - element.bits))
        # Two's complement.
        negative = bitwise_and(down(w, 15), both(1))
        ones = sub(shift_left(negative, element.bits), negative)
        code = add(bitwise_xor(half, ones), negative)
        return bitwise_and(code, both((element.sign_code << 1) - 1))


# Calls --------------------------------------------------------------------------------------------

# What is compiled for if nothing tells: kernels differ between TPUs in nothing that this decides.
_KIND = "TPU v6 lite"


def call_kernel(
    kernel: Callable[..., None],
    *operands: jax.Array,
    results: Sequence[tuple[tuple[int, ...], Any]],
    interpret: bool,
    vmem: int | None = None,
    **options: Any,
) -> list[jax.Array]:
    """What a kernel computes on one TPU, below a lowering rule: in jit, shard_map, export.

    The first two dimensions of the grid may run in any order, the others in turn.

    Args:
      kernel: of references to blocks of operands and results.
      *operands: arrays.
      results: shape and dtype of each.
      interpret: whether Pallas' interpreter runs it.
      vmem: bytes of it that the kernel may use; None: as many as the compiler allows.
      **options: what else `pallas_call` takes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None and not interpret:
        # Pallas asks the mesh which TPU it is for. Only below shard_map is there one; elsewhere
        # JAX's first device would answer, which may be a CPU.
        kind = current_target().device_kind or _KIND
        device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
        mesh = (
            AbstractMesh((), (), abstract_device=device)
            if mesh.empty
            else mesh.update(abstract_device=device)
        )
    dimensions = len(options.get("grid", ()))
    order: Any = ("parallel",) * 2 + ("arbitrary",) * (dimensions - 2)
    # Below shard_map results differ between devices as operands do.
    alike = getattr(jax.typeof(operands[0]), "mat", None)
    # Kernels and the indices of their blocks have no 64-bit numbers, whatever the program has.
    with jax.enable_x64(False), jax.sharding.use_abstract_mesh(mesh):
        return pl.pallas_call(
            kernel,
            out_shape=[
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=alike)
                for shape, dtype in results
            ],
            compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=vmem),
            interpret=interpret,
            **options,
        )(*operands)
