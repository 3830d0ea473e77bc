"""Which calls the GPU kernels take, and why not others: from descriptions, without a GPU."""

import dataclasses
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.axes import Axes
from mx_jax.backends.calls import Call, MatmulCall, OperandType, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, tiles
from mx_jax.backends.select import only_backend, prefer_backends, select
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXINT8, NVFP4, WHOLE, BlockFormat
from mx_jax.ops import quantize as ops_quantize
from mx_jax.testing.cases import MatmulCase, RaggedCase
from tests.backends.mosaic import with_any_jax

CPU, A100, H200, B200 = (
    Target(platform="cpu"),
    *(
        Target(platform="cuda", compute_capability=capability)
        for capability in ((8, 0), (9, 0), (10, 0))
    ),
)
ROWWISE = formats.FLOAT8_ROWWISE_E4M3
FNUZ = dataclasses.replace(MXFP8_E4M3, element=formats.E4M3FNUZ)
KERNEL = "has a kernel for CUDA compute capability 9.0, got "
NOT_PACKED = "by weights that mx_jax.pack_weights laid out for it, got rhs="


@pytest.fixture(autouse=True)
def any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    with_any_jax(monkeypatch)


def by_packed(call: Any, by: str | None = "pallas_gpu", **changes: Any) -> Any:
    return dataclasses.replace(
        call, rhs=dataclasses.replace(call.rhs, packed_by=by, scale_axes=(), **changes)
    )


def dense(by: str | None = "pallas_gpu", **facts: Any) -> MatmulCall:
    return by_packed(
        MatmulCase(**{"lhs": None, "rhs": MXFP4, "dtype": "bfloat16"} | facts).call, by
    )


def groups(
    rhs: BlockFormat | None = MXFP4, by: str | None = "pallas_gpu", **facts: Any
) -> RaggedCall:
    usual: dict[str, Any] = {"lhs": None, "sizes": (0, 1, 7, 0, 13), "rows": 24, "n": 64}
    return by_packed(RaggedCase(rhs=rhs, **usual | facts).call, by)


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
    dense(rhs=MXFP8_E4M3, out_dtype="float16"),
    dense(lhs=MXFP4, rhs=MXINT8),
    dense(lhs=NVFP4, rhs=formats.NVFP4_ONE_LEVEL),
    dense(rhs=MXFP4.with_block(48)),
    dense(k=(3, 64), rhs_k_first=True),
    dense(m=(0,)),
    pack(),
    pack(shape=(2, 96, 4, 8), blocks=((-3, 32),), num_batch=1),
    groups(),
    groups(lhs=MXFP8_E4M3, rhs_k_first=False, out_dtype="float16"),
]
ACCEPTED: list[tuple[Call, Target]] = [
    *((call, H200) for call in ON_HOPPER),
    (pack(MXINT8, lhs_format=MXFP4), H200),
]


@pytest.mark.parametrize(("call", "target"), ACCEPTED)
def test_takes(call: Call, target: Target):
    assert PALLAS_GPU.rejects(call, target) is None


REJECTED_ON_HOPPER: list[tuple[Call, str]] = [
    (dense(by=None), f"multiplies {NOT_PACKED}mxfp4, packed_by=None"),
    (dense(by="cpu_ffi"), "got rhs=mxfp4, packed_by=cpu_ffi"),
    (dense(by=None, rhs=None), f"{NOT_PACKED}bfloat16, packed_by=None"),
    (dense(dtype="float32"), "activations in bfloat16, or quantized, got lhs_dtype=float32"),
    (dense(dtype="float16"), "activations in bfloat16, or quantized, got lhs_dtype=float16"),
    (dense(lhs=ROWWISE), "needs values that bfloat16 holds on both sides, got lhs=float8"),
    (dense(out_dtype="float64"), "gives float32, bfloat16 or float16, got out_dtype=flo"),
    (dense(m=jax.export.symbolic_shape("rows")), "needs constant sizes, got shape=(rows"),
    (dense(k=(2, 40)), "whole blocks of 32, got rhs_shape=(7, 2, 40), contracting=(1, 2)"),
    (dense(m=(2**20,), k=(2**11,)), "at most 2147483647 elements, got lhs_shape=(104857"),
    (dense(n=(65535 * 64 + 1,), k=(32,)), "at most 4194240 rows, got rhs_shape=(4194241,"),
    (pack(FNUZ), "packs values that bfloat16 holds, got mxfp8_e4m3"),
    (pack(formats.MXFP4_2D, blocks=((-2, 32), (-1, 32))), "packs blocks along one"),
    (pack(formats.MXFP4_2D), "packs blocks of (1, a multiple of 16), got (32, 32)"),
    (pack(ROWWISE, blocks=((-1, WHOLE),)), "packs blocks that end, got"),
    (pack(blocks=((-1, 8),)), "packs blocks of (1, a multiple of 16), got (1, 8)"),
    (pack(blocks=((-2, 32),)), "packs blocks along the last contracted axis, got"),
    (pack(shape=(8, 96, 4), blocks=((-2, 32),)), "axes before or after all kept"),
    (pack(shape=(3, 40, 8), blocks=((-2, 32),), contracting=(0, 1)), "whole blocks"),
    (pack(shape=(0, 96)), "packs weights that have elements, got shape=(0, 96)"),
    (with_lhs(groups(), dtype=FLOAT16), "or quantized, got lhs_dtype=float16"),
    (groups(by=None), f"{NOT_PACKED}mxfp4, packed_by=None"),
    (groups(by=None, contracts_rows=True, lhs=MXFP4), f"{NOT_PACKED}mxfp4, packed_by=None"),
    (groups(out_dtype="float64"), "gives float32, bfloat16 or float16, got out_dtype=flo"),
    (with_lhs(groups(lhs=NVFP4), scale_axes=(0,)), "scale of all rows, got one for each positi"),
    (groups(rows=2**20, k=2**11), "2147483647 elements, got lhs_shape=(1048576,"),
    (groups(sizes=(0,) * 2**11, k=2**13, n=2**11), "at most 2147483647 words of codes, go"),
    (groups(n=2**22, k=32, sizes=(1,)), "at most 4194240 columns of a matrix"),
]
REJECTED: list[tuple[Call, Target, str]] = [
    *((call, H200, reason) for call, reason in REJECTED_ON_HOPPER),
    (dense(), CPU, "runs on platform=cuda, got platform=cpu"),
    (dense(), Target(platform="cuda"), f"{KERNEL}None"),
    (pack(), A100, f"{KERNEL}8.0"),
    (groups(), B200, f"{KERNEL}10.0"),
]


@pytest.mark.parametrize(("call", "target", "reason"), REJECTED)
def test_rejects(call: Call, target: Target, reason: str):
    rejection = PALLAS_GPU.rejects(call, target)
    assert rejection is not None and reason in rejection


def test_needs_a_jax_that_compiles_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "MIN_JAX", (99, 1))
    got = ".".join(map(str, jax.__version_info__))
    for call in (dense(), groups(), pack()):
        assert PALLAS_GPU.rejects(call, H200) == f"needs jax>=99.1, got jax=={got}"


def test_jit_does_not_split_a_kernel():
    """Below a shard_map the number of devices is one; packing is plain JAX."""
    eight = dataclasses.replace(H200, num_devices=8)
    rejection = PALLAS_GPU.rejects(dense(), eight)
    assert rejection is not None and rejection.startswith(
        "runs on one device or below jax.shard_map: jit does not split a kernel, got num_devices=8"
    )
    for target in (H200, eight):
        with prefer_backends("pallas_gpu"):
            accepted = select(dense(), target).backend == PALLAS_GPU
        assert accepted == (target == H200)
    assert PALLAS_GPU.rejects(pack(), eight) is None


def test_as_ops_ask_it():
    """Casts are left to others; the dtype of activations is told."""
    x = mx_jax.quantize(jnp.ones(32), "mxfp4")
    w = mx_jax.quantize(jnp.ones((32, 4)), "mxfp4", axis=0)
    recipe = mx_jax.recipes.weight_only("mxfp4")
    with only_backend("pallas_gpu"):
        with pytest.raises(ValueError, match="pallas_gpu: does not cast"):
            mx_jax.quantize(jnp.ones(32), "mxfp4")
        with pytest.raises(ValueError, match="pallas_gpu: does not dequantize"):
            ops_quantize.dequantize(x, jnp.float32)
        with pytest.raises(ValueError, match=r"dtype=dtype.'float32'"):
            mx_jax.matmul(jnp.ones((1, 32)), w, recipe=recipe)
