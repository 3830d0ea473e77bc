"""Models that multiply by name, converted as modules and as functions: GPT-2, cells in a scan.

The GPT-2 here is a stand-in for `FlaxGPT2Module` of transformers 4.55, which has layers of its own
kind (`FlaxConv1D`: `lax.dot_general` in a method); test_peers.py runs the real one.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mx_jax import convert, recipes
from mx_jax.convert import Rule
from tests.quick import quick

from .helpers import STOCHASTIC, WEIGHT_ONLY, products

RECIPE = recipes.mxfp8()
TOKENS = np.arange(8, dtype=np.int32).reshape(2, 4)


class Conv1D(nn.Module):
    """`[..., in]` by a kernel stored `[out, in]`, as GPT-2's checkpoints have it."""

    features: int
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(0.2), (self.features, x.shape[-1]))
        dot = self.recipe.dot_general if self.recipe else lax.dot_general
        return dot(x, kernel.transpose(), (((x.ndim - 1,), (0,)), ((), ())))


class Block(nn.Module):
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(Conv1D(96, self.recipe, name="c_attn")(nn.LayerNorm()(x)), 3, -1)
        weights = nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + Conv1D(32, self.recipe, name="c_proj")(jnp.einsum("bqk,bkd->bqd", weights, v))
        return x + Conv1D(32, self.recipe, name="c_fc")(nn.gelu(x))


class Gpt2(nn.Module):
    recipe: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        embed = nn.Embed(16, 32, name="wte")
        x = embed(tokens)
        for i in range(2):
            x = Block(self.recipe, name=f"h_{i}")(x)
        return embed.attend(nn.Dropout(0.5)(x, deterministic))


# Products of two activations, and the embedding, stay.
RULES = [Rule(r".*->.*|Gpt2/wte.attend", None), Rule(".*", RECIPE)]


LINEN = [Rule(r".*->.*", None), Rule(".*", RECIPE)]


def test_layers_of_gpt2():
    """By the module's paths and types, or by the function's scopes: the same products."""
    model = Gpt2()
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    report = convert.report(model.apply, RULES, variables, TOKENS, weights=0)
    paths = [
        f"h_{i}/{name}"
        for i in range(2)
        for name in ("c_attn", "bqd,bkd->bqk", "bqk,bkd->bqd", "c_proj", "c_fc")
    ]
    scopes = [f"Gpt2/{path}" for path in paths]
    assert [own.layer.path for own in report.decisions] == [*scopes, "Gpt2/wte.attend"]
    assert [own.layer.kernel for own in report.decisions if own.recipe][:2] == [(32, 96), (32, 32)]
    assert report.num_converted == 6
    found = convert.report(model, LINEN, TOKENS)
    assert [own.layer.path for own in found.decisions] == ["wte", *paths]
    assert {own.layer.type for own in found.decisions} == {nn.Embed, Conv1D, Block}
    assert found.num_converted == 6


def test_every_product_of_gpt2():
    """But that of Flax's embedding, whose type a rule has to name."""
    variables = jax.eval_shape(Gpt2().init, jax.random.key(0), TOKENS)

    def made(*rules: Rule) -> dict[str, int]:
        return products(convert.linen(Gpt2(), rules, strict=True).apply, variables, TOKENS)

    everything = Rule(".*", RECIPE)
    assert products(Gpt2().apply, variables, TOKENS) == {"dot_general": 11}
    assert made(everything) == {"dot_general": 1, "mx_matmul": 10}
    assert made(everything, Rule(".*", RECIPE, types=nn.Embed)) == {"mx_matmul": 11}
    assert made(Rule("h_1", RECIPE, types=Block)) == {"dot_general": 9, "mx_matmul": 2}
    assert made(Rule(".*/c_fc", RECIPE, types=Conv1D)) == {"dot_general": 9, "mx_matmul": 2}
    by_product = Rule("h_0/.*", RECIPE, types=convert.DotGeneral)
    assert made(by_product) == {"dot_general": 6, "mx_matmul": 5}
    # A recipe of weights alone says nothing of products without.
    assert made(Rule(".*", WEIGHT_ONLY)) == {"dot_general": 5, "mx_matmul": 6}


def test_a_converted_part_of_another_model():
    """Its scope is an argument of the trace: what it keeps, sows and draws is as before."""

    class Part(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, *, scale: float) -> jax.Array:
            calls = self.variable("calls", "count", lambda: jnp.zeros((), jnp.int32))
            calls.value += 1
            self.sow("intermediates", "input", x)
            return nn.Dropout(0.5, deterministic=False)(Block()(x)) * scale

    class Outer(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8)(self.part(self.part(x, scale=2.0), scale=1.0))

    x, rngs = jnp.ones((2, 4, 32)), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    plain, ours = Outer(Part()), Outer(convert.linen(Part(), Rule(".*", RECIPE), strict=True))
    variables = plain.init(rngs, x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(rngs, x), variables)

    def run(module: nn.Module) -> Any:
        return functools.partial(module.apply, rngs=rngs, mutable=["calls", "intermediates"])

    assert products(run(plain), variables, x) == {"dot_general": 11}
    assert products(run(ours), variables, x) == {"dot_general": 1, "mx_matmul": 10}
    (before, kept), (after, ours_kept) = run(plain)(variables, x), run(ours)(variables, x)
    assert ours_kept["calls"]["part"]["count"] == kept["calls"]["part"]["count"] == 4
    assert jax.tree.structure(ours_kept) == jax.tree.structure(kept)
    # The same is dropped.
    assert 0 < np.linalg.norm(after - before) < 0.2 * np.linalg.norm(before)


@pytest.mark.slow
def test_gradients_of_gpt2():
    """Bit for bit those of the same model with the recipe's dot_general in its layers."""
    variables = quick(Gpt2().init)(jax.random.key(0), TOKENS)
    converted = [
        convert.function(Gpt2().apply, RULES, weights=0),
        convert.linen(Gpt2(), LINEN).apply,
    ]

    def loss(apply: Any) -> Any:
        return quick(jax.value_and_grad(lambda params: jnp.sum(apply(params, TOKENS) ** 2)))

    theirs = loss(Gpt2(RECIPE).apply)(variables)
    for apply in converted:
        jax.tree.map(np.testing.assert_array_equal, loss(apply)(variables), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["function", "linen"])
def test_streams_of_the_model_reach_it(way: str):
    """flax.linen's apply takes rngs itself; conversion reads its own stream there."""
    model, rule = Gpt2(), Rule(".*/c_fc", STOCHASTIC)
    variables = quick(model.init)(jax.random.key(0), TOKENS)
    converted: Any = convert.linen(model, rule).apply
    if way == "function":
        converted = convert.function(model.apply, rule, weights=0)

    def run(quantize: int, dropout: int) -> np.ndarray:
        rngs = {"quantize": jax.random.key(quantize), "dropout": jax.random.key(dropout)}
        return np.asarray(converted(variables, TOKENS, deterministic=False, rngs=rngs))

    np.testing.assert_array_equal(run(0, 0), run(0, 0))
    assert np.any(run(0, 0) != run(1, 0)) and np.mean(run(0, 0) == run(0, 1)) < 0.1


class PreTrained:
    """As transformers' `FlaxPreTrainedModel` holds its module."""

    def __init__(self, module: nn.Module):
        self._module = module

    @property
    def module(self) -> nn.Module:
        return self._module

    def __call__(self, tokens: Any, params: Any) -> Any:
        return self.module.apply(params, tokens)


@pytest.mark.slow
def test_a_model_that_holds_a_module():
    """The error says what to convert, and how to put it back; that does it."""
    model = PreTrained(Gpt2())
    rules = [Rule("h_0/c_fc", RECIPE)]
    text = r"convert.{}: PreTrained is no flax.linen module, but holds one as model.module.*"
    operations: list[Any] = [convert.linen, convert.report]
    for operation in operations:
        with pytest.raises(TypeError, match=text.format(operation.__name__)) as error:
            operation(model, rules)
        assert "put it back: model._module = convert.linen(model.module, rules)" in str(error.value)
    variables = quick(model.module.init)(jax.random.key(0), TOKENS)
    plain = model(TOKENS, variables)
    model._module = convert.linen(model.module, rules, strict=True)
    assert np.any(model(TOKENS, variables) != plain)
    model._module = convert.original(model.module)
    np.testing.assert_array_equal(model(TOKENS, variables), plain)
