"""A stream is asked for where something is drawn: not in forward passes that round to nearest."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mx_jax import convert, recipes
from mx_jax.nn import linen
from mx_jax.nn import nnx as ours
from mx_jax.nn.linen import layer_key
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

X = np.random.default_rng(0).standard_normal((32, 32), np.float32)
# The forward product rounds to nearest, gradients draw.
RECIPE = recipes.mxfp4_stochastic()
RULE = convert.Rule(".*", RECIPE)
VARIABLES = quick(flax_nn.Dense(32).init)(jax.random.key(0), X)
EINSUM = {"params": {"kernel": VARIABLES["params"]["kernel"]}}

LINEN: dict[str, tuple[Any, Any]] = {
    "Dense": (linen.Dense(32, recipe=RECIPE), VARIABLES),
    "Einsum": (linen.Einsum((32, 32), "bk,kn->bn", use_bias=False, recipe=RECIPE), EINSUM),
    "DotGeneral": (flax_nn.Dense(32, dot_general_cls=linen.DotGeneral(RECIPE)), VARIABLES),
    "converted": (convert.linen(flax_nn.Dense(32), RULE), VARIABLES),
}


def rngs(**streams: int) -> nnx.Rngs:
    return nnx.Rngs(params=0, **streams)


NNX: dict[str, Callable[..., Any]] = {
    "Linear": lambda **streams: ours.Linear(32, 32, recipe=RECIPE, rngs=rngs(**streams)),
    "Einsum": lambda **streams: ours.Einsum(
        "bk,kn->bn", (32, 32), recipe=RECIPE, rngs=rngs(**streams)
    ),
    "converted": lambda **streams: convert.nnx(
        nnx.Linear(32, 32, rngs=rngs()), RULE, rngs=nnx.Rngs(**streams) if streams else None
    ),
}
MISSING = re.escape("recipe 'mxfp4_stochastic' rounds stochastically in grad_") + ".*quantize"


@pytest.mark.parametrize("name", LINEN)
def test_linen(name: str):
    layer, variables = LINEN[name]

    def loss(variables: Any, **options: Any) -> Any:
        return jnp.sum(jnp.square(jnp.asarray(layer.apply(variables, X, **options))))

    keyed = {"quantize": jax.random.key(1)}
    assert_bitwise_equal(layer.apply(variables, X), layer.apply(variables, X, rngs=keyed))
    jax.eval_shape(lambda v: jax.grad(loss)(v, rngs=keyed), variables)
    with pytest.raises(ValueError, match=MISSING):
        jax.eval_shape(jax.grad(loss), variables)


@pytest.mark.parametrize("name", NNX)
def test_nnx(name: str):
    layer, keyed = NNX[name](), NNX[name](quantize=1)
    assert not jax.tree.leaves(nnx.state(layer, nnx.RngState))
    assert_bitwise_equal(layer(X), keyed(X))

    def loss(layer: Any) -> jax.Array:
        return jnp.sum(layer(X) ** 2)

    nnx.eval_shape(nnx.grad(loss), keyed)
    with pytest.raises(ValueError, match=MISSING):
        nnx.eval_shape(nnx.grad(loss), layer)


class Draws(flax_nn.Module):
    """Two keys of a stream, by Flax or by this library."""

    is_ours: bool

    @flax_nn.compact
    def __call__(self, stream: str) -> list[jax.Array]:
        def key() -> jax.Array:
            if not self.is_ours:
                return self.make_rng(stream)
            ours = layer_key(self, RECIPE, stream)
            assert ours is not None
            return ours.get()

        return [jax.random.bits(key()) for _ in range(2)]


class Nested(flax_nn.Module):
    is_ours: bool

    @flax_nn.compact
    def __call__(self, stream: str) -> list[list[jax.Array]]:
        return [Draws(self.is_ours, name=name)(stream) for name in ("first", "second")]


@pytest.mark.parametrize("streams", [("quantize",), ("params", "quantize"), ("params",)], ids=str)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_a_layers_keys_are_those_of_make_rng(make: Any, streams: tuple[str, ...]):
    rngs = {name: make(number) for number, name in enumerate(streams)}
    for run in (lambda apply: apply, jax.jit):
        result, expected = (
            run(lambda ours=ours: Nested(ours).apply({}, "quantize", rngs=rngs))()
            for ours in (True, False)
        )
        assert result == expected and len(set(map(int, jax.tree.leaves(result)))) == 4
