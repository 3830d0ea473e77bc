"""Blackwell's kernel: its layouts, and its numbers in Mosaic's interpreter, races detected."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.pallas_gpu import backend_for, products, rejections
from mx_jax.backends.pallas_gpu.architecture import SM100
from mx_jax.backends.pallas_gpu.layouts import ScaledOperand, meet
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from mx_jax.mxarray import MXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import few_octaves, interpreter, needs_newer_mosaic, race_of


@pytest.fixture
def how() -> dict[str, Any]:
    return {"architecture": SM100, "interpret": interpreter()}


def operands(rng: np.random.Generator, case: MatmulCase) -> tuple[MXArray, MXArray]:
    """Both of few octaves, so that sums are exact in float32 in any order."""
    lhs, rhs = case.operands(rng, octaves=1)
    assert isinstance(lhs, MXArray) and isinstance(rhs, MXArray)
    return few_octaves(rng, lhs), few_octaves(rng, rhs)


# Edges: one row, several tiles, several steps and splits, batches, several axes, each order.
CASES = [
    MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP8_E5M2, m=(1,), n=(130,), k=(300,)),
    MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(2,), m=(3,), k=(2, 256), out_dtype="bfloat16"),
    MatmulCase(lhs=NVFP4, rhs=NVFP4, m=(130,), k=(40,), rhs_k_first=True, out_dtype="float16"),
    pytest.param(
        MatmulCase(lhs=MXFP4.with_block(16), rhs=MXFP4.with_block(16), k=(2048,)),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        MatmulCase(lhs=MXFP8_E5M2, rhs=MXFP8_E5M2, m=(2, 70), n=(140,), k=(512,)),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        MatmulCase(lhs=NVFP4, rhs=NVFP4, batch=(3,), m=(70,), n=(130,), k=(512,)),
        marks=pytest.mark.slow,
    ),
]


@needs_newer_mosaic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_reference_after_rounding(
    case: MatmulCase, rng: np.random.Generator, how: dict[str, Any]
):
    call = case.call
    lhs, rhs = operands(rng, case)
    run = jax.jit(lambda lhs, rhs: products.scaled_matmul(lhs, rhs, call, **how))
    expected = scaled_matmul(lhs, rhs, call.dimension_numbers, call.out_dtype)
    assert_bitwise_equal(run(lhs, rhs), expected, what="product")


@needs_newer_mosaic
@pytest.mark.slow
def test_is_near_float64(how: dict[str, Any]):
    check_matmul(backend_for(**how), MatmulCase(lhs=NVFP4, rhs=NVFP4, k=(90,)))


@needs_newer_mosaic
def test_a_missing_wait_is_a_race(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rng: np.random.Generator,
):
    from jax.experimental.pallas import mosaic_gpu

    case = MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(1,), k=(1024,))
    lhs, rhs = operands(rng, case)
    tiles = Tiles(m=128, k=256, stages=2, splits=1)
    # In the order in which they are traced.
    waits, wait = iter(("free stages", "copied tiles", "the sums")), mosaic_gpu.barrier_wait
    traced: list[str] = []

    def some(*args: Any, **kwargs: Any) -> None:
        traced.append(next(waits))
        if traced[-1] != "copied tiles":
            wait(*args, **kwargs)

    monkeypatch.setattr(mosaic_gpu, "barrier_wait", some)
    left, right = ScaledOperand.of(lhs), ScaledOperand.of(rhs)
    how = {"architecture": SM100, "tiles": tiles, "interpret": interpreter()}
    assert race_of(lambda: products.multiply_scaled(left, right, "float32", **how), capfd)
    assert len(traced) == 3


def test_layout_of_scales_is_what_the_docstring_says(rng: np.random.Generator):
    scales = rng.integers(0, 255, (1, 130, 20)).astype(np.uint8)
    x = MXArray(
        codes=jnp.zeros((1, 130, 640), jnp.uint8),
        scales=jnp.asarray(scales),
        format=MXFP8_E4M3,
        blocks=((-1, 32),),
        dtype=jnp.dtype("float32"),
    )
    laid_out = ScaledOperand.of(x)
    assert laid_out.codes.shape == (1, 136, 768) and laid_out.scales.shape == (2, 6, 32, 16)
    bytes_ = np.asarray(laid_out.scales)
    for row, column in ((0, 0), (37, 5), (129, 19), (96, 3), (64, 4)):
        tile, (i, j) = row // 128, divmod(row % 128, 32)
        found = bytes_[tile, column // 4, j, 4 * i + column % 4]
        assert found == scales[0, row, column]
    assert bytes_[1, 0, 5, 0] == 0, "padding"


@needs_newer_mosaic
@pytest.mark.parametrize(("rows", "laid_out_rows"), [(3, 3), (70, 72), (130, 136)])
def test_rows_are_not_padded_to_tiles(rows: int, laid_out_rows: int, rng: np.random.Generator):
    from mx_jax.backends.pallas_gpu import tcgen05

    case = MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(2,), m=(rows,), n=(40,), k=(512,))
    left, right = map(ScaledOperand.of, operands(rng, case))
    assert left.codes.shape == (2, laid_out_rows, 256) and right.codes.shape == (2, 40, 256)
    kernel = functools.partial(
        tcgen05.multiply,
        block=32,
        n=40,
        tiles=Tiles(m=128, k=256, stages=2, splits=2),
        out_dtype=jnp.dtype("float32"),
    )
    arrays = (left.elements, right.elements, left.scale_values, right.scale_values)
    assert jax.eval_shape(kernel, *arrays).shape == (2, laid_out_rows, 40)


def test_fp4_takes_half_a_byte(rng: np.random.Generator):
    codes = rng.integers(0, 16, (1, 128, 256)).astype(np.uint8)
    x = MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.zeros((1, 128, 8), jnp.uint8),
        format=MXFP4,
        blocks=((-1, 32),),
        dtype=jnp.dtype("float32"),
    )
    laid_out = jax.jit(ScaledOperand.of)(x)
    assert laid_out.codes.nbytes == 128 * 256 // 2
    np.testing.assert_array_equal(laid_out.codes, codes[:, :, 0::2] | codes[:, :, 1::2] << 4)
    native = jax.jit(lambda laid_out: laid_out.elements)(laid_out)
    assert native.dtype == jnp.float4_e2m1fn
    np.testing.assert_array_equal(np.asarray(native).view(np.uint8), codes)


@pytest.mark.parametrize(
    ("lhs", "rhs", "expected"),
    [
        (None, MXFP4, False),
        (MXFP4, None, False),
        (MXFP4, formats.MXFP6_E2M3, False),
        (formats.MXINT8, formats.MXINT8, False),
        (MXFP4.with_block(64), MXFP4.with_block(64), False),
        (MXFP8_E4M3, MXFP4, False),
        (MXFP4, NVFP4, False),
        (formats.NVFP4_2D, formats.NVFP4_2D, False),
        (MXFP4, MXFP4, True),
        (MXFP4.with_block(16), MXFP4.with_block(16), True),
        (MXFP8_E4M3, MXFP8_E5M2, True),
        (NVFP4, formats.NVFP4_ONE_LEVEL, True),
    ],
)
def test_which_formats_meet(
    lhs: formats.BlockFormat | None, rhs: formats.BlockFormat | None, expected: bool
):
    assert meet(lhs, rhs) == expected
    if lhs is not None and rhs is not None and expected:
        assert rejections.rejects_weights(rhs) is None, "what is taken as it is can be decoded too"
