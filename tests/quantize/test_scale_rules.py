"""Scale rules against an exact oracle, for every exponent of float32 and every mantissa that
matters; and what rules say about themselves."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import (
    BLOCK_FORMATS,
    E4M3FNUZ,
    E5M2FNUZ,
    MX_FORMATS,
    MXFP4,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
)
from mx_jax.reference.scale_rules import CEIL, EVEN, FLOOR, RCEIL, SCALE_RULES, scale_rule_for
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quantize import oracle

RULES = ("floor", "ceil", "even", "rceil")
RARE = tuple(
    dataclasses.replace(MXFP8_E4M3, name=element.name, element=element)
    for element in (E4M3FNUZ, E5M2FNUZ)
)
FORMATS = (*MX_FORMATS, *RARE)


def boundary_mantissas() -> np.ndarray:
    """All that have at most 8 leading bits of interest, and their neighbours."""
    leading = np.arange(256, dtype=np.int64) << 15
    return np.unique(np.concatenate([leading, leading + 1, leading - 1]) % (1 << 23))


def boundary_magnitudes() -> np.ndarray:
    """Float32 patterns of every exponent with boundary mantissas; subnormals likewise."""
    exponents = np.arange(255, dtype=np.int64) << 23
    normal = (exponents[1:, None] | boundary_mantissas()[None]).reshape(-1)
    # A subnormal is a mantissa with a floating leading bit: every width of it, every boundary.
    widths = np.arange(1, 24)
    subnormal = ((1 << 23 | boundary_mantissas())[None] >> widths[:, None]).reshape(-1)
    near = np.concatenate([subnormal - 1, subnormal, subnormal + 1])
    return np.unique(np.concatenate([normal, near[near > 0], [0]])).astype(np.int32)


def test_every_exponent_and_boundary_mantissa():
    patterns = boundary_magnitudes()
    amax = patterns.view(np.float32)

    @jax.jit
    def all_scales(amax):
        return {
            (format.name, rule): mx_jax.quantize(
                amax[:, None], format, block_size=1, scale_rule=rule
            ).scales[:, 0]
            for format in FORMATS
            for rule in RULES
        }

    scales = all_scales(amax)
    exact = amax.astype(np.float64)
    assert len(patterns) > 190_000 and (exact[1:] > 0).all()
    for format in FORMATS:
        for rule in RULES:
            expected = oracle.scale_bytes(exact, format.element, rule)
            what = f"{format.name} {rule}"
            assert_bitwise_equal(scales[format.name, rule], expected, what=what)


def test_not_finite_is_byte_255():
    x = jnp.float32([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf])[:, None]
    for rule in RULES:
        scales = mx_jax.quantize(x, MXFP4, block_size=1, scale_rule=rule).scales
        assert np.asarray(scales).tolist() == [[255]] * 4


# Scale exponents worked out by hand: amax, then floor, ceil, even, rceil of each format.
BY_HAND = [
    # 448 is E4M3's largest; 449 is above it; 480 = 1.875 * 2^8 rounds up to 512 from 3 bits on.
    (MXFP8_E4M3, 448.0, (0, 1, 0, 0)),
    (MXFP8_E4M3, 449.0, (0, 1, 0, 1)),
    (MXFP8_E4M3, 495.0, (0, 1, 0, 1)),
    (MXFP8_E4M3, 496.0, (0, 1, 1, 1)),  # 1.9375 * 2^8: the tie between 1.875 and 2, away
    (MXFP8_E4M3, 512.0, (1, 1, 1, 1)),
    (MXFP8_E5M2, 57344.0, (0, 1, 0, 0)),
    (MXFP8_E5M2, 61440.0, (0, 1, 1, 1)),  # 1.875 * 2^15: the tie between 1.75 and 2
    (MXFP6_E3M2, 28.0, (0, 1, 0, 0)),
    (MXFP6_E3M2, 30.0, (0, 1, 1, 1)),
    (MXFP4, 6.0, (0, 1, 0, 0)),
    (MXFP4, 6.5, (0, 1, 0, 1)),
    (MXFP4, 7.0, (0, 1, 1, 1)),  # 1.75 * 4: the tie between 1.5 and 2
    (MXFP4, 4.0, (0, 0, 0, 0)),
    (MXINT8, 1.984375, (0, 1, 0, 0)),
    (MXINT8, 1.9921875, (0, 1, 1, 1)),  # half a step above 127/64
    (MXINT8, 1.0, (0, 0, 0, 0)),
]


def test_by_hand():
    @jax.jit
    def all_scales():
        return [
            [
                mx_jax.quantize(jnp.full(1, amax), format, block_size=1, scale_rule=rule).scales[0]
                for rule in RULES
            ]
            for format, amax, _ in BY_HAND
        ]

    actual = [
        (format.name, amax, tuple(int(byte) - 127 for byte in scales))
        for (format, amax, _), scales in zip(BY_HAND, all_scales(), strict=True)
    ]
    assert actual == [(format.name, amax, exponents) for format, amax, exponents in BY_HAND]


@pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda format: format.name)
def test_the_default_is_the_first_rule_that_fits(format: BlockFormat):
    defaults = {
        "exponent": "floor",
        "element": "amax",
        "divisor": "float8",
        "multiplier": "amax_multiplier",
    }
    assert scale_rule_for(None, format).name == defaults[format.scale.kind]


def test_rules_by_name_and_object():
    assert [rule.name for rule in SCALE_RULES[:4]] == list(RULES)
    for rule in SCALE_RULES:
        fitting = [format for format in BLOCK_FORMATS if format.scale.kind in rule.kinds]
        assert fitting
        assert scale_rule_for(rule.name, fitting[0]) is rule
        assert scale_rule_for(rule, fitting[0]) is rule
    assert repr(FLOOR) == "ScaleRule(floor)"
    assert len({rule.name for rule in SCALE_RULES}) == len(SCALE_RULES)


def test_thresholds():
    """All that a kernel needs to know of a rule: the mantissa from which the exponent goes up."""
    element = MXFP8_E4M3.element
    thresholds = {rule.name: rule.threshold(element) for rule in (FLOOR, CEIL, EVEN, RCEIL)}
    mantissa = {"floor": 1 << 23, "ceil": 1, "even": 0.9375 * 2**23, "rceil": 0.75 * 2**23 + 1}
    assert thresholds == mantissa


@pytest.mark.parametrize("rule", ["flor", "", "FLOOR"])
def test_an_unknown_rule_lists_the_known(rule: str):
    names = ", ".join(known.name for known in SCALE_RULES)
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'unknown scale_rule={rule!r}; known: {names}')}$"
    ):
        scale_rule_for(rule, MXFP4)


@pytest.mark.parametrize(
    ("rule", "format", "needs", "has"),
    [
        ("amax", MXFP4, "element", "e8m0 scales of kind exponent"),
        ("float8", MXFP4, "divisor", "e8m0 scales of kind exponent"),
        ("rceil", NVFP4, "exponent", "e4m3 scales of kind element"),
    ],
)
def test_a_rule_for_another_scale_names_both(rule: str, format: BlockFormat, needs: str, has: str):
    fitting = [known.name for known in SCALE_RULES if format.scale.kind in known.kinds]
    message = (
        f"scale rule '{rule}' fills scales of kind {needs}, but format={format.name} has {has}; "
        f"use one of: {', '.join(fitting)}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scale_rule_for(rule, format)
