"""Stochastic rounding: exact values stay, expectations are right, keys decide everything."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.codecs.rounding import stochastic
from mx_jax.formats import MX_FORMATS, MXFP4, MXFP8_E4M3, MXINT8, NVFP4, WHOLE, BlockFormat
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

SHAPE = (4, 40)


def sr(x: jax.Array, format: BlockFormat, key: jax.Array, **options) -> mx_jax.MXArray:
    return mx_jax.quantize(x, format, rounding="stochastic", key=key, **options)


def normal(rng: np.random.Generator, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def test_exact_values_and_signed_zeros_never_move():
    """The values of all finite codes, eight times, under two scales that make them exact."""
    values = {}
    for format in MX_FORMATS:
        codes = (format.element.value(code) for code in range(1 << format.element.bits))
        # INT8's -2 is never written.
        kept = [v for v in codes if math.isfinite(v) and abs(v) <= format.element.max] + [-0.0]
        values[format.name] = np.array([kept, [v * 2.0**-126 for v in kept]], np.float32).repeat(
            8, axis=0
        )

    @quick
    def move(x, key):
        return {f.name: sr(x[f.name], f, key, block_size=WHOLE).dequantize() for f in MX_FORMATS}

    moved = move(values, jax.random.key(3))
    for format in MX_FORMATS:
        expected = values[format.name]
        if format.element.kind == "int":
            expected = np.where(expected == 0, np.float32(0), expected)  # It has no -0.
        assert_bitwise_equal(moved[format.name], expected, what=format.name)


@pytest.mark.slow(but="mxfp4|nvfp4")
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP4, MXINT8, NVFP4], ids=lambda f: f.name)
def test_the_mean_is_the_value(format: BlockFormat, rng: np.random.Generator):
    """Over 4096 keys, each value's mean is within Hoeffding's bound of it.

    Each result is one of two neighbours a step apart. A mean of n of them is further than
    `step * sqrt(log(2 / p) / 2n)` from its expectation with a probability below p; with p = 1e-9
    for each of 160 values, a correct library fails one run in six million (and, keys being fixed,
    none). Another 2^-16 of the step is the bias of 16 random bits.
    """
    trials, probability = 4096, 1e-9
    # RCEIL never clips; neither does NVFP4 away from its tensor's largest value, left out below.
    options = {} if format is NVFP4 else {"scale_rule": "rceil"}
    x = normal(rng)

    @jax.jit
    def statistics(x, keys):
        values = jax.vmap(lambda key: sr(x, format, key, **options).dequantize())(keys)
        return values.mean(axis=0), values.min(axis=0), values.max(axis=0)

    keys = jax.random.split(jax.random.key(11), trials)
    mean, low, high = map(np.asarray, statistics(x, keys))
    step = high - low
    clipped = np.abs(x) > np.maximum(np.abs(low), np.abs(high))
    assert clipped.mean() < (0.1 if format is NVFP4 else 1e-9)
    bound = step * (math.sqrt(math.log(2 / probability) / (2 * trials)) + 2.0**-16) + 1e-6
    assert (np.abs(mean - x) <= bound)[~clipped].all()
    # Both neighbours occur, and they enclose the value.
    assert ((low <= x) & (x <= high))[~clipped].all()
    assert (step > 0).mean() > 0.8


# Of 8 and 16 bits golden data say it bit for bit.
@pytest.mark.parametrize("num_bits", [4, 17])
def test_every_width_is_right_on_average(num_bits: int):
    """1/3 between 0 and 0.5: up with probability 2/3, cut to a multiple of 2^-n."""
    x = jnp.full((4096,), 1 / 3).at[::32].set(6.0)
    q = mx_jax.quantize(x, "mxfp4", rounding=stochastic(num_bits), key=jax.random.key(0))
    mean = float(q.dequantize().reshape(-1, 32)[:, 1:].mean())
    expected = 0.5 * np.floor(2 / 3 * 2**num_bits) / 2**num_bits
    assert abs(mean - expected) < 0.015


@pytest.mark.parametrize("num_bits", [-1, 0, 18, 32])
def test_number_of_random_bits(num_bits: int):
    with pytest.raises(ValueError, match=rf"1 <= num_bits <= 17, got num_bits={num_bits}$"):
        stochastic(num_bits)
