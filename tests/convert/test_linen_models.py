"""Converted flax.linen models equal models written by hand, bit for bit, whatever contains them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import convert
from mx_jax.convert import Rule
from tests.quick import quick

from .helpers import MXFP8
from .linen_models import FLAX, MODELS, by_hand, example_input


def loss_and_output(module: nn.Module, variables: Any, x: jax.Array):
    y: Any = module.apply(variables, x)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))), y


run = jax.value_and_grad(loss_and_output, argnums=(1, 2), has_aux=True)


def program(module: nn.Module, variables: Any, x: jax.Array) -> str:
    """What runs: output, gradients by parameters and by the input, as a jaxpr."""
    return str(jax.make_jaxpr(functools.partial(run, module))(variables, x))


def assert_same_bits(left: Any, right: Any):
    jax.tree.map(np.testing.assert_array_equal, left, right)


# Below nn.jit a path is a compilation of its own: the programs of both cannot be alike.
@pytest.mark.slow(but="compact")
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("compact", "recurrent") else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if name != "jit"
    ],
)
def test_converted_models(name: str):
    make, num_layers = MODELS[name]
    model, x = make(FLAX), example_input()
    converted = convert.linen(model, Rule(".*", MXFP8))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert jax.eval_shape(converted.init, jax.random.key(0), x) == variables

    # Equal programs give equal bits, and comparing them compiles nothing.
    assert program(converted, variables, x) == program(make(by_hand(MXFP8)), variables, x)
    original = program(model, variables, x)
    assert program(converted, variables, x) != original
    assert program(convert.linen(model, [Rule(".*", None)]), variables, x) == original
    assert convert.report(model, Rule(".*", MXFP8), x).num_converted == num_layers


def test_below_nn_jit():
    """Flax compiles equal modules once, wherever they are; rules go by path."""
    make, num_layers = MODELS["jit"]
    model, x = make(FLAX), example_input()
    variables = quick(model.init)(jax.random.key(0), x)
    by_path = [convert.linen(model, Rule(f"{name}/.*", MXFP8)) for name in ("first", "second")]
    first, second, original = (quick(own.apply)(variables, x) for own in (*by_path, model))
    assert np.any(first != original) and np.any(second != original) and np.any(first != second)
    both = quick(run, static_argnums=0)(convert.linen(model, Rule(".*", MXFP8)), variables, x)
    assert_same_bits(both, quick(run, static_argnums=0)(make(by_hand(MXFP8)), variables, x))
    assert np.any(both[0][1] != second)
    assert convert.report(model, Rule(".*", MXFP8), x).num_converted == num_layers


def test_a_cell_that_joins_its_parameters():
    """As the plain cell, which has the same parameters, and as the function."""
    x, rule = jnp.ones((2, 3, 32)), convert.Rule(".*", "mxfp8")
    model, plain = nn.RNN(nn.OptimizedLSTMCell(32)), nn.RNN(nn.LSTMCell(32))
    assert convert.report(model, rule, x).summary == "2 of 2 layers converted"
    variables = quick(model.init)(jax.random.key(0), x)
    joined = quick(convert.linen(model, rule).apply)(variables, x)
    assert_same_bits(joined, quick(convert.linen(plain, rule).apply)(variables, x))
    assert_same_bits(joined, quick(convert.function(model.apply, rule, weights=0))(variables, x))
    assert 0 < abs(joined - quick(model.apply)(variables, x)).max() < 0.1
