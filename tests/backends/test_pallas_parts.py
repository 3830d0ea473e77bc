"""Hopper's kernel: warpgroups that share rows, programs that share tiles, a ring of slots."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.products import decoded
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.formats import MXFP4, MXFP8_E4M3, BlockFormat
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import interpreter, mostly_slow, needs_mosaic, race_of, whole_numbers
from tests.backends.test_pallas_matmul import as_batch, case_of

pytestmark = needs_mosaic

QUICK = MXFP4, Tiles(m=8, n=64, k=128, stages=8, parts=4), "bfloat16"
# Pieces that end within tiles, with a step beyond k; more steps than slots.
STRIPED = MXFP4, Tiles(m=8, n=64, k=128, stages=4, parts=2, stripes=5), "bfloat16"


def product(format: BlockFormat, tiles: Tiles, out_dtype: str) -> tuple[Any, Any]:
    """The kernel's, as a function to be called, and the reference's."""
    case = case_of(format, m=(3,), n=(200,), k=(1000,), out_dtype=out_dtype)
    x, w = whole_numbers(np.random.default_rng(0), case)
    packed = jax.jit(PackedWeights.of)(as_batch(w))
    how = {"architecture": SM90, "tiles": tiles, "interpret": interpreter()}
    expected = scaled_matmul(x, w, case.call.dimension_numbers, out_dtype)
    return lambda: decoded.multiply(x[None], packed, out_dtype, **how)[0], expected


@pytest.mark.parametrize(
    "what",
    mostly_slow(
        [
            QUICK,
            STRIPED,
            (MXFP8_E4M3, Tiles(m=16, n=128, k=256, stages=2, parts=2, splits=3), "float32"),
            (formats.NVFP4, Tiles(m=8, n=64, k=256, stages=6, parts=2, stripes=7), "float32"),
            (MXFP4, Tiles(m=8, n=256, k=128, stages=2), "bfloat16"),
            (formats.MXFP6_E2M3, Tiles(m=8, n=128, k=128, stages=3, stripes=6), "float16"),
        ],
        QUICK,
        STRIPED,
    ),
    ids=str,
)
def test_is_the_reference_after_rounding(what: tuple[BlockFormat, Tiles, str]):
    run, expected = product(*what)
    assert_bitwise_equal(run(), expected, what="product")


class Waits:
    """Mosaic GPU, with waits for some barriers left out."""

    def __init__(self, module: Any, of_slots: bool):
        self.module, self.of_slots = module, of_slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def barrier_wait(self, barrier: Any) -> None:
        if hasattr(barrier, "transforms") != self.of_slots:
            self.module.barrier_wait(barrier)


@pytest.mark.parametrize(
    ("module", "of_slots"),
    [
        # For a slot's copies, for its readers, and for the sums of others or their readers.
        ("wgmma", True),
        ("ring", True),
        pytest.param("wgmma", False, marks=pytest.mark.slow),
    ],
)
def test_a_missing_wait_is_a_race(
    module: str,
    of_slots: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    kernel = importlib.import_module(f"mx_jax.backends.pallas_gpu.products.{module}")
    monkeypatch.setattr(kernel, "plgpu", Waits(kernel.plgpu, of_slots))
    run, _ = product(*STRIPED)
    assert race_of(run, capfd)
