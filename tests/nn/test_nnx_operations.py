"""nnx.DotGeneral and nnx.EinsumOp: recipes in Flax's own layers, with a stream of their own."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.nn.nnx import DotGeneral, EinsumOp
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import MXFP4, assert_trees_equal, stochastic, weighted_sum
from tests.quick import quick

X = draw_few_octaves(np.random.default_rng(0), (2, 5, 32))
PLAIN = {
    "Linear": functools.partial(nnx.Linear, 32, 8),
    "LinearGeneral": functools.partial(nnx.LinearGeneral, 32, (2, 4)),
    "Einsum": functools.partial(nnx.Einsum, "btd,dhk->bthk", (32, 2, 4), (2, 4)),
}
kinds = pytest.mark.parametrize("kind", PLAIN)


def make(kind: str, recipe: Any, **streams: int) -> Any:
    rngs = nnx.Rngs(0, **streams)
    if kind == "Einsum":
        return PLAIN[kind](einsum_op=EinsumOp(recipe, rngs=rngs), rngs=rngs)
    return PLAIN[kind](dot_general=DotGeneral(recipe, rngs=rngs), rngs=rngs)


def product(layer: Any) -> Any:
    return layer.einsum_op if isinstance(layer, nnx.Einsum) else layer.dot_general


@kinds
def test_parameters_are_those_of_the_layer_without_it(kind: str):
    actual, expected = make(kind, stochastic(), quantize=1), PLAIN[kind](rngs=nnx.Rngs(0))
    assert_trees_equal(
        *(nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (actual, expected))
    )


@pytest.mark.by_default("Linear$")
@pytest.mark.parametrize(
    "kind", ["Linear", "Einsum", pytest.param("LinearGeneral", marks=pytest.mark.slow)]
)
def test_the_product_is_the_recipes_with_the_streams_key(kind: str):
    layer = make(kind, stochastic(), quantize=1)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    keys = nnx.clone(product(layer).stream)
    axes = {"Linear": "btd,df->btf"}.get(kind, "btd,dhk->bthk")

    def hooked(params, x, rest):
        layer = nnx.merge(graph, params, rest, copy=True)
        y = layer(x)
        return weighted_sum(y), (y, product(layer).stream.count[...])

    def by_hand(params, x, key):
        y = mx_jax.einsum(axes, x, params["kernel"][...], recipe=stochastic(), key=key)
        y = y + params["bias"][...]
        return weighted_sum(y), y

    gradients, (y, count) = quick(jax.grad(hooked, argnums=(0, 1), has_aux=True))(params, X, rest)
    expected, z = quick(jax.grad(by_hand, argnums=(0, 1), has_aux=True))(params, X, keys())
    assert_bitwise_equal(y, z)
    assert_trees_equal(gradients, expected)
    assert count == 1


@pytest.mark.slow
def test_a_shared_stream_gives_each_use_its_own_key():
    rngs = nnx.Rngs(0, quantize=1)
    shared: Any = DotGeneral(stochastic(), rngs=rngs)
    layer = nnx.Linear(32, 8, dot_general=shared, rngs=rngs)
    twin = nnx.Linear(32, 8, dot_general=shared, rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer, twin)

    @nnx.jit
    def run(model, x):
        layer, twin = model.layers
        return layer(x), twin(x), layer(x)

    first, second, third = run(model, X + 0.01)
    assert np.any(first != second) and np.any(first != third) and np.any(second != third)
    assert shared.stream.count[...] == 3


def test_operations_made_one_after_the_other_differ():
    rngs = nnx.Rngs(0, quantize=1)
    pair: Any = [DotGeneral(stochastic(), rngs=rngs) for _ in range(2)]
    first, second = (operation.stream.key[...] for operation in pair)
    assert first != second


def test_a_rebuilt_model_is_not_retraced():
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(layer)
        return layer(x)

    for recipe in ("mxfp4", recipes.mxfp4(), MXFP4):
        run(make("Linear", recipe), X)
    assert len(traces) == 1


@nnx.split_rngs(splits=2)
@functools.partial(nnx.vmap, in_axes=0)
def stack(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(32, 32, dot_general=DotGeneral(stochastic(), rngs=rngs), rngs=rngs)


@pytest.mark.slow
def test_layers_of_a_stack_draw_their_own_bits():
    layers = stack(nnx.Rngs(0, quantize=1))
    layers.kernel[...] = layers.kernel[...].at[1].set(layers.kernel[0])

    @nnx.jit
    @nnx.vmap(in_axes=(0, None))
    def run(layer, x):
        return layer(x)

    first, second = run(layers, X + 0.01)
    assert np.any(first != second)
    with pytest.raises(ValueError, match=r"^DotGeneral: a layer of a stack .* shape=\(2,\)"):
        product(layers)(X, layers.kernel[0], (((2,), (0,)), ((), ())))


@pytest.mark.parametrize("operation", [DotGeneral, EinsumOp])
def test_errors(operation: Any):
    name = operation.__name__
    with pytest.raises(TypeError, match=f"^{name}: recipe must be a Recipe .* got recipe=None"):
        operation(None)
    for rngs, found in ((None, "no rngs"), (nnx.Rngs(0), "rngs with 'default'")):
        with pytest.raises(ValueError, match=f"^{name}: recipe 'stochastic' .*{re.escape(found)}"):
            operation(stochastic(), rngs=rngs)
    assert operation("mxfp8").stream is None


def test_conversion_leaves_it_alone():
    layer = make("Linear", MXFP4)
    with pytest.warns(convert.UnusedRuleWarning):
        report = convert.report(layer, convert.Rule(".*", recipes.mxfp8()))
    assert {decision.layer.path: decision.recipe for decision in report.decisions} == {"": None}
