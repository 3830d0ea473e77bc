"""Attention of one token by the CPU library: values, transforms, and which calls it takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.select import only_backend, select
from mx_jax.nn.attention import attend
from tests.needs import needs_library
from tests.quick import quick

pytestmark = needs_library
HEADS, SHARED = 6, 2


def drawn(seed: int, length: int, features: int, batch: int = 1) -> Any:
    """Queries of one token, keys and values; scores up to some tens."""
    rng = np.random.default_rng(seed)
    shapes = (batch, 1, HEADS, features), *((batch * SHARED, length, features),) * 2
    query, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return 4 * query, keys, values


def exact(query, keys, values, position: int) -> np.ndarray:
    """In float64, head by head."""
    batch, _, heads, features = query.shape
    found = np.zeros(query.shape)
    for entry, head in np.ndindex(batch, heads):
        matrix = entry * SHARED + head // (heads // SHARED)
        rows = slice(0, position + 1)
        q, k, v = (
            x.astype(np.float64)
            for x in (query[entry, 0, head], keys[matrix, rows], values[matrix, rows])
        )
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


def test_what_is_masked_is_not_read():
    query, keys, values = drawn(2, 40, 32)
    expected = attend(query, keys, values, 20)
    keys[:, 21:], values[:, 21:] = np.nan, np.inf
    np.testing.assert_array_equal(attend(query, keys, values, 20), expected)


def test_nan_and_largest_scores_spread_as_in_the_reference():
    query, keys, values = drawn(3, 20, 32)
    keys[0, 7, 3] = np.nan
    keys[1] *= 1e4
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
