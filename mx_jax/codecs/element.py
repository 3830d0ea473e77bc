"""Codes of an element format and the values they stand for, bit for bit.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 (element formats) and 6.3 (conversion).
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import float32
from mx_jax.codecs.explicit_axes import broadcast_like
from mx_jax.codecs.lowering import lowering, platform_dependent
from mx_jax.codecs.rounding import NEAREST, Rounding
from mx_jax.formats import E4M3, E5M2, ElementFormat
from mx_jax.formats.element import known_element

# Eight-bit types that GPUs convert in one instruction. Spelled out in integers, decoding these two
# is so long that XLA makes two kernels of dequantizing, with an int32 of every element between. On
# CPUs XLA's conversion is the slower one, by half.
_CONVERTED = (E4M3, E5M2)
# Of scales up to 2^64 or down to its inverse no float32 subnormal rounds to a code but zero.
_NEAR = 64


def encode(
    x: jax.Array,
    element: ElementFormat,
    *,
    exponent: jax.Array | int = 0,
    rounding: Rounding = NEAREST,
    random_bits: jax.Array | None = None,
    saturate: bool = True,
    has_nan: bool = True,
    fits: bool = False,
) -> jax.Array:
    """Codes of `x / 2^exponent`, rounded once from the exact quotient.

    With E the exponent of x, the quotient's exponent is `max(E - exponent, emin)`, the significand
    keeps `mantissa_bits` below it, and the code is the rounded significand plus the exponent's
    offset: a rounding carry flows into the exponent field by itself.

    Args:
      x: float32, bfloat16 or float16, any shape.
      element: the element format.
      exponent: unbiased power of two to divide by, int32, broadcastable to x.
      rounding: how the dropped bits decide.
      random_bits: int32 in `[0, 2^rounding.random_bits)`, shape of x; stochastic rounding only.
      saturate: whether finite overflow and Inf become the largest finite value (MX v1.0, 6.3);
        otherwise they become Inf, or NaN where there is no Inf.
      has_nan: whether x may have NaN whose codes matter; else they are any.
      fits: whether x is a float32 product that is beyond the largest value by no more than its own
        rounding, or NaN whose codes do not matter.

    Returns:
      uint8 codes, one a byte, shape of x. NaN becomes the format's NaN with x's sign, or 0 where
      the format has no NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mx_jax.codecs.element import encode
      >>> from mx_jax.formats import E2M1
      >>> encode(jnp.array([0.25, 0.75, -5.0, 1e9]), E2M1)
      Array([ 0,  2, 14,  7], dtype=uint8)
    """
    near = isinstance(exponent, int) and abs(exponent) < _NEAR
    plain = rounding == NEAREST and saturate and near and not exponent
    if lowering.value.converts_float8 and plain and known_element(element) in _CONVERTED:
        return _converted(x, element, has_nan)
    bits = float32.float32_bits(x)
    magnitude = float32.bitwise_and(bits, float32.ABS)
    if rounding == NEAREST and near and element.kind == "int":
        return _fixed_point(bits, element, int(exponent), has_nan and not fits, fits)
    if rounding != NEAREST:
        half = _rounded(magnitude, exponent, element, rounding, random_bits)
        half = _limit(half, bits, element, saturate)
    elif near:
        half = _rounded_near(magnitude, bits, int(exponent), element, saturate)
    else:
        by_product = functools.partial(_rounded_quotient, element=element, saturate=saturate)

        def in_integers(magnitude: jax.Array, bits: jax.Array, exponent: jax.Array) -> jax.Array:
            half = _rounded(magnitude, exponent, element, rounding)
            return _limit(half, bits, element, saturate)

        half = platform_dependent(
            magnitude,
            bits,
            jnp.asarray(exponent, jnp.int32),
            cuda=by_product,
            rocm=by_product,
            default=in_integers,
        )
    code = _with_sign(half, bits, magnitude if has_nan else None, element)
    return lax.convert_element_type(code, jnp.uint8)


def _converted(x: jax.Array, element: ElementFormat, has_nan: bool) -> jax.Array:
    """By a device's own conversion, of signed numbers."""
    x, limit = x.astype(jnp.float32), np.float32(element.max)
    native = lax.convert_element_type(lax.clamp(-limit, x, limit), element.dtype)
    code = lax.bitcast_convert_type(native, jnp.uint8)
    if not has_nan:
        return code
    sign = float32.bitwise_and(float32.shift_right(float32.float32_bits(x), 24), element.sign_code)
    nan = lax.convert_element_type(float32.bitwise_or(sign, element.nan_code or 0), jnp.uint8)
    return float32.select(lax.ne(x, x), nan, code)


def encode_products(
    x: jax.Array, factors: Sequence[jax.Array], element: ElementFormat, *, has_nan: bool
) -> jax.Array:
    """Codes of x times powers of two, saturated, rounded once: exact where TPUs flush subnormals.

    Args:
      x: as `encode`.
      factors: one or two, float32, normal numbers, broadcastable to x. Two are the parts of one
        that float32 may not hold. Where the first is 0, the block is NaN.
      element: one of `sums_digits`.
      has_nan: as `encode`.
    """
    bits = float32.widened_bits(x)
    magnitude = float32.bitwise_and(bits, float32.ABS)
    product = float32.from_bits(magnitude)
    # A pattern, as an integer and times 2^-149, is its number up to twice the smallest normal one,
    # and less beyond: so the larger of the two is right whether a subnormal counts as zero or not.
    linear = lax.convert_element_type(magnitude, jnp.float32)
    for factor, unit in zip(factors, (149,) if len(factors) == 1 else (75, 74), strict=True):
        product = float32.mul(product, factor)
        # In integers: 2^-149 is a subnormal, and so would be what XLA makes of two constants.
        lowered = float32.max(float32.sub(float32.float32_bits(factor), unit << 23), 0)
        linear = float32.mul(linear, float32.from_bits(lowered))
    half = _sum_of_digits(float32.max(product, linear), bits, element, saturate=True)
    code = _with_sign(half, bits, magnitude if has_nan else None, element)
    is_nan = float32.eq(broadcast_like(factors[0], code), 0.0)
    code = float32.select(is_nan, element.nan_code or 0, code)
    return lax.convert_element_type(code, jnp.uint8)


def sums_digits(element: ElementFormat) -> bool:
    """Whether `encode_products` takes an element: one whose codes' last digits are a mantissa's."""
    return element.mantissa_bits > 0


def _sum_of_digits(
    value: jax.Array, bits: jax.Array, element: ElementFormat, saturate: bool
) -> jax.Array:
    """As `by_addition` below, in fewer of a TPU's instructions: eight digits and whatever above."""
    shift, lowest = 23 - element.mantissa_bits, 127 + element.emin
    at_most_max = saturate and not element.negative_extra
    most = element.max if at_most_max else 2.0 ** (element.emax + 1)
    # Unsigned integers are compared in one instruction, signed ones in two; NaN is large.
    most = np.float32(most).view(np.uint32)
    capped = float32.min(lax.bitcast_convert_type(value, jnp.uint32), most)
    value = lax.bitcast_convert_type(capped, jnp.float32)
    if element.kind == "int":
        # Fixed point: one digit is the last of all.
        total = float32.float32_bits(float32.add(value, 2.0 ** (element.emin + shift)))
        half = float32.bitwise_and(total, 0xFF)
        return half if at_most_max else _limit(half, bits, element, saturate)
    field = float32.max(float32.bitwise_and(capped, float32.INF), np.uint32(lowest << 23))
    field = lax.bitcast_convert_type(field, jnp.int32)
    # An even number leaves the sum's last digit, which says what is even.
    offset = -(lowest << element.mantissa_bits) & 0xFF
    beside = float32.from_bits(float32.add(field, (shift << 23) + offset))
    total = float32.float32_bits(float32.add(value, beside))
    half = float32.add(total, float32.shift_right(field, shift))
    if at_most_max and element.has_negative_zero:
        return half
    half = float32.bitwise_and(half, 0xFF)
    return half if at_most_max else _limit(half, bits, element, saturate)


def _fixed_point(
    bits: jax.Array, element: ElementFormat, exponent: int, has_nan: bool, fits: bool
) -> jax.Array:
    """Codes of two's complement: float32's own addition rounds, and has them in its last bits."""
    x = float32.from_bits(bits)
    if fits:
        # Rounded by itself: TPUs, up to tpu7x, have no instruction that multiplies and adds.
        x = platform_dependent(x, tpu=lambda x: x, default=float32.rounded)
    else:
        least = element.value(element.sign_code + 1 - element.negative_extra)
        low, high = (math.ldexp(value, exponent) for value in (least, element.max))
        x = lax.clamp(np.float32(low), x, np.float32(high))
    # Half of its power of two to spare, which negative numbers take.
    beside = math.ldexp(1.5, 23 + exponent + element.emin - element.mantissa_bits)
    codes = float32.float32_bits(float32.add(x, beside))
    if has_nan:
        nan = float32.gt(float32.bitwise_and(bits, float32.ABS), float32.INF)
        codes = float32.select(nan, 0, codes)
    if element.bits < 8:
        codes = float32.bitwise_and(codes, (1 << element.bits) - 1)
    # By way of the type that a product takes, which then reads the first of two conversions.
    codes = lax.convert_element_type(codes, jnp.int8)
    return lax.bitcast_convert_type(codes, jnp.uint8)


def _rounded(
    magnitude: jax.Array,
    exponent: jax.Array | int,
    element: ElementFormat,
    rounding: Rounding,
    random_bits: jax.Array | None = None,
) -> jax.Array:
    """Codes of the non-negative half, in integers, without a limit."""
    biased, mantissa = float32.split_exponent_mantissa(magnitude)
    # Unbiased exponent of the quotient above the smallest normal's; negative means subnormal.
    above = biased - (exponent + (127 + element.emin))
    fewest = 23 - element.mantissa_bits
    shift = float32.max(float32.sub(fewest, above), fewest)
    # The leading bit, but for zero.
    significand = float32.bitwise_or(mantissa, float32.shift_left(float32.min(magnitude, 1), 23))
    kept = rounding.apply(significand, shift, random_bits)
    carry = float32.shift_left(float32.clip(above, 0, 1 << 9), element.mantissa_bits)
    return float32.add(kept, carry)


def _rounded_quotient(
    magnitude: jax.Array,
    bits: jax.Array,
    exponent: jax.Array,
    element: ElementFormat,
    saturate: bool,
) -> jax.Array:
    """Codes of the half of a quotient, by a product: exact where a platform has subnormals."""
    # 2^-127, for the largest scale, is half of the smallest normal.
    pattern = float32.max(float32.shift_left(float32.sub(127, exponent), 23), float32.HIDDEN >> 1)
    quotient = float32.mul(float32.from_bits(magnitude), float32.from_bits(pattern))
    return _rounded_near(float32.float32_bits(quotient), bits, 0, element, saturate)


def _rounded_near(
    magnitude: jax.Array, bits: jax.Array, exponent: int, element: ElementFormat, saturate: bool
) -> jax.Array:
    """The same under a small exponent: where GPUs have an instruction for it, by that."""

    def by_addition(magnitude: jax.Array) -> jax.Array:
        # Half of the operations, since float32's own addition rounds. Beside `2^(23 - p)` times a
        # number's power of two its p-th mantissa bit is the last. A subnormal is far below half of
        # the smallest code: it may be flushed.
        shift = 23 - element.mantissa_bits
        lowest = 127 + element.emin + exponent
        top = (127 + element.emax + exponent) << 23
        at_most_max = saturate and not element.negative_extra
        # What overflows does so at the next power of two.
        most = top + (element.max_mantissa << shift if at_most_max else 1 << 23)
        capped = float32.min(magnitude, most)
        field = float32.max(float32.bitwise_and(capped, float32.INF), lowest << 23)
        beside = float32.from_bits(float32.add(field, shift << 23))
        total = float32.float32_bits(float32.add(float32.from_bits(capped), beside))
        # The sum's digits beside those of `beside`, and the exponent's steps.
        digits = float32.add(float32.sub(total, field), float32.shift_right(field, shift))
        half = float32.sub(digits, (shift << 23) + (lowest << element.mantissa_bits))
        return half if at_most_max else _limit(half, bits, element, saturate)

    def by_conversion(magnitude: jax.Array) -> jax.Array:
        # Unsigned, so that LLVM sees that nothing overflows, and leaves out what would then be NaN.
        most = np.float32(element.max).view(np.uint32)
        capped = float32.min(lax.convert_element_type(magnitude, jnp.uint32), most)
        value = lax.bitcast_convert_type(capped, jnp.float32)
        half = lax.bitcast_convert_type(lax.convert_element_type(value, element.dtype), jnp.uint8)
        return lax.convert_element_type(half, jnp.int32)

    def by_digits(magnitude: jax.Array) -> jax.Array:
        return _sum_of_digits(float32.from_bits(magnitude), bits, element, saturate)

    named: dict[str, Callable[[jax.Array], jax.Array]] = {}
    if not exponent and sums_digits(element):
        named["tpu"] = by_digits
    if not exponent and saturate and known_element(element) in _CONVERTED:
        named |= {"cuda": by_conversion, "rocm": by_conversion}
    return platform_dependent(magnitude, default=by_addition, **named)


def _limit(half: jax.Array, bits: jax.Array, element: ElementFormat, saturate: bool) -> jax.Array:
    """Keep codes of the non-negative half in range."""
    if not saturate and element.overflow_code != element.max_code:
        return float32.select(float32.gt(half, element.max_code), element.overflow_code, half)
    # Two's complement reaches one step further down than up; only INT8_FULL goes there.
    if element.negative_extra:
        negative = lax.convert_element_type(float32.lt(bits, 0), jnp.int32)
        return float32.min(half, float32.add(negative, element.max_code))
    return float32.min(half, element.max_code)


def _with_sign(
    half: jax.Array, bits: jax.Array, magnitude: jax.Array | None, element: ElementFormat
) -> jax.Array:
    """Whole codes, int32, from the half's codes and x's patterns; NaN gets its code here, unless x
    has no magnitude, and so none."""
    nan = None if magnitude is None else float32.gt(magnitude, float32.INF)
    half = half if nan is None else float32.select(nan, element.nan_code or 0, half)
    is_float = element.kind == "float"
    if is_float and element.has_negative_zero and (nan is None or element.nan_code is not None):
        sign = float32.bitwise_and(float32.shift_right(bits, 31), element.sign_code)
        return float32.bitwise_or(half, sign)
    # fnuz: the sign bit alone is NaN, so neither zero nor NaN takes a sign.
    fnuz = is_float and not element.has_negative_zero
    negative = float32.lt(bits, 0)
    if fnuz:
        negative = float32.bitwise_and(negative, float32.gt(half, 0))
    elif nan is not None:
        negative = float32.bitwise_and(negative, lax.bitwise_not(nan))
    if not is_float:
        code = float32.select(negative, lax.neg(half), half)
        return float32.bitwise_and(code, (element.sign_code << 1) - 1)
    return float32.select(negative, float32.bitwise_or(half, element.sign_code), half)


def decode_as_tpus(codes: jax.Array, element: ElementFormat) -> jax.Array:
    """As `decode`, in float32, for TPUs: NaN has any of its patterns."""
    if known_element(element) in _CONVERTED:
        native = lax.bitcast_convert_type(codes, element.dtype)
        return lax.convert_element_type(native, jnp.float32)
    return decode(codes, element)


def decode_bits(codes: jax.Array, element: ElementFormat) -> jax.Array:
    """Float32 patterns of the values of uint8 codes; every element value is a normal or zero."""
    in_integers = functools.partial(_decode_in_integers, element=element)

    def by_conversion(codes: jax.Array) -> jax.Array:
        native = lax.bitcast_convert_type(codes.astype(jnp.uint8), element.dtype)
        pattern = float32.float32_bits(native)
        nan = float32.gt(float32.bitwise_and(pattern, float32.ABS), float32.INF)
        return float32.select(nan, float32.NAN, pattern)

    def by_product(codes: jax.Array) -> jax.Array:
        # The code's fields in float32's places, times a power of two: GPUs have subnormals.
        wide = lax.convert_element_type(codes, jnp.int32)
        sign = float32.bitwise_and(wide, element.sign_code)
        half = float32.bitwise_and(wide, element.sign_code - 1)
        fields = float32.shift_left(half, 23 - element.mantissa_bits)
        fields = float32.bitwise_or(fields, float32.shift_left(sign, 32 - element.bits))
        return float32.float32_bits(
            float32.mul(float32.from_bits(fields), 2.0 ** (127 - element.bias))
        )

    def by_minimum(codes: jax.Array) -> jax.Array:
        # All are normal numbers. What reads as `(1 + m) 2^(emin - 1)` is `m 2^emin` if its exponent
        # field is 0: twice that less 2^emin, which is larger than any other code's value.
        wide = float32.shift_left(lax.convert_element_type(codes, jnp.int32), 32 - element.bits)
        sign = float32.bitwise_and(wide, float32.SIGN)
        fields = float32.shift_right(float32.bitwise_xor(wide, sign), 8 - element.exponent_bits)
        read = float32.from_bits(float32.add(fields, (126 + element.emin) << 23))
        doubled = float32.sub(float32.add(read, read), 2.0**element.emin)
        pattern = float32.float32_bits(float32.min(read, doubled))
        return float32.bitwise_or(pattern, sign)

    def of_integers(codes: jax.Array) -> jax.Array:
        wide = float32.shift_left(lax.convert_element_type(codes, jnp.int32), 32 - element.bits)
        unit = 2.0 ** (element.bits - 32 + element.emin - element.mantissa_bits)
        return float32.float32_bits(float32.mul(lax.convert_element_type(wide, jnp.float32), unit))

    if known_element(element) in _CONVERTED:
        return platform_dependent(codes, cpu=in_integers, default=by_conversion)
    if element.kind == "int":
        return platform_dependent(codes, tpu=of_integers, default=in_integers)
    is_plain = not element.num_reserved_codes and element.has_negative_zero
    # With what is multiplied by a normal number: that of an element of bias 0 to 253.
    if not is_plain or not 0 <= element.bias <= 253:
        return in_integers(codes)
    on_gpu = {"cuda": by_product, "rocm": by_product}
    return platform_dependent(codes, **on_gpu, tpu=by_minimum, default=in_integers)


def _decode_in_integers(codes: jax.Array, element: ElementFormat) -> jax.Array:
    codes = lax.convert_element_type(codes, jnp.int32)
    codes = float32.bitwise_and(codes, (element.sign_code << 1) - 1)
    negative = float32.ge(codes, element.sign_code)
    sign = float32.shift_left(lax.convert_element_type(negative, jnp.int32), 31)

    def multiple(half: jax.Array) -> jax.Array:
        # `half * smallest_subnormal`: an exact integer, its exponent moved.
        pattern = float32.float32_bits(lax.convert_element_type(half, jnp.float32))
        moved = float32.add(pattern, (element.emin - element.mantissa_bits) << 23)
        return float32.select(float32.eq(half, 0), 0, moved)

    if element.kind == "int":
        half = float32.select(negative, float32.sub(2 * element.sign_code, codes), codes)
        return float32.bitwise_or(multiple(half), sign)
    half = float32.bitwise_and(codes, element.sign_code - 1)
    p, rebias = element.mantissa_bits, 127 - element.bias
    normal = float32.add(float32.shift_left(half, 23 - p), rebias << 23)
    subnormal = multiple(float32.bitwise_and(half, (1 << p) - 1))
    pattern = float32.select(float32.lt(half, 1 << p), subnormal, normal)
    pattern = float32.bitwise_or(pattern, sign)
    # NaN and Inf, where the format reserves codes for them.
    if not element.has_negative_zero:
        return float32.select(float32.eq(codes, element.sign_code), float32.NAN, pattern)
    if not element.num_reserved_codes:
        return pattern
    special = float32.select(float32.gt(half, element.max_code), float32.NAN, pattern)
    if element.inf_code is None:
        return special
    infinity = float32.bitwise_or(sign, float32.INF)
    return float32.select(float32.eq(half, element.inf_code), infinity, special)


def decode(
    codes: jax.Array, element: ElementFormat, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Values of uint8 codes; exact in float32 and bfloat16.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mx_jax.codecs.element import decode
      >>> from mx_jax.formats import INT8
      >>> decode(jnp.array([1, 127, 128], jnp.uint8), INT8)
      Array([ 0.015625,  1.984375, -2.      ], dtype=float32)
    """
    return float32.from_bits(decode_bits(codes, element), dtype)
