"""`benchmarks.gpu` as far as a machine without a GPU goes: checks, chains, tables, its refusal."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu, report
from mx_jax.backends.pallas_gpu import PallasGpuBackend
from mx_jax.backends.reference import ReferenceBackend
from mx_jax.testing.cases import MatmulCase
from tests.backends.mosaic import needs_mosaic

SMALL = MatmulCase(lhs=None, rhs=gpu.MXFP4, dtype="bfloat16", out_dtype="bfloat16")


class Altered(PallasGpuBackend):
    """The reference's product with its last entry replaced."""

    def __init__(self, last: float):
        object.__setattr__(self, "last", last)

    def scaled_matmul(self, lhs, rhs, call):
        product = ReferenceBackend().scaled_matmul(lhs, rhs, call)
        return product.at[-1, -1].add(self.last)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("last", "wrong"), [(0.0, False), (1e6, True), (np.nan, True)])
def test_a_wrong_entry_is_noticed(last: float, wrong: bool, rng: np.random.Generator):
    assert (gpu.check(Altered(last), SMALL, rng) > 1) == wrong


def test_needs_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU that the kernel runs on: it runs on platf"):
        gpu.main([])


def test_every_check_is_a_product_that_the_kernel_takes():
    target = gpu.current_target()
    target = dataclasses.replace(target, platform="cuda", compute_capability=(9, 0))
    for case in gpu.CHECKS:
        assert gpu.rejections.rejects(case.call, target, (0, 11, 2)) is None


def test_chains_of_both_baselines_agree():
    known = gpu.products(gpu.MXFP8_E4M3, 64, 2)
    x = jnp.ones((3, 64), jnp.bfloat16)
    outs = {
        name: np.asarray(gpu.chained(*known[name], 2, x)()).astype(np.float32)
        for name in (gpu.BASELINE, gpu.DEQUANTIZE)
    }
    base = outs[gpu.BASELINE]
    assert 0.1 < np.abs(base).mean() < 10, "the chain must keep its magnitude"
    difference = np.abs(outs[gpu.DEQUANTIZE] - base).mean() / np.abs(base).mean()
    assert 0 < difference < 0.3


@needs_mosaic
def test_the_kernels_chain_lowers():
    product, weights = gpu.products(gpu.MXFP4, 128, 2, "sm90")[gpu.KERNEL]
    x = jnp.ones((3, 128), jnp.bfloat16)
    run = jax.jit(lambda x, weights: product(product(x, weights[0]), weights[1]))
    text = run.trace(x, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def row(m: int, speedup: Any) -> dict[str, Any]:
    return {
        "format": "mxfp4",
        "m": m,
        "size": 8192,
        "microseconds": {gpu.BASELINE: 30.0, gpu.DEQUANTIZE: 60.0, gpu.KERNEL: 15.0},
        "speedup": {name: {"median": 2.0} for name in (gpu.BASELINE, gpu.DEQUANTIZE, gpu.KERNEL)},
        "speedup_bound": speedup,
    }


def test_tables():
    checks = [{"case": "a", "error_over_allowed": 0.25}]
    numbers, speeds = gpu.sheets(checks, [row(1, 3.76), row(16, None)])
    assert isinstance(numbers, report.Sheet) and "| a | 0.250 |" in numbers.markdown()
    assert (
        "| mxfp4, 1 x 8192 x 8192 | 30.0 | 60.0 | 15.0 | 2.00 | 2.00 | 3.76 |" in speeds.markdown()
    )
    assert speeds.rows[1][-1] == "-"


def test_bounds():
    assert gpu.bound("NVIDIA A100", 1, 8192, 16) is None
    few = gpu.bound("NVIDIA H200", 1, 8192, 16), gpu.bound("NVIDIA H200", 1, 8192, 4.25)
    assert few[0] / few[1] == pytest.approx(16 / 4.25, rel=1e-2)
    many = [gpu.bound("NVIDIA H200", 4096, 8192, bits) for bits in (16, 4.25)]
    assert many[0] == many[1] == 2 * 4096 * 8192**2 / 989e12
