"""Attention in plain JAX, against loops in float64."""

import numpy as np
import pytest

from mx_jax.reference.attention import attend


def by_hand(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, tokens: int
) -> np.ndarray:
    """Query by query: those of a head follow each other, and see the rows up to their own."""
    out = np.zeros((*queries.shape[:2], values.shape[-1]))
    for matrix, query in np.ndindex(queries.shape[:2]):
        rows = slice(position + query % tokens + 1)
        scores = keys[matrix, rows] @ queries[matrix, query] / np.sqrt(queries.shape[-1])
        weights = np.exp(scores)
        out[matrix, query] = weights @ values[matrix, rows] / weights.sum()
    return out


@pytest.mark.parametrize(("position", "tokens"), [(0, 1), (4, 1), (0, 3), (2, 3), (6, 1), (9, 3)])
def test_attend(position: int, tokens: int):
    """Two matrices of seven rows, two heads each; beyond the end every row is seen."""
    rng = np.random.default_rng(position)
    shapes = (2, 2 * tokens, 8), (2, 7, 8), (2, 7, 5)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    found = attend(*arrays, position, tokens)
    assert found.dtype == np.float32
    wide = (array.astype(np.float64) for array in arrays)
    np.testing.assert_allclose(found, by_hand(*wide, position, tokens), rtol=0, atol=2e-6)
