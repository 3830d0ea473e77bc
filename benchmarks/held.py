"""XLA held to AVX2, so that float32 runs as on a processor that has no more.

Without it, `MX_JAX_CPU_ISA=avx2` on a machine with AVX-512 compares kernels of 256 bits with dots
of 512. XLA's compiler has a flag. Its library of products, YNNPACK, has none: the set that it
detected lies in a variable, whose bits above AVX2 are cleared here, by the address that `nm` tells.
"""

import ctypes
import os
import subprocess
from pathlib import Path

ISA = "MX_JAX_CPU_ISA"
FLAG = "--xla_cpu_max_isa=AVX2"
# Of YNNPACK's flags: from SSE2 to AVX2 with FMA and F16C.
_UP_TO_AVX2 = 0xFF
_DETECTED = "ynn::get_supported_arch_flags()::flags"


def hold() -> None:
    """Hold this process, in which JAX has not computed yet, if the library is held.

    Raises:
      SystemExit: where jaxlib has no such variable, or there is no `nm`.
    """
    cpuinfo = Path("/proc/cpuinfo")
    has_more = cpuinfo.exists() and "avx512f" in cpuinfo.read_text()
    if not has_more or not os.environ.get(ISA, "").startswith("avx2"):
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
    import jax
    import jax.numpy as jnp
    import jaxlib

    # The first product detects.
    ones = jnp.ones((64, 64))
    jax.block_until_ready(jax.jit(jnp.dot)(ones, ones))
    path = str(Path(jaxlib.__file__).resolve().parent / "libjax_common.so")
    flags = ctypes.c_uint64.from_address(_base(path) + _offset(path))
    flags.value &= _UP_TO_AVX2


def _base(path: str) -> int:
    """Where the library begins in memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            return int(line.split("-")[0], 16)
    raise SystemExit(f"benchmarks: {path} is not loaded, so XLA cannot be held to AVX2")


def _offset(path: str) -> int:
    """Where the variable lies in the library."""
    try:
        names = subprocess.run(
            ["nm", "-C", path], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"benchmarks: XLA cannot be held to AVX2 without nm: {error}") from None
    for line in names.splitlines():
        if line.endswith(f" {_DETECTED}") and "guard variable" not in line:
            return int(line.split()[0], 16)
    raise SystemExit(f"benchmarks: {path} has no {_DETECTED}, so XLA cannot be held to AVX2")
