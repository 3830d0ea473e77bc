"""`benchmarks.gpu` as far as a machine without a GPU goes: chains, tables, its refusal."""

import dataclasses
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
from benchmarks import gpu, gpu_peers
from benchmarks.gpu_products import (
    BASELINE,
    CUDNN,
    DEQUANTIZE,
    KERNEL,
    Pair,
    Way,
    chained,
    products,
)
from mx_jax.backends.base import Target
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from tests.backends.mosaic import needs_mosaic, with_any_jax

H200 = Target(platform="cuda", compute_capability=(9, 0))
# The commands say so themselves on older versions, which have no kernels to measure.
pytestmark = needs_mosaic


def test_the_whole_command_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What cannot run is written down, all of it, and costs nothing else its answer."""
    with_any_jax(monkeypatch)
    out = tmp_path / "gpu.json"
    options = "--pairs mxfp4 --rows 3 --size 256 --copies 2 --calls 1 --seconds 0.02"
    with mx_jax.testing.target("cuda", (9, 0)):
        gpu.main([*options.split(), "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["failed"]) == {KERNEL}
    assert row["failed"][KERNEL].startswith("Traceback")
    assert set(row["microseconds"]) == {BASELINE, DEQUANTIZE}
    text = out.with_suffix(".md").read_text()
    assert f"bf16 x mxfp4, 3 rows: {KERNEL} failed: " in text and "Traceback" not in text


@pytest.mark.parametrize("add", [0.25, np.nan])
def test_what_is_wrong_is_not_timed(add: float):
    known = products(Pair(rhs=gpu.MXFP4), 64, 1, H200)
    right = known[DEQUANTIZE]
    wrong = Way(lay_out=right.lay_out, product=lambda x, w: right.product(x, w).at[-1, -1].add(add))
    weights = {name: right.weights(64, 1) for name in (KERNEL, DEQUANTIZE)}
    x = jnp.ones((3, 64), jnp.bfloat16)
    gpu._check(known | {KERNEL: right}, weights, KERNEL, x)
    with pytest.raises(ArithmeticError, match=f"{KERNEL} is wrong: error="):
        gpu._check(known | {KERNEL: wrong}, weights, KERNEL, x)


def test_a_peer_that_cannot_be_imported_is_one_failure(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> Any:
        raise OSError(f"{name}: libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.import_module", broken)
    found = gpu_peers.cases(Pair(rhs=gpu.MXFP4), 1, 64, 1, 1)
    assert [name for name, _ in found] == [gpu_peers.TORCH, gpu_peers.INT4, gpu_peers.TRITON]
    for _, make in found:
        with pytest.raises(OSError, match=r"libcudart"):
            make()


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


def test_the_kernels_chain_lowers_it_once(monkeypatch: pytest.MonkeyPatch):
    way = products(Pair(rhs=gpu.MXFP4), 128, 3, H200)[KERNEL]
    traced = []

    def product(x: jax.Array, w: Any) -> jax.Array:
        traced.append(w)
        return way.product(x, w)

    seen = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f: seen.append(jit(f)) or seen[-1])
    chained(product, way.weights(128, 3), 1, jnp.ones((3, 128), jnp.bfloat16))
    x = jnp.ones((3, 128), jnp.bfloat16)
    text = seen[-1].trace(x, way.weights(128, 3)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 and len(traced) == 1


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
    times, speeds = gpu.sheets({"rows": [row(1, 3.76), row(16, None)]})
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
