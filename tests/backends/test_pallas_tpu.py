"""Casts on TPUs, in Pallas' interpreter: the reference's bits, values for products; rejections."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends import select
from mx_jax.backends.calls import HEADROOM, ValuesCall
from mx_jax.backends.pallas_tpu import PALLAS_TPU, backend_for
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Target
from mx_jax.mxarray import decode
from mx_jax.testing import backend_suite, cases, draw
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.altered import altered
from tests.quick import quick, with_gradients

BFLOAT16, INTERPRETED = np.dtype(jnp.bfloat16), backend_for(interpret=True)
SHAPE = (2, 160, 256)


@pytest.mark.parametrize("wild", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize(
    ("format", "rule", "shape"),
    [
        (formats.MXFP8_E4M3, "rceil", SHAPE),
        (formats.MXFP8_E5M2, "floor", (64, 256)),
        (formats.MXFP6_E2M3, "ceil", (64, 256)),
        (formats.MXFP4, "even", (32, 1280)),
        (formats.MXINT8, "rceil", (64, 256)),
    ],
    ids=str,
)
def test_casts(format: formats.BlockFormat, rule: str, shape: tuple[int, ...], wild: bool):
    rng = np.random.default_rng(0)
    drawn = draw.draw_few_octaves(rng, shape) * 2.0 ** rng.integers(-15, 2, shape)
    drawn[..., :32, :32] = 0
    x = draw.draw_any_bits(rng, shape, BFLOAT16) if wild else drawn.astype(BFLOAT16)
    call = cases._both(format, shape, dtype="bfloat16", scale_rule=rule).call
    for each in (call, call.first, call.second):
        assert PALLAS_TPU.rejects(each, Target(platform="tpu")) is None
    both = quick(functools.partial(INTERPRETED.run, call))(x, (None, None), None)
    for cast, beside, result in zip(
        (call.first, call.second), (None, call.first), both, strict=True
    ):
        expected = quick(functools.partial(REFERENCE.run, cast))(x, None, None)
        backend_suite.assert_same(result, expected)
        run = functools.partial(INTERPRETED.run, ValuesCall(cast=cast, beside=beside))
        values = np.asarray(decode(expected, jnp.float32, exponent=-HEADROOM))
        values = np.where(np.abs(values) < 2.0**-126, values * 0, values)  # as TPUs have it
        # Integers have no negative zero.
        actual = np.asarray(quick(run)(x)).astype(np.float32) + 0
        assert_bitwise_equal(actual, values.astype(BFLOAT16).astype(np.float32) + 0, what="values")


@pytest.mark.parametrize(("axis", "shape"), [(-1, (2, 8, 4352)), (-2, SHAPE)])
def test_casts_under_vmap(axis: int, shape: tuple[int, ...]):
    x = draw.draw_any_bits(np.random.default_rng(0), shape, BFLOAT16)
    facts = {"shape": shape[1:], "axis": axis, "dtype": "bfloat16"}
    case = cases.QuantizeCase(format=formats.MXFP8_E4M3, **facts)
    casts = (
        lambda x, backend=backend: backend.run(case.call, x, None, None)
        for backend in (INTERPRETED, REFERENCE)
    )
    backend_suite.assert_same(*(quick(jax.vmap(cast))(x) for cast in casts))


def test_products_of_values(monkeypatch: pytest.MonkeyPatch):
    """A step that is traced for a TPU multiplies values; to the bit what codes give."""
    shapes = enumerate(((32, 256), (256, 256), (32, 256)))
    drawn = [draw.draw_few_octaves(np.random.default_rng(i), shape) for i, shape in shapes]
    operands = [jnp.asarray(x.astype(BFLOAT16)) for x in drawn]
    step, calls = with_gradients(functools.partial(mx_jax.matmul, recipe="mxfp8")), list[Any]()

    def run(x: jax.Array, call: ValuesCall) -> jax.Array:
        calls.append(call)
        return INTERPRETED.run(call, x)

    backends = altered(INTERPRETED, ValuesCall, run), REFERENCE
    monkeypatch.setattr(select, "BACKENDS", backends)
    expected = quick(step)(*operands)
    assert not calls
    with mx_jax.testing.target("tpu"):
        actual = quick(step)(*operands)
    assert sorted(call.beside is not None for call in calls) == [False] * 4 + [True] * 2
    jax.tree.map(assert_bitwise_equal, actual, expected)


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({}, {"platform": "cuda"}, "needs platform=tpu, got platform=cuda"),
        ({}, {"num_devices": 4}, "below jax.shard_map: jit does not split a kernel"),
        ({}, {"device_kind": "TPU v5 lite"}, "needs bfloat16 arithmetic, .* got TPU v5 lite"),
        ({"dtype": "float32"}, {}, "reads bfloat16, .* dtype=float32"),
        ({"format": formats.NVFP4}, {}, "of MX formats, got nvfp4"),
        ({"rounding": "stochastic"}, {}, "rounding to nearest, got floor, stochastic"),
        ({"shape": (64, 100)}, {}, r"whole tiles of 8 rows and 256 columns, .*\(64, 100\)"),
        ({"axis": 0, "shape": (64, 2, 256)}, {}, "along axis -1 or -2, got blocks="),
    ],
)
def test_rejections(change: dict[str, Any], target: dict[str, Any], reason: str):
    change = {"format": formats.MXFP8_E4M3, "shape": (64, 256), "dtype": "bfloat16", **change}
    call = cases.QuantizeCase(**change).call
    assert re.search(reason, str(PALLAS_TPU.rejects(call, Target(**{"platform": "tpu", **target}))))
