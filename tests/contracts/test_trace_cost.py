"""Tracing quantized layers costs little more than tracing float32's."""

import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mx_jax
from tests.needs import needs_library

X = jnp.ones((64, 96))
# Lines of a layer with its gradients in a jaxpr.
MOST_LINES = {"mxfp8": 29, "mxfp4": 26, "nvfp4": 39, "float8_rowwise": 43}
RECIPES = tuple(MOST_LINES)
ROUNDS = 5
# Of float32's CPU time to trace.
MOST_TIMES = 2.5


class Layers(nn.Module):
    """Six layers of six shapes."""

    recipe: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (128, 160, 192, 224, 256, 288):
            if self.recipe is None:
                x = nn.Dense(features, use_bias=False)(x)
            else:
                x = mx_jax.nn.linen.Dense(features, use_bias=False, recipe=self.recipe)(x)
        return x.sum()


def gradient(recipe: str | None) -> tuple[Any, Any]:
    layers = Layers(recipe)
    params = jax.eval_shape(layers.init, jax.random.key(0), X)
    return jax.grad(lambda params, x: layers.apply(params, x)), params


def seconds(recipe: str | None) -> float:
    run, params = gradient(recipe)
    jax.clear_caches()
    start = time.process_time()
    jax.jit(run).trace(params, X)
    return time.process_time() - start


@pytest.mark.slow
@needs_library
def test_tracing_costs_little_more_than_float32s():
    rounds = [{recipe: seconds(recipe) for recipe in (None, *RECIPES)} for _ in range(ROUNDS)]
    for recipe in RECIPES:
        ratio = statistics.median(each[recipe] / each[None] for each in rounds)
        assert ratio <= MOST_TIMES, f"{recipe}: {ratio:.1f} times float32's"


@pytest.mark.parametrize("recipe", RECIPES)
def test_lines_of_a_jaxpr(recipe: str):
    run, params = gradient(recipe)
    text = str(jax.make_jaxpr(run)(params, X))
    assert len(text.splitlines()) <= 6 * MOST_LINES[recipe]
    format = mx_jax.recipes.from_name(recipe).fwd.lhs.format
    assert f"work={format.name} along -1" in text
    assert f"work={format.name} x {format.name} -> float32" in text
