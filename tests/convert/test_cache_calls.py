"""Calls that attention with a cache in a format refuses, and what its threads and files give."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mx_jax import convert
from mx_jax.nn import KVCache

RULE = convert.Rule(".*", None, cache="mxfp4")
X = np.random.default_rng(0).standard_normal((2, 8, 64)).astype(np.float32)


def linen() -> tuple[Any, Any]:
    model = convert.linen(nn.MultiHeadAttention(2, decode=True), RULE)
    return model, model.init(jax.random.key(0), X)


def in_nnx(kind: Any = nnx.MultiHeadAttention, **options: Any) -> Any:
    layer = convert.nnx(kind(2, 64, decode=True, rngs=nnx.Rngs(0), **options), RULE)
    layer.init_cache(X.shape)
    return layer


def test_calls_that_flax_refuses_too():
    """Queries of other tokens or sequences would see rows that nobody wrote, or those of others."""
    model, variables = linen()
    for query, keys in ((X[:, :2], X[:, :1]), (X[:, :1], X[:1, :1])):
        with pytest.raises(ValueError, match="must be of the same sequences and tokens, got query"):
            model.apply(variables, query, keys, mutable=["cache"])
    for mask in (jnp.ones((2, 8), bool), nn.make_causal_mask(jnp.ones((2, 3)), dtype=bool)):
        with pytest.raises(ValueError, match=r"heads or 1, tokens, 8\], got mask.shape="):
            model.apply(variables, X[:, :3], mask=mask, mutable=["cache"])
    tables = flax.serialization.to_state_dict(variables["cache"])
    with pytest.raises(ValueError, match="restored without a target"):
        model.apply({**variables, "cache": tables}, X[:, :1], mutable=["cache"])


def test_codes_pass_no_gradient():
    model, variables = linen()

    def loss(params: Any) -> jax.Array:
        y, _ = model.apply({**variables, "params": params}, X[:, :1], mutable=["cache"])
        return jnp.sum(y)

    with pytest.raises(ValueError, match=r"kept as codes pass no gradient.*stop_gradient"):
        jax.grad(loss)(variables["params"])
    keys, query = jnp.ones((1, 1, 1, 32)), jnp.ones((1, 1, 1, 32))
    cache = KVCache.zeros(1, 4, 1, 32, format="mxfp4").append(keys, keys, 0)
    assert jax.grad(lambda q: cache.attend(q, 0).sum())(query).shape == query.shape


@pytest.mark.parametrize("format", [None, "mxfp4", "nvfp4"])
def test_flax_serialization(format: str | None):
    keys = jax.random.normal(jax.random.key(0), (2, 1, 2, 64))
    empty = KVCache.zeros(2, 8, 2, 64, format=format)
    cache = empty.append(keys, keys, 0)
    restored = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(cache))
    jax.tree.map(np.testing.assert_array_equal, cache, restored)
    assert restored.keys.format == cache.keys.format
    other = KVCache.zeros(2, 8, 2, 64, format="mxfp4" if format is None else None)
    with pytest.raises(ValueError, match="take a target of the same format"):
        flax.serialization.from_bytes(other, flax.serialization.to_bytes(cache))


def test_threads_share_a_layer():
    layer = in_nnx()
    expected = layer(X, decode=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            for _ in range(8):
                threads.submit(layer, X[:, :1])
            whole = [threads.submit(layer, X, decode=False) for _ in range(8)]
    finally:
        sys.setswitchinterval(before)
    for own in whole:
        np.testing.assert_array_equal(own.result(), expected)
    assert layer.attention_fn is nnx.dot_product_attention
    assert layer.cache_index[...] <= 8, "calls that do not decode count nothing"


class Counting(nnx.MultiHeadAttention):
    def init_cache(self, *args: Any, **options: Any) -> None:
        super().init_cache(*args, **options)
        self.calls = nnx.Cache(jnp.int32(0))


def test_an_init_cache_of_ones_own_is_called():
    layer = in_nnx(Counting)
    assert layer.calls[...] == 0 and layer.cached_key.get_value().codes.shape == (4, 8, 16)


def test_a_function_that_takes_any_option():
    def own(query: Any, keys: Any, values: Any, **options: Any) -> jax.Array:
        return nnx.dot_product_attention(query, keys, values, mask=options["mask"])

    layer, plain = in_nnx(attention_fn=own), in_nnx()
    np.testing.assert_allclose(layer(X[:, :1]), plain(X[:, :1]), atol=1e-5)


def test_a_stack_that_is_converted_anew():
    make = nnx.vmap(lambda rngs: nnx.MultiHeadAttention(2, 64, decode=True, rngs=rngs))
    stack = convert.nnx(make(nnx.Rngs(0).split(2)), RULE)
    nnx.vmap(lambda layer: layer.init_cache(X.shape))(stack)
    with pytest.warns(UserWarning, match="the cache of a stack is dropped .* call init_cache"):
        convert.nnx(stack, RULE)


@pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
def test_weights_are_sown_into_the_layer():
    """Not into what stands for it while it decodes."""
    layer = in_nnx()
    layer(X[:, :1], sow_weights=True)
    (weights,) = layer.attention_weights.get_value()
    np.testing.assert_array_equal(weights, np.eye(8)[:1] * np.ones((2, 2, 1, 1)))
