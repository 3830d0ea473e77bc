"""How scales are chosen: functions from a block's data to its stored scale, and rules by name.

Power-of-two rules differ in one number. With amax = (1 + m / 2^23) * 2^E, the unbiased scale
exponent is `E - emax`, plus one if `m >= threshold(element)`. Source: OCP MX v1.0, section 6.3
(FLOOR); the others as torchao names them.

Two rules are one if what they compute is: backends compare a rule's functions, never its name.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import element as element_codec
from mx_jax.codecs import float32
from mx_jax.codecs.float32 import clip, select
from mx_jax.codecs.rounding import NEAREST, Rounding
from mx_jax.codecs.scale import (
    E8M0_BIAS,
    E8M0_NAN,
    decode_scaled,
    encode_scaled,
    is_tiny,
    lift,
    true_divide,
)
from mx_jax.formats import BlockFormat, ElementFormat, ScaleFormat
from mx_jax.formats.element import unknown_name


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
        element = data.format.element
        # From the threshold on, what is added carries into the exponent.
        carry = (1 << 23) - min(self.threshold(element), 1 << 23)
        return _power_of_two(data.amax, element.emax, carry)


def _power_of_two(amax: jax.Array, emax: int, carry: int) -> jax.Array:
    pattern = amax
    # Elsewhere a subnormal amax has the smallest scale, whatever its exponent.
    if emax < 1:
        biased, mantissa = float32.split_exponent_mantissa(amax)
        pattern = float32.add(float32.shift_left(biased, 23), mantissa)
    biased = float32.sub(float32.shift_right(float32.add(pattern, carry), 23), emax)
    stored = lax.convert_element_type(clip(biased, 0, 2 * E8M0_BIAS), jnp.uint8)
    return select(float32.ge(amax, float32.INF), E8M0_NAN, stored)


@dataclasses.dataclass(frozen=True)
class FromAmax:
    """A function of a block's amax and of nothing else: `data.values` is None there.

    Attributes:
      function: as `ScaleRule.scales`.
    """

    function: Callable[[BlockData], jax.Array]

    def __call__(self, data: BlockData) -> jax.Array:
        unseen: Any = None
        return self.function(data._replace(values=unseen, inside=()))


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


def _scale_element(scale: ScaleFormat) -> ElementFormat:
    assert scale.element is not None, scale
    return scale.element


def _element_scale(data: BlockData, target: float, smallest: float) -> jax.Array:
    """Codes of `amax / target` over the tensor scale, clipped; NaN where amax is not finite."""
    of = _scale_element(data.format.scale)
    finite = float32.lt(data.amax, float32.INF)
    largest = float32.from_bits(select(finite, data.amax, 0))
    if data.tensor_scale is None:
        scale = true_divide(largest, target)
    else:
        small = is_tiny(data.tensor_scale)
        scale = true_divide(lift(largest, small), target)
        scale = true_divide(scale, lift(data.tensor_scale, small))
    codes = element_codec.encode(float32.min(float32.max(scale, smallest), of.max), of)
    return select(finite, codes, of.nan_code or 0)


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


@dataclasses.dataclass(frozen=True)
class LeastLoss:
    """Of two rules the one whose scales lose less of a block; the first if they lose alike.

    Attributes:
      rules: functions of amax.
    """

    rules: tuple[AmaxBecomes, AmaxBecomes]

    def __call__(self, data: BlockData) -> jax.Array:
        first, second = (rule(data) for rule in self.rules)
        better = squared_error(data, second) < squared_error(data, first)
        return jnp.where(better, second, first)


def squared_error(data: BlockData, scales: jax.Array, unit: jax.Array | None = None) -> jax.Array:
    """What scales would lose: over each block, the sum of `(decoded - x)^2`, rounded to nearest.

    Args:
      data: the blocks; their values are read.
      scales: stored scales, of amax's shape.
      unit: powers of two, of amax's shape, by which differences are divided before they are
        squared, so that none leaves float32's range; default: 1.

    Returns:
      float32, of amax's shape, with the same bits on every platform.
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
    difference = float32.rounded(values) - data.values.astype(jnp.float32)
    lost = jnp.square(difference if unit is None else difference / unit)
    return float32.sum_in_order(lost, data.inside)


# torchao's guard against division by zero: amax below it counts as it.
FLOAT8_EPSILON = 1e-12


def divisor(data: BlockData) -> jax.Array:
    """`max / amax`, float32."""
    top = data.format.element.max
    values = float32.from_bits(data.amax)
    # float64 quotients rounded to float32 equal float32 quotients; only epsilon itself is not a
    # float32, so its quotient is a constant.
    scale = true_divide(lax.full_like(values, top), values)
    scale = select(float32.lt(values, FLOAT8_EPSILON), top / FLOAT8_EPSILON, scale)
    return select(float32.lt(data.amax, float32.INF), scale, jnp.nan)


# 2^-100: what a smaller amax counts as, so that neither it nor its scale is near subnormals, which
# some platforms flush.
_SMALLEST_AMAX = (127 - 100) << 23


def divisor_of_any(data: BlockData) -> jax.Array:
    """`max / max(amax, 2^-100)`, float32: `divisor` without torchao's guard."""
    values = float32.from_bits(float32.max(data.amax, _SMALLEST_AMAX))
    scale = true_divide(lax.full_like(values, data.format.element.max), values)
    return select(float32.lt(data.amax, float32.INF), scale, jnp.nan)


def divisor_power_of_two(data: BlockData) -> jax.Array:
    """`max / amax`, rounded down to a power of two."""
    scale = divisor(data)
    down = float32.from_bits(float32.bitwise_and(float32.float32_bits(scale), float32.INF))
    return select(float32.lt(data.amax, float32.INF), down, scale)


def multiplier(data: BlockData) -> jax.Array:
    """`amax / max`, float32."""
    # Kept far from subnormals, which some platforms flush; a block of zeros has scale 1.
    scale = true_divide(float32.from_bits(data.amax), data.format.element.max)
    scale = select(data.amax == 0, 1.0, jnp.maximum(scale, 2.0**-100))
    return select(data.amax < float32.INF, scale, jnp.nan)


class Correction(Protocol):
    """Changes scales after the cast: a frozen value, which rules compare.

    Attributes:
      rounding: how it rounds scales: where this draws, the cast needs a key.
    """

    @property
    def rounding(self) -> Rounding: ...

    def __call__(
        self, data: BlockData, scales: jax.Array, codes: jax.Array, random_bits: jax.Array | None
    ) -> jax.Array:
        """The stored scales.

        Args:
          data: what was quantized.
          scales: stored scales that the elements were divided by, of amax's shape.
          codes: what became of the elements.
          random_bits: int32 of amax's shape, where `rounding` draws.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a block's scale is chosen. A rule is its functions: its name is for people.

    A rule of one's own may have any name, a known one too. What no kernel knows by its functions is
    computed in plain JAX. `power_of_two` makes rules that every kernel computes.

    Attributes:
      name: what `scale_rule=` takes, for the library's own.
      kinds: kinds of `ScaleFormat` that the rule can fill.
      scales: from the block's data to its stored scale. A block with a NaN or Inf gets the NaN
        scale: quiet loss would be worse. A function of amax alone is best given as
        `FromAmax(function)`: then `ragged_dot` may ask it about all rows of a group at once;
        `PowerOfTwo(threshold)`, as `power_of_two` builds it, is all that a kernel needs.
      largest_scale: the block scale that a tensor scale leaves room for; None: the format's max.
      largest_element: what amax becomes, over that scale; None: the element's max.
      correction: from the scales that elements were divided by, and their codes, to the scales
        that are stored, as in `examples/recipes/quartet_ii.py`; None: they are the same. No kernel
        knows one.
    """

    name: str
    kinds: tuple[str, ...]
    scales: Callable[[BlockData], jax.Array]
    largest_scale: float | None = None
    largest_element: float | None = None
    correction: Correction | None = None

    def largest_value(self, format: BlockFormat) -> float:
        """What a tensor's largest magnitude becomes over its tensor scale."""
        largest_scale = self.largest_scale or format.scale.max
        return largest_scale * (self.largest_element or format.element.max)

    @property
    def rounding(self) -> Rounding:
        """How stored scales are rounded, as far as random bits decide."""
        return NEAREST if self.correction is None else self.correction.rounding

    @property
    def threshold(self) -> Callable[[ElementFormat], int] | None:
        """The threshold that says everything, of rules that have one: see `PowerOfTwo`."""
        return self.scales.threshold if isinstance(self.scales, PowerOfTwo) else None

    @property
    def reads_values(self) -> bool:
        """Whether the rule may look at more of a block than its amax."""
        from_amax = isinstance(self.scales, PowerOfTwo | FromAmax)
        return not from_amax or self.correction is not None

    @property
    def brings_to_max(self) -> bool:
        """Whether amax over its scale is the element's max or less, but for float32's rounding, and
        a block with NaN or Inf has the scale NaN."""
        return self.scales in _BRING_TO_MAX and self.correction is None

    def kernel_threshold(self, element: ElementFormat) -> int | None:
        """The threshold for an element, 1 to 2^23; None if that does not say everything."""
        if self.threshold is None or self.correction is not None:
            return None
        value = self.threshold(element)
        fits = isinstance(value, int | np.integer) and 1 <= value <= 1 << 23
        return int(value) if fits else None

    def __repr__(self) -> str:
        return f"ScaleRule({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own by name, so that pickles hold no internals; any other by its functions.
        if self in SCALE_RULES:
            return _named, (self.name,)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(ScaleRule, **fields), ()


def power_of_two(name: str, threshold: Callable[[ElementFormat], int]) -> ScaleRule:
    """A rule of amax with E8M0 scales: `2^(E - emax)`, times 2 from a mantissa on.

    Args:
      name: for people and error messages.
      threshold: the 23-bit mantissa of amax from which the exponent goes up by one, 1 to 2^23,
        given the element; 2^23: never.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax.reference.scale_rules import power_of_two
      >>> half_up = power_of_two("half_up", lambda element: 1 << 22)
      >>> mx_jax.quantize(jnp.array([5.9, 6.0]), "mxfp4", block_size=1, scale_rule=half_up).scales
      Array([127, 128], dtype=uint8)
    """
    return ScaleRule(name=name, kinds=("exponent",), scales=PowerOfTwo(threshold))


FLOOR = power_of_two("floor", never)
CEIL = power_of_two("ceil", above_power_of_two)
EVEN = power_of_two("even", rounds_up)
RCEIL = power_of_two("rceil", above_max)

AMAX = ScaleRule(name="amax", kinds=("element",), scales=FromAmax(amax))
AMAX_SUBNORMAL = ScaleRule(
    name="amax_subnormal", kinds=("element",), scales=FromAmax(amax_subnormal)
)
# "4/6" (arXiv 2512.02010): a block's largest value becomes 6 or 4, whichever loses less; the tensor
# scale leaves room for the second choice, 1.5 * 256.
FOUR_OVER_SIX = ScaleRule(
    name="four_over_six",
    kinds=("element",),
    scales=LeastLoss((AmaxBecomes(6.0), AmaxBecomes(4.0))),
    largest_scale=256.0,
)


# A scale that rounds to nearest in E4M3 is up to 17/16 too small: with so much room below E2M1's 6
# nothing clips, and stochastic rounding is right on average.
AMAX_HEADROOM = ScaleRule(
    name="amax_headroom",
    kinds=("element",),
    scales=FromAmax(AmaxBecomes(6 * 16 / 17)),
    largest_element=6 * 16 / 17,
)

FLOAT8 = ScaleRule(name="float8", kinds=("divisor",), scales=FromAmax(divisor))
FLOAT8_POWER_OF_TWO = ScaleRule(
    name="float8_power_of_two", kinds=("divisor",), scales=FromAmax(divisor_power_of_two)
)
# As AQT and Qwix scale integers, but that the quotient of theirs is the reciprocal of this one.
AMAX_DIVISOR = ScaleRule(name="amax_divisor", kinds=("divisor",), scales=FromAmax(divisor_of_any))
_BRING_TO_MAX = (FLOAT8.scales, FLOAT8_POWER_OF_TWO.scales, AMAX_DIVISOR.scales)
# DeepSeek-V3's `scale_inv`: value = code * (amax / max).
AMAX_MULTIPLIER = ScaleRule(
    name="amax_multiplier", kinds=("multiplier",), scales=FromAmax(multiplier)
)

SCALE_RULES: tuple[ScaleRule, ...] = (
    FLOOR,
    CEIL,
    EVEN,
    RCEIL,
    AMAX,
    AMAX_SUBNORMAL,
    FOUR_OVER_SIX,
    AMAX_HEADROOM,
    FLOAT8,
    FLOAT8_POWER_OF_TWO,
    AMAX_DIVISOR,
    AMAX_MULTIPLIER,
)


def _named(name: str) -> ScaleRule:
    known = {rule.name: rule for rule in SCALE_RULES}
    if name not in known:
        raise unknown_name("scale_rule", name, known)
    return known[name]


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
