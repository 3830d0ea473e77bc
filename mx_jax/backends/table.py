"""The backends, in order of preference. The only list: adding one is one file and one line."""

from mx_jax.backends.base import Backend
from mx_jax.backends.cpu_ffi import CpuFfiBackend
from mx_jax.backends.pallas_gpu import PallasGpuBackend
from mx_jax.backends.reference import ReferenceBackend
from mx_jax.backends.xla import XlaBackend

# The GPU kernel stands behind the reference, which takes everything, until it has been measured on
# hardware: only `only_backend("pallas_gpu")` reaches it. Its place is the first.
BACKENDS: tuple[Backend, ...] = (
    XlaBackend(),
    CpuFfiBackend(),
    ReferenceBackend(),
    PallasGpuBackend(),
)
