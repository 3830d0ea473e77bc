"""Stochastic recipes in converted flax.linen models draw from the stream "quantize"."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import convert
from mx_jax.convert import Rule
from mx_jax.nn.linen import RNG_STREAM
from tests.quick import quick

from .helpers import STOCHASTIC
from .linen_models import FLAX, WIDTH, Block, example_input, scanned

RULE = Rule(".*", STOCHASTIC)
KEYS = [jax.random.key(seed) for seed in (1, 2)]


def setup_model(module: nn.Module):
    x = example_input()
    variables = quick(module.init)(jax.random.key(0), x)
    converted = convert.linen(module, RULE)
    apply = quick(lambda variables, x, rngs: converted.apply(variables, x, rngs=rngs))
    return variables, x, converted, apply


def test_same_key_same_bits_as_by_hand():
    variables, x, converted, apply = setup_model(nn.Dense(5))
    by_hand = mx_jax.nn.linen.Dense(5, recipe=STOCHASTIC)
    expected = quick(lambda v, x, rngs: by_hand.apply(v, x, rngs=rngs))
    for stream in (RNG_STREAM, "params"):
        results = [apply(variables, x, {stream: key}) for key in KEYS]
        for key, result in zip(KEYS, results, strict=True):
            np.testing.assert_array_equal(result, expected(variables, x, {stream: key}))
        assert np.any(results[0] != results[1])
    del converted


def test_layers_draw_different_keys():
    class Twins(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(7, kernel_init=nn.initializers.constant(0.3), use_bias=False)
            other = nn.Dense(7, kernel_init=nn.initializers.constant(0.3), use_bias=False)
            return dense(x), other(x), dense(x)

    variables, x, _, apply = setup_model(Twins())
    first, second, again = apply(variables, x, {RNG_STREAM: KEYS[0]})
    assert np.any(first != second) and np.any(first != again)


def test_init_needs_no_stream_and_draws_nothing_from_the_others():
    module, x = Block(FLAX), example_input()
    converted = convert.linen(module, RULE)
    plain, ours = (quick(m.init)(jax.random.key(0), x) for m in (module, converted))
    jax.tree.map(np.testing.assert_array_equal, plain, ours)


def test_a_missing_stream_is_named():
    module = nn.Sequential([nn.Dense(3)])
    variables, x, converted, _ = setup_model(module)
    message = (
        r"layers_0: recipe 'stochastic weight' draws random bits and needs the 'quantize' stream"
        r"; call apply\(..., rngs=\{'quantize': key\}\). Below nn.scan or nn.vmap, list 'quantize' "
        r"in split_rngs, or pass the key as 'params'"
    )
    with pytest.raises(ValueError, match=message):
        converted.apply(variables, x)


class TestScan:
    """nn.scan passes on only the streams that it lists."""

    def test_stream_that_the_model_does_not_list(self):
        variables, x, converted, _ = setup_model(scanned(FLAX))
        with pytest.raises(ValueError, match="list 'quantize' in split_rngs"):
            converted.apply(variables, x, rngs={RNG_STREAM: KEYS[0]})

    def test_the_params_stream_reaches_an_unedited_model(self):
        class Kernels(nn.Module):
            """Equal kernels: what differs between the layers is the rounding."""

            @nn.compact
            def __call__(self, x):
                y = nn.Dense(WIDTH, use_bias=False, kernel_init=nn.initializers.constant(0.3))(x)
                return x, y

        class Model(nn.Module):
            split_rngs: Any

            @nn.compact
            def __call__(self, x):
                stack = nn.scan(
                    lambda layer, x, _: layer(x),
                    variable_axes={"params": 0},
                    split_rngs=self.split_rngs,
                    length=2,
                )
                return stack(Kernels(name="layers"), x, None)[1]

        from flax.core import freeze

        for streams, given in (
            (freeze({"params": True}), "params"),
            (freeze({"params": True, RNG_STREAM: True}), RNG_STREAM),
        ):
            variables, x, _, apply = setup_model(Model(streams))
            one, other = (apply(variables, x, {given: key}) for key in KEYS)
            assert np.any(one[0] != one[1]), "both layers rounded alike"
            assert np.any(one != other)
            np.testing.assert_array_equal(one, apply(variables, x, {given: KEYS[0]}))


def test_below_nn_jit_steps_draw_anew():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(nn.Dense)(5)(x)

    variables, x, converted, _ = setup_model(Model())
    one, other = (converted.apply(variables, x, rngs={RNG_STREAM: key}) for key in KEYS)
    again = converted.apply(variables, x, rngs={RNG_STREAM: KEYS[0]})
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)
