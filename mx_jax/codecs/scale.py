"""Applying a block's shared scale, in both directions, without subnormal traps.

E8M0 scales are exponents and are added to exponents, never multiplied: 2^-127 is a subnormal
float32 that XLA on CPU flushes to zero. Float scales (NVFP4, float8) are IEEE float32 arithmetic,
step by step as their definition has it. Source: MX v1.0, section 5.4.1; torchao for NVFP4.

NVFP4 divides by its tensor scale p. Of a tiny tensor p is a subnormal, which some platforms flush,
and 1 / p may be Inf. So where p is tiny, both p and what it divides are lifted: multiplied by 2^64,
which leaves the quotients, hence codes and block scales, as they are. What is multiplied by p is
lowered again, in integers.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import element as element_codec
from mx_jax.codecs import float32
from mx_jax.codecs.explicit_axes import broadcast_like, has_explicit_axes, split_axes
from mx_jax.codecs.float32 import clip, select
from mx_jax.codecs.lowering import lowering, platform_dependent
from mx_jax.codecs.rounding import NEAREST, Rounding
from mx_jax.formats import E4M3_SCALE, BlockFormat, ElementFormat, ScaleFormat

E8M0_BIAS = 127
E8M0_NAN = 255


def true_divide(numerator: jax.Array, denominator: jax.Array | float) -> jax.Array:
    """IEEE division, wherever numbers and quotient are normal, hidden from XLA's rewrites.

    On GPUs XLA's own division may be two units off: there float64 divides, for one number a block.
    Of a TPU's nothing is promised either, and it has no float64.
    """
    denominator = jnp.asarray(denominator, jnp.float32)
    return platform_dependent(
        numerator,
        denominator,
        cuda=by_float64,
        rocm=by_float64,
        tpu=_corrected,
        default=opaque_divide,
    )


def by_float64(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Divided in float64, and rounded to float32: the same as rounded once.

    No quotient of two float32 lies within 2^-49 of the middle between two others, so a float64
    that is a few units off rounds like the exact one. Rounded while still in float64: XLA leaves
    out a conversion to float32 and back, so that a second division would read all the digits.
    """
    with jax.enable_x64(True):
        top, bottom = (lax.convert_element_type(x, jnp.float64) for x in (numerator, denominator))
        quotient = lax.reduce_precision(float32.div(top, bottom), 8, 23)
        return lax.convert_element_type(quotient, jnp.float32)


def divide_elements(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The same of every element: in integers on GPUs, many of which have little float64."""

    return platform_dependent(
        numerator, denominator, cuda=_corrected, rocm=_corrected, default=opaque_divide
    )


def _corrected(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    # Less than five units off: a barrier would make it nearer, and cut XLA's kernels in pieces.
    return nearest_quotient(numerator / denominator, numerator, denominator)


def opaque_divide(numerator: jax.Array, denominator: jax.Array | float) -> jax.Array:
    """The platform's own division, hidden from XLA's rewrites.

    XLA turns division by a scalar or constant into a product by its reciprocal, which rounds
    twice, and (a / b) / c into a / (b * c): an opaque denominator of full shape prevents the
    first, an opaque quotient the second.
    """
    denominator = jnp.asarray(denominator, jnp.float32)
    shape = jnp.broadcast_shapes(numerator.shape, denominator.shape)
    if numerator.shape != shape:
        numerator = jnp.broadcast_to(numerator, shape)
    full = broadcast_like(denominator, numerator)
    # vmap must batch the denominator with the numerator: what it left unbatched would be a
    # broadcast scalar again, behind the barrier.
    full = lax.select(lax.ne(numerator, numerator), full, full)
    return lax.optimization_barrier(numerator / lax.optimization_barrier(full))


def nearest_quotient(near: jax.Array, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The float32 nearest to a quotient, from one that is at most five units away.

    What `numerator - near * denominator` leaves is a few of the denominator's significands, so 32
    bits hold it exactly, whatever overflows on the way; it says how many units to go. No quotient
    of two float32 lies half-way between two others. Where one of the three is not normal, nothing
    changes.
    """
    top, bottom, result = (float32.float32_bits(x) for x in (numerator, denominator, near))
    (top_exponent, top_digits), (bottom_exponent, bottom_digits) = map(_parts, (top, bottom))
    apart = top_exponent - bottom_exponent + (127 + 23)
    is_normal = (top_exponent > 0) & (top_exponent < 255) & (bottom_exponent > 0)
    is_normal &= bottom_exponent < 255
    thrice, minus, minus_thrice = 3 * bottom_digits, -bottom_digits, -3 * bottom_digits
    # A step may cross a power of two, where units change: the next step goes by the new ones.
    for _ in range(3):
        exponent, digits = _parts(result)
        shift = apart - exponent
        doubled = 2 * ((top_digits << clip(shift, 0, 31)) - bottom_digits * digits)
        # Below a power of two, units are half as large.
        below = doubled << (digits == float32.HIDDEN).astype(jnp.int32)
        steps = (doubled > bottom_digits).astype(jnp.int32) + (doubled > thrice).astype(jnp.int32)
        steps -= (below < minus).astype(jnp.int32) + (below < minus_thrice).astype(jnp.int32)
        normal = is_normal & (shift > 20) & (shift < 27) & (exponent > 1) & (exponent < 254)
        result = select(normal, result + steps, result)
    return float32.from_bits(result)


def _parts(pattern: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Biased exponents and significands with their leading bit, of normal numbers."""
    exponent = (pattern & float32.ABS) >> 23
    return exponent, pattern & float32.MANTISSA | float32.HIDDEN


def scale_to_float32(scales: jax.Array, scale: ScaleFormat) -> jax.Array:
    """Float32 values of stored scales (E8M0's 2^-127 is a subnormal: do no arithmetic with it)."""
    if scale.kind == "exponent":
        exponent = lax.convert_element_type(scales, jnp.int32)
        # 2^-127 is half of the smallest normal.
        pattern = float32.max(float32.shift_left(exponent, 23), float32.HIDDEN >> 1)
        return float32.from_bits(select(float32.eq(exponent, E8M0_NAN), float32.NAN, pattern))
    if scale.element is not None:
        return element_codec.decode(scales, scale.element)
    return scales


def is_nan_scale(scales: jax.Array, scale: ScaleFormat) -> jax.Array:
    """Where the shared scale says that the whole block is NaN (MX v1.0, 5.4.1)."""
    if scale.kind == "exponent":
        return float32.eq(scales, E8M0_NAN)
    element = scale.element
    if element is not None and element.has_negative_zero and element.num_reserved_codes == 1:
        # Either sign of the one code: by itself, so that kernels need not hand it to each other.
        half = float32.bitwise_and(scales, element.sign_code - 1)
        return float32.eq(half, element.nan_code or 0)
    values = scale_to_float32(scales, scale)
    return lax.ne(values, values)


def encode_scaled(
    x: jax.Array,
    scales: jax.Array,
    format: BlockFormat,
    *,
    tensor_scale: jax.Array | None,
    rounding: Rounding,
    random_bits: jax.Array | None,
    has_nan: bool = True,
    fits: bool = False,
) -> jax.Array:
    """Codes of x over its block's scale; blocks with a NaN scale get NaN codes, or 0.

    Args:
      x: values in blocks.
      scales: as stored, of one element a block.
      format: theirs.
      tensor_scale: over all scales.
      rounding: of the quotients.
      random_bits: for stochastic rounding.
      has_nan: whether NaN may be under another scale than NaN; if not, scales are powers of two
        that a block's largest magnitude gives.
      fits: whether float scales bring the largest finite value to the element's, but for rounding.
    """
    element, is_exponent = format.element, format.scale.kind == "exponent"
    nan_code = 0 if element.nan_code is None else element.nan_code

    def elsewhere(x: jax.Array, scales: jax.Array) -> jax.Array:
        exponent: jax.Array | int = 0
        if is_exponent:
            exponent = float32.sub(lax.convert_element_type(scales, jnp.int32), E8M0_BIAS)
        else:
            x = over_float_scale(x, scales, format, tensor_scale)
        nan = broadcast_like(is_nan_scale(scales, format.scale), x)
        # Exact in eight bits: else integers would be brought from one type to another twice.
        zeroed = fits and element.kind == "int"
        if zeroed:
            x = select(nan, 0.0, x)
        codes = element_codec.encode(
            x,
            element,
            exponent=exponent,
            rounding=rounding,
            random_bits=random_bits,
            has_nan=has_nan,
            fits=fits,
        )
        return codes if zeroed else select(nan, nan_code, codes)

    if is_exponent and rounding == NEAREST and element_codec.sums_digits(element):
        on_tpus = functools.partial(_encode_on_tpus, element=element, has_nan=has_nan)
        return platform_dependent(x, scales, tpu=on_tpus, default=elsewhere)
    return elsewhere(x, scales)


def _encode_on_tpus(
    x: jax.Array, scales: jax.Array, element: ElementFormat, has_nan: bool
) -> jax.Array:
    exponent = float32.sub(E8M0_BIAS, lax.convert_element_type(scales, jnp.int32))
    # 2^127 has no inverse in float32. No amax has it for its scale if it is 4 times as large.
    count = 1 if element.emax >= 2 and not has_nan else 2
    powers, values = powers_of_two(exponent, count, scales), x
    if block_shapes.underfills_lanes(powers[0], x):
        # Else XLA would widen x once for its largest magnitudes too, and transpose it in float32.
        values = lax.optimization_barrier(block_shapes.merge_minor(x))
        powers = [block_shapes.spread_minor(p, x.shape[-1]) for p in powers]
    codes = element_codec.encode_products(values, powers, element, has_nan=has_nan)
    return split_axes(codes, x.shape, (x.ndim - 1,)) if codes.ndim < x.ndim else codes


def powers_of_two(exponent: jax.Array, count: int, scales: jax.Array) -> list[jax.Array]:
    """One or two factors, normal numbers, whose product is `2^exponent`, 0 where a scale is NaN."""
    exponents = [float32.max(exponent, -126)]
    if count == 2:
        half = float32.shift_right(exponent, 1)
        exponents = [half, float32.sub(exponent, half)]
    first, *second = map(float32.power_of_two, exponents)
    return [select(float32.eq(scales, E8M0_NAN), 0.0, first), *second]


def over_float_scale(
    values: jax.Array, scales: jax.Array, format: BlockFormat, tensor_scale: jax.Array | None
) -> jax.Array:
    """Values over their float scales in float32, which is what `encode_scaled` rounds."""
    if tensor_scale is not None:
        # x * ((1 / p) / s), in this order: NVFP4's own arithmetic, each step rounded.
        lifted = lift(tensor_scale, is_tiny(tensor_scale))
        reciprocal = _reciprocal(scales, lifted, format.scale)
        return float32.mul(lift(values, is_tiny(tensor_scale)), reciprocal)
    scale = scale_to_float32(scales, format.scale)
    # A TPU converts at once, and has no subnormals in either case.
    values = platform_dependent(
        values,
        tpu=lambda x: lax.convert_element_type(x, jnp.float32),
        default=lambda x: float32.from_bits(float32.float32_bits(x)),
    )
    if format.scale.kind == "divisor":
        return float32.mul(values, scale)
    if format.scale.kind == "multiplier":
        return divide_elements(values, scale)
    return float32.mul(values, true_divide(lax.full_like(scale, 1), scale))


def _reciprocal(scales: jax.Array, tensor_scale: jax.Array, scale: ScaleFormat) -> jax.Array:
    """`(1 / p) / s` of a tensor scale p and block scales s."""

    def divided(
        scales: jax.Array,
        tensor_scale: jax.Array,
        divide: Callable[[jax.Array, jax.Array], jax.Array] = opaque_divide,
    ) -> jax.Array:
        values = scale_to_float32(scales, scale)
        return divide(divide(jnp.ones_like(values), tensor_scale), values)

    def looked_up(scales: jax.Array, tensor_scale: jax.Array) -> jax.Array:
        every = jnp.arange(256, dtype=jnp.uint8)
        table = divided(every, tensor_scale.reshape(1), divide=by_float64)
        return table.at[scales].get(mode="promise_in_bounds")

    if tensor_scale.size != 1 or has_explicit_axes():
        return divided(scales, tensor_scale, divide=true_divide)
    # Exact divisions are long: on GPUs they are done once for each code that a scale may have, and
    # kernels hand each other codes, not float32 reciprocals.
    return platform_dependent(scales, tensor_scale, cuda=looked_up, rocm=looked_up, default=divided)


def decode_scaled(
    codes: jax.Array,
    scales: jax.Array,
    format: BlockFormat,
    tensor_scale: jax.Array | None,
    exponent: int = 0,
    lifted: bool = False,
) -> jax.Array:
    """Float32 patterns of `code value * scale`, the inverse of `encode_scaled`.

    Exact for E8M0 scales, subnormal results included; what leaves float32's range becomes Inf.

    Args:
      codes: uint8 codes with split axes.
      scales: stored scales, broadcastable to codes.
      format: the block format.
      tensor_scale: float32 scale of the whole tensor, broadcastable, or None.
      exponent: of a power of two that every value is multiplied with; E8M0 scales only.
      lifted: whether a tiny tensor scale comes lifted, and the values are to be so too.

    Returns:
      int32 patterns, shape of codes.
    """
    pattern = element_codec.decode_bits(codes, format.element)
    if format.scale.kind == "exponent":
        moved = _times_power_of_two(pattern, scales.astype(jnp.int32) - E8M0_BIAS + exponent)
        return select(broadcast_like(scales == E8M0_NAN, moved), float32.NAN, moved)
    values = float32.from_bits(pattern)
    scale = scale_to_float32(scales, format.scale)
    if tensor_scale is not None and lifted:
        scale = tensor_scale * scale
    elif tensor_scale is not None:
        small = is_tiny(tensor_scale)
        scale = lift(tensor_scale, small) * scale
        return lower(float32.float32_bits(values * scale), small)
    divides = format.scale.kind == "divisor"
    product = divide_elements(values, scale) if divides else values * scale
    return float32.float32_bits(product)


def are_normal(x: block_shapes.Blocked, exponent: int) -> jax.Array | None:
    """Whether all values are what `decode_normal` has; so are blocks of zeros, under any scale.

    None where that is not for an array: on one TPU alone all scales together decide.
    """
    here, element, scale = lowering.value, x.format.element, x.format.scale
    alone = here.platform == "tpu" and here.on_one_device
    if not alone or not all(isinstance(n, int) for n in x.codes.shape):
        return None
    lowest = element.emin - element.mantissa_bits
    if scale == E4M3_SCALE and lowest >= -17:
        no_nan = ~jnp.any(is_nan_scale(x.scales, scale))
        return no_nan if x.tensor_scale is None else no_nan & ~jnp.any(is_tiny(x.tensor_scale))
    # The first and the last under which values but zero are finite normal numbers or NaN.
    low = 1 - min(lowest, 0) - exponent
    high = 253 - max(element.emax, 0) - max(exponent, 0)
    if scale.kind != "exponent" or not 0 <= low <= high < E8M0_NAN:
        return None
    is_low = float32.lt(x.scales, low)
    none_is_low = ~jnp.any(is_low)

    def are_zeros() -> jax.Array:
        magnitude = element.sign_code * (1 if element.kind == "float" else 2) - 1
        codes, inside = block_shapes.split(float32.bitwise_and(x.codes, magnitude), x.blocks)
        return ~jnp.any(jnp.any(float32.gt(codes, 0), inside) & is_low)

    zeros_or_none = lax.cond(none_is_low, lambda: none_is_low, are_zeros)
    return zeros_or_none & ~jnp.any(float32.gt(x.scales, high))


def decode_normal(x: block_shapes.Blocked, dtype: np.dtype, exponent: int) -> jax.Array:
    """Values times `2^exponent` of an array that `are_normal`: by products, as TPUs have them."""
    scale, number, blocks = x.format.scale, jnp.float32, dict(x.blocks)
    if scale.element is not None:
        factors = element_codec.decode_as_tpus(x.scales, scale.element)
    else:
        exponents = lax.convert_element_type(x.scales, jnp.int32) + (exponent - E8M0_BIAS)
        factors = float32.power_of_two(clip(exponents, -126, 127))
        number = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    if -1 in blocks and factors.shape[-1] > 1:
        size = blocks.pop(-1)
        assert isinstance(size, int)
        spread = block_shapes.spread_minor(jnp.expand_dims(factors, -1), size)
        factors = spread[..., : x.codes.shape[-1]]
    if x.tensor_scale is not None:
        factors = x.tensor_scale * factors
    codes, inside = block_shapes.split(x.codes, tuple(blocks.items()))
    values = element_codec.decode_as_tpus(codes, x.format.element).astype(number)
    values = float32.mul(values, block_shapes.spread(factors.astype(number), inside))
    return block_shapes.merge(values, x.codes.shape, inside).astype(dtype)


def _times_power_of_two(pattern: jax.Array, exponent: jax.Array) -> jax.Array:
    """`value * 2^exponent` on patterns of element values, which are normal, zero, Inf or NaN."""
    magnitude = float32.bitwise_and(pattern, float32.ABS)
    sign = float32.bitwise_and(pattern, float32.SIGN)
    biased = float32.shift_right(magnitude, 23) + exponent
    significand = magnitude & float32.MANTISSA | float32.HIDDEN
    # At most 7 significant bits, none below 2^-143: the shift into the subnormals drops zeros.
    subnormal = float32.shift_right(significand, clip(float32.sub(1, biased), 0, 31))
    moved = magnitude + float32.shift_left(exponent, 23)
    moved = select(float32.gt(biased, 0), moved, subnormal)
    moved = select(float32.gt(biased, 254), float32.INF, moved)
    fixed = float32.bitwise_or(float32.eq(magnitude, 0), float32.ge(magnitude, float32.INF))
    return float32.bitwise_or(sign, select(fixed, magnitude, moved))


# Exponent of the power of two that lifts.
LIFT = 64
# 2^-100: above, no step of the arithmetic leaves the normal numbers.
_TINY = (127 - 100) << 23


def is_tiny(tensor_scale: jax.Array) -> jax.Array:
    """Where a tensor scale, which is positive, is below 2^-100."""
    return float32.lt(float32.float32_bits(tensor_scale), _TINY)


def lift(x: jax.Array, where: jax.Array) -> jax.Array:
    """Float32 values, times 2^64 where asked; subnormals are the numbers that they are."""

    def by_parts(values: jax.Array, where: jax.Array) -> jax.Array:
        bits = float32.float32_bits(values)
        magnitude = float32.bitwise_and(bits, float32.ABS)
        # A subnormal is its pattern times 2^-149, and integers below 2^24 convert exactly.
        number = lax.convert_element_type(magnitude, jnp.float32)
        small = float32.float32_bits(float32.mul(number, 2.0 ** (LIFT - 149)))
        small = float32.from_bits(float32.bitwise_or(small, float32.bitwise_xor(bits, magnitude)))
        is_small = float32.lt(magnitude, float32.HIDDEN)
        return jnp.where(where, select(is_small, small, float32.mul(values, 2.0**LIFT)), values)

    values = float32.from_bits(float32.float32_bits(x))
    by_product = functools.partial(_times_factor, factor=2.0**LIFT)
    return platform_dependent(values, where, cuda=by_product, rocm=by_product, default=by_parts)


def lower(bits: jax.Array, where: jax.Array) -> jax.Array:
    """Float32 patterns, divided by 2^64 where asked, rounded once where the result is subnormal."""

    def by_product(bits: jax.Array, where: jax.Array) -> jax.Array:
        return float32.float32_bits(_times_factor(float32.from_bits(bits), where, 2.0**-LIFT))

    def by_parts(bits: jax.Array, where: jax.Array) -> jax.Array:
        magnitude = float32.bitwise_and(bits, float32.ABS)
        # Beside 2^-62, which is subnormals' end times 2^64, the sum's last bit is their unit:
        # addition rounds, to nearest and ties to even, and what it adds to the pattern is the
        # result's pattern.
        beside = float32.add(float32.from_bits(magnitude), 2.0**-62)
        subnormal = float32.sub(float32.float32_bits(beside), (127 - 62) << 23)
        lowered = float32.sub(magnitude, LIFT << 23)
        lowered = select(float32.lt(magnitude, (127 - 62) << 23), subnormal, lowered)
        fixed = float32.ge(magnitude, float32.INF) | ~where
        sign = float32.bitwise_xor(bits, magnitude)
        return float32.bitwise_or(jnp.where(fixed, magnitude, lowered), sign)

    return platform_dependent(bits, where, cuda=by_product, rocm=by_product, default=by_parts)


def _times_factor(values: jax.Array, where: jax.Array, factor: float) -> jax.Array:
    """One product, where a platform has subnormals."""
    factors = (lax.full_like(where, x, values.dtype) for x in (factor, 1))
    return float32.mul(values, lax.select(where, *factors))
