"""The GPU kernel's numbers, in Mosaic's interpreter on the CPU, with its race detector on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.pallas_gpu import PallasGpuBackend, matmul
from mx_jax.backends.pallas_gpu.tuning import Tiles
from mx_jax.backends.pallas_gpu.weights import pack
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import interpreter, needs_mosaic, reset_interpreter

WEIGHTS = (MXFP4, MXFP8_E4M3, MXFP8_E5M2)

pytestmark = needs_mosaic


@pytest.fixture
def interpret() -> Any:
    return interpreter()


def whole_numbers(rng: np.random.Generator, case: MatmulCase) -> tuple[Any, Any]:
    """Operands whose sums are exact in float32 in any order."""
    lhs, rhs = case.operands(rng, octaves=1)
    small = jnp.asarray(rng.integers(-8, 9, lhs.shape), case.dtype)
    # Of float8, the codes of few octaves; of float4 every code.
    codes = rng.integers(0, 16, rhs.shape).astype(np.uint8)
    if rhs.format.element.bits == 8:
        one = rhs.format.element.bias << rhs.format.element.mantissa_bits
        codes = (codes & 7) + one | (codes & 8) << 4
    return small, dataclasses.replace(rhs, codes=jnp.asarray(codes))


def case_of(rhs: formats.BlockFormat, dtype: str = "bfloat16", **facts: Any) -> MatmulCase:
    return MatmulCase(lhs=None, rhs=rhs, dtype=dtype, **facts)


# Edges: one row, a partial block, several tiles, batches, several axes, a k that the table splits,
# each order, each dtype.
CASES = [
    case_of(MXFP4, m=(1,), n=(1,), k=(33,)),
    case_of(MXFP4, m=(9,), n=(130,), k=(160,), out_dtype="bfloat16"),
    case_of(MXFP8_E4M3, batch=(2,), m=(3,), k=(64,), lhs_k_first=True, out_dtype="float16"),
    case_of(MXFP8_E5M2, m=(2, 3), n=(4, 2), k=(2, 512), rhs_k_first=True),
    case_of(MXFP4, "float16", out_dtype="float16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_reference_after_rounding(
    case: MatmulCase, rng: np.random.Generator, interpret: Any
):
    call = case.call
    lhs, rhs = whole_numbers(rng, case)
    actual = matmul.scaled_matmul(lhs, rhs, call, interpret=interpret)
    expected = scaled_matmul(lhs, rhs, call.dimension_numbers, call.out_dtype)
    assert_bitwise_equal(actual, expected, what="product")


@pytest.mark.parametrize(
    "case",
    [
        case_of(MXFP8_E4M3, "float16", k=(40,)),
        MatmulCase(lhs=MXFP8_E5M2, rhs=formats.MXINT8, k=(40,), out_dtype="bfloat16"),
    ],
    ids=str,
)
def test_is_near_float64(case: MatmulCase, interpret: Any):
    check_matmul(PallasGpuBackend(interpret=interpret), case)


@pytest.mark.parametrize(
    ("tiles", "out_dtype"),
    [
        (Tiles(m=16, k=64, stages=2, splits=2, warpgroups=1), "float32"),
        (Tiles(m=128, k=64, stages=2, splits=1), "bfloat16"),
    ],
    ids=str,
)
def test_tiles_do_not_matter(
    tiles: Tiles, out_dtype: str, rng: np.random.Generator, interpret: Any
):
    case = case_of(MXFP4, m=(17,), n=(3,), k=(256,))
    x, w = whole_numbers(rng, case)
    packed = pack(w.codes[None], w.scales[None], w.format, w.dtype)
    actual = matmul.multiply(x[None], packed, out_dtype, tiles=tiles, interpret=interpret)
    expected = scaled_matmul(x, w, case.call.dimension_numbers, out_dtype)
    assert_bitwise_equal(actual[0], expected, what="product")


def test_under_vmap(rng: np.random.Generator, interpret: Any):
    case = case_of(MXFP4, m=(3,), n=(5,), k=(64,))
    x, w = whole_numbers(rng, case)
    xs = jnp.stack([x, 2 * x])

    def product(x):
        return matmul.scaled_matmul(x, w, case.call, interpret=interpret)

    expected = jnp.stack([scaled_matmul(x, w, case.call.dimension_numbers, "float32") for x in xs])
    assert_bitwise_equal(jax.jit(jax.vmap(product))(xs), expected, what="product")


# The interpreter multiplies with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_reaches_its_row_alone(interpret: Any):
    case = case_of(MXFP8_E4M3, "float16", m=(2,), n=(4,), k=(64,))
    rhs = case.operands(np.random.default_rng(0))[1]
    codes, scales = np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 127, np.uint8)
    codes[1, 5], scales[2, 1] = 0x7F, 255
    rhs = dataclasses.replace(rhs, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    lhs = jnp.ones((2, 64), jnp.float16).at[1, 3].set(jnp.inf)
    out = matmul.scaled_matmul(lhs, rhs, case.call, interpret=interpret)
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(out, [[64, nan, nan, 64], [inf, nan, nan, inf]])


@pytest.mark.parametrize(
    ("m", "n", "k"), [((0,), (3,), (32,)), ((2,), (0,), (32,)), ((2,), (3,), (0,))]
)
def test_empty(m: tuple[int], n: tuple[int], k: tuple[int]):
    case = case_of(MXFP4, m=m, n=n, k=k)
    lhs, rhs = case.operands(np.random.default_rng(0))
    out = matmul.scaled_matmul(lhs, rhs, case.call)
    np.testing.assert_array_equal(out, np.zeros((*m, *n), np.float32))


@pytest.mark.parametrize("format", WEIGHTS, ids=lambda format: format.name)
def test_every_code_under_every_scale(format: formats.BlockFormat):
    from mx_jax.backends.pallas_gpu import kernel_sm90

    element = format.element
    codes = jnp.tile(jnp.arange(1 << element.bits, dtype=jnp.int16), (256, 1))
    scales = jnp.arange(256, dtype=jnp.uint8)
    # Below the code lies what a byte's other nibble may leave there.
    bits = jnp.left_shift(codes.astype(jnp.int32), 32 - element.bits) | 0x5A5A5A
    decoded = jax.jit(lambda b, s: kernel_sm90._decode(b, s, element))(bits, scales)
    values = [element.value(code) for code in range(1 << element.bits)]
    with np.errstate(over="ignore", invalid="ignore"):
        factors = [format.scale.value(byte) for byte in range(256)]
        expected = np.outer(factors, values).astype(np.float32)
    # The CPU flushes what is below float32's smallest normal number; a GPU keeps it.
    expected = np.where(np.abs(expected) < 2.0**-126, np.copysign(0, expected), expected)
    np.testing.assert_array_equal(np.asarray(decoded).astype(np.float32), expected)


def test_a_missing_wait_is_a_race(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, interpret: Any
):
    from jax._src.pallas.mosaic_gpu import primitives

    case = case_of(MXFP4, m=(3,), n=(5,), k=(128,))
    x, w = whole_numbers(rng, case)
    monkeypatch.setattr(primitives, "barrier_wait", lambda *args, **kwargs: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(matmul.scaled_matmul(x, w, case.call, interpret=interpret))
    reset_interpreter()


@pytest.mark.parametrize("format", WEIGHTS, ids=lambda format: format.name)
def test_lowers_for_cuda_without_a_plugin(format: formats.BlockFormat):
    case = case_of(format, m=(17,), n=(200,), k=(1024,), out_dtype="bfloat16")
    operands = case.operands(np.random.default_rng(0))
    run = jax.jit(lambda lhs, rhs: matmul.scaled_matmul(lhs, rhs, case.call))
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    # Activations padded to 32 rows, weights to 256, and the partial sums of one split.
    width = 1024 // 2 if format.element.bits == 4 else 1024
    assert f"(tensor<32x1024xbf16>, tensor<256x{width}xui8>, tensor<32x256xui8>)" in call
