"""Stochastic rounding and Hadamard transforms: unbiased, orthogonal, and the same for a key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.inspect import sqnr_db
from mx_jax.recipes import Hadamard
from mx_jax.reference import hadamard
from tests.quick import quick

RANDOM = [name for name in recipes.names() if recipes.from_name(name).is_stochastic]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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
@pytest.mark.parametrize("name", ["mxfp4_stochastic", "quartet_ii"])
def test_the_same_key_gives_the_same_bits(name):
    recipe = mx_jax.recipes.from_name(name)
    arrays = normal(64, 96), normal(96, 64, seed=1), normal(64, 64, seed=2)
    eager = _gradients(recipe, jax.random.key(7), *arrays)
    again = jax.jit(functools.partial(_gradients, recipe))(jax.random.key(7), *arrays)
    other = _gradients(recipe, jax.random.key(8), *arrays)
    for first, second in zip(eager[1:], again[1:], strict=True):
        np.testing.assert_allclose(first, second, rtol=2e-5, atol=2e-5)
    assert any(not np.array_equal(a, b) for a, b in zip(eager, other, strict=True))


@pytest.mark.by_default("mxfp4_backward|quartet")
@pytest.mark.parametrize("name", RANDOM)
def test_random_recipes_need_a_key(name):
    """Those of the library round to nearest in the forward product: gradients need it."""
    recipe, w = mx_jax.recipes.from_name(name), jnp.ones((32, 4))
    assert mx_jax.matmul(jnp.ones((4, 32)), w, recipe=recipe).shape == (4, 4)
    message = f"recipe '{name}' rounds stochastically in grad_\\w+ and needs a key"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: mx_jax.matmul(x, w, recipe=recipe).sum())(jnp.ones((4, 32)))
