"""Stochastic rounding and Hadamard transforms: unbiased, orthogonal, and the same for a key."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.inspect import sqnr_db
from mx_jax.recipes import Hadamard, MatmulSpec, operand
from mx_jax.reference import hadamard
from tests.quick import quick

RANDOM = [name for name in recipes.names() if recipes.from_name(name).is_stochastic]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def slow_but_one(names):
    """Compiling takes these long: the first stands for all by default."""
    return [names[0], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


@pytest.mark.by_default("mxfp4|mxfp8")
@pytest.mark.one_python(reason="a mean over draws: tests/codecs rounds by given bits everywhere")
@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "mxint8", "nvfp4"])
def test_stochastic_rounding_is_unbiased(format):
    """The mean of n draws lies within 5 standard errors of x, for every element.

    A draw moves by at most one quantum q, so its standard deviation is at most q / 2; 5 standard
    errors are missed by chance with probability below 6e-7 an element, 6e-4 for all 1024.
    """
    num_draws = 1024
    x = normal(8, 128)
    rule = None if format == "nvfp4" else "rceil"

    @jax.jit
    def total(x, keys):
        def draw(sum_so_far, key):
            value = mx_jax.cast(x, format, scale_rule=rule, rounding="stochastic", key=key)
            return sum_so_far + value, None

        return jax.lax.scan(draw, jnp.zeros_like(x), keys)[0]

    low, quantum = _below_and_step(
        mx_jax.quantize(x, format, scale_rule=rule, rounding="toward_zero")
    )
    # NVFP4's block scale is itself rounded to nearest and may clip a block's largest value.
    reachable = np.abs(x) <= np.abs(low) + quantum
    assert reachable.mean() > 0.95 if format == "nvfp4" else reachable.all()
    mean = np.asarray(total(x, jax.random.split(jax.random.key(2), num_draws))) / num_draws
    # 16 random bits leave a bias of at most 2^-16 of a quantum; a float32 sum of 1024 values is off
    # by at most 1024 times 2^-24.
    slack = quantum * 2.0**-16 + np.abs(x) * 2.0**-14
    assert (np.abs(mean - x) <= 5 * quantum / 2 / math.sqrt(num_draws) + slack)[reachable].all()


def _below_and_step(quantized: mx_jax.MXArray) -> tuple[np.ndarray, np.ndarray]:
    """The values of codes, and how far each is from the next larger magnitude."""
    element = quantized.format.element
    codes = np.asarray(quantized.codes)
    half = (
        codes & (element.sign_code - 1) if element.kind == "float" else np.abs(codes.view(np.int8))
    )
    values = np.array([element.value(code) for code in range(element.sign_code)])
    top = element.max_code
    step = values[np.minimum(half + 1, top)] - values[half]
    low = np.asarray(quantized.dequantize())
    factor = np.asarray(dataclasses.replace(quantized, codes=jnp.full_like(quantized.codes, 1)))
    return low, step * factor / element.smallest_subnormal


def test_floor_is_biased_where_rceil_is_not():
    """FLOOR clips, and what is clipped does not come back on average."""
    x, keys = normal(64, 512), jax.random.split(jax.random.key(1), 64)

    def slope(rule):
        @quick
        def mean(x, keys):
            draw = functools.partial(mx_jax.cast, scale_rule=rule, rounding="stochastic")
            return jax.lax.map(lambda key: draw(x, "mxfp4", key=key), keys).mean(0)

        return float(np.vdot(mean(x, keys), x) / np.vdot(x, x))

    assert abs(slope("rceil") - 1) < 1e-3
    assert slope("floor") < 0.995


@pytest.mark.parametrize("length", [32, 64, 50])
def test_hadamard_inverts_and_cancels(length):
    a, b = normal(7, length), normal(7, length, seed=1)

    @quick
    def transform(a, b, key):
        signs = hadamard.draw_signs(Hadamard(size=16, signs=None), key)
        turned = hadamard.apply(a, signs)
        return turned, hadamard.apply(b, signs), hadamard.invert(turned, signs, length)

    turned_a, turned_b, again = map(np.asarray, transform(a, b, jax.random.key(0)))
    np.testing.assert_allclose(again, a, atol=2e-6)
    np.testing.assert_allclose(turned_a @ turned_b.T, a @ b.T, atol=2e-5)
    assert np.abs(turned_a[:, :length] - a).max() > 0.1


@pytest.mark.parametrize("outliers", [False, True])
def test_hadamard_spreads_outliers(outliers):
    """One value in 32 is 20 times as large: without the transform it flushes its whole block.

    Normal values, which a rotation leaves normal, lose nothing and gain nothing.
    """
    x, w = normal(64, 256), normal(256, 64, seed=1)
    x[:, 5::32] *= 20.0 if outliers else 1.0
    plain = mx_jax.recipes.mxfp4()
    turned = plain.with_(fwd={"transform": hadamard.seeded(32, seed=0)})
    exact = np.float64(x) @ np.float64(w)
    before, after = (sqnr_db(exact, mx_jax.matmul(x, w, recipe=r)) for r in (plain, turned))
    if outliers:
        assert after > before + 1.5
    else:
        assert abs(after - before) < 0.5


def test_a_transform_cannot_reach_into_an_mxarray():
    recipe = mx_jax.recipes.quartet()
    w = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
    with pytest.raises(ValueError, match=r"transforms its operands .* MXArray no longer allows"):
        mx_jax.matmul(jnp.ones((4, 64)), w, recipe=recipe, key=jax.random.key(0))


def _gradients(recipe, key, x, w, g):
    out, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
    return out, *pullback(g)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but_one(RANDOM))
def test_the_same_key_gives_the_same_bits(name):
    recipe = mx_jax.recipes.from_name(name)
    arrays = normal(64, 96), normal(96, 64, seed=1), normal(64, 64, seed=2)
    eager = _gradients(recipe, jax.random.key(7), *arrays)
    again = jax.jit(functools.partial(_gradients, recipe))(jax.random.key(7), *arrays)
    other = _gradients(recipe, jax.random.key(8), *arrays)
    for first, second in zip(eager[1:], again[1:], strict=True):
        np.testing.assert_allclose(first, second, rtol=2e-5, atol=2e-5)
    assert any(not np.array_equal(a, b) for a, b in zip(eager, other, strict=True))


def test_sharding_does_not_change_the_draws():
    """Codes are a function of key and position alone."""
    devices = jax.devices()
    assert len(devices) >= 4, "conftest fakes several CPU devices"
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("data",))
    x, key = normal(64, 128), jax.random.key(3)
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data", None)))

    @jax.jit
    def quantize(x, key):
        return mx_jax.quantize(x, "mxfp4", scale_rule="rceil", rounding="stochastic", key=key)

    np.testing.assert_array_equal(quantize(x, key).codes, quantize(spread, key).codes)


@pytest.mark.slow
def test_sharding_does_not_change_the_gradients():
    """All three products of a stochastic recipe, bit for bit: four-bit sums need no rounding."""
    recipe = mx_jax.recipes.mxfp4().with_(scale_rule="rceil", rounding="stochastic")
    rng, key = np.random.default_rng(0), jax.random.key(7)
    shapes = ((64, 128), (128, 64), (64, 64))
    arrays = [rng.uniform(-1.0, 1.0, shape).astype(np.float32) for shape in shapes]

    @quick
    def run(key, x, w, g):
        y, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
        return y, *pullback(g)

    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    spread = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data", "model"))) for x in arrays
    ]
    for name, alone, sharded in zip(
        ("y", "dx", "dw"), run(key, *arrays), run(key, *spread), strict=True
    ):
        np.testing.assert_array_equal(sharded, alone, err_msg=name)


@pytest.mark.by_default("mxfp4_backward|quartet")
@pytest.mark.parametrize("name", RANDOM)
def test_random_recipes_need_a_key(name):
    """Those of the library round to nearest in the forward product: gradients need it."""
    recipe, w = mx_jax.recipes.from_name(name), jnp.ones((32, 4))
    assert mx_jax.matmul(jnp.ones((4, 32)), w, recipe=recipe).shape == (4, 4)
    message = f"recipe '{name}' rounds stochastically in grad_\\w+ and needs a key"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: mx_jax.matmul(x, w, recipe=recipe).sum())(jnp.ones((4, 32)))


def test_prescale_is_taken_out_again():
    """3/4 is exact in the codes' scale: values that survive it come back as they were."""
    spec = operand("mxfp8_e4m3", prescale=0.75)
    recipe = mx_jax.recipes.high_precision().with_(fwd=MatmulSpec(lhs=spec, rhs=spec))
    x = jnp.full((4, 32), 2.0)
    np.testing.assert_allclose(mx_jax.matmul(x, x.T, recipe=recipe), x @ x.T, rtol=1e-6)
    with pytest.raises(ValueError, match="prescale must be positive, got 0"):
        operand("mxfp4", prescale=0)


def test_clipped_values_get_no_gradient():
    """With masking, gradients of what GAUSSIAN clips are zero, and of the rest are not."""
    forward = operand("mxfp4", scale_rule="gaussian")
    recipe = mx_jax.recipes.high_precision().with_(
        fwd=MatmulSpec(lhs=forward, rhs=forward), mask_clipped=True
    )
    x, w = normal(16, 64), normal(64, 8, seed=1)

    @quick
    def gradient_and_scales(x, w):
        _, pullback = jax.vjp(lambda x: mx_jax.matmul(x, w, recipe=recipe), x)
        scales = mx_jax.quantize(x, "mxfp4", scale_rule="gaussian").scale_values
        return pullback(jnp.ones((16, 8)))[0], scales.astype(jnp.float32)

    gradient, scales = map(np.asarray, gradient_and_scales(x, w))
    clipped = np.abs(x) > 6 * np.repeat(scales, 32, axis=1)
    assert 0.01 < clipped.mean() < 0.3
    assert np.abs(np.where(clipped, gradient, 0)).max() == 0.0
    assert (np.where(clipped, 1, gradient) != 0).mean() > 0.8


@pytest.mark.slow
def test_four_over_six_loses_less_than_six_alone():
    x = normal(256, 512)
    plain = sqnr_db(x, mx_jax.cast(x, "nvfp4"))
    adaptive = sqnr_db(x, mx_jax.cast(x, "nvfp4", scale_rule="four_over_six"))
    assert adaptive > plain + 0.5


@pytest.mark.slow
def test_square_blocks_are_one_weight_for_both_products():
    """Quantizing W and W^T in square blocks gives transposed codes: one stored weight is enough."""
    w = normal(96, 64)
    for format in ("nvfp4_2d", "mxfp4_2d", "float8_blockwise_2d_e4m3"):
        straight, turned = mx_jax.quantize(w, format), mx_jax.quantize(w.T, format).T
        np.testing.assert_array_equal(straight.codes, turned.codes)
        np.testing.assert_array_equal(straight.scales, turned.scales)
        assert straight.blocks == turned.blocks
