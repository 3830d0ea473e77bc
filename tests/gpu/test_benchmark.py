"""`benchmarks.gpu` as far as a machine without a GPU goes: checks, chains, tables, its refusal."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from benchmarks import gpu, gpu_tune, report
from benchmarks.gpu_products import (
    BASELINE,
    CUDNN,
    DEQUANTIZE,
    KERNEL,
    chained,
    kernel_product,
    products,
)
from mx_jax.backends.pallas_gpu import PallasGpuBackend, tuning
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
    with pytest.raises(SystemExit, match="needs a GPU that a kernel runs on: it runs on platf"):
        gpu.main([])


def test_tuning_needs_a_gpu():
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU of compute capability 8\.0, 8\.9"):
        gpu_tune.main([])


@pytest.mark.parametrize(("capability", "name"), gpu.rejections.ARCHITECTURES.items())
def test_every_check_is_a_product_that_the_kernel_takes(capability: tuple[int, int], name: str):
    target = gpu.current_target()
    target = dataclasses.replace(target, platform="cuda", compute_capability=capability)
    assert len(gpu.CHECKS[name]) > 10
    for case in gpu.CHECKS[name]:
        assert gpu.rejections.rejects(case.call, target, (0, 12, 0)) is None


def test_chains_of_both_baselines_agree():
    known = products(gpu.MXFP8_E4M3, 64, 2, "sm90")
    x = jnp.ones((3, 64), jnp.bfloat16)
    outs = {
        name: np.asarray(chained(*known[name], 2, x)()).astype(np.float32)
        for name in (BASELINE, DEQUANTIZE)
    }
    base = outs[BASELINE]
    assert 0.1 < np.abs(base).mean() < 10, "the chain must keep its magnitude"
    difference = np.abs(outs[DEQUANTIZE] - base).mean() / np.abs(base).mean()
    assert 0 < difference < 0.3


def test_what_tuning_compares_with_is_the_same_product():
    lay_out, product = kernel_product(gpu.MXFP4, "sm90", dequantize=True)
    w = mx_jax.quantize(jnp.linspace(-3, 3, 5 * 64).reshape(5, 64), "mxfp4")
    x = jnp.linspace(-1, 1, 2 * 64).reshape(2, 64).astype(jnp.bfloat16)
    expected = x.astype(jnp.float32) @ w.dequantize(jnp.float32).T
    actual = jax.jit(lambda x, w: product(x, lay_out(w)))(x, w)
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.slow
def test_cudnns_product_has_the_right_shape():
    product, weights = products(gpu.NVFP4, 128, 1, "sm100")[CUDNN]
    out = jax.eval_shape(product, jax.ShapeDtypeStruct((3, 128), jnp.bfloat16), weights[0])
    assert (out.shape, out.dtype) == ((3, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    ("times", "rows"),
    [
        ([(8, 1.0, 2.0), (64, 1.0, 2.0)], np.inf),
        ([(8, 1.0, 2.0), (64, 3.0, 2.0)], 64),
        ([(8, 3.0, 2.0), (64, 1.0, 2.0), (128, 4.0, 2.0), (256, 5.0, 2.0)], 128),
    ],
)
def test_crossover(times: list[tuple[int, float, float]], rows: float):
    assert gpu_tune.crossover(times) == rows


@pytest.mark.slow
def test_tuning_times_products():
    options = gpu_tune.parse("--size 128 --copies 2 --calls 1 --seconds 0.1".split())
    (seconds,) = gpu_tune.medians([None], gpu.MXFP4, "sm90", 3, options).values()
    assert 0 < seconds < 1


def test_tuning_picks_the_fastest(monkeypatch: pytest.MonkeyPatch):
    def medians(ways: Any, format: Any, architecture: str, rows: int, options: Any) -> Any:
        # Deeper pipelines are faster; from 64 rows on XLA is.
        return {t: 0.5 if t is None and rows >= 64 else 1 / (t.stages if t else 1) for t in ways}

    monkeypatch.setattr(gpu_tune, "medians", medians)
    table = gpu_tune.tune("sm90", gpu_tune.parse(["--rows", "64", "8", "--bits", "4"]))
    (first, few), (last, many) = table.tiles["sm90", 4]
    assert (first, few.m, few.stages) == (8, 8, 6) and (last, many.m) == (np.inf, 64)
    assert table.crossover["sm90", 4] == np.inf
    assert tuning.as_json(table).count('"rows": null') == 1


@needs_mosaic
def test_the_kernels_chain_lowers():
    product, weights = products(gpu.MXFP4, 128, 2, "sm90")[KERNEL]
    x = jnp.ones((3, 128), jnp.bfloat16)
    run = jax.jit(lambda x, weights: product(product(x, weights[0]), weights[1]))
    text = run.trace(x, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def row(m: int, speedup: Any) -> dict[str, Any]:
    return {
        "format": "mxfp4",
        "m": m,
        "size": 8192,
        "microseconds": {BASELINE: 30.0, DEQUANTIZE: 60.0, KERNEL: 15.0},
        "speedup": {name: {"median": 2.0} for name in (DEQUANTIZE, KERNEL, BASELINE)},
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
    assert gpu.bound("NVIDIA V100", 1, 8192, 16) is None
    few = gpu.bound("NVIDIA H200", 1, 8192, 16), gpu.bound("NVIDIA H200", 1, 8192, 4.25)
    assert few[0] / few[1] == pytest.approx(16 / 4.25, rel=1e-2)
    many = [gpu.bound("NVIDIA H200", 4096, 8192, bits) for bits in (16, 4.25)]
    assert many[0] == many[1] == 2 * 4096 * 8192**2 / 989e12
