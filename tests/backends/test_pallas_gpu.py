"""Which calls the GPU kernel takes, its tiles, and its layout of weights: all without a GPU."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.axes import Axes
from mx_jax.backends.calls import MatmulCall, OperandType, PackCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, products, rejections
from mx_jax.backends.pallas_gpu.architecture import capabilities
from mx_jax.backends.pallas_gpu.layouts import (
    SLOTS,
    PackedWeights,
    codes_in_group,
    codes_of,
    stored_bits,
    words_of,
)
from mx_jax.backends.select import only_backend, prefer_backends, select
from mx_jax.backends.target import Target
from mx_jax.formats import (
    MXFP4,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
)
from mx_jax.mxarray import MXArray
from mx_jax.ops import quantize as ops_quantize
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import mostly_slow, with_any_jax

H200 = Target(platform="cuda", compute_capability=(9, 0))
NEW = (0, 11, 2)
TAKEN = MatmulCase(lhs=None, rhs=MXFP4, dtype="bfloat16").call
UNKNOWN = dataclasses.replace(TAKEN.lhs, dtype=None)
BLOCK_8 = MXFP4.with_block(8)
ROWWISE = formats.FLOAT8_ROWWISE_E4M3


def call_of(**facts: Any) -> MatmulCall:
    return MatmulCase(**{"lhs": None, "rhs": MXFP4, "dtype": "bfloat16"} | facts).call


@pytest.mark.parametrize(
    "call",
    [
        TAKEN,
        call_of(rhs=MXFP8_E4M3, dtype="float16", out_dtype="float16"),
        call_of(lhs=MXFP8_E5M2, rhs=None),
        call_of(lhs=formats.MXFP6_E2M3),
        call_of(lhs=MXFP4, rhs=formats.MXINT8),
        call_of(rhs=formats.MXFP6_E3M2),
        call_of(rhs=formats.NVFP4),
        call_of(lhs=formats.NVFP4, rhs=formats.NVFP4_ONE_LEVEL),
        call_of(rhs=MXFP4.with_block(48)),
        call_of(k=(3, 64), rhs_k_first=True),
        call_of(m=(0,)),
    ],
)
def test_takes(call: MatmulCall):
    assert rejections.rejects(call, H200, NEW) is None


def test_jit_does_not_split_a_kernel(monkeypatch: pytest.MonkeyPatch):
    """Below a shard_map the number of devices is one; packing is plain JAX."""
    with_any_jax(monkeypatch)
    eight = dataclasses.replace(H200, num_devices=8)
    cast = QuantizeCase(format=MXFP4, shape=(64, 64)).call
    for call in (TAKEN, cast):
        assert PALLAS_GPU.rejects(call, H200) is None
        found = PALLAS_GPU.rejects(call, eight)
        assert found is not None and found.startswith(
            "runs on one device or below jax.shard_map: jit does not split a kernel, got "
            "num_devices=8"
        )
    for target in (H200, eight):
        with prefer_backends("pallas_gpu"):
            taken = select(TAKEN, target).backend == PALLAS_GPU
        assert taken == (target == H200)
    pack = PackCall(weights=TAKEN.rhs, blocks=((-1, 32),))
    assert PALLAS_GPU.rejects(pack, eight) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            call_of(rhs=None),
            "needs weights in a block format on one side: lhs is in high precision; rhs is in high",
        ),
        (call_of(lhs=ROWWISE, rhs=ROWWISE), "lhs is float8_rowwise_e4m3; rhs is float8_rowwise"),
        (call_of(rhs=BLOCK_8), r"rhs has blocks \(1, 8\), not \(1, a multiple of 16\)"),
        (call_of(rhs=formats.MXFP4_2D), r"rhs has blocks \(32, 32\), not \(1, a multiple of 16\)"),
        (call_of(dtype="float32"), "activations in bfloat16 or float16, got lhs in float32"),
        (dataclasses.replace(TAKEN, lhs=UNKNOWN), "bfloat16 or float16, got lhs in None"),
        (call_of(lhs=MXFP4, rhs=None, dtype="float32"), "got rhs in float32"),
        (
            call_of(lhs=ROWWISE),
            "needs values that bfloat16 holds on both sides, got lhs=float8_row",
        ),
        (call_of(out_dtype="float64"), "gives float32, bfloat16 or float16, got out_dtype=float64"),
        (
            call_of(k=(2, 40)),
            r"whole blocks of 32, got rhs_shape=\(7, 2, 40\), contracting=\(1, 2\)",
        ),
        (call_of(m=(2**20,), k=(2**11,)), r"at most 2147483647 elements, got lhs_shape=\(1048576,"),
        (call_of(n=(65535 * 64 + 1,), k=(32,)), r"at most 4194240 rows, got rhs_shape=\(4194241,"),
    ],
)
def test_rejects_a_call(call: MatmulCall, reason: str):
    found = rejections.rejects(call, H200, NEW)
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


@pytest.mark.parametrize(
    ("target", "version", "reason"),
    [
        (Target(platform="cpu"), NEW, "runs on platform=cuda, got platform=cpu"),
        (Target(platform="rocm"), NEW, "runs on platform=cuda, got platform=rocm"),
        (
            Target(platform="cuda"),
            NEW,
            "has kernels for CUDA compute capability 8.0, 8.6, 8.7, 8.9, 9.0, "
            "10.0, 10.3, 11.0, 12.0, 12.1, got None",
        ),
        (
            Target(platform="cuda", compute_capability=(7, 5)),
            NEW,
            "has kernels for CUDA compute capability 8.0, 8.6, 8.7, 8.9, 9.0, "
            "10.0, 10.3, 11.0, 12.0, 12.1, got 7.5",
        ),
        (
            Target(platform="cuda", compute_capability=(8, 0)),
            NEW,
            "needs jax>=0.12.0, got jax==0.11.2",
        ),
        *(
            (Target(platform="cuda", compute_capability=capability), (0, 12, 0), None)
            for capability in capabilities()
        ),
        (H200, (0, 10, 2), "needs jax>=0.11.2, got jax==0.10.2"),
        (H200, (0, 11, 2), None),
        (H200, (0, 12, 0), None),
    ],
)
def test_rejects_a_machine(target: Target, version: tuple[int, ...], reason: str | None):
    assert rejections.rejects(TAKEN, target, version) == reason


def pack_of(
    format: formats.BlockFormat = MXFP4,
    shape: tuple[int, ...] = (64, 96),
    blocks: Any = ((-1, 32),),
    contracting: tuple[int, ...] = (1,),
    num_batch: int = 0,
    lhs_format: formats.BlockFormat | None = None,
) -> PackCall:
    kept = tuple(axis for axis in range(num_batch, len(shape)) if axis not in contracting)
    axes = Axes(tuple(range(num_batch)), kept, contracting)
    weights = OperandType(shape=shape, axes=axes, format=format)
    return PackCall(weights=weights, blocks=blocks, lhs_format=lhs_format)


BLACKWELL = Target(platform="cuda", compute_capability=(10, 0))


@pytest.mark.parametrize(
    ("call", "target", "reason"),
    [
        (pack_of(), H200, None),
        (pack_of(shape=(2, 96, 4, 8), blocks=((-3, 32),), num_batch=1), H200, None),
        (pack_of(), Target(platform="cpu"), "runs on platform=cuda, got platform=cpu"),
        (pack_of(), BLACKWELL, None),
        (pack_of(lhs_format=MXFP4), BLACKWELL, None),
        (pack_of(formats.MXINT8), BLACKWELL, None),
        (
            pack_of(formats.MXFP4_2D, blocks=((-2, 32), (-1, 32))),
            H200,
            "packs blocks along one",
        ),
        (pack_of(ROWWISE, blocks=((-1, formats.WHOLE),)), H200, "packs blocks that end, got"),
        (pack_of(blocks=((-1, 8),)), H200, "has blocks (1, 8), not (1, a multiple of 16)"),
        (
            pack_of(blocks=((-2, 32),)),
            H200,
            "packs blocks along the last contracted axis, got",
        ),
        (pack_of(shape=(8, 96, 4), blocks=((-2, 32),)), H200, "axes before or after all kept"),
        (
            pack_of(shape=(3, 40, 8), blocks=((-2, 32),), contracting=(0, 1)),
            H200,
            "whole blocks",
        ),
        (pack_of(shape=(0, 96)), H200, "packs weights that have elements, got shape=(0, 96)"),
    ],
)
def test_packs(call: PackCall, target: Target, reason: str | None):
    found = rejections.rejects_packing(call, target, (0, 12, 0))
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_dequantizing_is_left_to_others():
    x = mx_jax.quantize(jnp.ones(32), "mxfp4")
    with only_backend("pallas_gpu"), pytest.raises(ValueError, match="pallas_gpu: runs on platf"):
        mx_jax.quantize(jnp.ones(32), "mxfp4")
    with only_backend("pallas_gpu"), pytest.raises(ValueError, match="pallas_gpu: dequantizes "):
        ops_quantize.dequantize(x, jnp.float32)


def test_ops_tell_it_the_dtype_of_activations():
    x, w = jnp.ones((1, 32)), mx_jax.quantize(jnp.ones((32, 4)), "mxfp4", axis=0)
    recipe = mx_jax.recipes.weight_only("mxfp4")
    with only_backend("pallas_gpu"), pytest.raises(ValueError, match=r"dtype=dtype.'float32'"):
        mx_jax.matmul(x, w, recipe=recipe)


@pytest.mark.slow
def test_importing_the_library_does_not_import_mosaic():
    mosaic, kernel = (
        "jax.experimental.pallas.mosaic_gpu",
        "mx_jax.backends.pallas_gpu.wgmma",
    )
    code = f"import sys, mx_jax; print({mosaic!r} in sys.modules, {kernel!r} in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]


def test_a_float16_is_two_bfloat16_of_its_sign():
    """Every one: so an infinite weight gives each part's product the same infinity, never NaN."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    parts = products._bfloat16_parts(jnp.asarray(every)[None, :, None])
    assert parts.dtype == jnp.bfloat16 and parts.shape == (1, 2 << 16, 1)
    high, low = np.asarray(parts, np.float64).reshape(2, -1)
    np.testing.assert_array_equal(high + low, every.astype(np.float64))
    known = ~np.isnan(every)
    for part in (high, low):
        np.testing.assert_array_equal(np.sign(part[known]), np.sign(every[known]))


PACKED = (
    *formats.MX_FORMATS,
    formats.NVFP4,
    MXFP4.with_block(48),
    MXFP8_E4M3.with_block(128),
)


def random_weights(
    rng: np.random.Generator, shape: tuple[int, int, int], format: formats.BlockFormat
) -> MXArray:
    """Any code under any scale byte."""
    batch, n, k = shape
    block = format.block[1]
    assert isinstance(block, int)
    return MXArray(
        codes=jnp.asarray(rng.integers(0, 1 << format.element.bits, shape).astype(np.uint8)),
        scales=jnp.asarray(rng.integers(0, 256, (batch, n, -(-k // block))).astype(np.uint8)),
        tensor_scale=jnp.full((1, 1, 1), 0.5) if format.tensor_scale else None,
        format=format,
        blocks=((-1, block),),
        dtype=jnp.dtype("bfloat16"),
    )


@pytest.mark.parametrize("shape", mostly_slow([(1, 1, 1), (2, 130, 160)], (2, 130, 160)))
@pytest.mark.parametrize("format", mostly_slow(PACKED, MXFP4), ids=str)
def test_packing_round_trips(
    format: formats.BlockFormat, shape: tuple[int, int, int], rng: np.random.Generator
):
    weights = random_weights(rng, shape, format)
    packed = jax.jit(PackedWeights.of)(weights)
    unpacked = jax.jit(lambda packed: packed.unpack())(packed)
    assert_bitwise_equal(unpacked.codes, weights.codes, what="codes")
    assert_bitwise_equal(unpacked.scales, weights.scales, what="scales")
    assert unpacked.tensor_scale == weights.tensor_scale


def test_size_of_packed_weights(rng: np.random.Generator):
    known = {MXFP4: 4.5, formats.NVFP4: 5, MXFP8_E4M3: 8.5, formats.MXINT8: 8.5}
    for format, bits in (known | {MXFP6_E3M2: 8.5}).items():
        packed = jax.eval_shape(PackedWeights.of, random_weights(rng, (1, 128, 256), format))
        assert packed.nbytes == 128 * 256 * bits / 8


def test_a_nan_among_the_codes_becomes_its_blocks_scale(rng: np.random.Generator):
    weights = random_weights(rng, (1, 2, 64), MXFP8_E5M2)
    weights = dataclasses.replace(weights, codes=jnp.full((1, 2, 64), 0x7C, jnp.uint8))
    one = jnp.full((1, 2, 2), 127, jnp.uint8)
    weights = dataclasses.replace(weights, codes=weights.codes.at[0, 1, 40].set(0xFD), scales=one)
    halves = np.asarray(jax.jit(lambda w: PackedWeights.of(w).scales)(weights)).view(jnp.bfloat16)
    first, second = halves.astype(np.float32).reshape(2, -1, 64, 2)[0, 0, :2]
    np.testing.assert_array_equal([first, second], [[1, 1], [1, np.nan]])


def test_packing_is_what_its_docstring_says():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256) % 16
    weights = MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.arange(120, 128, dtype=jnp.uint8).reshape(1, 1, 8),
        format=MXFP4,
        blocks=((-1, 32),),
        dtype=jnp.dtype("float32"),
    )
    packed = jax.jit(PackedWeights.of)(weights)
    assert packed.codes.shape == (1, 2, 2, 64, 16)
    for group, thread, pair, lane in np.ndindex(2, 4, 16, 2):
        chunk, t = divmod(pair, 8)
        code = codes[0, 0, 128 * group + 64 * chunk + 8 * t + 2 * thread + lane]
        word, slot = divmod(pair, 4)
        half = int(packed.codes[0, 0, group, 0, 4 * thread + word]) >> 16 * lane
        at = SLOTS[4][slot]
        assert half >> at.magnitude & 7 | (half >> at.sign & 1) << 3 == code
    assert packed.scales.shape == (1, 2, 4, 64)
    for i in range(4):
        first, second = (120 + 2 * i) << 7, (121 + 2 * i) << 7
        assert int(packed.scales[0, 0, i, 0]) == second << 16 | first
    np.testing.assert_array_equal(packed.scales[0, :, :, 1:], 0)


def test_places_for_codes_do_not_overlap():
    for bits, slots in SLOTS.items():
        taken = {slot.magnitude + i for slot in slots for i in range(bits - 1)}
        assert sorted([*taken, *(slot.sign for slot in slots)]) == list(range(16))


@pytest.mark.parametrize("element", [MXFP6_E3M2.element, formats.MXINT8.element], ids=str)
def test_other_widths_take_a_byte(element: formats.ElementFormat):
    assert (stored_bits(element), codes_in_group(element)) == (8, 64)
    codes = jnp.arange(1 << element.bits, dtype=jnp.uint16).reshape(2, -1, 2)
    for code, again in zip(codes, codes_of(words_of(list(codes), element), element), strict=True):
        np.testing.assert_array_equal(again, code)
