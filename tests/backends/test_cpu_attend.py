"""Attention of one token by the CPU library: values, transforms, and which calls it takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.select import only_backend, select
from mx_jax.nn.cache import KVCache, attend
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


def exact(query, keys, values, position: int) -> np.ndarray:
    """In float64, head by head."""
    batch, _, heads, features = query.shape
    found = np.zeros(query.shape)
    for entry, head in np.ndindex(batch, heads):
        own = entry, head // (heads // SHARED), slice(0, position + 1)
        q, k, v = (x.astype(np.float64) for x in (query[entry, 0, head], keys[own], values[own]))
        scores = k @ q / np.sqrt(features)
        weights = np.exp(scores - scores.max())
        found[entry, 0, head] = weights @ v / weights.sum()
    return found


@pytest.mark.parametrize(("length", "features"), [(128, 64), (37, 40), (5, 3), (300, 80)])
def test_values(length: int, features: int):
    query, keys, values = drawn(1, length, features, batch=2)
    run = quick(attend)
    for position in {0, 15, 16, length // 2, length - 1, length + 3}:
        found = run(query, keys, values, position)
        np.testing.assert_allclose(
            found, exact(query, keys, values, position), rtol=0, atol=3e-6, err_msg=str(position)
        )


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
    found = attend(query, keys, values, 19)
    with only_backend("reference"):
        expected = attend(query, keys, values, 19)
    assert np.isnan(found[0, 0, :3]).all() and not np.isnan(found[0, 0, 3:]).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(attend(query, keys, values, -1)).all()


def test_transforms():
    """Lanes with positions of their own, gradients, and scan give what the reference does."""
    lanes = [drawn(seed, 24, 32) for seed in range(3)]
    query, keys, values = (np.stack(x) for x in zip(*lanes, strict=True))
    positions = np.array([0, 11, 23])

    def results(query, keys, values, positions):
        each = jax.vmap(attend)(query, keys, values, positions)
        shared = jax.vmap(attend, (0, None, None, 0))(query, keys[0], values[0], positions)
        twice = jax.vmap(jax.vmap(attend, (None, None, None, 0)), (0, 0, 0, None))
        _, steps = jax.lax.scan(lambda c, x: (c, attend(*x)), 0, (query, keys, values, positions))
        gradients = jax.grad(lambda q, k, v: (attend(q, k, v, 11) ** 2).sum(), (0, 1, 2))
        found = gradients(query[0], keys[0], values[0])
        return each, shared, twice(query, keys, values, positions), steps, found

    run = jax.jit(results)
    assert "mx_jax_cpu_attend" in run.lower(query, keys, values, positions).as_text()
    found = run(query, keys, values, positions)
    with only_backend("reference"):
        expected = quick(results)(query, keys, values, positions)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "dtype", "reason"),
    [
        (1, "float32", None),
        (3, "float32", "attends with one token, XLA's dot with several, got tokens=3"),
        (1, "bfloat16", "attends in float32, got dtypes="),
    ],
)
def test_which_calls_it_takes(tokens: int, dtype: str, reason: str | None):
    dtypes = (np.dtype(jnp.dtype(dtype)),) * 3
    call = AttendCall(queries=(2, 3 * tokens, 32), keys=(2, 8, 32), dtypes=dtypes, tokens=tokens)
    choice = select(call)
    if reason is None:
        assert choice.backend.name == "cpu_ffi"
        return
    assert choice.backend.name == "reference"
    assert reason in dict(choice.rejections)["cpu_ffi"]


FORMATS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "nvfp4-fixed"]


def held(seed: int, length: int, features: int, name: str, batch: int = 1) -> Any:
    """A query of one token, and a full cache in a format, some of its blocks zeros."""
    query, keys, values = drawn(seed, length, features, batch)
    format, _, fixed = name.partition("-")
    scales = (0.002, 0.004) if fixed else None
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
        run = jax.jit(KVCache.attend)
        assert "mx_jax_cpu_attend_codes" in run.lower(cache, query, 0).as_text()
        keys, values = cache.keys.read(), cache.values.read()
        for position in (-1, 0, 17, length - 1):
            expected = attend(query, keys, values, position)
            np.testing.assert_array_equal(run(cache, query, position), expected)


@pytest.mark.slow(but="mxfp4")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nvfp4-fixed"])
def test_codes_under_transforms(name: str):
    """Lanes with positions of their own, gradients of the query, and scan."""
    lanes = [held(seed, 24, 32, name) for seed in range(3)]
    query, cache = jax.tree.map(lambda *x: jnp.stack(x), *lanes)
    positions = np.array([0, 11, 23])

    def results(query, cache, positions):
        each = jax.vmap(KVCache.attend)(cache, query, positions)
        shared = jax.vmap(KVCache.attend, (None, 0, 0))(lanes[0][1], query, positions)
        _, steps = jax.lax.scan(lambda c, x: (c, x[0].attend(*x[1:])), 0, (cache, query, positions))
        gradient = jax.grad(lambda query: (lanes[0][1].attend(query, 11) ** 2).sum())(query[0])
        return each, shared, steps, gradient

    run = jax.jit(results)
    assert "mx_jax_cpu_attend_codes" in run.lower(query, cache, positions).as_text()
    with only_backend("reference"):
        expected = quick(results)(query, cache, positions)
    found = run(query, cache, positions)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_devices_share_the_heads_of_codes():
    query, cache = held(5, 24, 32, "mxfp8_e4m3")
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(None, "heads"))
    run = jax.jit(KVCache.attend)
    with only_backend("cpu_ffi"), jax.set_mesh(mesh):
        program = run.lower(jax.device_put(cache, rows), query, 11).compile()
        found = program(jax.device_put(cache, rows), query, 11)
    assert "mx_jax_cpu_attend_codes" in str(program.as_text())
    assert "all-gather" not in str(program.as_text())
    np.testing.assert_array_equal(found, run(cache, query, 11))


def test_keys_and_values_in_different_formats_are_decoded():
    (query, one), (_, other) = held(6, 24, 32, "mxfp8_e4m3"), held(6, 24, 32, "mxfp4")
    cache = KVCache(keys=one.keys, values=other.values)
    expected = attend(query, one.keys.read(), other.values.read(), 11)
    np.testing.assert_array_equal(jax.jit(KVCache.attend)(cache, query, 11), expected)


def test_several_tokens_over_codes_are_decoded_first():
    query, cache = held(7, 24, 32, "mxfp4")
    text = jax.jit(KVCache.attend).lower(cache, np.repeat(query, 2, 1), 11).as_text()
    assert "mx_jax_cpu_dequantize" in text and "mx_jax_cpu_attend" not in text
