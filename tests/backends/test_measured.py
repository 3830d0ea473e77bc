"""Measurements of kernels: a row switches on exactly the calls that it stands for."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.axes import Axes
from mx_jax.backends import measured
from mx_jax.backends.calls import MatmulCall, OperandType, PackCall
from mx_jax.backends.measured import ROWS, Row
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.select import BACKENDS, on_request, select
from mx_jax.backends.target import Target
from mx_jax.testing.cases import MatmulCase
from tests.backends.mosaic import needs_mosaic, with_any_jax
from tests.quick import lowered

H200 = Target(platform="cuda", compute_capability=(9, 0), device_kind=measured.H200)
BFLOAT16 = np.dtype("bfloat16")
WEIGHTS = (formats.MXFP4, formats.MXFP8_E4M3, formats.NVFP4)
CASE = MatmulCase(
    lhs=None,
    rhs=formats.MXFP4,
    m=(16,),
    n=(4096,),
    k=(4096,),
    dtype="bfloat16",
    out_dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of JAX 0.12."""
    with_any_jax(monkeypatch)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 7))


def product(by: str | None = "pallas_gpu", **changes: Any) -> MatmulCall:
    call = dataclasses.replace(CASE, **changes).call
    return dataclasses.replace(call, rhs=dataclasses.replace(call.rhs, packed_by=by))


def packing(dtype: Any = BFLOAT16, **changes: Any) -> PackCall:
    case = dataclasses.replace(CASE, **changes)
    weights = case.call.rhs
    blocks = weights.axes.blocks(case.rhs)
    return PackCall(weights=weights, blocks=blocks, lhs_format=case.lhs, dtype=dtype)


@pytest.mark.parametrize("side", [1025, 2048, 4096, 8192, 16384], ids=str)
@pytest.mark.parametrize("format", WEIGHTS, ids=str)
def test_weights_of_few_bits_are_packed_and_multiplied_on_an_h200(format: Any, side: int):
    """By 1 to 4096 rows, of more than 2^20 and of up to 2^28 elements."""
    for kind in (measured.H200, "NVIDIA H100 80GB HBM3"):
        target = dataclasses.replace(H200, device_kind=kind)
        for m in (1, 2, 16, 17, 4096):
            call = product(rhs=format, m=(m,), n=(side,), k=(min(side // 32 * 32 + 32, 16384),))
            choice = select(call, target)
            assert choice.backend == PALLAS_GPU and choice.rejections == ()
            row = choice.measured
            assert row.format == format
        for dtype in (BFLOAT16, None):
            call = packing(dtype, rhs=format, n=(side,), k=(1024,))
            assert select(call, target).backend == PALLAS_GPU


OTHERS = {
    "too few weights": product(n=(1024,), k=(1024,)),
    "too many weights": product(n=(16384,), k=(16416,)),
    "another format": product(rhs=formats.MXFP8_E5M2),
    "the same name, other facts": product(rhs=dataclasses.replace(formats.MXFP4, block=(1, 16))),
    "two quantized operands": product(lhs=formats.MXFP4),
    "another dtype": product(dtype="float16"),
    "another result": product(out_dtype="float32"),
    "a batch": product(batch=(2,), n=(2048,), k=(2048,)),
    "not packed": product(by=None),
    "packed for another": product(by="cpu_ffi"),
    "to pack too few weights": packing(n=(1024,), k=(1024,)),
    "to pack for quantized activations": packing(lhs=formats.MXFP8_E4M3),
    "to pack for float32": packing(np.dtype("float32")),
    "to pack a batch": dataclasses.replace(
        packing(),
        weights=OperandType(
            shape=(4, 2048, 2048), axes=Axes.ordered(k_first=True).in_batch(), format=formats.MXFP4
        ),
        blocks=((-2, 32),),
    ),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_other_calls_were_not_measured(call: Any):
    choice = select(call, H200)
    assert choice.backend != PALLAS_GPU and choice.measured is None
    why = "nothing was measured of this on NVIDIA H200"
    is_taken = PALLAS_GPU.rejects(call, H200) is None
    assert (("pallas_gpu", why) in on_request(call, H200)) == is_taken
    refused = "another dtype", "not packed", "packed for another"
    assert is_taken == (call not in [OTHERS[name] for name in refused])


@pytest.mark.parametrize(
    "target",
    [
        dataclasses.replace(H200, num_devices=8),
        dataclasses.replace(H200, device_kind=None),
        dataclasses.replace(H200, device_kind="NVIDIA B200"),
        dataclasses.replace(H200, device_kind="NVIDIA H100 PCIe"),
        Target(platform="tpu", device_kind=measured.H200),
    ],
    ids=str,
)
def test_other_machines(target: Target):
    for call in (product(), packing()):
        assert select(call, target).backend != PALLAS_GPU


@pytest.mark.parametrize("version", [(0, 11, 9), (0, 13, 0), (1, 12, 0)], ids=str)
def test_other_versions_of_jax(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert select(product(), H200).backend != PALLAS_GPU


def test_names_go_before_measurements():
    with mx_jax.prefer_backends("reference"):
        assert select(product(), H200).backend.name == "reference"
    with mx_jax.only_backend("reference"):
        assert select(product(), H200).backend.name == "reference"
        for call in (product(), *OTHERS.values()):
            assert on_request(call, H200) == ()


def test_the_fastest_decides(monkeypatch: pytest.MonkeyPatch):
    other = dataclasses.replace(PALLAS_GPU, name="planted")
    monkeypatch.setattr("mx_jax.backends.select.BACKENDS", (*BACKENDS, other))
    best = max(row.ratio for row in ROWS if row.elements == 2**24 and row.format == formats.MXFP4)
    call = packing()
    for ratio, backend in ((best - 1, "pallas_gpu"), (best + 1, "planted")):
        row = Row("planted", measured.H200, "0.12", formats.MXFP4, 2**24, ratio, "2026-11-28")
        monkeypatch.setattr(measured, "ROWS", (*ROWS, row))
        assert select(call, H200).backend.name == backend


def test_every_call_has_one_row_at_most():
    kinds = [row[:5] for row in ROWS]
    assert len(set(kinds)) == len(kinds)
    # A row speaks down to a quarter of its elements, so classes do not overlap.
    assert all(math.log2(row.elements) % 2 == 0 for row in ROWS)


def step(x: jax.Array, w: jax.Array) -> jax.Array:
    """`pack_weights`, then a product."""
    packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
    return mx_jax.matmul(x, packed, recipe=recipes.weight_only("mxfp4"))


def rows_and_weights(m: int) -> Any:
    return tuple(jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in ((m, 2048), (2048, 4096)))


@needs_mosaic
@pytest.mark.parametrize(
    ("kind", "kernels"), [(measured.H200, 1), (None, 0), ("NVIDIA B200", 0)], ids=str
)
def test_lowered(kind: str | None, kernels: int):
    """A product of few rows is one kernel, where it was measured."""
    for m in (1, 16):
        with mx_jax.testing.target("cuda", (9, 0), device_kind=kind):
            text = lowered(step, *rows_and_weights(m), platform="cuda")
        assert text.count("custom_call @mosaic_gpu") == kernels
        assert ("dot_general" in text) == (not kernels)


@needs_mosaic
def test_explain_says_what_was_measured():
    with mx_jax.testing.target("cuda", (9, 0), device_kind=measured.H200):
        lines = str(mx_jax.inspect.explain(step, *rows_and_weights(16))).splitlines()
    row = "  pallas_gpu: measured on NVIDIA H200, 2026-11-26: 5.8 times the speed of XLA's product"
    product = lines[lines.index(row) - 2]
    assert "x mxfp4" in product and product.endswith("-> pallas_gpu")
