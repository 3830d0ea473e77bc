"""A layer that is not Flax's, told to conversion from outside, beside the layer."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mx_jax import convert
from mx_jax.convert import Rule, kinds

from .helpers import MXFP8 as RECIPE
from .helpers import STOCHASTIC

X = np.random.default_rng(1).standard_normal((3, 64), np.float32)
WEIGHT = np.random.default_rng(2).standard_normal((2, 64, 32), np.float32)


def multiply_heads(x: jax.Array, heads: jax.Array) -> jax.Array:
    return jnp.einsum("bk,hkn->bhn", x, heads)


def twice(x: jax.Array, heads: jax.Array) -> jax.Array:
    return 2 * multiply_heads(x, heads)


class Heads(nn.Module):
    """`[b, k]` by `[h, k, n]`: the product is an attribute of its own name and signature."""

    multiply: Any = multiply_heads

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.multiply(x, self.param("heads", nn.initializers.normal(), WEIGHT.shape))


class NnxHeads(nnx.Module):
    def __init__(self, multiply: Any = multiply_heads):
        self.heads = nnx.Param(jnp.asarray(WEIGHT))
        self.multiply = nnx.static(multiply)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.multiply(x, self.heads[...])


KIND = convert.Kind(
    linen=convert.Slot(Heads, "multiply", (multiply_heads,)),
    nnx=convert.Slot(NnxHeads, "multiply", (multiply_heads,)),
    shape=lambda layer, kernel: (kernel[1], kernel[0] * kernel[2]),
    kernel=lambda layer: layer.heads,
    kernel_ndim=lambda layer: 3,
)


@pytest.fixture
def registered(unregistered: None) -> None:
    convert.register(KIND)


def reason(model: Any, *args: Any) -> str:
    with pytest.warns(convert.UnusedRuleWarning):
        (decision,) = convert.report(model, Rule(".*", RECIPE), *args).decisions
    return decision.reason


@pytest.mark.parametrize("model", [Heads(), NnxHeads()], ids=["linen", "nnx"])
@pytest.mark.usefixtures("registered")
def test_registered_it_is_a_layer_like_any_other(model: Any):
    """Reported with the shape that filters see; what a user put there stays."""
    args = (X,) if isinstance(model, nn.Module) else ()
    (decision,) = convert.report(model, Rule(".*", RECIPE), *args).decisions
    assert decision.recipe == RECIPE
    assert (decision.layer.kernel, decision.layer.shape) == ((2, 64, 32), (64, 64))

    own = Heads(multiply=twice) if args else NnxHeads(twice)
    assert reason(own, *args) == "has its own multiply"


@pytest.mark.usefixtures("registered")
def test_what_is_registered_last_is_asked_first():
    """So Flax's own layers may be told anew."""
    assert convert.report(nn.Dense(8), Rule(".*", RECIPE), X).num_converted == 1
    convert.register(dataclasses.replace(kinds.DENSE, named_only=True))
    only = "rule 0: only a rule with types={} converts it"
    assert reason(nn.Dense(8), X) == only.format("Dense")
    assert reason(nnx.Linear(64, 8, rngs=nnx.Rngs(0))) == only.format("Linear")


@pytest.mark.usefixtures("registered")
def test_in_a_stack():
    """The leading axis of a stack is told from the kernel's own, and each layer has a stream."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def build(rngs: nnx.Rngs) -> NnxHeads:
        del rngs
        return NnxHeads()

    model: Any = convert.nnx(build(nnx.Rngs(0)), Rule(".*", STOCHASTIC), rngs=nnx.Rngs(quantize=0))
    assert model.mx_stream.key.shape == (3,)
