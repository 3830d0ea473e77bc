"""Products by the format of `fp5.py` and by the rule of `least_error.py`."""

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import MXFP4
from mx_jax.recipes import operand
from tests.extending.fp5 import MXFP5
from tests.extending.least_error import LEAST_ERROR
from tests.recipes.uniform import uniform

# A format, and the name or value of a rule.
ADDED = {"format": (MXFP5, "even"), "rule": (MXFP4, LEAST_ERROR)}


def multiples(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/4 up to 16: float32 adds them up without rounding, and their squares."""
    return (rng.integers(-64, 65, shape) / 4).astype(np.float32)


@pytest.mark.parametrize("added", ADDED)
def test_products_and_their_gradients(added: str, rng: np.random.Generator):
    format, rule = ADDED[added]
    recipe = uniform(operand(format, scale_rule=rule))
    name = getattr(rule, "name", rule)
    assert f"{format.name} ({name}, nearest)" in str(recipe)
    # Square and outside jit: every cast along an axis is compiled once.
    x, w, g = (multiples(rng, (32, 32)) for _ in range(3))

    def values(array: np.ndarray, axis: int) -> np.ndarray:
        q = mx_jax.quantize(array, format, axis=axis, scale_rule=rule)
        return np.asarray(q.dequantize(), np.float64)

    product, backward = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w)
    dx, dw = backward(g)
    np.testing.assert_array_equal(product, values(x, 1) @ values(w, 0))
    np.testing.assert_array_equal(dx, values(g, 1) @ values(w, 1).T)
    np.testing.assert_array_equal(dw, values(x, 0).T @ values(g, 0))
