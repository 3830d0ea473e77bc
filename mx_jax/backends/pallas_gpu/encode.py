"""Values to codes and scales in registers: what the quantizing kernel computes with.

Device code. A block's largest magnitude is found among patterns, whose order is that of the values;
its scale comes from the pattern's exponent, by additions and shifts. Elements are multiplied by a
power of two, which is exact, and rounded once: by the conversion instruction where the GPU has one,
else by adding a number so large that float32's own rounding drops the right bits. All of it is
plain array code, which the interpreter runs too.

Imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.pallas_gpu.device import plgpu
from mx_jax.codecs import float32
from mx_jax.codecs.scale import E8M0_NAN
from mx_jax.formats import E4M3, E5M2, BlockFormat, ElementFormat
from mx_jax.formats.element import known_element

# E8M0's largest scale, 2^127.
_LARGEST_STORED = 254
_MANTISSA_BITS = 23
# What `cvt.rn.satfinite` writes, from compute capability 8.9 on.
_CONVERTED = (E4M3, E5M2)
# Low bytes of the four halves of two words, in order.
_LOW_BYTES = 0x6420


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Two 16-bit numbers as one word, and back, where array operations know only numbers.

    GPUs work on the halves of a 32-bit register at once; in terms of arrays `[..., n]` of 16 bits
    and `[..., n / 2]` of 32 bits, lane by lane, nothing moves. Each view of a tile has a stand-in
    of the same meaning for the interpreter, which has no such thing.

    Attributes:
      shape: of the tile, in numbers.
      numbers: layout of the numbers.
      words: layout of the words, with vectors of half as many.
      interpreted: whether stand-ins are used.
    """

    shape: tuple[int, ...]
    numbers: Any
    words: Any
    interpreted: bool = False

    @property
    def words_shape(self) -> tuple[int, ...]:
        """Shape of the tile, in words."""
        return (*self.shape[:-1], self.shape[-1] // 2)

    def to_words(self, x: Any) -> Any:
        """int32 words of 16-bit numbers, the first in the low half."""
        if self.interpreted:
            return lax.bitcast_convert_type(x.reshape(*self.words_shape, 2), jnp.int32)
        return self._mosaic(_cast_words, x, self.numbers, self.words, jnp.int32)

    def to_numbers(self, words: Any, dtype: Any) -> Any:
        """16-bit numbers of int32 words."""
        if self.interpreted:
            return lax.bitcast_convert_type(words, dtype).reshape(self.shape)
        return self._mosaic(_cast_numbers, words, self.words, self.numbers, dtype)

    def to_bytes(self, words: Any) -> Any:
        """The low byte of each half of int32 words, as uint8."""
        if self.interpreted:
            return lax.bitcast_convert_type(words, jnp.uint8)[..., ::2].reshape(self.shape)
        return self._mosaic(_low_bytes, words, self.words, self.numbers, jnp.uint8)

    def _mosaic(self, change: Callable, x: Any, source: Any, target: Any, dtype: Any) -> Any:
        """Each register changed on its own."""
        shape = self.words_shape if target is self.words else self.shape
        out = plgpu.ShapeDtypeStruct(shape, dtype, layout=target)
        return plgpu.inline_mgpu(arg_types=(source,), return_type=out)(
            lambda _, array: _each_register(change, array, shape, target.to_mgpu(), dtype)
        )(x)


def _each_register(change: Callable, array: Any, shape: Any, layout: Any, dtype: Any) -> Any:
    from jax.experimental.mosaic import gpu

    mgpu: Any = gpu
    registers = np.empty(array.registers.size, dtype=object)
    for i, register in enumerate(array.registers.flat):
        registers[i] = change(register, mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
    signed = (
        jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    )
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=signed,
    )


def _cast_words(register: Any, element: Any) -> Any:
    return _recast(register, element, 1, 2)


def _cast_numbers(register: Any, element: Any) -> Any:
    return _recast(register, element, 2, 1)


def _recast(register: Any, element: Any, more: int, fewer: int) -> Any:
    """The same bits as a vector of another type."""
    from jax.experimental.mosaic import gpu
    from jaxlib.mlir import ir

    mgpu: Any = gpu
    (length,) = register.type.shape
    return mgpu.utils.bitcast(register, ir.VectorType.get((length * more // fewer,), element))


def _low_bytes(register: Any, element: Any) -> Any:
    """Two words at a time by one permutation of their bytes."""
    from jax.experimental.mosaic import gpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    mgpu: Any = gpu
    (length,), word = register.type.shape, ir.IntegerType.get_signless(32)
    halves = [
        mgpu.utils.bitcast(mgpu.utils.vector_slice(register, slice(i, i + 1)), word)
        for i in range(length)
    ]
    joined = [
        mgpu.utils.bitcast(
            llvm.inline_asm(word, [low, high], f"prmt.b32 $0, $1, $2, {_LOW_BYTES};", "=r,r,r"),
            ir.VectorType.get((4,), element),
        )
        for low, high in zip(halves[::2], halves[1::2], strict=True)
    ]
    return joined[0] if len(joined) == 1 else mgpu.utils.vector_concat(joined)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """From a tile of values to its codes and scales.

    Attributes:
      format: the block format.
      threshold: of rules for power-of-two scales: see `ScaleRule`; None for scales in an element
        format.
      smallest_scale: the smallest scale in an element format that the rule gives.
      converts: whether the GPU converts to float8.
      packed: whether the GPU compares two 16-bit integers at a time.
      interpreted: whether stand-ins replace what XLA on CPU would get wrong.
    """

    format: BlockFormat
    threshold: int | None
    smallest_scale: float = 0.0
    converts: bool = True
    packed: bool = True
    interpreted: bool = False

    def magnitudes(self, x: Any) -> Any:
        """Patterns of |x| as integers of x's width, or as int32."""
        if x.dtype == jnp.float32:
            return lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(float32.ABS)
        bits = lax.bitcast_convert_type(x, jnp.int16) & jnp.int16(0x7FFF)
        return bits if self.packed else bits.astype(jnp.int32)

    def scales(
        self, amax: Any, dtype: Any, tensor_scale: Any, divide: Callable[[Any, Any], Any]
    ) -> tuple[Any, Any]:
        """Stored scales as int32, and what `codes` multiplies by.

        Args:
          amax: the largest of each block's `magnitudes`.
          dtype: of the values.
          tensor_scale: float32 scalar, or None.
          divide: two arrays, or an array by a scalar, rounded once.
        """
        pattern = _float32_pattern(amax, dtype)
        if self.threshold is None:
            return self._element_scales(pattern, tensor_scale, divide)
        stored = power_of_two_scale(pattern, self.format.element, self.threshold)
        return stored, stored if self.interpreted else reciprocal(stored)

    def codes(
        self, x: Any, stored: Any, factor: Any, spread: Callable[[Any], Any], pairs: Pairs
    ) -> Any:
        """uint8 codes of x; blocks with a NaN or Inf get the format's NaN, or 0.

        Args:
          x: the values.
          stored: stored scales of blocks, int32.
          factor: what `scales` gave with them.
          spread: from one number a block to one an element.
          pairs: views of x's tile.
        """
        if self._in_pairs(x.dtype):
            return self._codes_in_pairs(x, stored, spread, pairs)
        element = self.format.element
        values = self._scaled(x, spread(factor))
        if self.threshold is None:
            # Where a tensor scale is so small that its reciprocal is infinite, zeros become NaN.
            values = jnp.where(values == values, values, jnp.float32(0))
        codes = self._rounded(values)
        nan = stored == self._nan_scale
        keep = jnp.where(nan, 0, 0xFF).astype(jnp.uint8)
        codes = codes & spread(keep)
        if not element.nan_code:
            return codes
        return codes | spread(jnp.where(nan, element.nan_code, 0).astype(jnp.uint8))

    @property
    def _by_conversion(self) -> bool:
        """Whether one instruction encodes."""
        return self.converts and known_element(self.format.element) in _CONVERTED

    @property
    def _nan_scale(self) -> int:
        of = self.format.scale.element
        if of is None:
            return E8M0_NAN
        assert of.nan_code is not None
        return of.nan_code

    def _in_pairs(self, dtype: Any) -> bool:
        """Whether bfloat16 arithmetic encodes two values at a time: where one alone takes long."""
        if self._by_conversion or self.format.element.kind == "int":
            return False
        return self.packed and self.threshold is not None and dtype == jnp.bfloat16

    def _codes_in_pairs(
        self, x: Any, stored: Any, spread: Callable[[Any], Any], pairs: Pairs
    ) -> Any:
        """The same in words of two bfloat16: `halves` in its smaller arithmetic.

        Each half of a word stays within its 16 bits: sums of words are pairs of sums.
        """
        element = self.format.element
        words = pairs.to_words(x)
        magnitude = pairs.to_numbers(words & _both(0x7FFF), jnp.bfloat16)
        if self.interpreted:
            scaled = over_power_of_two(magnitude, spread(stored)).astype(jnp.bfloat16)
        else:
            scaled = magnitude * spread(reciprocal(stored, jnp.bfloat16))
        scaled = jnp.minimum(scaled, jnp.bfloat16(element.max))
        dropped, smallest = 7 - element.mantissa_bits, (127 + element.emin) << 7
        top = lax.bitcast_convert_type(scaled, jnp.int16) & jnp.int16(0x7F80)
        top = pairs.to_words(jnp.maximum(top, jnp.int16(smallest)))
        large = top + _both(dropped << 7)
        sums = pairs.to_words(scaled + pairs.to_numbers(large, jnp.bfloat16))
        half = (sums - large) + (_shifted(top, dropped) - _both(smallest >> dropped))
        nan = stored == self._nan_scale
        code = half | _shifted(words, 16 - element.bits) & _both(element.sign_code)
        code = code & pairs.to_words(spread(jnp.where(nan, 0, -1).astype(jnp.int16)))
        if element.nan_code:
            fill = jnp.where(nan, element.nan_code, 0).astype(jnp.int16)
            code = code | pairs.to_words(spread(fill))
        return pairs.to_bytes(code)

    def _scaled(self, x: Any, factor: Any) -> Any:
        """x over its scale, in float32."""
        if self.threshold is None or not self.interpreted:
            return x.astype(jnp.float32) * factor
        # XLA on CPU flushes subnormals: exponents there are added, not multiplied.
        return over_power_of_two(x, factor)

    def _rounded(self, values: Any) -> Any:
        """uint8 codes, of blocks that hold no NaN."""
        element = self.format.element
        if element.kind == "int":
            return _integers(values, element)
        if self._by_conversion:
            if self.interpreted:
                # XLA's conversion does not saturate.
                values = jnp.clip(values, -element.max, element.max)
            return lax.bitcast_convert_type(values.astype(element.dtype), jnp.uint8)
        signs = lax.bitcast_convert_type(values, jnp.int32)
        signs = lax.shift_right_logical(signs, jnp.full_like(signs, 32 - element.bits))
        return (halves(values, element) | signs & element.sign_code).astype(jnp.uint8)

    def _element_scales(
        self, pattern: Any, tensor_scale: Any, divide: Callable[[Any, Any], Any]
    ) -> tuple[Any, Any]:
        """Scales in an element format, by NVFP4's own arithmetic: each step rounds in float32."""
        of = self.format.scale.element
        assert of is not None
        finite = pattern < float32.INF
        amax = lax.bitcast_convert_type(jnp.where(finite, pattern, 0), jnp.float32)
        scale = divide(amax, jnp.float32(self.format.element.max))
        if tensor_scale is not None:
            scale = divide(scale, tensor_scale)
        known = finite & (scale == scale)
        scale = jnp.minimum(jnp.maximum(scale, self.smallest_scale), of.max)
        stored = jnp.where(known, halves(scale, of), self._nan_scale)
        rounded = _decoded(stored, of)
        factor = jnp.ones_like(amax)
        if tensor_scale is not None:
            factor = divide(factor, tensor_scale)
        return stored, divide(factor, rounded)


def _both(half: int) -> Any:
    """The same 16 bits in both halves of an int32."""
    return jnp.int32(np.uint32(half * 0x10001).astype(np.int32))


def _shifted(words: Any, right: int) -> Any:
    return lax.shift_right_logical(words, jnp.full_like(words, right)) if right else words


def power_of_two_scale(pattern: Any, element: ElementFormat, threshold: int) -> Any:
    """E8M0 bytes, as int32, of float32 patterns of largest magnitudes.

    `E - emax`, plus one where the mantissa reaches the threshold: adding what is missing to the
    next power of two carries into the exponent. Only one octave of subnormals can matter, to
    elements whose largest exponent is 0; doubling makes it normal.
    """
    missing = (1 << _MANTISSA_BITS) - threshold
    subnormal = pattern < float32.HIDDEN
    normal = jnp.where(subnormal, pattern + pattern, pattern) + missing
    exponent = (normal >> _MANTISSA_BITS) - jnp.where(subnormal, 1, 0) - element.emax
    stored = jnp.minimum(jnp.maximum(exponent, 0), _LARGEST_STORED)
    return jnp.where(pattern >= float32.INF, E8M0_NAN, stored)


def reciprocal(stored: Any, dtype: Any = jnp.float32) -> Any:
    """One over an E8M0 scale, in float32 or bfloat16: 2^-127 is a subnormal, but a number."""
    mantissa_bits, width = (23, jnp.int32) if dtype == jnp.float32 else (7, jnp.int16)
    exponent = jnp.maximum(_LARGEST_STORED - stored, 0) << mantissa_bits
    pattern = jnp.maximum(exponent, 1 << mantissa_bits - 1)
    return lax.bitcast_convert_type(pattern.astype(width), dtype)


def over_power_of_two(x: Any, stored: Any) -> Any:
    """x over E8M0 scales in float32, without a multiplication; below 2^-126 it is a zero."""
    bits = float32.to_bits(x)
    magnitude = bits & float32.ABS
    biased, mantissa = float32.normalize(magnitude)
    exponent = biased + 127 - stored
    pattern = jnp.where(exponent > 0, exponent << _MANTISSA_BITS | mantissa, 0)
    pattern = jnp.where(magnitude == 0, 0, pattern)
    return lax.bitcast_convert_type(pattern | bits & jnp.int32(float32.SIGN), jnp.float32)


def halves(values: Any, element: ElementFormat) -> Any:
    """Codes of |values| as int32, rounded to nearest even and saturated; NaN becomes some code.

    With E the exponent, or emin if that is larger, |value| + 2^(E + 23 - mantissa_bits) is rounded
    where the element ends. What the sum's pattern has grown by is the significand; the code is that
    plus the exponent's offset.
    """
    dropped = _MANTISSA_BITS - element.mantissa_bits
    magnitude = jnp.minimum(jnp.abs(values), jnp.float32(element.max))
    smallest = (127 + element.emin) << _MANTISSA_BITS
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    top = jnp.maximum(bits & jnp.int32(float32.INF), smallest)
    large = top + (dropped << _MANTISSA_BITS)
    sums = magnitude + lax.bitcast_convert_type(large, jnp.float32)
    significand = lax.bitcast_convert_type(sums, jnp.int32) - large
    return significand + ((top - smallest) >> dropped)


def _integers(values: Any, element: ElementFormat) -> Any:
    """Two's complement codes: the low bits of a sum whose last place is the element's quantum."""
    quantum = element.smallest_subnormal
    lowest = -(element.max + quantum * element.negative_extra)
    kept = jnp.minimum(jnp.maximum(values, jnp.float32(lowest)), jnp.float32(element.max))
    sums = kept + jnp.float32(1.5 * 2.0**_MANTISSA_BITS * quantum)
    return lax.bitcast_convert_type(sums, jnp.int32).astype(jnp.uint8)


def _decoded(codes: Any, element: ElementFormat) -> Any:
    """Values of non-negative codes; the NaN code becomes NaN."""
    smallest = element.smallest_subnormal
    rebias = (127 - element.bias) << element.mantissa_bits
    normal = (codes + rebias) << (_MANTISSA_BITS - element.mantissa_bits)
    subnormal = lax.bitcast_convert_type(codes.astype(jnp.float32) * smallest, jnp.int32)
    pattern = jnp.where(codes < (1 << element.mantissa_bits), subnormal, normal)
    pattern = jnp.where(codes == element.nan_code, float32.NAN, pattern)
    return lax.bitcast_convert_type(pattern, jnp.float32)


def _float32_pattern(amax: Any, dtype: Any) -> Any:
    """Patterns of float32 from those of `dtype`, none negative."""
    if dtype == jnp.float32:
        return amax
    if dtype == jnp.bfloat16:
        return amax.astype(jnp.int32) << 16
    values = lax.bitcast_convert_type(amax.astype(jnp.int16), jnp.float16)
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
