"""Scales by squared error: what is chosen is the best of what was tried, by NumPy's count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import calibrate
from mx_jax.calibrate.scales import search_for
from mx_jax.formats import BLOCK_FORMATS, MXFP4, NVFP4, BlockFormat

SEARCHED = [
    format
    for format in BLOCK_FORMATS
    if format.name in ("mxfp4", "mxint8", "mxfp8_e4m3", "nvfp4", "nvfp4_one_level")
]


# One for most tests: each other one is compiled anew.
SHAPE = 64, 8


def heavy(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_t(3.0, shape).astype(np.float32)


def values_under(q: mx_jax.MXArray) -> np.ndarray:
    """float64 `[codes, *q.shape]`: what each code would be at each place, by decoding it there."""
    element = q.format.element
    # An integer's most negative value is never given: a cast saturates alike on both sides.
    codes = (c for c in range(1 << element.bits) if abs(element.value(c)) <= element.max)
    filled = (dataclasses.replace(q, codes=jnp.full(q.shape, code, jnp.uint8)) for code in codes)
    return np.stack([np.asarray(mx_jax.dequantize(each), np.float64) for each in filled])


def errors(w: np.ndarray, q: mx_jax.MXArray, size: int) -> np.ndarray:
    """Of each block along the first axis, in float64."""
    lost = np.square(np.asarray(q.dequantize(), np.float64) - w)
    return lost.reshape(-1, size, w.shape[1]).sum(1)


@pytest.mark.slow(but="mxfp4|nvfp4$")
@pytest.mark.parametrize("format", SEARCHED, ids=lambda format: format.name)
def test_no_block_loses_more_than_under_the_first_scale(format: BlockFormat, rng):
    w = heavy(rng, 128, 8)
    result = calibrate.search_scales(w, format)
    assert result.format == format and result.shape == w.shape
    search = search_for(format.scale, "")
    first = mx_jax.quantize(w, format, axis=0, scale_rule=search.first)
    before, after = (errors(w, q, format.block[1]) for q in (first, result))
    assert (after <= before * (1 + 1e-6)).all() and (after < 0.99 * before).any()
    # The codes are the nearest ones under the scales.
    nearest = np.abs(values_under(result) - w).min(0)
    distance = np.abs(np.asarray(result.dequantize(), np.float64) - w)
    np.testing.assert_allclose(distance, nearest, rtol=1e-5, atol=1e-7)


@pytest.mark.slow(but="mxfp4")
@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda format: format.name)
def test_every_scale_in_reach_is_worse(format: BlockFormat, rng):
    """Tried by hand, one block of each: the neighbours of the stored scale, an octave each way."""
    w, size = heavy(rng, *SHAPE), format.block[1]
    result = calibrate.search_scales(w, format)
    best = errors(w, result, size)
    search = search_for(format.scale, "")
    first = mx_jax.quantize(w, format, axis=0, scale_rule=search.first)
    for step in (-1, 1) if format == MXFP4 else range(-8, 9):
        moved = np.clip(np.asarray(result.scales, np.int32) + step, 0, 254).astype(np.uint8)
        other = dataclasses.replace(result, scales=jnp.asarray(moved))
        distance = np.abs(values_under(other) - w).min(0)
        error = np.square(distance).reshape(-1, size, 8).sum(1)
        # Farther than an octave from the first scale nothing was tried.
        away = moved.astype(np.int32) - np.asarray(first.scales, np.int32)
        inside = (moved >= search.smallest) & (moved <= search.largest)
        tried = (np.abs(away) <= max(search.steps)) & inside
        assert (best <= error * (1 + 1e-6))[tried].all()


def test_partial_blocks_and_blocks_that_are_no_number(rng):
    w = heavy(rng, 40, 70)
    w[3, 7] = np.nan
    result = calibrate.search_scales(w, "mxfp4", axis=-2)
    plain = mx_jax.quantize(w, "mxfp4", axis=-2)
    assert result.scales.shape == plain.scales.shape and result.blocks == plain.blocks
    nans = [np.isnan(np.asarray(q.dequantize())) for q in (result, plain)]
    np.testing.assert_array_equal(*nans)
    zeros = calibrate.search_scales(np.zeros(SHAPE, np.float32), "nvfp4")
    assert not np.asarray(zeros.dequantize()).any()


def test_wrong_calls():
    w = jnp.ones((64, 4))
    with pytest.raises(ValueError, match=r"search_scales: .*got scale=.*kind=divisor; quantize by"):
        calibrate.search_scales(w, "float8_rowwise_e4m3")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_no_tensor_loses_more_than_by_a_plain_cast(format: str, rng):
    """Heavy tails too: there a tensor scale with room for larger ones costs small blocks."""
    for degrees in (1.2, 2, 3, 100):
        for _ in range(8):
            w = rng.standard_t(degrees, SHAPE).astype(np.float32)
            before, after = (
                np.sum((np.asarray(q.dequantize(), np.float64) - w) ** 2)
                for q in (mx_jax.quantize(w, format, axis=0), calibrate.search_scales(w, format))
            )
            assert after <= before * (1 + 1e-6), degrees


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("exponent", [-100, 100])
def test_squares_outside_float32_are_compared_all_the_same(format: str, exponent: int, rng):
    """The same scales, moved: nothing is tried in vain."""
    w = heavy(rng, *SHAPE)
    near = calibrate.search_scales(w, format)
    far = calibrate.search_scales(np.ldexp(w, exponent), format)
    result = np.ldexp(np.asarray(far.dequantize()), -exponent)
    np.testing.assert_allclose(result, near.dequantize(), rtol=1e-6)


def test_of_equal_errors_the_first_wins():
    """Ones under MXFP4: scales of 1, 1/2 and 1/4 all hold them; FLOOR's comes first."""
    w = jnp.ones(SHAPE)
    floor = mx_jax.quantize(w, "mxfp4", axis=0, scale_rule="floor")
    result = calibrate.search_scales(w, "mxfp4")
    np.testing.assert_array_equal(result.dequantize(), w)
    np.testing.assert_array_equal(result.scales, floor.scales)


def test_the_search_is_one_program():
    """The casts that are tried are one loop, however many."""
    w = jax.ShapeDtypeStruct((64, 4), jnp.float32)
    text = jax.jit(lambda w: calibrate.search_scales(w, "nvfp4")).lower(w).as_text()
    assert text.count("stablehlo.while") == 1
