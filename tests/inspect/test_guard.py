"""guard: the first block that is not finite, by layer and step, whatever tells first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import inspect
from tests.quick import quick

W = (np.random.default_rng(0).normal(size=(64, 64)) / 8).astype(np.float32)
X = np.ones((32, 64), np.float32)


def forward(x, w, bad):
    for number in range(3):
        with inspect.tag(f"layer_{number}"):
            x = jnp.tanh(mx_jax.matmul(x, w, recipe="mxfp8"))
            # Planted between two layers.
            x = x + jnp.where((number == 0) & bad, jnp.inf, 0)
    return x.sum()


@quick
def train_step(w, step):
    with inspect.at_step(step):
        return w - 1e-3 * jax.grad(forward, argnums=1)(X, w, step == 3)


def test_it_names_the_layer_and_the_step_and_stops_the_next():
    w, steps = W, []
    with pytest.raises(inspect.NonFiniteError) as caught, inspect.guard():
        for step in range(50):
            w = jax.block_until_ready(train_step(w, step))
            steps.append(step)
    record = caught.value.record
    assert (record.step, record.path, record.tag.product) == (3, "layer_1", "output")
    assert "at step=3, in the input of output, path='layer_1'" in str(caught.value)
    assert max(steps) < 10, "not after the whole loop"


def test_a_step_that_is_told_around_it_is_the_last(caplog):
    step = quick(lambda x: mx_jax.matmul(x, W, recipe="mxfp8"))
    steps = []
    with pytest.raises(inspect.NonFiniteError, match="at step=2, in the input"), inspect.guard():
        for number in range(5):
            steps.append(number)
            with inspect.at_step(number):
                step(X * (np.inf if number == 2 else 1))
    assert steps == [0, 1, 2]
    assert not caplog.records, "no callback fails"


def test_without_a_next_step_it_raises_at_the_end():
    with pytest.raises(inspect.NonFiniteError, match="at step=3"), inspect.guard():
        train_step(W, 3)


def test_calls_count_where_no_step_is_told():
    step = quick(lambda x: mx_jax.matmul(x, W, recipe="mxfp8"))
    message = r"at step=1, .* path='unnamed'"
    with pytest.raises(inspect.NonFiniteError, match=message), inspect.guard():
        for x in (X, X * np.inf):
            step(x)


@pytest.mark.slow
def test_what_is_finite_passes_and_errors_stay_what_they_are():
    with inspect.guard():
        train_step(W, 0)
    with pytest.raises(KeyError, match="own"), inspect.guard():
        raise KeyError("own")
    text = "guard: the filter matched none of 3 paths, so nothing was guarded; got filter='other' "
    with pytest.warns(UserWarning, match=text), inspect.guard("other"):
        train_step(W, 3)
