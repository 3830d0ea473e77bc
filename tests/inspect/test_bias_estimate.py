"""The estimate of a bias: right on average, and as sure as it says."""

import numpy as np
import pytest

from mx_jax.inspect.bias_estimate import inner_products, estimate

pytestmark = pytest.mark.one_python(reason="sums of NumPy arrays alone")


def draws(bias: float, n: int, seed: int, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Exact vectors and errors of n draws; the exact mean has length 1."""
    rng = np.random.default_rng(seed)
    exact, error = np.zeros(size), np.zeros(size)
    exact[0], error[1] = 1.0, bias
    noise = rng.standard_normal((2, n, size)) / np.sqrt(size)
    return exact + 1.5 * noise[0], error + 0.3 * noise[1]


@pytest.mark.parametrize("bias", [0.0, 0.1, 0.5])
def test_right_on_average_and_covered(bias: float):
    """The uncorrected figure is not: without any bias it says ten per cent."""
    found = [estimate(inner_products(*draws(bias, 8, seed)), 0.95) for seed in range(200)]
    assert np.sqrt(np.mean([own.bias**2 for own in found])) == pytest.approx(bias, abs=0.03)
    covered = np.mean([own.low <= bias <= own.high for own in found])
    assert covered >= 0.93
    if bias == 0:
        assert np.mean([own.uncorrected for own in found]) > 0.08
    else:
        # An interval that always holds would not be one.
        assert np.mean([own.low <= 2 * bias <= own.high for own in found]) < 0.1


def test_against_the_formula():
    """`|mean|^2 - s^2 / n`, written with the draws and not with their products."""
    g, e = draws(0.2, 6, 0)
    found = estimate(inner_products(g, e), 0.95)

    def squared(x: np.ndarray) -> float:
        return float(np.sum(x.mean(0) ** 2) - np.sum(x.var(0, ddof=1)) / len(x))

    assert found.bias == pytest.approx(np.sqrt(squared(e) / squared(g)))
    assert found.uncorrected == pytest.approx(np.linalg.norm(e.mean(0)) / np.linalg.norm(g.mean(0)))
    assert found.one == pytest.approx(np.sqrt(np.sum(e**2) / np.sum(g**2)))
    mixed = (squared(e + g) - squared(e) - squared(g)) / 2
    assert found.slope == pytest.approx(1 + mixed / squared(g))


def test_parts_add_up():
    g, e = draws(0.2, 5, 1)
    parts = inner_products(g[:, :70], e[:, :70]) + inner_products(g[:, 70:], e[:, 70:])
    np.testing.assert_allclose(parts, inner_products(g, e))


def test_a_shorter_gradient_has_a_slope():
    g, _ = draws(0.0, 8, 2)
    found = estimate(inner_products(g, -0.02 * g), 0.95)
    assert found.slope == pytest.approx(0.98)
    assert found.bias == pytest.approx(0.02)


def test_noise_that_hides_the_mean_is_told():
    rng = np.random.default_rng(0)
    g = rng.standard_normal((4, 50))
    found = estimate(inner_products(g - g.mean(0), 0.1 * g), 0.95)
    assert np.isnan([found.bias, found.low, found.high, found.slope]).all()
    assert found.one > 0


def test_how_far_the_mean_is_from_its_noise():
    g, e = draws(0.1, 64, 3)
    spread = np.sqrt(np.sum(g.var(0, ddof=1)) / len(g))
    mean = np.sqrt(np.sum(g.mean(0) ** 2) - spread**2)
    assert estimate(inner_products(g, e), 0.95).signal == pytest.approx(mean / spread, rel=1e-6)
    assert estimate(inner_products(np.ones_like(g), e), 0.95).signal > 1e6


def test_no_error_at_all():
    g, _ = draws(0.0, 4, 3)
    found = estimate(inner_products(g, 0 * g), 0.95)
    assert (found.bias, found.low, found.high, found.slope, found.one) == (0, 0, 0, 1, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_has_no_bias_to_tell(value: float):
    """`max(0.0, nan)` is 0: a gradient that diverged would be the best of all."""
    g, e = draws(0.2, 5, 1)
    e[3, 7] = value
    found = estimate(inner_products(g, e), 0.95)
    for name in ("bias", "low", "high", "uncorrected", "slope", "one"):
        assert np.isnan(getattr(found, name)), name
