"""Fine-tuning over weights that stay in their format: adapters, and arrays straight through."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.nn import join_stored, split_stored
from mx_jax.nn.nnx import trainable
from mx_jax.packed import Quantized
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

RECIPE = recipes.weight_only("mxfp4")
RULES = convert.Rule(".*", RECIPE)
RNG = np.random.default_rng(0)
X, TARGET = (RNG.standard_normal(shape, np.float32) for shape in ((8, 64), (8, 16)))


def codes_of(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Quantized))
    return [np.asarray(a) for x in leaves if isinstance(x, Quantized) for a in jax.tree.leaves(x)]


class Adapted(nn.Module):
    """A layer with an adapter of low rank beside it, as a user writes it."""

    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.normal(0.1), (64, 4))
        b = self.param("b", nn.initializers.normal(0.1), (4, 16))
        return nn.Dense(16)(x) + x @ a @ b


@pytest.mark.parametrize("pack", [False, True])
def test_adapters_over_stored_kernels_in_linen(pack: bool):
    """The gradients are those of the function with the kernel's values in its place."""
    variables = quick(Adapted().init)(jax.random.key(0), X)
    rules = convert.Rule("Dense_0", RECIPE)
    model = convert.linen(Adapted(), rules)
    params = convert.weights(variables["params"], rules, pack=pack)
    trained, stored = split_stored(params)
    assert len(jax.tree.leaves(trained)) == 3 and trained["Dense_0"]["kernel"] is None

    @quick
    def gradients(trained, stored):
        def loss(trained):
            params = join_stored(trained, stored)
            return jnp.sum((jnp.asarray(model.apply({"params": params}, X)) - TARGET) ** 2)

        return jax.grad(loss)(trained)

    kernel = mx_jax.cast(
        variables["params"]["Dense_0"]["kernel"], "mxfp4", axis=0, scale_rule="even"
    )
    values = {**trained, "Dense_0": {"kernel": kernel, "bias": trained["Dense_0"]["bias"]}}

    def plain(values):
        return jnp.sum((jnp.asarray(Adapted().apply({"params": values}, X)) - TARGET) ** 2)

    expected = quick(jax.grad(plain))(values)
    expected["Dense_0"]["kernel"] = None
    actual = gradients(trained, stored)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), actual, expected
    )
    whole = join_stored(optax.apply_updates(trained, actual), stored)
    for x, y in zip(codes_of(whole), codes_of(params), strict=True):
        assert_bitwise_equal(x, y)


def test_adapters_over_packed_kernels_in_nnx():
    """What is trained is the adapters and biases: so are gradients and moments."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.LoRALinear(64, 16, lora_rank=4, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    model = convert.weights(Model(nnx.Rngs(0)), RULES)
    before = codes_of(nnx.state(model))
    assert before, "codes, and scales beside them or packed with them"
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=trainable)
    moments = sum(np.size(leaf) for leaf in jax.tree.leaves(nnx.state(optimizer, nnx.OptState)))
    adapters = 4 * (64 + 16) + 16
    assert moments <= 2 * adapters + 4, "no moments of codes"

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(X) - TARGET) ** 2)

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, trainable))(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    for x, y in zip(codes_of(nnx.state(model)), before, strict=True):
        assert_bitwise_equal(x, y)


def test_straight_through_starts_at_the_stored_weights_and_ends_at_stored_weights():
    """Arrays are trained whose casts are the codes: nothing changes when they are stored again."""
    stored = convert.weights(
        {"kernel": RNG.standard_normal((64, 16), np.float32)}, RULES, pack=False
    )
    inside = functools.partial(mx_jax.matmul, recipe=RECIPE)
    multiply = quick(inside)
    arrays = {"kernel": mx_jax.dequantize(stored["kernel"])}
    assert_bitwise_equal(multiply(X, arrays["kernel"]), multiply(X, stored["kernel"]))

    @quick
    def step(arrays):
        def loss(arrays):
            return jnp.mean((inside(X, arrays["kernel"]) - TARGET) ** 2)

        return jax.tree.map(lambda x, g: x - 0.3 * g, arrays, jax.grad(loss)(arrays))

    for _ in range(4):
        arrays = step(arrays)
    again = convert.weights(arrays, RULES, pack=False)
    assert_bitwise_equal(multiply(X, arrays["kernel"]), multiply(X, again["kernel"]))
    moved = np.mean(np.asarray(again["kernel"].codes) != np.asarray(stored["kernel"].codes))
    assert 0.01 < moved < 0.9


def test_split_and_join_are_inverse():
    params = {"a": mx_jax.quantize(jnp.ones((32, 8)), "mxfp4", axis=0), "b": [jnp.ones(3), None]}
    trained, stored = split_stored(params)
    assert trained["a"] is None and stored["b"] == [None, None]
    joined = join_stored(trained, stored)
    assert joined["a"] is params["a"] and joined["b"][0] is params["b"][0]


def test_errors_teach():
    kernel = mx_jax.quantize(jnp.ones((32, 8)), "mxfp4", axis=0)
    message = (
        "split_stored: nothing to train, all 1 parameters are quantized weights, which have no"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        split_stored({"kernel": kernel})
    trained, stored = split_stored({"kernel": kernel, "bias": jnp.ones(8)})
    with pytest.raises(ValueError, match="join_stored: both trees must come from one split_stored"):
        join_stored(trained, {"kernel": stored["kernel"]})
    # What the documentation quotes.
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(lambda w: mx_jax.matmul(jnp.ones((2, 32)), w, recipe=RECIPE).sum())(kernel)
