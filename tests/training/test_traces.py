"""One trace for a model and a recipe, however often the model is rebuilt and the step taken."""

from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mx_jax import recipes
from mx_jax.nn import linen
from mx_jax.nn import nnx as ours
from mx_jax.recipes import Recipe

X = jnp.ones((8, 64))
NAMES = tuple(dict.fromkeys(recipes.from_name(name).name for name in recipes.names()))


class Model(flax_nn.Module):
    recipe: Recipe

    @flax_nn.compact
    def __call__(self, x):
        x = flax_nn.relu(linen.Dense(32, recipe=self.recipe)(x))
        x = flax_nn.Dense(8, dot_general_cls=linen.DotGeneral(self.recipe))(x)
        return flax_nn.Dense(8, dot_general=self.injected)(x)

    @property
    def injected(self) -> Any:
        # Flax's own layers pass no key on.
        return None if self.recipe.is_stochastic else self.recipe.dot_general


class NnxModel(nnx.Module):
    def __init__(self, recipe: Recipe):
        self.rngs = nnx.Rngs(0, quantize=1)
        self.inside = ours.Linear(64, 32, recipe=recipe, rngs=self.rngs)
        self.out = ours.LinearGeneral(32, 8, recipe=recipe, rngs=self.rngs)
        product = ours.DotGeneral(recipe, rngs=self.rngs)
        self.theirs = nnx.Linear(8, 8, dot_general=product, rngs=self.rngs)

    def __call__(self, x):
        return self.theirs(self.out(nnx.relu(self.inside(x))))


def steps_of_linen(recipe: Recipe, traces: list[Any]) -> Callable[[], None]:
    """A training step that notes when it is traced; each call rebuilds model and recipe."""

    def step(model, params, x, key):
        traces.append(model)

        def loss(params):
            return jnp.sum(model.apply(params, x, rngs={"quantize": key}) ** 2)

        return jax.grad(loss)(params)

    compiled = jax.jit(step, static_argnums=0)
    params = jax.eval_shape(Model(recipe=recipe).init, jax.random.key(0), X)
    # Abstract: traced through the same cache as a call, without the compilation.
    return lambda: compiled.eval_shape(
        Model(recipe=recipes.from_name(recipe.name)), params, X, jax.random.key(1)
    )


def steps_of_nnx(recipe: Recipe, traces: list[Any]) -> Callable[[], None]:
    """As `steps_of_linen`, with the model split into its graph, which is static, and its state."""

    def step(graph, state, x):
        traces.append(graph)
        return nnx.grad(lambda model: jnp.sum(model(x) ** 2))(nnx.merge(graph, state))

    compiled = jax.jit(step, static_argnums=0)

    def take() -> None:
        model = nnx.eval_shape(lambda: NnxModel(recipes.from_name(recipe.name)))
        compiled.eval_shape(*nnx.split(model), X)

    return take


@pytest.mark.slow(but="mxfp4|mxfp8|nvfp4_pretraining|float8_tensorwise")
@pytest.mark.parametrize("steps", [steps_of_linen, steps_of_nnx])
@pytest.mark.parametrize("name", NAMES)
def test_one_trace_for_rebuilt_models_and_repeated_steps(name: str, steps: Any):
    traces: list[Any] = []
    take = steps(recipes.from_name(name), traces)
    for _ in range(3):
        take()
    assert len(traces) == 1
