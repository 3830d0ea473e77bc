"""Scale rules as values: from a block's largest magnitude to its stored scale.

Two rules are one if what they compute is: backends compare a rule's functions, never its name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mx_jax.codecs.rounding import NEAREST, STOCHASTIC, Rounding
from mx_jax.formats import BlockFormat, ElementFormat
from mx_jax.reference import scale_functions as functions
from mx_jax.reference.eden import Eden
from mx_jax.reference.scale_functions import BlockData as BlockData
from mx_jax.reference.scale_functions import FromAmax as FromAmax
from mx_jax.reference.scale_functions import PowerOfTwo as PowerOfTwo


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
        that are stored; None: they are the same. No kernel knows one.
    """

    name: str
    kinds: tuple[str, ...]
    scales: Callable[[BlockData], jax.Array]
    largest_scale: float | None = None
    largest_element: float | None = None
    correction: Eden | None = None

    def largest_value(self, format: BlockFormat) -> float:
        """What a tensor's largest magnitude becomes over its tensor scale."""
        largest_scale = self.largest_scale or format.scale.max
        return largest_scale * (self.largest_element or format.element.max)

    @property
    def rounding(self) -> Rounding:
        """How stored scales are rounded, as far as random bits decide."""
        return NEAREST if self.correction is None else self.correction.rounding

    @property
    def group(self) -> int:
        """Elements along the blocked axis whose scales depend on each other, beyond a block."""
        return 1 if self.correction is None else self.correction.group

    @property
    def threshold(self) -> Callable[[ElementFormat], int] | None:
        """The threshold that says everything, of rules that have one: see `PowerOfTwo`."""
        return self.scales.threshold if isinstance(self.scales, PowerOfTwo) else None

    @property
    def reads_values(self) -> bool:
        """Whether the rule may look at more of a block than its amax."""
        from_amax = isinstance(self.scales, PowerOfTwo | FromAmax)
        return not from_amax or self.correction is not None

    def kernel_threshold(self, element: ElementFormat) -> int | None:
        """The threshold for an element, 1 to 2^23; None if that does not say everything."""
        if not isinstance(self.scales, PowerOfTwo) or self.correction is not None:
            return None
        value = self.scales.threshold(element)
        fits = isinstance(value, int | np.integer) and 1 <= value <= 1 << 23
        return int(value) if fits else None

    def __repr__(self) -> str:
        return f"ScaleRule({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own by name, so that a pickle does not hold what lies inside; any other is
        # what its functions are, whatever it is called.
        if self in SCALE_RULES:
            return _named, (self.name,)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _built, (fields,)


def _built(fields: dict[str, Any]) -> ScaleRule:
    return ScaleRule(**fields)


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


FLOOR = power_of_two("floor", functions.never)
CEIL = power_of_two("ceil", functions.above_power_of_two)
EVEN = power_of_two("even", functions.rounds_up)
RCEIL = power_of_two("rceil", functions.above_max)

# Quartet's forward scale (arXiv 2505.14669): clips on purpose. A float mean, so the only rule whose
# bits may differ between backends that add in another order.
GAUSSIAN = ScaleRule(name="gaussian", kinds=("exponent",), scales=functions.gaussian)

AMAX = ScaleRule(name="amax", kinds=("element",), scales=FromAmax(functions.amax))
AMAX_SUBNORMAL = ScaleRule(
    name="amax_subnormal", kinds=("element",), scales=FromAmax(functions.amax_subnormal)
)
# "4/6" (arXiv 2512.02010): a block's largest value becomes 6 or 4, whichever loses less; the tensor
# scale leaves room for the second choice, 1.5 * 256.
FOUR_OVER_SIX = ScaleRule(
    name="four_over_six", kinds=("element",), scales=functions.four_over_six, largest_scale=256.0
)


def _amax_becomes(
    name: str,
    largest: float,
    largest_scale: float | None = None,
    correction: Eden | None = None,
) -> ScaleRule:
    return ScaleRule(
        name=name,
        kinds=("element",),
        scales=FromAmax(functions.AmaxBecomes(largest)),
        largest_scale=largest_scale,
        largest_element=largest,
        correction=correction,
    )


# A scale that rounds to nearest in E4M3 is up to 17/16 too small: with so much room below E2M1's 6
# nothing clips, and stochastic rounding is right on average.
AMAX_HEADROOM = _amax_becomes("amax_headroom", 6 * 16 / 17)
# Quartet II's backward rule (arXiv 2601.22813): 0.93 loses least of what its rotation makes of a
# tensor; above a block scale of 255.99 there is room for the correction. Each block has its own, as
# in its kernels; groups of 128, as in its training code, lose more and are 0.05 % too short.
MS_EDEN = _amax_becomes(
    "ms_eden", 6 / (17 / 16 * 0.93), 255.99, Eden(group=16, rounding=STOCHASTIC)
)

FLOAT8 = ScaleRule(name="float8", kinds=("divisor",), scales=FromAmax(functions.divisor))
FLOAT8_POWER_OF_TWO = ScaleRule(
    name="float8_power_of_two",
    kinds=("divisor",),
    scales=FromAmax(functions.divisor_power_of_two),
)
# DeepSeek-V3's `scale_inv`: value = code * (amax / max).
AMAX_MULTIPLIER = ScaleRule(
    name="amax_multiplier", kinds=("multiplier",), scales=FromAmax(functions.multiplier)
)

SCALE_RULES: tuple[ScaleRule, ...] = (
    FLOOR,
    CEIL,
    EVEN,
    RCEIL,
    GAUSSIAN,
    AMAX,
    AMAX_SUBNORMAL,
    FOUR_OVER_SIX,
    AMAX_HEADROOM,
    MS_EDEN,
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
