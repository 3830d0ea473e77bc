"""Rules beyond a plain amax, by handlers: the reference's codes and scales, bit for bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from tests.needs import needs_library
from tests.quick import quick

pytestmark = needs_library

CASTS = {
    "headroom": ("amax_headroom", "nearest"),
    "headroom, stochastic": ("amax_headroom", "stochastic"),
    "4/6": ("four_over_six", "nearest"),
    "4/6, stochastic": ("four_over_six", "stochastic"),
    "eden": ("ms_eden", "nearest"),
}
HANDLERS = {"amax_headroom": 1, "four_over_six": 2, "ms_eden": 1}


def values(shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    if len(shape) == 2:
        x[3, 4], x[10, 20], x[20], x[22] = np.nan, np.inf, 0, x[22] * 1e-30
    return x


@pytest.mark.parametrize("name", CASTS)
def test_the_bits_of_the_reference(name: str):
    rule, rounding = CASTS[name]
    key = jax.random.key(1) if rounding == "stochastic" or rule == "ms_eden" else None
    for shape, axis, format in [
        ((64, 96), -1, "nvfp4"),
        ((64, 100), 0, "nvfp4"),
        ((3, 40, 5), 1, "nvfp4"),
        *[((64, 96), -1, "nvfp4_2d")] * (rule != "ms_eden"),
    ]:
        cast = lambda x, axis=axis, format=format: mx_jax.quantize(  # noqa: E731
            x, format, axis=axis, scale_rule=rule, rounding=rounding, key=key
        )
        for dtype in ("float32", "bfloat16") if axis == -1 else ("float32",):
            x = jnp.asarray(values(shape), dtype)
            with mx_jax.only_backend("reference"):
                expected = quick(cast)(x)
            found = quick(cast)(x)
            for part in ("codes", "scales", "tensor_scale"):
                np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))


@pytest.mark.parametrize("name", CASTS)
def test_what_casts(name: str):
    """Elements are rounded by the handler; 4/6 casts twice, and once more each to draw."""
    rule, rounding = CASTS[name]
    key = jax.random.key(1) if rounding == "stochastic" or rule == "ms_eden" else None
    cast = lambda x: mx_jax.quantize(  # noqa: E731
        x, "nvfp4", scale_rule=rule, rounding=rounding, key=key
    )
    text = jax.jit(cast).lower(jnp.ones((64, 96))).as_text()
    drawn_too = rule == "four_over_six" and rounding == "stochastic"
    assert len(re.findall("@mx_jax_cpu_quantize", text)) == HANDLERS[rule] * (1 + drawn_too)
