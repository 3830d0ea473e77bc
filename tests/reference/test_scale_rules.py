"""What a rule says of itself: to kernels, to casts that may leave its values out, to pickle."""

import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.formats import E2M1, E4M3, FLOAT8_ROWWISE_E4M3, MXFP4, NVFP4
from mx_jax.reference import scale_functions as functions
from mx_jax.reference.scale_rules import (
    AMAX,
    AMAX_HEADROOM,
    CEIL,
    EVEN,
    FLOAT8,
    FLOOR,
    FOUR_OVER_SIX,
    GAUSSIAN,
    MS_EDEN,
    RCEIL,
    SCALE_RULES,
    FromAmax,
    PowerOfTwo,
    ScaleRule,
    power_of_two,
    scale_rule_for,
)


def seven(element) -> int:
    return 7


@pytest.mark.parametrize(
    ("value", "known"),
    [(0, None), (1, 1), (1 << 23, 1 << 23), ((1 << 23) + 1, None), (np.int64(5), 5), (5.0, None)],
)
def test_what_kernels_are_told(value, known: int | None):
    found = power_of_two("mine", lambda element: value).kernel_threshold(E2M1)
    assert found == known and type(found) is type(known)


def test_thresholds_of_the_librarys_own():
    told = {rule.name: rule.kernel_threshold(E4M3) for rule in SCALE_RULES}
    assert told.pop("floor") == 1 << 23 and told.pop("ceil") == 1
    assert told.pop("even") == (1 << 23) - (1 << 19)
    assert told.pop("rceil") == (6 << 20) + 1
    assert set(told.values()) == {None}
    assert EVEN.threshold is functions.rounds_up and AMAX.threshold is None


def test_room_for_scales_that_round_to_nearest():
    """A scale in E4M3 is up to 17/16 too small; E2M1 ends at 6."""
    assert AMAX_HEADROOM.largest_element is not None and MS_EDEN.largest_element is not None
    assert 17 / 16 * AMAX_HEADROOM.largest_element == E2M1.max
    assert 17 / 16 * 0.93 * MS_EDEN.largest_element == pytest.approx(E2M1.max, rel=1e-15)


def test_who_reads_values():
    names = {rule.name for rule in SCALE_RULES if rule.reads_values}
    assert names == {"gaussian", "four_over_six", "ms_eden"}
    # Codes are values of the block, whatever the scales were made of.
    assert dataclasses.replace(FLOOR, correction=MS_EDEN.correction).reads_values
    mine = ScaleRule(name="mine", kinds=("exponent",), scales=lambda data: data.amax)
    assert mine.reads_values
    unseen = FromAmax(lambda data: data.values)
    assert unseen(functions.BlockData(1, (), 2, MXFP4, None)) is None  # pyright: ignore


def test_rules_survive_pickling():
    own = power_of_two("mine", seven)
    called_floor = dataclasses.replace(own, name="floor", largest_scale=3.0)
    for rule in (*SCALE_RULES, own, called_floor):
        again = pickle.loads(pickle.dumps(rule))
        assert again == rule and again.largest_scale == rule.largest_scale
    assert pickle.loads(pickle.dumps(GAUSSIAN)) is GAUSSIAN
    assert FOUR_OVER_SIX.largest_scale == 256
    assert FLOOR.scales == PowerOfTwo(functions.never) != CEIL.scales


def test_the_rule_that_is_meant():
    for format, first in ((MXFP4, FLOOR), (NVFP4, AMAX), (FLOAT8_ROWWISE_E4M3, FLOAT8)):
        assert scale_rule_for(None, format) is first
    assert scale_rule_for("rceil", MXFP4) is RCEIL
    own = power_of_two("mine", seven)
    assert scale_rule_for(own, MXFP4) is own
    with pytest.raises(ValueError, match="fills scales of kind exponent"):
        scale_rule_for(own, NVFP4)
    with pytest.raises(TypeError, match="got scale_rule=3"):
        scale_rule_for(3, MXFP4)  # pyright: ignore


def test_a_rule_is_built_by_names():
    with pytest.raises(TypeError, match="positional"):
        ScaleRule("mine", ("exponent",), seven)  # pyright: ignore


@pytest.mark.one_python(reason="integers of a rule that is compared bit by bit elsewhere")
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
