"""Which calls the GPU kernel takes, its tiles, and its layout of weights: all without a GPU."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mx_jax
from mx_jax import formats
from mx_jax.backends.base import MatmulCall, Target
from mx_jax.backends.pallas_gpu import PallasGpuBackend, matmul
from mx_jax.backends.pallas_gpu.tuning import TILES, choose
from mx_jax.backends.pallas_gpu.weights import pack
from mx_jax.backends.select import current_target, only_backend, select
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mx_jax.ops import quantize as ops_quantize
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal

H200 = Target(platform="cuda", compute_capability=(9, 0))
NEW = (0, 11, 2)
TAKEN = MatmulCase(lhs=None, rhs=MXFP4, dtype="bfloat16").call
BLOCK_16 = MXFP4.with_block(16)


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
        call_of(k=(3, 64), rhs_k_first=True),
        call_of(m=(0,)),
    ],
)
def test_takes(call: MatmulCall):
    assert matmul.rejects(call, H200, NEW) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            call_of(rhs=None),
            "needs weights in MXFP4 or MXFP8 on one side: lhs is in high precision",
        ),
        (call_of(rhs=formats.NVFP4), "; rhs is nvfp4"),
        (call_of(lhs=formats.MXINT8, rhs=formats.MXFP6_E3M2), "lhs is mxint8; rhs is mxfp6_e3m2"),
        (call_of(rhs=BLOCK_16), r"rhs has blocks \(1, 16\), not \(1, 32\)"),
        (call_of(dtype="float32"), "activations in bfloat16 or float16, got lhs in float32"),
        (dataclasses.replace(TAKEN, lhs_dtype=None), "bfloat16 or float16, got lhs in None"),
        (call_of(lhs=MXFP4, rhs=None, dtype="float32"), "got rhs in float32"),
        (call_of(lhs=formats.NVFP4), "needs e8m0 scales on both sides, got lhs=nvfp4"),
        (call_of(out_dtype="float64"), "gives float32, bfloat16 or float16, got out_dtype=float64"),
        (
            dataclasses.replace(TAKEN, out_sharding=PartitionSpec("x")),
            "takes no out_sharding, got out_sharding=P",
        ),
        (
            call_of(k=(2, 40)),
            r"whole blocks of 32, got rhs_shape=\(7, 2, 40\), contracting=\(1, 2\)",
        ),
        (call_of(m=(2**20,), k=(2**11,)), r"at most 2147483647 elements, got lhs_shape=\(1048576,"),
        (call_of(n=(65535 * 128 + 1,), k=(32,)), r"at most 8388480 rows, got rhs_shape=\(8388481,"),
    ],
)
def test_rejects_a_call(call: MatmulCall, reason: str):
    found = matmul.rejects(call, H200, NEW)
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


@pytest.mark.parametrize(
    ("target", "version", "reason"),
    [
        (Target(platform="cpu"), NEW, "runs on platform=cuda, got platform=cpu"),
        (Target(platform="rocm"), NEW, "runs on platform=cuda, got platform=rocm"),
        (Target(platform="cuda"), NEW, "has kernels for CUDA compute capability 9.0, got None"),
        (
            Target(platform="cuda", compute_capability=(8, 0)),
            NEW,
            "has kernels for CUDA compute capability 9.0, got 8.0",
        ),
        (
            Target(platform="cuda", compute_capability=(10, 0)),
            NEW,
            "has kernels for CUDA compute capability 9.0, got 10.0",
        ),
        (H200, (0, 10, 2), "needs jax>=0.11.2, got jax==0.10.2"),
        (H200, (0, 11, 2), None),
        (H200, (0, 12, 0), None),
    ],
)
def test_rejects_a_machine(target: Target, version: tuple[int, ...], reason: str | None):
    assert matmul.rejects(TAKEN, target, version) == reason


def test_casts_are_left_to_others():
    x = mx_jax.quantize(jnp.ones(32), "mxfp4")
    with only_backend("pallas_gpu"), pytest.raises(ValueError, match="pallas_gpu: quantizes noth"):
        mx_jax.quantize(jnp.ones(32), "mxfp4")
    with only_backend("pallas_gpu"), pytest.raises(ValueError, match="pallas_gpu: dequantizes "):
        ops_quantize.dequantize(x, jnp.float32)


def test_ops_tell_it_the_dtype_of_activations():
    x, w = jnp.ones((1, 32)), mx_jax.quantize(jnp.ones((32, 4)), "mxfp4", axis=0)
    recipe = mx_jax.recipes.weight_only("mxfp4")
    with only_backend("pallas_gpu"), pytest.raises(ValueError, match=r"lhs_dtype=dtype.'float32'"):
        mx_jax.matmul(x, w, recipe=recipe)


@pytest.mark.skipif(jax.__version_info__ < NEW, reason="rejected below jax 0.11.2")
def test_only_who_asks_gets_it():
    assert select(TAKEN, H200).backend.name == "reference"
    with only_backend("pallas_gpu"):
        assert select(TAKEN, H200).backend == PallasGpuBackend()


def test_importing_the_library_does_not_import_mosaic():
    mosaic, kernel = "jax.experimental.pallas.mosaic_gpu", "mx_jax.backends.pallas_gpu.kernel_sm90"
    code = f"import sys, mx_jax; print({mosaic!r} in sys.modules, {kernel!r} in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("version", ["PJRT C API\nrocm 60300", "PJRT C API\ncuda 13000"])
def test_jax_calls_both_kinds_gpu(version: str, monkeypatch: pytest.MonkeyPatch):
    class Client:
        platform_version = version

    class Device:
        client = Client()
        compute_capability = "9.0" if "cuda" in version else "gfx942"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert current_target(1) == (H200 if "cuda" in version else Target(platform="rocm"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 130, 160)])
@pytest.mark.parametrize("format", [MXFP4, MXFP8_E5M2], ids=lambda format: format.name)
def test_packing_round_trips(
    format: formats.BlockFormat, shape: tuple[int, int, int], rng: np.random.Generator
):
    batch, n, k = shape
    codes = rng.integers(0, 1 << format.element.bits, shape).astype(np.uint8)
    scales = rng.integers(0, 256, (batch, n, -(-k // 32))).astype(np.uint8)
    packed = pack(jnp.asarray(codes), jnp.asarray(scales), format, jnp.dtype("bfloat16"))
    unpacked = packed.unpack()
    assert_bitwise_equal(unpacked.codes, codes, what="codes")
    assert_bitwise_equal(unpacked.scales, scales, what="scales")
    padded_n, padded_k = -(-n // 128) * 128, -(-k // 128) * 128
    assert packed.nbytes == batch * padded_n * padded_k * format.bits_per_element / 8


def test_packing_is_what_its_docstring_says():
    codes = np.arange(128, dtype=np.uint8).reshape(1, 1, 128) % 16
    packed = pack(jnp.asarray(codes), jnp.ones((1, 1, 4), jnp.uint8), MXFP4, jnp.dtype("float32"))
    for byte in (0, 1, 31, 32, 63):
        group, column = divmod(byte, 32)
        low, high = codes[0, 0, 64 * group + column], codes[0, 0, 64 * group + 32 + column]
        assert packed.codes[0, 0, byte] == low | high << 4
    np.testing.assert_array_equal(packed.scales[0, :, 0], [1, 1, 1, 1])
    np.testing.assert_array_equal(packed.scales[0, :, 1:], 127)


# What a Hopper block may ask for, a KiB left for barriers.
SHARED_MEMORY = 227 * 1024 - 1024


@pytest.mark.parametrize(("key", "bucket"), [(k, i) for k in TILES for i in range(len(TILES[k]))])
def test_tiles_fit(key: tuple[str, int], bucket: int):
    limit, tiles = TILES[key][bucket]
    assert tiles.m % 8 == 0 and tiles.m <= limit and tiles.k % 128 == 0 and tiles.warpgroups == 2
    # A swizzled tile of 8 rows starts at a multiple of 512 bytes, or wider.
    assert tiles.shared_memory(key[1], out_bytes=4) <= SHARED_MEMORY
    assert [limit for limit, _ in TILES[key]] == sorted(limit for limit, _ in TILES[key])


@pytest.mark.parametrize(
    ("m", "n", "k", "tile_m", "splits"),
    [
        (1, 8192, 8192, 8, 4),
        (64, 8192, 8192, 64, 4),
        (65, 8192, 8192, 128, 4),
        (4096, 8192, 8192, 128, 1),
        (1, 128, 128, 8, 1),
        (1, 128, 128 * 7, 8, 1),
    ],
)
def test_choice(m: int, n: int, k: int, tile_m: int, splits: int):
    tiles = choose("sm90", 8, batch=1, m=m, n=n, k=k)
    assert (tiles.m, tiles.splits) == (tile_m, splits)
    assert k % (tiles.k * tiles.splits) == 0


def test_every_choice_divides_k():
    for k in range(128, 128 * 40, 128):
        for bits in (4, 8):
            tiles = choose("sm90", bits, batch=1, m=3, n=256, k=k)
            assert k % (tiles.k * tiles.splits) == 0
