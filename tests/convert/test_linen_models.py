"""Converted flax.linen models equal models written by hand, bit for bit, whatever contains them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import convert
from mx_jax.convert import Rule
from tests.quick import quick

from .helpers import MXFP8, by_hand
from .linen_models import MODELS, Twice, example_input


def loss_and_output(module: nn.Module, variables: Any, x: jax.Array):
    y: Any = module.apply(variables, x)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))), y


run = jax.value_and_grad(loss_and_output, argnums=(1, 2), has_aux=True)


def program(module: nn.Module, variables: Any, x: jax.Array) -> str:
    """What runs: output, gradients by parameters and by the input, as a jaxpr."""
    return str(jax.make_jaxpr(functools.partial(run, module))(variables, x))


def ours() -> Any:
    """A context in which Flax's layers have the recipe."""

    def einsum() -> Any:
        return functools.partial(mx_jax.einsum, recipe=MXFP8)

    attention = functools.partial(
        nn.MultiHeadDotProductAttention,
        qkv_dot_general=MXFP8.dot_general,
        out_dot_general=MXFP8.dot_general,
        qk_attn_weights_einsum_cls=einsum,
        attn_weights_value_einsum_cls=einsum,
    )
    return by_hand(nn, mx_jax.nn.linen, MXFP8, MultiHeadDotProductAttention=attention)


@pytest.mark.slow(but="compact|recurrent")
@pytest.mark.parametrize("name", MODELS)
def test_converted_models(name: str):
    make, num_layers = MODELS[name]
    model, x = make(), example_input()
    converted = convert.linen(model, Rule(".*", MXFP8))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert jax.eval_shape(converted.init, jax.random.key(0), x) == variables

    # Equal programs give equal bits, and comparing them compiles nothing.
    original, program_of_converted = program(model, variables, x), program(converted, variables, x)
    with ours():
        assert program_of_converted == program(make(), variables, x) != original
    assert program(convert.linen(model, [Rule(".*", None)]), variables, x) == original
    assert convert.report(model, Rule(".*", MXFP8), x).num_converted == num_layers


def test_below_nn_jit():
    """Flax compiles equal modules once, wherever they are; rules go by path."""
    model, x = Twice(), example_input()
    variables = quick(model.init)(jax.random.key(0), x)
    by_path = [convert.linen(model, Rule(f"{name}/.*", MXFP8)) for name in ("first", "second")]
    first, second, original = (quick(own.apply)(variables, x) for own in (*by_path, model))
    assert np.any(first != original) and np.any(second != original) and np.any(first != second)
    rule = Rule(".*", MXFP8)
    both = quick(functools.partial(run, convert.linen(model, rule)))(variables, x)
    with ours():
        # Without nn.jit, whose programs Flax keeps.
        expected = quick(functools.partial(run, Twice(lambda block: block)))(variables, x)
    jax.tree.map(np.testing.assert_array_equal, both, expected)
    assert convert.report(model, rule, x).num_converted == 2


def test_a_cell_that_joins_its_parameters():
    """As the plain cell, which has the same parameters."""
    x, rule = jnp.ones((2, 3, 32)), convert.Rule(".*", "mxfp8")
    model, plain = nn.RNN(nn.OptimizedLSTMCell(32)), nn.RNN(nn.LSTMCell(32))
    assert convert.report(model, rule, x).summary == "2 of 2 layers converted"
    variables = quick(model.init)(jax.random.key(0), x)
    joined = quick(convert.linen(model, rule).apply)(variables, x)
    np.testing.assert_array_equal(joined, quick(convert.linen(plain, rule).apply)(variables, x))
    assert 0 < abs(joined - quick(model.apply)(variables, x)).max() < 0.1
