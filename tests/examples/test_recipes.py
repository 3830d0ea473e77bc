"""Recipes from outside.

Quartet II: stored scales by hand, what they leave alone, and unbiased gradients. By step: values,
and one compilation for each phase.
"""

import dataclasses
import functools
import pickle
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from examples.recipes.quartet_ii import MS_EDEN, quartet_ii
from examples.recipes.schedule import Schedule, heal
from mx_jax import recipes
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.cpu_ffi import casts
from mx_jax.codecs.blocks import scales_shape
from mx_jax.codecs.rounding import NEAREST, STOCHASTIC, Rounding
from mx_jax.formats import NVFP4
from mx_jax.recipes import operand
from mx_jax.reference import hadamard
from mx_jax.reference.quantize import quantize
from mx_jax.reference.scale_rules import AMAX, AMAX_HEADROOM, ScaleRule
from tests.quick import quick

E4M3 = ml_dtypes.float8_e4m3fn
F = np.float32
# Quartet II's constants, as its training code has them.
LARGEST_SCALE, LARGEST = 255.99, 6 / (17 / 16 * 0.93)


def ms_eden(x: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of codes, and stored scales, in float64 but where a step is an E4M3 or a float32."""
    p = F(np.abs(x).max() / (LARGEST_SCALE * LARGEST))
    blocks = x.reshape(len(x), -1, 16).astype(np.float64)
    divided = ((np.abs(blocks).max(2) / LARGEST).astype(F) / p).astype(E4M3).astype(np.float64)
    over = blocks / (divided * p)[:, :, None]
    q = np.clip(over, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    length, along = ((over * other).sum(2) for other in (over, q))
    wanted = divided * length / along
    # E4M3's step at wanted: 3 bits below the leading one, the smallest 2^-9.
    step = 2.0 ** (np.maximum(np.floor(np.log2(wanted)), -6) - 3)
    down = np.floor(wanted / step)
    up = np.floor((wanted / step - down) * 2**16) + bits >= 2**16
    return q.reshape(x.shape), ((down + up) * step).astype(E4M3)


def test_scales_by_hand():
    rng = np.random.default_rng(16)
    x = rng.standard_normal((6, 256), F) * 2.0 ** rng.integers(-9, 1, (6, 1)).astype(F)
    bits = rng.integers(0, 1 << 16, (6, 16), dtype=np.int32)
    run = quick(lambda x, bits: quantize(x, NVFP4, ((-1, 16),), MS_EDEN, random_bits=bits))
    result = run(x, bits)
    values, scales = ms_eden(x, bits)
    codes = np.asarray(result.codes).view(ml_dtypes.float4_e2m1fn)
    # A quotient in float32 may fall on the other side of a tie, a sum on that of a random number.
    assert np.mean(codes.astype(F) == values) > 0.998
    assert np.mean(np.asarray(result.scales).view(E4M3) == scales) > 0.97
    apart = np.asarray(result.scales).astype(int) - scales.view(np.uint8)
    assert np.abs(apart).max() <= 1
    np.testing.assert_allclose(result.tensor_scale, [[np.abs(x).max() / LARGEST_SCALE / LARGEST]])


def test_what_is_lost_stays_in_its_block():
    """NaN is its own block's; zeros stay zeros; a partial block and another axis are alike."""
    x = np.random.default_rng(1).standard_normal((1, 72), F)
    x[:, 32:48], x[:, 16] = 0, np.nan

    @functools.partial(quick, static_argnums=1)
    def cast(x: jax.Array, axis: int) -> mx_jax.MXArray:
        bits = jnp.zeros(scales_shape(x.shape, ((axis, 16),)), jnp.int32)
        return quantize(x, NVFP4, ((axis, 16),), MS_EDEN, random_bits=bits)

    rows, columns = cast(x, -1), cast(x.T, -2)
    assert rows.scales[0, 1] == 0x7F and not np.any(rows.codes[:, 16:32])
    values = np.asarray(rows.dequantize())
    assert np.isnan(values[:, 16:32]).all() and not values[:, 32:48].any()
    others = np.r_[:16, 48:72]
    np.testing.assert_allclose(values[:, others], x[:, others], rtol=0.4, atol=0.1)
    np.testing.assert_array_equal(rows.codes, columns.codes.T)
    np.testing.assert_array_equal(rows.scales, columns.scales.T)
    assert np.isnan(cast(np.full_like(x, np.inf), -1).dequantize()).all()


NUM_DRAWS = 16


def slope_and_error(x: np.ndarray, rule: ScaleRule, rounding: Rounding) -> tuple[np.ndarray, float]:
    """`<Q(x), x> / <x, x>` of draws that rotate x anew, and the mean relative squared error."""
    rng = np.random.default_rng(4)
    signs = rng.choice(np.array([-1, 1], F), (NUM_DRAWS, 1, 1, 128))
    rotated = (x.reshape(1, len(x), -1, 128) * signs) @ hadamard.matrix(128)
    shape = (NUM_DRAWS, *x.shape[:1], x.shape[1] // (16 if rule.rounding.random_bits else 1))
    bits = rng.integers(0, 1 << 16, shape, dtype=np.int32)
    run = quick(
        lambda y, bits: quantize(
            y, NVFP4, ((-1, 16),), rule, rounding, random_bits=bits
        ).dequantize()
    )
    quantized = np.asarray(run(rotated.reshape(NUM_DRAWS, *x.shape), bits), np.float64)
    exact = rotated.reshape(quantized.shape)
    slopes = (quantized * exact).sum((1, 2)) / np.square(exact).sum((1, 2))
    return slopes, float(np.square(quantized - exact).sum() / np.square(exact).sum())


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


def test_no_kernel_takes_it():
    """Not with scales that one knows either: what a rule stores afterwards is part of it."""
    corrected = dataclasses.replace(AMAX, correction=MS_EDEN.correction)
    reasons = {
        rule: casts.rejects_quantize(
            QuantizeCall(
                shape=(128, 128),
                dtype=np.dtype(np.float32),
                format=NVFP4,
                blocks=((-1, 16),),
                scale_rule=rule,
                rounding=NEAREST,
            )
        )
        for rule in (MS_EDEN, corrected, AMAX)
    }
    text = "computes no scales by the rule '{}' for nvfp4"
    assert list(reasons.values()) == [text.format("ms_eden"), text.format("amax"), None]


def test_a_key_is_needed_by_gradients_alone():
    x, w = jnp.ones((2, 32)), jnp.ones((32, 16))
    assert mx_jax.matmul(x, w, recipe=quartet_ii()).shape == (2, 16)
    with pytest.raises(ValueError, match="'quartet_ii' rounds stochastically in grad_input and"):
        jax.eval_shape(jax.grad(lambda x: mx_jax.matmul(x, w, recipe=quartet_ii()).sum()), x)
    with pytest.raises(ValueError, match="quantize: stochastic rounding needs a key, got key=None"):
        mx_jax.quantize(x, "nvfp4", scale_rule=MS_EDEN)
    with pytest.raises(ValueError, match=r"OperandSpec: scale_rule='ms_eden' rounds scales stoch"):
        operand("nvfp4", scale_rule=MS_EDEN, rounding="stochastic")


def test_what_the_recipe_says():
    """As docs/recipes.md had it, and a value like the library's own."""
    recipe = quartet_ii()
    assert str(recipe.output) == " x ".join(["nvfp4 (four_over_six, nearest)"] * 2)
    backward = " x ".join(["nvfp4 (ms_eden, nearest)"] * 2)
    assert str(recipe.grad_input) == f"{backward} after Hadamard 128, random signs"
    assert recipe.grad_weight == recipe.grad_input and recipe.residuals.value == "quantized"
    assert recipe == pickle.loads(pickle.dumps(quartet_ii()))


# Recipes by step ------------------------------------------------------------------------------

HIGH = recipes.high_precision()


def test_each_phase_lasts_to_the_next():
    schedule = Schedule([(0, "mxfp8"), (3, recipes.mxfp4()), (5, "high-precision")])
    names = [schedule.at(step).name for step in range(7)]
    assert names == ["mxfp8"] * 3 + ["mxfp4"] * 2 + ["high_precision"] * 2
    assert schedule.at(np.int64(4)) == schedule.at(jnp.int32(3)) == recipes.mxfp4()


@pytest.mark.parametrize(
    ("steps", "last", "starts"),
    [
        (1000, 0.1, [0, 900]),
        (100, 0.07, [0, 93]),
        (5, 0.1, [0, 4]),
        (800, 0.0, [0]),
        (800, 1.0, [0]),
        (1, 0.1, [0]),
    ],
)
def test_heal_has_whole_steps(steps: int, last: float, starts: list[int]):
    schedule = heal("mxfp4", steps, last=last)
    assert [start for start, _ in schedule.phases] == starts
    assert schedule.at(steps - 1) == (HIGH if last else recipes.mxfp4())
    if len(starts) == 2:
        assert schedule.at(starts[1] - 1) == recipes.mxfp4()
    assert heal("mxfp4", 10, by="mxfp8").at(9) == recipes.mxfp8()


def test_one_program_for_each_phase():
    """And the gradients are those of the phase's recipe."""
    traced: list[str] = []

    def step(w, x, recipe):
        traced.append(recipe.name)
        return w - 0.1 * jax.grad(lambda w: mx_jax.matmul(x, w, recipe=recipe).sum())(w)

    compiled = quick(step, static_argnames="recipe")
    schedule = heal("mxfp4", 6, last=0.5)
    w, x = np.ones((32, 4), np.float32), np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    changes = []
    for i in range(6):
        before, w = w, compiled(w, x, recipe=schedule.at(i))
        changes.append(np.asarray(before - w))
    assert traced == ["mxfp4", "high_precision"]
    np.testing.assert_allclose(
        changes[5], 0.1 * np.broadcast_to(x.sum(0)[:, None], (32, 4)), atol=1e-6
    )
    assert np.abs(changes[0] - changes[5]).max() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule([]), "Schedule: phases must start at step 0 and ascend, got "),
        (lambda: Schedule([(1, "mxfp4")]), "got first steps [1]; e.g. [(0, 'mxfp4')"),
        (lambda: Schedule([(0, "mxfp4"), (5, "mxfp8"), (5, "mxfp6")]), "first steps [0, 5, 5]"),
        (lambda: Schedule([(0, "mxfp9")]), "unknown recipe name='mxfp9'"),
        (lambda: heal("mxfp4", 10).at(-1), "Schedule.at: steps count from 0, got step=-1"),
        (lambda: heal("mxfp4", 10, last=10), "got steps=10, last=10; last is a part"),
    ],
)
def test_errors_teach(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_traced_step_is_refused():
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.eval_shape(lambda step: jnp.ones(heal("mxfp4", 10).at(step).output.lhs.format.block), 3)
