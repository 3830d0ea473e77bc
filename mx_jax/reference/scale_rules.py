"""Scale rules as values: from a block's largest magnitude to its stored scale.

Power-of-two rules differ in one number. With amax = (1 + m / 2^23) * 2^E, the unbiased scale
exponent is `E - emax`, plus one if `m >= threshold(element)`. Source: OCP MX v1.0, section 6.3
(FLOOR); the others as torchao names them.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mx_jax.codecs import element as element_codec
from mx_jax.codecs import float32
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import (
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a block's scale is chosen.

    Attributes:
      name: what `scale_rule=` takes.
      kinds: kinds of `ScaleFormat` that the rule can fill.
      scales: from the block's data to its stored scale. A block with a NaN or Inf gets the NaN
        scale: quiet loss would be worse.
      threshold: for rules of amax with power-of-two scales, the 23-bit mantissa from which the
        exponent goes up by one, given the element; else None. All that a kernel needs.
      largest_scale: the block scale that a tensor scale leaves room for; None: the format's max.
    """

    name: str
    kinds: tuple[str, ...]
    scales: Callable[[BlockData], jax.Array]
    threshold: Callable[[ElementFormat], int] | None = None
    largest_scale: float | None = None

    def __repr__(self) -> str:
        return f"ScaleRule({self.name})"

    def __reduce__(self):
        # By name: the functions inside are closures, which do not pickle.
        return _named, (self.name,)


def _power_of_two(name: str, threshold: Callable[[ElementFormat], int]) -> ScaleRule:
    def scales(data: BlockData) -> jax.Array:
        biased, mantissa = float32.normalize(data.amax)
        element = data.format.element
        up = (mantissa >= threshold(element)).astype(jnp.int32)
        stored = exponent_to_e8m0(biased - 127 - element.emax + up)
        return jnp.where(data.amax >= float32.INF, jnp.uint8(E8M0_NAN), stored)

    return ScaleRule(name=name, kinds=("exponent",), scales=scales, threshold=threshold)


def _never(element: ElementFormat) -> int:
    return 1 << 23


def _above_power_of_two(element: ElementFormat) -> int:
    return 1


def _rounds_up(element: ElementFormat) -> int:
    # Rounding to p mantissa bits, ties away, carries into the exponent from 1.11..1|1 upward.
    return (1 << 23) - (1 << (22 - element.mantissa_bits))


def _above_max(element: ElementFormat) -> int:
    # amax <= max * 2^k compares mantissas once the exponents agree.
    return (element.max_mantissa << (23 - element.mantissa_bits)) + 1


FLOOR = _power_of_two("floor", _never)
CEIL = _power_of_two("ceil", _above_power_of_two)
EVEN = _power_of_two("even", _rounds_up)
RCEIL = _power_of_two("rceil", _above_max)


def _gaussian(data: BlockData) -> jax.Array:
    # 2.92247856 standard deviations at E2M1's 6 lose least of a normal distribution.
    values = data.values.astype(jnp.float32)
    mean = jnp.mean(values, axis=data.inside, keepdims=True)
    variance = jnp.mean(jnp.square(values - mean), axis=data.inside, keepdims=True)
    spread = jnp.sqrt(variance) * (2.92247856 / data.format.element.max) + 1e-8
    biased = float32.to_bits(spread) >> 23
    stored = exponent_to_e8m0(biased - 127)
    return jnp.where(data.amax >= float32.INF, jnp.uint8(E8M0_NAN), stored)


# Quartet's forward scale (arXiv 2505.14669): clips on purpose. A float mean, so the only rule whose
# bits may differ between backends that add in another order.
GAUSSIAN = ScaleRule(name="gaussian", kinds=("exponent",), scales=_gaussian)


def _scale_element(scale: ScaleFormat) -> ElementFormat:
    assert scale.element is not None, scale
    return scale.element


def _element_scale(data: BlockData, target: float, smallest: float) -> jax.Array:
    """Codes of `amax / target` over the tensor scale, clipped; NaN where amax is not finite."""
    of = _scale_element(data.format.scale)
    finite = data.amax < float32.INF
    scale = true_divide(float32.from_bits(jnp.where(finite, data.amax, 0)), target)
    if data.tensor_scale is not None:
        scale = true_divide(scale, data.tensor_scale)
    codes = element_codec.encode(jnp.clip(scale, smallest, of.max), of)
    return jnp.where(finite, codes, jnp.uint8(of.nan_code or 0))


def _amax(data: BlockData) -> jax.Array:
    smallest = _scale_element(data.format.scale).smallest_normal
    return _element_scale(data, data.format.element.max, smallest)


def _amax_subnormal(data: BlockData) -> jax.Array:
    smallest = _scale_element(data.format.scale).smallest_subnormal
    return _element_scale(data, data.format.element.max, smallest)


def _four_over_six(data: BlockData) -> jax.Array:
    of = _scale_element(data.format.scale)
    candidates = [_element_scale(data, target, of.smallest_normal) for target in (6.0, 4.0)]
    six, four = (_squared_error(data, scales) for scales in candidates)
    return jnp.where(four < six, candidates[1], candidates[0])


def _squared_error(data: BlockData, scales: jax.Array) -> jax.Array:
    """Sum over each block of what a scale would lose."""
    codes = encode_scaled(
        data.values,
        scales,
        data.format,
        tensor_scale=data.tensor_scale,
        rounding=NEAREST,
        random_bits=None,
    )
    values = float32.from_bits(decode_scaled(codes, scales, data.format, data.tensor_scale))
    lost = jnp.square(values - data.values.astype(jnp.float32))
    return jnp.sum(lost, axis=data.inside, keepdims=True)


AMAX = ScaleRule(name="amax", kinds=("element",), scales=_amax)
AMAX_SUBNORMAL = ScaleRule(name="amax_subnormal", kinds=("element",), scales=_amax_subnormal)
# "4/6" (arXiv 2512.02010): a block's largest value becomes 6 or 4, whichever loses less; the tensor
# scale leaves room for the second choice, 1.5 * 256.
FOUR_OVER_SIX = ScaleRule(
    name="four_over_six", kinds=("element",), scales=_four_over_six, largest_scale=256.0
)

# torchao's guard against division by zero: amax below it counts as it.
FLOAT8_EPSILON = 1e-12


def _divisor(data: BlockData) -> jax.Array:
    top = data.format.element.max
    values = float32.from_bits(data.amax)
    # float64 quotients rounded to float32 equal float32 quotients; only epsilon itself is not a
    # float32, so its quotient is a constant.
    scale = true_divide(jnp.full_like(values, top), values)
    scale = jnp.where(values < FLOAT8_EPSILON, jnp.float32(top / FLOAT8_EPSILON), scale)
    return jnp.where(data.amax < float32.INF, scale, jnp.float32(jnp.nan))


def _divisor_power_of_two(data: BlockData) -> jax.Array:
    scale = _divisor(data)
    down = float32.from_bits(float32.to_bits(scale) & float32.INF)
    return jnp.where(data.amax < float32.INF, down, scale)


def _multiplier(data: BlockData) -> jax.Array:
    # Kept far from subnormals, which some platforms flush; a block of zeros has scale 1.
    scale = true_divide(float32.from_bits(data.amax), data.format.element.max)
    scale = jnp.where(data.amax == 0, jnp.float32(1), jnp.maximum(scale, 2.0**-100))
    return jnp.where(data.amax < float32.INF, scale, jnp.float32(jnp.nan))


FLOAT8 = ScaleRule(name="float8", kinds=("divisor",), scales=_divisor)
FLOAT8_POWER_OF_TWO = ScaleRule(
    name="float8_power_of_two", kinds=("divisor",), scales=_divisor_power_of_two
)
# DeepSeek-V3's `scale_inv`: value = code * (amax / max).
AMAX_MULTIPLIER = ScaleRule(name="amax_multiplier", kinds=("multiplier",), scales=_multiplier)

SCALE_RULES: tuple[ScaleRule, ...] = (
    FLOOR,
    CEIL,
    EVEN,
    RCEIL,
    GAUSSIAN,
    AMAX,
    AMAX_SUBNORMAL,
    FOUR_OVER_SIX,
    FLOAT8,
    FLOAT8_POWER_OF_TWO,
    AMAX_MULTIPLIER,
)


def _named(name: str) -> ScaleRule:
    for known in SCALE_RULES:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in SCALE_RULES)
    raise ValueError(f"unknown scale_rule={name!r}; known: {names}")


def scale_rule_for(rule: ScaleRule | str | None, format: BlockFormat) -> ScaleRule:
    """The rule meant by an object or a name, checked against the format's scale.

    Args:
      rule: a `ScaleRule`, its name, or None for the first rule of the format's scale kind:
        FLOOR (the specification's) for E8M0, AMAX for NVFP4, FLOAT8 for float32 scales.
      format: the block format to be filled.

    Raises:
      ValueError: unknown name, or a rule for another kind of scale; the message lists what fits.
    """
    fitting = [known for known in SCALE_RULES if format.scale.kind in known.kinds]
    if rule is None:
        return fitting[0]
    if isinstance(rule, str):
        rule = _named(rule)
    if not isinstance(rule, ScaleRule):
        raise TypeError(f"a scale rule is a ScaleRule, a name or None, got scale_rule={rule!r}")
    if format.scale.kind not in rule.kinds:
        raise ValueError(
            f"scale rule {rule.name!r} fills scales of kind {' or '.join(rule.kinds)}, but "
            f"format={format.name} has {format.scale.name} scales of kind {format.scale.kind}; "
            f"use one of: {', '.join(known.name for known in fitting)}"
        )
    return rule
