"""Calls that the GPU kernels take, and reasons of rejections: without a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mx_jax import formats
from mx_jax.axes import Axes
from mx_jax.backends.calls import Call, MatmulCall, OperandType, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, architecture
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4, WHOLE, BlockFormat
from mx_jax.testing.cases import MatmulCase, RaggedCase
from tests.backends.mosaic import with_any_jax

CPU, TURING, A100, H200, B200 = (
    Target(platform="cpu"),
    *(
        Target(platform="cuda", compute_capability=capability)
        for capability in ((7, 5), (8, 0), (9, 0), (10, 0))
    ),
)
ROWWISE = formats.FLOAT8_ROWWISE_E4M3
FNUZ = dataclasses.replace(MXFP8_E4M3, element=formats.E4M3FNUZ)
KNOWN = "8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1"
NO_WEIGHTS = "needs weights in a block format on one side: lhs "
WHERE_FORMATS_MEET = (
    "multiplies rows in groups on CUDA compute capability 10.0 where formats meet, got lhs="
)


@pytest.fixture(autouse=True)
def any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    with_any_jax(monkeypatch)


def dense(**facts: Any) -> MatmulCall:
    return MatmulCase(**{"lhs": None, "rhs": MXFP4, "dtype": "bfloat16"} | facts).call


def groups(rhs: BlockFormat | None = MXFP4, **facts: Any) -> RaggedCall:
    default: dict[str, Any] = {"lhs": None, "sizes": (0, 1, 7, 0, 13), "rows": 24, "n": 64}
    return RaggedCase(rhs=rhs, **default | facts).call


def sums(lhs: BlockFormat | None, rhs: BlockFormat | None, **facts: Any) -> RaggedCall:
    return RaggedCase(lhs=lhs, rhs=rhs, sizes=(32,), rows=32, contracts_rows=True, **facts).call


def pack(
    format: BlockFormat = MXFP4,
    shape: tuple[int, ...] = (64, 96),
    blocks: Any = ((-1, 32),),
    contracting: tuple[int, ...] = (1,),
    num_batch: int = 0,
    lhs_format: BlockFormat | None = None,
) -> PackCall:
    kept = tuple(axis for axis in range(num_batch, len(shape)) if axis not in contracting)
    axes = Axes(tuple(range(num_batch)), kept, contracting)
    weights = OperandType(shape=shape, axes=axes, format=format)
    return PackCall(weights=weights, blocks=blocks, lhs_format=lhs_format)


def with_lhs(call: Any, **changes: Any) -> Any:
    return dataclasses.replace(call, lhs=dataclasses.replace(call.lhs, **changes))


FLOAT16 = jnp.dtype("float16")
ON_HOPPER: list[Call] = [
    dense(rhs=MXFP8_E4M3, dtype="float16", out_dtype="float16"),
    dense(lhs=MXFP8_E5M2, rhs=None),
    dense(lhs=MXFP4, rhs=MXINT8),
    dense(lhs=NVFP4, rhs=formats.NVFP4_ONE_LEVEL),
    dense(rhs=MXFP4.with_block(48)),
    dense(k=(3, 64), rhs_k_first=True),
    dense(m=(0,)),
    pack(),
    pack(shape=(2, 96, 4, 8), blocks=((-3, 32),), num_batch=1),
    groups(),
    groups(lhs=MXFP8_E4M3, rhs_k_first=False, out_dtype="float16"),
    sums(MXFP4, MXFP8_E4M3),
    sums(None, NVFP4),
    sums(MXFP4.with_block(WHOLE), MXFP4),
]
ACCEPTED: list[tuple[Call, Target]] = [
    *((call, H200) for call in ON_HOPPER),
    *(
        (dense(), Target(platform="cuda", compute_capability=capability))
        for row in architecture.ARCHITECTURES
        for capability in row.capabilities
    ),
    (pack(lhs_format=MXFP4), B200),
    (pack(MXINT8), B200),
    (groups(MXFP8_E5M2, lhs=MXFP8_E4M3), B200),
    (groups(NVFP4, lhs=NVFP4), B200),
]


@pytest.mark.parametrize(("call", "target"), ACCEPTED)
def test_takes(call: Call, target: Target):
    assert PALLAS_GPU.rejects(call, target) is None


REJECTED_ON_HOPPER: list[tuple[Call, str]] = [
    (dense(rhs=None), f"{NO_WEIGHTS}is in high precision; rhs is in high precision"),
    (dense(rhs=FNUZ), f"{NO_WEIGHTS}is in high precision; rhs is mxfp8_e4m3"),
    (dense(rhs=MXFP4.with_block(8)), "rhs has blocks (1, 8), not (1, a multiple of 16)"),
    (dense(rhs=formats.MXFP4_2D), "rhs has blocks (32, 32), not (1, a multiple of 16)"),
    (dense(dtype="float32"), "activations in bfloat16 or float16, got lhs in float32"),
    (dense(lhs=MXFP4, rhs=None, dtype="float32"), "got rhs in float32"),
    (dense(lhs=ROWWISE), "needs values that bfloat16 holds on both sides, got lhs=float8"),
    (dense(out_dtype="float64"), "gives float32, bfloat16 or float16, got out_dtype=flo"),
    (dense(k=(2, 40)), "whole blocks of 32, got rhs_shape=(7, 2, 40), contracting=(1, 2)"),
    (dense(m=(2**20,), k=(2**11,)), "at most 2147483647 elements, got lhs_shape=(104857"),
    (dense(n=(65535 * 64 + 1,), k=(32,)), "at most 4194240 rows, got rhs_shape=(4194241,"),
    (pack(formats.MXFP4_2D, blocks=((-2, 32), (-1, 32))), "packs blocks along one"),
    (pack(ROWWISE, blocks=((-1, WHOLE),)), "packs blocks that end, got"),
    (pack(blocks=((-1, 8),)), "has blocks (1, 8), not (1, a multiple of 16)"),
    (pack(blocks=((-2, 32),)), "packs blocks along the last contracted axis, got"),
    (pack(shape=(8, 96, 4), blocks=((-2, 32),)), "axes before or after all kept"),
    (pack(shape=(3, 40, 8), blocks=((-2, 32),), contracting=(0, 1)), "whole blocks"),
    (pack(shape=(0, 96)), "packs weights that have elements, got shape=(0, 96)"),
    (with_lhs(groups(), dtype=FLOAT16), "needs rows in bfloat16, got lhs in float16"),
    (groups(None, lhs=MXFP4), "groups' matrices in a block format: rhs is in high prec"),
    (groups(out_dtype="float64"), "gives float32, bfloat16 or float16, got out_dtype=flo"),
    (
        dataclasses.replace(groups(), rhs=dataclasses.replace(groups().rhs, scale_axes=(1,))),
        "got one for each position of axes=() of lhs, axes=(1,) of rhs",
    ),
    (groups(rows=2**20, k=2**11), "2147483647 elements, got lhs_shape=(1048576,"),
    (groups(sizes=(0,) * 2**11, k=2**13, n=2**11), "at most 2147483647 words of codes, go"),
    (groups(n=2**22, k=32, sizes=(1,)), "at most 4194240 columns of a matrix"),
    (with_lhs(sums(None, MXFP4), dtype=FLOAT16), "rows in bfloat16, got lhs in float16"),
    (sums(MXFP4, ROWWISE), "needs values that bfloat16 holds on both sides, got rhs=flo"),
    (sums(MXFP4.with_block(8), MXFP4.with_block(24)), "multiple of 16 rows, got blocks=[8"),
    (sums(MXFP4, MXFP4, k=2**27), "at most 2147483647 elements, got lhs_shape=(32,"),
    (with_lhs(sums(MXFP4, MXFP4), scale_axes=(1,)), "one tensor scale at most, got lhs wi"),
]
REJECTED: list[tuple[Call, Target, str]] = [
    *((call, H200, reason) for call, reason in REJECTED_ON_HOPPER),
    (dense(), CPU, "runs on platform=cuda, got platform=cpu"),
    (dense(), Target(platform="cuda"), f"has kernels for CUDA compute capability {KNOWN}, got N"),
    (pack(), TURING, f"has kernels for CUDA compute capability {KNOWN}, got 7.5"),
    (groups(), A100, "rows in groups on CUDA compute capability 9.0, 10.0, 10.3, 11.0, got 8.0"),
    (groups(), B200, f"{WHERE_FORMATS_MEET}None, rhs=mxfp4"),
    (sums(MXFP8_E4M3, MXFP8_E4M3), B200, "sums over rows of groups on CUDA compute capability 9"),
]


@pytest.mark.parametrize(("call", "target", "reason"), REJECTED)
def test_rejects(call: Call, target: Target, reason: str):
    assert reason in str(PALLAS_GPU.rejects(call, target))


def test_needs_a_jax_that_compiles_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(architecture, "MIN_JAX", (99, 1))
    got = ".".join(map(str, jax.__version_info__))
    for call in (dense(), groups(), pack()):
        assert PALLAS_GPU.rejects(call, H200) == f"needs jax>=99.1, got jax=={got}"


def test_jit_does_not_split_a_kernel():
    """Below a shard_map the number of devices is one; packing is plain JAX."""
    eight = dataclasses.replace(H200, num_devices=8)
    assert str(PALLAS_GPU.rejects(dense(), eight)).startswith(
        "runs on one device or below jax.shard_map: jit does not split a kernel, got num_devices=8"
    )
    assert PALLAS_GPU.rejects(pack(), eight) is None
