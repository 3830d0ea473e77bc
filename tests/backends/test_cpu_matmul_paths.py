"""Every instruction set, forced in a process of its own; and weights packed ahead of time."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends.cpu_ffi import CpuFfiBackend, library, weights
from mx_jax.mxarray import MXArray
from mx_jax.testing.backend_suite import exact_values
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal

ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
FORMATS = (*formats.MX_FORMATS, formats.NVFP4)

pytestmark = pytest.mark.skipif(
    isinstance(library.load(), str), reason=f"no CPU library: {library.load()}"
)

# Prints a digest of integer products, which no instruction set may change.
SCRIPT = """
import hashlib
import numpy as np
from mx_jax import formats
from mx_jax.backends.cpu_ffi import CpuFfiBackend, library
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase

assert not isinstance(library.load(), str), library.load()
backend, digest = CpuFfiBackend(), hashlib.sha256()
shapes = [dict(m=(1,), n=(33,), k=(100,)), dict(m=(70,), n=(40,), k=(530,))]
shapes[1] |= dict(lhs_k_first=True, rhs_k_first=True)
pairs = [(f, f) for f in (*formats.MX_FORMATS, formats.NVFP4)]
pairs += [(None, formats.MXFP4), (None, formats.MXFP8_E5M2)]
pairs += [(formats.MXFP8_E4M3, formats.MXFP4), (formats.MXINT8, formats.MXFP6_E3M2)]
for index, (lhs, rhs) in enumerate(pairs):
    for shape in shapes if index % 3 == 0 else shapes[1:]:
        case = MatmulCase(lhs=lhs, rhs=rhs, **shape)
        check_matmul(backend, case)
        if None in (lhs, rhs) or "e4m3" in lhs.name or "e5m2" in lhs.name:
            continue
        left, right = case.operands(np.random.default_rng(0))
        digest.update(np.asarray(backend.scaled_matmul(left, right, case.call)).tobytes())
print(library.load().isa, digest.hexdigest())
"""


def run(isa: str) -> list[str]:
    environment = os.environ | {library.ISA_VARIABLE: isa, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_every_instruction_set():
    loaded = library.load()
    assert not isinstance(loaded, str)
    here = ISAS[: ISAS.index(loaded.detected_isa) + 1]
    found = [run(isa) for isa in here]
    assert [isa for isa, _ in found] == list(here)
    assert len({digest for _, digest in found}) == 1, found


# Packed weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k_first", [False, True], ids=["n_k", "k_n"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_packed_weights_give_the_same_bits(format, k_first: bool):
    backend = CpuFfiBackend()
    for lhs, m, n, k in ((None, 1, 33, 100), (format, 7, 70, 40)):
        case = MatmulCase(lhs=lhs, rhs=format, m=(m,), n=(n,), k=(k,), rhs_k_first=k_first)
        left, right = case.operands(np.random.default_rng(m))
        assert isinstance(right, MXArray)
        packed = weights.pack_weights(right)
        expected = backend.scaled_matmul(left, right, case.call)
        assert_bitwise_equal(weights.packed_matmul(left, packed), expected, what="product")
        plain = right.T if k_first else right
        again = packed.unpack()
        assert_bitwise_equal(again.codes, plain.codes, what="codes")
        assert_bitwise_equal(exact_values(again), exact_values(plain), what="values")
        assert (again.format, again.blocks) == (plain.format, plain.blocks)


def test_packed_weights_take_half_a_byte_a_code():
    x = mx_jax.quantize(np.ones((64, 96), np.float32), "mxfp4")
    # And for each 32 rows, scales padded to 64 bytes and as many that sum the panel up.
    assert weights.pack_weights(x).nbytes == 64 * 96 // 2 + 64 * 96 // 32 + 2 * 32 + 2 * 64


@pytest.mark.parametrize("lhs", ["float32", "bfloat16", "same"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_packed_panels_of_any_kind(format, lhs: str):
    """Ordinary panels beside one of any codes and one of extreme scales: as 70 rows have them."""
    rng = np.random.default_rng(3)
    case = MatmulCase(lhs=format, rhs=format, m=(70,), n=(170,), k=(600,))
    left, right = case.operands(rng)
    assert isinstance(right, MXArray) and isinstance(left, MXArray)
    codes, scales = np.array(right.codes), np.array(right.scales)
    codes[32:64] = rng.integers(0, 2**format.element.bits, codes[32:64].shape)
    scales[96:128] = rng.integers(0, 256, scales[96:128].shape)
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    right = dataclasses.replace(right, codes=codes, scales=scales)
    rows = left if lhs == "same" else left.dequantize(lhs)
    packed, backend = weights.pack_weights(right), CpuFfiBackend()
    call = dataclasses.replace(case.call, lhs_format=format if lhs == "same" else None)
    many = backend.scaled_matmul(rows, right, call)
    for m in (1, 2, 4, 6, 8, 9, 16, 40):
        assert_bitwise_equal(weights.packed_matmul(rows[:m], packed), many[:m], what=f"{m} rows")


def test_packed_weights_under_vmap_and_jit():
    rng = np.random.default_rng(1)
    w, x = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((40, 64), (3, 5, 64)))
    packed = weights.pack_weights(mx_jax.quantize(w, "mxfp4"))
    mapped = jax.jit(jax.vmap(weights.packed_matmul, in_axes=(0, None)))
    assert mapped.lower(x, packed).as_text().count(f"@{weights.MATMUL_TARGET}(") == 1
    assert_bitwise_equal(mapped(x, packed), weights.packed_matmul(x, packed), what="product")


def test_packed_weights_refuse_what_does_not_fit():
    x = mx_jax.quantize(np.ones((64, 96), np.float32), "mxfp4")
    packed = weights.pack_weights(x)
    with pytest.raises(ValueError, match=r"lhs must be \[\*batch, m, k\].*lhs.shape=\(3, 64\)"):
        weights.packed_matmul(jnp.ones((3, 64)), packed)
    with pytest.raises(ValueError, match="lhs must have blocks of 32 along its last axis"):
        weights.packed_matmul(mx_jax.quantize(np.ones((3, 96), np.float32), "nvfp4"), packed)
    with pytest.raises(ValueError, match=r"packs \[n, k\] or \[k, n\] with blocks along k"):
        weights.pack_weights(mx_jax.quantize(np.ones((2, 64, 96), np.float32), "mxfp4"))
    with pytest.raises(ValueError, match="needs scales in e8m0 or e4m3"):
        weights.pack_weights(mx_jax.quantize(np.ones((64, 96), np.float32), "float8_rowwise_e4m3"))
