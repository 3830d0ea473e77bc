"""Bounds that the CPU benchmarks measure beside kernels: a copy of the same bytes, a core's peaks.

Their handlers are C++ and serve nothing else, so that no wheel has them. In a checkout:

    cmake -S custom_calls -B build && cmake --build build --target limits
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.cpu_ffi import library

# The library's path; without it, `build/` is where it lies.
VARIABLE = "MX_JAX_LIMITS_LIBRARY"
BUILD = "cmake -S custom_calls -B build && cmake --build build --target limits"
# Products of an instruction; "256": on registers of 256 bits.
PEAKS = {"fma256": 8, "maddubs256": 32, "vnni256": 32, "fma": 16, "vnni": 64, "bf16": 32}
PEAK_ROUNDS = 1_500_000
# By instruction set, how many of them it has.
_PEAKS_OF = {"avx2": 2, "avx2_vnni": 3, "avx512": 4, "avx512_vnni": 5, "avx512_bf16": 6}


@functools.cache
def load() -> library.Library:
    """The library with its handlers registered; ends the benchmark where it is not built."""
    default = Path(__file__).parents[1] / "build" / "limits.so"
    path = Path(os.environ.get(VARIABLE) or default)
    loaded = library.register(path)
    if isinstance(loaded, str):
        raise SystemExit(f"benchmarks: {path} {loaded}; `{BUILD}` builds it")
    return loaded


def copy(num_read: int, num_written: int) -> Callable[[jax.Array], jax.Array]:
    """A function of `num_read` bytes that reads them all and writes `num_written`."""
    load()
    result = jax.ShapeDtypeStruct((num_written,), jnp.uint8)
    return lambda data: jax.ffi.ffi_call("mx_jax_cpu_traffic", result)(data)


def peaks() -> dict[str, Callable[[], Any]]:
    """By instruction of this machine: PEAK_ROUNDS times twelve of them, as one call."""
    result = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = jax.ffi.ffi_call("mx_jax_cpu_peak", result)

    def peak(instruction: str) -> Callable[[], Any]:
        return jax.jit(lambda: call(instruction=instruction, rounds=np.int64(PEAK_ROUNDS)))

    return {name: peak(name) for name in [*PEAKS][: _PEAKS_OF.get(load().detected_isa, 0)]}
