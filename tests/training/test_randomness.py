"""Stochastic rounding and Hadamard transforms: unbiased, orthogonal, and the same for a key."""

import functools

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax.inspect import sqnr_db
from mx_jax.reference import hadamard
from tests.quick import quick


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


@pytest.mark.parametrize("outliers", [False, True])
def test_hadamard_spreads_outliers(outliers):
    """One value in 32 is 20 times as large: without the transform it flushes its whole block.

    Normal values, which a rotation leaves normal, lose nothing and gain nothing.
    """
    x, w = normal(64, 256), normal(256, 64, seed=1)
    x[:, 5::32] *= 20.0 if outliers else 1.0
    plain = mx_jax.recipes.mxfp4()
    turned = plain.with_(
        fwd={"transform": hadamard.Hadamard(size=32, signs=(1, -1, -1, 1, -1, 1, 1, 1) * 4)}
    )
    exact = x.astype(np.float64) @ w.astype(np.float64)
    before, after = (sqnr_db(exact, mx_jax.matmul(x, w, recipe=r)) for r in (plain, turned))
    if outliers:
        assert after > before + 1.5
    else:
        assert abs(after - before) < 0.5
