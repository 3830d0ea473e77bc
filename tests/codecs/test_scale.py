"""Shared scales: bytes and their values, true division, and codes times scales."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax.codecs import float32
from mx_jax.codecs.lowering import Lowering, lowering
from mx_jax.codecs.scale import (
    by_float64,
    decode_scaled,
    divide_elements,
    is_nan_scale,
    lift,
    lower,
    nearest_quotient,
    scale_to_float32,
    true_divide,
)
from mx_jax.formats import (
    E4M3_SCALE,
    E4M3FNUZ,
    E5M2FNUZ,
    E8M0,
    INT8_FULL,
    MX_FORMATS,
    MXFP8_E4M3,
    BlockFormat,
)
from mx_jax.testing.compare import assert_bitwise_equal
from tests.codecs.by_numpy import by_numpy
from tests.quick import lowered

BYTES = np.arange(256, dtype=np.uint8)
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


@pytest.mark.parametrize("scale", [E8M0, E4M3_SCALE], ids=lambda scale: scale.name)
def test_values_of_scale_bytes(scale):
    values = jax.jit(lambda b: scale_to_float32(b, scale))(BYTES)
    expected = BYTES.view(scale.dtype).astype(np.float32)
    assert_bitwise_equal(values, expected, what=scale.name, any_nan=True)
    nan = jax.jit(lambda b: is_nan_scale(b, scale))(BYTES)
    np.testing.assert_array_equal(nan, np.isnan(expected))


def normals(rng: np.random.Generator, count: int) -> np.ndarray:
    """Floats of both signs whose quotients stay normal."""
    return (rng.normal(size=count) * 2.0 ** rng.uniform(-30, 30, count)).astype(np.float32)


def test_division_is_ieee_under_jit(rng: np.random.Generator):
    a, b, c = (normals(rng, 200_000) for _ in range(3))
    scalar = np.float32(b[0])

    @jax.jit
    def quotients(a, b, c, scalar):
        return {
            "vector": true_divide(a, b),
            "constant": true_divide(a, 6.0),
            "large constant": true_divide(a, 2688.0),
            "scalar": true_divide(a, scalar),
            "nested": true_divide(true_divide(a, b), c),
            "reciprocal": true_divide(true_divide(jnp.ones_like(a), b), c),
            "product": a * true_divide(true_divide(jnp.ones_like(a), b), c),
        }

    one = np.float32(1)
    expected = {
        "vector": a / b,
        "constant": a / np.float32(6),
        "large constant": a / np.float32(2688),
        "scalar": a / scalar,
        "nested": a / b / c,
        "reciprocal": one / b / c,
        "product": a * (one / b / c),
    }
    actual = quotients(a, b, c, scalar)
    for name, wanted in expected.items():
        assert_bitwise_equal(actual[name], wanted, what=name)
    # The data tell true division from what XLA would make of it.
    assert (a * (one / np.float32(6)) != expected["constant"]).any()
    assert (a * (one / scalar) != expected["scalar"]).any()
    assert (a / (b * c) != expected["nested"]).any()


def exact_products(format: BlockFormat) -> np.ndarray:
    """[scale byte, code] in float64, where they are exact."""
    values = [format.element.value(code) for code in range(1 << format.element.bits)]
    return np.multiply.outer([E8M0.value(int(byte)) for byte in BYTES], values)


def test_every_code_times_every_scale_byte():
    """In float32, bfloat16 and float16, rounded once; golden data leave some elements out."""
    rare = [
        dataclasses.replace(MXFP8_E4M3, name=element.name, element=element)
        for element in (E4M3FNUZ, E5M2FNUZ, INT8_FULL)
    ]
    formats = (*MX_FORMATS, *rare)

    @jax.jit
    def decode_all():
        bits = {
            f.name: decode_scaled(
                jnp.arange(1 << f.element.bits, dtype=jnp.uint8)[None], BYTES[:, None], f, None
            )
            for f in formats
        }
        return {
            (name, dtype.name): float32.from_bits(bits[name], dtype)
            for name, dtype in itertools.product(bits, DTYPES)
        }

    values = decode_all()
    for format in formats:
        exact = exact_products(format)
        for dtype in DTYPES:
            with np.errstate(over="ignore"):
                expected = exact.astype(np.float32).astype(dtype)
            what = f"{format.name} {dtype}"
            assert_bitwise_equal(values[format.name, dtype.name], expected, what=what, any_nan=True)


# Significands whose quotients lie next to powers of two.
EDGES = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF], np.uint32)


def quotients(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    """Any bits, half of either side's at the edges, and what NumPy makes of them."""
    a, b = (rng.integers(0, 1 << 32, n, dtype=np.uint32) for _ in range(2))
    for bits, half in ((a, slice(0, n // 2)), (b, slice(n // 4, 3 * n // 4))):
        bits[half] = bits[half] & 0xFF800000 | rng.choice(EDGES, n // 2)
    with np.errstate(all="ignore"):
        return a.view(np.float32), b.view(np.float32), a.view(np.float32) / b.view(np.float32)


def test_a_quotient_of_float64s_is_the_nearest(rng: np.random.Generator):
    a, b, exact = quotients(rng, 1 << 20)
    # CPUs flush subnormals, and what rounds up from one.
    whole = np.ones(a.shape, bool)
    for x in (a, b, exact):
        whole &= (x == 0) | ~(np.abs(x) <= np.finfo(np.float32).tiny)
    assert whole.sum() > 1 << 19
    result = np.asarray(jax.jit(by_float64)(a, b))
    assert_bitwise_equal(result[whole], exact[whole], what="quotients", any_nan=True)


@pytest.mark.parametrize("units", (-5, -3, -1, 0, 1, 3, 5))
def test_a_near_quotient_becomes_the_nearest(units: int, rng: np.random.Generator):
    a, b, exact = quotients(rng, 1 << 17)
    # Up to the last binades from which five units do not lead out of the normal numbers.
    tiny, huge = np.float32(1.1 * 2.0**-125), np.float32(1.9 * 2.0**126)
    normal = (np.abs(exact) > tiny) & (np.abs(exact) < huge)
    for x in (a, b):
        normal &= np.isfinite(x) & (np.abs(x) >= np.finfo(np.float32).tiny)
    assert normal.sum() > 1 << 16
    near = np.where(normal, exact.view(np.int32) + units, exact.view(np.int32)).view(np.float32)
    result = np.asarray(jax.jit(nearest_quotient)(near, a, b))
    assert_bitwise_equal(result[normal], exact[normal], what="quotients")
    # Nor does it touch anything special.
    special = ~(np.isfinite(a) & np.isfinite(b) & np.isfinite(exact))
    assert_bitwise_equal(result[special], near[special], what="NaN and Inf")


def test_only_gpus_divide_in_float64():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    text = lowered(lambda a, b: true_divide(true_divide(a, b), b), x, x, platform="cuda")
    # XLA for GPUs leaves out a conversion to float32 and back: the first quotient was not rounded.
    rounded = re.findall(r"stablehlo.reduce_precision .*format = e8m23 : tensor<8xf64>", text)
    assert len(rounded) == text.count("stablehlo.divide") == 2
    texts = {name: lowered(true_divide, x, x, platform=name) for name in ("cpu", "cuda")}
    assert "xf64>" in texts["cuda"] and "f64" not in texts["cpu"]
    texts = {name: lowered(divide_elements, x, x, platform=name) for name in texts}
    assert "shift_left" in texts["cuda"] and "shift_left" not in texts["cpu"]
    assert not any("f64" in text for text in texts.values())


@pytest.mark.parametrize("is_lifted", [True, False])
def test_lifting_by_products_on_gpus(is_lifted: bool, rng: np.random.Generator):
    x = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x[:4096] = np.r_[:2048, (1 << 31) + np.arange(2048)].astype(np.uint32).view(np.float32)
    x, where = x[np.isfinite(x)], np.array([is_lifted])
    # What is lowered came lifted, from 2^-100 at most.
    bits = np.where(np.abs(x) > 2.0**-126, x, 1).view(np.int32)
    lifted, lowered = jax.jit(lift)(x, where), jax.jit(lower)(bits, where)
    with lowering(Lowering("cuda")):
        in_range = np.isfinite(lifted)
        assert_bitwise_equal(by_numpy(lift, x, where)[in_range], np.asarray(lifted)[in_range])
        assert_bitwise_equal(by_numpy(lower, bits, where), lowered)
