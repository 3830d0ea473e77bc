"""Blackwell's kernel for rows in groups: numbers and races in the interpreter, what it takes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.calls import PackCall
from mx_jax.backends.pallas_gpu import products
from mx_jax.backends.pallas_gpu.architecture import SM100
from mx_jax.backends.pallas_gpu.products import pack_weights
from mx_jax.backends.pallas_gpu.rejections import rejects_groups
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from mx_jax.mxarray import MXArray
from mx_jax.reference.ragged import scaled_ragged_dot
from mx_jax.testing.cases import RaggedCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import few_octaves, interpreter, needs_newer_mosaic

B200 = Target(platform="cuda", compute_capability=(10, 0))
NEW = (0, 12, 0)
# Groups of none, of one, of several and of more than a tile, and rows of none.
SIZES = (0, 1, 7, 0, 13)
LONG = (3, 140, 0, 9)


def operands(case: RaggedCase) -> tuple[MXArray, MXArray, jax.Array]:
    """Of sums that are exact in float32 in any order; other scales in every row and block."""
    rng = np.random.default_rng(0)
    lhs, rhs, sizes = case.operands(rng)

    def exact(x: Any) -> MXArray:
        assert isinstance(x, MXArray)
        scales = rng.integers(126, 129, x.scales.shape).astype(np.uint8)
        return few_octaves(rng, dataclasses.replace(x, scales=jnp.asarray(scales)))

    return exact(lhs), exact(rhs), sizes


def of(format: Any, **facts: Any) -> RaggedCase:
    return RaggedCase(**{"lhs": format, "rhs": format, "sizes": SIZES, "rows": 24, "n": 64} | facts)


@needs_newer_mosaic
@pytest.mark.parametrize(
    "case",
    [
        of(MXFP8_E4M3, rhs=MXFP8_E5M2, k=300),
        pytest.param(
            of(NVFP4, sizes=LONG, rows=160, n=200, k=40, out_dtype="bfloat16"),
            id="more than a tile",
        ),
        pytest.param(of(MXFP4, sizes=(24,), out_dtype="float16"), marks=pytest.mark.slow),
        pytest.param(
            of(MXFP4, sizes=LONG, rows=155, n=300, rhs_k_first=True), marks=pytest.mark.slow
        ),
        pytest.param(of(MXFP4, sizes=(0, 0), rows=5, n=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_is_the_reference_after_rounding(case: RaggedCase):
    lhs, rhs, sizes = operands(case)
    how = {"architecture": SM100, "interpret": interpreter()}
    run = jax.jit(lambda lhs, rhs: products.ragged_dot(lhs, rhs, sizes, case.call, **how))
    assert "grouped_tcgen05" in str(run.trace(lhs, rhs).jaxpr)
    expected = scaled_ragged_dot(lhs, rhs, sizes, case.call.contracting, case.out_dtype)
    assert_bitwise_equal(run(lhs, rhs), expected, what="product")


@needs_newer_mosaic
@pytest.mark.slow
def test_packed_once():
    """To be decoded: they are laid out at every call."""
    case = of(NVFP4, k=64)
    lhs, rhs, sizes = operands(case)
    packed = pack_weights(rhs, PackCall(weights=case.call.rhs, blocks=rhs.blocks))
    how = {"architecture": SM100, "interpret": interpreter()}
    run = jax.jit(lambda lhs, rhs: products.ragged_dot(lhs, rhs, sizes, case.call, **how))
    expected = scaled_ragged_dot(lhs, rhs, sizes, case.call.contracting, case.out_dtype)
    assert_bitwise_equal(run(lhs, packed), expected, what="product")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (of(MXFP8_E4M3, rhs=MXFP8_E5M2), None),
        (of(NVFP4), None),
        (
            of(MXFP8_E4M3, rhs=MXFP4),
            "multiplies rows in groups on CUDA compute capability 10.0 where formats meet, got "
            "lhs=mxfp8_e4m3, rhs=mxfp4",
        ),
        (
            of(MXFP8_E4M3, contracts_rows=True),
            "sums over rows of groups on CUDA compute capability 9.0, got 10.0",
        ),
    ],
    ids=str,
)
def test_what_it_takes(case: RaggedCase, reason: str | None):
    assert rejects_groups(case.call, B200, NEW) == reason
