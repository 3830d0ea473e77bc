"""Rounding modes by name, and what each drops."""

import copy
import dataclasses
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.codecs.rounding import (
    AWAY,
    NEAREST,
    ROUNDINGS,
    STOCHASTIC,
    TOWARD_ZERO,
    Rounding,
    rounding_mode,
    stochastic,
)

SHIFTS = (17, 18, 20, 23, 24, 25, 26, 31, 40, 300)
SIGNIFICANDS = sorted(
    {0, 1, 2, 3, (1 << 24) - 1, 1 << 23, (1 << 23) + 1}
    | {k * (1 << s) + d for s in (16, 17, 19, 21) for k in (1, 3, 5, 7) for d in (-1, 0, 1)}
)


def expected(name: str, value: Fraction) -> int:
    floor = math.floor(value)
    if name == "toward_zero":
        return floor
    if name == "away":
        return math.floor(value + Fraction(1, 2))
    return round(value)  # Python rounds ties to even.


@pytest.mark.parametrize("mode", [NEAREST, AWAY, TOWARD_ZERO], ids=lambda mode: mode.name)
def test_deterministic_modes(mode: Rounding):
    significands = jnp.asarray(SIGNIFICANDS, jnp.int32)
    for shift in SHIFTS:
        actual = mode.apply(significands, jnp.int32(shift), None)
        wanted = [expected(mode.name, Fraction(s, 1 << shift)) for s in SIGNIFICANDS]
        np.testing.assert_array_equal(actual, wanted, err_msg=f"shift {shift}")


def test_names():
    assert [mode.name for mode in ROUNDINGS] == ["nearest", "away", "toward_zero", "stochastic"]
    for mode in ROUNDINGS:
        assert rounding_mode(mode.name) is mode
        assert rounding_mode(mode) is mode
    own = stochastic(8)
    assert rounding_mode(own) is own
    assert repr(own) == "Rounding(stochastic)"
    assert (
        [mode.random_bits for mode in ROUNDINGS]
        == [0, 0, 0, 16]
        == [0, 0, 0, STOCHASTIC.random_bits]
    )
    drawn = [mode.is_stochastic for mode in (*ROUNDINGS, stochastic(1), stochastic(17))]
    assert drawn == [False, False, False, True, True, True]


@pytest.mark.parametrize("num_bits", [-1, 0, 18, 32])
def test_number_of_random_bits(num_bits: int):
    with pytest.raises(ValueError, match=rf"1 <= num_bits <= 17, got num_bits={num_bits}$"):
        stochastic(num_bits)


def test_stochastic_modes_are_equal_by_width_alone():
    """No cache has to remember that they are."""
    apart = dataclasses.replace(STOCHASTIC, apply=copy.copy(STOCHASTIC.apply))
    assert apart.apply is not STOCHASTIC.apply
    assert apart == STOCHASTIC and hash(apart) == hash(STOCHASTIC) and apart.is_stochastic
    assert stochastic(7) != dataclasses.replace(stochastic(7), apply=STOCHASTIC.apply)
