"""sqnr_db and saturated_fraction against their definitions."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.inspect import saturated_fraction, sqnr_db


def test_sqnr_is_its_formula(rng: np.random.Generator):
    exact = rng.standard_normal((50, 70))
    noisy = exact + 0.01 * rng.standard_normal((50, 70))
    expected = 10 * math.log10(np.sum(exact**2) / np.sum((exact - noisy) ** 2))
    measured = sqnr_db(exact.astype(np.float32), noisy.astype(np.float32))
    assert isinstance(measured, float)
    assert measured == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("size", [4.0, 2.0**100, 2.0**-100], ids=["1", "large", "small"])
@pytest.mark.parametrize(("factor", "decibels"), [(0.9, 20.0), (0.99, 40.0), (1.5, 6.0206)])
def test_sqnr_of_known_noise(factor: float, decibels: float, size: float):
    """Near the ends of float32's range too, where squares leave it: the ratio is what counts."""
    x = np.full(100, size, np.float32)
    assert sqnr_db(x, x * np.float32(factor)) == pytest.approx(decibels, abs=1e-2)


def test_sqnr_of_equal_arrays_is_infinite():
    assert sqnr_db(np.ones(3), np.ones(3)) == sqnr_db(np.zeros(3), np.zeros(3)) == math.inf
    assert math.isnan(sqnr_db(np.full(3, np.nan), np.full(3, np.nan)))


def test_sqnr_takes_any_float_and_mxarrays_of_one_shape(rng: np.random.Generator):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    quantized = mx_jax.quantize(x, "mxfp8_e4m3")
    expected = sqnr_db(x, quantized.dequantize())
    assert sqnr_db(x, quantized) == expected
    assert 25 < sqnr_db(jnp.asarray(x, jnp.bfloat16), quantized) < expected + 1
    message = "sqnr_db: shapes must agree, got exact.shape=(3,), approximate.shape=(1, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        sqnr_db(np.ones(3), np.ones((1, 3)))


@pytest.mark.parametrize(("rule", "fraction"), [("floor", 3 / 32), ("rceil", 0.0)])
def test_saturated_fraction_counts_what_is_clipped(rule: str, fraction: float):
    """FLOOR of amax=7.9 has scale 1: of 6, -6, 6.1, 7 and 7.9 the last three do not fit."""
    x = np.zeros(32, np.float32)
    x[:5] = [6, -6, 6.1, -7, 7.9]
    assert saturated_fraction(x, mx_jax.quantize(x, "mxfp4", scale_rule=rule)) == fraction


def test_saturated_fraction_of_int8():
    """Code -127 is as much at the limit as 127 is."""
    x = np.array([[127, 127.4, 127.9, -127.9, -127]], np.float32) / 64
    quantized = mx_jax.quantize(x, "mxint8", block_size=8, scale_rule="floor")
    assert saturated_fraction(x, quantized) == pytest.approx(3 / 5)
