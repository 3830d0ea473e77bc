"""Converted flax.linen models equal models written by hand, bit for bit, whatever contains them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import convert, recipes
from mx_jax.convert import Rule
from tests.quick import quick

from .linen_models import FLAX, MODELS, by_hand, example_input

MXFP8 = recipes.mxfp8()


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
    variables = quick(model.init)(jax.random.key(0), x)
    assert_same_bits(quick(converted.init)(jax.random.key(0), x), variables)

    # Equal programs give equal bits, and comparing them compiles nothing.
    assert program(converted, variables, x) == program(make(by_hand(MXFP8)), variables, x)
    original = program(model, variables, x)
    assert program(converted, variables, x) != original
    assert program(convert.linen(model, [Rule(".*", None)]), variables, x) == original
    high = convert.linen(model, [Rule(".*", recipes.high_precision())])
    assert program(high, variables, x) == original
    assert program(convert.original(converted), variables, x) == original
    assert convert.report(model, Rule(".*", MXFP8), x).num_converted == num_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan of remat", "jit"])
def test_converted_models_run(name: str):
    make, num_layers = MODELS[name]
    model, x = make(FLAX), example_input()
    variables = quick(model.init)(jax.random.key(0), x)
    compiled = quick(run, static_argnums=0)
    converted = compiled(convert.linen(model, Rule(".*", MXFP8)), variables, x)
    assert_same_bits(converted, compiled(make(by_hand(MXFP8)), variables, x))
    original = compiled(model, variables, x)
    high = convert.linen(model, Rule(".*", recipes.high_precision()))
    assert_same_bits(compiled(high, variables, x), original)
    assert 18 < mx_jax.inspect.sqnr_db(original[0][1], converted[0][1]) < 40
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(converted))
    assert convert.report(model, Rule(".*", MXFP8), x).num_converted == num_layers


def test_rules_go_by_path_below_nn_jit():
    # Flax compiles equal modules below nn.jit once, wherever they are.
    model, x = MODELS["jit"][0](FLAX), example_input()
    variables = quick(model.init)(jax.random.key(0), x)
    outputs = {
        pattern: convert.linen(model, Rule(pattern, MXFP8)).apply(variables, x)
        for pattern in ("first/.*", "second/.*")
    }
    with pytest.warns(convert.UnusedRuleWarning):
        outputs["nothing"] = convert.linen(model, Rule("nothing", MXFP8)).apply(variables, x)
    assert np.all(outputs["nothing"] == model.apply(variables, x))
    first, second = outputs["first/.*"], outputs["second/.*"]
    assert np.any(first != outputs["nothing"]) and np.any(second != outputs["nothing"])
    assert np.any(first != second)


def test_a_cell_that_joins_its_parameters():
    """As the plain cell, which has the same parameters, and as the function."""
    x, rule = jnp.ones((2, 5, 64)), convert.Rule(".*", "mxfp8")
    model = nn.RNN(nn.OptimizedLSTMCell(32))
    assert convert.report(model, rule, x).summary == "2 of 2 layers converted"
    variables = model.init(jax.random.key(0), x)
    joined: Any = convert.linen(model, rule).apply(variables, x)
    plain = convert.linen(nn.RNN(nn.LSTMCell(32)), rule).apply(variables, x)
    np.testing.assert_array_equal(plain, joined)
    traced = convert.function(model.apply, rule, weights=0)(variables, x)
    np.testing.assert_array_equal(traced, joined)
    assert 0 < abs(joined - model.apply(variables, x)).max() < 0.1
