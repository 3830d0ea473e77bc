"""MS-EDEN: stored scales by hand, what it leaves alone, who refuses it, and that it is unbiased."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.pallas_gpu import quantize as pallas_quantize
from mx_jax.backends.target import Target
from mx_jax.codecs.blocks import scales_shape
from mx_jax.codecs.rounding import NEAREST, STOCHASTIC, Rounding
from mx_jax.formats import NVFP4, NVFP4_2D
from mx_jax.recipes import Recipe
from mx_jax.reference import hadamard
from mx_jax.reference.quantize import quantize
from mx_jax.reference.scale_rules import AMAX, AMAX_HEADROOM, MS_EDEN, ScaleRule
from tests.backends.mosaic import with_any_jax
from tests.quick import quick

E4M3 = ml_dtypes.float8_e4m3fn
F = np.float32
# Quartet II's constants, as its training code has them.
LARGEST_SCALE, LARGEST = 255.99, 6 / (17 / 16 * 0.93)


def in_groups_of(group: int) -> ScaleRule:
    eden = MS_EDEN.correction
    assert eden is not None
    return dataclasses.replace(MS_EDEN, correction=dataclasses.replace(eden, group=group))


def ms_eden(x: np.ndarray, bits: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Values of codes, and stored scales, in float64 but where a step is an E4M3 or a float32."""
    p = F(np.abs(x).max() / (LARGEST_SCALE * LARGEST))
    blocks = x.reshape(len(x), -1, 16).astype(np.float64)
    divided = ((np.abs(blocks).max(2) / LARGEST).astype(F) / p).astype(E4M3).astype(np.float64)
    over = blocks / (divided * p)[:, :, None]
    q = np.clip(over, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    shape = (len(x), -1, group)
    length, along = ((over * other).reshape(shape).sum(2) for other in (over, q))
    wanted = divided * np.repeat(length / along, group // 16, axis=1)
    # E4M3's step at wanted: 3 bits below the leading one, the smallest 2^-9.
    step = 2.0 ** (np.maximum(np.floor(np.log2(wanted)), -6) - 3)
    down = np.floor(wanted / step)
    up = np.floor((wanted / step - down) * 2**16) + bits >= 2**16
    return q.reshape(x.shape), ((down + up) * step).astype(E4M3)


@pytest.mark.parametrize("group", [16, 128])
def test_by_hand(group: int):
    rng = np.random.default_rng(group)
    x = rng.standard_normal((6, 256), F) * 2.0 ** rng.integers(-9, 1, (6, 1)).astype(F)
    bits = rng.integers(0, 1 << 16, (6, 16), dtype=np.int32)
    run = quick(
        lambda x, bits: quantize(x, NVFP4, ((-1, 16),), in_groups_of(group), random_bits=bits)
    )
    found = run(x, bits)
    values, scales = ms_eden(x, bits, group)
    codes = np.asarray(found.codes).view(ml_dtypes.float4_e2m1fn)
    # A quotient in float32 may fall on the other side of a tie, a sum on that of a random number.
    assert np.mean(codes.astype(F) == values) > 0.998
    assert np.mean(np.asarray(found.scales).view(E4M3) == scales) > 0.97
    apart = np.asarray(found.scales).astype(int) - scales.view(np.uint8)
    assert np.abs(apart).max() <= 1
    np.testing.assert_allclose(found.tensor_scale, [[np.abs(x).max() / LARGEST_SCALE / LARGEST]])


def test_a_partial_group_and_another_axis():
    """80 columns are five blocks: a group of eight is not full. Along axis 0 the same of x^T."""
    x = np.random.default_rng(0).standard_normal((3, 80), F)
    padded = np.pad(x, ((0, 0), (0, 48)))

    @functools.partial(quick, static_argnums=1)
    def cast(x, axis):
        bits = jnp.zeros(scales_shape(x.shape, ((axis, 16),)), jnp.int32)
        return quantize(x, NVFP4, ((axis, 16),), in_groups_of(128), random_bits=bits)

    rows = cast(x, -1)
    columns = cast(x.T, -2)
    np.testing.assert_array_equal(rows.codes, columns.codes.T)
    np.testing.assert_array_equal(rows.scales, columns.scales.T)
    np.testing.assert_array_equal(rows.scales, cast(padded, -1).scales[:, :5])


def test_what_is_lost_stays_in_its_block():
    """NaN is its own block's; zeros stay zeros, and count for nobody."""
    x = np.random.default_rng(1).standard_normal((1, 128), F)
    bits = np.zeros((1, 8), np.int32)
    run = quick(lambda x: quantize(x, NVFP4, ((-1, 16),), in_groups_of(128), random_bits=bits))
    zeroed, lost = np.array(x), np.array(x)
    zeroed[:, 16:32], lost[:, 16] = 0, np.nan
    without, found = run(zeroed), run(lost)
    others = np.arange(8) != 1
    np.testing.assert_array_equal(found.scales[:, others], without.scales[:, others])
    assert found.scales[0, 1] == 0x7F and jnp.all(found.codes[:, 16:32] == 0)
    assert not np.any(run(np.zeros_like(x)).dequantize())
    everything = run(np.full_like(x, np.inf))
    assert np.all(np.isnan(everything.dequantize()))
    # Beside a single value the least that was counted of the lost block would show.
    single = np.zeros_like(x)
    single[0, 0] = 1
    lost = np.array(single)
    lost[0, 16] = np.nan
    assert run(lost).scales[0, 0] == run(single).scales[0, 0]


def test_square_blocks_share_with_those_beside_them():
    """A group is eight of a row of blocks: what one of them lost makes all their scales larger."""
    x = np.zeros((2, 32, 256), F)
    x[0, :16, 16:32] = 0.04  # rounded to zero
    x[:, ::16, ::16] = 1
    blocks, bits = ((-2, 16), (-1, 16)), np.full((2, 2, 16), 1 << 15, np.int32)

    @functools.partial(quick, static_argnums=1)
    def scales(x, group):
        return quantize(x, NVFP4_2D, blocks, in_groups_of(group), random_bits=bits).scales

    larger = np.zeros((2, 2, 16), bool)
    larger[0, 0, :8] = True
    np.testing.assert_array_equal(scales(x, 128) > scales(np.where(x < 1, 0, x), 128), larger)
    larger[0, 0] = np.arange(16) == 1
    np.testing.assert_array_equal(scales(x, 16) > scales(np.where(x < 1, 0, x), 16), larger)


NUM_DRAWS = 16


def slope_and_error(x: np.ndarray, rule: ScaleRule, rounding: Rounding) -> tuple[np.ndarray, float]:
    """`<Q(x), x> / <x, x>` of draws that rotate x anew, and the mean relative squared error."""
    rng = np.random.default_rng(4)
    signs = rng.choice(np.array([-1, 1], F), (NUM_DRAWS, 1, 1, 128))
    turned = (x.reshape(1, len(x), -1, 128) * signs) @ hadamard.matrix(128)
    shape = (NUM_DRAWS, *x.shape[:1], x.shape[1] // (16 if rule.rounding.random_bits else 1))
    bits = rng.integers(0, 1 << 16, shape, dtype=np.int32)
    run = quick(
        lambda y, bits: quantize(
            y, NVFP4, ((-1, 16),), rule, rounding, random_bits=bits
        ).dequantize()
    )
    found = np.asarray(run(turned.reshape(NUM_DRAWS, *x.shape), bits), np.float64)
    exact = turned.reshape(found.shape)
    slopes = (found * exact).sum((1, 2)) / np.square(exact).sum((1, 2))
    return slopes, float(np.square(found - exact).sum() / np.square(exact).sum())


def test_unbiased_with_less_than_half_the_error_of_stochastic_rounding():
    """99.9 % intervals of the slope, of 16 draws: 4.07 standard errors (Student's t)."""
    x = np.random.default_rng(0).standard_normal((32, 2048), F)
    off, half, error = {}, {}, {}
    for name, rule, rounding in (
        ("eden", MS_EDEN, NEAREST),
        ("headroom", AMAX_HEADROOM, STOCHASTIC),
        ("none", AMAX, STOCHASTIC),
    ):
        slopes, error[name] = slope_and_error(x, rule, rounding)
        off[name] = abs(slopes.mean() - 1)
        half[name] = 4.07 * slopes.std(ddof=1) / NUM_DRAWS**0.5
    for name in ("eden", "headroom"):
        assert off[name] < half[name] < 1.5e-3, (name, off, half)
    # Clipped maxima are seen by the same measure.
    assert off["none"] > 2 * half["none"], (off, half)
    assert error["eden"] < 0.42 * error["headroom"] and error["eden"] < 0.53 * error["none"]


def test_headroom_never_clips():
    """In blocks of all sizes of amax that normal scales hold; without it half do."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4096, 16), F) * np.exp2(rng.uniform(-11, 0, (4096, 1))).astype(F)
    over = {}
    for rule in (AMAX_HEADROOM, AMAX):
        found = quick(
            functools.partial(quantize, format=NVFP4, blocks=((-1, 16),), scale_rule=rule)
        )
        cast = found(x)
        scale = np.asarray(cast.scale_values, np.float64) * np.float64(cast.tensor_scale)
        over[rule.name] = np.abs(x).max(1) / scale[:, 0]
    assert 5.3 < over["amax_headroom"].min() < over["amax_headroom"].max() <= 6 * (1 + 2**-20)
    assert 0.4 < np.mean(over["amax"] > 6 * (1 + 2**-20)) < 0.6


def test_scales_draw_a_number_for_each_block():
    call = QuantizeCall(
        shape=(4, 40),
        dtype=np.dtype(np.float32),
        format=NVFP4,
        blocks=((-1, 16),),
        scale_rule=MS_EDEN,
        rounding=NEAREST,
    )
    assert (call.random_bits, call.random_shape) == (16, (4, 3))
    plain = dataclasses.replace(call, scale_rule=AMAX)
    assert (plain.random_bits, plain.random_shape) == (0, (4, 40))


def on_blackwell(call: QuantizeCall) -> str | None:
    target = Target(platform="cuda", compute_capability=(10, 0))
    return pallas_quantize.rejects(call, target)


def test_the_gpu_kernel_refuses_it(monkeypatch: pytest.MonkeyPatch):
    """Also with scales that it knows: what a rule stores afterwards is part of it."""
    with_any_jax(monkeypatch)
    call = QuantizeCall(
        shape=(128, 128),
        dtype=np.dtype(np.float32),
        format=NVFP4,
        blocks=((-1, 16),),
        scale_rule=dataclasses.replace(AMAX, correction=MS_EDEN.correction),
        rounding=NEAREST,
    )
    reason = "stores scales as the rule gives them, got 'amax', which corrects them"
    plain = dataclasses.replace(call, scale_rule=AMAX)
    assert on_blackwell(call) == reason and on_blackwell(plain) is None


def test_a_key_is_needed_and_fits():
    x = jnp.ones((2, 32))
    with pytest.raises(
        ValueError, match=r"quantize: stochastic rounding needs a key, got key=None"
    ):
        mx_jax.quantize(x, "nvfp4", scale_rule="ms_eden")
    with pytest.raises(ValueError, match=r"a key is for stochastic rounding only"):
        mx_jax.quantize(x, "nvfp4", scale_rule="amax_headroom", key=jax.random.key(0))


@pytest.mark.slow
def test_gradients_are_right_on_average():
    """Of what the output's product took: 99.9 % intervals of 32 draws (3.63 standard errors)."""
    rng, recipe = np.random.default_rng(0), recipes.quartet_ii()
    x, w, g = (rng.standard_normal(s, F) for s in ((64, 128), (128, 64), (64, 64)))
    exact = mx_jax.inspect.passes(recipe)["quartet_ii, forward alone"]

    def gradients(recipe: Recipe, key: jax.Array | None = None) -> Any:
        _, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
        return pullback(g)

    drawn = quick(jax.vmap(lambda key: gradients(recipe, key)))(
        jax.random.split(jax.random.key(1), 32)
    )
    for found, value in zip(drawn, quick(lambda: gradients(exact))(), strict=True):
        value = np.asarray(value, np.float64)
        slopes = np.einsum("dij,ij->d", np.asarray(found, np.float64), value) / np.sum(value**2)
        half = 3.63 * slopes.std(ddof=1) / np.sqrt(32)
        assert abs(slopes.mean() - 1) < half < 0.02, (slopes.mean(), half)
