"""Delayed scaling: state that a training step overwrites with its gradient."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from mx_jax.formats import E4M3
from mx_jax.inspect import sqnr_db
from mx_jax.nn.linen import DelayedDotGeneral
from mx_jax.ops.delayed import DelayedState, next_state

STATE = "_overwrite_with_gradient"


def _layer(history_length=4):
    return nn.Dense(
        16, dot_general_cls=functools.partial(DelayedDotGeneral, history_length=history_length)
    )


def test_state_has_the_names_and_shapes_of_flaxs_own():
    x = jnp.ones((2, 32))
    theirs = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp).init(jax.random.key(0), x)
    ours = _layer(1024).init(jax.random.key(0), x)
    strip = [jax.tree.map(jnp.shape, next(iter(tree[STATE].values()))) for tree in (theirs, ours)]
    assert strip[0] == strip[1]
    assert jax.tree.map(jnp.shape, theirs["params"]) == jax.tree.map(jnp.shape, ours["params"])


@pytest.mark.parametrize(
    ("history", "scale"),
    [([0.0, 0.0], 3.0), ([448.0, 896.0], 2.0), ([jnp.inf, 1.0], 3.0), ([jnp.nan, 1.0], 3.0)],
)
def test_the_scale_comes_from_the_history(history, scale):
    state = DelayedState(jnp.array([3.0]), jnp.array(history))
    new = next_state(jnp.array([[-7.0, 5.0]]), state, E4M3)
    assert float(new.scale[0]) == scale
    np.testing.assert_array_equal(new.amax_history, [7.0, history[0]])


def test_a_step_overwrites_the_state_and_the_next_uses_it():
    layer = _layer()
    x = jax.random.normal(jax.random.key(0), (64, 32)) * 1000
    target = x[:, :16]
    variables = layer.init(jax.random.key(1), x)
    train = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.sgd(0.0))

    @jax.jit
    def step(train):
        def loss(variables):
            return jnp.mean((train.apply_fn(variables, x) - target) ** 2)

        return train.apply_gradients(grads=jax.grad(loss)(train.params))

    exact = x @ variables["params"]["kernel"]
    first = sqnr_db(exact, layer.apply(train.params, x))
    train = step(train)
    second = sqnr_db(exact, layer.apply(train.params, x))
    state = next(iter(train.params[STATE].values()))
    assert float(state["input_amax_history"][0]) == float(jnp.abs(x).max())
    # Scale 1 saturates at 448; after one step the history knows better.
    assert first < 15 < 25 < second


def test_gradients_follow_float32s():
    layer = _layer()
    x = jax.random.normal(jax.random.key(0), (64, 32))
    g = jax.random.normal(jax.random.key(1), (64, 16))
    variables = layer.init(jax.random.key(2), x)
    for _ in range(2):
        out, pullback = jax.vjp(layer.apply, variables, x)
        bars, x_bar = pullback(g)
        variables = {"params": variables["params"], STATE: bars[STATE]}
    kernel = variables["params"]["kernel"]
    assert sqnr_db(x @ kernel, out) > 25
    assert sqnr_db(g @ kernel.T, x_bar) > 22
    assert sqnr_db(x.T @ g, bars["params"]["kernel"]) > 22
