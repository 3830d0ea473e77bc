"""How scales are chosen: functions from a block's data to its stored scale.

Power-of-two rules differ in one number. With amax = (1 + m / 2^23) * 2^E, the unbiased scale
exponent is `E - emax`, plus one if `m >= threshold(element)`. Source: OCP MX v1.0, section 6.3
(FLOOR); the others as torchao names them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mx_jax.codecs import element as element_codec
from mx_jax.codecs import float32, tiny
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import (
    E8M0_BIAS,
    E8M0_NAN,
    decode_scaled,
    encode_scaled,
    exponent_to_e8m0,
    true_divide,
)
from mx_jax.formats import BlockFormat, ElementFormat, ScaleFormat


class BlockData(NamedTuple):
    """What a rule may look at.

    Attributes:
      values: the tensor with split axes.
      inside: axes of `values` that run inside blocks.
      amax: int32 patterns of the largest magnitude of each block; axes inside blocks have length 1.
      format: the block format to be filled.
      tensor_scale: float32, broadcastable to amax, or None.
    """

    values: jax.Array
    inside: tuple[int, ...]
    amax: jax.Array
    format: BlockFormat
    tensor_scale: jax.Array | None


@dataclasses.dataclass(frozen=True)
class PowerOfTwo:
    """`2^(E - emax)`, one exponent more from a threshold of amax's mantissa on. Equal by value.

    Attributes:
      threshold: the 23-bit mantissa from which the exponent goes up by one, given the element.
    """

    threshold: Callable[[ElementFormat], int]

    def __call__(self, data: BlockData) -> jax.Array:
        element, amax = data.format.element, data.amax
        if element.emax < 1:
            biased, mantissa = float32.normalize(amax)
            amax = (biased << 23) + mantissa
        # Elsewhere a subnormal amax has the smallest scale, whatever its exponent. From the
        # threshold on, what is added carries into the exponent.
        carry = (1 << 23) - min(self.threshold(element), 1 << 23)
        biased = (amax + carry >> 23) - element.emax
        stored = jnp.clip(biased, 0, 2 * E8M0_BIAS).astype(jnp.uint8)
        return jnp.where(data.amax >= float32.INF, jnp.uint8(E8M0_NAN), stored)


@dataclasses.dataclass(frozen=True)
class FromAmax:
    """A function of a block's amax and of nothing else: `data.values` is None there.

    Attributes:
      function: as `ScaleRule.scales`.
    """

    function: Callable[[BlockData], jax.Array]

    def __call__(self, data: BlockData) -> jax.Array:
        unseen: Any = None
        return self.function(data._replace(values=unseen))


def never(element: ElementFormat) -> int:
    """FLOOR's threshold: past every mantissa."""
    return 1 << 23


def above_power_of_two(element: ElementFormat) -> int:
    """CEIL's threshold."""
    return 1


def rounds_up(element: ElementFormat) -> int:
    """EVEN's threshold."""
    # Rounding to p mantissa bits, ties away, carries into the exponent from 1.11..1|1 upward.
    return (1 << 23) - (1 << (22 - element.mantissa_bits))


def above_max(element: ElementFormat) -> int:
    """RCEIL's threshold."""
    # amax <= max * 2^k compares mantissas once the exponents agree.
    return (element.max_mantissa << (23 - element.mantissa_bits)) + 1


def gaussian(data: BlockData) -> jax.Array:
    """A power of two from the standard deviation."""
    # 2.92247856 standard deviations at E2M1's 6 lose least of a normal distribution.
    values = data.values.astype(jnp.float32)
    mean = jnp.mean(values, axis=data.inside, keepdims=True)
    variance = jnp.mean(jnp.square(values - mean), axis=data.inside, keepdims=True)
    spread = jnp.sqrt(variance) * (2.92247856 / data.format.element.max) + 1e-8
    biased = float32.to_bits(spread) >> 23
    stored = exponent_to_e8m0(biased - 127)
    return jnp.where(data.amax >= float32.INF, jnp.uint8(E8M0_NAN), stored)


def _scale_element(scale: ScaleFormat) -> ElementFormat:
    assert scale.element is not None, scale
    return scale.element


def _element_scale(data: BlockData, target: float, smallest: float) -> jax.Array:
    """Codes of `amax / target` over the tensor scale, clipped; NaN where amax is not finite."""
    of = _scale_element(data.format.scale)
    finite = data.amax < float32.INF
    largest = float32.from_bits(jnp.where(finite, data.amax, 0))
    if data.tensor_scale is None:
        scale = true_divide(largest, target)
    else:
        small = tiny.is_tiny(data.tensor_scale)
        scale = true_divide(tiny.lift(largest, small), target)
        scale = true_divide(scale, tiny.lift(data.tensor_scale, small))
    codes = element_codec.encode(jnp.clip(scale, smallest, of.max), of)
    return jnp.where(finite, codes, jnp.uint8(of.nan_code or 0))


def amax(data: BlockData) -> jax.Array:
    """`amax / max`, at least the smallest normal scale."""
    smallest = _scale_element(data.format.scale).smallest_normal
    return _element_scale(data, data.format.element.max, smallest)


def amax_subnormal(data: BlockData) -> jax.Array:
    """`amax / max`, at least the smallest subnormal scale."""
    smallest = _scale_element(data.format.scale).smallest_subnormal
    return _element_scale(data, data.format.element.max, smallest)


@dataclasses.dataclass(frozen=True)
class AmaxBecomes:
    """`amax / largest`, at least the smallest subnormal scale. Equal by value.

    Attributes:
      largest: what the block's largest magnitude becomes over an exact scale.
    """

    largest: float

    def __call__(self, data: BlockData) -> jax.Array:
        smallest = _scale_element(data.format.scale).smallest_subnormal
        return _element_scale(data, self.largest, smallest)


def four_over_six(data: BlockData) -> jax.Array:
    """`amax / 6` or `amax / 4`, whichever loses less."""
    candidates = [AmaxBecomes(target)(data) for target in (6.0, 4.0)]
    six, four = (squared_error(data, scales) for scales in candidates)
    return jnp.where(four < six, candidates[1], candidates[0])


def squared_error(
    data: BlockData,
    scales: jax.Array,
    importance: jax.Array | None = None,
    unit: jax.Array | None = None,
) -> jax.Array:
    """What scales would lose: over each block, the sum of `(decoded - x)^2`, rounded to nearest.

    Args:
      data: the blocks; their values are read.
      scales: stored scales, of amax's shape.
      importance: what each square counts, of the values' shape; default: 1.
      unit: powers of two, of amax's shape, by which differences are divided before they are
        squared, so that none leaves float32's range; default: 1.

    Returns:
      float32, of amax's shape; a float sum, whose last bits depend on the order.
    """
    codes = encode_scaled(
        data.values,
        scales,
        data.format,
        tensor_scale=data.tensor_scale,
        rounding=NEAREST,
        random_bits=None,
    )
    values = float32.from_bits(decode_scaled(codes, scales, data.format, data.tensor_scale))
    difference = values - data.values.astype(jnp.float32)
    lost = jnp.square(difference if unit is None else difference / unit)
    if importance is not None:
        lost = lost * importance
    return jnp.sum(lost, axis=data.inside, keepdims=True)


# torchao's guard against division by zero: amax below it counts as it.
FLOAT8_EPSILON = 1e-12


def divisor(data: BlockData) -> jax.Array:
    """`max / amax`, float32."""
    top = data.format.element.max
    values = float32.from_bits(data.amax)
    # float64 quotients rounded to float32 equal float32 quotients; only epsilon itself is not a
    # float32, so its quotient is a constant.
    scale = true_divide(jnp.full_like(values, top), values)
    scale = jnp.where(values < FLOAT8_EPSILON, jnp.float32(top / FLOAT8_EPSILON), scale)
    return jnp.where(data.amax < float32.INF, scale, jnp.float32(jnp.nan))


def divisor_power_of_two(data: BlockData) -> jax.Array:
    """`max / amax`, rounded down to a power of two."""
    scale = divisor(data)
    down = float32.from_bits(float32.to_bits(scale) & float32.INF)
    return jnp.where(data.amax < float32.INF, down, scale)


def multiplier(data: BlockData) -> jax.Array:
    """`amax / max`, float32."""
    # Kept far from subnormals, which some platforms flush; a block of zeros has scale 1.
    scale = true_divide(float32.from_bits(data.amax), data.format.element.max)
    scale = jnp.where(data.amax == 0, jnp.float32(1), jnp.maximum(scale, 2.0**-100))
    return jnp.where(data.amax < float32.INF, scale, jnp.float32(jnp.nan))
