"""Scale rules: every exponent against formulas, what a rule says of itself, and rules by name."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

import mx_jax
from mx_jax.formats import (
    BLOCK_FORMATS,
    E4M3FNUZ,
    E5M2FNUZ,
    FLOAT8_BLOCKWISE_E4M3,
    FLOAT8_ROWWISE_E4M3,
    MX_FORMATS,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    NVFP4_ONE_LEVEL,
    BlockFormat,
)
from mx_jax.reference import scale_rules as functions
from mx_jax.reference.quantize import quantize
from mx_jax.reference.scale_rules import (
    AMAX,
    AMAX_HEADROOM,
    EVEN,
    FLOAT8,
    FLOOR,
    RCEIL,
    SCALE_RULES,
    BlockData,
    power_of_two,
    scale_rule_for,
)
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quantize import oracle
from tests.quick import quick

F = np.float32

# Normal numbers beside every guard, among them 2^-100 and 1e-12 times the largest elements.
MAGNITUDES = np.array(
    [1e-12, 3e-12, 1, 1.75, 6, 448, 449, 3e30, 2.0**-100 * 448, 2.0**-99 * 448, 2.0**-101], F
)
MAGNITUDES = np.concatenate(
    [MAGNITUDES, np.nextafter(MAGNITUDES, F(0)), np.nextafter(MAGNITUDES, F(np.inf))]
)
NOT_FINITE = np.array([np.inf, np.nan], F)


def ask(function: Any, amax: np.ndarray, format: BlockFormat, tensor_scale: Any = None):
    patterns = amax[:, None].view(np.int32) & 0x7FFFFFFF
    unseen: Any = None
    run = jax.jit(lambda a, p: function(BlockData(unseen, (1,), a, format, p)))
    return np.asarray(run(patterns, tensor_scale))[:, 0]


def test_multiplier():
    """amax / max, at least 2^-100; 1 for zeros, NaN for what is not finite."""
    amax = np.concatenate([MAGNITUDES, np.array([0, 1e-45], F), NOT_FINITE])
    scales = ask(functions.multiplier, amax, FLOAT8_BLOCKWISE_E4M3)
    expected = np.maximum(MAGNITUDES / F(448), F(2.0**-100))
    assert_bitwise_equal(scales[:-4], expected)
    assert (scales[-4], scales[-3]) == (1, F(2.0**-100)) and np.isnan(scales[-2:]).all()


@pytest.mark.parametrize("tensor_scale", [None, 0.75, 2.0**-101 * 1.5])
def test_element_scales(tensor_scale: float | None):
    """FLOAT8 of (amax / 6) / p, at least the smallest normal, or subnormal, and at most 448."""
    p = F(1 if tensor_scale is None else tensor_scale)
    wanted = np.array(
        [1, 2.0**-6, 2.0**-7, 3 * 2.0**-9, 2.0**-9, 2.0**-10, 448, 1000, 1.0625, 1.1875, 0], F
    )
    finite = wanted * p * F(6)
    amax = np.concatenate([finite, NOT_FINITE])
    format = NVFP4_ONE_LEVEL if tensor_scale is None else NVFP4
    for function, smallest in ((functions.amax, 2.0**-6), (functions.amax_subnormal, 2.0**-9)):
        scales = None if tensor_scale is None else np.full((1, 1), p)
        codes = ask(function, amax, format, scales)
        expected = np.clip(wanted, F(smallest), F(448)).astype(float8_e4m3fn).view(np.uint8)
        assert_bitwise_equal(codes[:-2], expected, what=function.__name__)
        assert (codes[-2:] == 0x7F).all()


def test_squared_error():
    """Over each block by itself, the axis kept."""
    x = np.array([[1, 5, -0.3], [0.5, 0.25, 7]], F)

    @jax.jit
    def lose(x, scales):
        data = BlockData(x, (1,), jnp.zeros((2, 1), jnp.int32), MXFP4, None)
        return functions.squared_error(data, scales)

    lost = lose(x, np.array([[127], [128]], np.uint8))
    values = np.array([[1, 4, -0.5], [0, 0, 8]], F)
    values[1, 0] = 0  # 0.25 of the scale, a tie, to even
    np.testing.assert_allclose(lost, np.square(values - x).sum(1, keepdims=True), rtol=1e-6)


def test_even_is_overflow_aware_scaling_for_e2m1():
    """Of arXiv 2603.08713: RCEIL's scale, halved where the largest value is below 3.5 over it."""
    # Every sign of a threshold: mantissas around the multiples of 1/16, in three octaves.
    near = np.arange(16)[:, None] * (1 << 19) + np.arange(-3, 4)
    patterns = (near.clip(0, (1 << 23) - 1) + (np.array([[[126]], [[127]], [[200]]]) << 23)).ravel()
    amax = patterns.astype(np.int32).view(np.float32).astype(np.float64)
    data = functions.BlockData(jnp.zeros(()), (), jnp.asarray(patterns, jnp.int32), MXFP4, None)
    even = np.asarray(EVEN.scales(data)).astype(int) - 127
    rceil = np.ceil(np.log2(amax / 6)).astype(int)
    np.testing.assert_array_equal(np.asarray(RCEIL.scales(data)).astype(int) - 127, rceil)
    np.testing.assert_array_equal(even, rceil - (amax / 2.0**rceil < 3.5))
    assert (even != rceil).any() and (even == rceil).any()


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


def test_rules_by_name_and_object():
    assert [rule.name for rule in SCALE_RULES[:4]] == list(RULES)
    for rule in SCALE_RULES:
        fitting = [format for format in BLOCK_FORMATS if format.scale.kind in rule.kinds]
        assert fitting
        assert scale_rule_for(rule.name, fitting[0]) is rule
        assert scale_rule_for(rule, fitting[0]) is rule
    for format, first in ((MXFP4, FLOOR), (NVFP4, AMAX), (FLOAT8_ROWWISE_E4M3, FLOAT8)):
        assert scale_rule_for(None, format) is first
    mine = power_of_two("mine", lambda element: 7)
    assert scale_rule_for(mine, MXFP4) is mine
    with pytest.raises(ValueError, match="fills scales of kind exponent"):
        scale_rule_for(mine, NVFP4)
    with pytest.raises(TypeError, match="got scale_rule=3"):
        scale_rule_for(3, MXFP4)  # pyright: ignore
    assert repr(FLOOR) == "ScaleRule(floor)"
    assert len({rule.name for rule in SCALE_RULES}) == len(SCALE_RULES)


@pytest.mark.parametrize(
    ("value", "known"), [(0, None), (1, 1), (1 << 23, 1 << 23), ((1 << 23) + 1, None), (5.0, None)]
)
def test_thresholds_for_kernels(value: Any, known: int | None):
    """None where one number does not say everything: then kernels do not take the rule."""
    rule = power_of_two("mine", lambda element: value)
    result = rule.kernel_threshold(MXFP4.element)
    assert result == known and type(result) is type(known)
    corrected = dataclasses.replace(rule, correction=object())
    assert corrected.kernel_threshold(MXFP4.element) is None


@pytest.mark.parametrize(("rule", "hint"), [("", ""), ("FLOR", " (did you mean 'floor'?)")])
def test_an_unknown_rule_lists_the_known(rule: str, hint: str):
    message = f"unknown scale_rule={rule!r}{hint}; known: {', '.join(r.name for r in SCALE_RULES)}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
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


def test_headroom_never_clips():
    """In blocks of all sizes of amax that normal scales hold; without it half do."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4096, 16), F) * np.exp2(rng.uniform(-11, 0, (4096, 1))).astype(F)
    over = {}
    for rule in (AMAX_HEADROOM, AMAX):
        result = quick(
            functools.partial(quantize, format=NVFP4, blocks=((-1, 16),), scale_rule=rule)
        )
        cast = result(x)
        scale = np.asarray(cast.scale_values, np.float64) * np.float64(cast.tensor_scale)
        over[rule.name] = np.abs(x).max(1) / scale[:, 0]
    assert 5.3 < over["amax_headroom"].min() < over["amax_headroom"].max() <= 6 * (1 + 2**-20)
    assert 0.4 < np.mean(over["amax"] > 6 * (1 + 2**-20)) < 0.6
