"""Hopper's kernel: several warpgroups, programs that share tiles, a ring of stages."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.pallas_gpu import products
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.pallas_gpu.layouts import PackedWeights
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.formats import MXFP4, MXFP8_E4M3, BlockFormat
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import interpreter, mostly_slow, needs_mosaic, race_of, whole_numbers
from tests.backends.test_pallas_matmul import as_batch, case_of

pytestmark = needs_mosaic

QUICK = MXFP4, Tiles(m=8, n=256, k=128, stages=3), "bfloat16"
# Shares that differ by a step, one of them beyond k; more steps than stages.
SHARED = MXFP4, Tiles(m=8, n=128, k=128, stages=2, splits=3), "bfloat16"


def product(format: BlockFormat, tiles: Tiles, out_dtype: str) -> tuple[Any, Any]:
    """The kernel's, as a function to be called, and the reference's."""
    case = case_of(format, m=(3,), n=(200,), k=(1000,), out_dtype=out_dtype)
    x, w = whole_numbers(np.random.default_rng(0), case)
    packed = jax.jit(PackedWeights.of)(as_batch(w))
    how = {"architecture": SM90, "tiles": tiles, "interpret": interpreter()}
    expected = scaled_matmul(x, w, case.call.dimension_numbers, out_dtype)
    return lambda: products.multiply(x[None], packed, out_dtype, **how)[0], expected


@pytest.mark.parametrize(
    "what",
    mostly_slow(
        [
            QUICK,
            SHARED,
            (MXFP8_E4M3, Tiles(m=16, n=128, k=256, stages=2, splits=3), "float32"),
            (formats.NVFP4, Tiles(m=8, n=192, k=256, stages=3, splits=2), "float32"),
            (formats.MXFP6_E2M3, Tiles(m=8, n=128, k=128, stages=3, splits=5), "float16"),
        ],
        QUICK,
        SHARED,
    ),
    ids=str,
)
def test_is_the_reference_after_rounding(what: tuple[BlockFormat, Tiles, str]):
    run, expected = product(*what)
    assert_bitwise_equal(run(), expected, what="product")


@pytest.mark.parametrize("module", ["wgmma", "device"])
def test_a_missing_wait_is_a_race(
    module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """For a stage's copies, and for its readers."""
    kernel = importlib.import_module(f"mx_jax.backends.pallas_gpu.{module}")

    class Waitless:
        """Mosaic GPU, with waits left out."""

        barrier_wait = staticmethod(lambda barrier: None)
        __getattr__ = kernel.plgpu.__getattribute__

    monkeypatch.setattr(kernel, "plgpu", Waitless())
    run, _ = product(*SHARED)
    assert race_of(run, capfd)
