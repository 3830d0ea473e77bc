"""`benchmarks.gpu` as far as a machine without a GPU goes: checks, chains, tables, its refusal."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from benchmarks import gpu, gpu_casts, gpu_checks, gpu_tune, report
from benchmarks.gpu_products import (
    BASELINE,
    CUDNN,
    DEQUANTIZE,
    KERNEL,
    Pair,
    Way,
    chained,
    kernel_product,
    products,
)
from mx_jax.backends.base import Backend, Target
from mx_jax.backends.calls import MatmulCall, QuantizeBothCall, QuantizeCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu.architecture import (
    SM90,
    SM100,
    architecture_of,
    capabilities,
)
from mx_jax.backends.pallas_gpu.kernels import MMA, TCGEN05, WGMMA, Kernel
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.products import decoded
from mx_jax.backends.pallas_gpu.products.rejections import rejects
from mx_jax.backends.pallas_gpu.tuning import table
from mx_jax.backends.pallas_gpu.tuning.table import Entry
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.reference import REFERENCE
from mx_jax.testing.cases import MatmulCase
from tests.backends.altered import altered
from tests.backends.mosaic import interpreter, needs_mosaic, with_any_jax

H200 = Target(platform="cuda", compute_capability=(9, 0))
# The commands say so themselves on older versions, which have no kernels to measure.
pytestmark = needs_mosaic
SMALL = MatmulCase(lhs=None, rhs=gpu.MXFP4, dtype="bfloat16", out_dtype="bfloat16")


def with_last_entry(last: float) -> Backend:
    """The reference's product with its last entry replaced."""

    def multiply(lhs, rhs, call):
        return REFERENCE.run(call, lhs, rhs).at[-1, -1].add(last)

    return altered(REFERENCE, MatmulCall, multiply)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that decodes weights alone runs in the interpreter."""
    product = decoded.decoded_dot

    def interpreted(x, weights, out_dtype, architecture, _):
        return product(x, weights, out_dtype, architecture, interpreter())

    monkeypatch.setattr(decoded, "decoded_dot", interpreted)


@pytest.mark.parametrize(("last", "wrong"), [(0.0, False), (1e6, True), (np.nan, True)])
def test_a_wrong_entry_is_noticed(last: float, wrong: bool, rng: np.random.Generator):
    assert (gpu_checks.product_error(with_last_entry(last), SMALL, rng) > 1) == wrong


def test_bits_that_change_are_noticed(rng: np.random.Generator):
    def racing(lhs, rhs, call):
        product = REFERENCE.run(call, lhs, rhs)
        counts = itertools.count()
        shape = jax.ShapeDtypeStruct((), product.dtype)
        tiny = jax.experimental.io_callback(
            lambda: np.asarray(1e-30 * next(counts), product.dtype), shape
        )
        return product + tiny

    case = dataclasses.replace(SMALL, rhs=gpu.MXFP4, k=(0,), dtype="float32", out_dtype="float32")
    assert gpu_checks.product_error(REFERENCE, case, rng) == 0
    assert gpu_checks.product_error(altered(REFERENCE, MatmulCall, racing), case, rng) == np.inf


def test_a_wrong_code_is_noticed(rng: np.random.Generator):
    def flipped(x, random_bits, tensor_scale, call):
        found = REFERENCE.run(call, x, random_bits, tensor_scale)
        return dataclasses.replace(found, codes=found.codes.at[-1, -1].add(1))

    case = gpu_checks.CASTS[0]
    assert gpu_checks.cast_error(REFERENCE, case, rng) == 0
    assert gpu_checks.cast_error(altered(REFERENCE, QuantizeCall, flipped), case, rng) == np.inf


def test_a_wrong_code_of_two_casts_is_noticed(rng: np.random.Generator):
    def twice(x, random_bits, tensor_scale, call):
        singles = (call.first, call.second)
        return tuple(REFERENCE.run(single, x, None, tensor_scale) for single in singles)

    def swapped(x, random_bits, tensor_scale, call):
        first, second = twice(x, random_bits, tensor_scale, call)
        return first, dataclasses.replace(second, codes=first.codes)

    case = gpu_checks.BOTH[0]
    for run, error in ((twice, 0), (swapped, np.inf)):
        backend = altered(PALLAS_GPU, QuantizeBothCall, run)
        assert gpu_checks.both_error(backend, case, rng) == error


def test_the_whole_command_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What cannot run is written down, and costs nothing else its answer."""
    with_any_jax(monkeypatch)
    for module in (gpu, gpu_checks):
        monkeypatch.setattr(module, "products_of", lambda _: (SMALL,))
    monkeypatch.setattr(gpu_checks, "CASTS", gpu_checks.CASTS[:1])
    monkeypatch.setattr(gpu_casts, "FORMATS", gpu_casts.FORMATS[:1])
    out = tmp_path / "gpu.json"
    options = "--pairs mxfp4 --rows 3 --size 256 --copies 2 --calls 1 --seconds 0.02 --seed 1"
    raises = pytest.raises(SystemExit, match="not right, so no time counts: pallas_gpu, ")
    with mx_jax.testing.target("cuda", (9, 0)), raises:
        gpu.main([*options.split(), "--out", str(out)])
    result = json.loads(out.read_text())
    checks = {row["case"].partition(",")[0]: row for row in result["checks"]}
    assert "failed" in checks["pallas_gpu"] and checks["reference"]["error_over_allowed"] == 0
    (row,) = result["rows"]
    assert set(row["failed"]) == {KERNEL}
    assert set(row["microseconds"]) == {BASELINE, DEQUANTIZE}
    assert len(result["casts"]) == len(gpu_casts.DTYPES) * len(gpu_casts.AXES)
    assert all(cast["share_of_copy"][gpu_casts.PLAIN] > 0 for cast in result["casts"])
    text = out.with_suffix(".md").read_text()
    assert f"bf16 x mxfp4, 3 rows: {KERNEL} failed: " in text


def test_what_no_time_is_left_for_is_left_out():
    with pytest.raises(ZeroDivisionError):
        gpu_checks.Check(name="a", run=lambda rng: 1 / 0).run(np.random.default_rng(0))
    found = [gpu_checks.Check(name="a", run=lambda rng: 1 / 0)]
    (late,) = gpu_checks.run_all(found, 0, deadline=-np.inf)
    (failed,) = gpu_checks.run_all(found, 0, deadline=np.inf)
    assert late == {"case": "a", "failed": "left out: no time left"}
    assert failed == {"case": "a", "failed": "ZeroDivisionError: division by zero"}
    assert gpu_checks.wrong([late, failed]) == ["a", "a"]


@pytest.mark.peers
def test_tritons_product_is_right():
    pytest.importorskip("triton")
    code = Path(__file__).with_name("triton_product.py")
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(code.parents[2])}
    done = subprocess.run([sys.executable, code], env=interpreted, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_needs_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU that a kernel runs on: it runs on platf"):
        gpu.main([])


def test_tuning_needs_a_gpu():
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU of compute capability 8\.0, 8\.6"):
        gpu_tune.main([])


@pytest.mark.parametrize("capability", capabilities())
def test_every_check_is_a_product_that_the_kernel_takes(capability: tuple[int, int]):
    target = gpu.current_target()
    target = dataclasses.replace(target, platform="cuda", compute_capability=capability)
    architecture = architecture_of(capability)
    assert architecture is not None
    cases = gpu_checks.products_of(architecture)
    assert len(cases) > 10
    for case in cases:
        assert rejects(case.call, target, (0, 12, 0)) is None
    taken = {architecture.kernel(case.lhs, case.rhs) for case in cases}
    assert taken == set(architecture.kernels)


@pytest.mark.parametrize("lhs", [None, gpu.MXFP8_E4M3])
def test_chains_of_both_baselines_agree(lhs: Any):
    known = products(Pair(lhs=lhs, rhs=gpu.MXFP8_E4M3), 64, 2, H200)
    x = jnp.ones((3, 64), jnp.bfloat16)
    outs = {
        name: np.asarray(run(known[name], x)).astype(np.float32) for name in (BASELINE, DEQUANTIZE)
    }
    base = outs[BASELINE]
    assert 0.1 < np.abs(base).mean() < 10, "the chain must keep its magnitude"
    difference = np.abs(outs[DEQUANTIZE] - base).mean() / np.abs(base).mean()
    assert 0 < difference < 0.3


def run(way: Way, x: jax.Array) -> Any:
    return chained(way.product, way.weights(64, 2), 2, x)()


@pytest.mark.usefixtures("decodes")
def test_what_tuning_compares_with_is_the_same_product():
    lay_out, product = kernel_product(Pair(rhs=gpu.MXFP4), SM90, WGMMA, dequantize=True)
    w = mx_jax.quantize(jnp.linspace(-3, 3, 5 * 64).reshape(5, 64), "mxfp4")
    x = jnp.linspace(-1, 1, 2 * 64).reshape(2, 64).astype(jnp.bfloat16)
    expected = x.astype(jnp.float32) @ w.dequantize(jnp.float32).T
    actual = jax.jit(lambda x, w: product(x, lay_out(w)))(x, w)
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.slow
def test_cudnns_product_has_the_right_shape():
    b200 = dataclasses.replace(H200, compute_capability=(10, 0))
    way = products(Pair(lhs=gpu.NVFP4, rhs=gpu.NVFP4), 128, 1, b200)[CUDNN]
    (weights,) = way.weights(128, 1)
    out = jax.eval_shape(way.product, jax.ShapeDtypeStruct((3, 128), jnp.bfloat16), weights)
    assert (out.shape, out.dtype) == ((3, 128), jnp.bfloat16)
    for lhs, layout in ((gpu.NVFP4, ScaledOperand), (None, PackedWeights)):
        (weights,) = products(Pair(lhs=lhs, rhs=gpu.NVFP4), 128, 1, b200)[KERNEL].weights(128, 1)
        assert isinstance(weights, layout)


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


@pytest.mark.usefixtures("decodes")
@pytest.mark.slow
def test_tuning_times_products():
    options = gpu_tune.parse("--size 128 --copies 2 --calls 1 --seconds 0.1".split())
    (seconds,) = gpu_tune.medians([None], gpu.MXFP4, SM90, WGMMA, 3, options).values()
    assert 0 < seconds < 1


def test_tuning_picks_the_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def medians(ways: Any, format: Any, _: Any, kernel: Kernel, rows: int, options: Any) -> Any:
        # Deeper pipelines are faster; from 64 rows on XLA is.
        return {t: 0.5 if t is None and rows >= 64 else 1 / (t.stages if t else 1) for t in ways}

    monkeypatch.setattr(gpu_tune, "medians", medians)
    options = gpu_tune.parse(["--rows", "64", "8", "--bits", "4"])
    found = dict(gpu_tune.tune(SM90, options))
    tuned = gpu_tune.as_table(found)
    ((entry, tuning),) = tuned.items()
    assert entry == Entry("sm90", "wgmma", 4)
    (first, few), (last, many) = tuning.tiles
    assert (first, few.m, few.stages) == (8, 8, 24) and (last, many.m) == (np.inf, 64)
    assert tuning.crossover == np.inf
    assert table.as_json(tuned).count('"rows": null') == 1
    gpu_tune.write(tmp_path / "tiles.json", found)
    assert gpu_tune.measured(tmp_path / "tiles.times.json") == found
    assert table.read(tmp_path / "tiles.json") == tuned


def test_blackwells_kernels_are_both_tuned(monkeypatch: pytest.MonkeyPatch):
    def medians(ways: Any, format: Any, _: Any, kernel: Kernel, rows: int, options: Any) -> Any:
        assert (None in ways) == (kernel == MMA), "XLA's product decodes weights too"
        return dict.fromkeys(ways, 1.0)

    monkeypatch.setattr(gpu_tune, "medians", medians)
    found = dict(gpu_tune.tune(SM100, gpu_tune.parse(["--rows", "64", "--bits", "4", "6"])))
    kernels = [(MMA, 4), (MMA, 6), (TCGEN05, 4)]
    expected = [Entry("sm100", kernel.name, bits) for kernel, bits in kernels]
    assert list(gpu_tune.as_table(found)) == expected


@pytest.mark.usefixtures("decodes")
def test_tiles_that_cannot_start_are_left_out(capfd: pytest.CaptureFixture[str]):
    options = gpu_tune.parse("--size 128 --copies 1 --calls 1 --seconds 0.01".split())
    bad = Tiles(m=8)
    times = gpu_tune.medians([bad, None], gpu.MXFP4, SM90, WGMMA, 3, options)
    assert list(times) == [None]
    assert f"left out: {bad}: " in capfd.readouterr().err


def test_the_kernels_chain_lowers():
    way = products(Pair(rhs=gpu.MXFP4), 128, 2, H200)[KERNEL]
    product, weights = way.product, way.weights(128, 2)
    x = jnp.ones((3, 128), jnp.bfloat16)
    run = jax.jit(lambda x, weights: product(product(x, weights[0]), weights[1]))
    text = run.trace(x, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def row(m: int, speedup: Any) -> dict[str, Any]:
    return {
        "pair": "bf16 x mxfp4",
        "m": m,
        "size": 8192,
        "microseconds": {BASELINE: 30.0, DEQUANTIZE: 60.0, KERNEL: 15.0},
        "speedup": {name: {"median": 2.0} for name in (DEQUANTIZE, KERNEL, BASELINE)},
        "speedup_bound": speedup,
        "failed": {},
    }


def test_tables():
    checks = [{"case": "a", "error_over_allowed": 0.25}, {"case": "b", "failed": "no"}]
    result = {"checks": checks, "rows": [row(1, 3.76), row(16, None)], "casts": []}
    numbers, times, speeds, _ = gpu.sheets(result)
    assert isinstance(numbers, report.Sheet)
    assert "| a | 0.250 |" in numbers.markdown() and "| b | no |" in numbers.markdown()
    title = "| bf16 x mxfp4, 1 x 8192 x 8192 | "
    assert f"{title}30.0 | 60.0 | 15.0 |" in times.markdown()
    assert f"{title}2.00 | 2.00 | 3.76 |" in speeds.markdown()
    assert speeds.rows[1][-1] == "-"


def test_bounds():
    assert gpu.bound("NVIDIA V100", 1, 8192, 16) is None
    few = gpu.bound("NVIDIA H200", 1, 8192, 16), gpu.bound("NVIDIA H200", 1, 8192, 4.25)
    assert few[0] / few[1] == pytest.approx(16 / 4.25, rel=1e-2)
    many = [gpu.bound("NVIDIA H200", 4096, 8192, bits) for bits in (16, 4.25)]
    assert many[0] == many[1] == 2 * 4096 * 8192**2 / 989e12
