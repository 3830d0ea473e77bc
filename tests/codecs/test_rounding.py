"""Rounding modes by name, and what each drops."""

import copy
import dataclasses

import pytest

from mx_jax.codecs.rounding import ROUNDINGS, STOCHASTIC, rounding_mode, stochastic


def test_names():
    assert [mode.name for mode in ROUNDINGS] == ["nearest", "away", "toward_zero", "stochastic"]
    for mode in ROUNDINGS:
        assert rounding_mode(mode.name) is mode
        assert rounding_mode(mode) is mode
    mine = stochastic(8)
    assert rounding_mode(mine) is mine
    assert repr(mine) == "Rounding(stochastic)"
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
