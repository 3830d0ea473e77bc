"""Scales of another kind: not one value changes, or it is refused with the count of blocks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint, formats
from mx_jax.checkpoint import transcoding
from mx_jax.checkpoint.layouts import named
from mx_jax.formats import F32, MXFP4, NVFP4, BlockFormat
from tests.checkpoint.stored import assert_same, draw, values

FP4_E4M3 = dataclasses.replace(formats.NVFP4_ONE_LEVEL, name="fp4_e4m3_32", block=(1, 32))
FP4_F32 = dataclasses.replace(MXFP4, name="fp4_f32", scale=F32)


def mxfp4(exponents: Any, rng: np.random.Generator, codes: int | None = None) -> mx_jax.MXArray:
    """Rows of one block each; without zeros, unless all codes are to be one."""
    scales = np.asarray(exponents, np.uint8).reshape(-1, 1)
    source = rng.integers(1, 8, (len(scales), 32)) if codes is None else np.full((1, 32), codes)
    return dataclasses.replace(
        draw(MXFP4, (len(scales), 32), rng),
        codes=jnp.asarray(np.broadcast_to(source, (len(scales), 32)).astype(np.uint8)),
        scales=jnp.asarray(scales),
    )


def test_18_octaves(rng: np.random.Generator):
    """The largest exponent becomes 2^8, the smallest 2^-9, E4M3's last power of two."""
    x = mxfp4(np.arange(100, 118), rng)
    y = checkpoint.transcode(x, "nvfp4")
    assert y.format == NVFP4 and y.blocks == ((-1, 16),) and y.scales.shape == (18, 2)
    assert y.codes is x.codes and y.tensor_scale is not None and y.tensor_scale.shape == (1, 1)
    assert float(y.tensor_scale[0, 0]) == 2.0 ** (117 - 127 - 8)
    np.testing.assert_array_equal(values(y), values(x))
    assert_same(checkpoint.transcode(x, "nvfp4", tensor_scale=2.0**-18), y)
    # And back: pairs of blocks agree.
    again = checkpoint.transcode(y, "mxfp4")
    np.testing.assert_array_equal(np.asarray(again.scales), np.asarray(x.scales))
    assert again.format == MXFP4 and again.tensor_scale is None


def test_19_octaves_do_not_fit(rng: np.random.Generator):
    x = mxfp4([100, 100, *range(101, 119)], rng)
    with pytest.raises(ValueError, match="4 of 40 blocks of nvfp4 cannot hold what mxfp4"):
        checkpoint.transcode(x, "nvfp4")


def test_blocks_of_zeros_take_any_scale(rng: np.random.Generator):
    """Zeros of either sign; a NaN scale makes no zeros."""
    x = mxfp4([1, 127], rng)
    codes = np.asarray(x.codes).copy()
    codes[0] = [0, 8] * 16
    x = dataclasses.replace(x, codes=jnp.asarray(codes))
    y = checkpoint.transcode(x, NVFP4)
    np.testing.assert_array_equal(np.signbit(values(y)), np.signbit(values(x)))
    # The other block's scale is the largest, as if there were no zeros.
    assert transcoding.single_tensor_scale(y) == 2.0**-8
    y = checkpoint.transcode(x, FP4_F32)
    np.testing.assert_array_equal(np.asarray(y.scales), [[0], [1]])
    nan = dataclasses.replace(x, scales=x.scales.at[0].set(255))
    with pytest.raises(ValueError, match="2 of 4 blocks"):
        checkpoint.transcode(nan, NVFP4)
    zeros = checkpoint.transcode(mxfp4([127], rng, codes=0), "nvfp4")
    assert not values(zeros).any() and transcoding.single_tensor_scale(zeros) == 1


def test_codes_under_a_scale_of_zero(rng: np.random.Generator):
    """E4M3 and float32 have a zero, E8M0 has none."""
    x = checkpoint.transcode(mxfp4([127, 128], rng), FP4_F32)
    x = dataclasses.replace(x, scales=x.scales.at[0].set(0))
    y = checkpoint.transcode(x, NVFP4)
    np.testing.assert_array_equal(values(y), values(x))
    with pytest.raises(ValueError, match=r"1 of 2 blocks of mxfp4 cannot hold"):
        checkpoint.transcode(x, "mxfp4")


@pytest.mark.parametrize("exponent", [0, 1, 9, 10, 253])
def test_the_ends_of_e8m0(exponent: int, rng: np.random.Generator):
    """No tensor scale below 2^-126 is chosen, which machines flush to zero."""
    y = checkpoint.transcode(mxfp4([exponent], rng), "nvfp4")
    assert transcoding.single_tensor_scale(y) == max(2.0 ** (exponent - 135), 2.0**-126)
    assert y.scales.tolist() == [
        [np.array(2.0 ** min(8, exponent - 1), "float8_e4m3fn").view("u1")] * 2
    ]


@pytest.mark.parametrize("target", [FP4_E4M3, FP4_F32], ids=str)
def test_other_scales(target: BlockFormat, rng: np.random.Generator):
    """E8M0 to E4M3 and float32, and back."""
    x = mxfp4([118, 127, 135], rng)
    y = checkpoint.transcode(x, target)
    np.testing.assert_array_equal(values(y), values(x))
    assert (y.format, y.tensor_scale) == (target, None)
    assert_same(checkpoint.transcode(y, "mxfp4"), x)
    for exponent in (117, 136) if target == FP4_E4M3 else (0,):
        with pytest.raises(ValueError, match=f"1 of 2 blocks of {target.name} cannot hold"):
            checkpoint.transcode(mxfp4([127, exponent], rng), target)


def test_squares_and_transposes(rng: np.random.Generator):
    """DeepSeek's blocks of 128 x 128 from E8M0 to float32; blocks along the first axis."""
    x = draw(named("deepseek-v3.1").format, (130, 200), rng)
    x = dataclasses.replace(x, codes=x.codes & 0x3F)
    y = checkpoint.transcode(x, "deepseek-v3")
    assert y.scales.shape == (2, 2) and y.blocks == x.blocks
    np.testing.assert_array_equal(values(y), values(x))
    z = draw(MXFP4, (40, 3), rng, axis=-2)
    z = dataclasses.replace(z, scales=z.scales & 7 | 120)
    w = checkpoint.transcode(z, "nvfp4")
    assert w.blocks == ((-2, 16),) and w.scales.shape == (3, 3)
    np.testing.assert_array_equal(values(w), values(z))


def test_scales_that_are_no_powers_of_two(rng: np.random.Generator):
    """NVFP4 keeps its tensor scale, one an expert too; blocks that differ do not become one."""
    x = draw(NVFP4, (2, 3, 32), rng)
    x = dataclasses.replace(
        x, scales=x.scales & 0x3F | 1, tensor_scale=jnp.array([0.1, 0.3]).reshape(2, 1, 1)
    )
    y = checkpoint.transcode(x, "modelopt-nvfp4")
    assert_same(y, x)
    with pytest.raises(ValueError, match="12 of 12 blocks of nvfp4 cannot hold"):
        checkpoint.transcode(x, "nvfp4-pack-quantized")  # divides, and 0.1 has no exact reciprocal
    quarters = dataclasses.replace(x, tensor_scale=jnp.array([0.25, 4.0]).reshape(2, 1, 1))
    y = checkpoint.transcode(quarters, "nvfp4-pack-quantized")
    np.testing.assert_array_equal(values(y), values(quarters))
    with pytest.raises(ValueError, match=r"\d of 6 blocks of mxfp4 cannot hold what nvfp4"):
        checkpoint.transcode(x, "mxfp4")


def test_pairs_that_differ_are_not_joined(rng: np.random.Generator):
    """Halves under 1 and 2 are no block of 32, unless one of them has zeros alone."""
    x = checkpoint.transcode(mxfp4([127, 127], rng), "nvfp4")
    x = dataclasses.replace(x, scales=x.scales.at[0, 0].set(x.scales[0, 0] - 8))
    with pytest.raises(ValueError, match="1 of 2 blocks of mxfp4 cannot hold"):
        checkpoint.transcode(x, "mxfp4")
    zeros = dataclasses.replace(x, codes=x.codes.at[0, :16].set(0))
    y = checkpoint.transcode(zeros, "mxfp4")
    np.testing.assert_array_equal(values(y), values(zeros))


def test_what_has_no_other_form(rng: np.random.Generator):
    for x, target in (
        (draw(MXFP4, (2, 32), rng), "mxfp8_e4m3"),
        (draw(MXFP4, (32, 2), rng, axis=-2), "mxfp4-pack-quantized"),
        (draw(formats.MXFP4_2D, (32, 32), rng), "nvfp4"),
        (draw(formats.FLOAT8_ROWWISE_E4M3, (2, 32), rng), "float8_blockwise_e4m3"),
    ):
        with pytest.raises(ValueError, match=f"transcode: .* takes .* got format={x.format.name}"):
            checkpoint.transcode(x, target)


def test_tensor_scales_that_cannot_be(rng: np.random.Generator):
    """A normal number of float32, for a format that has one; zeros alone fit under the smallest."""
    zeros, refused = mxfp4([127], rng, 0), r"got tensor_scale=.* it is a positive number"
    smallest = checkpoint.transcode(zeros, "nvfp4", tensor_scale=2.0**-126)
    assert transcoding.single_tensor_scale(smallest) == 2.0**-126
    for target, scale in (
        *(("nvfp4", scale) for scale in (2.0**-127, 0.0, -1.0, np.inf, np.nan)),
        ("mxfp4", 0.5),
    ):
        with pytest.raises(ValueError, match=refused):
            checkpoint.transcode(zeros, target, tensor_scale=scale)


def test_a_changed_value_is_an_error(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    """What a mistake in this library would do: every scale twice as large."""
    encoded = transcoding.encoded_scales
    double = lambda wanted, scale: encoded(2 * wanted, scale)  # noqa: E731
    monkeypatch.setattr(transcoding, "encoded_scales", double)
    with pytest.raises(AssertionError, match="fp4_f32 changed a value; please report it"):
        checkpoint.transcode(mxfp4([127], rng), FP4_F32)
