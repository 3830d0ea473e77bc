"""Recipes under Qwix's rules: needs Qwix 0.1.8, `pip install qwix`, and `-m slow`."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mx_jax
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned, value_and_gradients
from tests.nn.layers import assert_trees_equal
from tests.quick import quick

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ALL, FIRST = ("output", "grad_input", "grad_weight"), ("output", "grad_weight")
X = draw_few_octaves(np.random.default_rng(0), (6, 64))
W = draw_few_octaves(np.random.default_rng(1), (64, 8))
EXPERTS = draw_few_octaves(np.random.default_rng(2), (2, 64, 8))
SIZES = np.array([2, 4])


@pytest.fixture
def example(integration: Any) -> Any:
    pytest.importorskip("qwix")
    return integration("qwix_provider")


def test_the_example_learns(example: Any):
    for name, (losses, report) in example.main().items():
        assert_learned(losses)
        begin = "LinenModel/" if name == "linen" else ""
        assert report.quantized == {
            f"{begin}experts": ALL,
            f"{begin}heads": ALL,
            f"{begin}mlp": FIRST,
        }


def multiply(kind: str, x: Any, w: Any) -> Any:
    """One product of each kind."""
    if kind == "dot_general":
        return x @ w
    if kind == "einsum":
        return jnp.einsum("mk,kn->mn", x, w)
    return lax.ragged_dot(x, w, jnp.asarray(SIZES))


class Products(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shape = EXPERTS.shape if self.kind == "ragged_dot" else W.shape
        return multiply(self.kind, x, self.param("w", nn.initializers.zeros, shape))


class NnxProducts(nnx.Module):
    def __init__(self, kind: str):
        self.kind, self.w = kind, nnx.Param(EXPERTS if kind == "ragged_dot" else W)

    def __call__(self, x: Any) -> Any:
        return multiply(self.kind, x, self.w[...])


def by_hand(kind: str, recipe: Any) -> Any:
    if kind == "ragged_dot":
        return lambda w, x: mx_jax.ragged_dot(x, w, SIZES, recipe=recipe)
    return lambda w, x: mx_jax.matmul(x, w, recipe=recipe)


@pytest.mark.parametrize("kind", ["dot_general", "einsum", "ragged_dot"])
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_product_is_the_recipes(example: Any, framework: str, kind: str):
    qwix, recipe = pytest.importorskip("qwix"), mx_jax.recipes.mxfp8()
    provider = example.MxProvider([example.MxRule(recipe=recipe)])
    w = EXPERTS if kind == "ragged_dot" else W
    if framework == "linen":
        model = qwix.quantize_model(Products(kind), provider)

        def run(w, x):
            return model.apply({"params": {"w": w}}, x)
    else:
        model = qwix.quantize_model(NnxProducts(kind), provider, X)
        graph, _, rest = nnx.split(model, nnx.Param, ...)

        def run(w, x):
            return nnx.merge(graph, nnx.State({"w": nnx.Param(w)}), rest, copy=True)(x)

    actual = value_and_gradients(run, w, X)
    expected = value_and_gradients(by_hand(kind, recipe), w, X)
    assert_trees_equal(actual, expected)
    plain = value_and_gradients(by_hand(kind, mx_jax.recipes.high_precision()), w, X)
    assert np.any(np.asarray(actual[1]) != np.asarray(plain[1]))


def test_other_rules_stay_qwixs(example: Any):
    qwix = pytest.importorskip("qwix")
    rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8")]
    ours, theirs = (
        quick(qwix.quantize_model(Products("dot_general"), provider(rules)).apply)(
            {"params": {"w": W}}, X
        )
        for provider in (example.MxProvider, qwix.QtProvider)
    )
    assert_bitwise_equal(ours, theirs)
    assert np.any(np.asarray(ours) != np.asarray(X @ W))
