"""Attention of one token by the CPU library: what is masked, transforms, codes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.select import only_backend
from mx_jax.nn.cache import KVCache, attend, read_rows
from tests.needs import needs_library
from tests.quick import quick

pytestmark = needs_library
HEADS, SHARED = 6, 2


def drawn(seed: int, length: int, features: int, batch: int = 1) -> Any:
    """Queries of one token, keys and values; scores up to some tens."""
    rng = np.random.default_rng(seed)
    shapes = (batch, 1, HEADS, features), *((batch, SHARED, length, features),) * 2
    query, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return 4 * query, keys, values


@pytest.mark.parametrize("backend", ["cpu_ffi", "reference"])
def test_what_is_masked_counts_for_nothing(backend: str):
    query, keys, values = drawn(2, 40, 32)
    with only_backend(backend):
        expected = attend(query, keys, values, 20)
        keys[:, :, 21:], values[:, :, 21:] = np.nan, np.inf
        np.testing.assert_array_equal(attend(query, keys, values, 20), expected)


def test_nan_and_largest_scores_spread_as_in_the_reference():
    query, keys, values = drawn(3, 20, 32)
    keys[0, 0, 7, 3] = np.nan
    keys[0, 1] *= 1e4
    result = attend(query, keys, values, 19)
    with only_backend("reference"):
        expected = attend(query, keys, values, 19)
    assert np.isnan(result[0, 0, :3]).all() and not np.isnan(result[0, 0, 3:]).any()
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(attend(query, keys, values, -1)).all()


FORMATS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "nvfp4-fixed"]


def held(seed: int, length: int, features: int, name: str, batch: int = 1) -> Any:
    """A query of one token, and a full cache in a format, some of its blocks zeros."""
    query, keys, values = drawn(seed, length, features, batch)
    format = None if name == "float32" else name.removesuffix("-fixed")
    scales = (0.002, 0.004) if name.endswith("-fixed") else None
    cache = KVCache.zeros(batch, length, SHARED, features, format=format, tensor_scales=scales)
    keys[:, :, 3], values[:, :, -1, ::2] = 0, 1e-30
    rows = (np.swapaxes(x, 1, 2) for x in (keys, values))
    return query, quick(KVCache.append)(cache, *rows, 0)


@pytest.mark.slow(but="mxfp8_e4m3|nvfp4$")
@pytest.mark.parametrize("name", FORMATS)
def test_codes_give_the_bits_of_their_values(name: str):
    """Sizes that are no whole blocks, bytes or vectors, and more rows than are decoded at once."""
    for length, features in ((150, 64), (33, 41), (20, 7)):
        query, cache = held(4, length, features, name, batch=2)
        run, plain = jax.jit(KVCache.attend), jax.jit(attend)
        assert "mx_jax_cpu_attend_codes" in run.lower(cache, query, 0).as_text()
        keys, values = read_rows(cache.keys), read_rows(cache.values)
        for position in (-1, 0, 17, length - 1):
            expected = plain(query, keys, values, position)
            np.testing.assert_array_equal(run(cache, query, position), expected)


@pytest.mark.slow(but="float32|mxfp4")
@pytest.mark.parametrize("name", ["float32", "mxfp4", "nvfp4", "nvfp4-fixed"])
def test_transforms(name: str):
    """Lanes with positions of their own, gradients, and scan give what the reference does."""
    lanes = [held(seed, 24, 32, name) for seed in range(3)]
    query, cache = jax.tree.map(lambda *x: jnp.stack(x), *lanes)
    positions = np.array([0, 11, 23])

    def loss(cache: Any, query: Any) -> jax.Array:
        return (cache.attend(query, 11) ** 2).sum()

    def results(query, cache, positions):
        each = jax.vmap(KVCache.attend)(cache, query, positions)
        shared = jax.vmap(KVCache.attend, (None, 0, 0))(lanes[0][1], query, positions)
        nested = jax.vmap(jax.vmap(KVCache.attend, (None, None, 0)), (0, 0, None))
        _, steps = jax.lax.scan(lambda c, x: (c, x[0].attend(*x[1:])), 0, (cache, query, positions))
        of = (0, 1) if name == "float32" else 1
        gradients = jax.grad(loss, of)(lanes[0][1], query[0])
        return each, shared, nested(cache, query, positions), steps, gradients

    run = jax.jit(results)
    kernel = "mx_jax_cpu_attend" + "_codes" * (name != "float32")
    assert f"@{kernel}(" in run.lower(query, cache, positions).as_text()
    with only_backend("reference"):
        expected = quick(results)(query, cache, positions)
    near = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(near, run(query, cache, positions), expected)


def test_keys_and_values_in_different_formats_are_decoded():
    (query, one), (_, other) = held(6, 24, 32, "mxfp8_e4m3"), held(6, 24, 32, "mxfp4")
    cache = KVCache(keys=one.keys, values=other.values)
    expected = attend(query, read_rows(one.keys), read_rows(other.values), 11)
    np.testing.assert_array_equal(jax.jit(KVCache.attend)(cache, query, 11), expected)
