"""Tracing quantized layers costs little more than tracing float32's."""

import contextlib
import statistics
import time
from collections.abc import Iterator
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
MOST_TIMES = 2
# The same to trace, lower and compile.
MOST_TIMES_COMPILED = 5


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


def seconds(recipe: str | None, *, compiles: bool = False) -> float:
    run, params = gradient(recipe)
    jax.clear_caches()
    start = time.process_time()
    traced = jax.jit(run).trace(params, X)
    if compiles:
        traced.lower().compile()
    return time.process_time() - start


def ratios(compiles: bool) -> dict[str, float]:
    """CPU time over float32's, medians of rounds in turn."""
    rounds = [
        {recipe: seconds(recipe, compiles=compiles) for recipe in (None, *RECIPES)}
        for _ in range(ROUNDS)
    ]
    return {r: statistics.median(each[r] / each[None] for each in rounds) for r in RECIPES}


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize(("compiles", "most"), [(False, MOST_TIMES), (True, MOST_TIMES_COMPILED)])
def test_tracing_and_compiling_cost_little_more_than_float32s(compiles: bool, most: float):
    with compilation_cache_off():
        found = ratios(compiles)
    assert all(ratio <= most for ratio in found.values()), found


@contextlib.contextmanager
def compilation_cache_off() -> Iterator[None]:
    """Tests share a cache of compiled programs, from which nothing is compiled twice."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_lines_of_a_jaxpr(recipe: str):
    run, params = gradient(recipe)
    text = str(jax.make_jaxpr(run)(params, X))
    assert len(text.splitlines()) <= 6 * MOST_LINES[recipe]
    format = mx_jax.recipes.from_name(recipe).fwd.lhs.format
    assert f"work={format.name} along -1" in text
    assert f"work={format.name} x {format.name} -> float32" in text
