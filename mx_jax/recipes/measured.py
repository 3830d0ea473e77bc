"""The scale rule that a format gets where none is named: by measurement, the one that loses least.

RCEIL for FP8, EVEN for FP6 and FP4, FLOOR for INT8; FLOOR, the specification's rule, clips 2.4 % of
normally distributed values in E2M1.
"""

from typing import Any

from mx_jax.codecs.rounding import Rounding, rounding_mode
from mx_jax.formats import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
    block_format,
)
from mx_jax.formats.block import known_block
from mx_jax.reference.scale_rules import (
    AMAX,
    AMAX_HEADROOM,
    EVEN,
    FLOOR,
    RCEIL,
    SCALE_RULES,
    ScaleRule,
)
from mx_jax.specs import OperandSpec, operand

# Others take their scale kind's default.
MEASURED_RULES: dict[BlockFormat, ScaleRule] = {
    MXFP8_E4M3: RCEIL,
    MXFP8_E5M2: RCEIL,
    MXFP6_E2M3: EVEN,
    MXFP6_E3M2: EVEN,
    MXFP4: EVEN,
    MXINT8: FLOOR,
    NVFP4: AMAX,
}
# Rules of other scales clip nothing: amax becomes the largest element.
UNCLIPPED: tuple[ScaleRule, ...] = (RCEIL, AMAX_HEADROOM)


def clips(rule: ScaleRule, format: BlockFormat) -> bool:
    """Whether one of the library's own rules leaves values of a block above its largest code.

    Nothing is known of other rules, unless a threshold says all of them: see `PowerOfTwo`.
    """
    if rule in UNCLIPPED or rule.correction is not None:
        return False
    if rule.threshold is not None:
        never = RCEIL.threshold
        assert never is not None
        return rule.threshold(format.element) > never(format.element)
    # Float32 scales are amax itself; narrower ones are rounded, also down.
    return rule in SCALE_RULES and not format.scale.is_float32


def measured_operand(format: Any, rounding: Rounding | str = "nearest") -> OperandSpec:
    """The operand spec of a format with the rule that loses least.

    Stochastic rounding is right on average only where nothing clips: with it, power-of-two scales
    are RCEIL's, and those of NVFP4 leave headroom for their own rounding.
    """
    format, rounding = block_format(format), rounding_mode(rounding)
    known = known_block(format)
    rule = known and MEASURED_RULES.get(known)
    if rounding.random_bits:
        fitting = (own for own in UNCLIPPED if format.scale.kind in own.kinds)
        rule = next(fitting, rule)
    return operand(format, scale_rule=rule, rounding=rounding)
