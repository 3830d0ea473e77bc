"""NVFP4 on several devices: the same codes and scales as on one, and sums within a stated bound.

docs/sharding.md derives it: sums of k terms, of which each of d devices adds its part, and then d
parts: `|C - exact| <= (c sqrt(k / d) + d - 1) 2^-24 sum |a b|`, plus one rounding to the product's
dtype. On one device it is the backend's own.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.backends.reference import REFERENCE
from mx_jax.testing.compare import assert_bitwise_equal
from tests.sharding.collectives import mesh_of

P = PartitionSpec
TOKENS, FEATURES, UNITS, DEVICES = 16, 512, 64, 8
NVFP4 = recipes.nvfp4()
HALF_ULP = 2.0**-24


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, ...]:
    """Normal data whose parts have tensor scales of their own, 64 times as large on one device."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(TOKENS, FEATURES)), rng.normal(size=(FEATURES, UNITS))
    x[:, : FEATURES // DEVICES] *= 64
    return x.astype(np.float32), w.astype(np.float32)


def bound(k: int, devices: int) -> float:
    """Of the sum of magnitudes."""
    return (REFERENCE.epsilon_bound * math.sqrt(k / devices) + devices - 1) * HALF_ULP


def run(x: Any, w: Any) -> Any:
    """What is quantized, and the product of it."""
    left = mx_jax.quantize(x, "nvfp4", scale_rule=NVFP4.output.lhs.scale_rule)
    right = mx_jax.quantize(w, "nvfp4", axis=0, scale_rule=NVFP4.output.rhs.scale_rule)
    return left, right, mx_jax.matmul(x, w, recipe=NVFP4)


SPECS = {"rows": (P(None, "x"), P("x")), "columns": (P("x"), P(None, "x"))}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_codes_are_those_of_one_device_and_sums_are_near(specs: Any, arrays: Any):
    mesh = mesh_of(x=DEVICES)
    with jax.set_mesh(mesh):
        operands = jax.device_put(arrays, tuple(NamedSharding(mesh, spec) for spec in specs))
        *parts, product = jax.jit(run)(*operands)
    *expected, alone = jax.jit(run)(*arrays)
    values = []
    for one, other in zip(parts, expected, strict=True):
        for name in ("codes", "scales", "tensor_scale"):
            assert_bitwise_equal(getattr(one, name), getattr(other, name), what=name)
        # Exact in float64: an element, its block's scale and the tensor's have 2, 4 and 24 digits.
        exact = one.dequantize(jnp.float32) / np.asarray(one.tensor_scale)
        digits = np.round(np.asarray(exact, np.float64) * 2.0**12) / 2.0**12
        values.append(digits * np.asarray(one.tensor_scale, np.float64))
    exact, magnitude = values[0] @ values[1], abs(values[0]) @ abs(values[1])
    split = DEVICES if specs == SPECS["rows"] else 1
    # Each operand's values are rounded once where its tensor scale is multiplied in.
    rounded = 2 * HALF_ULP * magnitude
    assert (abs(product - exact) <= bound(FEATURES, split) * magnitude + rounded).all()
    assert (abs(alone - exact) <= bound(FEATURES, 1) * magnitude + rounded).all()
    # The bound is no more than twice what is seen of a sum whose terms are not random.
    assert abs(product - exact).max() > 0
