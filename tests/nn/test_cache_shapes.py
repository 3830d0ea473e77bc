"""What a cache is given has its shape, and lies anywhere: nothing goes into a part of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mx_jax.nn import KVCache


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_keys_of_another_shape_are_refused(format: str | None):
    """Smaller ones would fill a part of a row, and leave the rest as it was."""
    cache = KVCache.zeros(2, 4, 2, 64, format=format)
    for batch, tokens, heads, features in (
        (1, 1, 2, 64),
        (2, 1, 1, 64),
        (2, 1, 2, 32),
        (2, 5, 2, 64),
    ):
        keys = jnp.ones((batch, tokens, heads, features))
        text = (
            rf"got batch \* heads={batch * heads}, tokens={tokens}, features={features}; the cache "
            "has 4, 4 and 64"
        )
        with pytest.raises(ValueError, match=text):
            cache.append(keys, keys, 0)


def test_queries_that_cannot_be_answered():
    cache, query = KVCache.zeros(2, 4, 2, 64, format="mxfp4"), jnp.ones((2, 1, 4, 64))
    for given, options, text in (
        (query[..., :32], {}, r"query.shape=\(2, 1, 4, 32\).*keys.shape=\(4, 4, 64\)"),
        (query.astype(jnp.int32), {}, "query.dtype=int32"),
        (query[0], {}, r"as \[batch, tokens, heads, features\], got query.shape=\(1, 4, 64\)"),
        (query, {"length": 2}, "got length=2, position=2, tokens=1; leave length out"),
    ):
        with pytest.raises(ValueError, match=text):
            cache.attend(given, 2, **options)
    with pytest.raises(ValueError, match=r"got keys.shape=\(2, 64\)"):
        cache.append(query[:, 0, 0], query, 0)
    assert cache.attend(query, 2, length=3).shape == query.shape


def two_steps(cache, keys, values, query):
    """Three tokens at once, then one: the cache, and what both attend to."""
    cache = cache.append(keys[:, :3], values[:, :3], 0)
    first = cache.attend(query[:, :3], 0)
    cache = cache.append(keys[:, 3:], values[:, 3:], 3)
    return cache, jnp.concatenate([first, cache.attend(query[:, 3:], 3)], axis=1)


@pytest.mark.parametrize("format", [None, "mxfp4", "nvfp4"])
@pytest.mark.parametrize("heads_along", [None, "model"])
def test_explicit_axes(format: str | None, heads_along: str | None):
    """The cache lies by its batch, its queries where they lay; its bits are those of one device."""
    rng, heads = np.random.default_rng(0), (2, 2, 4)
    given = [rng.standard_normal((4, 4, each, 64)).astype(np.float32) for each in heads]
    cache = KVCache.zeros(4, 8, 2, 64, format=format)
    alone, expected = jax.jit(two_steps)(cache, *given)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        along = NamedSharding(mesh, P("data", None, heads_along, None))
        rows = NamedSharding(mesh, P("data", None, None))
        placed = [jax.device_put(x, along) for x in given]
        held, found = jax.jit(two_steps)(jax.device_put(cache, rows), *placed)
        assert jax.typeof(found).sharding.spec == along.spec
        assert jax.typeof(held.keys.codes).sharding.spec == rows.spec
    jax.tree.map(np.testing.assert_array_equal, held, alone)
    np.testing.assert_allclose(found, expected, atol=1e-5)
