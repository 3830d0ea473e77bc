"""gradient_bias: estimates are right on average, and planted biases are found."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.bias import GradientBias, Row, estimate, gradient_bias, inner_products, passes
from mx_jax import convert, recipes
from mx_jax.recipes import Residuals

PARAMS = {"a": np.zeros(64, np.float32), "blocks": {"b": np.zeros((2, 32), np.float32)}}


def planted(params: Any, batch: Any, recipe: float, *keys: jax.Array) -> jax.Array:
    """A loss whose gradient is the batch, with `recipe` times a fixed vector in a part of it."""
    noise = jax.random.normal(keys[0], (64,)) if keys else 0.0
    a = params["a"] @ (batch[:64] + recipe * (jnp.arange(64) == 3) + recipe * noise)
    return a + jnp.sum(params["blocks"]["b"] * batch[64:].reshape(2, 32))


def scalar(params: Any, batch: Any, recipe: Any) -> jax.Array:
    return params["a"] * batch.sum()


def batches(n: int = 8, noise: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(0)
    mean = np.zeros(128, np.float32)
    mean[[0, 64, 100]] = 0.8, 0.6, 0.0001
    return (mean + noise * rng.standard_normal((n, 128)) / np.sqrt(128)).astype(np.float32)


def test_a_planted_bias():
    """The exact mean has length 1, and 0.8 in `a`; the other parameters are exact."""
    report = gradient_bias(planted, PARAMS, batches(), {"none": 0.0, "some": 0.25}, exact=0.0)
    none, some = report.whole
    assert (none.bias, none.slope) == (0, 1)
    assert some.bias == pytest.approx(0.25, rel=0.02)
    low, high = some.interval
    assert low < 0.25 < high < 0.27
    a, b = report.parameters("some")
    assert (a.parameter, b.parameter) == ("a", "blocks/b")
    assert a.bias == pytest.approx(0.25 / 0.8, rel=0.02) and b.bias == 0


def test_layers_of_a_scan_one_by_one():
    report = gradient_bias(
        planted, PARAMS, batches(), {"some": 0.25}, exact=0.0, scanned=r"blocks/.*"
    )
    assert {row.parameter for row in report.parameters()} == {"a", "blocks/b[0]", "blocks/b[1]"}
    with pytest.raises(ValueError, match=r"scanned='.*' matches the parameter 'a', which has no"):
        gradient_bias(scalar, {"a": 1.0}, batches(), {"x": 0}, exact=0, scanned=".*")


def test_gradients_that_are_not_finite():
    """Of a recipe they are told; in high precision there is nothing to compare with."""

    def loss(params: Any, batch: Any, factor: float) -> jax.Array:
        return params @ batch * factor

    params = np.ones(128, np.float32)
    report = gradient_bias(loss, params, batches(), {"bad": np.inf, "good": 1.0}, exact=1.0)
    bad, good = report.whole
    names = ("bias", "low", "high", "uncorrected", "slope", "one_batch")
    assert np.isnan([getattr(bad, name) for name in names]).all()
    assert good.bias == 0
    assert ["Inf or NaN" in line for line in str(report).splitlines()] == [
        False,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="must be finite, got Inf or NaN in batch=0, loss=inf"):
        gradient_bias(loss, params, batches(), {"good": 1.0}, exact=np.inf)


def test_noise_of_keys_is_no_bias():
    """Each batch has a key of its own, so what keys add has no mean."""
    key = jax.random.key(0)
    report = gradient_bias(planted, PARAMS, batches(), {"noise": 0.05}, exact=0.0, key=key)
    (row,) = report.whole
    assert row.uncorrected > 0.1
    assert row.one_batch > 0.3
    assert row.bias < row.uncorrected and row.interval[0] < 0.07


def test_passes_are_recipes():
    whole, forward, backward = passes("mxfp4_stochastic").values()
    assert whole == recipes.mxfp4_stochastic()
    assert forward.output == whole.output and forward.grad_input.is_high_precision
    assert backward.output.is_high_precision and backward.grad_weight == whole.grad_weight
    assert passes("deepseek_v3")["deepseek_v3, backward alone"].residuals is Residuals.PRIMAL


def test_models_of_nnx_and_rules():
    """Linen's are in docs/choosing.md."""
    x = jax.random.normal(jax.random.key(0), (4, 16, 64))
    graph, params = nnx.split(nnx.Linear(64, 8, rngs=nnx.Rngs(0)))

    def loss(params: Any, x: jax.Array, rules: Any) -> jax.Array:
        return jnp.sum(convert.nnx(nnx.merge(graph, params), rules)(x) ** 2)

    rules = {"all": convert.Rule(".*", "mxfp4")}
    report = gradient_bias(loss, params, x, rules, exact=convert.Rule(".*", None))
    assert {row.parameter for row in report.parameters()} == {"kernel", "bias"}
    assert 0 < report.whole[0].one_batch < 0.5


def test_hidden_by_noise():
    """Nothing is made up where the exact mean itself cannot be told from 0."""
    data = batches(6)
    report = gradient_bias(planted, PARAMS, data - data.mean(0), {"some": 0.2}, exact=0.0)
    assert math.isnan(report.whole[0].bias)
    assert "hidden by noise" in str(report)


def test_batches_of_several_shapes():
    """Traced once for each shape and recipe, and all weigh the same."""
    traced: list[int] = []

    def loss(w: jax.Array, batch: jax.Array, recipe: float) -> jax.Array:
        traced.append(len(batch))
        return (1 + recipe) * w * batch.mean()

    batches = [np.full(n, value, np.float32) for n, value in ((2, 1), (3, 2), (2, 3), (3, 6))]
    report = gradient_bias(loss, jnp.float32(1), batches, {"x": 0.5}, exact=0.0)
    assert traced == [2, 3, 2, 3]
    assert report.exact_loss == 3.0 and report.whole[0].bias == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("n", "recipes", "error", "message"),
    [
        (2, {"x": 0.0}, ValueError, "at least 3 batches, got 2; eight or more"),
        (8, {}, ValueError, "there are no recipes; got an empty mapping"),
        (8, ["mxfp4"], TypeError, "several recipes need names, got recipes as a list"),
        (8, "mxfp5", ValueError, "unknown recipe name='mxfp5'"),
    ],
)
def test_errors(n: int, recipes: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        gradient_bias(planted, PARAMS, batches(n), recipes)


def test_parameters_of_no_recipe():
    empty = GradientBias(rows=(), exact_loss=0.0)
    with pytest.raises(ValueError, match="recipe must be one of , got recipe=None"):
        empty.parameters()


def draws(bias: float, n: int, seed: int, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Exact vectors and errors of n draws; the exact mean has length 1."""
    rng = np.random.default_rng(seed)
    exact, error = np.zeros(size), np.zeros(size)
    exact[0], error[1] = 1.0, bias
    noise = rng.standard_normal((2, n, size)) / np.sqrt(size)
    return exact + 1.5 * noise[0], error + 0.3 * noise[1]


def estimated(exact: np.ndarray, error: np.ndarray) -> Row:
    products = inner_products(exact, exact + error)
    return estimate(products, recipe="it", parameter=None)


@pytest.mark.parametrize("bias", [0.0, 0.1, 0.5])
def test_right_on_average_and_covered(bias: float):
    """The uncorrected figure is not: without any bias it says ten per cent."""
    rows = [estimated(*draws(bias, 8, seed)) for seed in range(200)]
    assert np.sqrt(np.mean([row.bias**2 for row in rows])) == pytest.approx(bias, abs=0.03)
    covered = np.mean([row.low <= bias <= row.high for row in rows])
    assert covered >= 0.93
    if bias == 0:
        assert np.mean([row.uncorrected for row in rows]) > 0.08
    else:
        # An interval that always holds would not be one.
        assert np.mean([row.low <= 2 * bias <= row.high for row in rows]) < 0.1


def test_against_the_formula():
    """`|mean|^2 - s^2 / n`, written with the draws and not with their products."""
    g, e = draws(0.2, 6, 0)
    row = estimated(g, e)

    def squared(x: np.ndarray) -> float:
        return float(np.sum(x.mean(0) ** 2) - np.sum(x.var(0, ddof=1)) / len(x))

    assert row.bias == pytest.approx(np.sqrt(squared(e) / squared(g)))
    assert row.uncorrected == pytest.approx(np.linalg.norm(e.mean(0)) / np.linalg.norm(g.mean(0)))
    assert row.one_batch == pytest.approx(np.sqrt(np.sum(e**2) / np.sum(g**2)))
    mixed = (squared(e + g) - squared(e) - squared(g)) / 2
    assert row.slope == pytest.approx(1 + mixed / squared(g))
    spread = np.sqrt(np.sum(g.var(0, ddof=1)) / len(g))
    assert row.signal == pytest.approx(np.sqrt(squared(g)) / spread)
    assert estimated(np.ones_like(g), e).signal > 1e6
