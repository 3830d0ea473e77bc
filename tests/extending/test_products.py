"""Products by the format of `fp5.py` and the rule of `least_error.py`, and kernels without."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import MXFP4
from mx_jax.recipes import operand
from tests.extending.fp5 import FP5, MXFP5
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


# By facts, not by names: each under its own and under one that kernels know.
UNKNOWN: dict[str, tuple[Any, Any]] = {
    "e2m2": (MXFP5, "even"),
    "e2m1": (dataclasses.replace(MXFP5, element=dataclasses.replace(FP5, name="e2m1")), "even"),
    "least_error": (MXFP4, LEAST_ERROR),
    "floor": (MXFP4, dataclasses.replace(LEAST_ERROR, name="floor")),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize(
    ("backend", "machine"), [("cpu_ffi", ("cpu",)), ("pallas_gpu", ("cuda", (9, 0)))]
)
def test_kernels_refuse_them_by_their_facts(name: str, backend: str, machine: tuple):
    format, rule = UNKNOWN[name]
    calls = [lambda: mx_jax.quantize(jnp.ones((4, 64)), format, scale_rule=rule)]
    if rule == "even":
        recipe = mx_jax.recipes.weight_only(format)
        weights = mx_jax.quantize(jnp.ones((64, 8)), format, axis=0)
        calls.append(lambda: mx_jax.matmul(jnp.ones((4, 64)), weights, recipe=recipe))
    with mx_jax.testing.target(*machine), mx_jax.only_backend(backend):
        for call in calls:
            with pytest.raises(ValueError, match=rf"no backend takes .*{backend}: "):
                jax.eval_shape(call)
