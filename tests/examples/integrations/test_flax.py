"""Flax's own hooks: the examples learn in quantized products, which are `mx_jax.matmul`'s."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import recipes
from mx_jax.nn import linen
from mx_jax.nn import nnx as ours
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned, value_and_gradients
from tests.nn.layers import assert_trees_equal, stochastic, weighted_sum
from tests.quick import quick

KEY = jax.random.key(0)
ALL = ("output", "grad_input", "grad_weight")
# Nobody asks for the gradient of the data.
FIRST = ("output", "grad_weight")
X = draw_few_octaves(np.random.default_rng(0), (2, 5, 64))


@pytest.mark.slow
def test_linen_example(integration: Any, capsys: pytest.CaptureFixture[str]):
    losses, report = integration("linen_hooks").main()
    assert_learned(losses)
    inner = ("EinsumOp_0", "EinsumOp_1", "key", "out", "query", "value")
    layers = [*(f"Model/attention/{name}" for name in inner), "Model/mlp"]
    assert report.quantized == dict.fromkeys(layers, ALL)
    assert report.plain == ("Model/head",)
    assert "Model/mlp                   output, grad_input, grad_weight" in capsys.readouterr().out


@pytest.mark.slow
def test_nnx_example(integration: Any):
    losses, report = integration("nnx_hooks").main()
    assert_learned(losses)
    assert report.quantized == dict.fromkeys(("attention", "down", "up"), ALL)
    # Flax's nnx attention has no hook for its two products.
    assert report.plain == ("head",) or set(report.plain) == {"attention", "head"}


@pytest.mark.slow
def test_bridge_example(integration: Any):
    results = integration("flax_bridge").main()
    for losses, _ in results.values():
        assert_learned(losses)
    assert results["linen in nnx"][1].quantized == {"hidden": FIRST}
    assert results["nnx in linen"][1].quantized == {"LinenModel/hidden": FIRST}


def test_the_report_tells_high_precision_from_quantized(integration: Any):
    """The same products without a cast are none of those that it names."""
    report = integration("shared").report

    def program(recipe: Any) -> Any:
        def loss(x, w):
            with jax.named_scope("layer"):
                return weighted_sum(mx_jax.matmul(x, w, recipe=recipe))

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return report(gradient.lower(X, np.ones((64, 8), np.float32)).compile().as_text())

    assert program(recipes.high_precision()).quantized == {}
    assert program(recipes.high_precision()).plain == ("layer",)
    half = dataclasses.replace(recipes.mxfp8(), name="half", drhs=recipes.high_precision().drhs)
    assert program(half).quantized == {"layer": ("output", "grad_input")}
    assert program(recipes.mxfp8()).quantized == {"layer": ALL}


def test_linens_hook_is_the_product_with_the_layers_key(monkeypatch: pytest.MonkeyPatch):
    keys, draw = [], linen.layer_key

    def recorded(*args: Any) -> Any:
        keys.append(draw(*args))
        return keys[-1]

    monkeypatch.setattr(linen, "layer_key", recorded)
    layer = flax_nn.Dense(8, dot_general_cls=linen.DotGeneral(stochastic()))
    params = jax.eval_shape(layer.init, KEY, X)["params"]
    params = jax.tree.map(lambda p: draw_few_octaves(np.random.default_rng(1), p.shape), params)

    def hooked(given, x):
        keys.clear()
        return layer.apply({"params": given[0]}, x, rngs={"quantize": given[1]}), keys[0]

    def by_hand(given, x):
        params, key = given
        return mx_jax.matmul(x, params["kernel"], recipe=stochastic(), key=key) + params["bias"]

    drawn = quick(hooked)((params, KEY), X)[1]
    found, expected = (
        value_and_gradients(lambda params, x, run=run, key=key: run((params, key), x), params, X)
        for run, key in ((lambda *given: hooked(*given)[0], KEY), (by_hand, drawn))
    )
    assert_trees_equal(found, expected)


def linen_attention(**hooks: Any) -> Callable[..., Any]:
    layer = flax_nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False, **hooks)
    return lambda params, x: layer.apply({"params": params}, x)


def nnx_attention(**hooks: Any) -> Callable[..., Any]:
    layer = nnx.MultiHeadAttention(2, 64, use_bias=False, decode=False, rngs=nnx.Rngs(0), **hooks)
    graph, state = nnx.split(layer)

    def run(params, x):
        own = nnx.clone(state)
        nnx.replace_by_pure_dict(own, params)
        return nnx.merge(graph, own)(x)

    return run


def both(recipe: Any) -> dict[str, Any]:
    return {"qkv_dot_general": recipe, "out_dot_general": recipe}


def both_cls(factory: Any) -> dict[str, Any]:
    return {"qkv_dot_general_cls": factory, "out_dot_general_cls": factory}


ATTENTIONS = {
    "linen": lambda: linen_attention(**both(recipes.mxfp8().dot_general)),
    "linen cls": lambda: linen_attention(**both_cls(linen.DotGeneral("mxfp8"))),
    "nnx": lambda: nnx_attention(**both(ours.DotGeneral("mxfp8"))),
    "nnx cls": lambda: nnx_attention(**both_cls(lambda: recipes.mxfp8().dot_general)),
}


def attention_params() -> Any:
    rng = np.random.default_rng(1)
    shapes = {"query": (64, 2, 32), "key": (64, 2, 32), "value": (64, 2, 32), "out": (2, 32, 64)}
    return {name: {"kernel": draw_few_octaves(rng, shape) / 64} for name, shape in shapes.items()}


@functools.cache
def attention_by_hand(attend: Callable[..., Any]) -> Any:
    def run(params, x):
        query, key, value = (
            mx_jax.einsum("btd,dhk->bthk", x, params[name]["kernel"], recipe="mxfp8")
            for name in ("query", "key", "value")
        )
        y = attend(query, key, value)
        return mx_jax.einsum("bthk,hkd->btd", y, params["out"]["kernel"], recipe="mxfp8")

    return value_and_gradients(run, attention_params(), X)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attentions_hooks_are_the_products(kind: str):
    """All four projections follow the recipe, and what lies between them is Flax's own."""
    attend = nnx.dot_product_attention if "nnx" in kind else flax_nn.dot_product_attention
    found = value_and_gradients(ATTENTIONS[kind](), attention_params(), X)
    assert_trees_equal(found, attention_by_hand(attend))


def to_nnx() -> Any:
    """A linen layer in nnx, and its kernel and bias."""
    layer = flax_nn.Dense(8, dot_general_cls=linen.DotGeneral("mxfp8"))
    model: Any = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: nnx.merge(graph, params, rest, copy=True)(x), params


def to_linen() -> Any:
    """An nnx layer in linen, and its kernel and bias."""
    layer = nnx.bridge.to_linen(nnx.Linear, 64, 8, dot_general=recipes.mxfp8().dot_general)
    params = layer.init(KEY, X)["params"]
    return lambda params, x: layer.apply({"params": params}, x), params


@pytest.mark.parametrize("bridge", [to_nnx, to_linen])
def test_a_bridged_layer_is_the_product(bridge: Any):
    run, params = bridge()

    def by_hand(params, x):
        bias, kernel = jax.tree.leaves(params)
        return mx_jax.matmul(x, kernel, recipe="mxfp8") + bias

    found, expected = (value_and_gradients(own, params, X) for own in (run, by_hand))
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bitwise_equal(left, right)
