"""Every instruction set, forced in a process of its own."""

import os
import subprocess
import sys

import pytest

from mx_jax import formats
from mx_jax.backends.cpu_ffi import library
from tests.needs import needs_library

ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
FORMATS = (*formats.MX_FORMATS, formats.NVFP4)

pytestmark = needs_library


# Prints a digest of integer products, which no instruction set may change.
SCRIPT = """
import hashlib
import numpy as np
from mx_jax import formats
from mx_jax.backends.cpu_ffi import CPU_FFI, library
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase

assert not isinstance(library.load(), str), library.load()
backend, digest = CPU_FFI, hashlib.sha256()
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
        digest.update(np.asarray(backend.run(case.call, left, right)).tobytes())
print(library.load().isa, digest.hexdigest())
"""


def run(isa: str) -> list[str]:
    environment = os.environ | {library.ISA_VARIABLE: isa, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.slow
def test_every_instruction_set():
    loaded = library.load()
    assert not isinstance(loaded, str)
    here = ISAS[: ISAS.index(loaded.detected_isa) + 1]
    found = [run(isa) for isa in here]
    assert [isa for isa, _ in found] == list(here)
    assert len({digest for _, digest in found}) == 1, found
